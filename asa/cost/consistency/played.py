"""The machine that a discipline of consistency is simulated on, and the outcome of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from asa.ir.codec import noun


@noun
class Worker:
    """One worker. Times are in seconds.

    ``step_s``: mean of forward and backward of its own ``rows`` of a global batch, without waiting. ``push_s``,
    ``pull_s``: its link with all servers together, for all gradients and for all weights. ``hidden_s``: how long before
    the end of its backward it may begin to push. ``update_s``: an optimizer step on all weights, where it takes one
    itself.
    """

    step_s: float
    rows: float = 1.0
    push_s: float = 0.0
    pull_s: float = 0.0
    hidden_s: float = 0.0
    update_s: float = 0.0


@noun
class Server:
    """One server. Times are in seconds: its link is busy for ``receive_s`` with the gradients of one worker and for
    ``send_s`` with the weights for one worker; ``apply_s`` is the computing of an update of its part of the weights.
    ``beside``: the worker on whose device it computes, if it has no device of its own."""

    receive_s: float = 0.0
    send_s: float = 0.0
    apply_s: float = 0.0
    beside: int | None = None


@noun
class Machine:
    """Workers and servers. ``spread``: standard deviation of the logarithm of a step's computing. ``meeting_s``: what
    workers take to average all their weights, or to add up all their gradients, once all of them are there."""

    workers: tuple[Worker, ...]
    servers: tuple[Server, ...] = ()
    spread: float = 0.0
    meeting_s: float = 0.0

    @property
    def rows(self) -> float:
        """Rows of a global batch, over all workers."""
        return sum(w.rows for w in self.workers)

    @property
    def fastest(self) -> float:
        """Rows per second that all workers compute together if nothing ever stops them: an upper bound for every
        discipline."""
        return sum(w.rows / w.step_s for w in self.workers)


@noun
class Played:
    """A run by the clock.

    Attributes:
        seconds: of all of it.
        steps: global batches that were applied in it.
        step_time_s: seconds per global batch in its second half, when whoever was ahead has been caught up with.
        ages: gradients by age, in whole global batches of other workers' gradients applied since the pull.
        leads: steps by how many steps their worker was ahead of the slowest when it began them.
        mean_age: of applied gradients, in global batches of others' gradients, not rounded.
        rejected: the part of all gradients that was thrown away for its age.
        waited: per worker the part of the time that it waited for others.
        served: the part of the time that the busiest server's link or processor was busy.
    """

    seconds: float
    steps: float
    step_time_s: float
    ages: tuple[int, ...] = ()
    leads: tuple[int, ...] = ()
    mean_age: float = 0.0
    rejected: float = 0.0
    waited: tuple[float, ...] = ()
    served: float = 0.0

    @property
    def max_age(self) -> int:
        """The highest age of a gradient that was applied."""
        return max(0, len(self.ages) - 1)


class Draws:
    """Draws of how much longer than its mean each step of a worker takes: the same numbers under every discipline."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self._spread = machine.spread
        self._random = [random.Random(f"{seed} {w}") for w in range(len(machine.workers))]
        self._machine = machine

    def step(self, worker: int) -> float:
        """Seconds that the worker computes in its next step."""
        mean, spread = self._machine.workers[worker].step_s, self._spread
        return mean * math.exp(self._random[worker].gauss(-spread * spread / 2, spread)) if spread else mean

    def steps(self, worker: int, count: int) -> float:
        """Seconds that the worker computes in its next ``count`` steps."""
        return sum(self.step(worker) for _ in range(count))


def counted(values: Iterator[int] | Sequence[int]) -> tuple[int, ...]:
    """How often each whole number from 0 on occurs.

    >>> counted([0, 2, 2])
    (1, 0, 2)
    """
    found: list[int] = []
    for v in values:
        found.extend([0] * (v + 1 - len(found)))
        found[v] += 1
    return tuple(found)


def settled(finished: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Rows per second of all workers, in the second half of what each finished. ``done`` has (time, rows) in order."""
    rate = 0.0
    for times in finished:
        half = len(times) // 2
        if len(times) - half < 2:
            half = 0
        stretch = times[-1][0] - times[half][0] if len(times) > 1 else 0.0
        if stretch > 0:
            rate += sum(rows for _, rows in times[half + 1 :]) / stretch
        elif times:
            rate += sum(rows for _, rows in times) / times[-1][0] if times[-1][0] > 0 else 0.0
    return rate
