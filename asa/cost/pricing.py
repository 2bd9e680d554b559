"""From a profile, a cluster and what strategies declare to seconds and bytes of one component or boundary.

A :class:`Pricer` is made for one width, global batch and number of microbatches; the layouts vary inside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from asa.cost.traffic.prefetch import Hidden, hidden
from asa.cost.traffic.sharing import alongside
from asa.cost.way import Alone, Spread, Way
from asa.cost.work.compute import Times, Work, adding
from asa.cost.work.offload import host_update
from asa.cost.work.spread import contention, slowest_rank, waiting, working
from asa.interfaces.strategy import OPTIMIZER_WORDS, Strategies
from asa.ir.cluster import Cluster
from asa.ir.graph import Component
from asa.ir.layout import Layout
from asa.ir.plan import CompressionName, OptimizerName
from asa.ir.profile import Profile
from asa.ir.traffic import Collective, Memory, Phase

_NOTHING_HIDDEN = Hidden(forward=0.0, backward=0.0, once=0.0, covered=0.0, queued=0.0)
_PASSES: tuple[Phase, Phase] = ("forward", "backward")
_NOTHING_AWAITED = Launches(forward=0.0, backward=0.0, update=0.0, gradient=0.0)


class Pricer:
    """Prices components and boundaries of one model on stages of ``width`` ranks, ``num_microbatches`` to a step.

    ``busy`` is how many ranks work at once in all stages (``width`` where there is one), ``speeds`` those of the
    stage's ranks where they are not that of the cluster's device. All ranks wait for the slowest: of unequal devices,
    or uneven shards, the rank decides that takes longest for the component in hand; that it is another one for the
    next makes the sum too high, never too low. Memory is that of the largest shard; with ``spare``, how many bytes more
    each rank's device has than the smallest, no less than what any rank holds, less what it has to spare.
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
        self.around = Around(profile.graph, strategies, num_microbatches, copying=copying)
        self.cluster = cluster
        self.strategies = strategies
        self.optimizer: OptimizerName = optimizer
        self.busy = busy
        self.num_microbatches = num_microbatches
        self.times = times
        self.states = states or States(
            profile.graph, times, cluster, strategies, Links(cluster, width, busy), optimizer, compression
        )
        self._links = self.states.links
        self._releases = self.states.releases
        at_once = working(width, busy, num_microbatches)
        self.slow = slowest_rank(profile, cluster, at_once)
        self.slow_memory = slowest_rank(profile, cluster, at_once, memory=True)
        beside = [contention(cluster, ranks, memory=True) for ranks in (width, at_once, busy)]
        self.slow_update = self.slow_memory * beside[0] / beside[1]
        self.held_up_by_update = beside[2] / beside[0] - 1
        """Share by which a stage's update lengthens the backward of those in front, which it runs beside."""
        self._components: dict[tuple[int, Way], ComponentCost] = {}
        self._alones: dict[tuple[object, ...], Alone] = {}
        self._spreads: dict[tuple[object, ...], Spread] = {}
        self.width = width
        self.microbatch = self.shards.microbatch
        """Samples of the largest microbatch, over all ranks."""
        self._handovers = Handovers(self._links, self.microbatch)
        self.edges = self._edges()

    def _edges(self) -> Edges:
        return Edges(
            self.graph, self.states, self.keeping, microbatch=self.microbatch, num_microbatches=self.num_microbatches,
            launching=Launching(self._ahead) if self.states.apart else None,
        )  # fmt: skip

    def _ahead(self, layout: Layout) -> Any:
        """By how many seconds the host is ahead of its device after forward and backward of every component, whatever
        it launches for the component's own communication: component x pass."""
        components, samples = self.graph.components, self.local(layout)
        if layout.sequence or layout.weights or self.shards.speeds:
            longest = [self.longest(c, layout) for c in components]
            taken = np.array([(work.forward_s * slow, work.backward_s * slow) for work, slow in longest])
        else:
            taken = self.times.passes(samples, layout.tensor).T * self.slowed(samples)
        floors = np.array([(x, 2 * x) for x in map(self.times.launch, components)])
        return np.maximum(0.0, taken - floors - [self.states.most_launched(i, layout) for i in range(len(components))])

    @property
    def releases(self) -> tuple[int, ...]:
        """Per component, the one after whose backward the late part of its gradients leaves."""
        return tuple(r.index for r in self._releases)

    def local(self, layout: Layout) -> int:
        """Samples of the busiest rank in one microbatch."""
        return self.shards.largest(layout)

    def holder(self, place: int) -> Pricer:
        """A copy that prices the memory of the stage's rank ``place``."""
        found = copy(self)
        found.shards = self.shards.at(place)
        found.keeping = Keeping(self.graph, self.times, found.shards)
        found._components, found.edges = {}, found._edges()
        return found

    def slowed(self, samples: int, speed: float = 1.0) -> float:
        """By what a rank of that speed exceeds the times of the profile, with so many samples."""
        return self.slow * self.times.whole_ratio(samples) / speed

    def longest(self, component: Component, layout: Layout) -> tuple[Work, float]:
        """The component's work on the rank that takes longest for it, and that rank's factor on the profile's times."""
        found = self.shards.timed(layout)
        if len(found) == 1:
            samples, speed = found[0]
            return self._work(component, samples, layout), self.slowed(samples, speed)
        return max(
            ((self._work(component, n, layout), self.slowed(n, speed)) for n, speed in found),
            key=lambda x: (x[0].forward_s + x[0].backward_s) * x[1],
        )

    def _work(self, component: Component, samples: int, layout: Layout) -> Work:
        return self.times.work(component, samples, layout.tensor, by_tokens=layout.sequence)

    def compute_alone(self, index: int, layout: Layout) -> float:
        """Seconds of forward and backward of component ``index`` in one microbatch, without any communication."""
        work, slow = self.longest(self.graph.components[index], layout)
        return (work.forward_s + work.backward_s) * slow

    def component(self, index: int, way: Way) -> ComponentCost:
        """Component ``index``, run that way."""
        if (index, way) not in self._components:
            self._components[index, way] = self._component(index, way)
        return self._components[index, way]

    def _component(self, index: int, way: Way) -> ComponentCost:
        alone, spread = self._alone(index, way), self._spread(index, way)
        m, work, slow = self.num_microbatches, alone.work, alone.slow
        back = spread.back
        again = 0.0
        if way.checkpoint:
            again = work.forward_s
            back += self._seconds(alone.inner, "forward")
        footprint, update = self._footprint(index, way)
        added = adding(alone.update * self.slow_memory / self.shards.slowest, self.optimizer, m)
        ahead_s, back_s = work.forward_s * slow, (work.backward_s + again) * slow + added
        met = self._met_on_links(index, way)
        sync = spread.prompt + spread.late
        saved, host = self._prefetched(index, way, back_s, met), self._awaited(index, way, ahead_s, back_s)
        held_up = min(sync, alongside(sync, compute=back_s, collectives=met[1]) + saved.queued)
        free = 1 - held_up / sync if sync else 1.0
        blocking = m * (spread.ahead + back) + spread.update_moved + sync
        return ComponentCost(
            num_microbatches=m,
            forward_s=ahead_s,
            backward_s=back_s,
            forward_communication_s=spread.ahead - saved.forward + host.forward,
            backward_communication_s=back - saved.backward + host.backward,
            bucket_s=spread.copying + host.gradient + (0.0 if way.offload else update * self.held_up_by_update),
            prompt_sync_s=spread.prompt * free,
            late_sync_s=spread.late * free,
            release=self._releases[index].index,
            update_s=update,
            update_communication_s=spread.update_moved - saved.once + host.update + held_up,
            error_s=m * slow * work.error_s,
            link_error_s=blocking * self.edges.link_error(way.layout),
            footprint=footprint,
            covered_s=saved.covered,
            prefetched_s=m * (saved.forward + saved.backward) + saved.once,
        )

    def _met_on_links(self, index: int, way: Way) -> tuple[float, float]:
        """Seconds of a forward and of a backward in which collectives inside the component take the links that its
        weights and gradients go over."""
        shared = self.states.kept(index, way).shared
        if not shared:
            return 0.0, 0.0
        ahead, back = (self._seconds(self._alone(index, way).inner, phase) for phase in _PASSES)
        return shared * ahead, shared * (back + ahead if way.checkpoint else back)

    def _prefetched(self, index: int, way: Way, own: float, met: tuple[float, float]) -> Hidden:
        """What gathers ahead save; ``own`` is the component's backward, in seconds."""
        gathers = self.states.ahead(index, way)
        if gathers is None:
            return _NOTHING_HIDDEN
        ahead = self.pass_of(index - 1, way)[0] if gathers.forward + gathers.once else 0.0
        behind = self.pass_of(index + 1, way)[1] if gathers.backward else 0.0
        return hidden(
            gathers, self.cluster.overlap, ahead=ahead, behind=behind, own=own, met=met,
            scattered=self.states.kept(index, way).scattered, microbatches=self.num_microbatches,
        )  # fmt: skip

    def _awaited(self, index: int, way: Way, forward: float, backward: float) -> Launches:
        """What the device waits for of the host's work on its communication."""
        launches, inner = self.states.kept(index, way).launches, self._alone(index, way).inner
        if not self.states.apart or (launches is None and not inner):
            return _NOTHING_AWAITED
        ahead, back = (self.states.collective_s * launched(inner, phase) for phase in _PASSES)
        return awaited(
            (launches or _NOTHING_AWAITED).beside(ahead, back + ahead if way.checkpoint else back),
            forward=forward, backward=backward, floor=self.times.launch(self.graph.components[index]),
        )  # fmt: skip

    def pass_of(self, index: int, way: Way) -> tuple[float, float]:
        """Seconds of compute of component ``index``, run that way, in forward and in backward of one microbatch."""
        work, slow = self.longest(self.graph.components[index], way.layout)
        again = work.forward_s if way.checkpoint else 0.0
        return work.forward_s * slow, (work.backward_s + again) * slow

    def joint(self, way: Way) -> bool:
        """Whether what a component holds that way depends on its neighbours' ways."""
        return way.data.degree > 1 and self.strategies.data[way.data.strategy].joint

    def left(self, index: int, way: Way) -> float:
        """Bytes that stay after the backward of component ``index``, where none in front is run alike."""
        page = self.strategies.data[way.data.strategy].of(way.data)
        return page.left(self.states.share(index, way.tensor), way.layout.data, self.num_microbatches)

    def added(self, index: int, way: Way) -> float:
        """Bytes of gradients that component ``index`` adds up over several microbatches, beside its buckets."""
        held = self.states.kept(index, way).held
        return held.gradients if held.accumulated is None else held.accumulated

    def as_made(self, index: int, way: Way, footprint: Footprint, *, ending: bool) -> Footprint:
        """The ``footprint`` of component ``index`` where each of its gradients is there from when backward makes it on:
        not earlier in a bucket, or from an earlier microbatch. ``ending``: of those wrapped together no other one with
        weights follows. In its forward there is no gradient, but the buffer that the weights were gathered into."""
        if self.num_microbatches > 1 or not self.times.unmade:
            return footprint
        held, component = self._spread(index, way).held, self.graph.components[index]
        unmade = 0.0 if held.buckets else self.keeping.unmade(component, way.layout)
        if not unmade:
            return footprint
        made = max(footprint.transient - unmade, held.updating)
        if ending:
            _, passing = self.keeping.component(component, way.layout, checkpoint=way.checkpoint)
            made = max(made, min(footprint.transient, passing * margin() + held.transient - held.gradients))
        return replace(footprint, transient=made)

    def footprint(self, index: int, way: Way, alike: range) -> Footprint:
        """Memory of component ``index`` where of its neighbours only those ``alike`` are run as it is; else as in
        :meth:`component`, where all are taken to be."""
        return self._footprint(index, way, alike)[0]

    def _footprint(self, index: int, way: Way, alike: range | None = None) -> tuple[Footprint, float]:
        alone, spread = self._alone(index, way), self._spread(index, way)
        saved, transient = self.keeping.component(self.graph.components[index], way.layout, checkpoint=way.checkpoint)
        beside = self.around.of(index, way.tensor, saved, alike)
        transient = transient * margin() + spread.page.transient(alone.share, way.layout.data, beside)
        return self._held(alone, way, spread.held, saved, transient)

    def _alone(self, index: int, way: Way) -> Alone:
        """What component ``index`` does in a layout, whoever keeps its state."""
        key = (index, way.layout, way.tensor)
        if key not in self._alones:
            work, slow = self.longest(self.graph.components[index], way.layout)
            inner = self.inner(index, way)
            self._alones[key] = Alone(
                self.states.share(index, way.tensor), work, slow, inner,
                ahead=self._met(inner, "forward", way, work.forward_s * slow),
                back=self._met(inner, "backward", way, work.backward_s * slow),
                update=self.states.update(index, way.tensor),
            )  # fmt: skip
        return self._alones[key]

    def inner(self, index: int, way: Way) -> tuple[Collective, ...]:
        """Collectives inside component ``index`` in a layout, of one microbatch."""
        splitting = self.strategies.tensor[way.tensor.strategy]
        return splitting.traffic(self.graph.components[index], way.layout.tensor, self.local(way.layout))

    def _spread(self, index: int, way: Way) -> Spread:
        """What keeping its state one way or another adds, but for what is forgotten or put on the host."""
        key = (index, way.layout, way.tensor, way.data)
        if key not in self._spreads:
            alone, kept = self._alone(index, way), self.states.kept(index, way)
            ahead, back = alone.ahead, alone.back
            if kept.blocking or kept.repeated:
                traffic, work, slow = (*alone.inner, *kept.moved), alone.work, alone.slow
                once: tuple[Phase, Phase] | tuple[None, None] = (
                    ("update", "gradient") if kept.blocking else (None, None)
                )
                ahead = self._met(traffic, "forward", way, work.forward_s * slow, once[0])
                back = self._met(traffic, "backward", way, work.backward_s * slow, once[1])
                ahead += kept.handled["forward"]
                back += kept.handled["backward"]
            copying = kept.copied * self.slow / self.shards.slowest + kept.handled["gradient"]
            self._spreads[key] = Spread(
                kept.page, kept.held, ahead, back, kept.update_moved, kept.prompt, kept.late, copying
            )
        return self._spreads[key]

    def _met(
        self, traffic: Sequence[Collective], phase: Phase, way: Way, compute_s: float, once: Phase | None = None
    ) -> float:
        """Seconds that block in one pass of a component, whose own work is ``compute_s``: its collectives, and waiting
        at each of them for the slowest rank. A tensor-parallel component meets at least once, if not inside, then at
        its boundary. ``once``: of which phase there are collectives that ranks meet at as well, in one of a step's
        microbatches, and that are priced apart."""
        present = [c for c in traffic if c.ranks > 1 and c.bytes > 0]
        moved = [c for c in present if c.phase == phase]
        apart = sum(c.phase == once for c in present) / self.num_microbatches
        meetings = max(len(moved) + apart, 1 if way.layout.tensor > 1 else 0)
        if not meetings:
            return 0.0
        waited = compute_s * (waiting(self.cluster, self.width, compute_s / meetings) - 1)
        return self._seconds(moved, phase) + waited

    def _held(self, alone: Alone, way: Way, memory: Memory, saved: float, transient: float) -> tuple[Footprint, float]:
        """Memory of the component, and seconds of its optimizer step, on the device or on its host."""
        share, several = alone.share, self.num_microbatches > 1
        added = memory.gradients if memory.accumulated is None else memory.accumulated
        full = OPTIMIZER_WORDS[self.optimizer] * share.parameter_bytes
        part = memory.optimizer / full if full > 0 else 0.0
        # From the second microbatch on a fresh gradient lies beside the one that it is added to.
        fresh = share.largest_parameter_bytes if several and way.layout.data == 1 else 0.0
        # Around the update activations are gone, and all gradients there. Taken as a transient of the component's
        # backward, that differs by the activations up to it and the gradients in front of it.
        footprint = Footprint(
            state=memory.state + (added + memory.kept if several else 0.0) - (memory.optimizer if way.offload else 0.0),
            activations=saved * margin() + (0.0 if several else memory.kept),
            gradients=0.0 if several else memory.gradients,
            transient=max(transient + fresh, memory.updating),
        )
        if way.offload:
            return footprint, host_update(self.cluster, self.optimizer, part * share.parameter_bytes, self.busy)
        update = part * alone.update * self.slow_update
        if memory.parameters < share.parameter_bytes and self.cluster.sharding is not None:
            update += self.cluster.sharding.tensor_s * share.num_parameter_tensors
        return footprint, update / self.shards.slowest

    def handover(self, index: int, source: Layout, target: Layout, offset: int) -> tuple[float, float]:
        """Seconds of one microbatch from a stage to the next, which begins with component ``index`` on rank ``offset``:
        of the activations, and of their gradients on the way back."""
        size = self.graph.components[index - 1].output_bytes_per_sample
        sent = self._handovers.seconds
        return sent(size, source, target, offset), sent(size, target, source, offset)

    def handovers(
        self, indices: Sequence[int], source: Layout, target: Layout, offset: int
    ) -> list[tuple[float, float]]:  # fmt: skip
        """Seconds of handovers, forward and backward, in front of each of some components."""
        sizes = tuple(self.graph.components[i - 1].output_bytes_per_sample for i in indices)
        sent = self._handovers.all_seconds
        return list(zip(sent(sizes, source, target, offset), sent(sizes, target, source, offset), strict=True))

    def _seconds(self, traffic: Iterable[Collective], phase: Phase) -> float:
        return sum(self._links.seconds(c) for c in traffic if c.phase == phase)


def times_of(profile: Profile, strategies: Strategies) -> Times:
    """The profile's times, with tensor degrees between measured ones by the FLOPs that a strategy says they share."""

    def flops_share(component: Component, degree: int) -> float:
        if degree == 1 or component.flops_per_sample <= 0 or "tensor" not in strategies.tensor:
            return 1.0
        share = strategies.tensor["tensor"].share(component, degree)
        return share.flops_per_sample / component.flops_per_sample

    return Times(profile, flops_share)


__all__ = ["Pricer", "Way", "times_of"]
