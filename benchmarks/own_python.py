"""How much Python of asa's own a step runs, by a profiler whose own cost is measured and taken off."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import asa


def own_python(step: Callable[[], object]) -> tuple[int, float]:
    """Calls of functions in asa's own files during ``step``, and the seconds spent in their own lines, less what the
    profiler takes for itself (:func:`_cost_of_a_call`). The step by hand has some, too: it takes its samples from the
    same place. What operators on tensors compute (``a * b``, ``a[i]``) counts as Python, so it is on the high side."""
    stats = _profiled(step)
    home = str(Path(asa.__file__).parent)
    within, around = _cost_of_a_call()
    calls, seconds = 0, 0.0
    for (file, _, _), (_, count, own, _, callers) in stats.items():
        if file.startswith(home):
            calls, seconds = calls + count, seconds + own - within * count
        seconds -= around * sum(n for (caller, _, _), (_, n, _, _) in callers.items() if caller.startswith(home))
    return calls, seconds


def _profiled(work: Callable[[], object]) -> dict[Any, Any]:
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    work()
    profile.disable()
    return pstats.Stats(profile).stats  # type: ignore[attr-defined,no-any-return]


@cache
def _cost_of_a_call(calls: int = 4000) -> tuple[float, float]:
    """Seconds by which the profiler makes an empty function's own time longer, and its caller's with every call."""

    def nothing() -> None:
        pass

    def caller() -> None:
        for _ in range(calls):
            nothing()

    start = time.process_time()
    caller()
    plain = time.process_time() - start
    own = {key[2]: value[2] for key, value in _profiled(caller).items()}
    return own["nothing"] / calls, max(0.0, own["caller"] - plain) / calls
