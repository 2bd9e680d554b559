"""Tables of the root module that several blocks read: every stage has a copy, unless code writes to them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tracing_checks import assert_bitwise

from asa.errors import WorkersFailedError
from asa.executor.model.materialize import materialize
from asa.executor.model.state import full_state, load_full_state
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.strategies import offered
from asa.tracing import trace
from planner_tests.hand_plans import copy_of, model_of
from planner_tests.small_models import INPUT, build
from planner_tests.test_migration import _moves
from planner_tests.test_pipeline import check, plan_of

TABLES = {"rope.inverse", "depth.inverse", "mask", "slopes", "index"}


def test_a_model_is_cut_between_the_readers_of_a_table() -> None:
    model = build("tables")
    found = trace(model, torch.randn(2, *INPUT), name="tables")
    assert len(found.components) == 5
    assert (found.notes, found.uncut, found.common) == ((), frozenset(), TABLES)
    with torch.device("meta"):
        assert trace(build("tables"), torch.empty(2, *INPUT), name="tables").common == TABLES
    assert_bitwise(model, found, torch.randn(5, *INPUT))


@pytest.mark.parametrize(
    ("schedule", "microbatches", "widths"), [("1f1b", 4, [1, 1]), ("gpipe", 3, [1, 1]), ("1f1b", 2, [3, 1])]
)
def test_stages_train_as_one_device_does(schedule: Any, microbatches: int, widths: list[int]) -> None:
    found = check("tables", widths, schedule=schedule, microbatches=microbatches)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9


def test_plans_with_and_without_stages_follow_each_other(tmp_path: Path) -> None:
    _moves("tables", 2, [7, 1, 8, 5, 7, 0, 8], tmp_path)


def _loaded(rank: int, plan: Plan, wrong: bool) -> tuple[set[str], list[Tensor], str]:
    """Names of the whole state, tables that this rank holds after another one was loaded, and what is said if one stage
    has changed it."""
    traced = copy_of("tables")
    for component in traced.components:
        component.to(torch.float64)  # each with a copy of its own, as on another device
    model = materialize(
        plan, traced, torch.empty(0), rank=rank, strategies=offered(), device=torch.device("cpu"), timeout_s=120
    )
    state = full_state(model)
    load_full_state(model, state | {"mask": 2 * state["mask"]})
    masks = [b for c in model.components for n, b in c.named_buffers() if n == "mask"]
    said = ""
    if wrong:
        masks[0] += rank
        with pytest.raises(WorkersFailedError) as caught:
            full_state(model)
        said = str(caught.value)
    model.close()
    return set(state), [m.clone() for m in masks], said


def test_every_stage_gets_what_is_loaded_and_one_name_is_saved() -> None:
    model = build("tables")
    names = {n for n, _ in (*model.named_parameters(), *model.named_buffers())}
    for saved, masks, _ in run_ranks(2, _loaded, plan_of("tables", [1, 1]), False, threads=1, timeout_s=120):
        assert saved == names
        assert masks
        assert all(torch.equal(m, 2 * model.mask.double()) for m in masks)


def test_stages_that_differ_in_a_table_are_found() -> None:
    for _, _, said in run_ranks(2, _loaded, plan_of("tables", [1, 1]), True, threads=1, timeout_s=120):
        assert "mask has other values in one stage than in another" in said


class Writer(nn.Module):
    """A part without weights that all layers call, and that changes its buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(1))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "assigned":
            self.count = self.count + 1
        if self.kind == "added":
            self.count += 1
        return x + self.count


class Written(nn.Module):
    """Three layers with a shared buffer between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.kind, self.last = kind, nn.Linear(8, 3)
        self.shared = nn.BatchNorm1d(8, affine=False) if kind == "norm" else Writer(kind)
        self.register_buffer("seen", torch.ones(8))
        self.alias = nn.ModuleList(Writer("read") for _ in range(3 if kind == "names" else 0))
        for part in self.alias:
            part.count = self.alias[0].count

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).relu() + self.seen
            if self.kind == "in forward" and self.training:
                self.seen.mul_(0.9)
            elif self.kind == "names":
                x = self.alias[i](x)
            elif self.kind != "in forward":
                x = self.shared(x)
        return self.last(x)


@pytest.mark.parametrize("kind", ["added", "assigned", "norm", "in forward", "names"])
def test_a_buffer_that_is_written_stays_in_one_stage(kind: str) -> None:
    found = trace(Written(kind), torch.randn(4, 8), name="written")
    if kind != "names":
        assert "which forward writes: they stay in one stage" in found.note
    else:
        assert "under several names: they stay in one stage" in found.note
    assert found.uncut >= {1, 2}


def test_a_part_that_all_blocks_call_is_one_object() -> None:
    traced = copy.deepcopy(model_of("tables"))
    homes = [c.depth for c in traced.components if hasattr(c, "depth")]
    assert len(homes) == 3
    assert len(set(homes)) == 1
