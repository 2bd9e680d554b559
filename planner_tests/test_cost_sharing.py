"""What is to hide behind a pass, where the pass itself sends over the same links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cost_prefetch import cluster

from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.cost.planned import price_plan
from asa.cost.step import ComponentCost
from asa.cost.traffic.collectives import Links
from asa.cost.traffic.prefetch import Gathers, alongside, hidden
from asa.ir import codec
from asa.ir.cluster import Cluster, Overlap
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner import Request, parse_pin, plan
from asa.strategies import offered

SHIPPED = codec.load(Profile, Path(__file__).parent.parent / "profiles" / "vit_b_16.cpu.fp32.json")
PROFILE = estimate(
    SHIPPED.graph, presets.load("a100-nvlink-8").device, model_spec="vit_b_16",
    model_fingerprint=SHIPPED.model_fingerprint, global_batch=64,
)  # fmt: skip
"""Its blocks have an all_reduce of their own in either pass."""
SECONDS = st.floats(0.0, 10.0, allow_subnormal=False)


def split(links: Cluster, strategy: str = "replicate") -> Plan:
    """Every component split over pairs of neighbours, whose data is shared over the pairs."""
    pins = (parse_pin("encoder*=tensor@2"), parse_pin(f"encoder*={strategy}@4"))
    return plan(PROFILE, links, offered(), Request(gpus=8, global_batch=64, strategies=("asa",), pins=pins))[0]


def blocks(found: Plan, links: Cluster) -> list[ComponentCost]:
    (stage,) = price_plan(found, PROFILE, links, offered()).stages
    return [c for c, a in zip(stage.components, found.components, strict=True) if a.name.startswith("encoder")]


@given(SECONDS, SECONDS, SECONDS)
def test_a_fair_link_carries_both_by_halves(messages: float, compute: float, collectives: float) -> None:
    """Against a pass in small pieces of compute and of collectives, beside which messages go at half speed."""
    beside = alongside(messages, compute=compute, collectives=collectives)
    assert 0 <= beside <= min(messages, collectives) * (1 + 1e-9)
    left, took, pieces = messages, 0.0, 2000
    for _ in range(pieces):
        work, wait = compute / pieces, collectives / pieces
        left -= min(left, work)
        both = min(left, wait)
        left -= both
        took += work + wait + both
    if compute + collectives > 0.01:
        grain = 3 * (compute + collectives) / pieces
        assert took + left == pytest.approx(
            compute + collectives + beside + max(0.0, messages - beside - compute), abs=grain + 1e-9
        )


@given(SECONDS, SECONDS, SECONDS, st.floats(0.0, 5.0))
def test_nothing_slower_makes_a_pass_shorter(messages: float, compute: float, collectives: float, more: float) -> None:
    def taken(m: float, w: float, b: float) -> float:
        beside = alongside(m, compute=w, collectives=b)
        return w + b + beside + max(0.0, m - beside - w)

    before = taken(messages, compute, collectives) * (1 - 1e-9) - 1e-9
    assert taken(messages + more, compute, collectives) >= before
    assert taken(messages, compute + more, collectives) >= before
    assert taken(messages, compute, collectives + more) >= before


def test_many_at_once_are_each_by_itself() -> None:
    m, w, b = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 1.0, 4.0, 0.5]), np.array([0.0, 0.5, 0.0, 1.0])
    together = alongside(m, compute=w, collectives=b, least=np.minimum)
    assert together.tolist() == [alongside(*x[:1], compute=x[1], collectives=x[2]) for x in zip(m, w, b, strict=True)]


def test_gradients_of_split_components_hide_less_over_the_links_of_their_collectives() -> None:
    inside = cluster()
    found = split(inside)
    assert {(c.data.degree, c.tensor.degree) for c in found.components if c.name.startswith("encoder")} == {(4, 2)}
    (first,) = [c for c in PROFILE.graph.components if c.name.endswith("encoder_layer_0")]
    assert first.split is not None
    links, samples = Links(inside, 8, 8), 64 // 4
    sent = [c for c in first.split.collectives if c.phase == "backward"]
    met = sum(links.time(c.op, c.bytes_per_sample * samples, 2, 1) for c in sent)
    assert met > 0
    for c in blocks(found, inside):
        sync = c.prompt_sync_s + c.late_sync_s + c.update_communication_s
        share = min(1.0, sync / (c.backward_s + met))
        assert c.update_communication_s == pytest.approx(met * share, rel=1e-6)


def test_collectives_inside_a_node_are_not_in_the_way_of_gradients_between_nodes() -> None:
    nodes = presets.load("t4-8x1-25g-tcp")
    two = replace(presets.load("a100-4x8-roce"), overlap=Overlap())
    assert len(two.levels) == 2
    pins = (parse_pin("encoder*=tensor@4"), parse_pin("encoder*=replicate@8"))
    found = plan(PROFILE, two, offered(), Request(gpus=32, global_batch=64, strategies=("asa",), pins=pins))[0]
    assert all(c.update_communication_s == 0 for c in blocks(found, two)), "tensors inside, data across"
    flat = replace(nodes, overlap=Overlap())
    assert all(c.update_communication_s > 0 for c in blocks(split(flat), flat)), "all over one network"


def test_a_gather_in_backward_comes_behind_the_gradients_scattered_before_it() -> None:
    gathers = Gathers(forward=1.0, backward=1.0, once=0.0, front=1.0)
    options = {"ahead": 2.0, "behind": 2.0, "own": 2.0}
    free = hidden(gathers, Overlap(), **options)
    assert (free.forward, free.backward, free.covered, free.once) == (1.0, 1.0, 1.0, 0.0)
    for scattered, left in ((0.5, 1.0), (1.5, 0.5), (3.0, 0.0)):
        found = hidden(gathers, Overlap(), **options, scattered=scattered)
        assert (found.forward, found.backward, found.covered) == (1.0, left, left), "forward scatters nothing"
        assert found.queued == max(0.0, scattered - 2.0), "what outlasts the compute holds up the gather"
        alone = hidden(
            Gathers(forward=1.0, backward=0.0, once=0.0, front=0.0), Overlap(), **options, scattered=scattered
        )
        assert alone.queued == 0, "nothing is gathered behind it"
        several = hidden(gathers, Overlap(), **options, scattered=scattered, microbatches=4)
        assert several.backward == 1.0, "only the last microbatch scatters"
        assert several.once == left - 1.0
