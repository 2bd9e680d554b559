"""What a loop writes by numbers of its own samples, samplers that read the loop, and what batches have beside tensors.

More of them are in ``benchmarks/program_table/unseen.py``.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import asa
from asa.api.steps.batches import rows_of
from asa.api.steps.orders import own_state, put_back
from asa.errors import UsageError
from asa.launch import run_ranks
from planner_tests.programs import Named, Program, State, classes, distance, epochs, heard_of, numbers, sgd

CE = F.cross_entropy
COUNT, BATCH = 21, 6


def _by_its_loss(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(0.05 * loss.detach() * p.grad)
    return dict(net.state_dict())


def _by_reduced_loss(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        size = asa.reduce(loss.detach())
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(0.05 * size * p.grad)
    return dict(net.state_dict())


def _gradients_by_its_loss(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        for p in net.parameters():
            p.grad.mul_(loss.detach().clamp(max=1))
        opt.step()
    return dict(net.state_dict())


def _head_by_means(net: Any, opt: Any, batches: Any) -> State:
    """Written behind the last epoch, where ranks compare nothing any more."""
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        with torch.no_grad():
            sums += net(x).mean(0)
    net.head.bias.data.copy_(sums)
    return dict(net.state_dict())


def _matrix(net: Any, opt: Any, batches: Any) -> State:
    matrix = torch.zeros(9)
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        CE(out, y).backward()
        opt.step()
        matrix += torch.bincount(3 * y + out.argmax(1), minlength=9)
    assert float(matrix.sum()) > 0
    return dict(net.state_dict())


class Follows(nn.Module):
    """Subtracts a running mean that is a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean = Named(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * float(x.detach().mean())
        return self.net(x - self.mean)  # type: ignore[no-any-return]


class Hooked(Named):
    """Notes what a layer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_pre_hook(lambda _m, _args: None)


class Planned(Named):
    """Has an attribute of a usual name."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = "mine"


def _usual(net: Any, opt: Any, batches: Any) -> State:
    return epochs(net, opt, batches, lambda n, x, y: CE(n(x), y))


def _hooks_of_all(net: Any, opt: Any, batches: Any) -> State:
    handle = nn.modules.module.register_module_forward_hook(lambda _m, _args, _out: None)
    try:
        return _usual(net, opt, batches)
    finally:
        handle.remove()


WRITTEN = "is changed in the loop by numbers of"
SAID: dict[str, tuple[Any, Any, str, str]] = {
    "weights, by a loss, sharded": (Named, _by_its_loss, "fsdp", WRITTEN),
    "weights, by a loss, split": (Named, _by_its_loss, "tensor", WRITTEN),
    "gradients, by a loss": (Named, _gradients_by_its_loss, "fsdp", WRITTEN),
    "a bias, by totals, behind the last epoch": (Named, _head_by_means, "ddp", WRITTEN),
    "weights, by a number of all ranks": (Named, _by_reduced_loss, "ddp", ""),
    "a total that was there before": (Named, _matrix, "ddp", "a number that is taken out of a tensor"),
    "a number that forward keeps": (Follows, _usual, "ddp", "by the samples that it had before"),
    "a hook from before": (Hooked, _usual, "fsdp", "a forward hook on head sees"),
    "a hook of all modules": (Named, _hooks_of_all, "fsdp", "a forward hook on all modules"),
    "an attribute of a usual name": (Planned, _usual, "ddp", "model.plan is not the model's own"),
}


def test_what_differs_is_said() -> None:
    programs = [
        (Program(model=model, x=numbers(COUNT, 8), y=classes(COUNT, 3), batch=BATCH, loop=loop), plan)
        for model, loop, plan, _ in SAID.values()
    ]
    cases = [(program, program.plan(plan)) for program, plan in programs]
    first, second = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)
    for (name, (_, _, plan, words)), *by_rank in zip(SAID.items(), first, second, strict=True):
        lines = [line for rank in by_rank for line in rank]
        if words:
            assert any(words in line for line in lines), (name, lines)
        elif plan == "ddp":
            assert not any(WRITTEN in line for line in lines), (name, lines)


class Told(Sampler[int]):
    """Reads its ``level`` while it is drawn from, and may never end."""

    def __init__(self, *, ends: bool = True) -> None:
        self.level, self.ends, self.weights = 0, ends, torch.zeros(COUNT)

    def __iter__(self) -> Iterator[int]:
        for i in range(COUNT) if self.ends else itertools.count():
            yield (i * (1 + self.level % 2) + self.level) % COUNT


class Random(Sampler[list[int]]):
    """Batches by numpy's numbers, with a generator and a count of epochs of its own, and no size."""

    def __init__(self) -> None:
        self.drawn, self.passes = np.random.default_rng(0), 0

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        order = (self.drawn.permutation(COUNT) + self.passes).tolist()
        return iter([[i % COUNT for i in order[k : k + BATCH]] for k in range(0, COUNT, BATCH)])


class Stream(IterableDataset[Any]):
    """Samples by a generator of its own."""

    def __init__(self) -> None:
        self.drawn = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(COUNT):
            x = torch.from_numpy(self.drawn.normal(size=8))
            yield x, x.sum().gt(0).long()


def _joined(rows: Any) -> Any:
    return torch.cat([r[0] for r in rows])[None], torch.cat([r[1] for r in rows])[None]


class Words(nn.Module):
    """Words of several sequences in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens)).flatten(0, 1)  # type: ignore[no-any-return]


def _made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(5)
    net: nn.Module = {"packed": Words, "one layer": lambda: nn.Linear(8, 3)}.get(kind, Named)().double()
    data = TensorDataset(numbers(COUNT, 8), classes(COUNT, 3))
    words: Any = [(classes(3 + i % 4, 11, seed=i), classes(3 + i % 4, 11, seed=i + 50)) for i in range(COUNT)]
    loaders: dict[str, Any] = {
        "told": lambda: DataLoader(data, BATCH, sampler=Told()),
        "endless": lambda: DataLoader(data, BATCH, sampler=Told(ends=False)),
        "weights": lambda: DataLoader(data, BATCH, sampler=Told()),
        "numpy": lambda: DataLoader(data, batch_sampler=Random()),
        "stream": lambda: DataLoader(Stream(), BATCH),
        "packed": lambda: DataLoader(words, BATCH, collate_fn=_joined),
        "names": lambda: [(numbers(6, 8, seed=i), classes(6, 3, seed=i), list("abcdef")) for i in range(3)],
        "one layer": lambda: DataLoader(data, BATCH),
        "modes": lambda: DataLoader(data, BATCH),
    }
    return net, sgd(net), loaders[kind]()


def _loop(kind: str, net: Any, opt: Any, batches: Any) -> State:
    for _ in range(2):
        for step, batch in enumerate(batches):
            if step == 5:  # one more than there are in an epoch
                break
            x, y = batch[:2]
            opt.zero_grad()
            each = CE(net(x), y.flatten(), reduction="mean" if kind == "packed" else "none")
            if kind == "names":
                each = each * torch.tensor([ord(c) - 96.0 for c in batch[2]])
            each.mean().backward()
            opt.step()
            if kind == "told":
                batches.sampler.level = step
            if kind == "modes":  # as frameworks do it around a validation
                modes = {name: m.training for name, m in net.named_modules()}
                net.eval()
                net(numbers(4, 8))
                for name, m in net.named_modules():
                    m.training = modes[name]
            if kind == "one layer":
                with torch.no_grad():
                    net.weight.mul_(0.9)
            if kind == "weights":
                batches.sampler.weights[step] = each.detach().mean()
    return dict(net.state_dict())


KINDS = ("told", "endless", "numpy", "stream", "names", "one layer", "modes")


def _spread(_rank: int, kinds: Sequence[str], cache: Path) -> list[tuple[State, list[str]]]:
    found = []
    for kind in kinds:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            net, opt, batches = asa.parallelize(
                *_made(kind), strategies=("ddp",), cache=cache, time_limit_s=0.1,
                cluster="profiles/cluster.local-gloo-2.json",
            )  # fmt: skip
            state = _loop(kind, net, opt, batches)
            net.close()
        found.append(({k: v.detach().clone() for k, v in state.items()}, [str(w.message) for w in heard]))
    return found


def test_batches_are_those_of_one_process_or_what_differs_is_said(tmp_path: Path) -> None:
    """Shares of some ranks have one packed sample, as many as rows; those ranks exchange as the others do."""
    said = {"weights": "sampler.weights is no longer the same on all ranks", "packed": "with pieces of a batch"}
    for of_rank in run_ranks(2, _spread, (*KINDS, *said), tmp_path, threads=1, timeout_s=120):
        for kind, (state, heard) in zip((*KINDS, *said), of_rank, strict=True):
            if kind in said:
                assert any(said[kind] in line for line in heard), heard
            else:
                assert distance(state, _loop(kind, *_made(kind))) < 1e-11, kind


def _validated(net: Any, opt: Any, batches: Any) -> State:
    """Before the first step, under torch.inference_mode."""
    net.eval()
    with torch.inference_mode():
        net(numbers(4, 8))
    net.train()
    return _usual(net, opt, batches)


def test_a_model_validated_in_inference_mode_trains() -> None:
    program = Program(model=Named, x=numbers(COUNT, 8), y=classes(COUNT, 3), batch=BATCH, loop=_validated)
    wanted = program.alone()
    for states in program.spread(["fsdp"]).values():
        for state in states:
            assert isinstance(state, dict), state
            assert distance(state, wanted) < 1e-11


def _wrapped(_rank: int) -> list[str]:
    said = []
    options: Any = {"strategies": ("ddp",), "cache": None, "time_limit_s": 0.1,
                    "cluster": "profiles/cluster.local-gloo-2.json"}  # fmt: skip
    net, _opt, _batches = asa.parallelize(*_made("modes"), **options)
    with pytest.raises(UsageError, match="put into DistributedDataParallel") as refused:
        nn.parallel.DistributedDataParallel(net)
    said.append(str(refused.value))
    assert list(signature(net.forward).parameters) == ["x"]
    net.close()

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer: Any) -> None:
            self.param_groups, self.state = optimizer.param_groups, {}  # type: ignore[assignment]

    model, plain, loader = _made("modes")
    with pytest.raises(UsageError, match=r"Lookahead did not call Optimizer.__init__") as refused:
        asa.parallelize(model, Lookahead(plain), loader, **options)
    return [*said, str(refused.value)]


def test_what_frameworks_wrap_is_refused_in_a_line() -> None:
    assert all("\n" not in line for lines in run_ranks(2, _wrapped, threads=1, timeout_s=120) for line in lines)


def _job(_rank: int) -> str:
    job = asa.Job(
        *_made("endless"), CE, strategies=("ddp",), cache=None, time_limit_s=0.1,
        cluster="profiles/cluster.local-gloo-2.json",
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"sampler \(Told\) has no length"):
        job.run(1)
    job.close()
    return "refused"


def test_a_job_refuses_a_sampler_without_end() -> None:
    assert run_ranks(2, _job, threads=1, timeout_s=120) == ["refused"] * 2


def test_lists_and_arrays_of_a_batch_are_cut_too() -> None:
    batch = {"x": torch.arange(4), "names": list("abcd"), "pairs": ("p", "q"), "array": np.arange(4), "word": "abcd"}
    assert rows_of(batch, [2, 3])["names"] == ["c", "d"]
    assert rows_of(batch, [2, 3])["array"].tolist() == [2, 3]
    assert rows_of(batch, [2, 3])["pairs"] == ("p", "q")
    assert rows_of(batch, [2, 3])["word"] == "abcd"


def test_what_reading_changes_is_put_back() -> None:
    sampler = Random()
    wanted = list(Random())
    state = own_state(sampler)
    list(sampler)
    put_back(state)
    assert list(sampler) == wanted
