"""From a profile, a cluster and what strategies declare to seconds and bytes of one component or boundary.

A :class:`Pricer` is made for one width, global batch and number of microbatches; the layouts vary inside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import gcd

from asa.cost.buckets import Release, bucket_bytes, releases
from asa.cost.collectives import Links
from asa.cost.compute import Times
from asa.cost.constants import constant
from asa.cost.memory import Footprint, margin
from asa.cost.spread import slowest_rank
from asa.cost.step import BoundaryCost, ComponentCost
from asa.interfaces.strategy import OPTIMIZER_WORDS, DataStrategy, Strategies
from asa.ir.cluster import Cluster
from asa.ir.codec import noun
from asa.ir.graph import Component
from asa.ir.layout import Boundary, Layout, largest_shard
from asa.ir.plan import DataDegree, OptimizerName, TensorDegree
from asa.ir.profile import Profile
from asa.ir.traffic import Collective, Phase, Share
from asa.ir.transfer import transfers


@noun
class Way:
    """One way to run one component. ``checkpoint``: activations are forgotten, and made again in backward."""

    layout: Layout
    data: DataDegree
    tensor: TensorDegree
    checkpoint: bool = False


class Pricer:
    """Prices components and boundaries of one model on stages of ``width`` ranks, ``num_microbatches`` to a step.

    ``busy`` is how many ranks work at once in all stages (``width`` where there is one).
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
    ) -> None:
        busy = width if busy is None else busy
        self._graph = profile.graph
        self._cluster = cluster
        self._strategies = strategies
        self._optimizer: OptimizerName = optimizer
        self.num_microbatches = num_microbatches
        self._links = Links(cluster, width, busy)
        self._times = times
        self._releases: tuple[Release, ...] = releases(profile.graph)
        self._slow = slowest_rank(profile, cluster, busy)
        self._slow_memory = slowest_rank(profile, cluster, busy, memory=True)
        self._components: dict[tuple[int, Way], ComponentCost] = {}
        self._errors: dict[Layout, float] = {}
        self._wrappers: dict[Layout, float] = {}
        self._boundaries: dict[tuple[object, ...], BoundaryCost] = {}
        self._handovers: dict[tuple[object, ...], float] = {}
        self.width = width
        self.microbatch = largest_shard(global_batch, num_microbatches)
        """Samples of the largest microbatch, over all ranks."""

    @property
    def releases(self) -> tuple[int, ...]:
        """Per component, the one after whose backward the late part of its gradients leaves."""
        return tuple(r.index for r in self._releases)

    def local(self, layout: Layout) -> int:
        """Samples of the busiest rank in one microbatch."""
        return largest_shard(self.microbatch, layout.data)

    def compute_alone(self, index: int, layout: Layout) -> float:
        """Seconds of forward and backward of component ``index`` in one microbatch, without any communication."""
        samples = self.local(layout)
        work = self._times.work(self._graph.components[index], samples, layout.tensor)
        slow = self._slow * self._times.whole_ratio(samples)
        return (work.forward_s + work.backward_s) * slow

    def component(self, index: int, way: Way) -> ComponentCost:
        """Component ``index``, run that way."""
        if (index, way) not in self._components:
            self._components[index, way] = self._component(index, way)
        return self._components[index, way]

    def _component(self, index: int, way: Way) -> ComponentCost:
        component, layout = self._graph.components[index], way.layout
        m, samples = self.num_microbatches, self.local(layout)
        splitting = self._strategies.tensor[way.tensor.strategy]
        share = splitting.share(component, layout.tensor)
        strategy = self._strategies.data[way.data.strategy]
        work = self._times.work(component, samples, layout.tensor)
        slow = self._slow * self._times.whole_ratio(samples)
        inner = splitting.traffic(component, layout.tensor, samples)
        moved = strategy.traffic(share, layout.data, layout.inner)
        ahead = self._seconds((*inner, *moved), "forward")
        back = self._seconds((*inner, *moved), "backward")
        update_moved = self._seconds(moved, "update")
        prompt, late, copying = self._sync(index, share, [c for c in moved if c.phase == "gradient"])
        saved, transient, again = work.saved_bytes, work.transient_bytes, 0.0
        if way.checkpoint:
            # What stays is the output. Backward begins with forward, and has for a while what forward saves.
            output = min(saved, float(samples * component.output_bytes_per_sample))
            saved, transient, again = output, transient + saved - output, work.forward_s
            back += self._seconds(inner, "forward")
        footprint, update = self._held(index, layout, share, strategy, saved, transient)
        return ComponentCost(
            num_microbatches=m,
            forward_s=work.forward_s * slow,
            backward_s=(work.backward_s + again) * slow,
            forward_communication_s=ahead,
            backward_communication_s=back,
            bucket_s=copying,
            prompt_sync_s=prompt,
            late_sync_s=late,
            release=self._releases[index].index,
            update_s=update * self._slow_memory,
            update_communication_s=update_moved,
            error_s=m * slow * work.error_s,
            link_error_s=(m * (ahead + back) + update_moved + prompt + late) * self._link_error(layout),
            footprint=footprint,
        )

    def _sync(self, index: int, share: Share, moved: list[Collective]) -> tuple[float, float, float]:
        """Seconds of gradient synchronisation: leaving at once, leaving with a later bucket, and copying for it.

        An all_reduce travels in buckets with its neighbours, so it costs its part of a full bucket's time;
        anything else is sent component by component.
        """
        prompt = late = copying = 0.0
        for c in moved:
            if c.op != "all_reduce":
                prompt += self._links.seconds(c)
                continue
            message = bucket_bytes(self._graph, c.bytes, share.num_parameter_tensors)
            whole = Collective(op=c.op, phase=c.phase, bytes=message, ranks=c.ranks, stride=c.stride)
            seconds = self._links.seconds(whole) * c.bytes / message
            prompt += seconds * self._releases[index].prompt
            late += seconds * (1 - self._releases[index].prompt)
            if self._cluster.device.memory_bandwidth > 0:
                copying += constant("ddp_bucket_passes") * c.bytes / self._cluster.device.memory_bandwidth * self._slow
        return prompt, late, copying

    def _held(
        self, index: int, layout: Layout, share: Share, strategy: DataStrategy, saved: float, transient: float
    ) -> tuple[Footprint, float]:
        """Memory of the component, and seconds of its optimizer step (alone on the device)."""
        component = self._graph.components[index]
        memory = strategy.memory(share, layout.data, self._optimizer)
        several = self.num_microbatches > 1
        added = memory.gradients if memory.accumulated is None else memory.accumulated
        full = OPTIMIZER_WORDS[self._optimizer] * share.parameter_bytes
        part = memory.optimizer / full if full > 0 else 0.0
        footprint = Footprint(
            state=memory.state + (added if several else 0.0),
            activations=saved * margin(),
            gradients=0.0 if several else memory.gradients,
            transient=max(transient * margin() + memory.transient, part * self._update_bytes(share)),
        )
        bandwidth = self._cluster.device.memory_bandwidth
        update = self._times.update(component, layout.tensor, self._optimizer, share.parameter_bytes, bandwidth)
        return footprint, part * update

    def _update_bytes(self, share: Share) -> float:
        """What the optimizer allocates beside a whole state and its gradients: a copy or two of the tensor in hand.

        By then the activations are gone, and all gradients there. The bound of :mod:`asa.cost.memory` takes this as a
        transient of the component's backward instead, which comes to the same but for the difference between the
        activations up to it and the gradients in front of it. On CUDA the update is fused and allocates nothing.
        """
        if self._cluster.device.type == "cuda":
            return 0.0
        return OPTIMIZER_WORDS[self._optimizer] * share.largest_parameter_bytes

    def alike(self, index: int) -> tuple[float, bool, bool]:
        """What a boundary in front of component ``index`` depends on, beside the layouts."""
        before, after = self._graph.components[index - 1], self._graph.components[index]
        return before.output_bytes_per_sample, _exit(before), _entry(after)

    def boundary(self, index: int, source: Layout, target: Layout) -> BoundaryCost:
        """The boundary in front of component ``index`` (1 <= index < number of components)."""
        size, exit_partial, entry_partial = self.alike(index)
        key = (size, exit_partial, entry_partial, source, target)
        if key not in self._boundaries:
            boundary = Boundary(
                source=source, target=target, exit_partial=exit_partial, entry_partial=entry_partial
            )  # fmt: skip
            size *= self.microbatch
            self._boundaries[key] = self._crossing(boundary, size)
        return self._boundaries[key]

    def _crossing(self, boundary: Boundary, size: float) -> BoundaryCost:
        source, target = boundary.source, boundary.target
        traffic = boundary.traffic(size)
        wrapper = self._wrapper(target) if source != target else 0.0
        gathered = sum(c.bytes for c in traffic if c.op == "all_gather" and c.phase == "backward")
        found = BoundaryCost(
            num_microbatches=self.num_microbatches,
            forward_s=self._seconds(traffic, "forward"),
            backward_s=self._seconds(traffic, "backward"),
            wrapper_s=wrapper,
            link_error_s=0.0,
            footprint=Footprint(
                activations=size / target.data * margin() if source.data != target.data else 0.0,
                transient=gathered * margin(),
            ),
        )
        error = max(self._link_error(source), self._link_error(target))
        return replace(found, link_error_s=found.blocking_s * error)

    def inlet(self, index: int, layout: Layout) -> BoundaryCost:
        """Where component ``index`` begins a stage: it holds what it was sent, and its gradient leaves whole."""
        if index == 0:
            return self.entry(layout)
        before, after = self._graph.components[index - 1], self._graph.components[index]
        size = self.microbatch * before.output_bytes_per_sample
        found = self._crossing(Boundary(source=layout, target=layout, entry_partial=_entry(after)), size)
        held = Footprint(
            activations=size / layout.data * margin(), transient=found.footprint.transient + size / layout.data
        )
        return replace(found, wrapper_s=self._wrapper(layout), footprint=held)

    def outlet(self, index: int, layout: Layout) -> BoundaryCost:
        """Where component ``index`` ends a stage: its output is made whole; the loss, or a transfer, comes next."""
        component = self._graph.components[index]
        boundary = Boundary(source=layout, target=layout, exit_partial=_exit(component))
        return self._crossing(boundary, self.microbatch * component.output_bytes_per_sample)

    def handover(self, index: int, source: Layout, target: Layout, offset: int) -> tuple[float, float]:
        """Seconds of one microbatch from a stage to the next, which begins with component ``index`` on rank ``offset``:
        of the activations, and of their gradients on the way back. The busiest rank decides (:mod:`asa.ir.transfer`).
        """
        size = self._graph.components[index - 1].output_bytes_per_sample
        return self._sent(size, source, target, offset), self._sent(size, target, source, offset)

    def _sent(self, size: float, source: Layout, target: Layout, offset: int) -> float:
        key = (size, source.width, source.data, target.width, target.data, offset)
        if key not in self._handovers:
            # Cuts are nested, so what happens is the same thing as often as both sides have shards.
            alike = gcd(source.data, target.data)
            ends = (source.width // alike, source.data // alike, target.width // alike, target.data // alike)
            flows, ranks = _sending(*ends, largest_shard(self.microbatch, alike))
            flows *= alike
            self._handovers[key] = max(
                (sum(self._links.handover(r * size, offset, flows) for r in rows) for rows in ranks), default=0.0
            )
        return self._handovers[key]

    def entry(self, layout: Layout) -> BoundaryCost:
        """The model's input: every rank reads its own samples, nothing moves and no gradient is wanted."""
        return BoundaryCost(
            num_microbatches=self.num_microbatches,
            forward_s=0.0,
            backward_s=0.0,
            wrapper_s=self._wrapper(layout),
            link_error_s=0.0,
            footprint=Footprint(activations=self.local(layout) * self._graph.input_bytes_per_sample * margin()),
        )

    def _seconds(self, traffic: Iterable[Collective], phase: Phase) -> float:
        return sum(self._links.seconds(c) for c in traffic if c.phase == phase)

    def _wrapper(self, layout: Layout) -> float:
        if layout not in self._wrappers:
            self._wrappers[layout] = self._new_wrapper(layout)
        return self._wrappers[layout]

    def _new_wrapper(self, layout: Layout) -> float:
        """Seconds by which a DDP wrapper's small first bucket and half-full last one exceed their share of bytes."""
        if layout.data == 1:
            return 0.0
        total = max(1.0, float(self._graph.parameter_bytes))

        def seconds(size: float) -> float:
            return self._links.seconds(
                Collective(op="all_reduce", phase="gradient", bytes=size, ranks=layout.data, stride=layout.inner)
            )

        first = min(constant("ddp_first_bucket_bytes"), total)
        bucket = bucket_bytes(self._graph, 0.0, 1)
        return 1.5 * max(0.0, seconds(first) - seconds(bucket) * first / bucket)

    def _link_error(self, layout: Layout) -> float:
        if layout not in self._errors:
            assumed = self._links.assumed(layout.data, layout.inner) or self._links.assumed(layout.tensor)
            self._errors[layout] = constant("link_error_assumed" if assumed else "link_error_measured")
        return self._errors[layout]


def times_of(profile: Profile, strategies: Strategies) -> Times:
    """The profile's times, with tensor degrees between measured ones by the FLOPs that a strategy says they share."""

    def flops_share(component: Component, degree: int) -> float:
        if degree == 1 or component.flops_per_sample <= 0 or "tensor" not in strategies.tensor:
            return 1.0
        share = strategies.tensor["tensor"].share(component, degree)
        return share.flops_per_sample / component.flops_per_sample

    return Times(profile, flops_share)


def _entry(component: Component) -> bool:
    return component.split is not None and component.split.entry_partial


def _exit(component: Component) -> bool:
    return component.split is not None and component.split.exit_partial


@lru_cache(maxsize=65536)
def _sending(
    source_width: int, source_data: int, target_width: int, target_data: int, rows: int
) -> tuple[int, frozenset[tuple[int, ...]]]:
    """Of a transfer of ``rows`` rows between stages: how many flows there are, and the messages (in rows) that a rank
    sends or receives, for every rank that differs in them."""
    a = Layout(width=source_width, data=source_data, tensor=1)
    b = Layout(width=target_width, data=target_data, tensor=1)
    theirs = tuple(range(a.width, a.width + b.width))
    messages = transfers(a, tuple(range(a.width)), b, theirs, rows)
    busy: dict[int, list[int]] = {}
    for m in messages:
        for rank in (m.source, m.target):
            busy.setdefault(rank, []).append(m.rows)
    flows = min(len({m.source for m in messages}), len({m.target for m in messages}))
    return flows, frozenset(tuple(sorted(found)) for found in busy.values())
