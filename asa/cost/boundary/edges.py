"""What lies between components, and where stages begin and end: seconds and bytes of boundaries."""

from __future__ import annotations

from dataclasses import replace

from asa.cost.boundary.ends import Ends
from asa.cost.constants import constant
from asa.cost.memory.peak import Footprint, margin
from asa.cost.shards import Keeping
from asa.cost.states import States
from asa.cost.step import BoundaryCost
from asa.cost.traffic.buckets import wrapper_seconds
from asa.cost.traffic.collectives import Links
from asa.cost.traffic.launching import Launching, launched
from asa.ir.graph import LayerGraph
from asa.ir.layout import Boundary, Layout, largest_shard
from asa.ir.transfer import UNDER_WAY, whole


class Edges:
    """Boundaries of one model on stages of one width, ``microbatch`` samples at a time over all ranks,
    ``num_microbatches`` to a step; ``keeping`` says how much of a tensor a rank has. Each is priced once.
    ``launching``: what devices wait for of their hosts, where these work apart."""

    def __init__(
        self, graph: LayerGraph, states: States, keeping: Keeping, *, microbatch: int, num_microbatches: int,
        launching: Launching | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.states, self.keeping = graph, states, keeping
        self.microbatch, self.num_microbatches = microbatch, num_microbatches
        self.launching = launching
        self.links: Links = states.links
        self._inlets: dict[tuple[object, ...], BoundaryCost] = {}
        self._outlets: dict[tuple[object, ...], BoundaryCost] = {}
        self._boundaries: dict[tuple[object, ...], BoundaryCost] = {}
        self._between: dict[tuple[int, Layout, Layout], BoundaryCost] = {}
        self._errors: dict[Layout, float] = {}
        self._wrappers: dict[Layout, float] = {}

    def alike(self, index: int) -> tuple[object, ...]:
        """What a boundary in front of component ``index`` depends on, beside the layouts."""
        return (*self.form(index), self._like(index - 1), self._like(index))

    def form(self, index: int) -> tuple[float, Ends]:
        """Bytes of a sample that cross the boundary in front of component ``index``, and its two sides."""
        before, after = self.graph.components[index - 1], self.graph.components[index]
        return before.output_bytes_per_sample, Ends.between(before, after)

    def _like(self, index: int) -> int:
        """The component whose boundaries those of component ``index`` equal."""
        return -1 if self.launching is None else self.states.timed[index]

    def boundary(self, index: int, source: Layout, target: Layout) -> BoundaryCost:
        """The boundary in front of component ``index`` (1 <= index < number of components)."""
        here = (index, source, target)
        if here not in self._between:
            self._between[here] = self._boundary(index, source, target)
        return self._between[here]

    def _boundary(self, index: int, source: Layout, target: Layout) -> BoundaryCost:
        key = (self.alike(index), source, target)
        if key not in self._boundaries:
            size, ends = self.form(index)
            found = self._crossing(ends, source, target, size * self.microbatch)
            if self.launching is not None:
                counts = self._counts(ends, source, target)
                found = _waiting(found, self.launching.between(index, source, target, *counts))
            self._boundaries[key] = found
        return self._boundaries[key]

    def _counts(self, ends: Ends, source: Layout, target: Layout) -> tuple[int, int]:
        """How many collectives a boundary launches forward and backward."""
        _, traffic = self.states.crossing(ends, source, target)
        return launched(traffic, "forward"), launched(traffic, "backward")

    def _crossing(
        self, ends: Ends, source: Layout, target: Layout, size: float, *, inside: bool = True
    ) -> BoundaryCost:
        boundary, traffic = self.states.crossing(ends, source, target)
        wrapper = self.wrapper(target) if inside and source != target else 0.0
        gathered = size * sum(c.bytes for c in traffic if c.op == "all_gather" and c.phase == "backward")
        forward, backward = (
            sum(self.links.taken(c.op, size * c.bytes, c.ranks, c.stride) for c in traffic if c.phase == phase)
            for phase in ("forward", "backward")
        )
        blocking = self.num_microbatches * (forward + backward) + wrapper
        return BoundaryCost(
            num_microbatches=self.num_microbatches,
            forward_s=forward,
            backward_s=backward,
            wrapper_s=wrapper,
            link_error_s=blocking * max(self.link_error(source), self.link_error(target)),
            footprint=Footprint(
                activations=self._converted(boundary, size) * margin(),
                transient=gathered * margin(),
            ),
        )

    def _converted(self, boundary: Boundary, size: float) -> float:
        """Bytes of what a boundary makes of ``size`` bytes and the target keeps, where that is another tensor."""
        source, target = boundary.source, boundary.target
        if boundary.cuts_tokens:
            tokens = boundary.entry_tokens
            return self.keeping.part(size, target) * largest_shard(tokens, target.tensor) / tokens
        if source.data != target.data or boundary.gathers_tokens:
            return self.keeping.part(size, target)
        return 0.0

    def inlet(self, index: int, layout: Layout) -> BoundaryCost:
        """Where component ``index`` begins a stage: it holds what it was sent, and its gradient leaves whole. Of
        several microbatches, the next is on its way, and two gradients may wait for the stage before to take them."""
        size = self.graph.components[index - 1].output_bytes_per_sample if index else 0.0
        ends = Ends.between(None, self.graph.components[index]) if index else None
        key = (size, ends, layout, self._like(index))
        if key not in self._inlets:
            found = self.entry(layout) if ends is None else self._inlet(self.microbatch * size, ends, layout)
            if ends is not None and self.launching is not None:
                counts = self._counts(ends, whole(layout), layout)
                found = _waiting(found, self.launching.entered(index, layout, *counts))
            self._inlets[key] = found
        return self._inlets[key]

    def _inlet(self, size: float, ends: Ends, layout: Layout) -> BoundaryCost:
        found = self._crossing(ends, whole(layout), layout, size, inside=False)
        part, m = self.keeping.part(size, layout), self.num_microbatches
        held = Footprint(
            state=part * (1 + min(UNDER_WAY, m - 1)) if m > 1 else 0.0,
            activations=part * margin(),
            transient=found.footprint.transient + part,
        )
        return replace(found, wrapper_s=self.wrapper(layout), footprint=held)

    def outlet(self, index: int, layout: Layout) -> BoundaryCost:
        """Where component ``index`` ends a stage: its output is made whole; the loss, or a transfer, comes next. Of
        several microbatches, the gradient of the next is on its way."""
        component = self.graph.components[index]
        size, ends = component.output_bytes_per_sample, Ends.between(component, None)
        sent = index + 1 < len(self.graph)
        key = (size, ends, layout, sent, self._like(index))
        if key not in self._outlets:
            found = self._crossing(ends, layout, whole(layout), self.microbatch * size, inside=False)
            if self.launching is not None:
                counts = self._counts(ends, layout, whole(layout))
                found = _waiting(found, self.launching.left(index, layout, *counts, sent=sent))
            if self.num_microbatches > 1 and sent:
                coming = self.keeping.part(self.microbatch * size, layout)
                found = replace(found, footprint=replace(found.footprint, state=coming))
            self._outlets[key] = found
        return self._outlets[key]

    def entry(self, layout: Layout) -> BoundaryCost:
        """The model's input: every rank reads its own samples of all microbatches, nothing moves and no gradient is
        wanted."""
        later = (self.num_microbatches - 1) * self.keeping.shards.largest(layout) * self.graph.input_bytes_per_sample
        return BoundaryCost(
            num_microbatches=self.num_microbatches,
            forward_s=0.0,
            backward_s=0.0,
            wrapper_s=self.wrapper(layout),
            link_error_s=0.0,
            footprint=Footprint(state=(self.keeping.input(layout) + later) * margin()),
        )

    def wrapper(self, layout: Layout) -> float:
        """Seconds of the wrapper that begins with a layout."""
        if layout not in self._wrappers:
            self._wrappers[layout] = wrapper_seconds(self.graph, self.links, layout.data, layout.inner)
        return self._wrappers[layout]

    def link_error(self, layout: Layout) -> float:
        if layout not in self._errors:
            assumed = self.links.assumed(layout.data, layout.inner) or self.links.assumed(layout.tensor)
            self._errors[layout] = constant("link_error_assumed" if assumed else "link_error_measured")
        return self._errors[layout]


def _waiting(cost: BoundaryCost, launched: tuple[float, float]) -> BoundaryCost:
    """With what a device waits for of its host, forward and backward."""
    ahead, back = launched
    return replace(cost, forward_s=cost.forward_s + ahead, backward_s=cost.backward_s + back) if ahead + back else cost
