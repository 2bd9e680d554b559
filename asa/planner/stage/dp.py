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
the best completion of each of ``v``, ``c``, ``p`` alone are dropped too. Edges come before configurations: what
arrives in a layout is thinned out once, and not once per configuration.
"""

from __future__ import annotations

import time
from operator import itemgetter
from typing import Any

from asa.planner.stage import labels
from asa.planner.stage.problem import Choice, Config, Problem, Solution

_INF = float("inf")
_SLACK = 1e-9
_LARGE = 60
"""Configurations of all components together from which on a problem with a memory limit is left to
:mod:`asa.planner.stage.labels`: the same labels, in arrays."""

# v, c, p, u, w, configuration, label behind it. A tuple, because there are a hundred thousand of them.
_Label = tuple[float, float, float, float, float, int, Any]
# v, c, p, u, w as they arrive over an edge, w with the transient of that edge, label they come from.
_Arrival = tuple[float, float, float, float, float, float, Any]


class _Completions:
    """Least cost from a component's layout to the end, for each way a label's time can grow."""

    def __init__(self, problem: Problem) -> None:
        n = len(problem)
        self.hidden = self._backwards(problem, -1)
        step = max(1, n // 6)
        # A stretch that begins at one of these components; between them the weaker bound has to do.
        starts = sorted({*range(step, n, step), n - 1})
        from_start = {k: self._backwards(problem, k) for k in starts}
        self.visible = [[from_start[k][i] for k in starts if k > i] for i in range(n)]
        self.state = [0.0] * (n + 1)
        self.kept = [0.0] * (n + 1)
        for i in range(n - 1, -1, -1):
            configs = problem.configs[i]
            self.state[i] = self.state[i + 1] + min(c.state + c.gradients for c in configs)
            self.kept[i] = self.kept[i + 1] + min(c.state for c in configs)

    @staticmethod
    def _backwards(problem: Problem, start: int) -> list[dict[int, float]]:
        """Per component and its layout, the least cost of all components behind it."""
        saving, n = problem.saving, len(problem)
        togo: list[dict[int, float]] = [{} for _ in range(n)]
        togo[n - 1] = {c.layout: 0.0 for c in problem.configs[n - 1]}
        for i in range(n - 1, 0, -1):
            best: dict[int, float] = {}
            behind = togo[i]
            for c in problem.configs[i]:
                cost = c.work + behind.get(c.layout, _INF)
                if i < start:
                    cost -= saving * problem.sp * c.window
                elif i > start:
                    cost -= saving * problem.sc * (c.prompt + c.late)
                if cost < best.get(c.layout, _INF):
                    best[c.layout] = cost
            front = togo[i - 1]
            for (a, b), edge in problem.edges[i - 1].items():
                if b in best and edge.cost + best[b] < front.get(a, _INF):
                    front[a] = edge.cost + best[b]
        return togo

    def bound(self, i: int, layout: int, v: float, c: float, p: float) -> float:
        """Lower bound on the value of every completion of a label behind component ``i``."""
        found = (v if v > c else c) + self.hidden[i].get(layout, _INF)
        for togo in self.visible[i]:
            other = p + togo.get(layout, _INF)
            if other > found:
                found = other
        return found


def solve(problem: Problem, *, time_limit_s: float = 60.0, beam: int | None = None, cutoff: float = _INF) -> Solution:
    """The best choice and, if the time sufficed, the proof that it is.

    ``beam`` keeps only that many labels per layout: a quick good choice, with the bound of the relaxation only.
    Choices that are not faster than ``cutoff`` ms are of no interest: where there is none, ``choice`` is None and
    ``cutoff`` a proved bound. When time is up, the best choice so far is returned with the bound that was proved.
    """
    ends = time.monotonic() + time_limit_s
    if beam is None and problem.capacity < _INF and sum(len(row) for row in problem.configs) > _LARGE:
        return labels.solve(problem, time_limit_s=time_limit_s, cutoff=cutoff)
    completions = _Completions(problem)
    floor = _root_bound(problem, completions)
    best, incumbent = cutoff, None
    for width in (beam,) if beam is not None else (8, None):
        found, done = _sweep(problem, completions, best, width, ends)
        if found is not None and _end(found) < best:
            best, incumbent = _end(found), found
        if width is None and done:
            floor = best
    if incumbent is None:
        return Solution(choice=None, value=_INF, bound=floor, solver="dp")
    return Solution(choice=_choice(incumbent), value=best, bound=min(floor, best), solver="dp")


def _end(label: _Label) -> float:
    return max(label[0], label[1])


def _choice(label: _Label) -> Choice:
    picked: list[int] = []
    at: Any = label
    while at is not None:
        picked.append(at[5])
        at = at[6]
    return tuple(reversed(picked))


def _root_bound(problem: Problem, completions: _Completions) -> float:
    return min(
        completions.bound(0, config.layout, *_extend(problem, 0, _FIRST, config, 0)[:3])
        for config in problem.configs[0]
    )


_FIRST: _Arrival = (-_INF, -_INF, 0.0, 0.0, 0.0, 0.0, None)


def _sweep(
    problem: Problem, completions: _Completions, best: float, beam: int | None, ends: float
) -> tuple[_Label | None, bool]:
    """One pass over the components. The second result says whether nothing was cut away unproved."""
    tight = problem.capacity < _INF
    best -= _SLACK * abs(best) if best < _INF else 0.0
    exact = True
    front: dict[int, list[_Label]] = {}
    for i, configs in enumerate(problem.configs):
        state, kept = completions.state[i + 1], completions.kept[i + 1]
        labels: dict[int, list[_Label]] = {}
        arriving = _arrivals(problem, i, front, tight)
        for k, config in enumerate(configs):
            into = labels.setdefault(config.layout, [])
            for arrival in arriving.get(config.layout, ()):
                label = _extend(problem, i, arrival, config, k)
                if tight and (label[3] + state > problem.capacity or label[4] + kept > problem.capacity):
                    continue
                if completions.bound(i, config.layout, label[0], label[1], label[2]) < best:
                    into.append(label)
        if time.monotonic() > ends:
            return None, False
        front = {layout: _pareto(found, tight) for layout, found in labels.items() if found}
        if beam is not None:
            for layout, found in front.items():
                if len(found) > beam:
                    exact = False
                    front[layout] = _thinned(completions, i, layout, found, beam)
    finals = [label for found in front.values() for label in found]
    return min(finals, key=_end, default=None), exact


def _thinned(completions: _Completions, i: int, layout: int, labels: list[_Label], beam: int) -> list[_Label]:
    """Half by time, half by memory: a beam of the fastest alone runs into the limit."""
    fast = sorted(labels, key=lambda x: (completions.bound(i, layout, x[0], x[1], x[2]), x[3]))
    lean = sorted(fast[beam // 2 :], key=itemgetter(3))
    return fast[: beam // 2] + lean[: beam - beam // 2]


def _arrivals(problem: Problem, i: int, front: dict[int, list[_Label]], tight: bool) -> dict[int, list[_Arrival]]:
    """What reaches each layout of component ``i``, before it takes a configuration there."""
    if i == 0:
        return {config.layout: [_FIRST] for config in problem.configs[0]}
    found: dict[int, list[_Arrival]] = {}
    for (a, b), edge in problem.edges[i - 1].items():
        for label in front.get(a, ()):
            v, c, p, u, w = label[:5]
            held = w + edge.state + edge.activations
            found.setdefault(b, []).append(
                (v + edge.cost, c + edge.cost, p + edge.cost, u + edge.state, held, held + edge.transient, label)
            )
    return {b: _pareto(arriving, tight, 6) for b, arriving in found.items()}


def _extend(problem: Problem, i: int, arrival: _Arrival, config: Config, index: int) -> _Label:
    v, c, p, u, w, moving, behind = arrival
    saving, d = problem.saving, config.work
    prompt, late = saving * problem.sc * config.prompt, saving * problem.sc * config.late
    if problem.release[i] == i:  # what leaves with its own component leaves at once
        prompt, late = prompt + late, 0.0
    v += d - prompt - late
    c += d - prompt
    p += d
    if i + 1 == len(problem.configs) or problem.release[i + 1] >= i:  # no bucket reaches across this component
        v, c = max(v, c), p
    elif p > c:
        c = p
    grown = config.state + config.activations
    return (
        v,
        c,
        p - saving * problem.sp * config.window,
        max(u + config.state + config.gradients, moving + grown + config.gradients + config.transient),
        w + grown,
        index,
        behind,
    )


def _pareto(labels: list[Any], tight: bool, size: int = 5) -> list[Any]:
    """The labels that no other one beats or equals in everything; memory counts only where it is limited."""
    if len(labels) == 1:
        return labels
    kept: list[Any] = []
    if not tight:
        labels.sort(key=itemgetter(0, 1, 2))
        for a in labels:
            c, p = a[1], a[2]
            for b in kept:  # b's v is no higher, by the order
                if b[1] <= c and b[2] <= p:
                    break
            else:
                kept.append(a)
        return kept
    labels.sort(key=itemgetter(*range(size)))
    for a in labels:
        c, p, u, w, moving = a[1], a[2], a[3], a[4], a[size - 1]
        for b in kept:
            if b[1] <= c and b[2] <= p and b[3] <= u and b[4] <= w and b[size - 1] <= moving:
                break
        else:
            kept.append(a)
    return kept


def least_memory(problem: Problem) -> Solution:
    """The choice with the lowest peak; ``value`` and ``bound`` are that peak in GiB."""
    front: dict[int, list[_Label]] = {}
    for i, configs in enumerate(problem.configs):
        arriving = _arrivals(problem, i, front, True)
        labels: dict[int, list[_Label]] = {}
        for k, config in enumerate(configs):
            for arrival in arriving.get(config.layout, ()):
                found = _extend(problem, i, arrival, config, k)
                labels.setdefault(config.layout, []).append((0.0, 0.0, 0.0, *found[3:]))
        front = {layout: _pareto(found, True) for layout, found in labels.items()}
    finals = [label for found in front.values() for label in found]
    best = min(finals, key=itemgetter(3), default=None)
    if best is None:
        return Solution(choice=None, value=_INF, bound=_INF, solver="dp")
    return Solution(choice=_choice(best), value=best[3], bound=best[3], solver="dp")


def memory_floor(problem: Problem) -> float:
    """GiB below which no choice peaks: every component at its leanest in each respect, whether or not at once."""
    state = sum(min(c.state for c in row) for row in problem.configs)
    gradients = [min(c.gradients for c in row) for row in problem.configs]
    activations, behind, found = 0.0, sum(gradients), 0.0
    for row, own in zip(problem.configs, gradients, strict=True):
        activations += min(c.activations for c in row)
        found = max(found, state + activations + behind + min(c.transient for c in row))
        behind -= own
    return found


def memory_ceiling(problem: Problem) -> float:
    """GiB above which no choice peaks: every component and edge at its largest in each respect, all at once."""
    found = sum(max(c.state for c in row) + max(c.activations for c in row) for row in problem.configs)
    found += sum(max(c.gradients for c in row) for row in problem.configs)
    between = [list(edges.values()) for edges in problem.edges if edges]
    found += sum(max(e.state for e in edges) + max(e.activations for e in edges) for edges in between)
    moving = max((e.transient for edges in between for e in edges), default=0.0)
    return found + max(c.transient for row in problem.configs for c in row) + moving
