"""Schedule ``1f1b``: after the first forwards, each backward is followed by one forward.

Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training"; the variant that flushes at the
end of a step, Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
"""

from __future__ import annotations

from functools import cache

from asa.interfaces.schedule import Action, Schedule


@cache
def _order(ahead: int, num_microbatches: int) -> tuple[Action, ...]:
    actions = [Action(direction="forward", microbatch=k) for k in range(ahead)]
    for k in range(num_microbatches):
        actions.append(Action(direction="backward", microbatch=k))
        if ahead + k < num_microbatches:
            actions.append(Action(direction="forward", microbatch=ahead + k))
    return tuple(actions)


class OneForwardOneBackward(Schedule):
    """A stage has at most as many microbatches in flight as there are stages from it to the last one."""

    identifier = "1f1b"

    def refusal(self, stages: int, num_microbatches: int) -> str:
        """Empty: any number of stages and microbatches works."""
        return ""

    def order(self, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
        """Forwards up to the in-flight limit, then one backward and one forward in turn, then the remaining
        backwards."""
        return _order(self.in_flight(stage, stages, num_microbatches), num_microbatches)

    def in_flight(self, stage: int, stages: int, num_microbatches: int) -> int:
        """One microbatch for every stage from this one to the last, but no more than there are."""
        return min(num_microbatches, stages - stage)
