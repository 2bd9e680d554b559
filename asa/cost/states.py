"""Costs of the states of components (weights, gradients, optimizer) and of the traffic for them.

They do not depend on the number of microbatches, so they are computed once. Components that differ only in their names,
such as repeated blocks, are priced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from asa.cost.boundary.crossings import Crossings, Ends
from asa.cost.constants import constant
from asa.cost.traffic.buckets import Release, bucket_bytes, releases, remaining
from asa.cost.traffic.collectives import Links
from asa.cost.traffic.launching import MOST_UNITS, launched
from asa.cost.traffic.prefetch import Gathers
from asa.cost.way import PHASES, Upkeep, Way
from asa.cost.work.compute import Times
from asa.interfaces.strategy import DataStrategy, Strategies
from asa.ir.cluster import Cluster, Sharding
from asa.ir.graph import Component, LayerGraph, firsts
from asa.ir.layout import Boundary, Layout
from asa.ir.plan import CompressionName, OptimizerName, TensorDegree
from asa.ir.traffic import Collective, Memory, Share
from asa.ir.transfer import whole


@dataclass
class StateCost:
    """A component under a data strategy: the strategy (``page``), the ``share`` of a tensor rank, the memory of its
    state (``memory``), all traffic for it (``traffic``), and the costs of these."""

    page: DataStrategy
    share: Share
    memory: Memory
    traffic: tuple[Collective, ...]
    costs: Upkeep


class States:
    """States of one graph's components on stages of one width. ``links`` has the width and the number of busy ranks."""

    def __init__(
        self, graph: LayerGraph, times: Times, cluster: Cluster, strategies: Strategies, links: Links,
        optimizer: OptimizerName, compression: CompressionName,
    ) -> None:  # fmt: skip
        self.links, components = links, graph.components
        self.releases: tuple[Release, ...] = releases(graph)
        self.released = tuple(r.index for r in self.releases)
        """For each component, the index of the one after whose backward the late part of its gradients is sent."""
        self._graph, self._times, self._cluster, self._strategies = graph, times, cluster, strategies
        self._optimizer: OptimizerName = optimizer
        self._compression: CompressionName = compression
        self.like, self.timed = times.like, times.timed
        self._bucketed = firsts((k, r.prompt) for k, r in zip(self.like, self.releases, strict=True))
        self.settings = firsts(_settings(graph, self.timed))
        self.kinds = firsts(zip(self.settings, self._bucketed, strict=True))
        """For each component, the first one that costs the same in the same way. Those of equal ``settings`` differ at
        most in the share of their gradients that is sent at once, which only matters in buckets."""
        self.async_device = cluster.device.type != "cpu"  # its host launches kernels ahead of it
        pairs = pairwise((components[-1], *components))
        self.forms = [(a.output_bytes_per_sample, Ends.between(a, b)) for a, b in pairs]
        self.outputs = [(c.output_bytes_per_sample, Ends.between(c, None)) for c in components]
        """For each component, the bytes per sample that cross the boundary in front of it, or behind the last component
        of a stage, and the layout rules of this boundary."""
        waits = self.timed if self.async_device else (0,) * len(components)
        self.fronts = firsts((self.forms[i], waits[i - 1], k) if i else () for i, k in enumerate(waits))
        self.ends = firsts((x, i == len(components) - 1) for i, x in enumerate(self.outputs))
        """For each component, the first one whose boundary in front, or whose end of a stage, costs the same."""
        self._shares: dict[tuple[int, TensorDegree], Share] = {}
        self._updates: dict[tuple[int, TensorDegree], float] = {}
        self._largest: dict[TensorDegree, tuple[int, float]] = {}
        self._held: dict[TensorDegree, list[float]] = {}
        self._costs: dict[tuple[object, ...], StateCost] = {}
        self._prefetched: dict[tuple[object, ...], Gathers | None] = {}
        self.collective_s = constant("collective_launch_s") if self.async_device else 0.0
        self._launch_bounds: dict[tuple[bool, int], Any] = {}
        self.prefetching = self.async_device and cluster.overlap.saving > 0
        self._crossings: dict[tuple[Ends, Layout, Layout], tuple[Boundary, tuple[Collective, ...]]] = {}
        self._between: dict[tuple[Ends, tuple[Layout, ...], tuple[Layout, ...]], Crossings] = {}

    def share(self, index: int, tensor: TensorDegree) -> Share:
        """The share of component ``index`` on a tensor rank."""
        key = (self.like[index], tensor)
        if key not in self._shares:
            page = self._strategies.tensor[tensor.strategy]
            self._shares[key] = page.share(self._graph.components[index], tensor.degree)
        return self._shares[key]

    def largest(self, tensor: TensorDegree) -> tuple[int, float]:
        """The index of the component with the largest parameter on a tensor rank, and the parameter bytes of all other
        components there."""
        if tensor in self._largest:
            return self._largest[tensor]
        page, sizes = self._strategies.tensor[tensor.strategy], self.held(tensor)
        largest = [
            0.0 if page.refusal(c, tensor.degree) else self.share(i, tensor).largest_parameter_bytes
            for i, c in enumerate(self._graph.components)
        ]
        at = max(range(len(sizes)), key=largest.__getitem__)
        self._largest[tensor] = at, sum(sizes) - sizes[at]
        return self._largest[tensor]

    def held(self, tensor: TensorDegree) -> list[float]:
        """Parameter bytes of every component on a tensor rank; whole where the component cannot be split."""
        if tensor not in self._held:
            page = self._strategies.tensor[tensor.strategy]
            self._held[tensor] = [
                float(c.parameter_bytes if page.refusal(c, tensor.degree) else self.share(i, tensor).parameter_bytes)
                for i, c in enumerate(self._graph.components)
            ]
        return self._held[tensor]

    def update(self, index: int, tensor: TensorDegree) -> float:
        """Seconds of an optimizer step on all parameters of component ``index`` on a tensor rank."""
        key = (self.timed[index], tensor)
        if key not in self._updates:
            size, bandwidth = self.share(index, tensor).parameter_bytes, self._cluster.device.memory_bandwidth
            component = self._graph.components[index]
            self._updates[key] = self._times.update(component, tensor.degree, self._optimizer, size, bandwidth)
        return self._updates[key]

    def state_cost(self, index: int, way: Way) -> StateCost:
        """The state of component ``index``, run as ``way`` says, with its costs."""
        key = (self._bucketed[index], way.layout, way.tensor, way.data)
        if key not in self._costs:
            like = (-1 - self.like[index], way.layout, way.tensor, way.data)
            found = self._costs.get(like) or self._costs.setdefault(like, self._new(index, way))
            if found.memory.buckets > 0:
                found = replace(found, costs=copy(found.costs))
                gradients = [c for c in found.traffic if c.phase == "gradient"]
                found.costs.prompt, found.costs.late, *_ = self._sync(index, found.share, gradients, bucketed=True)
            self._costs[key] = found
        return self._costs[key]

    def gathers(self, index: int, way: Way) -> Gathers | None:
        """Seconds of the prefetched gathers for component ``index``, and of those during its backward; None if its
        strategy or device does not prefetch."""
        if not (self.prefetching and self._strategies.data[way.data.strategy].prefetches and way.layout.data > 1):
            return None
        key = (self.settings[index], way.layout, way.tensor, way.data)
        if key not in self._prefetched:
            gathers, front, behind = (self._gathers(i, way) for i in (index, index - 1, index + 1))
            seconds = Gathers(
                forward=gathers["forward"] if front else 0.0,
                backward=gathers["backward"] if behind else 0.0,
                once=gathers["update"] if front else 0.0,
                front=front["backward"] if front else 0.0,
            )
            self._prefetched[key] = seconds
        return self._prefetched[key]

    def _gathers(self, index: int, way: Way) -> dict[str, float]:
        """Seconds of the gathers of component ``index`` by phase; empty if there is no such component, or if it cannot
        run that way."""
        if not 0 <= index < len(self._graph):
            return {}
        component = self._graph.components[index]
        if self._strategies.tensor[way.tensor.strategy].refusal(component, way.tensor.degree):
            return {}
        traffic = self.state_cost(index, way).traffic
        return {
            p: sum(self.links.seconds(c) for c in traffic if c.phase == p and c.op == "all_gather")
            for p in ("forward", "backward", "update")
        }

    def repeated(self, indices: range, way: Way) -> float:
        """Bytes of optimizer state by which the sum over components ``indices``, priced one by one, exceeds what a rank
        holds if they all run as ``way`` says and are wrapped as one unit."""
        page = self._strategies.data[way.data.strategy].of(way.data)
        if type(page).together is DataStrategy.together:
            return 0.0
        summed = sum(self.state_cost(i, way).memory.optimizer for i in indices)
        shares = [self.share(i, way.tensor) for i in indices]
        return summed - page.together(shares, way.layout.data, self._optimizer)

    def _new(self, index: int, way: Way) -> StateCost:
        share, layout = self.share(index, way.tensor), way.layout
        page = self._strategies.data[way.data.strategy].of(way.data)
        traffic = tuple(page.traffic(share, layout.data, layout.inner))
        memory = page.memory(share, layout.data, self._optimizer)
        # On CPUs, stock sharding has no stream of its own: backward waits for reduce-scatters, and forward for weights
        # that are gathered once per step.
        blocking = self._cluster.device.type == "cpu" and not memory.buckets
        tensors = share.num_parameter_tensors
        phases = [[c for c in traffic if c.phase == phase] for phase in PHASES]
        sharding = [[c for c in some if c.op in ("all_gather", "reduce_scatter")] for some in phases]
        overhead_s = tuple(self._overhead_s(some, tensors) for some in sharding)
        link_s = [sum(map(self.links.seconds, some)) for some in phases[:3]]
        update_moved = link_s[2] + overhead_s[2]
        prompt, late, copied, scattered = self._sync(index, share, phases[3], bucketed=memory.buckets > 0)
        if blocking:
            update_moved, prompt = update_moved + prompt, 0.0
        costs = Upkeep(
            update_moved=update_moved, prompt=prompt, late=late, copied=copied, blocking=blocking,
            moving=blocking or bool(phases[0] or phases[1]), shared=self._shared(traffic, layout),
            scattered=scattered, overhead_s=overhead_s, count=tuple(map(launched, phases, PHASES)),
            link_s=tuple(link_s[:2]), launches=self._launches(sharding, tensors), state=memory.state, kept=memory.kept,
            gradients=memory.gradients, optimizer=memory.optimizer, parameters=memory.parameters,
            added=memory.gradients if memory.accumulated is None else memory.accumulated, updating=memory.updating,
            size=share.parameter_bytes, largest=share.largest_parameter_bytes, tensors=tensors,
        )  # fmt: skip
        return StateCost(page, share, memory, traffic, costs)

    def _shared(self, traffic: Sequence[Collective], layout: Layout) -> float:
        if layout.tensor == 1 or self._cluster.overlap.saving <= 0:
            return 0.0
        level, seconds = self.links.level(layout.tensor, 1), [0.0, 0.0]
        for c in traffic:
            if c.ranks > 1:
                seconds[self.links.level(c.ranks, c.stride) == level] += self.links.seconds(c)
        return seconds[True] / (sum(seconds) or 1.0)

    def crossing(self, ends: Ends, source: Layout, target: Layout) -> tuple[Boundary, tuple[Collective, ...]]:
        """The boundary between two layouts, and its traffic per byte of the whole microbatch's tensor."""
        key = (ends, source, target)
        if key not in self._crossings:
            boundary = ends.boundary(source, target)
            self._crossings[key] = boundary, boundary.traffic(1.0)
        return self._crossings[key]

    def between(self, ends: Ends, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Crossings:
        """All boundaries from ``sources`` to ``targets``; those from the first source come first. If one of these is
        empty, the boundaries between each layout of the other and the world outside of a stage."""
        key = (ends, sources, targets)
        if key not in self._between:
            pairs = [(a, b) for a in sources for b in targets]
            pairs = pairs or [*((whole(x), x) for x in targets), *((x, whole(x)) for x in sources)]
            self._between[key] = Crossings([self.crossing(ends, a, b) for a, b in pairs])
        return self._between[key]

    def _overhead_s(self, sharding: Sequence[Collective], tensors: int) -> float:
        """Seconds that a rank spends on copies and calls for these gathers and scatters of one unit of ``tensors``
        tensors, without the time on links. If the cluster has no measurement, copies at memory bandwidth are assumed.
        For asynchronous devices the host's time is not included."""
        costs, device = self._cluster.sharding, self._cluster.device
        if not sharding:
            return 0.0
        if costs is None:
            if not self.async_device or device.memory_bandwidth <= 0:
                return 0.0
            costs = Sharding(unit_s=0.0, byte_s=constant("fsdp_copy_passes") / device.memory_bandwidth)
        unit_s = 0.0 if self.async_device else self._unit_s(tensors)
        return sum(unit_s + costs.byte_s * c.bytes for c in sharding)

    def _launches(self, sharding: Sequence[Sequence[Collective]], tensors: int) -> tuple[float, ...]:
        """Seconds in each phase that the host of an asynchronous device takes to launch its gathers and scatters."""
        return tuple(self._unit_s(tensors) * len(some) if self.async_device and some else 0.0 for some in sharding)

    def _unit_s(self, tensors: int) -> float:
        """Seconds of the host for one gather or scatter of a unit of ``tensors`` tensors, whatever their bytes."""
        costs = self._cluster.sharding
        return constant("fsdp_launch_s") if costs is None else costs.unit_s + costs.moved_tensor_s * tensors

    def most_launched(self, layout: Layout) -> Any:
        """Upper bounds on the host's seconds to launch communication of each component itself, in a forward and in a
        backward, over all ways with this layout: shape (component, pass)."""
        key = (layout.data > 1, layout.tensor)
        if key not in self._launch_bounds:
            each = {i: self._most_launched(self._graph.components[i], *key) for i in set(self.like)}
            self._launch_bounds[key] = np.array([each[i] for i in self.like])
        return self._launch_bounds[key]

    def _most_launched(self, component: Component, sharded: bool, degree: int) -> tuple[float, float]:
        units = MOST_UNITS * self._unit_s(component.num_parameter_tensors) if sharded else 0.0
        pages = [p for p in self._strategies.tensor.values() if not p.refusal(component, degree)]
        inner = [p.traffic(component, degree, 1) for p in pages] if degree > 1 else []
        forward = max((launched(x, "forward") for x in inner), default=0)
        passes = max((launched(x, "forward") + launched(x, "backward") for x in inner), default=0)
        return units + self.collective_s * forward, units + self.collective_s * passes

    def _sync(
        self, index: int, share: Share, collectives: list[Collective], *, bucketed: bool
    ) -> tuple[float, float, float, float]:
        """Seconds of gradient synchronisation (prompt, late, copied, scattered): messages sent when the component's
        backward ends, messages sent with a later bucket, copies, and the reduce-scatters in ``prompt``.

        ``bucketed``: an all_reduce is sent in buckets together with neighbours, so it costs its share of the time of a
        full bucket. Anything else is sent component by component.
        """
        prompt = late = copied = scattered = 0.0
        for c in collectives:
            share_sent = remaining(self._compression, c, share.num_parameter_tensors, whole=bucketed)
            if c.op != "all_reduce" or not bucketed:
                seconds = self.links.time(c.op, share_sent * c.bytes, c.ranks, c.stride)
                prompt += seconds
                scattered += seconds * (c.op == "reduce_scatter")
                continue
            message = bucket_bytes(self._graph, c.bytes, share.num_parameter_tensors)
            seconds = self.links.time(c.op, share_sent * message, c.ranks, c.stride) * c.bytes / message
            prompt += seconds * self.releases[index].prompt
            late += seconds * (1 - self.releases[index].prompt)
            if self._cluster.device.memory_bandwidth > 0:
                passes = constant("ddp_bucket_passes") + (constant("compression_passes") if share_sent < 1 else 0.0)
                copied += passes * c.bytes / self._cluster.device.memory_bandwidth
        return prompt, late, copied, scattered


def _settings(graph: LayerGraph, timed: Sequence[int]) -> Iterator[tuple[object, ...]]:
    """For each component, all of it and of its neighbours that its cost depends on: kinds of both, and of the nearest
    ones with parameters; its own place, where parameters in front exceed its own and those behind it
    (:func:`asa.interfaces.units.gathered_once`)."""
    held = [k if c.parameter_bytes else None for k, c in zip(timed, graph.components, strict=True)]
    front, behind = _nearest(held), _nearest(held[::-1])[::-1]
    for i, k in enumerate(timed):
        place = None if front[i] in (None, k, behind[i]) else i
        yield k, *timed[max(0, i - 1) : i + 2], i == 0, front[i], behind[i], place


def _nearest(held: Sequence[int | None]) -> list[int | None]:
    """For each entry the last one in front of it that is not None."""
    nearest: list[int | None] = [None]
    for k in held[:-1]:
        nearest.append(nearest[-1] if k is None else k)
    return nearest
