"""Boundaries and ends of stages of all components at once: arrays, an entry a pair of layouts, or a layout.

What :class:`asa.cost.boundary.edges.Edges` says of one, by the same formulas and in the same order, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asa.cost.boundary.crossings import Crossings, even
from asa.cost.boundary.edges import Edges
from asa.cost.boundary.ends import Ends
from asa.cost.memory.peak import margin
from asa.cost.step import BoundaryCost
from asa.ir.layout import Layout
from asa.ir.transfer import UNDER_WAY


class AtOnce:
    """Boundaries of ``edges``. Arrays are component x column x pair (or layout); columns: seconds forward, backward and
    of the wrapper, bytes of state, activations and transient."""

    def __init__(self, edges: Edges) -> None:
        self._edges, self._components = edges, edges.graph.components

    def boundaries(self, indices: Sequence[int], sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Any:
        """All boundaries in front of some components, those from the first of ``sources`` first."""
        x = self._edges
        if not even(sources):
            return np.array([_columns([x.boundary(i, a, b) for a in sources for b in targets]) for i in indices])
        sizes, ends = zip(*map(x.form, indices), strict=True)
        found, counts, moved = self._crossed(sizes, ends, lambda e: x.states.between(e, sources, targets))
        if x.launching is not None:
            found[:, :2] += np.stack(x.launching.all_between(indices, sources, targets, *counts), axis=1)
        found[:, 2] = np.where(moved, np.tile([x.wrapper(b) for b in targets], len(sources)), 0.0)
        return found

    def inlets(self, indices: Sequence[int], layouts: tuple[Layout, ...]) -> Any:
        """:meth:`Edges.inlet` of some components in each of ``layouts``."""
        x, m = self._edges, self._edges.num_microbatches
        if not even(layouts):
            return np.array([_columns([x.inlet(i, layout) for layout in layouts]) for i in indices])
        sizes = [self._components[max(0, i - 1)].output_bytes_per_sample for i in indices]
        ends = [Ends.between(None, self._components[i]) for i in indices]
        found, counts, _ = self._crossed(sizes, ends, lambda e: x.states.entering(e, layouts))
        if x.launching is not None:
            found[:, :2] += np.stack(x.launching.all_entered(indices, layouts, *counts), axis=1)
        part = self._parts(sizes, layouts)
        found[:, 2] = [x.wrapper(layout) for layout in layouts]
        found[:, 3] = part * (1 + min(UNDER_WAY, m - 1)) if m > 1 else 0.0
        found[:, 4], found[:, 5] = part * margin(), found[:, 5] + part
        for k in (k for k, i in enumerate(indices) if not i):
            found[k] = _columns([x.entry(layout) for layout in layouts])
        return found

    def outlets(self, indices: Sequence[int], layouts: tuple[Layout, ...]) -> Any:
        """:meth:`Edges.outlet`, likewise."""
        x = self._edges
        if not even(layouts):
            return np.array([_columns([x.outlet(i, layout) for layout in layouts]) for i in indices])
        sizes = [self._components[i].output_bytes_per_sample for i in indices]
        ends = [Ends.between(self._components[i], None) for i in indices]
        sent = np.array([[i + 1 < len(self._components)] for i in indices])
        found, counts, _ = self._crossed(sizes, ends, lambda e: x.states.leaving(e, layouts))
        if x.launching is not None:
            found[:, :2] += np.stack(x.launching.all_left(indices, layouts, *counts, sent=sent), axis=1)
        if x.num_microbatches > 1:
            found[:, 3] = np.where(sent, self._parts(sizes, layouts), 0.0)
        return found

    def _parts(self, sizes: Sequence[float], layouts: tuple[Layout, ...]) -> Any:
        """Bytes a rank holds of whole tensors of so many bytes a sample: tensor x layout."""
        return self._edges.microbatch * np.array(sizes)[:, None] / np.array([x.data for x in layouts])

    def _crossed(
        self, sizes: Sequence[float], ends: Sequence[Ends], crossings: Callable[[Ends], Crossings]
    ) -> tuple[Any, Any, Any]:
        """What crosses in front of or behind some components, so many bytes a sample; how many collectives are
        launched, pass x component x pair; which pairs differ."""
        parts: list[tuple[list[int], Any, Any]] = []
        moved: Any = None
        for one in dict.fromkeys(ends):
            which = [k for k, e in enumerate(ends) if e == one]
            distinct, like = np.unique([self._edges.microbatch * sizes[k] for k in which], return_inverse=True)
            x = crossings(one).priced(self._edges.links, distinct.tolist())
            none, moved = np.zeros_like(x.forward), x.moved
            columns = np.stack([x.forward, x.backward, none, none, x.activations, x.transient], axis=1)
            parts.append((which, columns[like], np.array(x.launched)[:, None]))
        found = np.zeros((len(ends), *parts[0][1].shape[1:]))
        counts = np.zeros((2, len(ends), found.shape[2]))
        for which, columns, launches in parts:
            found[which], counts[:, which] = columns, launches
        return found, counts, moved


def _columns(costs: Sequence[BoundaryCost]) -> Any:
    """Column x cost."""
    held = [(x.footprint.state, x.footprint.activations, x.footprint.transient) for x in costs]
    return np.array([(x.forward_s, x.backward_s, x.wrapper_s, *h) for x, h in zip(costs, held, strict=True)]).T
