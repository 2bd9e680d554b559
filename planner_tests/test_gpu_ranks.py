"""On one GPU: collectives of a group of one through NCCL, ranks of plans for eight through a fake group. With
two GPUs or more, every strategy through NCCL."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asa.executor.measuring.equivalence import verify
from asa.executor.measuring.rehearsal import rehearse
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.sharding.collectives import direct
from asa.strategies import offered
from planner_tests.hand_plans import alternating, hand_plan, uniform
from planner_tests.small_models import CLASSES, INPUT, build
from planner_tests.stage_plans import staged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def zero(stage: int) -> dict[str, Any]:
    return {"data_strategy": lambda _i: f"zero{stage}"}


PLANS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ddp": ("blocks", lambda n: uniform(n, 1), {}),
    "accumulated": ("blocks", lambda n: uniform(n, 1), {"num_microbatches": 2}),
    "zero1": ("plain", lambda n: uniform(n, 1), zero(1)),
    "zero2": ("plain", lambda n: uniform(n, 1), zero(2)),
    "fsdp": ("vision_transformer", lambda n: uniform(n, 1), zero(3)),
    "tensor": ("vision_transformer", lambda n: uniform(1, n), {}),
    "hybrid": ("vision_transformer", lambda n: uniform(n // 2, 2), {}),
    "mixed": ("blocks", alternating, {}),
}
"""Model, layout by number of ranks, and options of the plan."""


def plan_of(kind: str, ranks: int) -> Plan:
    name, choose, options = PLANS[kind]
    made = hand_plan(
        build(name), ranks, choose(ranks), input_shape=INPUT, num_classes=CLASSES[name], global_batch=48, **options
    )
    return replace(made, device_type="cuda")


def _alone(rank: int) -> list[float]:
    """Every collective of the package in a group of one, and what DDP and FSDP of torch make of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = torch.device("cuda", rank)
    assert dist.get_backend() != "gloo"
    x = torch.arange(8.0, device=device)
    direct.all_reduce(x)
    direct.all_reduce(x, mean=True)
    direct.broadcast(x, group_src=0)
    gathered, scattered = torch.empty_like(x), torch.empty_like(x)
    direct.all_gather_into_tensor(gathered, x)
    direct.reduce_scatter_tensor(scattered, x)
    torch.cuda.synchronize()
    assert gathered.tolist() == scattered.tolist() == list(range(8))

    def trained(wrap: Any) -> float:
        torch.manual_seed(1)
        model = wrap(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.zeros(())
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.expand(4, 8) / 8), torch.arange(4, device=device))
            loss.backward()
            optimizer.step()
        return loss.item()

    mesh = init_device_mesh("cuda", (1,))
    return [
        trained(lambda m: m),
        trained(torch.nn.parallel.DistributedDataParallel),
        trained(lambda m: fully_shard(m, mesh=mesh)),
    ]


def test_a_group_of_one_through_nccl() -> None:
    (losses,) = run_ranks(1, _alone, backend="nccl", threads=1, timeout_s=120)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_one_rank_trains_as_a_plain_loop() -> None:
    plan = plan_of("accumulated", 1)
    found = verify(plan, partial(build, "blocks"), offered(), device="cuda", timeout_s=120)
    assert found.equivalent, found


@pytest.mark.parametrize("kind", sorted(PLANS))
def test_a_rank_of_eight_of_every_strategy(kind: str) -> None:
    plan = plan_of(kind, 8)
    found = rehearse(plan, build(PLANS[kind][0]), rank=3, strategies=offered(), device=torch.device("cuda"), steps=2)
    assert [c.name for c in found.components] == [c.name for c in plan.components]
    assert all(c.forward_s > 0 for c in found.components)
    assert sum(c.saved_bytes for c in found.components) < found.peak_memory_bytes
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 3, 5])
def test_a_rank_of_every_stage(rank: int) -> None:
    base = hand_plan(build("blocks"), 2, uniform(1, 2), input_shape=INPUT, num_classes=10, global_batch=48)
    plan = replace(staged(base, [2, 2, 2], schedule="1f1b", microbatches=4), device_type="cuda")
    found = rehearse(plan, build("blocks"), rank=rank, strategies=offered(), device=torch.device("cuda"), steps=2)
    assert [c.name for c in found.components] == [c.name for c in plan.components if c.stage == rank // 2]


def test_shards_hold_less_than_whole_states() -> None:
    def held(options: dict[str, Any]) -> int:
        made = hand_plan(
            build("plain"), 8, uniform(8, 1), input_shape=INPUT, num_classes=100, global_batch=48, **options
        )
        device = torch.device("cuda")
        return rehearse(
            replace(made, device_type="cuda"), build("plain"), rank=0, strategies=offered(), device=device, steps=2
        ).peak_memory_bytes

    assert held(zero(3)) < held(zero(1)) < held({})


@needs_two
@pytest.mark.parametrize("kind", sorted(PLANS))
def test_two_ranks_of_every_strategy_through_nccl(kind: str) -> None:
    found = verify(plan_of(kind, 2), partial(build, PLANS[kind][0]), offered(), device="cuda", timeout_s=120)
    assert found.equivalent, found


@needs_two
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_stages_through_nccl(schedule: Any) -> None:
    base = hand_plan(build("blocks"), 1, uniform(1, 1), input_shape=INPUT, num_classes=10, global_batch=48)
    plan = replace(staged(base, [1, 1], schedule=schedule, microbatches=4), device_type="cuda")
    found = verify(plan, partial(build, "blocks"), offered(), device="cuda", timeout_s=120)
    assert found.equivalent, found
