"""Benchmark: one training under several plans, measured side by side.

All plans live in the same ranks and take turns of a few steps, in an order that rotates. So disturbances of the machine
affect all of them. The first plan runs twice per round, and its ratio to itself (A/A) shows how far from 1 a ratio gets
by noise alone. Every step of a plan is real training on the same samples.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asa.executor.consistency import conduct_of
from asa.executor.model.groups import Groups, groups_of
from asa.executor.model.materialize import materialize
from asa.executor.model.votes import Votes
from asa.executor.observing.footprint import active_peak, state_bytes
from asa.executor.observing.warmup import warm_up
from asa.executor.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from asa.executor.training.precision import LossScale
from asa.executor.training.settings import TrainSettings
from asa.executor.training.worker import LossCounter, Worker
from asa.instruments.devices import Usage, device_of_rank, watched
from asa.instruments.nvml import card_of
from asa.interfaces.strategy import Strategies
from asa.ir.bench import AccuracyPoint, Comparison
from asa.ir.intervals import median_interval
from asa.ir.plan import Plan
from asa.ir.profile import Stat
from asa.launch import run_ranks, tell
from asa.sharding.collectives.along_axis import silenced
from asa.zoo.data import GlobalOrder, ImageSet
from asa.zoo.inputs import example

_SILENT_STEPS, _LEAST_SILENT, _SILENT_SHARE = 8, 3, 0.2
"""Limits of the measurement of exposed communication: largest and smallest number of pairs of steps with and without
collectives, and the share of the budget that they may take."""
_MAX_ROUNDS = 200
_STRETCH_S, _STRETCH_SHARE, _MOST_STRETCH = 1.0, 0.1, 16
"""Limits of the time for which a plan runs alone while its devices are observed: seconds, share of the budget,
steps."""
_ASYNC_STEPS, MOST_TURN_STEPS = 8, 64
"""Steps per turn if workers of some plan do not synchronize in every step: the usual and the largest number."""


def turn_steps(plans: Sequence[Plan]) -> int:
    """Number of steps per turn. It is 1 if the workers of every plan synchronize in every step. Otherwise it is large
    enough to show the effect of the period: a multiple of all periods, or of the longest if that is too many."""
    disciplines = [p.consistency for p in plans if p.consistency is not None]
    if not disciplines:
        return 1
    periods = [d.period for d in disciplines]
    every = math.lcm(*periods)
    if every > MOST_TURN_STEPS:
        every = max(periods)
    return every * max(1, _ASYNC_STEPS // every)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark.

    Attributes:
        budget_s: seconds for one model, including warm-up and validation; exceeded if it is too short for
            ``least_rounds``.
        epochs: number of epochs that every plan trains, with the learning rates of ``asa train`` and validation after
            each, as far as the budget allows. None: train until the budget is used, and validate ``evaluations`` times.
    """

    device: str = "cpu"
    budget_s: float = 60.0
    steps_per_turn: int = 1
    least_rounds: int = 3
    evaluations: int = 2
    epochs: int | None = None
    evaluation_samples: int = 256
    seed: int = 0
    lr: float | None = None
    timeout_s: float = 300.0


@dataclass
class Cell:
    """Results of one plan. ``turns`` are the seconds per step of each round (a pair per round for the first plan)."""

    strategy: str
    steps: list[float] = field(default_factory=list)
    turns: list[list[float]] = field(default_factory=list)
    data_wait: list[float] = field(default_factory=list)
    communication: list[float] = field(default_factory=list)
    peak_memory_bytes: tuple[int, ...] | None = None
    reserved_memory_bytes: tuple[int, ...] | None = None
    state_memory_bytes: tuple[int, ...] | None = None
    accuracy: list[AccuracyPoint] = field(default_factory=list)
    usage: tuple[Usage, ...] = ()
    usage_steps: int = 0
    samples_per_epoch: int | None = None

    @property
    def communication_s(self) -> float | None:
        """Exposed communication in seconds per step: the median of the pairs, at least 0; None if it was not
        measured."""
        return max(0.0, statistics.median(self.communication)) if self.communication else None

    @property
    def step_time(self) -> Stat:
        """Statistics of all measured steps; each is that of the slowest rank."""
        return Stat.of(self.steps)


class Entrant:
    """One plan on one rank. A rank outside the plan only takes part in the creation of groups and in barriers."""

    def __init__(self, plan: Plan, build: Callable[[], nn.Module], strategies: Strategies, rank: int, votes: Votes,
                 options: BenchOptions, device: torch.device) -> None:  # fmt: skip
        self.plan, self.cell, self.step = plan, Cell(plan.strategy), 0
        self.rate: Callable[[int], float] | None = None
        self.worker: Worker | None = None
        if rank >= plan.num_ranks and plan.consistency is None:
            if plan.num_ranks > 1:
                Groups(rank, groups_of(plan))
            return
        model = materialize(
            plan, build(), example(plan.input_shape), rank=rank, strategies=strategies, device=device,
            seed=options.seed, runs_discipline=True,
        )  # fmt: skip
        model.train()
        optimizer = build_optimizer(plan.optimizer, model.updated, lr=options.lr, offloaded=model.offloaded)
        conduct = conduct_of(model, optimizer, votes)
        self.worker = Worker(
            model=model, optimizer=optimizer, scale=LossScale(plan.precision), votes=votes, precision=plan.precision,
            seed=options.seed, conduct=conduct,
        )  # fmt: skip
        self.counter = LossCounter(device)

    def turn(self, images: ImageSet, order: GlobalOrder, steps: int) -> list[tuple[float, float]]:
        """Train ``steps`` steps. Returns (data, step) seconds of each on this rank."""
        for _ in range(steps):
            per_epoch = order.steps_per_epoch
            epoch, at = divmod(self.step, per_epoch)
            if self.worker is not None:
                if self.rate is not None:
                    set_learning_rate(self.worker.optimizer, self.rate(self.step))
                self.worker.train(images, order.batch(epoch, at), epoch=epoch, step=self.step, counter=self.counter)
            self.step += 1
        if self.worker is None:
            return [(0.0, 0.0)] * steps
        times = [(t.data, t.work) for t in self.worker.clock.collect()]
        if self.plan.consistency is None:
            return times
        # Workers do not synchronize in every step, so only the mean of a worker's steps is meaningful.
        return [(statistics.mean(t[0] for t in times), statistics.mean(t[1] for t in times))] * len(times)


def _rates(plan: Plan, options: BenchOptions, steps: int) -> Callable[[int], float]:
    """Learning rate by step, as in ``asa train`` for a run of ``steps`` steps; 0 after its end."""
    settings = TrainSettings(out="", lr=options.lr)
    peak, warmup = settings.peak_learning_rate(plan.optimizer), settings.warm_up(steps)
    return lambda number: learning_rate(min(1.0, number / steps), peak, warmup=warmup, step=1 / steps)


def slowest(votes: Votes, times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Element-wise maximum of ``times`` over ranks."""
    flat = votes.gather([v for pair in times for v in pair])
    worst = [max(column) for column in zip(*flat, strict=True)]
    return list(zip(worst[::2], worst[1::2], strict=True))


def barrier(votes: Votes) -> None:
    """Wait until all ranks have reached this point."""
    votes.gather([0.0])


@contextmanager
def _meeting(entrant: Entrant) -> Iterator[None]:
    """Context in which a worker waits for all others after several steps. Meanwhile no server makes the others wait for
    the gradient of its next step, and it begins that with the weights of then."""
    conduct = None if entrant.worker is None else entrant.worker.conduct
    if conduct is not None:
        conduct.pause()
    yield
    if conduct is not None:
        conduct.resume()


def one_step(entrant: Entrant, images: ImageSet, order: GlobalOrder, votes: Votes) -> float:
    """Seconds of one step of the slowest rank; all ranks start together."""
    barrier(votes)
    return slowest(votes, entrant.turn(images, order, 1))[0][1]


def _memory(entrant: Entrant, images: ImageSet, order: GlobalOrder) -> int:
    """Peak of active memory in one step on this rank, bytes; 0 on a rank outside the plan."""
    worker = entrant.worker
    if worker is None:
        entrant.turn(images, order, 1)
        return 0
    return active_peak(worker, lambda: entrant.turn(images, order, 1))


def _memory_figures(entrant: Entrant, images: ImageSet, order: GlobalOrder) -> list[float]:
    """Memory of this rank in bytes; all 0 on a rank outside the plan.

    The values are the peak of active memory in a step, the state that outlives a step, and the memory reserved by the
    allocator beyond what other plans hold (-1 on CPUs, whose allocator reserves none).
    """
    worker = entrant.worker
    cuda = worker is not None and worker.model.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    active = _memory(entrant, images, order)
    reserved = torch.cuda.max_memory_reserved() if cuda else 0
    entrant.turn(images, order, 1)  # allocate gradients again, which count as state
    if worker is None:
        return [0.0, 0.0, 0.0]
    state = state_bytes(worker)
    return [float(active), float(state), float(max(active, reserved - max(0, before - state))) if cuda else -1.0]


def _usage(entrant: Entrant, images: ImageSet, order: GlobalOrder, votes: Votes, stretch_s: float) -> None:
    """Run a plan alone for about ``stretch_s`` seconds, and record the utilisation of every rank's device."""
    step_s = statistics.median(entrant.cell.steps)
    steps = int(votes.tell(max(2, min(_MOST_STRETCH, round(stretch_s / max(step_s, 1e-9))))))
    worker = entrant.worker
    card = None if worker is None else card_of(worker.model.device)
    barrier(votes)
    with watched(card) as usage:
        entrant.turn(images, order, steps)
    unknown = (usage.busy, usage.energy_j, usage.clock_mhz)
    own = [usage.seconds, *(-1.0 if v is None else v for v in unknown), float(usage.throttled)]
    with _meeting(entrant):
        figures = votes.gather(own)
    entrant.cell.usage_steps = steps
    entrant.cell.usage = tuple(
        Usage(
            seconds=f[0],
            busy=None if f[1] < 0 else f[1],
            energy_j=None if f[2] < 0 else f[2],
            clock_mhz=None if f[3] < 0 else f[3],
            throttled=int(f[4]),
        )
        for f in figures[: entrant.plan.num_processes]
    )


def _communication(entrant: Entrant, images: ImageSet, order: GlobalOrder, votes: Votes, steps: int) -> list[float]:
    """Exposed communication in seconds, one value per pair: the time of a step minus that of the same step without
    collectives.

    Ends the training, because steps without collectives leave ranks with different weights.
    """
    if entrant.plan.consistency is not None:  # a discipline's messages are not collectives and cannot be left out
        return []
    if entrant.plan.num_ranks == 1:
        entrant.step += 2 * steps
        return [0.0] * steps
    differences = []
    for _ in range(steps):
        barrier(votes)
        (communicating,) = slowest(votes, entrant.turn(images, order, 1))
        barrier(votes)
        with ExitStack() as stack:
            stack.enter_context(silenced())
            if entrant.worker is not None:
                stack.enter_context(entrant.worker.model.no_sync())
            (silent,) = slowest(votes, entrant.turn(images, order, 1))
        differences.append(communicating[1] - silent[1])
    return differences


def _evaluate(entrant: Entrant, test: ImageSet, votes: Votes, seconds: float, epoch: float) -> AccuracyPoint:
    figures = [0.0] * 6
    if entrant.worker is not None:
        counter = entrant.worker.validate(test, min(len(test), entrant.plan.global_batch))
        assert counter is not None  # None only if validation may be given up
        figures = [*counter.take(), *entrant.counter.take()]
    loss, hits, rows, train_loss, _, train_rows = (sum(c) for c in zip(*votes.gather(figures), strict=True))
    losses = (train_loss / max(train_rows, 1.0), loss / max(rows, 1.0))
    known = [value if math.isfinite(value) else None for value in losses]
    return AccuracyPoint(
        epoch=epoch, seconds=seconds, train_loss=known[0], validation_loss=known[1],
        validation_accuracy=hits / max(rows, 1.0),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """How a benchmark spends its time after warm-up. In each round every plan has one turn, and the first plan two.

    Attributes:
        first: steps that every plan has taken in warm-up.
        marks: numbers of a plan's own steps after which it is validated. They are the same for all plans, also for the
            one with two turns per round.
        silent: steps without communication, for the share of communication.
        stretch_s: seconds in which the use of the device is observed, for each plan.
    """

    rounds: int
    first: int
    marks: frozenset[int]
    silent: int
    stretch_s: float


def _schedule(
    entrants: Sequence[Entrant], step_s: Sequence[float], order: GlobalOrder, options: BenchOptions, votes: Votes,
    left_s: float,
) -> _Schedule:  # fmt: skip
    """The schedule that fits into ``left_s`` seconds, if the plans' steps take ``step_s`` (collective)."""
    silent = int(votes.tell(min(_SILENT_STEPS, max(
        _LEAST_SILENT, int(_SILENT_SHARE * options.budget_s / max(2 * sum(step_s), 1e-9))
    ))))  # fmt: skip
    per_epoch, per_turn, first = order.steps_per_epoch, options.steps_per_turn, entrants[0].step
    validations = options.evaluations if options.epochs is None else options.epochs
    validating = validations * 0.5 * options.evaluation_samples / entrants[0].plan.global_batch
    stretch_s = min(_STRETCH_S, _STRETCH_SHARE * options.budget_s / len(entrants))
    fixed_s = (validating + 2 * silent + 7) * sum(step_s) + sum(max(stretch_s, 2 * s) for s in step_s)
    round_s = per_turn * (step_s[0] + sum(step_s))
    most = _MAX_ROUNDS if options.epochs is None else -(-(options.epochs * per_epoch - first) // per_turn)
    possible = int((left_s - fixed_s) / max(round_s, 1e-9))
    rounds = int(votes.tell(max(options.least_rounds, min(most, possible))))
    last = first + rounds * per_turn
    if options.epochs is None:
        marks = {first + per_turn * (rounds * (i + 1) // options.evaluations) for i in range(validations)}
    else:
        marks = {last} | {e * per_epoch for e in range(1, options.epochs + 1) if first < e * per_epoch <= last}
    return _Schedule(rounds=rounds, first=first, marks=frozenset(marks), silent=silent, stretch_s=stretch_s)


def timed_turn(
    entrant: Entrant, images: ImageSet, order: GlobalOrder, steps: int, votes: Votes
) -> list[tuple[float, float]]:
    """Train ``steps`` steps of a plan; returns and notes (waiting for data, work) of each, in seconds of the slowest
    rank (collective)."""
    barrier(votes)
    own = entrant.turn(images, order, steps)
    with _meeting(entrant):
        times = slowest(votes, own)
    entrant.cell.data_wait += [t[0] for t in times]
    entrant.cell.steps += [t[1] for t in times]
    return times


def _train_in_turns(
    entrants: Sequence[Entrant], schedule: _Schedule, train: ImageSet, test: ImageSet, order: GlobalOrder,
    options: BenchOptions, votes: Votes,
) -> None:  # fmt: skip
    """Train all plans round by round, and note the times of their steps and their accuracy (collective)."""
    turns = [0, *range(len(entrants))]
    spent = [0.0] * len(entrants)
    for number in range(1, schedule.rounds + 1):
        shift = number % len(turns)
        paired: dict[int, list[float]] = {}
        for index in turns[shift:] + turns[:shift]:
            entrant = entrants[index]
            before = entrant.step
            times = timed_turn(entrant, train, order, options.steps_per_turn, votes)
            paired.setdefault(index, []).append(statistics.mean(t[1] for t in times))
            spent[index] += sum(t[0] + t[1] for t in times)
            if any(before < mark <= entrant.step for mark in schedule.marks):
                # Steps of the warm-up trained, too.
                trained_s = spent[index] * entrant.step / (entrant.step - schedule.first)
                point = _evaluate(entrant, test, votes, trained_s, entrant.step / order.steps_per_epoch)
                entrant.cell.accuracy.append(point)
        for index, seconds in paired.items():
            entrants[index].cell.turns.append(seconds)
        if votes.rank == 0:
            tell({"round": number, "rounds": schedule.rounds, "cells": [e.cell for e in entrants]})


def _rank(rank: int, plans: Sequence[Plan], build: Callable[[], nn.Module], strategies: Strategies,
          data: Callable[[], tuple[ImageSet, ImageSet]], options: BenchOptions) -> list[Cell]:  # fmt: skip
    votes = Votes(options.timeout_s)
    device = device_of_rank(options.device, rank)
    began = time.monotonic()
    train, test = (images.to(device) for images in data())
    test = test.part(0, options.evaluation_samples)
    order = GlobalOrder(len(train), plans[0].global_batch, options.seed, drop_last=True)
    entrants = [Entrant(p, build, strategies, rank, votes, options, device) for p in plans]
    for entrant in entrants:
        entrant.cell.samples_per_epoch = len(train)
        if options.epochs is not None:
            entrant.rate = _rates(plans[0], options, options.epochs * order.steps_per_epoch)
    step_s = [0.0] * len(entrants)

    def every() -> float:
        step_s[:] = [one_step(e, train, order, votes) for e in entrants]
        return sum(step_s)

    warm_up(every, votes)
    schedule = _schedule(entrants, step_s, order, options, votes, options.budget_s - (time.monotonic() - began))
    _train_in_turns(entrants, schedule, train, test, order, options, votes)
    for entrant in entrants:
        _usage(entrant, train, order, votes, schedule.stretch_s)
    for entrant in entrants:
        own = _memory_figures(entrant, train, order)
        with _meeting(entrant):
            memory = votes.gather(own)[: entrant.plan.num_processes]
        entrant.cell.peak_memory_bytes = tuple(int(f[0]) for f in memory)
        entrant.cell.state_memory_bytes = tuple(int(f[1]) for f in memory)
        entrant.cell.reserved_memory_bytes = None if memory[0][2] < 0 else tuple(int(f[2]) for f in memory)
    for entrant in entrants:
        entrant.cell.communication = _communication(entrant, train, order, votes, schedule.silent)
    for entrant in entrants:
        if entrant.worker is not None and entrant.worker.conduct is not None:
            entrant.worker.conduct.close()
    return [e.cell for e in entrants]


def measure(
    plans: Sequence[Plan],
    build: Callable[[], nn.Module],
    strategies: Strategies,
    data: Callable[[], tuple[ImageSet, ImageSet]],
    options: BenchOptions,
    *,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Cell]:
    """Benchmark ``plans`` (of one model and global batch) against each other. Returns a cell for each, in order.

    ``build`` makes the model, and ``data`` the training and test images; both are called on every rank. After every
    round ``on_message`` gets ``{"round": r, "rounds": n, "cells": [...]}`` with all cells so far.

    Raises:
        WorkersFailedError: a rank died.
    """
    ranks = max(p.num_processes for p in plans)
    backend = "nccl" if options.device == "cuda" else "gloo"
    results = run_ranks(
        ranks, _rank, list(plans), build, strategies, data, options,
        backend=backend, threads=1, timeout_s=options.timeout_s, on_message=on_message,
    )  # fmt: skip
    cells: list[Cell] = results[0]
    return cells


def compare(model: str, left: Cell, right: Cell, *, others_cores: float | None = None) -> Comparison:
    """Median of the paired ratios of step times, ``left`` over ``right``, with its confidence interval. If both are one
    cell, it is the A/A test."""
    if left is right:
        ratios = [turn[0] / turn[1] for turn in left.turns if len(turn) > 1]
    else:
        ratios = [statistics.mean(a) / statistics.mean(b) for a, b in zip(left.turns, right.turns, strict=True)]
    low, high = median_interval(ratios)
    return Comparison(
        model=model, left=left.strategy, right=right.strategy, pairs=len(ratios), ratio=statistics.median(ratios),
        low=low, high=high, others_cores=others_cores,
    )  # fmt: skip
