"""Runs one rank of a plan for many devices on one device, with its real parameters, shards and activations.

The world is a fake process group (``torch.testing._internal.distributed.fake_pg``), in which every collective returns
at once and moves nothing. Data from other stages is random, of the right shape and type. All computation of the rank is
real, but values are not: nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asa.errors import UsageError
from asa.executor.model.materialize import materialize
from asa.executor.model.parallel import Links, ParallelModel
from asa.executor.model.votes import Votes
from asa.executor.observing.footprint import active_peak
from asa.executor.observing.random_inputs import random_inputs
from asa.executor.observing.spans import ComponentTimer
from asa.executor.training.optimizer import build_optimizer
from asa.executor.training.precision import LossScale
from asa.executor.training.worker import LossCounter, Worker
from asa.interfaces.strategy import Strategies
from asa.ir.plan import Plan
from asa.ir.profile import Precision, Stat
from asa.ir.rehearsal import Spans
from asa.sharding.collectives.transfer import Arrival, Link
from asa.sharding.gradients.bucket import Bucket, Wait
from asa.tracing.autocast import LOWER
from asa.zoo.inputs import example

_WARM_UP = 3
"""Number of steps before any measurement. They allocate memory, tune kernels, and let DDP rebuild its buckets."""


@contextmanager
def _world(num_ranks: int, rank: int, *, results: bool) -> Iterator[None]:
    """Context in which this process is rank ``rank``, the only real one, of a world of ``num_ranks`` ranks.

    With ``results``, results of reductions can be read afterwards, as hooks that compress gradients do. That costs a
    pass over the data.

    Raises:
        UsageError: this process is a rank of a real group.
    """
    if dist.is_initialized():
        raise UsageError("a rank of a running group cannot rehearse another; start it by itself")
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

    options = FakeProcessGroup.Options()
    if hasattr(options, "simulate_uniform_ranks"):  # older versions (torch 2.11) always provide results
        options.simulate_uniform_ranks = results
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks, pg_options=options)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Supplied(Link):
    """A link without another end: sending returns at once, and received data is random."""

    def __init__(self, link: Link, precision: Precision) -> None:
        self._ends, self._rank, self._messages = link._ends, link._rank, link._messages
        self._dtype = LOWER.get(precision, torch.float32)
        self._samples: dict[tuple[int, ...], Tensor] = {}

    def send(self, x: Tensor, rows: int) -> None:
        x.detach().contiguous()

    def receive(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Arrival:
        count, _ = self._exchanges(rows)
        form = (count, *shape)
        if form not in self._samples:
            self._samples[form] = torch.randn(form, dtype=dtype, device=device) / max(1, count)
        return Arrival(self._samples[form].clone(), [])

    def tell_dtype(self, training: bool, dtype: torch.dtype, device: torch.device) -> None:
        pass

    def hear_dtype(self, training: bool, device: torch.device) -> torch.dtype:
        return self._dtype

    def finish_sends(self, keep: int = 0) -> None:
        pass


def _supplied(links: Links, precision: Precision) -> Links:
    def end(link: Link | None) -> Link | None:
        return None if link is None else _Supplied(link, precision)

    return replace(
        links, arriving=end(links.arriving), leaving=end(links.leaving), gradient_out=end(links.gradient_out),
        gradient_in=end(links.gradient_in),
    )  # fmt: skip


@torch.no_grad()
def _cleanse(model: ParallelModel) -> None:
    """Set scattered gradients to zero. They contain what was in their memory before. Values that are not finite, or
    very small, would change the weights, and so the duration of the next step."""
    for p in model.parameters():
        if isinstance(p.grad, DTensor):
            p.grad.to_local().zero_()


def rehearse(
    plan: Plan,
    model: nn.Module,
    *,
    rank: int,
    strategies: Strategies,
    device: torch.device,
    steps: int = 10,
    seed: int = 0,
    say: Callable[[float, str], None] = lambda _f, _t: None,
) -> Spans:
    """Run ``steps`` steps of ``rank`` under ``plan`` on ``device``, and as many again with a time stamp at every
    component.

    Raises:
        UsageError: the plan has no such rank, or this process is one of a real group.
        InvalidInputError: the plan is of another model.
    """
    if not 0 <= rank < plan.num_ranks:
        raise UsageError(f"the plan has ranks 0 to {plan.num_ranks - 1}, asked for rank {rank}")
    votes = Votes()  # before the process group exists, so that every vote is local
    with _world(plan.num_ranks, rank, results=plan.compression != "none"):
        say(0.0, "building")
        worker = _worker(plan, model, rank, strategies, device, seed, votes)
        train, clock = _trainer(worker, plan), worker.clock
        for i in range(_WARM_UP):
            train()
            say((1 + i) / (2 * steps + _WARM_UP + 2), "warming up")
        clock.collect()
        for i in range(steps):
            train()
            say((1 + _WARM_UP + i) / (2 * steps + _WARM_UP + 2), "steps")
        times = [step.work for step in clock.collect()]
        watch = ComponentTimer(worker)
        with watch.timing() as laps:
            for i in range(steps):
                train()
                say((1 + _WARM_UP + steps + i) / (2 * steps + _WARM_UP + 2), "components")
        saved = watch.saved(train)
        highest = active_peak(worker, train)
    components, update = laps(saved)
    return Spans(
        rank=rank, steps=steps, step_s=Stat.of(times), components=components, update_s=update,
        peak_memory_bytes=highest,
    )  # fmt: skip


def _worker(
    plan: Plan, model: nn.Module, rank: int, strategies: Strategies, device: torch.device, seed: int, votes: Votes
) -> Worker:
    plan = replace(plan, compression="none")
    parallel = materialize(
        plan, model, example(plan.input_shape), rank=rank, strategies=strategies, device=device, seed=seed
    )
    parallel.train()
    for replica in parallel.reduction.replicas:
        replica.send = _at_once
    parallel.links = _supplied(parallel.links, plan.precision)
    optimizer = build_optimizer(plan.optimizer, parallel.updated, offloaded=parallel.offloaded)
    return Worker(
        model=parallel, optimizer=optimizer, scale=LossScale(plan.precision), votes=votes, precision=plan.precision,
        seed=seed,
    )  # fmt: skip


def _at_once(_bucket: Bucket) -> Wait:
    """Send nothing: a fake process group returns no handles to wait for."""
    return lambda: None


def _trainer(worker: Worker, plan: Plan) -> Callable[[], None]:
    images, indices = random_inputs(plan, worker.model.device), torch.arange(plan.global_batch)
    counter = LossCounter(worker.model.device)

    def clean(*_: Any) -> None:
        _cleanse(worker.model)

    worker.optimizer.register_step_pre_hook(clean)

    def train() -> None:
        worker.train(images, indices, epoch=0, step=0, counter=counter)

    return train
