"""What is asked for is obeyed or refused, and what is said of an answer is so."""

from __future__ import annotations

from dataclasses import replace

import known_models
import nouns
import pytest

from asa.cost.machine import presets
from asa.errors import InfeasibleError, UsageError
from asa.planner import Pin, Request, plan, verify
from asa.planner.questions.explain import why_not
from asa.planner.questions.frontier import changes
from asa.strategies import offered

PROFILE = known_models.profile(known_models.vgg16(), 500.0, 64)
CLUSTER = presets.load("v100-dgx1-8")


def asked(**more) -> Request:
    return Request(**{"gpus": 4, "global_batch": 64, "time_limit_s": 0.4, "prefer_simple": False} | more)


@pytest.mark.parametrize("m", [1, 2, 8, 64])
def test_a_number_of_microbatches_is_obeyed(m: int) -> None:
    found = plan(PROFILE, CLUSTER, offered(), asked(microbatches=m))[0]
    assert found.num_microbatches == m
    assert f"as asked for, {m}" in found.certificate.space
    free = plan(PROFILE, CLUSTER, offered(), asked())[0]
    assert free.certificate.lower_bound_s <= found.prediction.step_time_s


@pytest.mark.parametrize("m", [0, 3, 128])
def test_one_that_cannot_be_is_refused(m: int) -> None:
    with pytest.raises(UsageError, match="power of two"):
        asked(microbatches=m)


def test_stages_with_one_microbatch_are_layers() -> None:
    with pytest.raises(InfeasibleError, match="it is called layers"):
        plan(PROFILE, CLUSTER, offered(), asked(strategies=("gpipe",), microbatches=1))
    found = plan(PROFILE, CLUSTER, offered(), asked(strategies=("gpipe",)))[0]
    assert (found.schedule, found.num_microbatches > 1) == ("gpipe", True)
    one = asked(gpus=2, microbatches=1, strategies=("layers", "1f1b"))
    assert plan(PROFILE, CLUSTER, offered(), one)[0].schedule == "layers"


def test_faster_strategies_that_pins_keep_out_are_called_so() -> None:
    pinned = asked(pins=(Pin(pattern="*", strategy="zero3", degree=2),), microbatches=1)
    found = plan(PROFILE, CLUSTER, offered(), pinned)[0]
    rows = {b.name: b for b in found.baselines}
    assert not rows["ddp"].fits
    assert rows["ddp"].why_not == "not allowed by the pins"


def test_the_context_is_named_where_it_is_what_binds() -> None:
    with pytest.raises(
        InfeasibleError, match=r"the context of the device and the allocator take .* devices have 307 MiB"
    ):
        plan(PROFILE, CLUSTER, offered(), asked(memory_bytes=int(0.3 * 2**30)))
    with pytest.raises(InfeasibleError, match=r"in the plan that needs least memory on up to 4 devices, .*ranks? in"):
        plan(PROFILE, CLUSTER, offered(), asked(memory_bytes=int(2.1 * 2**30), optimizer="adamw"))


def test_why_not_means_what_is_not_so_already() -> None:
    found = plan(PROFILE, CLUSTER, offered(), asked())[0]
    split = next(c for c in found.components if c.tensor.degree > 1 and c.data.strategy == "replicate")
    whole = why_not(found, PROFILE, CLUSTER, offered(), f"{split.name}=replicate")
    assert split.name in whole.changed
    assert whole.other_s is not None
    assert whole.other_s > whole.plan_s
    same = why_not(found, PROFILE, CLUSTER, offered(), f"{split.name}=tensor")
    assert "has already" in same.remark
    assert not same.changed


def test_what_changes_along_a_frontier_is_named() -> None:
    found = plan(PROFILE, CLUSTER, offered(), asked(strategies=("ddp",)))[0]
    other = plan(PROFILE, CLUSTER, offered(), asked(strategies=("fsdp",)))[0]
    names = [c.name for c in found.components if c not in other.components]
    said = changes(found, other)
    assert names[0] in said
    assert "to zero3 x4" in said
    one = replace(found, components=(*found.components[:-1], other.components[-1]))
    assert changes(found, one) == f"{found.components[-1].name} to zero3 x4"


def test_a_certificate_says_with_how_many_busy_devices_stages_are_priced() -> None:
    """Ranks that share cores are slower the more of them work."""
    profile, cluster = nouns.profile(), nouns.cluster(4)
    two = plan(profile, cluster, offered(), asked(gpus=2, global_batch=8, strategies=("1f1b",)))[0]
    wider = replace(two, gpus=4)
    seconds = [verify(p, profile, cluster, offered()).step_time_s for p in (two, wider)]
    assert seconds[0] == two.prediction.step_time_s < seconds[1]
    for gpus in (2, 3, 4):
        found = plan(profile, cluster, offered(), asked(gpus=gpus, global_batch=8))[0]
        assert (f"priced with all {gpus} devices busy" in found.certificate.space) == (gpus > 2)
