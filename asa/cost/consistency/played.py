"""The machine that a discipline of consistency is simulated on, and the outcome of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from asa.ir.codec import noun


@noun
class Worker:
    """One worker. Times are in seconds.

    ``step_s``: mean of forward and backward of its ``rows`` samples of a global batch, without waiting. ``push_s``,
    ``pull_s``: time on its link for all gradients to all servers, and for all weights from them. ``copy_s``: copies of
    its gradients and of the new weights, once in a cycle. ``update_s``: an optimizer step, if workers run it.
    """

    step_s: float
    rows: float = 1.0
    push_s: float = 0.0
    pull_s: float = 0.0
    copy_s: float = 0.0
    update_s: float = 0.0


@noun
class Server:
    """One server. Its link is busy for ``receive_s`` seconds with the gradients of one worker, and for ``send_s`` with
    the weights for one worker; each such message keeps its processor busy for ``handling_s``. ``apply_s`` seconds
    compute an update of its part of the weights, and copy it for replies. ``beside``: the worker whose device it
    shares; None if it has its own."""

    receive_s: float = 0.0
    send_s: float = 0.0
    handling_s: float = 0.0
    apply_s: float = 0.0
    beside: int | None = None


@noun
class Machine:
    """Workers and servers. ``spread``: standard deviation of the logarithm of a step's compute time. ``meeting_s``:
    seconds of one averaging of all weights, or of all gradients, without waiting."""

    workers: tuple[Worker, ...]
    servers: tuple[Server, ...] = ()
    spread: float = 0.0
    meeting_s: float = 0.0

    @property
    def rows(self) -> float:
        """Samples of a global batch, over all workers."""
        return sum(w.rows for w in self.workers)

    @property
    def fastest(self) -> float:
        """Samples per second of all workers if none ever waits: an upper bound for every discipline."""
        return sum(w.rows / w.step_s if w.step_s else math.inf for w in self.workers)


@noun
class Played:
    """The outcome of a simulated run.

    Attributes:
        seconds: length of the run.
        steps: global batches that were applied.
        step_time_s: seconds per global batch in the second half, when initial leads of workers have gone.
        ages: ``ages[n]`` applied gradients had age n: n whole global batches of other workers since the pull.
        mean_age: mean age of applied gradients in global batches, not rounded.
        rejected: share of the gradients that was rejected because of its age.
        waited: for each worker the share of the time that it waited for others.
    """

    seconds: float
    steps: float
    step_time_s: float
    ages: tuple[int, ...] = ()
    mean_age: float = 0.0
    rejected: float = 0.0
    waited: tuple[float, ...] = ()

    @property
    def max_age(self) -> int:
        """The highest age of a gradient that was applied."""
        return max(0, len(self.ages) - 1)


class Draws:
    """Random compute times of steps, drawn for each worker: the same numbers under every discipline."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self._spread = machine.spread
        self._random = [random.Random(f"{seed} {w}") for w in range(len(machine.workers))]
        self._machine = machine

    def step(self, worker: int) -> float:
        """Seconds that the worker computes in its next step."""
        mean, spread = self._machine.workers[worker].step_s, self._spread
        return mean * math.exp(self._random[worker].gauss(-spread * spread / 2, spread)) if spread else mean

    def steps(self, worker: int, count: int) -> float:
        """Seconds that the worker computes in its next ``count`` steps, scaled from at most the first 1000."""
        return sum(self.step(worker) for _ in range(min(count, 1000))) * max(1.0, count / 1000)


def counted(values: Iterator[int] | Sequence[int]) -> tuple[int, ...]:
    """How often each whole number from 0 on occurs."""
    counts: list[int] = []
    for v in values:
        counts.extend([0] * (v + 1 - len(counts)))
        counts[v] += 1
    return tuple(counts)


def late_rate(finished: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Samples per second of all workers, over the second half of the cycles that each finished. ``finished[w]`` has
    pairs (time, samples) in order of time."""
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
