"""``asa.parallelize``: a user's own loop on two ranks gives the numbers of one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import asa
from asa.api.model.distributed_model import local_rows
from asa.errors import UsageError
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.tracing import trace
from planner_tests import user_programs as user
from planner_tests.hand_plans import Choose, alternating, hand_plan, uniform
from planner_tests.nouns import cluster


def plan_of(choose: Choose, strategy: str = "replicate", width: int = 2) -> Plan:
    return hand_plan(
        user.model().float(), width, choose, input_shape=user.SHAPE, num_classes=user.CLASSES,
        data_strategy=lambda _i: strategy, global_batch=user.BATCH,
    )  # fmt: skip


def in_float64(plan: Plan) -> Plan:
    """The same plan of the model in float64, whose fingerprint is another."""
    traced = trace(user.model(), torch.zeros((2, *user.SHAPE), dtype=torch.float64), name="model")
    return replace(plan, model_fingerprint=traced.model_fingerprint)


def reference(optimizer: str = "sgd", **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    net = user.model()
    seen = user.loop(net, user.optimizer(net, optimizer), user.loader(**options))
    return net.state_dict(), seen


def train(_rank: int, cases: list[tuple[str, Plan]], options: dict[str, Any]) -> list[Any]:
    found = []
    for optimizer, plan in cases:
        torch.manual_seed(_rank)  # what ranks draw themselves must not matter
        net = user.model()
        if _rank:
            nn.init.zeros_(net[-1].weight)  # rank 0's weights are everybody's
        placed, opt, batches = asa.parallelize(net, user.optimizer(net, optimizer), user.loader(**options), plan=plan)
        seen = user.loop(placed, opt, batches)
        found.append((placed.state_dict(), seen, len(opt.param_groups), float(placed.clip_grad_norm_(1e9))))
        placed.close()
    return found


CASES = {
    "ddp": (uniform(2, 1), "replicate"),
    "tensor": (uniform(1, 2), "replicate"),
    "mixed": (alternating(2), "replicate"),
    "mixed-the-other-way": (alternating(2, shift=1), "replicate"),
    "zero1": (uniform(2, 1), "zero1"),
    "zero3": (alternating(2, shift=1), "zero3"),
}


def test_a_loop_gives_the_numbers_of_one_device() -> None:
    """Under every plan; the moments of Adam where updates and states are in parts."""
    wanted = {optimizer: reference(optimizer) for optimizer in ("sgd", "adamw")}
    cases = [*(("sgd", name) for name in CASES), *(("adamw", name) for name in ("mixed", "zero1", "zero3"))]
    plans = {name: in_float64(plan_of(*case)) for name, case in CASES.items()}
    ranks = run_ranks(2, train, [(optimizer, plans[name]) for optimizer, name in cases], {}, threads=1, timeout_s=120)
    norms = {optimizer: ranks[0][cases.index((optimizer, "mixed"))][3] for optimizer in wanted}
    for i, (optimizer, name) in enumerate(cases):
        (weights, order), (state, first, groups, norm) = wanted[optimizer], ranks[0][i]
        again, second, _, same = ranks[1][i]
        assert user.distance(state, weights) < 1e-11, name
        assert user.distance(again, weights) < 1e-11, name
        assert groups == 2
        assert norm == pytest.approx(same, rel=1e-12)
        assert norm == pytest.approx(norms[optimizer], rel=1e-9), name
        for whole, a, b in zip(order, first, second, strict=True):
            assert torch.equal(torch.cat([a, b]), whole), "every sample on one rank, in the order of one device"


def test_batches_too_small_for_all_ranks() -> None:
    options = {"samples": 9, "batch": 4}  # the last batch has one sample
    weights, _ = reference(**options)
    plans = [("sgd", in_float64(plan_of(choose))) for choose in (uniform(2, 1), alternating(2))]
    for found in run_ranks(2, train, plans, options, threads=1, timeout_s=120)[0]:
        assert user.distance(found[0], weights) < 1e-11


def test_a_gradient_not_weighed_by_samples_would_show() -> None:
    """The first test can fail: with equal weights for 1 and 2 of the last batch's samples the numbers differ."""
    weights, _ = reference()
    shares = [user.model(), user.model()]
    for rank, net in enumerate(shares):
        batches = [tuple(t[local_rows(len(b[0]), 2, rank)] for t in b) for b in user.loader()]
        user.loop(net, user.optimizer(net), batches, epochs=1)
    mean = {n: (a + shares[1].state_dict()[n]) / 2 for n, a in shares[0].state_dict().items()}
    assert user.distance(mean, weights) > 1e-6


def test_rows_of_a_rank() -> None:
    assert [local_rows(7, 3, r) for r in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [local_rows(2, 3, r) for r in range(3)] == [[0], [1], [0]]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(user.loader(shuffle=False).dataset)


def automatic(rank: int, cache: Path) -> Any:
    net = user.model().float()
    opt = user.optimizer(net)
    options: dict[str, Any] = {"cluster": cluster(), "cache": cache, "example_input": torch.zeros(2, *user.SHAPE)}
    made = [asa.parallelize(net, opt, user.loader(), time_limit_s=0.3, **options)]
    net = user.model().float()
    made.append(asa.parallelize(net, user.optimizer(net), user.loader(), **options))
    placed, opt, _ = made[0]
    x = torch.ones(2, *user.SHAPE)
    loss = placed(x).square().mean()  # samples of one's own, not the loader's
    loss.backward()
    opt.step()
    with torch.no_grad():
        placed.eval()
        output = placed(x)
    return [m[0].plan for m in made], output


def test_an_automatic_plan_is_kept_and_used_again(tmp_path: Path) -> None:
    (plans, output), (others, same) = run_ranks(2, automatic, tmp_path, threads=1, timeout_s=120)
    assert plans == others
    assert plans[0] == plans[1]
    assert len(list(tmp_path.glob("*.plan.json"))) == 1
    assert plans[0].num_ranks == 2
    assert len(plans[0].stages) == 1
    assert torch.allclose(output, same)


def streamed(rank: int, plan: Plan) -> Any:
    net = user.model()
    stream = DataLoader(Stream(), batch_size=user.BATCH)
    placed, opt, batches = asa.parallelize(net, user.optimizer(net), stream, plan=plan)
    return user.loop(placed, opt, batches), placed.state_dict()


def test_a_stream_is_cut_by_every_rank() -> None:
    net = user.model()
    user.loop(net, user.optimizer(net), user.loader(shuffle=False))
    (first, state), (second, _) = run_ranks(2, streamed, in_float64(plan_of(uniform(2, 1))), threads=1, timeout_s=120)
    assert user.distance(state, net.state_dict()) < 1e-11
    assert torch.equal(torch.cat([torch.cat(pair) for pair in zip(first, second, strict=True)])[:27], torch.arange(27))


def differing(rank: int, plan: Plan) -> list[str]:
    """Loaders that yield other batches on another rank, and fewer of them."""
    found = []
    for sizes in ([8, 8 + rank], [8] * (2 + rank)):
        net = user.model()
        x, y = torch.zeros(16, *user.SHAPE, dtype=torch.float64), torch.zeros(16, dtype=torch.int64)
        batches = [(x[:n], y[:n], 0) for n in sizes]
        placed, opt, loader = asa.parallelize(net, user.optimizer(net), batches, plan=plan)
        try:
            user.loop(placed, opt, loader)
        except UsageError as error:
            found.append(str(error))
    return found


def test_loaders_that_differ_are_named() -> None:
    plan = in_float64(plan_of(uniform(2, 1)))
    for found in run_ranks(2, differing, plan, threads=1, timeout_s=120):
        assert [text.split("by rank, ")[1].split(";")[0] for text in found] == [
            "8 samples, 9 samples",
            "none, 8 samples",
        ]


def test_alone_nothing_is_changed() -> None:
    weights, _ = reference()
    net = user.model()
    placed, opt, batches = asa.parallelize(net, user.optimizer(net), user.loader())
    user.loop(placed, opt, batches)
    assert all(torch.equal(net.state_dict()[n], w) for n, w in weights.items())
    assert placed.state_dict().keys() == weights.keys()
    assert len(batches) == 4


def test_what_a_loop_cannot_have() -> None:
    net = user.model()
    plan = plan_of(uniform(1, 1), width=1)
    with pytest.raises(UsageError, match=r"for 2 ranks, there are 1"):
        asa.parallelize(net, user.optimizer(net), user.loader(), plan=plan_of(uniform(2, 1)))
    with pytest.raises(UsageError, match=r"use asa\.Job"):
        asa.parallelize(net, user.optimizer(net), user.loader(), plan=replace(plan, num_microbatches=2))
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UsageError, match="not the model's"):
        asa.parallelize(net, stranger, user.loader())
    data = user.loader().dataset
    split = DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(UsageError, match="DistributedSampler"):
        asa.parallelize(net, user.optimizer(net), split)
