"""The simulated step of a plan, and its trace."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise

import fake_strategies
import known_models
import nouns
import pytest

from asa.cost.machine import presets
from asa.errors import UnavailableError
from asa.planner import Request, plan
from asa.simulator import chrome_trace, save_trace, simulate

CASES = [
    (known_models.vgg16(32), "v100-dgx1-8", None),
    (known_models.resnet50(), "a100-nvlink-8", None),
    (known_models.transformer(), "3090-pcie-8", None),
    (known_models.transformer(), "a100-nvlink-8", ("fsdp",)),
    (known_models.resnet50(), "v100-dgx1-8", ("hybrid:d4t2",)),
]


@pytest.mark.parametrize(("graph", "cluster", "strategies"), CASES)
def test_simulation_takes_as_long_as_the_plan_predicts(graph, cluster, strategies):
    profile, links = known_models.profile(graph, 500.0, 64), presets.load(cluster)
    request = Request(gpus=8, global_batch=256, strategies=strategies)
    found = plan(profile, links, fake_strategies.FULL, request)[0]
    timeline = simulate(found, profile, links, fake_strategies.FULL)
    assert timeline.step_time_s == pytest.approx(found.prediction.step_time_s, rel=1e-9)
    assert timeline.busy("compute") >= found.prediction.compute_s * (1 - 1e-9)
    for stream in ("compute", "communication"):
        spans = sorted((e.start_s, e.end_s) for e in timeline.events if e.stream == stream)
        assert spans[-1][1] <= timeline.step_time_s * (1 + 1e-9)
        if stream == "compute":
            assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans)), "one thing at a time"


def test_gradients_leave_only_with_the_last_microbatch():
    profile, cluster = nouns.profile(), nouns.cluster(2)
    found = plan(profile, cluster, fake_strategies.PLAIN, Request(gpus=2, global_batch=8, strategies=("ddp",)))[0]
    timeline = simulate(replace(found, num_microbatches=2), profile, cluster, fake_strategies.PLAIN)
    gradients = [e for e in timeline.events if e.kind == "gradient"]
    assert gradients
    assert {e.microbatch for e in gradients} == {1}
    assert {e.microbatch for e in timeline.events if e.kind == "forward"} == {0, 1}


def test_a_trace_opens_with_one_process_a_rank_and_one_thread_a_stream(tmp_path):
    profile, cluster = nouns.profile(), nouns.cluster(4)
    found = plan(profile, cluster, fake_strategies.PLAIN, Request(gpus=4, global_batch=8, strategies=("ddp",)))[0]
    timeline = simulate(found, profile, cluster, fake_strategies.PLAIN)
    save_trace(timeline, tmp_path / "trace.json")
    save_trace(timeline, tmp_path / "deep" / "trace.json.gz")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data == json.loads(gzip.decompress((tmp_path / "deep" / "trace.json.gz").read_bytes()))
    assert data == chrome_trace(timeline)
    work = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in work} == {0, 1, 2, 3}
    assert {e["tid"] for e in work} == {0, 1}
    assert max(e["ts"] + e["dur"] for e in work) == pytest.approx(found.prediction.step_time_s * 1e6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "trace.json"], "nothing temporary stays"


def test_a_trace_that_cannot_be_written_is_the_environment(tmp_path):
    profile, cluster = nouns.profile(), nouns.cluster(2)
    found = plan(profile, cluster, fake_strategies.PLAIN, Request(gpus=2, global_batch=8))[0]
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="cannot write the trace"):
        save_trace(simulate(found, profile, cluster, fake_strategies.PLAIN), tmp_path / "file" / "trace.json")
