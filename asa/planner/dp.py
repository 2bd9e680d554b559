"""An exact dynamic program over Pareto labels, front to back. It shares no arithmetic with the ILP.

A label is a partial choice for components 0..i, reduced to what the rest can see: the layout of component i and

* ``p``: its time, if all its backward windows overlapped with synchronisation still to come,
* ``c``: its time, if the communication stream turns out busy to the end from a component of the bucket now open,
* ``v``: the same, from a component in front of that bucket,
* ``u``: the peak so far, in a step that ended here;  ``w``: state and activations held so far.

Adding a component with time d (its work and the edge in front), own release a = saving*sc*prompt, late release
l = saving*sc*late:

    v <- v + d - a - l,   c <- c + d - a,   p <- p + d     (a release behind a busy stretch's start is hidden)
    a bucket begins here:  v <- max(v, c), c <- p;   else  c <- max(c, p)
    p <- p - saving*sp*window
    u <- max(u + state + gradients, w + state + activations + gradients + transient),   w <- w + state + activations

All five are monotone, so a label that is no better in any of them than another with the same layout is dropped, and
the value at the end, ``max(v, c)`` with ``u <= capacity``, is exact. Labels that cannot beat the incumbent even with
the best completion of each of ``v``, ``c``, ``p`` alone are dropped too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from asa.planner.problem import Choice, Config, Problem, Solution

_INF = float("inf")
_SLACK = 1e-9


@dataclass(slots=True)
class _Label:
    v: float
    c: float
    p: float
    u: float
    w: float
    config: int
    behind: _Label | None

    def choice(self) -> Choice:
        picked: list[int] = []
        at: _Label | None = self
        while at is not None:
            picked.append(at.config)
            at = at.behind
        return tuple(reversed(picked))


class _Completions:
    """Least cost from a component's layout to the end, for each way a label's time can grow."""

    def __init__(self, problem: Problem) -> None:
        n = len(problem)
        self.hidden = self._backwards(problem, [-1] * n)
        step = max(1, n // 6)
        # A stretch that begins at one of these components; between them the weaker bound has to do.
        self.starts = sorted({*range(step, n, step), n - 1})
        self.from_start = {k: self._backwards(problem, [k] * n) for k in self.starts}
        self.state = [0.0] * (n + 1)
        self.kept = [0.0] * (n + 1)
        for i in range(n - 1, -1, -1):
            configs = problem.configs[i]
            self.state[i] = self.state[i + 1] + min(c.state + c.gradients for c in configs)
            self.kept[i] = self.kept[i + 1] + min(c.state for c in configs)

    @staticmethod
    def _backwards(problem: Problem, start: list[int]) -> list[dict[int, float]]:
        """Per component and its layout, the least cost of all components behind it."""
        saving, n = problem.saving, len(problem)
        togo: list[dict[int, float]] = [{} for _ in range(n)]
        togo[n - 1] = {c.layout: 0.0 for c in problem.configs[n - 1]}
        for i in range(n - 1, 0, -1):
            best: dict[int, float] = {}
            for c in problem.configs[i]:
                cost = c.work
                if i < start[i]:
                    cost -= saving * problem.sp * c.window
                elif i > start[i]:
                    cost -= saving * problem.sc * (c.prompt + c.late)
                best[c.layout] = min(best.get(c.layout, _INF), cost + togo[i][c.layout])
            for (a, b), edge in problem.edges[i - 1].items():
                if b in best:
                    togo[i - 1][a] = min(togo[i - 1].get(a, _INF), edge.cost + best[b])
        return togo

    def bound(self, i: int, layout: int, label: _Label) -> float:
        """Lower bound on the value of every completion of ``label`` behind component ``i``."""
        togo = self.hidden[i].get(layout, _INF)
        found = max(label.v, label.c) + togo
        for k in self.starts:
            if k > i:
                found = max(found, label.p + self.from_start[k][i].get(layout, _INF))
        return found


def solve(problem: Problem, *, time_limit_s: float = 60.0, beam: int | None = None) -> Solution:
    """The best choice and, if the time sufficed, the proof that it is.

    ``beam`` keeps only that many labels per layout: a quick good choice, with the bound of the relaxation only.
    When time is up, the best choice so far is returned with the bound that was proved.
    """
    ends = time.monotonic() + time_limit_s
    completions = _Completions(problem)
    floor = _root_bound(problem, completions)
    incumbent: _Label | None = None
    for width in (beam,) if beam is not None else (8, None):
        found, done = _sweep(problem, completions, incumbent, width, ends)
        if found is not None and (incumbent is None or _end(found) < _end(incumbent)):
            incumbent = found
        if width is None and done:
            floor = _INF if incumbent is None else _end(incumbent)
    if incumbent is None:
        return Solution(choice=None, value=_INF, bound=floor, solver="dp")
    value = _end(incumbent)
    return Solution(choice=incumbent.choice(), value=value, bound=min(floor, value), solver="dp")


def _end(label: _Label) -> float:
    return max(label.v, label.c)


def _root_bound(problem: Problem, completions: _Completions) -> float:
    firsts = [_extend(problem, 0, None, c, k) for k, c in enumerate(problem.configs[0])]
    return min(
        (completions.bound(0, c.layout, f) for f, c in zip(firsts, problem.configs[0], strict=True)), default=_INF
    )


def _sweep(
    problem: Problem, completions: _Completions, incumbent: _Label | None, beam: int | None, ends: float
) -> tuple[_Label | None, bool]:
    """One pass over the components. The second result says whether nothing was cut away unproved."""
    best = _INF if incumbent is None else _end(incumbent) - _SLACK * abs(_end(incumbent))
    exact = True
    front: dict[int, list[_Label]] = {}
    for i, configs in enumerate(problem.configs):
        arrivals: dict[int, list[_Label]] = {}
        for k, config in enumerate(configs):
            arriving = arrivals.setdefault(config.layout, [])
            sources: list[_Label | None] = [None] if i == 0 else []
            for layout, labels in front.items():
                if (layout, config.layout) in problem.edges[i - 1]:
                    sources.extend(labels)
            for source in sources:
                label = _extend(problem, i, source, config, k)
                if label.u + completions.state[i + 1] > problem.capacity:
                    continue
                if label.w + completions.kept[i + 1] > problem.capacity:
                    continue
                if completions.bound(i, config.layout, label) < best:
                    arriving.append(label)
            if time.monotonic() > ends:
                return None, False
        front = {layout: _pareto(labels, problem.capacity) for layout, labels in arrivals.items() if labels}
        if beam is not None:
            for layout, labels in front.items():
                if len(labels) > beam:
                    exact = False
                    labels.sort(key=lambda label: (completions.bound(i, layout, label), label.u))
                    # Half by time, half by memory: a beam of the fastest alone runs into the limit.
                    lean = sorted(labels[beam // 2 :], key=lambda label: label.u)
                    front[layout] = labels[: beam // 2] + lean[: beam - beam // 2]
    finals = [label for labels in front.values() for label in labels]
    return min(finals, key=_end, default=None), exact


def _extend(problem: Problem, i: int, source: _Label | None, config: Config, index: int) -> _Label:
    saving = problem.saving
    if source is None:
        v = c = -_INF
        p, u, w, held, moving = config.work, 0.0, 0.0, 0.0, 0.0
    else:
        behind = problem.configs[i - 1][source.config].layout
        edge = problem.edges[i - 1][behind, config.layout]
        d = config.work + edge.cost
        prompt = saving * problem.sc * config.prompt
        v = source.v + d - prompt - saving * problem.sc * config.late
        c = source.c + d - prompt
        p, u, w = source.p + d, source.u, source.w
        held, moving = edge.activations, edge.transient
    if i + 1 == len(problem) or problem.release[i + 1] >= i:  # no bucket reaches across this component
        v, c = max(v, c), p
    else:
        c = max(c, p)
    return _Label(
        v=v,
        c=c,
        p=p - saving * problem.sp * config.window,
        u=max(
            u + config.state + config.gradients,
            w + held + config.state + config.activations + config.gradients + config.transient + moving,
        ),
        w=w + held + config.state + config.activations,
        config=index,
        behind=source,
    )


def _pareto(labels: list[_Label], capacity: float) -> list[_Label]:
    """The labels that no other one beats or equals in everything."""
    tight = capacity < _INF
    labels.sort(key=lambda a: (a.v, a.c, a.p, a.u, a.w))
    kept: list[_Label] = []
    for a in labels:
        for b in kept:  # b.v <= a.v by the order
            if b.c <= a.c and b.p <= a.p and (not tight or (b.u <= a.u and b.w <= a.w)):
                break
        else:
            kept.append(a)
    return kept


def least_memory(problem: Problem) -> Solution:
    """The choice with the lowest peak; ``value`` and ``bound`` are that peak in GiB."""
    front: dict[int, list[_Label]] = {}
    for i, configs in enumerate(problem.configs):
        arrivals: dict[int, list[_Label]] = {}
        for k, config in enumerate(configs):
            sources: list[_Label | None] = [None] if i == 0 else []
            for layout, labels in front.items():
                if (layout, config.layout) in problem.edges[i - 1]:
                    sources.extend(labels)
            for source in sources:
                label = _extend(problem, i, source, config, k)
                label.v = label.c = label.p = 0.0
                arrivals.setdefault(config.layout, []).append(label)
        front = {layout: _pareto(labels, 1.0) for layout, labels in arrivals.items()}
    finals = [label for labels in front.values() for label in labels]
    best = min(finals, key=lambda label: label.u, default=None)
    if best is None:
        return Solution(choice=None, value=_INF, bound=_INF, solver="dp")
    return Solution(choice=best.choice(), value=best.u, bound=best.u, solver="dp")
