"""Ranks that live apart: each in surroundings of its own (a network namespace), meeting at an address all reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """``enter(rank)`` is called first thing in a rank's process. ``host`` is this process's address as ranks see it,
    ``interface`` what a rank's own address is on; None leaves that to the machine."""

    host: str = "127.0.0.1"
    interface: str | None = None
    enter: Callable[[int], None] | None = None


HERE = Surroundings()
"""Side by side with the process that starts them."""

_CURRENT: ContextVar[Surroundings] = ContextVar("surroundings", default=HERE)


def surroundings() -> Surroundings:
    """Where ranks are started now."""
    return _CURRENT.get()


@contextmanager
def apart(where: Surroundings) -> Iterator[None]:
    """Inside, ranks are started ``where``."""
    token = _CURRENT.set(where)
    try:
        yield
    finally:
        _CURRENT.reset(token)
