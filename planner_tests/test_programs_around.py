"""What programs do around their loop: calls on one rank, modules around the model, names, late groups, odd loaders."""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.api.steps import in_step
from asa.api.tensors.retired import retire
from asa.errors import AsaError, UsageError
from asa.launch import run_ranks
from planner_tests.programs import (
    Named,
    Program,
    State,
    assert_as_alone,
    classes,
    cross_entropy,
    epochs,
    heard_of,
    numbers,
)

X0 = numbers(6, 8, seed=3)
QUICK: dict[str, Any] = {
    "strategies": ("ddp",), "cache": None, "time_limit_s": 0.1, "cluster": "profiles/cluster.local-gloo-2.json",
}  # fmt: skip


def _trained(net: Any, opt: Any, batches: Any) -> State:
    return epochs(net, opt, batches, cross_entropy)


def _program(loop: Any = _trained, model: Callable[[], nn.Module] = Named, **options: Any) -> Program:
    return Program(model=model, x=numbers(21, 8), y=classes(21, 3), loop=loop, **options)


def _usual(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()


HELPERS: dict[str, Callable[[Any, Path], object]] = {
    "asa.reduce": lambda loss, _: asa.reduce(loss.detach()),
    "asa.gather": lambda loss, _: asa.gather(loss.detach()[None]),
    "asa.save": lambda loss, path: asa.save({"loss": loss}, path),
}


def _on_one_rank(_rank: int, name: str, path: Path, plan: Any) -> None:
    program = _program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_step, "_PATIENCE_S", 0.3)
        net, opt, batches = asa.parallelize(*program.made(), plan=plan, timeout_s=20)
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            if i == 1 and torch.distributed.get_rank() == 0:
                HELPERS[name](loss, path)


@pytest.mark.parametrize("name", HELPERS)
def test_a_call_for_all_ranks_on_one_of_them_ends_with_a_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AsaError) as ended:
        run_ranks(2, _on_one_rank, name, tmp_path / "last.pt", _program().plan("ddp"), threads=1, timeout_s=120)
    said = str(ended.value) + capfd.readouterr().err
    assert f"in {name}" in said
    assert "if rank == 0" in said


class Around(nn.Module):
    """A module that calls the model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def _kept_around(net: Any, opt: Any, batches: Any) -> State:
    """A checkpoint of a module around the model: saved, and loaded after another epoch."""
    around = Around(net)
    _usual(around, opt, batches)
    kept = copy.deepcopy(around.state_dict())
    compiled = torch.compile(net, backend="eager").state_dict()
    _usual(around, opt, batches)
    around.load_state_dict(kept)
    again = {f"again.{name}": value for name, value in around.state_dict().items()}
    return {**kept, **again, **{name: value.clone() for name, value in compiled.items()}}


def test_a_module_around_the_model_saves_and_loads_its_weights() -> None:
    assert_as_alone(_program(_kept_around), ["ddp", "fsdp", "tensor"])


def _wrong_state_around(_rank: int, plan: Any) -> str:
    net, *_ = asa.parallelize(*_program().made(), plan=plan)
    state = Around(net).state_dict()
    del state["net.head.bias"]
    try:
        Around(net).load_state_dict({**state, "net.more": torch.zeros(1)})
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_module_around_the_model_names_what_its_state_lacks() -> None:
    for said in run_ranks(2, _wrong_state_around, _program().plan("ddp"), threads=1, timeout_s=120):
        assert '"net.head.bias"' in said
        assert '"net.more"' in said
        assert "parts" not in said


def test_alone_too_a_module_around_the_model_loads_what_it_saved() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net, *_ = asa.parallelize(*_program().made())
    around = Around(net)
    assert not around.load_state_dict(around.state_dict()).missing_keys
    assert [n for n, _ in net.named_modules()] == ["", "first", "head"]
    assert [n for n, _ in net.named_children()] == ["first", "head"]
    assert not net.eval().first.training


def _frozen_by_name(net: Any, opt: Any, batches: Any) -> State:
    for name, module in net.named_modules():
        if name == "first" or name.startswith("first."):
            module.requires_grad_(False)
    return epochs(net, opt, batches, cross_entropy)


def test_modules_have_the_names_of_the_model() -> None:
    assert_as_alone(_program(_frozen_by_name), ["ddp", "fsdp", "tensor", "mixed"])


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.5), nn.Linear(12, 3))


def _spread_of_answers(net: Any) -> Tensor:
    """Of three answers with dropout in evaluation (Monte Carlo dropout)."""
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__.startswith("Dropout"):
            module.train()
    with torch.no_grad():
        return torch.stack([net(X0) for _ in range(3)]).std(0)


def _monte_carlo(net: Any, opt: Any, batches: Any) -> State:
    _usual(net, opt, batches)
    spread = _spread_of_answers(net)
    for module in net.modules():
        if module.__class__.__name__ == "Dropout":
            module.p = 0.0
    return {"spread": spread, "without": _spread_of_answers(net)}


def test_dropout_in_evaluation_draws_anew_in_each_call() -> None:
    for name, (one, other) in _program(_monte_carlo, _dropping).spread(["ddp", "tensor"]).items():
        assert isinstance(one, dict), f"{name}: {one}"
        assert isinstance(other, dict)
        assert float(one["spread"].mean()) > 0, name
        assert float(one["without"].abs().max()) == 0, name
        assert torch.equal(one["spread"], other["spread"]), name


class TwoInputs(nn.Module):
    """Runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _dropping()

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.net(x + shift[:, None])  # type: ignore[no-any-return]


def _copied_with_dropout(_rank: int) -> tuple[list[str], float, float]:
    net = TwoInputs().double()
    data = TensorDataset(numbers(12, 8), numbers(12, seed=2), classes(12, 3))
    net, opt, batches = asa.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, 6), **QUICK)  # type: ignore[assignment]
    for x, shift, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x, shift), y).backward()
        opt.step()
    copied = copy.deepcopy(net)
    kinds = [type(m).__name__ for m in copied.modules()]
    with torch.no_grad():
        apart = float((copied(X0[:3], X0[:3, 0]) - copied(X0[:3], X0[:3, 0])).abs().max())
        copied.eval(), net.eval()
        alike = float((copied(X0, X0[:, 0]) - net(X0, X0[:, 0])).abs().max())
    return kinds, apart, alike


def test_a_copy_has_the_layers_of_the_program_and_draws_anew_in_each_call() -> None:
    for kinds, apart, alike in run_ranks(2, _copied_with_dropout, threads=1, timeout_s=120):
        assert kinds == ["TwoInputs", "Sequential", "Linear", "GELU", "Dropout", "Linear"]
        assert apart > 0
        assert alike < 1e-12


def _of_the_head(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9)  # type: ignore[union-attr, operator]


def _numbered(state: dict[str, Any]) -> State:
    entries = ((f"{i}.{k}", v) for i, entry in state["state"].items() for k, v in entry.items())
    return {name: value.clone() for name, value in entries if isinstance(value, Tensor)}


def _joined_later(net: Any, opt: Any, batches: Any) -> State:
    """The first layer joins in the second epoch; the optimizer is saved, and goes back to that after a third."""
    _usual(net, opt, batches)
    opt.add_param_group({"params": net.first.parameters(), "lr": 0.05})
    _usual(net, opt, batches)
    kept = copy.deepcopy(opt.state_dict())
    assert [group["params"] for group in kept["param_groups"]] == [[0, 1], [2, 3]]
    _usual(net, opt, batches)
    opt.load_state_dict(kept)
    state = _numbered(opt.state_dict())
    _usual(net, opt, batches)
    return {**net.state_dict(), **state}


def test_an_optimizer_is_saved_and_loaded_with_groups_that_were_added_later() -> None:
    assert_as_alone(_program(_joined_later, optimizer=_of_the_head))


class Scaled(DataLoader[Any]):
    """Yields what it has, times a number that a program may change."""

    scale = 1.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for x, y in super().__iter__():
            yield x * self.scale, y


class FromScaled(Program):
    """A program with such a loader."""

    def made(self) -> Any:
        """Anew, the same every time."""
        net, opt, batches = super().made()
        return net, opt, Scaled(batches.dataset, self.batch)


def _scaled_later(net: Any, opt: Any, batches: Any) -> State:
    _usual(net, opt, batches)
    batches.scale = 0.5
    return epochs(net, opt, batches, cross_entropy)


def test_a_number_of_the_loader_that_the_loop_sets_is_the_loaders() -> None:
    assert_as_alone(FromScaled(model=Named, x=numbers(21, 8), y=classes(21, 3), loop=_scaled_later), ["ddp"])


@dataclass
class Sentences:
    """A batch with fields."""

    x: Tensor
    y: Tensor


class Encoding(UserDict[str, Tensor]):
    """A batch like those of tokenizers."""


class Mean(nn.Module):
    """Takes the mean over the length, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(1, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.first(x[..., None])).mean(1))  # type: ignore[no-any-return]


def _padded(rows: list[Any]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


def _fields(rows: list[Any]) -> Any:
    return Sentences(*_padded(rows))


def _encoded(rows: list[Any]) -> Any:
    return Encoding(zip(("x", "y"), _padded(rows), strict=True))


def _over_objects(net: Any, opt: Any, batches: Any) -> State:
    for batch in batches:
        opt.zero_grad()
        x, y = (batch["x"], batch["y"]) if isinstance(batch, Encoding) else (batch.x, batch.y)
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return dict(net.state_dict())


def _of_lengths(collate: Any) -> Any:
    torch.manual_seed(5)
    net = Mean().double()
    data = [(numbers(2 + (5 * i) % 9, seed=i), i % 3) for i in range(12)]
    loader: Any = DataLoader(data, 6, collate_fn=collate)  # type: ignore[arg-type]
    return net, torch.optim.SGD(net.parameters(), lr=0.1), loader


def _shared_objects(_rank: int) -> list[State]:
    options = {**QUICK, "example_input": torch.zeros(2, 5, dtype=torch.float64)}
    return [_over_objects(*asa.parallelize(*_of_lengths(c), **options)) for c in (_fields, _encoded)]


def test_batches_of_a_class_of_the_programs_own_are_made_as_on_one_device() -> None:
    wanted = [_over_objects(*_of_lengths(collate)) for collate in (_fields, _encoded)]
    for found in run_ranks(2, _shared_objects, threads=1, timeout_s=120):
        for state, reference in zip(found, wanted, strict=True):
            assert all(torch.allclose(state[n], r, atol=1e-12) for n, r in reference.items())


def _refused(_rank: int, plan: Any) -> list[str]:
    lists = [([numbers(3 + i, seed=i) for i in range(6)], classes(6, 3)) for _ in range(2)]
    net, opt, batches = _program().made()
    said = []
    for made in (lambda: asa.parallelize(net, opt, lists, **QUICK), lambda: asa.parallelize(net, opt, None, **QUICK),
                 lambda: asa.parallelize(net, opt, batches.dataset, **QUICK),
                 lambda: asa.parallelize(*asa.parallelize(net, opt, batches, plan=plan)[:2], batches)):  # fmt: skip
        try:
            made()
        except UsageError as error:
            said.append(str(error))
    return said


def test_loaders_and_models_that_cannot_be_shared_are_refused_in_a_line() -> None:
    for said in run_ranks(2, _refused, _program().plan("ddp"), threads=1, timeout_s=120):
        assert "a list with tensors for each sample" in said[0]
        assert "loader is what yields batches" in said[1]
        assert "loader is what yields batches" in said[2]
        assert "is one that asa.parallelize returned" in said[3]


class Late(nn.Module):
    """Has its layers in another order than that in which it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.second, self.first = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(F.relu(self.second(F.relu(self.first(x))))))  # type: ignore[no-any-return]


def _in_order(net: Any, opt: Any, batches: Any) -> State:
    """A plain model follows, parameter by parameter; noise is drawn for one after the other; the first one freezes."""
    plain = Late().double()
    plain.load_state_dict(net.state_dict())
    for epoch in range(2):
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            torch.manual_seed(i)
            for p in opt.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.add_(0.1 * torch.randn(p.shape, dtype=torch.float64))
            opt.step()
            with torch.no_grad():
                for slow, p in zip(plain.parameters(), net.parameters(), strict=True):
                    slow.mul_(0.5).add_(p)
        if not epoch:
            next(iter(net.parameters())).requires_grad_(False)
            opt.param_groups[0]["weight_decay"] = 0.0
            opt.param_groups[0]["momentum"] = 0.0
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in net.named_modules() if n][:4] == ["head", "norm", "second", "first"]
    return {**net.state_dict(), **{f"plain.{n}": p.detach() for n, p in plain.named_parameters()}}


def test_parameters_and_modules_are_in_the_order_of_the_model() -> None:
    assert_as_alone(_program(_in_order, Late))


def _over_its_own_loader(net: Any, opt: Any, batches: Any) -> State:
    _usual(net, opt, batches)
    net.eval()
    hits = 0
    with torch.no_grad():
        for x, y in DataLoader(TensorDataset(numbers(9, 8), classes(9, 3)), 4):
            hits += int((net(x).argmax(1) == y).sum()) + 1
    return {"hits": asa.reduce(hits, "sum")}


def _over_the_loader(net: Any, opt: Any, batches: Any) -> State:
    hits = torch.zeros(())
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        F.cross_entropy(out, y).backward()
        opt.step()
        hits += (out.argmax(1) == y).sum() + len(x)
    return {"hits": asa.reduce(hits, "sum")}


def test_sums_of_what_every_rank_computes_are_told_of() -> None:
    cases = [(_program(loop), _program().plan("ddp")) for loop in (_over_its_own_loader, _over_the_loader)]
    repeated, shared = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert any("asa.reduce puts together what is the same on all ranks" in line for line in repeated)
    assert not any("puts together" in line for line in shared)


class Block(nn.Module):
    """A layer with a norm and a gain, and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * F.relu(self.layer(self.norm(x)))


class Blocks(nn.Module):
    """Some blocks in a row, each of which a plan makes a component of."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(Block(), Block(), nn.Identity(), Block())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


def _with_kept_norms(net: Any, opt: Any, batches: Any) -> None:
    """One epoch, in which the features normalise by the statistics that they have."""
    net.train()
    net.features.eval()
    assert not any(m.training for m in net.features.modules())
    _usual(net, opt, batches)


def _decayed_by_block(net: Any, opt: Any, batches: Any) -> State:
    """Gradients get smaller from block to block."""
    net.features.eval()
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        assert len(net.features) == 4
        for i, block in enumerate(net.features):
            for p in block.parameters():
                p.grad.mul_(0.5**i)
        net.features[3].gain.grad.mul_(2.0)
        assert sum(isinstance(m, Block) for m in net.features.modules()) == 3
        assert [n for n, _ in net.features.named_modules()][:3] == ["", "0", "0.norm"]
        assert [type(m).__name__ for m in net.features.children()] == ["Block", "Block", "Identity", "Block"]
        opt.step()
    return dict(net.state_dict())


def _frozen_features(net: Any, opt: Any, batches: Any) -> State:
    _with_kept_norms(net, opt, batches)
    for p in net.features.parameters():
        p.requires_grad_(False)
    opt.zero_grad()
    _with_kept_norms(net, opt, batches)
    assert sum(p.numel() for p in net.features.parameters()) == 3 * (8 + 16 + 72)
    return dict(net.state_dict())


def _followed_features(net: Any, opt: Any, batches: Any) -> State:
    """A plain copy of the features follows; then they are set to what it has."""
    target = Blocks().double().features
    target.load_state_dict(net.features.state_dict())
    for _ in range(2):
        _with_kept_norms(net, opt, batches)
        with torch.no_grad():
            for slow, p in zip(target.parameters(), net.features.parameters(), strict=True):
                slow.mul_(0.5).add_(p, alpha=0.5)
    copied = copy.deepcopy(net.features)
    assert type(copied) is nn.Sequential
    net.features.load_state_dict(target.state_dict())
    kept = {f"copied.{n}": t for n, t in copied.state_dict().items()}
    return {**net.state_dict(), **kept}


@pytest.mark.parametrize("loop", [_decayed_by_block, _frozen_features, _followed_features])
def test_a_module_that_a_plan_cuts_is_used_as_a_whole(loop: Any) -> None:
    assert_as_alone(_program(loop, Blocks), ["ddp", "zero1", "fsdp", "tensor", "mixed"])


def _watched_by_a_hook(net: Any, opt: Any, batches: Any) -> State:
    seen: list[int] = []
    handle = net.features[1].register_forward_hook(lambda *_: seen.append(1))
    net.features.eval()
    _usual(net, opt, batches)
    handle.remove()
    _usual(net, opt, batches)
    return {**net.state_dict(), "seen": torch.tensor(float(len(seen)))}


def test_a_hook_on_a_module_that_a_plan_cuts_is_called() -> None:
    assert_as_alone(_program(_watched_by_a_hook, Blocks), ["ddp", "tensor"])


def _begun_anew(net: Any, opt: Any, batches: Any) -> State:
    """Drawn by a function for the modules, some of which a plan cuts."""

    def begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
        if isinstance(module, Block):
            nn.init.zeros_(module.gain)

    torch.manual_seed(2)
    net.apply(begin)
    net.features.eval()
    _usual(net, opt, batches)
    return dict(net.state_dict())


def test_a_function_for_all_modules_gets_those_that_a_plan_cuts() -> None:
    assert_as_alone(_program(_begun_anew, Blocks), ["ddp", "fsdp", "tensor"])


def _answer(net: Any) -> Tensor:
    net.eval()
    with torch.no_grad():
        return net(X0)  # type: ignore[no-any-return]


def _swapped(net: Any, opt: Any, batches: Any) -> State:
    """Other weights are put in, evaluated and taken out again; the optimizer is saved behind an evaluation, and the
    best weights are loaded behind one."""
    _usual(net, opt, batches)
    own, held = [p.detach().clone() for p in net.parameters()], list(net.parameters())
    with torch.no_grad():
        for p in held:
            p.mul_(0.5)
    answers = {"half": _answer(net)}
    with torch.no_grad():
        for p, w in zip(net.parameters(), own, strict=True):
            p.copy_(w)
    answers["own"] = _answer(net)
    state = _numbered(copy.deepcopy(opt.state_dict()))
    net.load_state_dict({name: 0.9 * t for name, t in net.state_dict().items()})
    answers["best"] = _answer(net)
    net(X0)  # without no_grad, and without a backward
    net.load_state_dict({name: 0.8 * t for name, t in net.state_dict().items()})
    answers["better"] = _answer(net)
    net.train()
    _usual(net, opt, batches)
    return {**net.state_dict(), **answers, **state}


def test_weights_that_are_written_behind_an_evaluation_stay() -> None:
    assert_as_alone(_program(_swapped))


class Tempered(nn.Module):
    """Divides by a number that it keeps in a record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 12), nn.Linear(12, 3)
        self.config, self.scale = {"temperature": 1.0, "name": "small"}, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.first(x))) * self.scale / self.config["temperature"]  # type: ignore[no-any-return]

    def anneal(self) -> None:
        """Change the number that is no item of a record."""
        self.scale *= 0.5


def _annealed(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        net.config["temperature"] *= 0.5
    return {}


def _annealed_by_a_method(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        with torch.no_grad():
            net.anneal()
    return {}


def test_numbers_that_a_trace_does_not_see_are_told_of() -> None:
    loops = (_annealed, _annealed_by_a_method, _trained)
    cases = [(_program(loop, Tempered), _program(model=Tempered).plan("ddp")) for loop in loops]
    record, method, nothing = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert any("model.config.temperature was changed behind" in line for line in record)
    assert any("model.scale was changed behind" in line for line in method)
    assert not any("was changed behind" in line for line in nothing)


class ByFunction(nn.Module):
    """Drops by a function, in its own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5, self.training)


def _by_functions() -> nn.Module:
    return nn.Sequential(nn.Sequential(ByFunction(), ByFunction()), nn.Linear(8, 3))


def _kept_in_evaluation(net: Any, opt: Any, batches: Any) -> State:
    net[0].eval()
    return epochs(net, opt, batches, cross_entropy)


def test_a_mode_that_a_trace_does_not_see_is_told_of() -> None:
    cases = [
        (_program(loop, _by_functions), _program(model=_by_functions).plan("ddp"))
        for loop in (_kept_in_evaluation, _trained)
    ]
    kept, usual = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert any("has another mode than the model" in line for line in kept)
    assert not any("has another mode" in line for line in usual)


class Wide(nn.Module):
    """Two layers that a plan splits together, and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def _by_class(net: Any, opt: Any, batches: Any) -> State:
    torch.manual_seed(4)
    linear = [m for m in net.modules() if isinstance(m, nn.Linear)]
    for module in linear:
        module.reset_parameters()
    for x, y in batches:
        opt.zero_grad()
        (F.cross_entropy(net(x), y) + 0.1 * sum(m.weight.square().sum() for m in linear)).backward()
        opt.step()
    return dict(net.state_dict())


def test_split_layers_are_found_by_their_class() -> None:
    assert_as_alone(_program(_by_class, Wide), ["ddp", "tensor", "mixed"])


def _counted(net: Any, opt: Any, batches: Any) -> State:
    """The last batch is computed by every rank, because of its norm."""
    right, means = torch.zeros((), dtype=torch.int64), []
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        right += asa.reduce((y == 0).any(), "sum") > 0
        means.append(asa.reduce((y >= 0).all()).float())
    return {"right": right, "means": torch.stack(means)}


def test_truth_values_are_added_up_over_ranks() -> None:
    model = lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))  # noqa: E731
    program = _program(_counted, model)
    for one in program.spread(["ddp"])["ddp"]:
        assert isinstance(one, dict), one
        assert int(one["right"]) == int(sum((y == 0).any() for y in program.y.split(6)))
        assert bool((one["means"] == 1).all())


class Remembering(torch.optim.Optimizer):
    """Steps by the mean of the last gradients, which it keeps in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("gradients", [])
                kept.append(p.grad.clone())
                del kept[:-3]
                p.sub_(group["lr"] * sum(kept) / len(kept))


def _lists_saved(net: Any, opt: Any, batches: Any) -> State:
    _usual(net, opt, batches)
    kept = copy.deepcopy(opt.state_dict())
    _usual(net, opt, batches)
    opt.load_state_dict(kept)
    _usual(net, opt, batches)
    return {**net.state_dict(), **{f"{i}": torch.stack(e["gradients"]) for i, e in opt.state_dict()["state"].items()}}


def test_an_optimizer_that_keeps_lists_is_saved_and_loaded() -> None:
    assert_as_alone(_program(_lists_saved, optimizer=lambda net: Remembering(net.parameters())), ["ddp"])


def test_a_tensor_over_parameters_is_refused_if_some_of_them_are_replaced() -> None:
    flat = torch.zeros(6)
    kept, gone = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
    first, last = flat[:2], flat[5:]
    retire({"kept": kept, "gone": gone}, {"kept": kept, "gone": nn.Parameter(torch.zeros(3))})
    first.add_(1)
    assert kept.sum() == 2
    for over in (flat, last):
        with pytest.raises(UsageError, match="ranks now train another in its place"):
            over.mul_(2)
