"""A plan as a uniform grid of ranks: replicas or shards, times tensor degree, times stages, as other tools count."""

from __future__ import annotations

from dataclasses import dataclass

from asa.ir.plan import DataStrategyName, Plan

STAGED = ("layers", "gpipe", "1f1b")
"""Whole strategies with several stages."""
_DATA: dict[str, DataStrategyName] = {"ddp": "replicate", "zero1": "zero1", "zero2": "zero2", "fsdp": "zero3"}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A uniform grid. ``data`` ranks have different samples, with state sharded over ``shards`` of them (1: not
    sharded); ``tensor`` ranks split layers, and tokens too if ``sequence``; ``stages`` are consecutive."""

    strategy: DataStrategyName
    data: int
    shards: int
    tensor: int
    sequence: bool
    stages: int

    @property
    def text(self) -> str:
        """Short description, such as ``hybrid:d2t4``."""
        sizes = zip("dtp", (self.data, self.tensor, self.stages), strict=True)
        return "hybrid:" + "".join(f"{letter}{n}" for letter, n in sizes if n > 1)


def grid_of(plan: Plan) -> Grid | None:
    """The grid of a plan; None if stages differ in width or components in layout. Components that cannot be split are
    held whole by every rank of their tensor group."""
    widths = {len(s.ranks) for s in plan.stages}
    if len(widths) != 1 or any(s.weights for s in plan.stages):
        return None
    width, tensor = widths.pop(), max(c.tensor.degree for c in plan.components)
    data = width // tensor
    cut = [c for c in plan.components if c.data.degree > 1]
    strategies = {(c.data.strategy, c.data.shards) for c in cut} or {("replicate", None)}
    even = all(c.tensor.degree in (1, tensor) and c.data.degree == data for c in plan.components)
    if width % tensor or not even or len(strategies) != 1:
        return None
    strategy, shards = strategies.pop()
    return Grid(
        strategy=strategy,
        data=data,
        shards=shards or (1 if strategy == "replicate" else data),
        tensor=tensor,
        sequence=any(c.tensor.strategy == "sequence" for c in plan.components),
        stages=len(plan.stages),
    )


def grid_as(plan: Plan, name: str) -> Grid:
    """The grid of the plan's ranks under the whole strategy ``name``; the plan's own for ``hybrid``."""
    grid, ranks = grid_of(plan), plan.num_ranks
    if grid is not None and name in ("hybrid", "hsdp", "tensor"):
        return grid
    strategy: DataStrategyName = _DATA.get(name, "replicate")
    data = ranks if name in _DATA else 1
    return Grid(
        strategy=strategy,
        data=data,
        shards=1 if strategy == "replicate" else data,
        tensor=ranks if name == "tensor" else 1,
        sequence=False,
        stages=len(plan.stages) if name in STAGED else 1,
    )
