"""Schedule ``layers``: model parallelism by layers, one stage at work at a time.

What splitting a model over devices by hand does: the whole batch passes through the stages, forward and back.
"""

from __future__ import annotations

from asa.interfaces.schedule import Action, Schedule


class Layers(Schedule):
    """One microbatch, so nothing overlaps."""

    identifier = "layers"

    def refusal(self, stages: int, num_microbatches: int) -> str:
        """One microbatch only: several would be a pipeline."""
        return "" if num_microbatches == 1 else f"layers runs 1 microbatch, asked {num_microbatches}"

    def order(self, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
        """Forward and back."""
        return (Action(direction="forward", microbatch=0), Action(direction="backward", microbatch=0))

    def in_flight(self, stage: int, stages: int, num_microbatches: int) -> int:
        """The one."""
        return 1
