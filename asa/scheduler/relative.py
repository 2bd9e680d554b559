"""Comparison of ranks whose shares of the work are known, without a prediction of their times."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asa.ir.measurements import Measurements, Transfer
from asa.ir.plan import Plan
from asa.scheduler.costs import LIKE, STOLEN_SHARE, Costs, own_s
from asa.scheduler.findings import Finding, Ignored, finite, impossible_figures
from asa.scheduler.lasting import Lasting, UsualVariation, disturbed
from asa.scheduler.shape import Message


def shares(plan: Plan) -> tuple[float, ...] | None:
    """Each rank's share of the samples of a step, relative to the mean. None if ranks cannot be compared by it, because
    their work differs clearly, or in an unknown way."""
    if plan.devices is not None or plan.consistency is not None or plan.num_ranks == 1 or len(plan.stages) > 1:
        return None
    fewer, more = divmod(plan.global_batch, plan.num_microbatches)
    microbatches = ((fewer, plan.num_microbatches - more), (fewer + 1, more))
    found = set[tuple[float, ...]]()
    for layout in plan.layouts():
        rows = [
            sum(n * (stop - start) for size, n in microbatches for start, stop in [layout.rows_of(size, rank)])
            for rank in range(plan.num_ranks)
        ]
        found.add(tuple(r * len(rows) / sum(rows) for r in rows))
    one = found.pop()
    return None if found or max(one) > math.exp(LIKE) * min(one) else one


class _Alike:
    """Expected times if all ranks take equally long for a sample; see :class:`asa.scheduler.costs.Promise`."""

    step_s = 1.0

    def __init__(self, own_s: Sequence[float]) -> None:
        self.own_s = own_s

    def message(self, transfer: Transfer) -> Message | None:
        """None: times of transfers are unknown."""
        return None


class Compared:
    """Comparison of ``ranks`` ranks with each other, whose work is proportional to ``shares`` (by default equal);
    remembers what was reported."""

    def __init__(self, ranks: int, shares: Sequence[float] = ()) -> None:
        self._costs, self._alike = Costs(ranks, 0), _Alike(shares or (1.0,) * ranks)
        self._reported = (0.0,) * ranks
        self._lasting, self._variation = Lasting(), UsualVariation()
        self._ignored = Ignored()
        self._stolen: set[int] = set()

    def window(self, measured: Measurements, steps: int) -> list[Finding]:
        """Findings on ranks that are now slower than others, or no longer, after a window of ``steps`` steps."""
        if len(measured.per_rank) < len(self._reported):
            return []
        bad = impossible_figures(measured)
        findings = self._ignored.window(bad)
        if -1 in bad:
            return findings
        measured, steps = finite(measured), max(1, min(steps, measured.step_time.n))
        all_ranks = range(len(self._reported))
        self._costs.observe(measured, self._alike, all_ranks, steps, bad)
        self._variation.window(measured, all_ranks)
        shared_cores, seconds = disturbed(measured, all_ranks), steps * measured.step_time.median
        now, doubts = self._costs.slowness().ranks, self._costs.doubts()
        for rank, (log, reported) in enumerate(zip(now, self._reported, strict=True)):
            # Report at once if other programs use (or used) the core, or if this is unknown; otherwise if it lasts.
            immediate = shared_cores is None or rank in shared_cores or rank in self._stolen
            denied = doubts[rank] * (log - reported) < 0  # by the last steps
            if not self._lasting.exceeds(
                rank, 0.0 if denied else abs(log - reported), LIKE if immediate else self._variation.like,
                steps=steps, seconds=seconds, borne_out=immediate,
            ):  # fmt: skip
                continue
            self._reported = (*self._reported[:rank], log, *self._reported[rank + 1 :])
            self._stolen = (self._stolen | set(shared_cores or ())) & {p for p, log in enumerate(self._reported) if log}
            if log == 0:
                line = f"rank {rank} is as fast as others again"
                findings.append(Finding(cause="compute", where=rank, factor=1.0, line=line, ended=True))
                continue
            compute_s, stolen = own_s(measured, rank), measured.per_rank[rank].stolen_share or 0.0
            line = f"rank {rank} takes {math.exp(log):.3g} times as long as others"
            line += f" ({compute_s:.3g} s of its own a step"
            if stolen >= STOLEN_SHARE:
                line += f"; other processes had its core {100 * stolen:.0f} % of the time"
            findings.append(Finding(cause="compute", where=rank, factor=math.exp(log), line=f"{line})"))
        return findings
