"""Prices of disciplines of consistency, for the table of comparisons.

Under a discipline the workers of data parallelism wait for each other in another way (:mod:`asa.ir.consistency`). The
step time is simulated (:mod:`asa.cost.consistency`) from the same prices as those of plans: compute and update of a
replicated component, a message between two ranks for a push and a pull, an all_reduce for an average of weights. A push
starts after backward and the weights arrive before the next forward, so neither is hidden.

How many more steps stale weights need to a target is a separate curve (:mod:`asa.ir.staleness`).
"""

from __future__ import annotations

from dataclasses import replace

from asa.cost.consistency import Machine, Played, Server, Worker, play
from asa.cost.planned import Price
from asa.cost.planned import disciplined as under
from asa.cost.step import StepCost
from asa.cost.traffic.collectives import Links
from asa.cost.work.spread import expected_maximum, relative_deviation
from asa.errors import UsageError
from asa.interfaces.strategy import OPTIMIZER_WORDS
from asa.ir.codec import noun
from asa.ir.consistency import Discipline, parse
from asa.ir.layout import largest_shard
from asa.ir.plan import Plan
from asa.planner.space.candidate import Candidate, Prices

TABLED = ("ps_sync", "ps_async", "ps_bounded")
"""Disciplines that are priced beside every plan."""

_COPIES, _SUM = 2.5, 0.65
"""Copies of all weights for a push and a pull: of a worker (into one vector, scaled, and back); of a sum, by worker."""
_CYCLES, _MOST, _LEAST = 2000, 48, 4
"""Most steps of all workers together in a simulation, and its most and fewest global batches."""


@noun
class Disciplined:
    """A discipline on the workers of data parallelism: its price, the simulated run, and the simulated machine."""

    price: Price
    played: Played
    machine: Machine


def why_not(name: str) -> str:
    """The reason why a discipline is not chosen."""
    changed = "" if parse(name).synchronous else ", and --consistency any says what changed convergence costs"
    return f"not chosen: it runs where it is asked for by name{changed}"


def machine(prices: Prices, replicated: Candidate, discipline: Discipline | None) -> Machine:
    """The machine to simulate, with workers on the ranks of ``replicated``, which is plain data parallelism over at
    least 2 ranks in one stage. Where servers have ranks of their own, these are the last ones.

    Raises:
        UsageError: there are too few ranks for the discipline.
    """
    space, ranks = prices.space, replicated.ranks
    count = ranks if discipline is None else discipline.workers(ranks)
    num_servers = 0 if discipline is None else discipline.servers
    on_workers = discipline is not None and discipline.placement == "beside"
    price = prices.of(replicated)
    spread = relative_deviation(space.profile)
    mean_share = 1 / (1 + spread * expected_maximum(ranks))
    inside = sum(b.blocking_s for b in price.boundaries) + sum(c.blocking_s for c in price.components)
    slowest_s = sum(c.compute_s for c in price.components) * mean_share + inside
    update_s = sum(c.update_s for c in price.components) * mean_share
    speeds = space.cluster.speeds(range(ranks)) or (1.0,) * ranks
    batch = space.request.global_batch
    share, largest = batch / count, largest_shard(batch, ranks)
    size = float(sum(c.parameter_bytes for c in space.profile.graph.components))
    links = Links(space.cluster, ranks)
    # The distance between two ranks that communicate over the widest level of links among these ranks.
    distance = max((level.devices for level in space.cluster.levels[:-1] if level.devices < ranks), default=1)
    message = links.handover(size / num_servers, distance, 1) if num_servers else 0.0
    rate, words = space.cluster.device.host_bandwidth, OPTIMIZER_WORDS[space.request.optimizer]
    # An optimizer step reads gradients, weights and state and writes the last two; a copy reads twice and writes once.
    copy_s = size / rate if rate else update_s * 3 / (3 + 2 * words)
    copies = (1 + _SUM) * count if discipline is not None and discipline.synchronous else 1.0
    shared = space.cluster.shared_memory and discipline is not None and not discipline.lockstep  # sockets of one host
    remote = [message * (num_servers - (on_workers and w < num_servers)) for w in range(count)]  # none on its own rank
    return Machine(
        workers=tuple(
            Worker(
                step_s=slowest_s * min(speeds) / speed * share / largest, rows=share, push_s=sent, pull_s=sent,
                copy_s=_COPIES * copy_s if num_servers else 0.0,
                update_s=update_s if discipline is None or not num_servers or discipline.period > 1 else 0.0,
            )
            for speed, sent in zip(speeds[:count], remote, strict=True)
        ),
        servers=tuple(
            Server(
                receive_s=message, send_s=message, handling_s=message if shared else 0.0,
                apply_s=(update_s + copies * copy_s) / num_servers, beside=j if on_workers else None,
            )
            for j in range(num_servers)
        ),
        spread=spread,
        meeting_s=price.cost.exposed_s - inside if discipline is None else links.time("all_reduce", size, ranks, 1),
    )  # fmt: skip


def disciplined(prices: Prices, replicated: Candidate, discipline: Discipline) -> Disciplined:
    """The price of ``discipline`` on the ranks and microbatches of ``replicated``, plain data parallelism in one stage.

    Raises:
        UsageError: there are too few ranks, the discipline is pipelined, or hogwild's ranks share no memory.
    """
    cluster = prices.space.cluster
    if discipline.name == "hogwild" and (cluster.device.type != "cpu" or replicated.ranks > cluster.host):
        raise UsageError("hogwild needs memory that all ranks write to: CPU ranks of one host")
    simulated = machine(prices, replicated, discipline)
    count = len(simulated.workers)
    played = play(discipline, simulated, steps=max(_LEAST, min(_MOST, _CYCLES // count)) * discipline.period)
    price = prices.of(replicated)
    total, ideal = played.step_time_s, simulated.rows / simulated.fastest
    update = sum(w.update_s * w.rows for w in simulated.workers) / simulated.rows
    computed = min(total, ideal + update)
    moved = min(total - computed, sum(w.push_s + w.pull_s for w in simulated.workers) / count / discipline.period)
    cost = _simulated(total, computed, moved, update)
    pricers = (prices.pricer(replicated.ranks, replicated.num_microbatches),)
    price = under(discipline, price, pricers, replicated.ways, prices.space.profile, replicated.ranks)
    stage = replace(price.stages[0], cost=cost)
    return Disciplined(price=replace(price, cost=cost, stages=(stage,)), played=played, machine=simulated)


def grouped(prices: Prices, plan: Plan, discipline: Discipline) -> StepCost:
    """The cost of a step of groups of ranks that each run ``plan`` on their share of the batch and average weights as
    ``discipline`` says. A rank averages with those that have the same part of the weights in the other groups, all at
    the same time."""
    assert discipline.groups is not None
    space, count, inside = prices.space, discipline.groups, plan.prediction
    group_size, links = plan.num_ranks, Links(prices.space.cluster, prices.space.request.gpus)
    rank_bytes = [0.0] * group_size
    for component, c in zip(space.profile.graph.components, plan.components, strict=True):
        parts = c.tensor.degree * (c.data.degree if c.data.strategy == "zero3" else c.data.shards or 1)
        for rank in plan.stages[c.stage].ranks:
            rank_bytes[rank] += component.parameter_bytes / parts
    speeds = space.cluster.speeds(range(group_size * count)) or (1.0,) * (group_size * count)
    slowest = [min(speeds[g * group_size : (g + 1) * group_size]) for g in range(count)]
    machine = Machine(
        workers=tuple(
            Worker(step_s=inside.step_time_s * slowest[0] / slow, rows=float(plan.global_batch)) for slow in slowest
        ),
        spread=relative_deviation(space.profile),
        meeting_s=links.time("all_reduce", max(rank_bytes), count, group_size),
    )
    played = play(discipline, machine, steps=max(_LEAST, min(_MOST, _CYCLES // count)) * discipline.period)
    total = played.step_time_s
    computed = min(total, inside.compute_s)
    moved = min(total - computed, inside.exposed_communication_s + machine.meeting_s / discipline.period)
    return _simulated(total, computed, moved, inside.update_s)


def _simulated(total: float, computed: float, moved: float, update: float) -> StepCost:
    """The cost of a step of ``total`` seconds; what is neither computed nor moved is waited for."""
    return StepCost(
        total_s=total, compute_s=computed, exposed_s=moved, hidden_s=0.0, update_s=min(update, computed), overlap_s=0.0,
        bubble_s=total - computed - moved,
    )  # fmt: skip
