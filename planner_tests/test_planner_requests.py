"""What ``plan`` is asked for: strategies, pins and limits, and how it refuses."""

from __future__ import annotations

from dataclasses import replace

import fake_strategies
import nouns
import pytest

from asa.errors import InfeasibleError, UsageError
from asa.ir.cluster import Cluster
from asa.ir.profile import Profile
from asa.ir.units import GIB, MIB
from asa.planner import Request, parse_pin, plan
from asa.planner.space.space import Space

FULL, PLAIN = fake_strategies.FULL, fake_strategies.PLAIN


def tiny(n: int = 4) -> tuple[Profile, Cluster]:
    return nouns.profile(), nouns.cluster(n)


def test_strategies_restrict_the_answer():
    profile, cluster = tiny(4)
    for name in ("ddp", "fsdp", "tensor", "hybrid:d2t2", "hybrid"):
        found = plan(profile, cluster, FULL, Request(gpus=4, global_batch=8, strategies=(name,)))[0]
        assert found.strategy == name
        row = next(b for b in found.baselines if b.name == name)
        assert found.prediction.step_time_s == pytest.approx(row.step_time_s)
    both = plan(profile, cluster, FULL, Request(gpus=4, global_batch=8, strategies=("ddp", "tensor"), top_k=5))
    assert [p.strategy for p in both] == ["tensor", "ddp"]
    assert both[0].certificate.gap == 0
    assert both[1].certificate.gap > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpipe", "not built yet"),
        ("hybrid:d2p4", "not built yet"),
        ("nosuch", "no strategy"),
        ("hsdp", "not built yet"),
    ],
)
def test_strategies_that_do_not_exist_are_refused_with_those_that_do(name, says):
    profile, cluster = tiny(4)
    with pytest.raises(UsageError, match=f"{says}.*ddp"):
        plan(profile, cluster, FULL, Request(gpus=4, global_batch=8, strategies=(name,)))


def test_pins_hold():
    profile, cluster = tiny(4)
    pins = tuple(map(parse_pin, ("body.*=tensor@2", "head=zero3@2", "stem=none@1")))
    found = plan(profile, cluster, FULL, Request(gpus=4, global_batch=8, pins=pins))[0]
    by_name = {c.name: c for c in found.components}
    assert (by_name["body.0"].tensor.strategy, by_name["body.0"].tensor.degree) == ("tensor", 2)
    assert (by_name["head"].data.strategy, by_name["head"].data.degree) == ("zero3", 2)
    assert by_name["stem"].tensor.degree == 1
    free = plan(profile, cluster, FULL, Request(gpus=4, global_batch=8))[0]
    assert found.prediction.step_time_s >= free.prediction.step_time_s * (1 - 1e-9)


def test_a_pattern_matches_components_and_their_prefixes():
    pin = parse_pin("layer4.*=zero3@4")
    assert pin.matches("layer4.0")
    assert not pin.matches("layer3.0")
    assert parse_pin("classifier=tensor@2").matches("classifier.0")
    assert parse_pin("*=replicate@2").matches("anything.at.all")


@pytest.mark.parametrize(
    "text", ["head", "head=tensor@", "head=ddp@2", "head=none@2", "head=tensor@0", "=tensor@2", "a=tensor@x"]
)
def test_pins_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError, match="pin"):
        parse_pin(text)


@pytest.mark.parametrize(
    ("pins", "error", "says"),
    [
        (("nosuch=tensor@2",), UsageError, "matches no component.*stem"),
        (("stm=tensor@2",), UsageError, r"matches no component.*did you mean stem\?"),
        (("head=tensor@2", "h*=tensor@4"), UsageError, "contradict"),
        (("head=hsdp@2",), UsageError, "not built yet"),
        (("head=replicate@3", "stem=replicate@4"), InfeasibleError, "at once"),
        (("stem=tensor@2",), InfeasibleError, "stem cannot run as pinned"),
        (("head=replicate@16",), InfeasibleError, "head cannot run as pinned"),
    ],
)
def test_pins_that_nothing_satisfies_are_named(pins, error, says):
    profile, cluster = tiny(4)
    with pytest.raises(error, match=says):
        plan(profile, cluster, FULL, Request(gpus=4, global_batch=8, pins=tuple(map(parse_pin, pins))))


def test_infeasible_names_the_component_the_number_and_a_remedy_that_works():
    profile, cluster = tiny(2)
    request = Request(gpus=2, global_batch=8, memory_bytes=60 * MIB)
    with pytest.raises(InfeasibleError, match=r"needs .* MiB .*devices have 60\.0 MiB; try --memory") as caught:
        plan(profile, cluster, PLAIN, request)
    message = str(caught.value)
    assert any(c.name in message for c in profile.graph.components)
    enough = float(message.split("--memory ")[1].split("GiB")[0])
    assert plan(profile, cluster, PLAIN, replace(request, memory_bytes=int(enough * GIB)))
    assert "\n" not in message


def test_weights_that_fit_nowhere_are_seen_before_anything_is_priced(monkeypatch):
    profile, cluster = tiny(4)
    weights = sum(c.parameter_bytes for c in profile.graph.components)
    space = Space(profile, cluster, FULL, Request(gpus=4, global_batch=8))
    memory = cluster.device.memory_bytes - int(space.room(0, 1, 1)) + weights // 4 - 1
    monkeypatch.setattr("asa.planner.decide.table", lambda *_: pytest.fail("whole strategies were priced"))
    with pytest.raises(InfeasibleError, match="try --memory"):
        plan(profile, cluster, FULL, Request(gpus=4, global_batch=8, memory_bytes=memory))


def test_infeasible_proposes_devices_where_the_cluster_has_more():
    profile, cluster = tiny(8)
    request = Request(gpus=2, global_batch=8, memory_bytes=60 * MIB)
    with pytest.raises(InfeasibleError, match=r"--gpus (\d+)") as caught:
        plan(profile, cluster, FULL, request)
    gpus = int(str(caught.value).split("--gpus ")[1].split()[0])
    assert plan(profile, cluster, FULL, replace(request, gpus=gpus))


def test_more_devices_than_the_cluster_has_is_a_usage_error():
    profile, cluster = tiny(2)
    with pytest.raises(UsageError, match=r"asked for 8 devices.*has 2"):
        plan(profile, cluster, PLAIN, Request(gpus=8, global_batch=8))


@pytest.mark.parametrize(
    "bad",
    [{"gpus": 0}, {"global_batch": 0}, {"memory_bytes": 0}, {"top_k": 0}, {"time_limit_s": 0.0}, {"solver": "magic"}],
)
def test_impossible_requests_are_usage_errors(bad):
    with pytest.raises(UsageError):
        Request(**{"gpus": 2, "global_batch": 8, **bad})
