"""Finds the rank that caused a failure, which usually is not the one that reported first."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asa.launch.worker import Failure


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended: with a ``result`` or a ``failure``."""

    result: Any = None
    failure: Failure | None = None

    @staticmethod
    def of_exit(code: int | None, backend: str) -> Outcome:
        """Outcome of a process that ended without a report. ``code`` is negative for a signal, as in
        :mod:`subprocess`."""
        if code is not None and code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = "unknown"
            line = f"was killed by signal {-code} ({name})"
            if -code == signal.SIGKILL:
                line += "; if nobody did that on purpose, it ran out of memory"
        else:
            line = f"exited with code {code} before it was done"
        # nccl's watchdog aborts a rank whose peers do not answer.
        return Outcome(
            failure=Failure(
                line=line,
                collective=backend == "nccl" and code == -signal.SIGABRT,
                signal=-code if code is not None and code < 0 else None,
                lost=True,
            )
        )


def culprit(outcomes: Mapping[int, Outcome], num_ranks: int, timeout_s: float) -> tuple[int, Failure] | None:
    """The rank that caused a failure, and how it failed; None if every outcome is a result.

    ``outcomes`` is in order of arrival and may lack ranks. Evidence, strongest first: a rank that died or failed by
    itself; a rank that is silent while others failed waiting for it; the first to fail while waiting.
    """
    failed = {rank: o.failure for rank, o in outcomes.items() if o.failure is not None}
    if not failed:
        return None
    for rank, failure in failed.items():
        if not failure.collective:
            return rank, failure
    victim, complaint = next(iter(failed.items()))
    silent = sorted(set(range(num_ranks)) - set(outcomes))
    if silent:
        line = f"hung: rank {victim} waited for it in vain, up to {timeout_s:g} s (it {complaint.line})"
        return silent[0], Failure(line=line, collective=True, trace=complaint.trace, lost=True)
    return victim, complaint
