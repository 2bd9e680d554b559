"""Process groups that a plan needs. Every process creates all of them, once, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from inspect import signature
from itertools import pairwise
from typing import Any, Literal

import torch.distributed as dist

from asa.errors import UnavailableError
from asa.executor.model.position import Position
from asa.ir.layout import Boundary, Layout, gather_groups
from asa.ir.plan import Plan
from asa.ir.transfer import hops, whole
from asa.sharding.collectives.axis import Axis

Purpose = Literal["gradient", "activation", "ahead", "back", "state"]
"""Purpose of a group. Gradient buckets are sent during backward, and activations inside it; neither may wait in a queue
behind the other. ``ahead`` and ``back`` are the two directions between consecutive stages. ``state`` connects all ranks
on the host."""


def rehearsed() -> bool:
    """Whether this process is the only real rank of its world (:mod:`asa.executor.measuring.rehearsal`)."""
    return dist.get_backend() == "fake"


class Groups:
    """The axes of one rank, by purpose and member ranks. Every process of the run must construct one, member or not.

    ``rank`` is that of the plan; None for a process that runs no rank. ``processes`` are the processes that run the
    ranks of the plan, in their order; process i runs rank i if it is None.
    """

    def __init__(
        self, rank: int | None, needed: Sequence[tuple[Purpose, tuple[int, ...]]], timeout_s: float = 600.0,
        processes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.rank = rank
        self._axes: dict[tuple[Purpose, tuple[int, ...]], Axis] = {}
        host = None if rehearsed() else "gloo"
        for purpose, ranks in needed:
            backend = host if purpose == "state" else None
            members = list(ranks) if processes is None else [processes[r] for r in ranks]
            group = dist.new_group(members, timeout=timedelta(seconds=timeout_s), backend=backend, **_in_order(members))
            if isinstance(group, dist.ProcessGroup):
                assert rank is not None
                self._axes[purpose, ranks] = Axis(size=len(ranks), index=ranks.index(rank), group=group)

    def axis(self, purpose: Purpose, ranks: tuple[int, ...]) -> Axis:
        """This rank's axis among ``ranks``.

        Raises:
            KeyError: the group was not requested when the groups were made.
        """
        if len(ranks) == 1:
            return Axis(size=1, index=0)
        return self._axes[purpose, ranks]

    def close(self) -> None:
        """Destroy all process groups, for instance before those of another plan are created."""
        for axis in self._axes.values():
            if axis.group is not None:
                dist.destroy_process_group(axis.group)
        self._axes.clear()


def _in_order(members: Sequence[int]) -> dict[str, Any]:
    """Options of ``new_group`` that keep ``members`` in the given order, that of the plan's ranks.

    Raises:
        UnavailableError: this version of torch always sorts the members.
    """
    if all(a < b for a, b in pairwise(members)):
        return {}
    if "sort_ranks" not in signature(dist.new_group).parameters:
        raise UnavailableError(
            f"a group of processes {', '.join(map(str, members))} in this order needs torch 2.15 or newer"
        )
    return {"sort_ranks": False}


def all_ranks(plan: Plan) -> tuple[int, ...]:
    """All ranks of the plan, in order."""
    return tuple(range(plan.num_ranks))


def groups_of(plan: Plan, outer: Layout | None = None) -> list[tuple[Purpose, tuple[int, ...]]]:
    """(purpose, members) of every process group that the plan needs, in the order of creation on all ranks.

    ``outer`` is for a plan of one stage: the layout of the model's input and output, if it is not that of its first and
    last components.
    """
    needed: list[tuple[Purpose, tuple[int, ...]]] = []
    for stage in plan.stages:
        position = Position.of(plan, stage.ranks[0])
        layouts = position.layouts
        pairs = [*pairwise(layouts), *((layout, whole(layouts[-1])) for layout in layouts)]
        if outer is not None:
            pairs += [(outer, layouts[0]), *((layout, outer) for layout in layouts)]
        for layout in dict.fromkeys(layouts):
            needed += [("gradient", position.world(group)) for group in layout.data_groups()]
            needed += [("activation", position.world(group)) for group in layout.tensor_groups()]
        for layout, a in zip(layouts, position.assignments(plan), strict=True):
            for cut in (layout.inside_group, layout.across_group) if a.data.shards else ():
                needed += [("gradient", position.world(cut(r, a.data.shards or 1))) for r in range(layout.width)]
        for source, target in dict.fromkeys(pairs):
            meeting = Boundary(source=source, target=target).meeting
            for end in (source, target):
                groups = gather_groups(end.width, end.data, meeting)
                needed += [("activation", position.world(group)) for group in groups]
    for hop in hops(plan):
        both = (*hop.source_ranks, *hop.target_ranks)
        needed += [("ahead", both), ("back", both)]
    needed.append(("state", all_ranks(plan)))
    return list(dict.fromkeys(g for g in needed if len(g[1]) > 1))
