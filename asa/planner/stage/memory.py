"""The least peak of memory of a stage, and bounds on the peak of any choice.

A label is a partial choice for components 0..i, reduced to the layout of component i, the peak ``u`` of a step that
ended here, and the state and activations ``w`` held so far, in GiB. Both are monotone, so a label that is no better in
either than another with the same layout is dropped, and the least ``u`` at the end is exact.
:mod:`asa.cost.memory.peak` states the law.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np

from asa.cost.memory.peak import peaks
from asa.planner.stage.problem import JOINT, Problem, Solution, column, tabulated

_INF = float("inf")
_HELD = [JOINT.index(x) for x in ("state", "activations", "transient")]

# u, w, configuration, label behind it.
_Label = tuple[float, float, int, Any]
# u, w as they arrive over an edge, w with the transient of that edge, label they come from.
_Arrival = tuple[float, float, float, Any]


def least_memory(problem: Problem) -> Solution:
    """The choice with the lowest peak; ``value`` and ``bound`` are that peak in GiB."""
    front: dict[int, list[_Label]] = {}
    for i, configs in enumerate(problem.configs):
        arriving = _arrivals(problem, i, front)
        labels: dict[int, list[_Label]] = {}
        for k, config in enumerate(configs):
            grown = config.state + config.activations
            for u, w, moving, behind in arriving.get(config.layout, ()):
                peak = max(u + config.state + config.gradients, moving + grown + config.gradients + config.transient)
                labels.setdefault(config.layout, []).append((peak, w + grown, k, behind))
        front = {layout: _undominated(labels_here, 2) for layout, labels_here in labels.items()}
    best = min((label for labels_here in front.values() for label in labels_here), key=itemgetter(0), default=None)
    if best is None:
        return Solution(choice=None, value=_INF, bound=_INF, solver="memory")
    picked: list[int] = []
    at: Any = best
    while at is not None:
        picked.append(at[2])
        at = at[3]
    return Solution(choice=tuple(reversed(picked)), value=best[0], bound=best[0], solver="memory")


def _arrivals(problem: Problem, i: int, front: dict[int, list[_Label]]) -> dict[int, list[_Arrival]]:
    """Labels that reach each layout of component ``i``, before it takes a configuration there."""
    if i == 0:
        return {config.layout: [(0.0, 0.0, 0.0, None)] for config in problem.configs[0]}
    arrivals: dict[int, list[_Arrival]] = {}
    for (a, b), edge in problem.edges[i - 1].items():
        for label in front.get(a, ()):
            memory = label[1] + edge.state + edge.activations
            arrivals.setdefault(b, []).append((label[0] + edge.state, memory, memory + edge.transient, label))
    return {b: _undominated(arriving, 3) for b, arriving in arrivals.items()}


def _undominated(labels: list[Any], size: int) -> list[Any]:
    """Labels, out of ``labels``, that no other one equals or beats in each of the first ``size`` entries."""
    labels.sort(key=itemgetter(*range(size)))
    front: list[Any] = []
    for a in labels:
        if not any(all(b[j] <= a[j] for j in range(size)) for b in front):
            front.append(a)
    return front


def memory_floor(problem: Problem) -> float:
    """GiB below which no choice peaks, with every component at its least in each respect, whether or not at once."""
    names = ("state", "activations", "gradients", "transient")
    least = (np.array([column(row, name).min() for row in problem.configs]) for name in names)
    return float(peaks(*least).max())


def memory_ceiling(problem: Problem) -> float:
    """GiB above which no choice peaks, with every component and edge at its largest in each respect, all at once."""
    held = ("state", "activations", "gradients")
    total = sum(float(column(row, name).max()) for row in problem.configs for name in held)
    joints = [tabulated(e)[1][_HELD] for e in problem.edges if e]
    total += sum(float(state.max() + activations.max()) for state, activations, _ in joints)
    moving = max((float(transient.max()) for _, _, transient in joints), default=0.0)
    return total + max(float(column(row, "transient").max()) for row in problem.configs) + moving
