"""A step over a chain: gradients as of the whole model, marks in their places, memory by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from asa.instruments import allocations
from asa.instruments.allocations import Event
from asa.profiler.chain import Chain, Marks, whole_step
from asa.profiler.clock import HostClock
from asa.profiler.memory import account, measure_memory

CPU = torch.device("cpu")


class Piece(nn.Module):
    """A component: modules in sequence, with an optional side head."""

    def __init__(self, *modules: nn.Module, side: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(*modules)
        self.side = side

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.body(x)
        return (y,) if self.side is None else (y, self.side(y))


class Noted(torch.autograd.Function):
    """Identity that notes in ``log`` when its gradient passes."""

    @staticmethod
    def forward(ctx, x, log, word):
        ctx.log, ctx.word = log, word
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(ctx.word)
        return gradient, None, None


class Note(nn.Module):
    def __init__(self, log: list, word: str) -> None:
        super().__init__()
        self.log, self.word = log, word

    def forward(self, x: Tensor) -> Tensor:
        return Noted.apply(x, self.log, self.word)


def _gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters()]


def test_a_chain_computes_the_gradients_of_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    other = copy.deepcopy(model)
    x = torch.randn(6, 3, 8, 8)
    chain = Chain([Piece(model[0]), Piece(model[1], model[2]), Piece(*model[3:])], CPU, "fp32")
    torch.manual_seed(1)
    chain.lap(x, HostClock())
    torch.manual_seed(1)
    y = other(x)
    y.backward(torch.randn_like(y) / len(x))
    for mine, reference in zip(_gradients(model), _gradients(other), strict=True):
        assert torch.equal(mine, reference)


def test_every_part_has_its_time_and_they_add_up():
    chain = Chain(
        [Piece(nn.Linear(8, 8)), Piece(nn.Linear(8, 8), nn.ReLU(inplace=True)), Piece(nn.Linear(8, 3))], CPU, "fp32"
    )
    lap = chain.lap(torch.randn(4, 8), HostClock())
    assert len(lap.forward) == len(lap.backward) == 3
    assert min(*lap.forward, *lap.backward) > 0
    assert lap.seconds == pytest.approx(sum(lap.forward) + sum(lap.backward))
    assert lap.host_s == pytest.approx(lap.seconds)


def test_marks_fall_between_the_components_in_backward_too():
    log: list[str] = []
    pieces = [
        Piece(nn.Linear(4, 4), Note(log, "first")),
        Piece(Note(log, "second"), nn.Linear(4, 4), side=Note(log, "side of second")),
        Piece(nn.Linear(4, 4), Note(log, "third")),
    ]
    for i, piece in enumerate(pieces):
        for p in piece.parameters():
            p.register_post_accumulate_grad_hook(lambda _, i=i: log.append(f"gradient of {i}"))
    marks: list[int] = []

    def mark() -> int:
        log.append(f"mark {len(marks)}")
        marks.append(len(marks))
        return len(marks) - 1

    found = Chain(pieces, CPU, "fp32").step(torch.randn(2, 4), mark)
    assert found == Marks(forward=[0, 1, 2, 3], backward=[7, 6, 5, 4])
    spans = {word: log.index(word) for word in log}
    assert spans["mark 4"] < spans["third"] < spans["gradient of 2"] < spans["mark 5"]
    assert spans["mark 5"] < spans["side of second"] < spans["second"] < spans["mark 6"]
    assert spans["mark 5"] < spans["gradient of 1"] < spans["mark 6"] < spans["first"] < spans["mark 7"]


def test_a_component_that_nothing_is_learnt_in_or_before_has_no_backward():
    chain = Chain([Piece(nn.Flatten()), Piece(nn.Linear(12, 3))], CPU, "fp32")
    lap = chain.lap(torch.randn(2, 3, 4), HostClock())
    assert lap.backward[0] == 0
    assert lap.backward[1] > 0


def test_a_component_may_begin_in_place():
    chain = Chain([Piece(nn.Linear(8, 8)), Piece(nn.ReLU(inplace=True), nn.Linear(8, 2))], CPU, "fp32")
    assert min(chain.lap(torch.randn(4, 8), HostClock()).backward) > 0


def test_reduced_precision_leaves_full_precision_gradients():
    module = nn.Linear(8, 8)
    Chain([Piece(module)], CPU, "bf16").lap(torch.randn(4, 8), HostClock())
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


def test_the_whole_model_leaves_no_gradients():
    model = nn.Linear(4, 2)
    assert whole_step(model, torch.randn(3, 4), HostClock(), CPU, "fp32") > 0
    assert model.weight.grad is None


def test_saved_bytes_of_linear_layers_by_hand():
    """Each layer's output is what the next one keeps: 16 samples x 256 words; the last is held as the result."""
    chain = Chain([Piece(nn.Linear(256, 256, bias=False)) for _ in range(4)], CPU, "fp32")
    memory = measure_memory(chain, torch.randn(16, 256))
    assert [held.saved for held in memory.components] == [16 * 256 * 4] * 4
    # Beyond activations and gradients backward holds at most the gradients on both sides of a layer.
    assert all(0 < held.transient <= 3 * 16 * 256 * 4 for held in memory.components)


def test_the_planners_bound_covers_the_recorded_peak_closely():
    pieces = [Piece(nn.Conv2d(c, 2 * c, 3, padding=1), nn.BatchNorm2d(2 * c), nn.ReLU()) for c in (4, 8, 16)]
    memory = measure_memory(Chain(pieces, CPU, "fp32"), torch.randn(8, 4, 16, 16))
    saved = [held.saved for held in memory.components]
    gradients = [sum(4 * p.numel() for p in piece.parameters()) for piece in pieces]
    bound = max(sum(saved[: k + 1]) + sum(gradients[k:]) + memory.components[k].transient for k in range(3))
    assert memory.peak <= bound <= 1.1 * memory.peak
    closer = max(
        sum(saved[: k + 1]) + sum(gradients[k:]) + h.transient - h.unmade for k, h in enumerate(memory.components)
    )
    assert memory.peak <= closer <= bound
    assert all(p.grad is None for piece in pieces for p in piece.parameters())


def test_accounting_of_a_made_up_step():
    """Two components; the first saves 100, the second 10; 4 and 2 bytes of gradients; one buffer in each backward."""
    events = [
        Event(at=1, pointer=1, size=100),
        Event(at=2, pointer=2, size=30),
        Event(at=3, pointer=2, size=-30),
        Event(at=11, pointer=3, size=10),
        Event(at=21, pointer=4, size=7),
        Event(at=22, pointer=5, size=2),
        Event(at=23, pointer=3, size=-10),
        Event(at=31, pointer=6, size=50),
        Event(at=32, pointer=7, size=4),
        Event(at=33, pointer=1, size=-100),
        Event(at=34, pointer=99, size=-1000),
    ]
    marks = Marks(forward=[0, 10, 20], backward=[40, 30, 20])
    memory = account(events, marks, gradients=[4, 2])
    assert [held.saved for held in memory.components] == [100, 10]
    # First: 163 live at 32, less 100 saved and 6 of gradients. Second: 119 at 22, less 110 and 2.
    assert [held.transient for held in memory.components] == [57, 7]
    assert memory.peak == 163
    assert [held.unmade for held in memory.components] == [0, 0]
    # A buffer that is gone when the gradients are made is not hidden by their size.
    early = [Event(at=31, pointer=8, size=60), Event(at=31, pointer=8, size=-60)]
    memory = account([*events[:7], *early, *events[7:]], marks, gradients=[40, 2])
    assert [held.transient for held in memory.components] == [60, 7]
    # With all 42 of gradients counted: 169 live then, less 100 saved.
    assert [held.unmade for held in memory.components] == [33, 0]


def test_what_another_allocation_lies_on_was_released():
    events = [
        Event(at=1, pointer=0, size=512), Event(at=2, pointer=512, size=512), Event(at=3, pointer=4096, size=512),
        Event(at=4, pointer=256, size=512), Event(at=5, pointer=4096, size=-512), Event(at=6, pointer=4096, size=512),
    ]  # fmt: skip
    found = allocations._released(events)
    assert [(e.at, e.pointer, e.size) for e in found if e not in events] == [(4, 0, -512), (4, 512, -512)]
    assert [e for e in found if e in events] == events
    assert allocations.peak(found) == 1536


def test_a_lap_without_marks_between_components_is_the_same_step():
    x, marks = torch.randn(4, 3), list[str]()
    chain = Chain([Piece(nn.Linear(3, 3)), Piece(nn.Linear(3, 3)), Piece(nn.Linear(3, 2))], CPU, "fp32")
    found = chain.step(x, lambda: marks.append("end") or len(marks), lambda: marks.append("between") or len(marks))
    assert marks == ["end", "between", "between", "end", "end", "between", "between", "end"]
    assert (found.forward, found.backward) == ([1, 2, 3, 4], [8, 7, 6, 5])
    assert chain.seconds(x, HostClock()) > 0
    assert all(p.grad is not None for c in chain.components for p in c.parameters())
