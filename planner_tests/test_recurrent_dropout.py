"""Dropout between recurrent layers belongs to samples; without it the layers one by one are the stock module."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from asa.executor.measuring.equivalence import verify
from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.randomness.recurrent import drops_between_layers, with_layers_by_sample
from asa.sharding.randomness.samples import SampleContext, SampleDropout
from asa.strategies import offered
from asa.tracing import trace
from planner_tests.hand_plans import hand_plan, uniform
from planner_tests.hand_plans import traced as traced_model
from planner_tests.stage_plans import staged
from planner_tests.verified import of_copies

SHAPE = (3, 5, 4)
KINDS = [nn.LSTM, nn.GRU, nn.RNN, partial(nn.RNN, nonlinearity="relu"), partial(nn.LSTM, proj_size=3)]


class Reader(nn.Module):
    """Two layers with dropout between them, called twice, then a classifier of the mean."""

    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Linear(12, 8)
        self.rows = kind(8, 8, num_layers=2, dropout=0.4, batch_first=True, **options)
        self.again = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images [N, C, H, W]: H time steps."""
        y, state = self.rows(self.embedding(x.movedim(2, 1).flatten(2)))
        y, _ = self.rows(self.again(y), state)
        return self.classifier(y.mean(1))


def reader(kind: Any = nn.LSTM) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Reader(kind)


def by_sample(module: nn.RNNBase, context: SampleContext, rate: float | None = None) -> None:
    dropout = SampleDropout(module.dropout if rate is None else rate, site="here", context=context)
    with_layers_by_sample(module, dropout, "here")


def sequences(batch_first: bool, form: str) -> Any:
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    if form == "padded":
        return x if batch_first else x.transpose(0, 1)
    lengths = torch.tensor([5, 4, 2, 1] if form == "sorted" else [2, 5, 1, 4])
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=form == "sorted")


@pytest.mark.parametrize("kind", KINDS, ids=["lstm", "gru", "rnn", "relu", "projected"])
@pytest.mark.parametrize("form", ["padded", "sorted", "packed"])
@pytest.mark.parametrize("given", [False, True], ids=["from-zero", "from-states"])
def test_without_dropout_it_computes_what_the_stock_module_does(kind: Any, form: str, given: bool) -> None:
    torch.manual_seed(0)
    for batch_first, bidirectional, bias in [(True, True, True), (False, False, True), (True, False, False)]:
        m = kind(6, 8, 3, dropout=0.5, batch_first=batch_first, bidirectional=bidirectional, bias=bias).double()
        m.dropout = 0.0
        x, states = sequences(batch_first, form), None
        if given:
            widths = [m.proj_size or 8, 8][: 1 + (m.mode == "LSTM")]
            made = [torch.randn(3 * (1 + bidirectional), 4, w, dtype=torch.float64) for w in widths]
            states = tuple(made) if m.mode == "LSTM" else made[0]
        expected = answers(m, x, states)
        by_sample(m, SampleContext(), rate=0.0)
        for found, right in zip(answers(m, x, states), expected, strict=True):
            assert torch.allclose(found, right, rtol=1e-12, atol=1e-14)


def answers(m: nn.Module, x: Any, states: Any) -> list[Tensor]:
    """Output, last states, and gradients of all weights."""
    y, ends = m(x, states)
    if isinstance(y, PackedSequence):
        y, lengths = pad_packed_sequence(y, batch_first=True)
        assert len(lengths) == 4
    found = [y, *(ends if isinstance(ends, tuple) else (ends,))]
    weights = [torch.arange(1, t.numel() + 1, dtype=t.dtype).sin().view(t.shape) for t in found]
    return found + list(torch.autograd.grad(found, list(m.parameters()), weights))


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_a_sample_is_masked_alike_in_any_batch(form: str) -> None:
    m = nn.LSTM(6, 8, 3, dropout=0.5, batch_first=True, bidirectional=True).double()
    assert drops_between_layers(m)
    context = SampleContext(seed=1)
    by_sample(m, context)
    x, lengths = torch.randn(4, 5, 6, dtype=torch.float64), torch.tensor([2, 5, 1, 4])

    def of(rows: list[int]) -> Tensor:
        context.samples = torch.tensor(rows)
        if form == "padded":
            return m(x[rows])[0]
        y, _ = m(pack_padded_sequence(x[rows], lengths[rows], batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(y, batch_first=True, total_length=5)[0]

    whole = of([0, 1, 2, 3])
    assert torch.allclose(of([3, 0]), whole[[3, 0]], rtol=1e-12, atol=1e-14)
    again = m(x)[0] if form == "padded" else None
    assert again is None or not torch.allclose(again, of([0, 1, 2, 3])), "two calls of one step draw apart"
    context.step = 1
    assert not torch.allclose(of([0, 1, 2, 3]), whole, atol=1e-3)


def test_evaluation_is_the_stock_path_to_the_bit_and_names_stay() -> None:
    model = reader().eval()
    x = torch.randn(2, *SHAPE)
    names, expected = set(model.state_dict()), model(x)
    traced = trace(model, x, name="reader")
    make_reproducible(traced.components, SampleContext(samples=torch.arange(2), total=2))
    for component in traced.components:
        component.eval()
    assert torch.equal(traced.run(x), expected)
    assert {n for c in traced.components for n in c.state_dict()} == names


@pytest.mark.parametrize(
    ("widths", "options"),
    [([2], {}), ([1, 1], {}), ([1], {"checkpoint": lambda _i: True}), ([2], {"strategy": lambda _i: "zero3"})],
    ids=["ddp", "stages", "recomputed", "sharded"],
)
def test_plans_train_as_one_device_does(widths: list[int], options: dict[str, Any]) -> None:
    model = traced_model(reader(), SHAPE)
    base = hand_plan(model, 2, uniform(2, 1), input_shape=SHAPE, num_classes=10, global_batch=24)
    plan = staged(base, widths, **({"degrees": lambda _i, n: (n, 1), "microbatches": 2} | options))
    if options or len(widths) > 1:
        found = of_copies(plan, model)
    else:
        found = verify(plan, reader, offered(), timeout_s=120)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9


def test_microbatches_do_not_change_the_masks() -> None:
    model, x, y = reader().double(), torch.randn(8, *SHAPE, dtype=torch.float64), torch.arange(8)
    traced = trace(model, x, name="reader")
    context = SampleContext(seed=2)
    make_reproducible(traced.components, context)

    def gradients(size: int) -> list[Tensor]:
        model.zero_grad()
        for rows in torch.arange(8).split(size):
            context.samples, context.total = rows, size
            (nn.functional.cross_entropy(traced.run(x[rows]), y[rows]) * size / 8).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for one, many in zip(gradients(8), gradients(2), strict=True):
        assert torch.allclose(one, many, rtol=1e-10, atol=1e-12)
