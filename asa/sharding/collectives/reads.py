"""Reads of values that ranks hold in parts. They are collective, and a program easily makes one on a single rank (``if
rank == 0: print(p.norm())``). Who keeps ranks in step hears of each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

READ = "a read of values that ranks hold in parts"

_around: list[Callable[[str], AbstractContextManager[None]]] = []


def kept_in_step(context: Callable[[str], AbstractContextManager[None]]) -> None:
    """Have every read run in ``context(READ)`` from now on."""
    _around[:] = [context]


def reading() -> AbstractContextManager[None]:
    """Context of the collective of a read."""
    return _around[0](READ) if _around else nullcontext()
