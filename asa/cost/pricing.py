"""Prices of components and boundaries, in seconds and bytes, from a profile, a cluster and what strategies declare.

A :class:`Pricer` is made for one stage width, global batch and number of microbatches; the layouts vary inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from asa.cost.boundary.edges import Edges
from asa.cost.memory.around import Around
from asa.cost.memory.peak import Footprint, margin
from asa.cost.shards import Keeping, Shards
from asa.cost.states import States
from asa.cost.step import ComponentCost
from asa.cost.traffic.collectives import Links
from asa.cost.traffic.handovers import Handovers
from asa.cost.traffic.launching import Launches, Launching, awaited, launched
from asa.cost.traffic.prefetch import Gathers, Hidden, alongside, hidden
from asa.cost.way import PHASES, Figures, Way
from asa.cost.work.compute import Times, Work, adding, host_update
from asa.cost.work.spread import contention, slowest_rank, waiting, working
from asa.interfaces.strategy import OPTIMIZER_WORDS, Strategies
from asa.ir.cluster import Cluster
from asa.ir.graph import Component
from asa.ir.layout import Layout
from asa.ir.plan import CompressionName, OptimizerName
from asa.ir.profile import Profile
from asa.ir.traffic import Collective

_NOTHING_HIDDEN = Hidden(forward=0.0, backward=0.0, once=0.0, covered=0.0, queued=0.0)
_NOTHING_AWAITED = Launches(forward=0.0, backward=0.0, update=0.0, gradient=0.0)


class Pricer:
    """Prices of one model's components and boundaries on stages of ``width`` ranks, ``num_microbatches`` per step.

    ``busy`` is the number of ranks that work at once in all stages (``width`` if there is one stage). ``speeds`` are
    those of the stage's ranks, relative to the cluster's device; empty if all are 1. All ranks wait for the slowest:
    with unequal devices or uneven shards, a component takes as long as on its slowest rank. Components may differ in
    their slowest rank, so the sum is an upper bound. Memory is that of the largest shard. ``spare``: bytes that each
    rank's device has beyond the smallest device; memory then is at least the bytes of any rank less its spare bytes.
    """

    def __init__(
        self,
        profile: Profile,
        times: Times,
        cluster: Cluster,
        strategies: Strategies,
        *,
        width: int,
        global_batch: int,
        num_microbatches: int,
        optimizer: OptimizerName,
        busy: int | None = None,
        compression: CompressionName = "none",
        speeds: tuple[float, ...] = (),
        spare: tuple[float, ...] = (),
        states: States | None = None,
    ) -> None:
        busy = width if busy is None else busy
        self.shards = Shards(
            width=width, global_batch=global_batch, num_microbatches=num_microbatches, speeds=speeds, spare=spare
        )
        self.keeping = Keeping(profile.graph, times, self.shards)
        self.graph = profile.graph
        copying = cluster.device.type == "cpu" and not cluster.shared_memory
        self.cluster = cluster
        self.strategies = strategies
        self.optimizer: OptimizerName = optimizer
        self.busy = busy
        self.num_microbatches = num_microbatches
        self.times = times
        self.states = states or States(
            profile.graph, times, cluster, strategies, Links(cluster, width, busy), optimizer, compression
        )
        self.around = Around(self.states.held, num_microbatches, copying=copying)
        self._links = self.states.links
        at_once = working(width, busy, num_microbatches)
        self.slow = slowest_rank(profile, cluster, at_once)
        self.slow_memory = slowest_rank(profile, cluster, at_once, memory=True)
        contentions = [contention(cluster, ranks, memory=True) for ranks in (width, at_once, busy)]
        self.slow_update = self.slow_memory * contentions[0] / contentions[1]
        self.held_up_by_update = contentions[2] / contentions[0] - 1
        """Share by which the update of a stage slows down the backward of the stages in front, which runs meanwhile."""
        self._components: dict[tuple[object, ...], ComponentCost] = {}
        self._holders: dict[int, Pricer] = {}
        self._cells: dict[tuple[object, ...], tuple[float, ...]] = {}
        self.width = width
        self.microbatch = self.shards.microbatch
        """Samples of the largest microbatch, over all ranks."""
        self._handovers = Handovers(self._links, self.microbatch)
        self.edges = self._edges()

    def _edges(self) -> Edges:
        return Edges(
            self.graph, self.states, self.keeping, microbatch=self.microbatch, num_microbatches=self.num_microbatches,
            launching=Launching(self._host_lead) if self.states.async_device else None,
        )  # fmt: skip

    def _host_lead(self, layout: Layout) -> Any:
        """Least seconds by which the host is ahead of its device after the forward and the backward of each component,
        over all configurations of it: shape (component, pass)."""
        components, samples = self.graph.components, self.local(layout)
        if layout.weights or self.shards.speeds:
            longest = [self.longest(c, layout) for c in components]
            pass_s = np.array([(work.forward_s * slow, work.backward_s * slow) for work, slow in longest])
        else:
            passes = self.times.passes(samples, layout.tensor, by_tokens=layout.sequence)
            pass_s = passes.T * self.slowed(samples)
        return np.maximum(0.0, pass_s - self.times.launches[:, None] * (1, 2) - self.states.most_launched(layout))

    def local(self, layout: Layout) -> int:
        """Samples of the largest shard of a microbatch."""
        return self.shards.largest(layout)

    def holder(self, rank: int) -> Pricer:
        """A copy that prices the memory of the stage's rank number ``rank``."""
        if rank not in self._holders:
            pricer = self._holders[rank] = copy(self)
            pricer.shards = self.shards.at(rank)
            pricer.keeping = Keeping(self.graph, self.times, pricer.shards)
            pricer._components, pricer.edges = {}, pricer._edges()
        return self._holders[rank]

    def slowed(self, samples: int, speed: float = 1.0) -> float:
        """The factor from the profile's times of ``samples`` samples to those of a rank with relative ``speed``."""
        return self.slow * self.times.whole_ratio(samples) / speed

    def longest(self, component: Component, layout: Layout) -> tuple[Work, float]:
        """The component's work on its slowest rank, and the factor from the profile's times to those of this rank."""
        shards = self.shards.timed(layout)
        if len(shards) == 1:
            samples, speed = shards[0]
            return self._work(component, samples, layout), self.slowed(samples, speed)
        return max(
            ((self._work(component, n, layout), self.slowed(n, speed)) for n, speed in shards),
            key=lambda x: (x[0].forward_s + x[0].backward_s) * x[1],
        )

    def _work(self, component: Component, samples: int, layout: Layout) -> Work:
        return self.times.work(component, samples, layout.tensor, by_tokens=layout.sequence)

    def component(self, index: int, way: Way, start: int = 0) -> ComponentCost:
        """The cost of component ``index``, run as ``way`` says, in a stage that begins with component ``start``.
        Gradients that are due in front of the stage leave at its start."""
        cost, release = self.cost(index, way), max(0, self.states.released[index] - start)
        return cost if cost.release == release else cost.released_at(release)

    def cost(self, index: int, way: Way) -> ComponentCost:
        """The :meth:`component` with the ``release`` of any equal component: all of these are priced once."""
        key = (self.states.kinds[index], way)
        cost = self._components.get(key)
        if cost is None:
            state = self.states.state_cost(index, way)
            like = (self.states.settings[index], id(state), way.checkpoint, way.offload)
            if like not in self._components:
                self._components[like] = self.price(self.figures(index, way))
            cost = self._components[key] = self._components[like]
        return cost

    def figures(self, index: int, way: Way, alike: range | None = None) -> Figures:
        """The input of :meth:`price` for component ``index``, run as ``way`` says. ``alike``: the range of components
        around it that run the same way; all components if None."""
        component, layout, state = self.graph.components[index], way.layout, self.states.state_cost(index, way)
        (forward, backward, again, *inner_s, a, b, c, d), gathers = (
            self.cell(index, way),
            self.states.gathers(index, way),
        )
        ahead, behind = (0.0, 0.0) if gathers is None else self.neighbour_seconds(index, way, gathers)
        saved, transient = self.keeping.component(component, layout, checkpoint=way.checkpoint)
        neighbours = self.around.of(index, way.tensor, saved, alike)
        work, slow = self.longest(component, layout)
        return Figures(
            upkeep=state.costs, gathers=gathers, forward=forward, backward=backward, again=again, ahead=ahead,
            behind=behind, update=self.states.update(index, way.tensor), floor=float(self.times.launches[index]),
            inner_s=inner_s, count=(a, b, c, d), saved=saved, transient=transient,
            buffers=state.page.transient(state.share, layout.data, neighbours), checkpoint=way.checkpoint,
            offload=way.offload, split=layout.tensor > 1, single_rank=layout.data == 1,
            release=self.states.released[index], error=slow * work.error_s, link_error=self.edges.link_error(layout),
        )  # fmt: skip

    def neighbour_seconds(self, index: int, way: Way, gathers: Gathers) -> tuple[float, float]:
        """Compute seconds that can hide gathers of weights: the forward of the component in front, and the backward of
        the one behind. 0 where nothing is gathered."""
        ahead = self.pass_of(index - 1, way)[0] if gathers.forward + gathers.once else 0.0
        return ahead, self.pass_of(index + 1, way)[1] if gathers.backward else 0.0

    def price(self, x: Figures) -> ComponentCost:
        """The costs of components with these figures: numbers of one, or arrays with an entry for each way."""
        minimum = np.minimum if isinstance(x.forward, np.ndarray) else min
        k, m, slowest, collective_s = x.upkeep, self.num_microbatches, self.shards.slowest, self.states.collective_s
        added = adding(x.update * self.slow_memory / slowest, self.optimizer, m)
        backward = x.backward + x.checkpoint * x.again + added
        inner_forward, inner_backward = x.inner_s[0], x.inner_s[1] + x.checkpoint * x.inner_s[0]
        ahead, blocking_backward = self._blocking_s(x, 0), self._blocking_s(x, 1) + x.checkpoint * x.inner_s[0]
        saved, host, sync = _NOTHING_HIDDEN, _NOTHING_AWAITED, k.prompt + k.late
        if x.gathers is not None:
            saved = hidden(
                x.gathers, self.cluster.overlap, ahead=x.ahead, behind=x.behind, own=backward,
                met=(k.shared * inner_forward, k.shared * inner_backward), scattered=k.scattered, microbatches=m,
                least=minimum,
            )  # fmt: skip
        if self.states.async_device:
            launches = Launches(*k.launches).plus(
                collective_s * x.count[0], collective_s * (x.count[1] + x.checkpoint * x.count[0])
            )
            host = awaited(launches, forward=x.forward, backward=backward, floor=x.floor, greater=_maximum(x))
        held_up = alongside(sync, compute=backward, collectives=k.shared * inner_backward, least=minimum) + saved.queued
        held_up = minimum(sync, held_up)
        free = 1 - held_up / (sync + (sync <= 0))
        update = self._update_s(x)
        bucket = k.copied * self.slow / slowest + k.overhead_s[3] + host.gradient
        return ComponentCost(
            num_microbatches=m,
            forward_s=x.forward,
            backward_s=backward,
            forward_communication_s=ahead - saved.forward + host.forward,
            backward_communication_s=blocking_backward - saved.backward + host.backward,
            bucket_s=bucket + (1 - x.offload) * update * self.held_up_by_update,
            prompt_sync_s=k.prompt * free,
            late_sync_s=k.late * free,
            release=x.release,
            update_s=update,
            update_communication_s=k.update_moved - saved.once + host.update + held_up,
            error_s=m * x.error,
            link_error_s=(m * (ahead + blocking_backward) + k.update_moved + sync) * x.link_error,
            footprint=self.footprint(x),
            covered_s=saved.covered,
            prefetched_s=m * (saved.forward + saved.backward) + saved.once,
        )

    def _blocking_s(self, x: Figures, at: int) -> Any:
        """Seconds that block in pass ``at`` (0 forward, 1 backward): the collectives, and waiting for the slowest rank
        at each of them. A tensor-parallel component has at least one synchronisation point, inside it or at its
        boundary. Blocking collectives that run once per step also are such points, in one of the microbatches; their
        own time is priced separately."""
        k, once, compute = x.upkeep, 2 + at, (x.forward, x.backward)[at]
        per_step = k.blocking * (k.count[once] + x.count[once]) / self.num_microbatches
        number = _maximum(x)(x.count[at] + k.moving * k.count[at] + per_step, 1.0 * x.split)
        wait_s = compute * (waiting(self.cluster, self.width, compute / (number + (number == 0))) - 1)
        return (number > 0) * (x.inner_s[at] + k.moving * k.link_s[at] + wait_s) + k.moving * k.overhead_s[at]

    def _update_s(self, x: Figures) -> Any:
        """Seconds of the optimizer step, on the device or on its host."""
        k, sharding = x.upkeep, self.cluster.sharding
        full = OPTIMIZER_WORDS[self.optimizer] * k.size
        part = k.optimizer / (full + (full <= 0))
        update = part * x.update * self.slow_update
        if sharding is not None:
            update = update + (k.parameters < k.size) * sharding.tensor_s * k.tensors
        on_host = host_update(self.cluster, self.optimizer, part * k.size, self.busy)
        return x.offload * on_host + (1 - x.offload) * update / self.shards.slowest

    def footprint(self, x: Figures) -> Footprint:
        """The bytes that components with these figures hold."""
        k, accumulates = x.upkeep, self.num_microbatches > 1
        # k.updating is held during the update, when no activations exist, but all gradients. It is counted as if it
        # were transient in the component's backward: the sum differs by activations up to it and gradients before it.
        return Footprint(
            state=k.state + accumulates * (k.added + k.kept) - x.offload * k.optimizer,
            activations=x.saved * margin() + (not accumulates) * k.kept,
            gradients=(not accumulates) * k.gradients,
            transient=_maximum(x)(x.transient * margin() + x.buffers + self.fresh(x), k.updating),
        )

    def fresh(self, x: Figures) -> Any:
        """Bytes of the largest new gradient before it is accumulated; 0 with a single microbatch."""
        return (self.num_microbatches > 1) * x.single_rank * x.upkeep.largest

    def pass_of(self, index: int, way: Way) -> tuple[float, float]:
        """Compute seconds of forward and of backward of component ``index``, for one microbatch."""
        work, slow = self.longest(self.graph.components[index], way.layout)
        recomputed = work.again_s if way.checkpoint else 0.0
        return work.forward_s * slow, (work.backward_s + recomputed) * slow

    def joint(self, way: Way) -> bool:
        """Whether the memory of a component run as ``way`` says depends on the ways of its neighbours."""
        return way.data.degree > 1 and self.strategies.data[way.data.strategy].joint

    def remaining_bytes(self, index: int, way: Way) -> float:
        """Bytes held from the backward of component ``index`` until the whole backward ends, if no component in front
        runs the same way (:meth:`asa.interfaces.strategy.DataStrategy.remaining_bytes`)."""
        page = self.strategies.data[way.data.strategy].of(way.data)
        return page.remaining_bytes(self.states.share(index, way.tensor), way.layout.data, self.num_microbatches)

    def without_unmade(self, index: int, way: Way, footprint: Footprint, *, ending: bool) -> Footprint:
        """The ``footprint`` of component ``index``, corrected for gradients that do not exist yet at the peak of its
        backward, in a step of one microbatch. It is unchanged if gradients are in buckets. ``ending``: the component is
        the last one with weights in its wrapped unit; its forward has no gradients, but still the buffer of its
        gathered weights."""
        memory, component = self.states.state_cost(index, way).memory, self.graph.components[index]
        unmade = 0.0 if memory.buckets else float(self.keeping.unmade(way.layout)[index])
        if not unmade:
            return footprint
        peak = max(footprint.transient - unmade, memory.updating)
        if ending:
            _, passing = self.keeping.component(component, way.layout, checkpoint=way.checkpoint)
            peak = max(peak, min(footprint.transient, passing * margin() + memory.transient - memory.gradients))
        return replace(footprint, transient=peak)

    def cell(self, index: int, way: Way) -> tuple[float, ...]:
        """Nine figures of component ``index`` that do not depend on its data strategy: seconds of compute in forward,
        in backward and in a second forward, seconds of the collectives inside the first two, and the number of
        collectives in each of :data:`asa.cost.way.PHASES`."""
        key = (self.states.timed[index], way.layout, way.tensor)
        if key not in self._cells:
            inner = self.inner(index, way)
            collective_s = (sum(self._links.seconds(c) for c in inner if c.phase == phase) for phase in PHASES[:2])
            counts = (launched(inner, phase) for phase in PHASES)
            work, slow = self.longest(self.graph.components[index], way.layout)
            passes = (work.forward_s * slow, work.backward_s * slow, work.again_s * slow)
            self._cells[key] = (*passes, *collective_s, *counts)
        return self._cells[key]

    def inner(self, index: int, way: Way) -> tuple[Collective, ...]:
        """Collectives of tensor parallelism inside component ``index``, for one microbatch."""
        splitting = self.strategies.tensor[way.tensor.strategy]
        return splitting.traffic(self.graph.components[index], way.layout.tensor, self.local(way.layout))

    def handover(self, index: int, source: Layout, target: Layout, offset: int) -> tuple[float, float]:
        """Seconds to send one microbatch to the stage that begins with component ``index`` on rank ``offset``, and to
        send its gradient back."""
        return self.handovers((index,), source, target, offset)[0]

    def handovers(
        self, indices: Sequence[int], source: Layout, target: Layout, offset: int
    ) -> list[tuple[float, float]]:  # fmt: skip
        """For each of several components, the seconds of :meth:`handover` in front of it."""
        sizes = tuple(self.graph.components[i - 1].output_bytes_per_sample for i in indices)
        sent = self._handovers.seconds
        return list(zip(sent(sizes, source, target, offset), sent(sizes, target, source, offset), strict=True))


def _maximum(x: Figures) -> Any:
    """The function that gives the greater of two numbers, or of two arrays entry by entry."""
    return np.maximum if isinstance(x.forward, np.ndarray) else max


def times_of(profile: Profile, strategies: Strategies) -> Times:
    """The profile's times. Tensor degrees that were not measured are interpolated by the share of FLOPs that the
    tensor strategy declares."""

    def flops_share(component: Component, degree: int) -> float:
        if degree == 1 or component.flops_per_sample <= 0 or "tensor" not in strategies.tensor:
            return 1.0
        share = strategies.tensor["tensor"].share(component, degree)
        return share.flops_per_sample / component.flops_per_sample

    return Times(profile, flops_share)


__all__ = ["Pricer", "Way", "times_of"]
