"""Schedule ``1f1b``: as soon as a microbatch has come back, the next one goes in.

Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training"; the variant that flushes at the
end of a step, Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
"""

from __future__ import annotations

from functools import cache

from asa.interfaces.schedule import Action, Schedule


@cache
def _order(ahead: int, num_microbatches: int) -> tuple[Action, ...]:
    found = [Action(direction="forward", microbatch=k) for k in range(ahead)]
    for k in range(num_microbatches):
        found.append(Action(direction="backward", microbatch=k))
        if ahead + k < num_microbatches:
            found.append(Action(direction="forward", microbatch=ahead + k))
    return tuple(found)


class OneForwardOneBackward(Schedule):
    """A stage holds as many microbatches as there are stages from it to the last."""

    identifier = "1f1b"

    def refusal(self, stages: int, num_microbatches: int) -> str:
        """Any number of either."""
        return ""

    def order(self, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
        """Fill up to what may be in flight, then one backward and one forward in turn, then drain."""
        return _order(self.in_flight(stage, stages, num_microbatches), num_microbatches)

    def in_flight(self, stage: int, stages: int, num_microbatches: int) -> int:
        """One for every stage from here on."""
        return min(num_microbatches, stages - stage)
