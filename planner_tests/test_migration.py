"""From every plan to every other, to the bit: only what is missed travels, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.errors import WorkersFailedError
from asa.executor.model.materialize import materialize
from asa.executor.model.state import full_optimizer_state, full_state, load_full_optimizer_state
from asa.executor.model.step import played
from asa.executor.model.template import TracedTemplate
from asa.executor.model.votes import Votes
from asa.executor.training import migration
from asa.executor.training.checkpointer import Checkpointer
from asa.executor.training.migration import Traffic, _rounds, _split, _Transfer, move, parts_of, target_parts
from asa.executor.training.optimizer import build_optimizer
from asa.executor.training.precision import LossScale
from asa.executor.training.settings import TrainSettings
from asa.executor.training.worker import Worker
from asa.ir.plan import Plan
from asa.ir.region import size
from asa.launch import run_ranks
from asa.strategies import offered
from asa.tracing import TracedModel
from planner_tests.hand_plans import hand_plan, traced, uniform
from planner_tests.small_models import INPUT, build
from planner_tests.stage_plans import staged

CLASSES = {"blocks": 10, "vision_transformer": 10, "tables": 10}
BATCH = 24
Placed = tuple[Plan, tuple[int, ...]]


@cache
def _traced(name: str) -> TracedModel:
    return traced(build(name), INPUT)


@cache
def _plans(name: str, processes: int) -> list[Placed]:
    """Every strategy, cut and width there is for 1 to ``processes`` ranks, the ranks on various processes."""
    model = _traced(name)

    def one(width: int, choose: Any, strategy: str = "replicate") -> Plan:
        return hand_plan(
            model, width, choose, input_shape=INPUT, num_classes=CLASSES[name], global_batch=BATCH,
            optimizer="adamw", data_strategy=lambda _: strategy,
        )  # fmt: skip

    def mixed(width: int) -> Any:
        return lambda i, _name: [(width, 1), (1, width), (1, 1)][i % 3]

    def cut(widths: list[int], **options: Any) -> Plan:
        return staged(one(2, uniform(1, 2)), widths, **options)

    found = [one(1, uniform(1, 1))]
    for width in range(2, processes + 1):
        found += [one(width, uniform(width, 1), s) for s in ("replicate", "zero1", "zero2", "zero3")]
        found += [one(width, uniform(1, width)), one(width, mixed(width))]
    found += [cut([1, 1], schedule="gpipe"), cut([1, 1], cuts=[1])]
    if processes >= 3:
        found += [cut([1, 2], strategy=lambda _: "zero3"), cut([2, 1], degrees=lambda _, w: (1, w)), cut([1, 1, 1])]
    order = list(range(processes))
    turned = [order[::-1], order, [*order[1:], order[0]]]
    return [(plan, tuple(turned[i % 3][: plan.num_ranks])) for i, plan in enumerate(found)]


def _digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class _Unknown(TracedTemplate):
    """A template whose copies have no weight that anybody could take for one."""

    def copy(self) -> TracedModel:
        traced = super().copy()
        for p in (p for c in traced.components for p in c.parameters()):
            torch.nn.init.constant_(p, float("nan"))
        return traced


class _Run:
    """A worker that goes from plan to plan in float64, at learning rate 0."""

    def __init__(self, name: str, placed: Placed, out: Path, form: Any = torch.preserve_format) -> None:
        self.votes = Votes(120)
        self.model = copy.deepcopy(_traced(name))
        for component in self.model.components:
            component.to(torch.float64, memory_format=form)
            component.input_dtype = torch.float64
        self.step = 0
        settings = TrainSettings(out=str(out))
        self.keeper = Checkpointer(
            folder=out, run="test", settings=settings, num_samples=BATCH, votes=self.votes, announce=lambda _: None
        )
        self.template: _Unknown | None = None
        self.worker = self.made(placed)
        kept = self.worker.model.template
        self.template = _Unknown(traced=kept.traced, modes=kept.modes)

    def made(self, placed: Placed) -> Worker:
        plan, processes = placed
        model = materialize(
            plan, self.template or copy.deepcopy(self.model), torch.empty(0), rank=self.votes.rank,
            strategies=offered(), device=torch.device("cpu"), processes=processes, timeout_s=120, keep_template=True,
        )  # fmt: skip
        return Worker(
            model=model, optimizer=build_optimizer("adamw", model.updated, lr=0.0, weight_decay=0.0),
            scale=LossScale("fp32"), votes=self.votes, precision="fp32", seed=0,
        )  # fmt: skip

    def train(self) -> None:
        """A step that changes moments and running statistics, and no weight."""
        generator = torch.Generator().manual_seed(self.step)
        inputs = torch.randn(BATCH, *INPUT, generator=generator, dtype=torch.float64)
        labels = torch.randint(10, (BATCH,), generator=generator)
        self.worker.model.zero_grad()
        played(
            self.worker.model, torch.arange(BATCH), self.step, inputs.__getitem__, labels.__getitem__,
            loss_fn=nn.functional.cross_entropy,
        )  # fmt: skip
        self.worker.optimizer.step()
        self.worker.model.share_updates()
        self.step += 1

    def go(self, placed: Placed) -> None:
        old = self.worker
        self.worker, _ = self.keeper.move(old, lambda: self.made(placed))
        old.model.close()

    def state(self) -> tuple[str, str]:
        """Weights, and everything that must survive a move; the same words on every process."""
        model, optimizer = self.worker.model, self.worker.optimizer
        model.average_buffers()
        everything = full_state(model)
        floats = {name for c in self.model.components for name, _ in c.named_parameters()}
        weights = _digest({name: t for name, t in everything.items() if name in floats})
        mine = [weights, _digest(everything | full_optimizer_state(model, optimizer))]
        told = [self.votes.exchange(mine)[p] for p in model.processes]
        assert all(one == told[0] for one in told)
        return told[0][0], told[0][1]


def _walk(rank: int, name: str, processes: int, stops: Sequence[int], out: Path) -> list[str]:
    plans = _plans(name, processes)
    run = _Run(name, plans[stops[0]], out)
    run.train()
    wrong, (weights, _) = [], run.state()
    for i, stop in enumerate(stops[1:]):
        if i % 7 == 0:
            run.train()
        before = run.state()
        run.go(plans[stop])
        after = run.state()
        if after != before or after[0] != weights:
            wrong.append(f"{stops[i]} to {stop}")
    return wrong


def _moves(name: str, processes: int, stops: Sequence[int], out: Path) -> None:
    _plans(name, processes)  # once, for all ranks
    found = run_ranks(processes, _walk, name, processes, stops, out, threads=1, timeout_s=120)
    assert found == [[]] * processes


def test_through_all_plans_of_two_ranks_to_the_bit(tmp_path: Path) -> None:
    """Each once, and back: ``benchmarks/migrate.py --pairs`` goes from every one to every other."""
    _moves("blocks", 2, [*range(len(_plans("blocks", 2))), 3, 0], tmp_path)


def test_fused_attention_and_stages_on_three_ranks_to_the_bit(tmp_path: Path) -> None:
    count = len(_plans("vision_transformer", 3))
    _moves("vision_transformer", 3, random.Random(1).sample(range(count), 6), tmp_path)


def _bytes_moved(rank: int, out: Path) -> list[tuple[Traffic, int, int, int]]:
    """From replicas to halves of every linear layer, back, and to one process alone; bytes held before and after, and
    those after of which the memory is the old one."""
    plans = _plans("vision_transformer", 2)
    replicas, halves, alone = plans[1], plans[5], plans[0]
    run = _Run("vision_transformer", (replicas[0], (0, 1)), out)
    run.train()
    found = []
    for plan in (halves[0], replicas[0], alone[0]):
        old, new = run.worker, run.made((plan, (0, 1)[: plan.num_ranks]))
        before = parts_of(old.model, old.optimizer)
        moved = move(before, target_parts(new.model), new.model, new.optimizer, run.votes)
        after = parts_of(new.model, new.optimizer)
        old_memory = {p.tensor.data_ptr() for p in before}
        kept = [p for p in after if p.tensor.data_ptr() in old_memory]
        assert all("/" in p.name for p in kept), "only optimizer state"
        held, holds, keeps = (sum(p.tensor.nbytes for p in some) for some in (before, after, kept))
        found.append((moved, held, holds, keeps))
        run.worker = new
        old.model.close()
    return found


def test_only_what_is_missed_travels(tmp_path: Path) -> None:
    _plans("vision_transformer", 2)
    found = run_ranks(2, _bytes_moved, tmp_path, threads=1, timeout_s=120)
    for rank, states in enumerate(found):
        (to_halves, _, half, whole), (to_replicas, _, full, again), (to_one, _, last, all_kept) = states
        assert whole == again > 0, "state of layers that are not split stays where it is"
        assert (to_halves.sent_bytes, to_halves.received_bytes) == (0, 0), "each has its half already"
        assert to_halves.copied_bytes == half - whole
        assert to_replicas.copied_bytes == half - again
        assert full - half <= to_replicas.received_bytes <= (full - half) + 16 * 200, "the other half, and padding"
        assert (to_one.sent_bytes, to_one.received_bytes) == (0, 0)
        assert last == (0 if rank else full)
        assert to_one.copied_bytes == last - all_kept
        assert all_kept > last // 2 or rank


def _ping_pong(rank: int, out: Path) -> list[tuple[int, int, int]]:
    plans = _plans("blocks", 2)
    run = _Run("blocks", plans[1], out)
    run.train()
    found = []
    for _ in range(4):
        for stop in (6, 7, 1):
            run.go(plans[stop])
        gc.collect()
        groups = len(dist.distributed_c10d._world.pg_map)
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count(), groups))
    return found


def test_moving_to_and_fro_leaves_nothing_behind(tmp_path: Path) -> None:
    _plans("blocks", 2)
    for found in run_ranks(2, _ping_pong, tmp_path, threads=1, timeout_s=120):
        assert found[2:] == [found[2]] * 2


def _broken(
    rank: int, processes: int, stops: tuple[int, int], liar: int, misled: int, out: Path
) -> tuple[str, bool, str, str]:  # fmt: skip
    plans = _plans("blocks", processes)
    run = _Run("blocks", plans[stops[0]], out)
    run.train()
    before, old = run.state(), run.worker
    usual = run.votes.started

    def flipped(out: tuple[Tensor, int] | None, into: Any) -> Any:
        if out is not None and out[1] == misled:
            out = out[0].clone(), out[1]
            out[0][3] ^= 1
        return usual(out, into)

    if rank == liar:
        run.votes.started = flipped  # type: ignore[method-assign]
    with pytest.raises(WorkersFailedError) as caught:
        run.go(plans[stops[1]])
    run.votes.started = usual  # type: ignore[method-assign]
    same = run.worker is old and run.state() == before
    run.train()
    weights = run.state()[0]
    run.go(plans[stops[1]])
    return str(caught.value), same, weights, run.state()[0]


@pytest.mark.parametrize(
    ("processes", "stops", "liar", "misled"),
    [(2, (5, 1), 1, 0), (3, (11, 7), 1, 2), (4, (17, 13), 2, 0), (4, (0, 13), 3, 1)],
    ids=["halves", "thirds", "quarters", "one sends all"],
)  # fmt: skip
def test_a_flipped_bit_keeps_the_old_plan_on_all_ranks(
    processes: int, stops: tuple[int, int], liar: int, misled: int, tmp_path: Path
) -> None:
    """Also if one rank alone was misled, by one of several that sent it something."""
    _plans("blocks", processes)
    one, *others = run_ranks(processes, _broken, processes, stops, liar, misled, tmp_path, threads=1, timeout_s=120)
    assert others == [one] * (processes - 1)
    assert one[0] == "weights were corrupted on their way to the new plan; the old plan stays"
    assert one[1]
    assert one[2] == one[3]


def _unreadable(rank: int, out: Path) -> tuple[str, bool]:
    plans = _plans("blocks", 2)
    run = _Run("blocks", plans[5], out)
    run.train()
    before, new = run.state(), run.made(plans[1])
    parts = parts_of(run.worker.model, run.worker.optimizer)
    if rank == 1:
        parts = [replace(part, tensor=part.tensor.to("meta")) for part in parts]
    with pytest.raises(WorkersFailedError) as caught:
        move(parts, target_parts(new.model), new.model, new.optimizer, run.votes)
    new.model.close()
    same = run.state() == before
    run.train()
    run.go(plans[1])
    return str(caught.value), same


def test_a_rank_that_fails_in_the_middle_keeps_the_old_plan_on_all_ranks(tmp_path: Path) -> None:
    _plans("blocks", 2)
    one, two = run_ranks(2, _unreadable, tmp_path, threads=1, timeout_s=120)
    assert one == two
    assert one[0].startswith("rank 1 failed with NotImplementedError")
    assert one[1]


def _not_alike(run: _Run) -> list[Any]:
    """Strides of parameters and of their state along dimensions with several indices, where these differ."""

    def strides_of(tensor: Tensor) -> list[int]:
        return [stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]

    state = run.worker.optimizer.state.items()
    strides = [(strides_of(p), strides_of(v)) for p, entry in state for v in entry.values() if v.shape == p.shape]
    assert strides
    return [pair for pair in strides if pair[0] != pair[1]]


def _strides(rank: int, out: Path) -> tuple[bool, list[Any]]:
    plans = _plans("blocks", 2)
    run = _Run("blocks", plans[1], out, torch.channels_last)
    run.train()
    found = _not_alike(run)
    for stop in (1, 4, 1):
        run.go(plans[stop])
        found += _not_alike(run)
        model, optimizer = run.worker.model, run.worker.optimizer
        load_full_optimizer_state(model, optimizer, full_optimizer_state(model, optimizer))
        found += _not_alike(run)
    return any(not p.is_contiguous() for p in model.updated), found


def test_state_is_strided_like_its_parameter(tmp_path: Path) -> None:
    """Fused kernels on CPUs match elements by their position in memory."""
    _plans("blocks", 2)
    assert run_ranks(2, _strides, tmp_path, threads=1, timeout_s=120) == [(True, [])] * 2


@pytest.mark.parametrize("seed", range(20))
def test_rounds_and_buckets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes, in its order between two; nobody sends or receives two at once; buckets are bounded."""
    monkeypatch.setattr(migration, "BUCKET_BYTES", 256)
    random_ = random.Random(seed)
    plan = [
        _Transfer(random_.randrange(4), random_.randrange(4), i, ((0, n),), n)
        for i, n in enumerate(random_.randint(1, 256) for _ in range(40))
    ]
    came: list[_Transfer] = []
    for turn in _rounds(plan):
        assert turn
        for end in ("source", "target"):
            ends = [getattr(bucket[0], end) for bucket in turn]
            assert len(set(ends)) == len(ends)
        for bucket in turn:
            assert len({(one.source, one.target) for one in bucket}) == 1
            assert sum(-(-one.num_bytes // 16) * 16 for one in bucket) <= 256
            came += bucket
    assert sorted(one.index for one in came) == [one.index for one in plan if one.source != one.target]
    for pair in {(one.source, one.target) for one in came}:
        indices = [one.index for one in came if (one.source, one.target) == pair]
        assert indices == sorted(indices)


@pytest.mark.parametrize(("box", "most", "count"), [(((0, 8), (0, 4)), 8, 4), (((2, 3), (0, 9)), 4, 1), ((), 1, 1)])
def test_what_is_longer_than_a_bucket_goes_row_by_row(box: Any, most: int, count: int) -> None:
    pieces = list(_split(box, most))
    assert len(pieces) == count
    assert sum(map(size, pieces)) == size(box)
