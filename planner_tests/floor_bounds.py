"""Lower bounds on pipelines from compute alone, raised as far as they go."""

from __future__ import annotations

from asa.planner.pipeline import floors as module
from asa.planner.pipeline.staged import StagedSpace


def floors(pipelines: StagedSpace, best: float = float("inf")) -> dict[int, float]:
    """Ms that no pipeline takes less than, by number of microbatches."""
    bounds, paced = module.floors(pipelines, best)
    for x in paced:
        while x.bound < best and not x.stuck:
            x.step(best, float("inf"))
        bounds[x.m] = x.bound
    return bounds
