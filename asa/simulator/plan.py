"""A step of a plan of one stage, event by event."""

from __future__ import annotations

from collections import defaultdict

from asa.cost.planned import Price, price_plan
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster, Overlap
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.simulator.streams import Streams
from asa.simulator.timeline import Timeline


def simulate(plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> Timeline:
    """One step of ``plan``, with the prices that the planner works with.

    Raises:
        InvalidInputError: the plan is of another model, of several stages, or asks of a component what it refuses.
    """
    price = price_plan(plan, profile, cluster, strategies)
    names = [c.name for c in plan.components]
    streams = run(price, names, plan.num_microbatches, cluster.overlap)
    return Timeline(
        model=plan.model_spec, ranks=plan.num_ranks, step_time_s=streams.now, events=tuple(streams.events)
    )  # fmt: skip


def run(price: Price, names: list[str], num_microbatches: int, overlap: Overlap) -> Streams:
    """The streams of one rank after one step."""
    streams = Streams(overlap)
    for m in range(num_microbatches):
        _forward(streams, price, names, m)
        _backward(streams, price, names, m, last=m == num_microbatches - 1)
    streams.drain()
    for b, name in zip(price.boundaries, [*names, "output"], strict=True):
        streams.block(f"{name} wrapper", "gradient", b.wrapper_s, num_microbatches - 1)
    for c, name in zip(price.components, names, strict=True):
        streams.compute(name, "update", c.update_s, num_microbatches - 1)
        streams.block(name, "update", c.update_communication_s, num_microbatches - 1)
    return streams


def _forward(streams: Streams, price: Price, names: list[str], m: int) -> None:
    for boundary, c, name in zip(price.boundaries, price.components, names, strict=False):
        streams.block(f"to {name}", "boundary", boundary.forward_s, m)
        streams.block(name, "inside", c.forward_communication_s, m)
        streams.compute(name, "forward", c.forward_s, m)
    streams.block("output", "boundary", price.boundaries[-1].forward_s, m)


def _backward(streams: Streams, price: Price, names: list[str], m: int, *, last: bool) -> None:
    streams.block("output", "boundary", price.boundaries[-1].backward_s, m)
    held: dict[int, float] = defaultdict(float)
    for i in range(len(names) - 1, -1, -1):
        c, name = price.components[i], names[i]
        streams.block(name, "inside", c.backward_communication_s, m)
        streams.compute(name, "backward", c.backward_s + (c.bucket_s if last else 0.0), m)
        if last:
            held[c.release] += c.late_sync_s
            streams.release(name, held.pop(i, 0.0) + c.prompt_sync_s, m)
        streams.block(f"to {name}", "boundary", price.boundaries[i].backward_s, m)
