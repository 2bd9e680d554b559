"""One rank of a plan for many devices, on one: its real parameters, shards and activations, computed for real.

The world is a fake process group (``torch.testing._internal.distributed.fake_pg``), in which every collective is over
at once and moves nothing; what would come from another stage is random data of the right form. Everything a rank does
by itself is what it does in the real world. Values are not: nothing here is trained.
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
from asa.executor.observing.noise import noise
from asa.executor.observing.spans import Watch
from asa.executor.training.clock import StepClock
from asa.executor.training.optimizer import build_optimizer
from asa.executor.training.precision import DTYPE, LossScale
from asa.executor.training.worker import LossCounter, Worker
from asa.interfaces.strategy import Strategies
from asa.ir.plan import Plan
from asa.ir.profile import Precision, Stat
from asa.ir.rehearsal import Spans
from asa.sharding.bucket import Bucket, Wait
from asa.sharding.transfer import Arrival, Link
from asa.zoo.inputs import example

_WARM_UP = 3
"""Steps before any figure is taken: allocation, autotuning, DDP's rebuilding of its buckets."""


@contextmanager
def _world(num_ranks: int, rank: int, *, results: bool) -> Iterator[None]:
    """Inside, this process is one rank of ``num_ranks``, and the only one. ``results``: what is reduced can be asked
    for afterwards, as the hooks that compress gradients do; that costs a pass over it.

    Raises:
        UsageError: it is a rank of a real group.
    """
    if dist.is_initialized():
        raise UsageError("a rank of a running group cannot rehearse another; start it by itself")
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

    options = FakeProcessGroup.Options()
    options.simulate_uniform_ranks = results
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks, pg_options=options)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Supplied(Link):
    """A link whose other end is not there: what is sent is gone at once, what is received is random."""

    def __init__(self, link: Link, precision: Precision) -> None:
        self._ends, self._rank, self._messages = link._ends, link._rank, link._messages
        self._dtype = DTYPE.get(precision, torch.float32)
        self._drawn: dict[tuple[int, ...], Tensor] = {}

    def send(self, x: Tensor, rows: int) -> None:
        x.detach().contiguous()

    def receive(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Arrival:
        count, _ = self._own(rows)
        form = (count, *shape)
        if form not in self._drawn:
            self._drawn[form] = torch.randn(form, dtype=dtype, device=device) / max(1, count)
        return Arrival(self._drawn[form].clone(), [])

    def tell_dtype(self, training: bool, dtype: torch.dtype, device: torch.device) -> None:
        pass

    def hear_dtype(self, training: bool, device: torch.device) -> torch.dtype:
        return self._dtype

    def settle(self, keep: int = 0) -> None:
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
    """A scattered gradient may be whatever lay in its memory: nothing of it may reach the weights, where numbers that
    are not finite, or very small, would change how long the next step takes."""
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
    """Run ``steps`` steps of ``rank`` under ``plan`` on ``device``, and as many again with a mark at every component.

    Raises:
        UsageError: the plan has no such rank, or this process is one of a real group.
        InvalidInputError: the plan is of another model.
    """
    if not 0 <= rank < plan.num_ranks:
        raise UsageError(f"the plan has ranks 0 to {plan.num_ranks - 1}, asked for rank {rank}")
    votes = Votes()  # taken before there is a world, so that every vote is this rank's own
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
        watch = Watch(worker)
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
    made = materialize(
        plan, model, example(plan.input_shape), rank=rank, strategies=strategies, device=device, seed=seed
    )
    made.train()
    for replica in made.reduction.replicas:
        replica.send = _at_once
    made.links = _supplied(made.links, plan.precision)
    optimizer = build_optimizer(plan.optimizer, made.updated, offloaded=made.offloaded)
    return Worker(
        model=made, optimizer=optimizer, scale=LossScale(plan.precision), votes=votes, clock=StepClock(device),
        precision=plan.precision, seed=seed, label_smoothing=0.0,
    )  # fmt: skip


def _at_once(_bucket: Bucket) -> Wait:
    """Nothing is sent: a made-up process group hands out nothing to wait for."""
    return lambda: None


def _trainer(worker: Worker, plan: Plan) -> Callable[[], None]:
    images, indices = noise(plan, worker.model.device), torch.arange(plan.global_batch)
    tally = LossCounter(worker.model.device)

    def clean(*_: Any) -> None:
        _cleanse(worker.model)

    worker.optimizer.register_step_pre_hook(clean)

    def train() -> None:
        worker.train(images, indices, epoch=0, step=0, tally=tally)

    return train
