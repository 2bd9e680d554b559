"""Simulation of workers that train independently for a period and then average their weights, round by round.

An averaging round (meeting) begins when all workers have arrived, or when a quorum has arrived and the grace time is
over. It takes ``meeting_s`` seconds; then its workers continue, or, with an overlap, they have computed meanwhile. A
worker that arrives later takes part in the next one.
"""

from __future__ import annotations

import math
import random

from asa.cost.consistency.played import Draws, Machine, Played, late_rate
from asa.ir.consistency import Discipline

_MESSAGE_BYTES = {"fp32": 1.0, "int8": 0.25}
"""Bytes of a message, relative to fp32."""


def met(discipline: Discipline, machine: Machine, seed: int, steps: int) -> Played:
    """Simulate at least ``steps`` global batches under a discipline of local steps."""
    draws, chance = Draws(machine, seed), random.Random(f"clients {seed}")
    count = len(machine.workers)
    period = max(1, discipline.period // discipline.fragments)
    averaging_s = machine.meeting_s * _MESSAGE_BYTES[discipline.message] / discipline.fragments
    quorum = discipline.quorum or count
    chosen = max(1, math.ceil(discipline.fraction * count - 1e-9))

    def steps_s(w: int, number: int) -> float:
        return draws.steps(w, number) + number * machine.workers[w].update_s if number else 0.0

    now, applied, pushed = 0.0, 0.0, 0
    at = [steps_s(w, period) for w in range(count)] if chosen == count else [math.inf] * count
    waited, finished = [0.0] * count, [[] for _ in range(count)]  # type: list[float], list[list[tuple[float, float]]]
    while applied < steps * machine.rows * (1 - 1e-12):
        if chosen < count:
            at = [math.inf] * count
            for w in chance.sample(range(count), chosen):
                at[w] = now + steps_s(w, period)
        joins = sorted((w for w in range(count) if at[w] < math.inf), key=at.__getitem__)
        last = at[joins[-1]]
        closes = last if quorum >= len(joins) else min(last, max(now, at[joins[quorum - 1]]) + discipline.grace_s)
        in_time = [w for w in joins if at[w] <= closes]
        pushed += len(in_time)
        now = closes + averaging_s
        for w in in_time:
            rows = machine.workers[w].rows * period
            overlapped = at[w] + steps_s(w, discipline.overlap)
            waited[w] += max(0.0, closes - overlapped)
            applied += rows
            finished[w].append((now, rows))
            at[w] = max(overlapped, now) + steps_s(w, period - discipline.overlap)
    rate = late_rate([f for f in finished if f])
    return Played(
        seconds=now, steps=applied / machine.rows, step_time_s=machine.rows / rate if rate > 0 else math.inf,
        ages=(pushed,), waited=tuple(w / now for w in waited),
    )  # fmt: skip
