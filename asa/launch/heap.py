"""Memory that training gives back and takes again at every step."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""
_NEVER = 2**31 - 1
_PAD_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, for as long as it lives; whether that was possible (glibc).

    glibc maps every block above 32 MiB anew and gives it back when freed, so that each step faults in the pages of its
    large activations, gradients and gathered weights again: a third of a step of AlexNet on one core. Processes forked
    from this one do as it does. Nothing changes on other systems, or for memory of a GPU.
    """
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        wanted = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD_BYTES))
        done = [bool(mallopt(name, value)) for name, value in wanted]
        return all(done)
    return False


def give_back_freed_memory() -> None:
    """Return what this process no longer uses to the system (glibc): for once, after work unlike what follows. What
    only refers to itself is looked for first: traced modules do, and would stay, with a whole model's weights, until
    the collector's next full round."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
