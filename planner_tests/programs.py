"""Small programs of a user's own, in float64, under plans of every kind on two ranks, against one process."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.tracing import TracedModel, trace
from planner_tests.hand_plans import alternating, hand_plan, uniform

LAYOUTS = {
    "ddp": (uniform(2, 1), "replicate"),
    "zero1": (uniform(2, 1), "zero1"),
    "zero2": (uniform(2, 1), "zero2"),
    "fsdp": (uniform(2, 1), "zero3"),
    "tensor": (uniform(1, 2), "replicate"),
    "mixed": (alternating(2), "replicate"),
    "mixed-sharded": (alternating(2, shift=1), "zero3"),
}
"""Layout and data strategy by the name of a plan."""

State = dict[str, Tensor]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(count: int, kinds: int, seed: int = 1) -> Tensor:
    """So many labels."""
    return torch.randint(kinds, (count,), generator=torch.Generator().manual_seed(seed))


class Named(nn.Module):
    """Layers with names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.relu(self.first(x)))  # type: ignore[no-any-return]


def cross_entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The usual loss."""
    return nn.functional.cross_entropy(net(x), y)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """With momentum and weight decay, to which a gradient of zero is not the same as none."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def epochs(
    net: nn.Module, opt: torch.optim.Optimizer, batches: Any, loss: Callable[..., Tensor], count: int = 1
) -> State:
    """The usual loop."""
    for _ in range(count):
        for x, y in batches:
            opt.zero_grad()
            loss(net, x, y).backward()
            opt.step()
    return dict(net.state_dict())


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a user wrote: ``model()``, samples ``x`` and labels ``y`` in batches of ``batch``, and ``loop``, which
    trains and returns the state."""

    model: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    batch: int = 6
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    loop: Callable[..., State]
    options: dict[str, Any] | None = None

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        """Anew, the same every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            net = self.model().double()
        return net, self.optimizer(net), DataLoader(TensorDataset(self.x, self.y), self.batch)

    @cached_property
    def traced(self) -> TracedModel:
        """The model, traced once for all plans."""
        return trace(self.made()[0], self.x[:2], name="model")

    def plan(self, name: str, ranks: int = 2) -> Plan:
        """A plan of :data:`LAYOUTS`, or of one rank (``single``)."""
        ranks = 1 if name == "single" else ranks
        choose, strategy = LAYOUTS.get(name, (uniform(1, 1), "replicate"))
        return hand_plan(
            self.traced, ranks, choose, input_shape=tuple(self.x.shape[1:]), num_classes=1,
            data_strategy=lambda _i: strategy, global_batch=self.batch,
        )  # fmt: skip

    def alone(self) -> State:
        """On one device, without asa."""
        return self.loop(*self.made())

    def spread(self, names: list[str]) -> dict[str, list[State | str]]:
        """On two ranks, the states by rank under every plan in ``names``, or the error's text."""
        plans = [self.plan(name) for name in names]
        found = run_ranks(2, _trained, self, plans, threads=1, timeout_s=120)
        return {name: [rank[i] for rank in found] for i, name in enumerate(names)}


def _trained(_rank: int, program: Program, plans: list[Plan]) -> list[Any]:
    warnings.simplefilter("ignore")
    states: list[Any] = []
    for plan in plans:
        try:
            net, opt, batches = asa.parallelize(*program.made(), plan=plan, **(program.options or {}))
            states.append(program.loop(net, opt, batches))
        except Exception as error:
            states.append(f"{type(error).__name__}: {error}")
            break
        net.close()
    return states + ["not reached"] * (len(plans) - len(states))


def heard_of(_rank: int, cases: list[tuple[Program, Any]]) -> list[list[str]]:
    """Warnings and lines on standard error of each program under its plan."""
    lines = []
    for program, plan in cases:
        text = io.StringIO()
        with warnings.catch_warnings(record=True) as heard, contextlib.redirect_stderr(text):
            warnings.simplefilter("always")
            net, opt, batches = asa.parallelize(*program.made(), plan=plan)
            program.loop(net, opt, batches)
            net.close()
        lines.append([str(w.message) for w in heard] + text.getvalue().splitlines())
    return lines


def distance(state: State, reference: State) -> float:
    """Largest distance of a tensor from its reference, relative to the reference's largest number."""
    assert state.keys() == reference.keys()
    return max((_apart(state[n].double(), r.double()) for n, r in reference.items() if r.numel()), default=0.0)


def _apart(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).abs().max()) / max(float(reference.abs().max()), 1e-300)


def assert_as_alone(
    program: Program, names: list[str] | None = None, *, within: float = 1e-11
) -> dict[str, list[State | str]]:
    """Every plan leaves what one process leaves, on every rank; returns the states by rank under every plan."""
    wanted, found = program.alone(), program.spread(names or list(LAYOUTS))
    for name, states in found.items():
        for state in states:
            assert not isinstance(state, str), f"{name}: {state}"
            assert distance(state, wanted) < within, name
    return found
