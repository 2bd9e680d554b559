"""Groups of ranks that each run the same plan on a share of the batch, and synchronize at intervals."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from asa.executor.model.exchange import united
from asa.executor.model.groups import Groups, Purpose, groups_of
from asa.executor.model.position import Position
from asa.ir.layout import bounds
from asa.ir.plan import Plan
from asa.sharding.collectives.axis import SOLO, Axis


class Grouped:
    """The group to which process ``rank`` of a run belongs, and its axes to other groups. ``plan`` is that of all
    groups.

    Group g consists of the n processes from ``g * n`` on, where n is the number of ranks of a group. Every process of
    the run must construct one (collective).
    """

    def __init__(self, plan: Plan, rank: int, timeout_s: float) -> None:
        self.plan, self.count = plan, plan.groups
        each = plan.num_ranks
        self.index, inner_rank = divmod(rank, each)
        self.processes = tuple(range(self.index * each, (self.index + 1) * each))
        self.all_processes = tuple(range(plan.num_processes))
        inner = plan.of_group()
        needed = groups_of(inner)
        self.inner_groups: Groups | None = None
        for g in range(self.count if needed else 0):
            members = tuple(range(g * each, (g + 1) * each))
            groups = Groups(inner_rank if g == self.index else None, needed, timeout_s, members)
            self.inner_groups = groups if g == self.index else self.inner_groups
        meeting: list[tuple[Purpose, tuple[int, ...]]] = [("gradient", self._everywhere((p,))) for p in range(each)]
        for stage in inner.stages:
            position = Position.of(inner, stage.ranks[0])
            for layout in dict.fromkeys(position.layouts):
                meeting += [("gradient", self._everywhere(position.world(g))) for g in layout.data_groups()]
        self._outside = Groups(rank, list(dict.fromkeys(meeting)), timeout_s)
        self.axis = self.all_of((inner_rank,))

    def _everywhere(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Processes of all groups that run one of the ranks ``ranks`` of their group's plan."""
        return tuple(g * self.plan.num_ranks + r for g in range(self.count) for r in ranks)

    def all_of(self, ranks: tuple[int, ...]) -> Axis:
        """This process's axis among the processes of all groups that run one of the ranks ``ranks`` of their group's
        plan."""
        return self._outside.axis("gradient", self._everywhere(ranks)) if self.count > 1 else SOLO

    def united(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Union of the named CPU tensors that all ranks of this group pass; each name comes from one rank
        (collective)."""
        everyone = tuple(range(len(self.processes)))
        return united(tensors, None if self.inner_groups is None else self.inner_groups.axis("state", everyone))

    def rows(self, batch: int) -> slice:
        """Rows of a batch of ``batch`` samples that belong to this group."""
        return slice(*bounds(batch, self.count, self.index))

    def close(self) -> None:
        """Destroy the process groups that connect this group to others."""
        self._outside.close()
