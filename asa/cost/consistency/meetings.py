"""Workers that train independently for a period and then meet to average, round by round.

A meeting begins when all workers have come, or when a quorum has come and the grace time is over. It takes
``meeting_s`` seconds; then those who came go on together. A worker that comes later takes part in the next meeting;
nobody waits for it.
"""

from __future__ import annotations

import math
import random

from asa.cost.consistency.played import Draws, Machine, Played, settled
from asa.ir.consistency import Discipline

_QUARTER = {"fp32": 1.0, "int8": 0.25}
"""Bytes on the wire of a message over those of fp32."""


def met(discipline: Discipline, machine: Machine, seed: int, steps: int) -> Played:
    """The outcome of at least ``steps`` global batches under a discipline of local steps."""
    draws, chance = Draws(machine, seed), random.Random(f"clients {seed}")
    count = len(machine.workers)
    period = max(1, discipline.period // discipline.fragments)
    takes = machine.meeting_s * _QUARTER[discipline.message] / discipline.fragments
    quorum = discipline.quorum or count
    chosen = max(1, math.ceil(discipline.fraction * count - 1e-9))

    def next_arrival(w: int, now: float) -> float:
        return now + draws.steps(w, period) + period * machine.workers[w].update_s

    now, applied, pushed = 0.0, 0.0, 0
    comes = [next_arrival(w, 0.0) for w in range(count)] if chosen == count else [math.inf] * count
    waited, finished = [0.0] * count, [[] for _ in range(count)]  # type: list[float], list[list[tuple[float, float]]]
    while applied < steps * machine.rows * (1 - 1e-12):
        if chosen < count:
            comes = [math.inf] * count
            for w in chance.sample(range(count), chosen):
                comes[w] = next_arrival(w, now)
        order = sorted(range(count), key=comes.__getitem__)
        here = [w for w in order if comes[w] < math.inf]
        last = comes[here[-1]]
        closes = last if quorum >= len(here) else min(last, max(now, comes[here[quorum - 1]]) + discipline.grace_s)
        there = [w for w in here if comes[w] <= closes]
        pushed += len(there)
        now = closes + takes
        for w in there:
            rows = machine.workers[w].rows * period
            waited[w] += closes - comes[w]
            applied += rows
            finished[w].append((now, rows))
            comes[w] = next_arrival(w, now)
    rate = settled([f for f in finished if f])
    return Played(
        seconds=now,
        steps=applied / machine.rows,
        step_time_s=machine.rows / rate if rate > 0 else math.inf,
        ages=(pushed,),
        waited=tuple(w / now for w in waited),
    )
