"""A pipeline that is not drained is one update late, exactly; clients with equal shares are data parallelism."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import training
from stage_plans import staged
from test_consistency import under
from torch.nn import functional as F

from asa.executor.consistency.federated import clients
from asa.executor.measuring import equivalence
from asa.executor.measuring.model_copies import ModelCopies
from asa.executor.running import prepare
from asa.executor.running.run import train
from asa.executor.training.optimizer import build_optimizer
from asa.ir.consistency import bearable_one_late, parse
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.scheduler import adapt
from asa.strategies import offered
from asa.zoo.models import build

SAMPLES, STEPS = 12, 5


def _net(name: str) -> torch.nn.Module:
    return build(name, num_classes=10, input_shape=(1, 8, 8), seed=0)


def _pipedream(stages: int, microbatches: int) -> Plan:
    base = staged(training.plan("cnn", batch=SAMPLES), [1] * stages, microbatches=microbatches)
    return replace(base, consistency=parse("pipedream"), strategy="pipedream")


def _late(plan: Plan, delay: int) -> dict[str, torch.Tensor]:
    """Weights after the same batches on one device, with every gradient ``delay`` updates old."""
    model = _net(plan.model_spec).double()
    optimizer = build_optimizer(plan.optimizer, list(model.parameters()), lr=equivalence.LEARNING_RATE[plan.optimizer])
    waiting: deque[list[torch.Tensor]] = deque()

    def update() -> None:
        for p, g in zip(model.parameters(), waiting.popleft(), strict=True):
            p.grad = g
        optimizer.step()

    for step in range(STEPS):
        x, y = equivalence._batch(plan, SAMPLES, step, torch.float64)
        for p in model.parameters():
            p.grad = None
        for xs, ys in zip(x.chunk(plan.num_microbatches), y.chunk(plan.num_microbatches), strict=True):
            (F.cross_entropy(model(xs), ys) / plan.num_microbatches).backward()  # BatchNorm looks at a microbatch
        waiting.append([p.grad for p in model.parameters() if p.grad is not None])
        if len(waiting) > delay:
            update()
    while waiting:
        update()
    return dict(model.named_parameters())


def _weights(rank: int, plan: Plan) -> dict[str, torch.Tensor]:
    found = equivalence._run(
        plan, ModelCopies(plan, lambda: _net(plan.model_spec)), offered(), rank, torch.device("cpu"), samples=SAMPLES,
        dtype=torch.float64, steps=STEPS,
    )  # fmt: skip
    return found.weights


@pytest.mark.parametrize(("stages", "microbatches"), [(3, 3), (3, 1), (2, 4)])
def test_a_pipeline_that_is_not_drained_is_one_update_late_exactly(stages, microbatches):
    plan = _pipedream(stages, microbatches)
    found = run_ranks(stages, _weights, plan, threads=1, timeout_s=120)[0]
    wanted, plain = _late(plan, 1), _late(plan, 0)
    for name, weights in wanted.items():
        torch.testing.assert_close(found[name], weights.detach(), rtol=1e-10, atol=1e-12, msg=name)
    assert any((found[n] - w).abs().max() > 1e-6 for n, w in plain.items())


def _memory(plan: Plan, out: Path) -> list[int]:
    """Measured bytes of active memory of each rank."""
    result = train(plan, training.settings(out, epochs=1, steps_per_epoch=8), strategies=offered(), adapt=adapt)
    return result["summary"]["memory_bytes_per_rank"]["measured"]


def test_a_pipeline_holds_no_less_memory_if_it_is_not_drained(tmp_path):
    late = _pipedream(2, 2)
    drained = replace(late, consistency=None, strategy="1f1b", schedule="1f1b")
    for held, plain in zip(_memory(late, tmp_path / "late"), _memory(drained, tmp_path / "drained"), strict=True):
        assert held >= plain


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_one_update_late_a_quadratic_is_stable_up_to_the_rate_that_is_told(momentum):
    def grows(rate: float, delay: int) -> bool:
        found, step = [1.0, 1.0], 0.0
        for _ in range(4000):
            step = momentum * step - rate * found[-1 - delay]
            found.append(found[-1] + step)
        return max(map(abs, found[-100:])) > max(map(abs, found[:100]))

    in_step = 2 * (1 + momentum)
    late = in_step * bearable_one_late(momentum)
    assert [grows(r, 0) for r in (0.99 * in_step, 1.01 * in_step)] == [False, True]
    assert [grows(r, 1) for r in (0.99 * late, 1.01 * late)] == [False, True]


def test_the_learning_rate_of_an_undrained_pipeline_is_remarked_on(tmp_path):
    said = prepare._late(_pipedream(2, 2), training.settings(tmp_path, lr=None))
    assert said == [
        "pipedream: gradients are one update old, and SGD with momentum 0.9 bears 1/38 of the learning rate it bears "
        "in step; it is 0.1: where the loss stays high, take --lr 0.0026"
    ]
    (given,) = prepare._late(_pipedream(2, 2), training.settings(tmp_path, lr=0.01))
    assert given.endswith("bears 1/38 of the learning rate it bears in step; --lr 0.01 is stable if 0.38 is in step")
    assert prepare._late(training.plan("cnn", ranks=2), training.settings(tmp_path, lr=None)) == []


def test_one_stage_has_nobody_to_be_late_for():
    plan = replace(training.plan("cnn", batch=SAMPLES), consistency=parse("pipedream"), strategy="pipedream")
    found = run_ranks(1, _weights, plan, threads=1, timeout_s=120)[0]
    for name, weights in _late(plan, 0).items():
        torch.testing.assert_close(found[name], weights.detach(), rtol=1e-10, atol=1e-12, msg=name)


def _fed(rank: int, plans: list[Plan]) -> list[dict[str, torch.Tensor]]:
    found = [
        equivalence._run(
            p, ModelCopies(p, lambda: _net("logistic")), offered(), rank, torch.device("cpu"), samples=16,
            dtype=torch.float64, steps=4,
        ).weights
        for p in plans
    ]  # fmt: skip
    return found if rank == 0 else []


def test_all_clients_with_one_step_and_equal_sizes_are_data_parallelism_and_others_are_not():
    names = ["fedavg:period=1", "fedavg:period=2", "fedavg:period=1:fraction=0.5", "fedavg:period=1:message=int8"]
    plans = [training.plan("logistic", ranks=2, batch=24), *(under(n) for n in names)]
    ddp, *found = run_ranks(2, _fed, plans, threads=1, timeout_s=120)[0]
    apart = [max(float((w - ddp[k]).abs().max()) for k, w in each.items()) for each in found]
    assert [parse(n).exact("sgd") for n in names] == [True, False, False, False]
    assert apart[0] < 1e-12
    assert min(apart[1:]) > 1e-6


@pytest.mark.parametrize("spread", [0.1, 1.0, 1000.0])
def test_clients_share_all_samples_out_and_are_the_less_alike_the_wider_the_spread(spread):
    labels = [i % 10 for i in range(1000)]
    parts = clients(labels, 4, spread, seed=3)
    assert sorted(i for part in parts for i in part) == list(range(1000))
    assert all(parts)
    most = max(sum(labels[i] == 0 for i in part) for part in parts)
    assert (most < 50) if spread == 0.1 else (most == 100) if spread == 1000.0 else True
