"""Prices of the boundaries between components, and of the two ends of a stage (inlet and outlet), as arrays.

The seven columns: seconds of forward, of backward and of the wrapper; bytes of state, activations and transient; the
standard error in seconds. A single boundary is priced as an array of length one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from asa.cost.boundary.crossings import Crossings, Ends
from asa.cost.constants import constant
from asa.cost.memory.peak import Footprint, made_ready, margin
from asa.cost.shards import Keeping
from asa.cost.states import States
from asa.cost.step import BoundaryCost
from asa.cost.traffic.buckets import wrapper_seconds
from asa.cost.traffic.collectives import Links
from asa.cost.traffic.launching import Launching
from asa.ir.graph import LayerGraph
from asa.ir.layout import Layout
from asa.ir.transfer import UNDER_WAY, whole


class Edges:
    """Boundaries of one model on stages of one width, each priced once. A step has ``num_microbatches`` of
    ``microbatch`` samples over all ranks. ``keeping`` gives the bytes of a tensor on a rank; ``launching`` the seconds
    that asynchronous devices wait for their hosts."""

    def __init__(
        self, graph: LayerGraph, states: States, keeping: Keeping, *, microbatch: int, num_microbatches: int,
        launching: Launching | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.states, self.keeping = graph, states, keeping
        self.microbatch, self.num_microbatches = microbatch, num_microbatches
        self.launching = launching
        self.links: Links = states.links
        self._prices: dict[tuple[object, ...], BoundaryCost] = {}
        self._errors: dict[Layout, float] = {}
        self._wrappers: dict[Layout, float] = {}

    def boundary(self, index: int, source: Layout, target: Layout) -> BoundaryCost:
        """The price of the boundary in front of component ``index`` (1 <= index < number of components)."""
        return self._single(self.boundaries, index, source, target)

    def inlet(self, index: int, layout: Layout) -> BoundaryCost:
        """The price of beginning a stage with component ``index``."""
        return self._single(self.inlets, index, layout)

    def outlet(self, index: int, layout: Layout) -> BoundaryCost:
        """The price of ending a stage with component ``index``."""
        return self._single(self.outlets, index, layout)

    def _single(self, price: Callable[..., Any], index: int, *layouts: Layout) -> BoundaryCost:
        """The price of one boundary, computed once for all equal ones."""
        key = (price.__name__, self.states.fronts[index], self.states.ends[index], *layouts)
        cost = self._prices.get(key)
        if cost is None:
            columns = price([index], *((x,) for x in layouts))[0, :, 0].tolist()
            forward, backward, wrapper, state, activations, transient, error = columns
            cost = self._prices[key] = BoundaryCost(
                num_microbatches=self.num_microbatches, forward_s=forward, backward_s=backward, wrapper_s=wrapper,
                link_error_s=error, footprint=Footprint(state=state, activations=activations, transient=transient),
            )  # fmt: skip
        return cost

    def boundaries(self, indices: Sequence[int], sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Any:
        """Prices of the boundaries in front of components ``indices``: shape (component, column, pair of layouts).
        Pairs with the first source come first."""
        sizes, ends = zip(*(self.states.forms[i] for i in indices), strict=True)
        wrappers = np.tile([self.wrapper(b) for b in targets], len(sources))
        errors = [max(self.link_error(a), self.link_error(b)) for a in sources for b in targets]
        crossings = partial(self.states.between, sources=sources, targets=targets)
        prices, counts = self._crossed(sizes, ends, crossings, errors, wrappers)
        if self.launching is not None:
            prices[:, :2] += np.stack(self.launching.at_boundaries(indices, sources, targets, *counts), axis=1)
        return prices

    def inlets(self, indices: Sequence[int], layouts: tuple[Layout, ...]) -> Any:
        """Prices of beginning a stage with components ``indices``: shape (component, column, layout). A stage holds the
        tensor it received, and sends back the whole gradient. With several microbatches it also holds the next tensor,
        which is being received, and up to two gradients that wait to be sent."""
        return self._of_distinct(self._inlets, indices, layouts)

    def _inlets(self, indices: Sequence[int], layouts: tuple[Layout, ...]) -> Any:
        m, components = self.num_microbatches, self.graph.components
        sizes = [components[max(0, i - 1)].output_bytes_per_sample for i in indices]
        ends = [Ends.between(None, components[i]) for i in indices]
        crossings = partial(self.states.between, sources=(), targets=layouts)
        prices, counts = self._crossed(sizes, ends, crossings, self._end_errors(layouts), 0.0)
        if self.launching is not None:
            prices[:, :2] += np.stack(self.launching.at_inlets(indices, layouts, *counts), axis=1)
        part = self._parts(sizes, layouts)
        prices[:, 2] = [self.wrapper(layout) for layout in layouts]
        prices[:, 3] = part * (1 + min(UNDER_WAY, m - 1)) if m > 1 else 0.0
        prices[:, 4], prices[:, 5] = part * margin(), prices[:, 5] + part
        for k in (k for k, i in enumerate(indices) if not i):
            prices[k] = np.array([self._entry(layout) for layout in layouts]).T
        return prices

    def outlets(self, indices: Sequence[int], layouts: tuple[Layout, ...]) -> Any:
        """Prices of ending a stage with components ``indices``: shape (component, column, layout). The output is made
        whole, for the loss or for the next stage. With several microbatches the stage also holds the next gradient,
        which is being received."""
        return self._of_distinct(self._outlets, indices, layouts)

    def _outlets(self, indices: Sequence[int], layouts: tuple[Layout, ...]) -> Any:
        components = self.graph.components
        sizes, ends = zip(*(self.states.outputs[i] for i in indices), strict=True)
        sent = np.array([[i + 1 < len(components)] for i in indices])
        crossings = partial(self.states.between, sources=layouts, targets=())
        prices, counts = self._crossed(sizes, ends, crossings, self._end_errors(layouts), 0.0)
        if self.launching is not None:
            prices[:, :2] += np.stack(self.launching.at_outlets(indices, layouts, *counts, sent=sent), axis=1)
        if self.num_microbatches > 1:
            prices[:, 3] = np.where(sent, self._parts(sizes, layouts), 0.0)
        return prices

    def _of_distinct(
        self, price: Callable[[Sequence[int], tuple[Layout, ...]], Any], indices: Sequence[int],
        layouts: tuple[Layout, ...],
    ) -> Any:  # fmt: skip
        """Prices of an end of a stage, computed once for all components whose ends are equal."""
        kinds = [(self.states.fronts[i], self.states.ends[i]) for i in indices]
        some = dict(zip(kinds, indices, strict=True))
        at = {kind: k for k, kind in enumerate(some)}
        return price(list(some.values()), layouts)[[at[kind] for kind in kinds]]

    def _end_errors(self, layouts: Sequence[Layout]) -> list[float]:
        return [max(self.link_error(whole(x)), self.link_error(x)) for x in layouts]

    def _parts(self, sizes: Sequence[float], layouts: Sequence[Layout]) -> Any:
        """Bytes that a rank holds of whole tensors of ``sizes`` bytes per sample: shape (tensor, layout)."""
        return np.array([[self.keeping.part(self.microbatch * size, x) for x in layouts] for size in sizes])

    def _crossed(
        self, sizes: Sequence[float], ends: Sequence[Ends], crossings: Callable[[Ends], Crossings], errors: Any,
        wrappers: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Prices without waiting for the host, shape (component, column, pair), and the number of collectives, shape
        (pass, component, pair). ``sizes`` are in bytes per sample."""
        parts: list[tuple[list[int], Any, Any]] = []
        for rule in dict.fromkeys(ends):
            which = [k for k, e in enumerate(ends) if e == rule]
            crossing = [self.microbatch * sizes[k] for k in which]
            distinct = list(dict.fromkeys(crossing))
            like = [distinct.index(x) for x in crossing]
            x = crossings(rule).priced(self.links, distinct, self.keeping.part)
            none, wrapper = np.zeros_like(x.forward), np.where(x.moved, wrappers, 0.0)
            error = (self.num_microbatches * (x.forward + x.backward) + wrapper) * errors
            columns = np.stack([x.forward, x.backward, none + wrapper, none, x.activations, x.transient, error], axis=1)
            parts.append((which, columns[like], np.array(x.launched)[:, None]))
        prices = np.zeros((len(ends), *parts[0][1].shape[1:]))
        counts = np.zeros((2, len(ends), prices.shape[2]))
        for which, columns, launches in parts:
            prices[which], counts[:, which] = columns, launches
        return prices, counts

    def _entry(self, layout: Layout) -> list[float]:
        """The seven columns for the model's input. Every rank reads its own samples of all microbatches, without
        communication. The raw data is held while the input is prepared, when gradients outside buckets are not held."""
        later = (self.num_microbatches - 1) * self.keeping.shards.largest(layout) * self.graph.input_bytes_per_sample
        size = self.keeping.input(layout) + later
        gradients = self.graph.components[0].parameter_bytes / layout.tensor if layout.data == 1 else 0.0
        ready = max(0.0, size * made_ready(self.graph.input_shape) * margin() - gradients)
        return [0.0, 0.0, self.wrapper(layout), size * margin(), 0.0, ready, 0.0]

    def wrapper(self, layout: Layout) -> float:
        """Seconds per step of the data-parallel wrapper that begins with a layout."""
        if layout not in self._wrappers:
            self._wrappers[layout] = wrapper_seconds(self.graph, self.links, layout.data, layout.inner)
        return self._wrappers[layout]

    def link_error(self, layout: Layout) -> float:
        """The relative standard error of communication in a layout."""
        if layout not in self._errors:
            assumed = self.links.assumed(layout.data, layout.inner) or self.links.assumed(layout.tensor)
            self._errors[layout] = constant("link_error_assumed" if assumed else "link_error_measured")
        return self._errors[layout]
