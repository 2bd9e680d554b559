"""A simulated executor: a step takes as long as the cost model says for a machine that changes over time.

The machine is a profile and a cluster per step, which may differ from those of the plan: slower devices or links. The
caller sees the same reports as from a real executor, exact or with noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from asa.cost.planned import price_plan
from asa.cost.ranks import Ranks
from asa.cost.traffic.collectives import Links
from asa.interfaces.executor import EpochOutcome, Executor, Look, Placement, Probe
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.codec import fingerprint
from asa.ir.measurements import Measurements, RankTiming, Transfer
from asa.ir.plan import Plan
from asa.ir.profile import Profile, Stat

Machine = Callable[[int], tuple[Profile, Cluster]]
"""Function from the number of steps since the start of the run to the true profile and cluster at that time. The
cluster's devices are those of the processes."""

_PROBE_BYTES = 2.0**20


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Random deviations of measured times.

    ``step`` is the standard deviation of the logarithm of a step's time, on all ranks together. ``own`` is that of each
    rank's or link's value in a window. ``tails`` is the fraction of steps that take ``tail`` times as long.
    """

    step: float = 0.0
    own: float = 0.0
    tails: float = 0.0
    tail: float = 1.0


class World(Executor):
    """Simulates training under one plan at a time.

    Attributes:
        window: steps between two observations; 0 for none inside an epoch.
        move_s: seconds that a change of plan takes.
        rebuild_s: seconds that building the model again is said to take.
        spent_s: sum over all steps and changes, in seconds.
        moves: the changes of plan that were made.
    """

    def __init__(
        self, plan: Plan, machine: Machine, strategies: Strategies, *, processes: int, steps: int, window: int = 0,
        move_s: float = 2.0, rebuild_s: float | None = None, observed: bool = True, noise: Noise | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self._placement = Placement(plan=plan, processes=tuple(range(plan.num_ranks)))
        self._machine, self._strategies = machine, strategies
        self._count, self._steps, self._window = processes, steps, window
        self._move_s, self._rebuild_s, self._observed = move_s, rebuild_s, observed
        self._noise, self._random = noise or Noise(), random.Random(seed)
        self._cache: dict[object, tuple[float, tuple[float, ...], tuple[Transfer, ...]]] = {}
        self.step = 0
        self.spent_s = 0.0
        self.moves: list[tuple[int, Placement, Placement]] = []
        self.steps_s: list[float] = []
        """Seconds of every step."""
        self._true: list[tuple[float, tuple[float, ...], tuple[Transfer, ...]]] = []

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self._placement.plan

    @property
    def processes(self) -> tuple[int, ...]:
        """The process that runs each rank of the plan."""
        return self._placement.processes

    @property
    def num_processes(self) -> int:
        """Number of processes of the run, including idle ones."""
        return self._count

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""
        return self._steps

    @property
    def rebuild_s(self) -> float | None:
        """Seconds that building the first plan is said to have taken."""
        return self._rebuild_s

    def clock(self) -> float:
        """Simulated seconds since the start of the run."""
        return self.spent_s

    def true_step_s(self, placement: Placement, step: int) -> float:
        """Seconds of a step under ``placement``, without noise."""
        return self._truth(placement, step)[0]

    def _truth(self, placement: Placement, step: int) -> tuple[float, tuple[float, ...], tuple[Transfer, ...]]:
        """Seconds of a step, computation time of every rank, and times of its transfers, without noise."""
        profile, cluster = self._machine(step)
        key = (placement.plan.conduct, placement.processes, id(profile), id(cluster))
        if key not in self._cache:
            if cluster.devices is not None:
                named = set(placement.processes)
                order = (*placement.processes, *(r for r in range(cluster.num_devices) if r not in named))
                cluster = replace(cluster, devices=tuple(cluster.devices[p] for p in order))
            ranks = Ranks(placement.plan, profile, cluster, self._strategies)
            transfers = tuple(
                Transfer(
                    op="send" if c.op == "send_recv" else c.op, level=c.level, group_size=c.ranks, num_bytes=c.bytes,
                    seconds=c.seconds, n=1,
                )
                for c in ranks.carried()
            )  # fmt: skip
            step_s = price_plan(placement.plan, profile, cluster, self._strategies).cost.total_s
            self._cache[key] = step_s, ranks.compute(), transfers
        return self._cache[key]

    def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
        """Simulate the steps of an epoch, observed after every ``window`` of them."""
        began, pending, windows = self.spent_s, 0, []
        for i in range(self._steps):
            seconds = self._truth(self._placement, self.step)[0] * self._tail()
            seconds *= math.exp(self._random.gauss(0, self._noise.step)) if self._noise.step else 1.0
            self.steps_s.append(seconds)
            self._true.append(self._truth(self._placement, self.step))
            self.spent_s += seconds
            self.step, pending = self.step + 1, pending + 1
            if self._window and look is not None and (pending == self._window or i + 1 == self._steps):
                windows.append(self._measured(pending))
                pending = 0
                look(windows[-1], self.step)
        return EpochOutcome(
            step=self.step, seconds=self.spent_s - began, train_loss=1.0, validation_loss=1.0, validation_accuracy=0.5,
            learning_rate=0.1, measurements=windows[-1] if windows else self._measured(pending),
        )  # fmt: skip

    def _tail(self) -> float:
        return self._noise.tail if self._noise.tails and self._random.random() < self._noise.tails else 1.0

    def _off(self) -> float:
        return math.exp(self._random.gauss(0, self._noise.own)) if self._noise.own else 1.0

    def _measured(self, steps: int) -> Measurements:
        """Measurements over the last ``steps`` steps, all under the current plan."""
        times, true = self.steps_s[-steps:], self._true[-steps:]
        stat, mean = Stat.of(times), sum(times) / len(times)
        rank_of = {p: i for i, p in enumerate(self.processes)}
        per_rank = []
        for p in range(self._count):
            if p not in rank_of:
                per_rank.append(RankTiming(own_s=0.0, waiting_s=0.0, data_wait_s=0.0, mean_own_s=0.0))
                continue
            off, rank = self._off(), rank_of[p]
            own_times = [off * every[rank] * t / step_s for t, (step_s, every, _) in zip(times, true, strict=True)]
            per_rank.append(
                RankTiming(
                    own_s=median(own_times), mean_own_s=sum(own_times) / len(own_times), data_wait_s=0.0,
                    waiting_s=median(max(0.0, t - own_s) for t, own_s in zip(times, own_times, strict=True)),
                )
            )  # fmt: skip
        links = []
        for same in zip(*(transfers for _, _, transfers in true), strict=True):  # a transfer of the plan, in every step
            seconds = sum(t.seconds for t in same) / len(same) * self._off()
            links.append(replace(same[0], seconds=seconds, n=steps))
        return Measurements(
            plan_fingerprint=fingerprint(self.plan),
            strategy=self.plan.strategy,
            num_ranks=self.plan.num_ranks,
            global_batch=self.plan.global_batch,
            step_time=stat,
            predicted_step_time_s=self.plan.prediction.step_time_s,
            communication_s=None,
            data_wait_s=0.0,
            peak_memory_bytes=None,
            predicted_memory_bytes=self.plan.prediction.memory_bytes_per_rank,
            per_rank=tuple(per_rank) if self._observed else (),
            links=tuple(links) if self._observed else (),
            mean_step_s=mean,
        )

    def save(self, epoch: int) -> None:
        """Do nothing: there is no state."""

    def migrate(self, plan: Plan, processes: tuple[int, ...] | None = None) -> None:
        """Use another plan from the next step on."""
        target = Placement(plan=plan, processes=processes or tuple(range(plan.num_ranks)))
        self.moves.append((self.step, self._placement, target))
        self._placement, self.spent_s = target, self.spent_s + self._move_s

    def agree(self, target: Placement | None) -> Placement | None:
        """Return ``target``: there are no other processes."""
        return target

    def probe(self, *, compute: bool = True) -> Probe:
        """Probe of every process, by the speed of its device, and of every level of links."""
        if not self._observed:
            return Probe()
        profile, cluster = self._machine(self.step)
        links, transfers = Links(cluster), []
        # Slower machines are simulated by profiles with longer times.
        base = sum(t.forward.median for t in profile.timings)
        for i, level in enumerate(cluster.levels):
            size = min(level.devices, self._count)
            if size > (cluster.levels[i - 1].devices if i else 1):
                seconds = links.time("all_reduce", _PROBE_BYTES, size, 1) * self._off()
                transfers.append(
                    Transfer(op="all_reduce", level=i, group_size=size, num_bytes=_PROBE_BYTES, seconds=seconds, n=5)
                )
        compute_s = tuple(base / cluster.speed(p) * self._off() for p in range(self._count)) if compute else ()
        return Probe(compute_s=compute_s, links=tuple(transfers))
