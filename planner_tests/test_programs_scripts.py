"""What public training scripts do around a loop, on two ranks: the numbers of one process, or a line that says what
differs. Whole scripts are in ``benchmarks/program_table/scripts.py`` and ``methods.py``."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.api.calls import Call
from asa.api.steps.batches import GlobalBatches
from asa.errors import UsageError
from asa.launch import run_ranks
from planner_tests.programs import Program, State, classes, cross_entropy, distance, epochs, heard_of, numbers

X, Y = numbers(21, 8), classes(21, 4)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))


def _step(net: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    loss = cross_entropy(net, x, y)
    loss.backward()
    opt.step()
    return loss


def _program(loop: Any, model: Any = _net, **options: Any) -> Program:
    return Program(model=model, x=X, y=Y, loop=loop, options=options)


def _shadow(net: Any, opt: Any, batches: Any) -> State:
    """Averages take the parameters' place for a while, as the object that ``p.data`` is."""
    average = {n: p.data.clone() for n, p in net.named_parameters()}
    seen = []
    for x, y in batches:
        _step(net, opt, x, y)
        backup = {}
        for n, p in net.named_parameters():
            average[n] = 0.5 * average[n] + 0.5 * p.data
            backup[n] = p.data
            p.data = average[n]
        with torch.no_grad():
            net.eval()
            seen.append(float(cross_entropy(net, X, Y)))
            net.train()
        for n, p in net.named_parameters():
            p.data = backup[n]
    return {**net.state_dict(), "seen": torch.tensor(seen, dtype=torch.float64)}


def _initialised(net: Any, opt: Any, batches: Any) -> State:
    def fill(m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    torch.manual_seed(3)
    net.apply(fill)
    for m in net.modules():
        if type(m) is nn.Linear:
            m.reset_parameters()
    return epochs(net, opt, batches, cross_entropy)


def _as_vector(net: Any, opt: Any, batches: Any) -> State:
    kept = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    epochs(net, opt, batches, cross_entropy)
    now = nn.utils.parameters_to_vector(net.parameters()).detach()
    nn.utils.vector_to_parameters(0.5 * (kept + now), net.parameters())
    return epochs(net, opt, batches, cross_entropy)


def _scaled_by_another(net: Any, opt: Any, batches: Any) -> State:
    """A number is brought to the type of a parameter, as in sharpness-aware optimizers."""
    for x, y in batches:
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        for p in net.parameters():
            p.grad.mul_(torch.tensor(0.5).to(p))
        opt.step()
    return dict(net.state_dict())


class _Two(nn.Module):
    """A target network beside the one that learns; it follows by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.online = _net()
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x) - 0.1 * self.target(x)  # type: ignore[no-any-return]

    def follow(self) -> None:
        for new, old in zip(self.online.parameters(), self.target.parameters(), strict=True):
            old.data = 0.5 * old.data + 0.5 * new.data


def _following(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        _step(net, opt, x, y)
        net.follow()
    return dict(net.state_dict())


def _inside(net: Any, opt: Any, batches: Any) -> State:
    """A module of the model is called by itself."""
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net.online(x), y).backward()
        opt.step()
    plain = copy.deepcopy(net.online)
    assert type(plain) is nn.Sequential
    return dict(net.state_dict())


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 4))


def _statistics_anew(net: Any, opt: Any, batches: Any) -> State:
    epochs(net, opt, batches, cross_entropy)
    torch.optim.swa_utils.update_bn(batches, net)
    return dict(net.state_dict())


def _acting(net: Any, opt: Any, _: Any) -> State:
    """Draws actions by what the model gives, one after another, and learns from them; ranks draw the same."""
    torch.manual_seed(1)
    drawn = []
    for _episode in range(3):
        state, logs = torch.zeros(8, dtype=torch.float64), []
        for _time in range(3):
            policy = torch.distributions.Categorical(logits=net(state[None]))
            action = policy.sample()
            logs.append(policy.log_prob(action))
            drawn.append(action.item())
            state = state * 0.5 + 0.1 * action.item()
        opt.zero_grad()
        torch.cat([-log * (i + 1) for i, log in enumerate(logs)]).sum().backward()
        opt.step()
    return {**net.state_dict(), "drawn": torch.tensor(drawn)}


ALIKE: dict[str, tuple[Program, tuple[str, ...]]] = {
    "acting": (_program(_acting), ("ddp",)),
    "shadow": (_program(_shadow), ("ddp", "fsdp", "mixed-sharded")),
    "initialised": (_program(_initialised), ("ddp", "tensor")),
    "vector": (_program(_as_vector), ("fsdp", "tensor", "mixed-sharded")),
    "scaled": (_program(_scaled_by_another), ("tensor",)),
    "following": (_program(_following, _Two), ("ddp",)),
    "inside": (_program(_inside, _Two), ("ddp",)),
    "statistics": (_program(_statistics_anew, _normed, batch_norm="exact"), ("ddp",)),
}


def _all(_rank: int, cases: list[tuple[Program, Any]]) -> list[State | str]:
    warnings.simplefilter("ignore")
    found: list[State | str] = []
    for program, plan in cases:
        try:
            net, opt, batches = asa.parallelize(*program.made(), plan=plan, **(program.options or {}))
            found.append(program.loop(net, opt, batches))
            net.close()
        except Exception as error:
            return [*found, f"{type(error).__name__}: {error}"]
    return found


def test_scripts_leave_what_one_process_leaves() -> None:
    cases = [(name, program, plan) for name, (program, plans) in ALIKE.items() for plan in plans]
    wanted = {name: program.alone() for name, (program, _) in ALIKE.items()}
    answers = run_ranks(
        2, _all, [(program, program.plan(plan)) for _, program, plan in cases], threads=1, timeout_s=120
    )
    for states in answers:
        for (name, _, plan), state in zip(cases, states, strict=False):
            assert not isinstance(state, str), f"{name} under {plan}: {state}"
            assert distance(state, wanted[name]) < 1e-11, f"{name} under {plan}"
        assert len(states) == len(cases)


def _answers(net: Any, opt: Any, batches: Any) -> None:
    """Kept until the end of the epoch, and read out there."""
    kept = []
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        F.cross_entropy(out, y).backward()
        opt.step()
        kept.append(out.detach())
    torch.cat(kept).numpy()


def _behind(net: Any, opt: Any, batches: Any) -> None:
    total = 0.0
    for x, y in batches:
        total += _step(net, opt, x, y).item()


def _of_all(net: Any, opt: Any, batches: Any) -> None:
    total = torch.zeros((), dtype=torch.float64)
    for x, y in batches:
        total = total + asa.reduce(_step(net, opt, x, y).detach())
    float(total / 4)


def _remembered(net: Any, opt: Any, batches: Any) -> None:
    """What was answered for another sample is a sample's second target in later epochs; labels are numbers of them."""
    table = torch.zeros(21, 4, dtype=torch.float64)
    for epoch in range(3):
        for x, i in batches:
            opt.zero_grad()
            out = net(x)
            (F.cross_entropy(out, i % 4) + epoch * F.mse_loss(out, table[(i + epoch) % 21])).backward()
            opt.step()
            table[i] = out.detach()


def _kept_by_a_hook(net: Any, opt: Any, batches: Any) -> None:
    kept: list[Tensor] = []
    net[0].register_forward_hook(lambda _m, _i, out: kept.append(out))
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        (F.cross_entropy(out, y) + kept[-1].abs().mean()).backward()
        opt.step()


class _Tempered(nn.Module):
    """Gives its temperature beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = _net(), nn.Parameter(torch.ones([]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.scale.exp()


def _contrasted(net: Any, opt: Any, batches: Any) -> None:
    for x, _ in batches:
        opt.zero_grad()
        out, scale = net(x)
        near = scale * F.normalize(out) @ F.normalize(out).T
        F.cross_entropy(near, torch.arange(len(x))).backward()
        opt.step()


HEARD: dict[str, tuple[Program, str, str]] = {
    "answers": (_program(_answers), "ddp", "is of this rank's samples"),
    "behind backward": (_program(_behind), "ddp", "is of this rank's samples"),
    "for each sample": (
        Program(model=_net, x=X, y=torch.arange(21), loop=_remembered), "ddp", "a tensor [21, 4] beside the batch",
    ),
    "a hook": (_program(_kept_by_a_hook), "fsdp", "a forward hook on"),
    "a temperature": (_program(_contrasted, _Tempered), "ddp", "not a mean over samples"),
}  # fmt: skip


def test_what_differs_is_said_and_what_does_not_is_not() -> None:
    quiet = _program(_of_all)
    cases = [(program, program.plan(plan)) for program, plan, _ in HEARD.values()]
    *found, nothing = run_ranks(2, heard_of, [*cases, (quiet, quiet.plan("ddp"))], threads=1, timeout_s=120)[0]
    for (name, (_, _, words)), lines in zip(HEARD.items(), found, strict=True):
        assert any(words in line for line in lines), (name, lines)
    assert not any("this rank's samples" in line for line in nothing), nothing


def _refused(_rank: int, tensor: Any, fsdp: Any) -> list[str]:
    warnings.simplefilter("ignore")
    said = []
    net, _, batches = asa.parallelize(*_program(lambda *_: {}).made(), plan=tensor)
    state = net.state_dict()
    assert net.load_state_dict(state).missing_keys == []
    partly = net.load_state_dict({"0.weight": state["0.weight"], "other": state["0.bias"]}, strict=False)
    said.append(f"{partly.missing_keys} {partly.unexpected_keys}")
    for other in ({**state, "other": state["0.bias"]}, {"0.weight": state["0.weight"]}, {**state, "0.bias": X}):
        with pytest.raises(UsageError) as refused:
            net.load_state_dict(other)
        said.append(str(refused.value))
    with pytest.raises(UsageError) as part:
        net[0](X)
    said.append(str(part.value))
    prune.l1_unstructured(nn.Module.__getattr__(net, "parts")[0].get_submodule("0"), "bias", 0.5)
    with pytest.raises(UsageError) as replaced:
        next(iter(batches))
    said.append(str(replaced.value))
    net, *_ = asa.parallelize(*_program(lambda *_: {}).made(), plan=fsdp)
    with pytest.raises(UsageError) as removed:  # as torch's parametrizations do
        del net[0].bias
    return [*said, str(removed.value)]


def test_what_cannot_be_is_refused_in_a_line() -> None:
    program = _program(lambda *_: {})
    said = run_ranks(2, _refused, program.plan("tensor"), program.plan("fsdp"), threads=1, timeout_s=120)[0]
    keys, unexpected, missing, shape, part, replaced, removed = said
    assert keys == "['0.bias', '2.weight', '2.bias'] ['other']"
    assert "has other, which are none of the model's" in unexpected
    assert "lacks 0.bias" in missing
    assert "0.bias has the shape [12], and in the state [21, 8]" in shape
    assert "computes with gradients, and ranks hold parts of the model" in part
    assert "was replaced or tied behind asa.parallelize" in replaced
    assert removed == "model.0.bias cannot be removed or parametrized behind asa.parallelize: do it before the call"


class _Graph(nn.Module):
    """Every row looks at others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.layer(x)
        return h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


def _one_graph() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net, edges = _Graph().double(), torch.randint(21, (2, 40), generator=torch.Generator().manual_seed(2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1), [(X, edges, Y)]


def _learn_graph(net: Any, opt: Any, batches: Any) -> State:
    for _ in range(2):
        for x, edges, y in batches:
            opt.zero_grad()
            F.cross_entropy(net(x, edges)[y > 0], y[y > 0]).backward()
            opt.step()
    return dict(net.state_dict())


def _of_graph(_rank: int) -> list[State]:
    warnings.simplefilter("ignore")
    found = []
    for how in ("ddp", "fsdp"):
        options: dict[str, Any] = {"strategies": (how,), "cluster": "profiles/cluster.local-gloo-2.json", "cache": None}
        found.append(_learn_graph(*asa.parallelize(*_one_graph(), time_limit_s=0.1, **options)))
    return found


def test_one_graph_is_computed_whole_by_every_rank_and_counts_once() -> None:
    for states in run_ranks(2, _of_graph, threads=1, timeout_s=120):
        for state in states:
            assert distance(state, _learn_graph(*_one_graph())) < 1e-11


class _Buckets:
    """A batch sampler without a size, in an order drawn by Python."""

    def __iter__(self) -> Iterator[list[int]]:
        order = [[0, 1, 2], [3, 4], [5]]
        random.shuffle(order)
        return iter(order)


class _Alone:
    num_ranks, rank = 1, 0


def test_the_size_of_a_batch_is_found_without_drawing() -> None:
    batches = GlobalBatches(
        DataLoader(TensorDataset(X), batch_sampler=_Buckets()),  # type: ignore[arg-type]
        _Alone(), list,  # type: ignore[arg-type]
    )  # fmt: skip
    before = random.getstate()
    assert batches.batch_size == 3
    assert random.getstate() == before


class _Batch:
    """A batch of a library's own kind."""

    def __repr__(self) -> str:
        return "line\nline"


def test_a_call_is_described_by_its_kinds() -> None:
    assert str(Call((_Batch(), 3, "train"))) == "(_Batch, 3, 'train')"
