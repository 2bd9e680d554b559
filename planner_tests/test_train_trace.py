"""A run's own timeline, drawn as the simulator draws plans, and what a run says of its plan's prediction."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import training

from asa.cli import entry
from asa.executor.observing.timeline import Span, _without
from asa.executor.running import run as running
from asa.executor.running.run import train
from asa.instruments import other_load
from asa.ir import codec
from asa.ir.plan import DataDegree, Plan, Stage
from asa.report.text.training import summary
from asa.report.trace import together
from asa.scheduler import adapt
from asa.simulator import Event, Timeline, chrome_trace
from asa.strategies import offered


def pipeline() -> Plan:
    plan = training.plan(ranks=2, microbatches=2)
    components = tuple(
        replace(c, stage=int(i >= 2), data=DataDegree(strategy="replicate", degree=1))
        for i, c in enumerate(plan.components)
    )
    return replace(plan, components=components, stages=(Stage(ranks=(0,)), Stage(ranks=(1,))), schedule="1f1b")


PLANS = {
    "ddp": training.plan(ranks=2),
    "mixed": training.plan(ranks=2, split=("classifier", "features.2.conv")),
    "pipeline": pipeline(),
}
STREAMS = {0: "compute", 1: "communication", 2: "sending on", 3: "sending back"}


def pieces(document: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    return [
        (e["name"], STREAMS[e["tid"]], e["ts"], e["ts"] + e["dur"]) for e in document["traceEvents"] if e["ph"] == "X"
    ]


@pytest.mark.parametrize("name", PLANS)
def test_a_traced_run_shows_every_component_collective_and_update(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    settings = training.settings(tmp_path, epochs=1, steps_per_epoch=8, trace_steps=2)
    result = train(plan, settings, strategies=offered(), adapt=adapt)
    # Eight steps: three to warm up, of which one is looked at for its memory, and two that are traced.
    assert result["summary"]["step_time_s"]["n"] == 3
    measured = result["summary"]["memory_bytes_per_rank"]["measured"]
    assert len(measured) == 2
    assert all(m > 1 << 20 for m in measured)
    for rank in range(2):
        document = json.loads(gzip.decompress((tmp_path / "trace" / f"rank_{rank}.json.gz").read_bytes()))
        found = pieces(document)
        titles = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
        staged = len(plan.stages) > 1
        assert titles == {f"rank {rank}, stage {rank} (measured)" if staged else f"rank {rank} (measured)"}
        own = [c.name for c in plan.components if not staged or c.stage == rank]
        for component in own:
            for direction in ("forward", "backward"):
                mine = [p for p in found if p[0] == f"{component} {direction}"]
                assert len(mine) >= 2 * plan.num_microbatches, f"{component} {direction}"
                assert all(p[1] == "compute" for p in mine)
        assert sum(p[0] == "parameters update" for p in found) == 2
        moves = {p[0] for p in found if p[1] != "compute"}
        expected = {
            "ddp": {"all_reduce gradient"},
            "mixed": {"all_reduce gradient", "all_gather_into_tensor boundary", "reduce_scatter_tensor boundary"},
            "pipeline": {f"to stage {1 - rank} transfer"},
        }[name]
        assert expected <= moves
        sends = [p for p in found if p[0].startswith("to stage")]
        assert all(p[3] == p[2] for p in sends), "when gloo's sender was done waiting is not when it was sent"
        computing = sorted((p[2], p[3]) for p in found if p[1] == "compute")
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(computing)), "one thing at a time"
        steps = sorted(e["ts"] for e in document["traceEvents"] if e["ph"] == "i")
        assert len(steps) == 2
        assert all(steps[0] <= p[2] for p in found)


def test_what_a_component_waited_for_is_none_of_its_own_time() -> None:
    def span(start: float, end: float) -> Span:
        return Span(name="a", kind="forward", stream="compute", start_s=start, end_s=end)

    waits = [span(2.0, 3.0), span(5.0, 6.0), span(9.0, 12.0)]
    parts = _without(span(0.0, 10.0), waits)
    assert [(p.start_s, p.end_s) for p in parts] == [(0.0, 2.0), (3.0, 5.0), (6.0, 9.0)]
    assert _without(span(2.2, 2.8), waits) == []
    assert _without(span(3.0, 5.0), waits) == [span(3.0, 5.0)]


def test_plan_and_run_stand_side_by_side_under_the_same_names() -> None:
    event = Event(name="a", kind="forward", stream="compute", microbatch=0, start_s=0.0, end_s=1.0)
    planned = Timeline(model="m", ranks=2, step_time_s=1.0, events=(event,), stages=((0, 1),))
    measured = [
        {
            "traceEvents": [
                {**e, "args": {"name": e["args"]["name"].replace("planned", "measured")}}
                if e["name"] == "process_name" else e
                for e in chrome_trace(planned)["traceEvents"] if e["pid"] == rank
            ]
        }
        for rank in range(2)
    ]  # fmt: skip
    both = together(planned, measured)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in both if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in both if e["name"] == "process_sort_index"}
    assert [names[p] for p in sorted(order, key=order.__getitem__)] == [
        "rank 0 (planned)", "rank 0 (measured)", "rank 1 (planned)", "rank 1 (measured)"
    ]  # fmt: skip
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in both if e["name"] == "thread_name"}
    assert {threads[p, 0] for p in order} == {"compute"}


def test_the_summary_says_predicted_and_measured_per_rank() -> None:
    found = {
        "step_time_s": {"predicted": 1.1, "measured": 1.0, "n": 9},
        "memory_bytes_per_rank": {"predicted": [1024, 1024, 2048], "measured": [1024, 1024, 1600]},
        "data_wait_share": 0.025,
    }
    step, first, last = summary(found)
    assert (
        step == "step: predicted 1.10 s, measured 1.00 s (10.0 % too high, 9 steps); 2.5 % of the time waiting for data"
    )
    assert first == "memory of rank 0, 1: predicted 1.00 KiB, measured 1.00 KiB (as predicted)"
    assert last.startswith("memory of rank 2: predicted 2.00 KiB, measured 1.56 KiB")
    found["memory_bytes_per_rank"] = {"predicted": [5, 7], "measured": None}
    assert summary(found)[1] == "memory per rank: predicted 7 B, not tracked"


@pytest.mark.parametrize(("busy_s", "said"), [(0.0, False), (1e6, True)])
def test_a_run_on_a_busy_machine_says_so(
    busy_s: float, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "plan.json"
    codec.save(training.plan(ranks=2), path)
    found = {
        "step_time_s": {"predicted": 1.0, "measured": 2.0, "n": 9},
        "memory_bytes_per_rank": {"predicted": [1024], "measured": None},
        "data_wait_share": 0.0,
    }
    monkeypatch.setattr(running, "train", lambda *_, **__: {"kind": "train_result", "summary": found})
    readings = iter((0.0, busy_s))
    monkeypatch.setattr(other_load, "_busy_s", lambda: next(readings))
    assert entry.run(["train", str(path), "--data", "digits"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "measured 2.00 s" in told
    assert ("cores busy meanwhile: a prediction is of a quiet machine" in told) == said
