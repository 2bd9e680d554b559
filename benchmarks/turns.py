"""Who takes turns with whom: small groups around one plan that is in all of them, as far as memory goes."""

from __future__ import annotations

from collections.abc import Sequence

from asa.cli.comparison import FILLED, ModelBench, side_by_side
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile

GROUP = 3
"""Plans in a group. Ten plans in the same ranks slow each other down, zero2 and fsdp by up to three times."""
ANCHORS = ("single", "ddp")
"""What is in every group, the first there is: how fast the machine was in those minutes shows in it."""


def groups(
    plans: Sequence[Plan], profile: Profile, cluster: Cluster, free: int
) -> tuple[list[list[Plan]], list[tuple[Plan, str]]]:
    """Groups of at most ``GROUP`` plans that fit into ``free`` bytes of the ranks' common memory at once, the anchor
    first; what fits beside nothing runs alone. And the plans that do not fit even then, with a word on why."""
    named = {p.strategy: p for p in plans}
    anchor = next((named[a] for a in ANCHORS if a in named), None)
    made: list[list[Plan]] = []
    refused: list[tuple[Plan, str]] = []
    left = [p for p in plans if p is not anchor]
    while left:
        tried = [*([anchor] if anchor else []), *left[: GROUP - (anchor is not None)]]
        contest = ModelBench(
            model=profile.model_spec, profile=profile, cluster=cluster, plans={p.strategy: p for p in tried}
        )
        kept = side_by_side(contest, free, shared=True)
        group = [p for p in tried if p in kept]
        if all(p is anchor for p in group):
            group = left[:1]  # the anchor would leave it no room
        needed = sum(group[0].prediction.memory_bytes_per_rank)
        if len(group) == 1 and needed > FILLED * free:
            refused.append((group[0], f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"))
        else:
            made.append(group)
        left = [p for p in left if p not in group]
    if anchor is not None and not any(anchor in g for g in made):
        needed = sum(anchor.prediction.memory_bytes_per_rank)
        if needed > FILLED * free:
            refused.append((anchor, f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"))
        else:
            made.append([anchor])
    return made, refused
