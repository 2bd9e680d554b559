"""Disciplines of consistency that promise what data parallelism does keep that promise; the others are told apart."""

from __future__ import annotations

from dataclasses import replace

import torch
import training

from asa.executor.measuring import equivalence
from asa.ir.consistency import parse
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.strategies import offered
from asa.zoo.models import build

EXACT = (
    "ps_sync", "ps_sync:servers=2", "ps_bounded:window=0:max_age=0", "local_sgd:period=1",
    "diloco:period=1:outer_rate=1:outer_momentum=0",
)  # fmt: skip
OTHERS = ("local_sgd:period=3", "diloco:period=2:fragments=2:message=int8", "ps_async", "downpour:period=2")


def under(text: str, ranks: int = 2, model: str = "logistic", **changes: object) -> Plan:
    return replace(training.plan(model, ranks=ranks, batch=16), consistency=parse(text), strategy=text, **changes)


def _weights(rank: int, plans: list[Plan]) -> list[dict[str, torch.Tensor]]:
    def make() -> torch.nn.Module:
        return build("logistic", num_classes=10, input_shape=(1, 8, 8), seed=0)

    found = [
        equivalence._run(
            p, make, offered(), rank, torch.device("cpu"), samples=16, dtype=torch.float64, steps=4
        ).weights
        for p in plans
    ]
    return found if rank == 0 else []


def test_disciplines_that_promise_data_parallelism_keep_it_and_the_others_do_not():
    plain = training.plan("logistic", ranks=2, batch=16)
    names = [*EXACT, *OTHERS]
    ddp, *found = run_ranks(2, _weights, [plain, *map(under, names)], threads=1, timeout_s=60)[0]
    by = dict(zip(names, found, strict=True))
    for name in EXACT:
        assert parse(name).exact("sgd")
        for key, weights in by[name].items():
            torch.testing.assert_close(weights, ddp[key], rtol=1e-12, atol=1e-14, msg=f"{name}: {key}")
    for name in OTHERS:
        assert not parse(name).exact("sgd")
        assert any((w - ddp[k]).abs().max() > 1e-6 for k, w in by[name].items()), name
    assert all(torch.equal(w, by["ps_sync"][k]) for k, w in by["ps_bounded:window=0:max_age=0"].items())
