"""Configurations of one component and boundaries between two, stored as arrays. Objects are made on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from asa.cost.way import Way
from asa.planner.stage.problem import Config, Edge

COLUMNS = ("forward", "backward", "bucket", "once", "prompt", "late", "window", "state", "activations", "gradients",
           "transient", "added")  # fmt: skip
"""Columns of :attr:`Row.values`, named as in :class:`asa.planner.stage.problem.Config`."""

JOINT = ("cost", "forward", "backward", "once", "state", "activations", "transient")
"""Columns of :attr:`Joints.figures` and :attr:`Sides.figures`, named as in :class:`asa.planner.stage.problem.Edge`."""


class Row(Sequence[Config]):
    """The configurations of one component. ``values`` is configuration x column. ``layout`` and ``work`` have an entry
    for each configuration; ``ways`` are the ways for which they stand."""

    def __init__(self, values: Any, work: Any, layout: Any, ways: Sequence[Way]) -> None:
        self.values, self.work, self.layout, self.ways = values, work, layout, ways
        self._made: dict[int, Config] = {}

    def __len__(self) -> int:
        return len(self.ways)

    @overload
    def __getitem__(self, index: int) -> Config: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Config, ...]: ...
    def __getitem__(self, index: int | slice) -> Config | tuple[Config, ...]:
        if isinstance(index, slice):
            return tuple(self[k] for k in range(*index.indices(len(self))))
        index = range(len(self))[index]
        if index not in self._made:
            way = self.ways[index]
            self._made[index] = Config(
                layout=int(self.layout[index]),
                data=way.data,
                tensor=way.tensor,
                checkpoint=way.checkpoint,
                offload=way.offload,
                work=float(self.work[index]),
                **dict(zip(COLUMNS, self.values[index].tolist(), strict=True)),
            )
        return self._made[index]


class Sides(Mapping[int, Edge]):
    """Costs of beginning, or of ending, a stage in each of ``layouts`` (by number). ``figures`` is column x layout."""

    def __init__(self, layouts: Sequence[int], figures: Any) -> None:
        self.layouts, self.figures = layouts, figures

    def __len__(self) -> int:
        return len(self.layouts)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layouts)

    def __getitem__(self, layout: int) -> Edge:
        if layout not in self.layouts:
            raise KeyError(layout)
        return Edge(**dict(zip(JOINT, self.figures[:, self.layouts.index(layout)].tolist(), strict=True)))


class Joints(Mapping[tuple[int, int], Edge]):
    """Boundaries from each of ``sources`` to each of ``targets`` (layouts by number). ``source`` and ``target`` have an
    entry for each boundary; ``figures`` is column x boundary."""

    def __init__(self, sources: Sequence[int], targets: Sequence[int], figures: Any) -> None:
        self.source = np.repeat(np.array(sources, dtype=np.int64), len(targets))
        self.target = np.tile(np.array(targets, dtype=np.int64), len(sources))
        self.figures = figures
        self._places: dict[tuple[int, int], int] = {}

    @property
    def places(self) -> dict[tuple[int, int], int]:
        """The index of each boundary in ``figures``."""
        if not self._places:
            pairs = zip(self.source.tolist(), self.target.tolist(), strict=True)
            self._places = {pair: k for k, pair in enumerate(pairs)}
        return self._places

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.places)

    def __getitem__(self, pair: tuple[int, int]) -> Edge:
        return Edge(**dict(zip(JOINT, self.figures[:, self.places[pair]].tolist(), strict=True)))
