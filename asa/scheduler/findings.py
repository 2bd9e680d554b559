"""Findings: what is slow, in one line each with cause, place, factor and the numbers that show it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Literal

from asa.interfaces.executor import Placement
from asa.ir.cluster import Cluster
from asa.ir.codec import noun
from asa.ir.measurements import Measurements
from asa.ir.units import binary
from asa.scheduler.costs import LIKE, STOLEN_SHARE, Slowness, own_s, typical
from asa.scheduler.expected import Expected
from asa.scheduler.lasting import ALL_ALIKE, Lasting, UsualVariation, disturbed

Cause = Literal["compute", "link", "data", "memory", "everything", "figures"]
DATA_SHARE = 0.10
"""Fraction of a step spent waiting for input from which on it is reported, and again for each further such fraction."""
_PLAIN = 3.0
"""Multiple of LIKE above which a change of all ranks alike is reported at once, where nothing says who uses the cores:
below it, noise in the first windows looks the same, and no plan helps."""
_EVERYBODY = -1
_AWRY = 1.5
"""A part that takes longer than this multiple of the step, waiting for data included, is attributed to an error of the
clock."""


@noun
class Finding:
    """One finding. ``where``: process or level of links; None for everywhere. ``factor``: relative to the prediction
    (for data: fraction of the step). ``ended``: an earlier finding is over."""

    cause: Cause
    where: int | None
    factor: float
    line: str
    ended: bool = False


def impossible_figures(measured: Measurements) -> dict[int, str]:
    """Processes with impossible values, and why; key -1 stands for the step itself."""
    step, mean = measured.step_time, measured.mean_step_s
    if not all(math.isfinite(x) and x > 0 for x in (step.median, step.p10, step.p90)) or step.n < 1:
        return {-1: f"a step of {step.median:g} s"}
    if mean is not None and not 0 < _number(mean) < math.inf:
        return {-1: f"steps of {_number(mean):g} s on average"}
    longest = _longest(measured)
    reasons: dict[int, str] = {}
    for process, rank in enumerate(measured.per_rank):
        figures = {"computing": rank.own_s, "waiting": rank.waiting_s, "waiting for data": rank.data_wait_s}
        for what, reported in figures.items():
            limit, seconds = math.inf if what == "waiting for data" else longest, _number(reported)
            if not 0 <= seconds <= limit:  # this is true for NaN, too
                reasons.setdefault(process, f"{seconds:g} s of {what} in a step of {step.median:.3g} s")
    return reasons


def _longest(measured: Measurements) -> float:
    """Seconds that no part of a step exceeds."""
    return _AWRY * (measured.step_time.p90 + (_known(measured.data_wait_s) or 0.0))


def _number(value: object) -> float:
    """``value``; NaN if it is no number."""
    return float(value) if isinstance(value, Real) else math.nan


def _finite(seconds: object) -> float:
    return number if math.isfinite(number := _number(seconds)) else 0.0


def _known(seconds: object) -> float | None:
    return number if 0 <= (number := _number(seconds)) < math.inf else None


def finite(measured: Measurements) -> Measurements:
    """``measured`` with 0 for values of ranks that are not finite, which a log cannot contain, and without such
    transfers; impossible values of the whole step count as unknown."""
    ranks = [
        replace(r, own_s=_finite(r.own_s), waiting_s=_finite(r.waiting_s), data_wait_s=_finite(r.data_wait_s))
        for r in measured.per_rank
    ]
    for i, rank in enumerate(ranks):
        if not all(x is None or math.isfinite(_number(x)) for x in (rank.mean_own_s, rank.stolen_share)):
            ranks[i] = replace(rank, mean_own_s=None, stolen_share=None)
    links = tuple(t for t in measured.links if math.isfinite(_number(t.seconds) + _number(t.num_bytes)))
    exposed_s = _known(measured.communication_s)
    exposed_s = None if exposed_s is not None and exposed_s > _longest(measured) else exposed_s
    return replace(
        measured, per_rank=tuple(ranks), links=links, data_wait_s=_known(measured.data_wait_s) or 0.0,
        communication_s=exposed_s, mean_step_s=_known(measured.mean_step_s),
    )  # fmt: skip


def _times(log: float) -> str:
    """A factor in words.

    >>> _times(math.log(1.94))
    '1.94 times as long as predicted'
    """
    return "as long as predicted" if abs(log) <= LIKE else f"{math.exp(log):.3g} times as long as predicted"


def _transfers(measured: Measurements, expected: Expected, level: int) -> str:
    """Seconds of the transfers of a level in a step, or of exposed communication if none was timed, and what was
    expected; empty if neither is known."""
    timed = [m for t in measured.links if t.level == level and (m := expected.message(t)) is not None]
    if timed:
        steps = measured.step_time.n
        seconds, of = sum(m.n * m.seconds for m in timed) / steps, sum(m.n * m.expected_s for m in timed) / steps
        return f"{seconds:.3g} s of transfers a step, {of:.3g} s expected"
    if measured.communication_s is None:
        return ""
    exposed_s = max(0.0, expected.step_s - max(expected.own_s))
    return f"{measured.communication_s:.3g} s of exposed communication a step, {exposed_s:.3g} s expected"


def _other_processes(measured: Measurements, processes: Sequence[int]) -> str:
    """Text saying that other processes used the cores of all ranks for a part of the time; empty if they did not."""
    shares = [measured.per_rank[p].stolen_share or 0.0 for p in processes if p < len(measured.per_rank)]
    if not shares or min(shares) < STOLEN_SHARE:
        return ""
    return f"; other processes had the cores of all ranks {100 * min(shares):.0f} % of the time or more"


@dataclass
class Ignored:
    """Processes whose values are ignored, because some are impossible; each is reported once."""

    processes: set[int] = field(default_factory=set)

    def window(self, bad: dict[int, str]) -> list[Finding]:
        """Findings on processes whose values are ignored from now on, or used again. ``bad``: the result of
        :func:`impossible_figures` for a window."""
        findings = []
        for p in sorted(set(bad) - self.processes):
            who, where = ("the figures of this window", None) if p < 0 else (f"figures of rank {p}", p)
            findings.append(Finding(cause="figures", where=where, factor=0.0, line=f"{who} are ignored: {bad[p]}"))
        for p in [] if -1 in bad else sorted(self.processes - set(bad) - {-1}):
            line = f"figures of rank {p} are used again"
            findings.append(Finding(cause="figures", where=p, factor=1.0, line=line, ended=True))
        self.processes = set(bad) | (self.processes if -1 in bad else set())
        return findings


@dataclass
class Findings:
    """The findings so far, so that nothing is reported twice. ``reported``: each factor when it was last reported;
    ``planned``: all factors at the last change that lasted, with which plans are chosen."""

    cluster: Cluster
    reported: Slowness
    planned: Slowness = field(init=False)
    data: float = 0.0
    ignored: Ignored = field(default_factory=Ignored)
    heavy: set[object] = field(default_factory=set)
    groups: tuple[tuple[int, ...], ...] = ()
    lasting: Lasting = field(default_factory=Lasting)
    variation: UsualVariation = field(default_factory=UsualVariation)
    stolen: set[int] = field(default_factory=set)
    """Slow processes whose cores others use, or used when they became slow."""

    def __post_init__(self) -> None:
        self.planned = self.reported

    def take_for_granted(self, now: Slowness) -> None:
        """Go on from ``now`` without a finding."""
        self.reported = self.planned = now

    def memory(self, measured: Measurements, placement: Placement) -> list[Finding]:
        """Findings on ranks that needed more memory than predicted; once for each plan."""
        promised = measured.predicted_memory_bytes
        key = placement.plan.conduct
        peaks = measured.peak_memory_bytes or ()
        for rank, promised_bytes, used in zip(placement.processes, promised, peaks, strict=False):
            if used > promised_bytes > 0 and key not in self.heavy:
                self.heavy.add(key)
                line = f"rank {rank} needs {binary(used)} where {binary(promised_bytes)} were promised"
                return [Finding(cause="memory", where=rank, factor=used / promised_bytes, line=line)]
        return []

    def sharing(self, groups: tuple[tuple[int, ...], ...]) -> list[Finding]:
        """Findings on ranks that may use only the same one core, or no longer."""
        findings = []
        for group, ended in [(g, False) for g in groups if g not in self.groups] + [
            (g, True) for g in self.groups if g not in groups
        ]:
            who = f"ranks {', '.join(map(str, group[:-1]))} and {group[-1]}"
            line = f"{who} no longer share one core" if ended else f"{who} share one core"
            findings.append(
                Finding(cause="compute", where=group[-1], factor=1.0 if ended else len(group), line=line, ended=ended)
            )
        self.groups = groups
        return findings

    def waiting_for_data(self, measured: Measurements) -> list[Finding]:
        """Findings on waiting for input, which no plan can change."""
        step = measured.step_time.median + measured.data_wait_s
        share = measured.data_wait_s / step if step > 0 else 0.0
        if share < self.data + DATA_SHARE:
            if share >= self.data - DATA_SHARE / 2:
                return []
            self.data = share if share >= DATA_SHARE else 0.0
            if self.data:
                return []
            line = f"steps no longer wait for data ({100 * share:.0f} % of the time)"
            return [Finding(cause="data", where=None, factor=share, line=line, ended=True)]
        self.data = share
        waits = [r.data_wait_s for r in measured.per_rank]
        where = None
        if waits and max(waits) > 2 * sorted(waits)[(len(waits) - 1) // 2]:
            where = waits.index(max(waits))
        who = "steps wait" if where is None else f"rank {where} waits"
        line = f"{who} for data {100 * share:.0f} % of the time: no plan changes that"
        return [Finding(cause="data", where=where, factor=share, line=line)]

    def slow(
        self, now: Slowness, measured: Measurements, expected: Expected, processes: Sequence[int], *, by_rank: bool,
        steps: int = 1, doubts: Sequence[float] = (),
    ) -> list[Finding]:  # fmt: skip
        """Findings on factors that have changed since the last report and lasted for a while. They are immediate if the
        system reports that other programs began (or stopped) to use a rank's core, or does not report this at all.
        ``doubts``: by process, by how much its last steps differ from ``now``; a change that they deny does not
        last."""
        denied = {p for p, doubt in enumerate(doubts) if doubt * (now.ranks[p] - self.reported.ranks[p]) < 0}
        self.variation.window(measured, processes)
        shared = disturbed(measured, processes) if by_rank else None
        like = LIKE if shared is None else self.variation.like
        seconds = steps * typical(measured)

        def differs(key: Hashable, log: float, old: float, *, borne_out: bool) -> bool:
            return self.lasting.exceeds(
                key, 0.0 if key in denied else abs(log - old), LIKE if borne_out else like, steps=steps,
                seconds=seconds, borne_out=borne_out or shared is None,
            )  # fmt: skip

        everybody_disturbed = shared is not None and len(shared) == len(processes)
        change = abs(now.common - self.reported.common)
        common_borne_out = _EVERYBODY in self.stolen or everybody_disturbed
        common = self.lasting.holds(
            "common", differs=change > (LIKE if common_borne_out else like), steps=steps, seconds=seconds,
            borne_out=common_borne_out or (shared is None and change > _PLAIN * LIKE),
            times=1 if shared is None else ALL_ALIKE,
        )  # fmt: skip
        ranks = [
            differs(p, log, old, borne_out=p in (shared or ()) or p in self.stolen or p not in processes)
            for p, (log, old) in enumerate(zip(now.ranks, self.reported.ranks, strict=True))
        ]
        levels = [
            by_rank and differs(("level", i), log, old, borne_out=False)
            for i, (log, old) in enumerate(zip(now.levels, self.reported.levels, strict=True))
        ]
        everybody = {_EVERYBODY} if shared and everybody_disturbed else set()
        slow = {p for p, log in enumerate(now.ranks) if log or ranks[p]} | (
            {_EVERYBODY} if now.common > LIKE else set()
        )
        self.stolen = (self.stolen | set(shared or ()) | everybody) & slow
        findings = self._lines(now, measured, expected, processes, (common, ranks, levels), by_rank=by_rank)
        # A factor that is reported is relative to the others as they are now, so all are planned with together.
        unplanned = now.distance(replace(self.planned, sharing=now.sharing)) > like and not denied
        lasts = self.lasting.holds("planned", differs=unplanned, steps=steps, seconds=seconds, borne_out=False)
        if common or any(ranks) or any(levels) or lasts:
            self.planned = now
        self.reported = replace(
            self.reported,
            common=now.common if common else self.reported.common,
            ranks=tuple(n if d else o for n, o, d in zip(now.ranks, self.reported.ranks, ranks, strict=True)),
            levels=tuple(
                n if d or not by_rank else o for n, o, d in zip(now.levels, self.reported.levels, levels, strict=True)
            ),
        )
        return findings

    def _lines(
        self, now: Slowness, measured: Measurements, expected: Expected, processes: Sequence[int],
        differ: tuple[bool, list[bool], list[bool]], *, by_rank: bool,
    ) -> list[Finding]:  # fmt: skip
        """Findings on the common factor, the ranks and the levels for which ``differ`` is true."""
        findings, (common, ranks, levels) = [], differ
        step, expected_s = typical(measured), expected.step_s
        figures = f"{step:.3g} s a step, {expected_s:.3g} s expected"
        everything = False
        # A speed-up is not reported, but planning uses it.
        if common and max(now.common, self.reported.common) > LIKE:
            everything = not by_rank or (bool(levels) and all(levels))
            over, unknown = abs(now.common) <= LIKE, not by_rank and len(processes) > 1
            what = "everything takes" if everything else "the compute of all ranks takes"
            line = f"{'a step takes' if unknown else what} {_times(now.common)} "
            line += f"({figures}{_other_processes(measured, processes)})"
            line += "; ranks are not observed, so it is unknown what is slow" if unknown and now.common > LIKE else ""
            cause: Cause = "everything" if everything else "compute"
            findings.append(Finding(cause=cause, where=None, factor=math.exp(now.common), line=line, ended=over))
        for process, log in enumerate(now.ranks):
            if not ranks[process]:
                continue
            line = f"rank {process}'s compute takes {_times(now.common + log)}"
            if log > 0 and now.common + log <= LIKE:  # the prediction is longer than the time of others
                line = f"rank {process}'s compute takes {math.exp(log):.3g} times as long as that of others"
            if log == 0 < len([r for i, r in enumerate(now.ranks) if i != process and r == 0]):
                line += ", no longer than that of others"
            if process in processes and process < len(measured.per_rank):
                rank = measured.per_rank[process]
                of = expected.own_s[list(processes).index(process)]
                line += f" ({own_s(measured, process):.3g} s of its own a step, {of:.3g} s expected"
                if rank.stolen_share is not None and rank.stolen_share >= STOLEN_SHARE:
                    line += f"; other processes had its core {100 * rank.stolen_share:.0f} % of the time"
                line += ")"
            elif process not in processes:
                line += " (probed: it is idle)"
            factor = math.exp(now.common + log)
            findings.append(Finding(cause="compute", where=process, factor=factor, line=line, ended=log == 0))
        for i, log in enumerate(now.levels):
            if levels[i] and by_rank and not everything and max(log, self.reported.levels[i]) > LIKE:
                line = f"the links of level {self.cluster.levels[i].name} take {_times(log)} "
                line += f"({_transfers(measured, expected, i) or figures})"
                findings.append(Finding(cause="link", where=i, factor=math.exp(log), line=line, ended=abs(log) <= LIKE))
        return findings
