"""Ranks in separate environments (such as network namespaces), which connect at an address that all can reach, and
those of a launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Environment of ranks. ``enter(rank)`` is called first in a rank's process. ``host``: this process's address as
    ranks see it; ``interface``: network interface of a rank's own address, None for the system's choice."""

    host: str = "127.0.0.1"
    interface: str | None = None
    enter: Callable[[int], None] | None = None


HERE = Environment()
"""The environment of the process that starts the ranks, unchanged."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables of a launcher say that this process is one of several ranks. One of them alone says
    nothing."""
    return "RANK" in environment and "WORLD_SIZE" in environment


_CURRENT: ContextVar[Environment] = ContextVar("environment", default=HERE)


def environment() -> Environment:
    """The environment in which ranks are currently started."""
    return _CURRENT.get()


@contextmanager
def started_in(where: Environment) -> Iterator[None]:
    """Context in which ranks are started in the environment ``where``."""
    token = _CURRENT.set(where)
    try:
        yield
    finally:
        _CURRENT.reset(token)
