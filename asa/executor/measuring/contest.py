"""Adaptive benchmark: plans run against each other in rounds, chosen by a policy, until it is clear which is fastest.

All plans live in the same ranks and every step is real training on the same samples, as in
:mod:`asa.executor.measuring.benchmark`. Here a plan is built before its first turn, and the measurements so far
determine which plans run next. A new plan takes memory from the others, so all plans of a round warm up together before
its first turn counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn

from asa.executor.measuring.benchmark import BenchOptions, Cell, Entrant, one_step, timed_turn
from asa.executor.model.votes import Votes
from asa.executor.observing.warmup import warm_up
from asa.instruments.devices import device_of_rank
from asa.interfaces.strategy import Strategies
from asa.ir.plan import Plan
from asa.launch import run_ranks, tell
from asa.zoo.data import GlobalOrder, ImageSet


class Policy(Protocol):
    """Chooses the plans of each round; called on rank 0."""

    def next(self, rounds: Sequence[Mapping[int, float]], left_s: float, build_s: float) -> Sequence[int]:
        """Indices of the plans of the next round; empty to stop.

        ``rounds`` are the seconds per step of the plans that ran, per round. ``left_s`` is the remaining time in
        seconds. ``build_s`` is the time that a plan takes before its first turn (0: not known yet).
        """
        ...


def _each(entrants: Sequence[Entrant], images: ImageSet, order: GlobalOrder, votes: Votes) -> float:
    """Run one step of each plan; returns the sum of their seconds."""
    return sum(one_step(e, images, order, votes) for e in entrants)


def _rank(rank: int, plans: Sequence[Plan], build: Callable[[], nn.Module], strategies: Strategies,
          data: Callable[[], tuple[ImageSet, ImageSet]], options: BenchOptions, policy: Policy,
          ends: float) -> tuple[list[Cell], list[dict[int, float]], list[int]]:  # fmt: skip
    votes = Votes(options.timeout_s)
    device = device_of_rank(options.device, rank)
    train = data()[0].to(device)
    order = GlobalOrder(len(train), plans[0].global_batch, options.seed, drop_last=True)
    entrants: dict[int, Entrant] = {}
    rounds: list[dict[int, float]] = []
    longest = 0.0
    while True:
        chosen = votes.tell(list(policy.next(rounds, ends - time.monotonic(), longest)) if rank == 0 else None)
        if not chosen:
            break
        if new := [i for i in chosen if i not in entrants]:
            began = time.monotonic()
            for index in new:
                entrants[index] = Entrant(plans[index], build, strategies, rank, votes, options, device)
                warm_up(partial(one_step, entrants[index], train, order, votes), votes, hurried=True)
            among = [entrants[i] for i in chosen]
            warm_up(partial(_each, among, train, order, votes), votes, least=1)
            longest = max(longest, (time.monotonic() - began) / len(new))
        shift = len(rounds) % len(chosen)
        seconds: dict[int, float] = {}
        for index in (*chosen[shift:], *chosen[:shift]):
            times = timed_turn(entrants[index], train, order, options.steps_per_turn, votes)
            seconds[index] = statistics.mean(t[1] for t in times)
        rounds.append(seconds)
        if rank == 0:
            tell({"round": len(rounds), "left_s": ends - time.monotonic()})
    cells = [entrants[i].cell if i in entrants else Cell(p.strategy) for i, p in enumerate(plans)]
    return cells, rounds, [entrants[i].step if i in entrants else 0 for i in range(len(plans))]


def contest(
    plans: Sequence[Plan],
    build: Callable[[], nn.Module],
    strategies: Strategies,
    data: Callable[[], tuple[ImageSet, ImageSet]],
    options: BenchOptions,
    policy: Policy,
    *,
    on_message: Callable[[int, Any], None] | None = None,
) -> tuple[list[Cell], list[dict[int, float]], list[int]]:
    """Run ``plans`` (of one model and global batch) against each other for at most about ``options.budget_s`` seconds.

    Returns one cell per plan, in order (without steps if it never ran); the rounds; and the number of steps of each
    plan, including warm-up. ``build`` and ``data`` are those of :func:`asa.executor.measuring.benchmark.measure`.

    Raises:
        WorkersFailedError: a rank died.
    """
    ends = time.monotonic() + options.budget_s
    return run_ranks(
        max(p.num_ranks for p in plans), _rank, list(plans), build, strategies, data, options, policy, ends,
        backend="nccl" if options.device == "cuda" else "gloo", threads=1, timeout_s=options.timeout_s,
        on_message=on_message,
    )[0]  # fmt: skip
