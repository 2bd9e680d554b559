"""Memory that training frees and allocates again in every step."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""Parameters of mallopt(3)."""
_NEVER = 2**31 - 1
_PAD_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for the rest of its life; returns whether that was possible (glibc only).

    By default glibc maps every block above 32 MiB anew and unmaps it when freed, so each step faults in the pages of
    its large activations, gradients and gathered weights again: a third of a step of AlexNet on one core. Threads share
    one heap, because that of a thread of its own has at most 64 MiB, and larger blocks would still be mapped anew: all
    messages of a large model to a parameter server. Forked processes inherit the setting. It has no effect on other
    systems, or on GPU memory.
    """
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD_BYTES), (_ARENA_MAX, 1))
        accepted = [bool(mallopt(name, value)) for name, value in settings]
        return all(accepted)
    return False


def give_back_freed_memory() -> None:
    """Collect reference cycles, then return unused memory to the system (glibc's malloc_trim). Call it once after
    tracing: traced modules form cycles, which would keep the weights of a whole model until the next full
    collection."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
