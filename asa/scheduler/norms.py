"""Number of rows over which BatchNorm averages under a plan; another number trains another network."""

from __future__ import annotations

from asa.ir.graph import LayerGraph
from asa.ir.plan import Plan


def norm_groups(plan: Plan, graph: LayerGraph) -> tuple[int, ...]:
    """Sizes of the groups in samples of one microbatch, largest first; empty without BatchNorm."""
    microbatch = -(-plan.global_batch // plan.num_microbatches)
    sizes: set[int] = set()
    for layout, component in zip(plan.layouts(), graph.components, strict=True):
        if component.batch_norm:
            sizes.update(layout.sizes(microbatch))
    return tuple(sorted(sizes, reverse=True))


def changed(old: Plan, new: Plan, graph: LayerGraph) -> str:
    """Description of what changes for BatchNorm between two plans; empty if nothing does."""
    before, after = norm_groups(old, graph), norm_groups(new, graph)
    if before == after:
        return ""
    words = [" and ".join(map(str, x)) for x in (after, before)]
    return f"BatchNorm averages over {words[0]} samples from here on, not {words[1]}"
