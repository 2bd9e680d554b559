"""Optimizer steps over sharded parameters: on this rank's parts, wherever they lie, and unseen from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asa.executor.training.optimizer import build_optimizer
from asa.launch import run_ranks
from asa.sharding.split.local_parts import local, step_over_parts

STEPS = 4


def _chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7), nn.Linear(7, 1))  # uneven; of one row: nothing on rank 1


@torch.no_grad()
def _put_elsewhere(chain: nn.Module) -> list[int]:
    """Parameters in new memory, under the same objects; the addresses."""
    before = [local(p).data_ptr() for p in chain.parameters()]
    for p in chain.parameters():
        if isinstance(p, DTensor):
            p._local_tensor = p._local_tensor.clone()
    chain.to("cpu")  # fully_shard looks at its parameters again
    after = [local(p).data_ptr() for p in chain.parameters()]
    assert before != after
    return after


def _trained(name: Any, sharded: bool) -> tuple[list[Tensor], dict[str, list[Tensor]], list[Tensor]]:
    """Weights and state after some steps of a chain whose middle is frozen for one of them; full tensors."""
    chain = _chain()
    if sharded:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        for layer in chain[:2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(chain, mesh=mesh, ignored_params={chain[2].bias})  # plain beside sharded
    optimizer = build_optimizer(name, list(chain.parameters()), lr=0.1)
    seen: list[Tensor] = []
    where: list[int] = []
    for step in range(STEPS):
        if step == 2 and sharded:
            where = _put_elsewhere(chain)
        for p in chain.parameters():
            p.grad = None
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        out = chain(x)
        seen.append(out.detach())
        out.square().mean().backward()
        if step == 1:
            chain[1].weight.grad = None
        optimizer.step()
    with torch.no_grad():
        assert all(local(p).grad is None for p in chain.parameters() if isinstance(p, DTensor))
        assert [local(p).data_ptr() for p in chain.parameters()] == where or not sharded

    def full(t: Tensor) -> Tensor:
        return t.full_tensor() if isinstance(t, DTensor) else t.detach()

    state: dict[str, list[Tensor]] = {}
    for p in chain.parameters():
        for key, value in optimizer.state[p].items():
            assert isinstance(value, DTensor) == (isinstance(p, DTensor) and key != "step")
            state.setdefault(key, []).append(full(value))
    assert optimizer.param_groups[0]["params"] == list(chain.parameters())
    assert optimizer.param_groups[0]["fused"]
    return [full(p) for p in chain.parameters()], state, seen


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_sharded_parameters_are_updated_like_whole_ones(name: Any) -> None:
    def body(_rank: int) -> Any:
        return _trained(name, True)

    weights, state, seen = _trained(name, False)
    for found in run_ranks(2, body, threads=1, timeout_s=120):
        for mine, theirs in ((weights, found[0]), (seen, found[2]), *((state[k], found[1][k]) for k in state)):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert set(found[1]) == set(state)


def _with_closures(_rank: int) -> tuple[list[float], list[int], bool]:
    chain = _chain()
    fully_shard(chain, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    optimizer = torch.optim.Adam(chain.parameters(), lr=0.1, foreach=True)
    undo = step_over_parts(optimizer)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    fail = False

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = chain(x).square().mean()
        loss.backward()
        if fail:
            raise ValueError("no")
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    fail = True
    with pytest.raises(ValueError, match="no"):
        optimizer.step(closure)
    fail = False
    losses.append(float(optimizer.step(closure=closure)))
    undo()
    sharded = all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    return losses, [len(optimizer.state), len(optimizer.param_groups[0]["params"])], sharded


def test_a_closure_sees_the_parameters_themselves_and_may_fail() -> None:
    for losses, counts, sharded in run_ranks(2, _with_closures, threads=1, timeout_s=120):
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 4
        assert counts == [6, 6]
        assert sharded
