"""Schedule ``gpipe``: all microbatches run forward, then all run backward.

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism".
"""

from __future__ import annotations

from functools import cache

from asa.interfaces.schedule import Action, Schedule


@cache
def _order(num_microbatches: int) -> tuple[Action, ...]:
    ahead = tuple(Action(direction="forward", microbatch=k) for k in range(num_microbatches))
    return (*ahead, *(Action(direction="backward", microbatch=k) for k in range(num_microbatches)))


class GPipe(Schedule):
    """All forwards run before all backwards, so a stage holds the activations of every microbatch."""

    identifier = "gpipe"

    def refusal(self, stages: int, num_microbatches: int) -> str:
        """Empty: any number of stages and microbatches works."""
        return ""

    def order(self, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
        """All forwards, then all backwards, the same on every stage."""
        return _order(num_microbatches)

    def in_flight(self, stage: int, stages: int, num_microbatches: int) -> int:
        """All microbatches of the step."""
        return num_microbatches
