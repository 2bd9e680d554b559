"""Habits of published code: samplers that share by rank, one bag a batch, slow copies under plans that split.

More of them are in ``benchmarks/program_table/published.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

import asa
from asa.errors import UsageError
from asa.launch import run_ranks
from planner_tests.programs import Program, State, assert_as_alone, classes, distance, epochs, heard_of, numbers

CE = F.cross_entropy


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.first(x)))  # type: ignore[no-any-return]


class Repeated(Sampler[int]):
    """Every sample twice, those of this process."""

    def __init__(self, data: Any) -> None:
        self.data, self._world_size, self._rank = data, dist.get_world_size(), dist.get_rank()

    def __iter__(self) -> Any:
        return iter([i // 2 for i in range(2 * len(self.data))][self._rank :: self._world_size])

    def __len__(self) -> int:
        return len(self.data)


def _shared(_rank: int, program: Program) -> list[str]:
    net, opt, batches = program.made()
    data, said = batches.dataset, []
    own: Any = Repeated(data)
    loaders = [DataLoader(data, 6, sampler=own)]
    loaders += [DataLoader(data, batch_sampler=BatchSampler(s, 6, False)) for s in (own, DistributedSampler(data))]  # type: ignore[arg-type]
    for loader in loaders:
        with pytest.raises(UsageError) as error:
            asa.parallelize(net, opt, loader, plan=program.plan("ddp"))
        said.append(str(error.value))
    return said


def test_samplers_that_share_by_rank_are_refused() -> None:
    program = Program(model=Net, x=numbers(24, 8), y=classes(24, 3), loop=epochs)
    for said in run_ranks(2, _shared, program, threads=1, timeout_s=120):
        for text, name in zip(said, ("Repeated", "Repeated", "DistributedSampler"), strict=True):
            assert f"the loader has a {name}, which draws the samples of one rank" in text


class Bag(nn.Module):
    """Attention over the instances of one bag."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.head = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, bag: Tensor) -> Tensor:
        h = torch.tanh(self.embed(bag.squeeze(0)))
        return self.head((self.attend(h).softmax(0) * h).sum(0, keepdim=True)).squeeze(-1)  # type: ignore[no-any-return]


class Bags(Dataset[Any]):
    """Bags of two to five instances."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return numbers(2 + i % 4, 8, seed=i), float(i % 2)


def _bag_by_bag(net: Any, opt: Any, batches: Any) -> State:
    for i, (bag, label) in enumerate(batches):
        (F.binary_cross_entropy_with_logits(net(bag), label) / 4).backward()
        if i % 4 == 3:
            opt.step()
            opt.zero_grad()
    return dict(net.state_dict())


def _bags(_rank: int, program: Program) -> State:
    warnings.simplefilter("ignore")
    net, opt, _ = program.made()
    return _bag_by_bag(*asa.parallelize(net, opt, DataLoader(Bags(), 1), cache=None, strategies=("ddp",)))


def test_batches_of_one_sample_may_have_unlike_shapes() -> None:
    program = Program(model=Bag, x=numbers(2, 8), y=classes(2, 3), loop=_bag_by_bag)
    net, opt, _ = program.made()
    wanted = _bag_by_bag(net, opt, DataLoader(Bags(), 1))
    for state in run_ranks(2, _bags, program, threads=1, timeout_s=120):
        assert distance(state, wanted) < 1e-11


def _taught_by_a_slow_copy(net: Any, opt: Any, batches: Any) -> State:
    """The copy is a plain model of its own, moved parameter by parameter."""
    teacher = Net().double()
    teacher.load_state_dict(net.state_dict())
    for x, _ in batches:
        opt.zero_grad()
        F.mse_loss(net(x), teacher(0.9 * x).detach()).backward()
        opt.step()
        with torch.no_grad():
            for p, t in zip(net.parameters(), teacher.parameters(), strict=True):
                t.data.mul_(0.9).add_(p.detach().data, alpha=0.1)
    return {**net.state_dict(), **{f"slow.{k}": v for k, v in teacher.state_dict().items()}}


def _averaged(net: Any, opt: Any, batches: Any) -> State:
    """torch's average, which is made of a plain model."""
    average = AveragedModel(Net().double())
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        average.update_parameters(net)
    return {**net.state_dict(), **{f"mean.{k}": v for k, v in average.module.state_dict().items()}}


def _data_assigned(net: Any, opt: Any, batches: Any) -> State:
    """The data of a plain copy is assigned a sum with the model's, and its gradient is the model's."""
    slow = Net().double()
    slow.load_state_dict(net.state_dict())
    other = torch.optim.SGD(slow.parameters(), 0.02, momentum=0.9)
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        for p, w in zip(slow.parameters(), net.parameters(), strict=True):
            p.data = p.data * 0.9 + w.data * 0.1
            with torch.no_grad():
                p.set_(0.5 * p + 0.5 * w)
                w.set_(w + 0.01 * p)
                p[:] = 0.9 * p.lerp(w, 0.1)
            p.grad = w.grad
        other.step()
    return {**net.state_dict(), **{f"slow.{k}": v for k, v in slow.state_dict().items()}}


@pytest.mark.parametrize("loop", [_taught_by_a_slow_copy, _averaged, _data_assigned])
def test_a_plain_copy_follows_parameters_that_ranks_hold_in_parts(loop: Any) -> None:
    program = Program(model=Net, x=numbers(24, 8), y=classes(24, 3), loop=loop)
    assert_as_alone(program, ["fsdp", "tensor", "mixed"])


def _memory_shared(net: Any, opt: Any, batches: Any) -> State:
    """A plain copy has the memory of the model's parameters, and follows each of their updates on one device."""
    twin = Net().double()
    for p, w in zip(twin.parameters(), net.parameters(), strict=True):
        p.data = w.data
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), twin(x).softmax(1).detach() * 0.5 + 0.5 * F.one_hot(y, 3)).backward()
        opt.step()
    return dict(net.state_dict())


def test_memory_of_parts_is_not_shared_with_a_whole_tensor() -> None:
    program = Program(model=Net, x=numbers(24, 8), y=classes(24, 3), loop=_memory_shared)
    for name in ("fsdp", "tensor"):
        states = program.spread([name])[name]
        assert all(isinstance(s, str) and "use w.data.clone()" in s for s in states), (name, states)


def _assigned(net: Any, opt: Any, batches: Any, of_all: bool = False) -> State:
    """Gradients of a plain copy become those of the model; there is no backward."""
    for x, y in batches:
        plain = Net().double()
        plain.load_state_dict(net.state_dict())
        gradients = torch.autograd.grad(CE(plain(x), y), list(plain.parameters()))
        for p, g in zip(net.parameters(), gradients, strict=True):
            p.grad = torch.ones_like(g) if of_all else g
        opt.step()
    return dict(net.state_dict())


def _assigned_alike(net: Any, opt: Any, batches: Any) -> State:
    """They do not depend on the samples."""
    return _assigned(net, opt, batches, of_all=True)


def test_gradients_that_a_loop_writes_without_a_backward_are_compared() -> None:
    cases = [
        (program := Program(model=Net, x=numbers(24, 8), y=classes(24, 3), loop=loop), program.plan(name))
        for loop in (_assigned, _assigned_alike)
        for name in ("ddp", "zero1")
    ]
    heard = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    said = [any("gradients that the loop wrote differ between ranks" in line for line in lines) for lines in heard]
    assert said == [True, True, False, False]


def _by_a_table(net: Any, opt: Any, batches: Any) -> State:
    """Soft labels of three classes, in batches of which a rank has three samples."""
    table = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    for x, y in batches:
        opt.zero_grad()
        (-(table[y] * F.log_softmax(net(x), 1)).sum(1).mean()).backward()
        opt.step()
    return dict(net.state_dict())


def _by_a_table_of_answers(net: Any, opt: Any, batches: Any) -> State:
    """The table follows answers to this rank's samples."""
    table = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    for _ in range(2):
        sums = torch.zeros(3, 3, dtype=torch.float64)
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            (-(table[y] * F.log_softmax(out, 1)).sum(1).mean()).backward()
            opt.step()
            sums.index_add_(0, y, out.detach().softmax(1))
        table = sums / sums.sum(1, keepdim=True)
    return dict(net.state_dict())


def test_a_table_of_as_many_classes_as_samples_is_no_mask_of_pairs() -> None:
    cases = [
        (program := Program(model=Net, x=numbers(24, 8), y=classes(24, 3), loop=loop), program.plan("ddp"))
        for loop in (_by_a_table, _by_a_table_of_answers)
    ]
    same, own = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert not any("was not checked" in line or "not a mean" in line for line in same)
    assert any("beside the batch (test_programs_published.py:" in line for line in own)


def _drawn_by_the_loop(net: Any, opt: Any, batches: Any) -> State:
    """Batches that the loop draws from the data, the same on all ranks."""
    x, y = batches.dataset.tensors
    draw = torch.Generator().manual_seed(3)
    for _ in range(4):
        some = torch.randperm(len(x), generator=draw)[:6]
        opt.zero_grad()
        loss = CE(net(x[some]), y[some], reduction="none")
        (loss.mean() + loss.max()).backward()
        opt.step()
    return dict(net.state_dict())


def _drawn_beside(net: Any, opt: Any, batches: Any) -> State:
    """Labels that the loop draws, the same on all ranks, for the loader's samples."""
    draw = torch.Generator().manual_seed(3)
    for x, _ in batches:
        opt.zero_grad()
        CE(net(x), torch.randint(3, (len(x),), generator=draw)).backward()
        opt.step()
    return dict(net.state_dict())


def test_batches_that_the_loop_draws_alike_are_nothing_to_say() -> None:
    cases = [
        (program := Program(model=Net, x=numbers(24, 8), y=classes(24, 3), loop=loop), program.plan("ddp"))
        for loop in (_drawn_by_the_loop, _drawn_beside)
    ]
    same, beside = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert not any("is made beside the batch" in line or "not a mean" in line for line in same)
    assert any("is made beside the batch" in line for line in beside)


class Means(nn.Module):
    """Outputs and, if asked for, their mean over the batch, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, scale: float = 1.0, *, means: bool = False) -> Any:
        out = self.net(x) * scale
        return (out, out.detach().mean(0)) if means else out


def _to_the_mean(net: Any, opt: Any, batches: Any) -> State:
    """The loss uses a mean that the model returns, made as long as the batch."""
    for x, y in batches:
        opt.zero_grad()
        out, mean = net(x, 0.5, means=True)
        (CE(out, y) + F.mse_loss(out, mean.expand(len(x), 3))).backward()
        opt.step()
    return dict(net.state_dict())


def _slopes(net: Any, opt: Any, batches: Any) -> State:
    """Slopes of several outputs by the inputs, one after the other."""
    for x, y in batches:
        opt.zero_grad()
        x = x.clone().requires_grad_(True)
        out = net(x)
        slopes = [torch.autograd.grad(out[:, j].sum(), x, create_graph=True)[0] for j in range(3)]
        (CE(out, y) + 0.1 * sum(g.square().sum(1).mean() for g in slopes)).backward()
        opt.step()
    return dict(net.state_dict())


def _kept_by_place(net: Any, opt: Any, batches: Any) -> State:
    """A perturbation of the first places of a batch goes on to the next batch."""
    kept = torch.zeros(6, 8, dtype=torch.float64)
    for x, y in batches:
        opt.zero_grad()
        noise = kept[: len(x)].clone().requires_grad_()
        CE(net(x + noise), y).backward()
        opt.step()
        kept[: len(x)] = noise.detach() + 0.1 * noise.grad.sign()  # type: ignore[union-attr]
    return dict(net.state_dict())


def test_several_slopes_by_inputs_are_those_of_one_device() -> None:
    assert_as_alone(Program(model=Net, x=numbers(21, 8), y=classes(21, 3), loop=_slopes), ["ddp", "zero1"])


def test_rows_by_place_and_means_of_the_model_are_told() -> None:
    programs = [
        Program(model=Means, x=numbers(21, 8), y=classes(21, 3), loop=_to_the_mean),
        Program(model=Net, x=numbers(22, 8), y=classes(22, 3), loop=_kept_by_place),
        Program(model=Net, x=numbers(24, 8), y=classes(24, 3), loop=_kept_by_place),
    ]
    heard = run_ranks(2, heard_of, [(p, p.plan("ddp")) for p in programs], threads=1, timeout_s=120)[0]
    words = ("was not checked", "ranks begin at other places", "ranks begin at other places")
    assert [any(w in line for line in lines) for w, lines in zip(words, heard, strict=True)] == [True, True, False]


class Halved(Net):
    """Its outputs have eight bits of precision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bfloat16()


def _mean_of_halves(net: Any, opt: Any, batches: Any) -> State:
    x, y = next(iter(batches))
    assert asa.check(lambda: CE(net(x).float(), y)).exact
    return epochs(net, opt, batches, lambda net, x, y: CE(net(x).float(), y))


def _sum_of_halves(net: Any, opt: Any, batches: Any) -> State:
    return epochs(net, opt, batches, lambda net, x, y: CE(net(x).float(), y, reduction="sum"))


def test_the_rounding_of_outputs_is_no_other_loss() -> None:
    cases = [
        (program := Program(model=Halved, x=numbers(21, 8), y=classes(21, 3), batch=7, loop=loop), program.plan("ddp"))
        for loop in (_mean_of_halves, _sum_of_halves)
    ]
    mean, total = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert not any("not a mean" in line for line in mean)
    assert any("not a mean" in line for line in total)
