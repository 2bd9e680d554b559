"""Schedule ``layers``: model parallelism by layers, one stage computes at a time.

This is the usual way to split a model over devices by hand: the whole batch passes through the stages in turn.
"""

from __future__ import annotations

from asa.interfaces.schedule import Action, Schedule


class Layers(Schedule):
    """One microbatch per step, so stages do not overlap."""

    identifier = "layers"

    def refusal(self, stages: int, num_microbatches: int) -> str:
        """Empty for one microbatch; otherwise an error message, because several microbatches would be a pipeline."""
        return "" if num_microbatches == 1 else f"layers runs 1 microbatch, asked {num_microbatches}"

    def order(self, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
        """One forward and one backward."""
        return (Action(direction="forward", microbatch=0), Action(direction="backward", microbatch=0))

    def in_flight(self, stage: int, stages: int, num_microbatches: int) -> int:
        """One microbatch."""
        return 1
