"""Programs that use whole parameters, copies of the model, or the loss in an optimizer's closure.

More of them are in ``benchmarks/program_table/fresh.py``.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import asa
from asa.errors import UsageError
from asa.launch import run_ranks
from planner_tests.programs import Named, Program, State, assert_as_alone, classes, epochs, heard_of, numbers


def _program(loop: Any, **options: Any) -> Program:
    return Program(model=Named, x=numbers(21, 8), y=classes(21, 3), loop=loop, **options)


def _step(net: Any, opt: Any, loss: Tensor) -> None:
    opt.zero_grad()
    loss.backward()
    opt.step()


def _copies(net: Any, opt: Any, batches: Any) -> State:
    """A target and an average made behind the call, and the best of two states put back."""
    target, mean, best = copy.deepcopy(net), AveragedModel(net), copy.deepcopy(net)
    assert type(target) is Named
    target.requires_grad_(False).eval()
    for x, y in batches:
        with torch.no_grad():
            soft = target(x).softmax(1)
        _step(net, opt, F.cross_entropy(net(x), y) + F.kl_div(net(x).log_softmax(1), soft, reduction="batchmean"))
        mean.update_parameters(net)
        with torch.no_grad():
            for t, p in zip(target.parameters(), net.parameters(), strict=True):
                t.mul_(0.9).add_(p, alpha=0.1)
    trained = {f"net.{n}": t.clone() for n, t in net.state_dict().items()}
    net.load_state_dict(best.state_dict())
    kept = {"target": target, "mean": mean.module, "best": copy.deepcopy(net)}
    return {**trained, **{f"{k}.{n}": t for k, m in kept.items() for n, t in m.state_dict().items()}}


def test_a_deep_copy_behind_the_call_is_a_plain_model() -> None:
    assert_as_alone(_program(_copies), ["ddp", "zero1", "fsdp", "tensor", "mixed-sharded"])


def _frozen(_rank: int, program: Program) -> tuple[bool, list[bool], str]:
    net, _, _ = asa.parallelize(*program.made(), plan=program.plan("fsdp"))
    net.first.weight.requires_grad_(False)
    net.eval()
    copied = copy.deepcopy(net)
    with pytest.raises(UsageError) as refused:
        copy.copy(net)
    assert type(pickle.loads(pickle.dumps(net))) is Named
    return copied.training, [p.requires_grad for p in copied.parameters()], str(refused.value)


def test_a_deep_copy_has_the_modes_and_what_is_frozen() -> None:
    for training, learns, refused in run_ranks(2, _frozen, _program(epochs), threads=1, timeout_s=120):
        assert not training
        assert learns == [False, True, True, True]
        assert "use copy.deepcopy(model)" in refused


def _by_function(_rank: int, program: Program) -> str:
    net, _, batches = asa.parallelize(*program.made(), plan=program.plan("tensor"))
    x, _ = next(iter(batches))
    with pytest.raises(UsageError) as refused:
        functional_call(net, dict(net.named_parameters()), (x,))
    return str(refused.value)


def test_parts_do_not_run_with_whole_parameters() -> None:
    for line in run_ranks(2, _by_function, _program(epochs), threads=1, timeout_s=120):
        assert "functional_call hands the model whole parameters" in line


class Followed(nn.Module):
    """A method moves a slow layer, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow, self.moves = nn.Linear(8, 3), nn.Linear(8, 3), 0
        self.slow.requires_grad_(False)

    @torch.no_grad()
    def move(self) -> None:
        """Move the slow layer, faster each time."""
        self.moves += 1
        for p, q in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            p.data = p.data.lerp(q.data, 0.1 * self.moves)

    def answers(self, x: Tensor) -> Tensor:
        """Of the slow layer."""
        return self.slow(x).softmax(1)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(x) + self.slow(x)  # type: ignore[no-any-return]


def _moved(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        with torch.no_grad():
            soft = net.answers(x)
        out = net(x)
        _step(net, opt, F.cross_entropy(out, y) + F.kl_div(out.log_softmax(1), soft, reduction="batchmean"))
        net.move()
    return dict(net.state_dict())


def test_methods_of_a_model_that_ranks_hold_in_parts() -> None:
    program = Program(model=Followed, x=numbers(21, 8), y=classes(21, 3), loop=_moved)
    assert_as_alone(program, ["ddp", "fsdp", "tensor"])


def _searched(net: Any, opt: Any, batches: Any) -> State:
    """A line search over each batch, and one over all data, by an optimizer of the loop's own."""
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        opt.step(closure)
    x, y = (torch.cat(each) for each in zip(*batches, strict=True))
    own = torch.optim.LBFGS(net.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def over_all() -> Tensor:
        own.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    own.step(over_all)
    return dict(net.state_dict())


def _line_search(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


def test_all_ranks_search_by_the_mean_loss() -> None:
    assert_as_alone(_program(_searched, optimizer=_line_search), ["ddp"], within=1e-6)


def _views(net: Any, opt: Any, batches: Any) -> State:
    """Rows, columns and masks of parameters are written, and whole parameters decide what is kept."""
    found: list[float] = []
    for x, y in batches:
        _step(net, opt, F.cross_entropy(net(x), y))
        with torch.no_grad():
            for p in net.parameters():
                flat = p.view(-1)
                flat[flat.abs().topk(2, largest=False).indices] = 0
                p[0].mul_(0.5)
                p[1:2] = p[2]
                for row in p:
                    row.div_(row.norm().clamp(min=1))
            w = net.first.weight
            u, s, v = torch.linalg.svd(w, full_matrices=False)
            w.copy_(u @ torch.diag(s.clamp(max=0.8)) @ v)
            net.head.weight[:, w.abs().sum(1).argsort()[:2]] = 0.1
            found.append(float(torch.cat([p.flatten() for p in net.parameters()]).median()))
            found.append(float(w.detach().numpy().std()))
    return {**net.state_dict(), "found": torch.tensor(found, dtype=torch.float64)}


def test_views_of_parameters_are_written() -> None:
    assert_as_alone(_program(_views), ["ddp", "fsdp", "tensor", "mixed-sharded"])


def _members(net: Any, opt: Any, batches: Any) -> State:
    """Members called by vmap teach the model."""
    torch.manual_seed(1)
    members = [Named().double() for _ in range(3)]
    stacked = stack_module_state(members)  # type: ignore[arg-type]
    shell = copy.deepcopy(members[0]).to("meta")
    for x, y in batches:
        with torch.no_grad():
            call = vmap(lambda p, b, x: functional_call(shell, (p, b), (x,)), in_dims=(0, 0, None))
            soft = call(*stacked, x).softmax(-1).mean(0)
        out = net(x)
        _step(net, opt, F.cross_entropy(out, y) + F.kl_div(out.log_softmax(-1), soft, reduction="batchmean"))
    return dict(net.state_dict())


def test_members_that_vmap_calls_on_the_batch() -> None:
    assert_as_alone(_program(_members), ["ddp", "tensor"])


def _two_views(net: Any, opt: Any, batches: Any) -> State:
    """Two views of a batch in one matrix, each row to find its other view (SimCLR)."""
    for x, _ in batches:
        z = F.normalize(torch.cat([net(x), net(0.9 * x + 0.1)]), dim=1)
        n = len(z) // 2
        near = (z @ z.t()).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        _step(net, opt, F.cross_entropy(near, torch.cat([torch.arange(n, 2 * n), torch.arange(n)])))
    return dict(net.state_dict())


def _rowwise(net: Any, opt: Any, batches: Any) -> State:
    """The same two views, each with labels of its own: a mean over samples."""
    for x, y in batches:
        z = torch.cat([net(x), net(0.9 * x + 0.1)])
        _step(net, opt, F.cross_entropy(z, torch.cat([y, y])))
    return dict(net.state_dict())


def test_two_views_in_one_matrix_are_compared_with_the_whole_batch() -> None:
    cases = [(p := _program(loop), p.plan("ddp")) for loop in (_two_views, _rowwise)]
    other, same = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert any("not a mean over samples" in line for line in other), other
    assert not any("not a mean" in line or "not checked" in line for line in same), same
