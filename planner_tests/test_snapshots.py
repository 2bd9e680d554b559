"""What ranks leave in memory for those who are started again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import training

from asa.executor.running import outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.executor.training.migration import Part
from asa.executor.training.snapshots import Snapshot, SnapshotFile, files, newest, read
from asa.launch import faults
from asa.scheduler import adapt
from asa.strategies import offered

PLAN = "0123456789abcdef"


@pytest.fixture
def two() -> Iterator[tuple[int, ...]]:
    found = files(2)
    yield found
    for file in found:
        os.close(file)


def _snapshot(step: int, rows: int = 3, plan: str = PLAN) -> Snapshot:
    values = [torch.arange(4 * rows).float().reshape(rows, 4) + step, torch.tensor(step), torch.tensor([True, False])]
    parts = [Part(f"t{i}", (2 * rows, 4), (((0, rows),), ((0, 4),)), tensor, i == 0) for i, tensor in enumerate(values)]
    return Snapshot(step=step, position=8 * step, plan=plan, loss_scale=1.0, parts=parts)


def test_the_newest_step_is_one_that_all_ranks_have_whole(two) -> None:
    assert newest(two, PLAN) == 0
    one, other = (SnapshotFile(f) for f in two)
    for step in (1, 2, 3):
        one.write(_snapshot(step))
        if step < 3:
            other.write(_snapshot(step))
    assert newest(two, PLAN) == 2
    assert newest(two, "f" + PLAN) == 0
    kept = read(two[0], 2)
    assert (kept.step, kept.position, kept.plan) == (2, 16, PLAN)
    for a, b in zip(kept.parts, _snapshot(2).parts, strict=True):
        assert (a.name, a.shape, a.region, a.follows) == (b.name, b.shape, b.region, b.follows)
        assert a.tensor.dtype == b.tensor.dtype
        assert torch.equal(a.tensor, b.tensor)


def test_one_that_was_begun_is_none_and_what_was_left_stays_until_there_is_newer(two) -> None:
    for file in two:
        mine = SnapshotFile(file)
        mine.write(_snapshot(1))
        mine.write(_snapshot(2))
    os.pwrite(two[0], bytes(8), 64)  # the second is being written again
    assert newest(two, PLAN) == 1
    again = SnapshotFile(two[1])
    assert newest(two, PLAN) == 1
    again.write(_snapshot(3))
    assert newest(two[1:], PLAN) == 3
    again.write(_snapshot(4, rows=300))  # of another plan: larger, so nothing old is kept
    assert newest(two[1:], PLAN) == 4


def test_a_rank_that_holds_nothing_has_a_snapshot_too(two) -> None:
    SnapshotFile(two[0]).write(Snapshot(step=7, position=1, plan=PLAN, loss_scale=1.0, parts=[]))
    assert newest(two[:1], PLAN) == 7
    assert read(two[0], 7).parts == []


def test_they_come_as_seldom_as_their_cost_wants_it(two) -> None:
    keeping = SnapshotFile(two[0])
    assert keeping.due(1)
    keeping.set_interval(0.01, 0.1)
    assert keeping.every == 5
    keeping.write(_snapshot(10))
    assert [keeping.due(s) for s in (11, 14, 15)] == [False, False, True]


def test_ranks_that_are_started_again_go_on_from_what_the_others_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = training.plan(ranks=2, step_s=1e6)  # so that no disk is too slow for a snapshot of every step

    def run(out: Path) -> list[dict[str, object]]:
        train(
            plan, training.settings(out, epochs=1, steps_per_epoch=14), strategies=offered(), adapt=adapt,
            regroup=lambda plan, _: plan,
        )  # fmt: skip
        return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]

    first, second = "kill@rank=1,step=5,once=" + str(tmp_path / "a"), "kill@rank=0,step=10,once=" + str(tmp_path / "b")
    monkeypatch.setenv(faults.VARIABLE, f"{first};{second}")
    notes = [e["message"] for e in run(tmp_path / "fire") if e["event"] == "note"]
    first, second = (n for n in notes if n.startswith(("starting", "continuing")))
    assert first == "starting again: nothing was saved yet"
    assert second in ("continuing after step 10", "continuing after step 9"), "rank 1 may be the later"
    monkeypatch.delenv(faults.VARIABLE)
    run(tmp_path / "calm")
    fire, calm = (
        checkpoint.read(checkpoint.find(tmp_path / name / outdir.CHECKPOINTS).path, checkpoint.MODEL)
        for name in ("fire", "calm")
    )
    assert all(torch.equal(fire[k], calm[k]) for k in calm)
