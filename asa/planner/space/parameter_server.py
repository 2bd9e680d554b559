"""Parameter servers, priced for the table beside what asa runs: synchronous, asynchronous, bounded staleness.

Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server" (OSDI): the weights are sharded over
servers; a worker pushes its gradients and pulls the weights it computes with next. Here every one of n workers has a
server beside it on its own device, which holds 1/n of the weights, so of P bytes of parameters (n-1)/n leave a worker
in a push and as many reach it in a pull, all workers at once: the pattern of an all_to_all, and so priced.

- A push leaves in the same buckets as data parallelism's gradients, and hides behind what is left of backward as far
  as they do (:mod:`asa.cost.step`). A pull comes before the next forward, and hides behind nothing.
- A server applies every push as it arrives: n pushes on 1/n of the parameters, the work of one whole update.
- Synchronous: every step waits for the slowest worker, the expected maximum of their spread.
- Asynchronous: nobody waits. In the time of one worker's cycle n workers do 1/n of the global batch each, so that
  cycle is the time of a step.
- Bounded staleness (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
  Server", NIPS): a worker may be up to s steps ahead of the slowest. What it waits for is the slowest *mean* of s + 1
  steps, whose spread is smaller by sqrt(s + 1): synchronous at s = 0, asynchronous for large s.

Prices are of time and memory alone: what stale weights cost in steps to a given accuracy is not in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

from asa.cost.memory.peak import Footprint, peak
from asa.cost.planned import Price
from asa.cost.step import ComponentCost, step
from asa.cost.traffic.buckets import bucket_bytes
from asa.cost.traffic.collectives import Links
from asa.cost.work.spread import expected_maximum, relative_deviation
from asa.interfaces.strategy import OPTIMIZER_WORDS
from asa.ir.graph import Component
from asa.ir.traffic import Collective
from asa.planner.space.candidate import Candidate, Prices

STALENESS = 3
"""Steps that a worker may be ahead of the slowest in ``ps_bounded``."""

NOT_RUN = "priced only"

WHY_NOT: Mapping[str, str] = {
    "ps_sync": NOT_RUN,
    "ps_async": f"{NOT_RUN}; convergence not priced",
    "ps_bounded": f"{NOT_RUN}; staleness {STALENESS}, convergence not priced",
}
"""The parameter-server strategies, and what the table says of each."""


def priced(prices: Prices, replicated: Candidate) -> dict[str, Price]:
    """Every strategy of :data:`WHY_NOT` on the workers and microbatches of ``replicated``, plain data parallelism.

    Its ranks are the workers, at least 2, in one stage.
    """
    space, workers = prices.space, replicated.ranks
    plain = prices.of(replicated)
    links = Links(space.cluster, workers)
    spread, slowest = relative_deviation(space.profile), expected_maximum(workers)
    waits = {"ps_sync": 1.0, "ps_async": 0.0, "ps_bounded": 1 / sqrt(STALENESS + 1)}
    found = {}
    for name, share in waits.items():
        pace = (1 + spread * slowest * share) / (1 + spread * slowest)
        components = tuple(
            _served(prices, links, component, cost, workers, pace)
            for component, cost in zip(space.profile.graph.components, plain.components, strict=True)
        )
        cost = step(components, plain.boundaries, space.cluster.overlap)
        held = peak([c.footprint for c in components], [b.footprint for b in plain.boundaries[:-1]])
        stage = replace(plain.stages[0], cost=cost, peak=held, components=components)
        found[name] = replace(plain, cost=cost, peak=held, stages=(stage,))
    return found


def _served(
    prices: Prices, links: Links, component: Component, cost: ComponentCost, workers: int, pace: float
) -> ComponentCost:
    """``cost`` of a replicated component with its gradients pushed and its weights pulled; compute at ``pace``."""
    size = float(component.parameter_bytes)
    sync = push = pull = 0.0
    if size > 0:
        message = bucket_bytes(prices.space.profile.graph, size, component.num_parameter_tensors)
        moved = Collective(op="all_to_all", phase="gradient", bytes=message, ranks=workers)
        push = pull = links.seconds(moved) * size / message
        sync = cost.sync_s
    late = push * cost.late_sync_s / sync if sync > 0 else 0.0
    return replace(
        cost,
        forward_s=cost.forward_s * pace,
        backward_s=cost.backward_s * pace,
        bucket_s=cost.bucket_s * pace,
        update_s=cost.update_s * pace,
        prompt_sync_s=push - late,
        late_sync_s=late,
        update_communication_s=pull,
        footprint=_held(prices, cost.footprint, size, workers),
    )


def _held(prices: Prices, replicated: Footprint, size: float, workers: int) -> Footprint:
    """What a worker and its server hold: optimizer state, weights and a sum of gradients of 1/n of the parameters
    beside the worker's own weights and gradients."""
    words = OPTIMIZER_WORDS[prices.space.request.optimizer]
    return replace(replicated, state=replicated.state - words * size + (words + 2) * size / workers)
