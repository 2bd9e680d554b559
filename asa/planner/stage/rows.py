"""The configurations of one component as an array, made into objects when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from asa.cost.way import Way
from asa.planner.stage.problem import Config

COLUMNS = ("forward", "backward", "bucket", "once", "prompt", "late", "window", "state", "activations", "gradients",
           "transient")  # fmt: skip
"""Of :attr:`Row.values`, named as in :class:`asa.planner.stage.problem.Config`."""


class Row(Sequence[Config]):
    """``values``: configuration x column; ``layout`` and ``work``: an entry a configuration; ``ways``: what each of
    them stands for."""

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
