"""Reads of values that ranks hold in parts. They are collective, and a program easily makes one on a single rank (``if
rank == 0: print(p.norm())``), while another is in a collective of its own. Who keeps ranks in step hears of each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

READ = "a read of values that ranks hold in parts"
OF_PROGRAM = "torch.distributed."
"""Beginning of the names of a program's own collectives."""

_around: list[Callable[[str], AbstractContextManager[None]]] = []


def kept_in_step(context: Callable[[str], AbstractContextManager[None]]) -> None:
    """Have every read run in ``context(READ)`` from now on, and every collective of the program in one of its name."""
    _around[:] = [context]


def reading(what: str = READ) -> AbstractContextManager[None]:
    """Context of the collective of a read, or of ``what``."""
    return _around[0](what) if _around else nullcontext()
