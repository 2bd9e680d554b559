"""Simulates one step of a plan, event by event."""

from __future__ import annotations

from collections.abc import Sequence

from asa.cost.planned import Price, price_plan, schedule_of
from asa.errors import InvalidInputError
from asa.interfaces.schedule import Schedule
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster, Overlap
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.simulator.stage import StageRun
from asa.simulator.timeline import Event, Timeline

MOST_PASSES = 500_000
"""Largest number of microbatches times components in a timeline."""


def simulate(plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> Timeline:
    """Simulate one step of ``plan`` with the planner's prices.

    Raises:
        InvalidInputError: the plan is of another model, or uses a strategy that a component refuses; or it has too many
            microbatches to draw.
    """
    size = plan.num_microbatches * len(plan.components)
    if size > MOST_PASSES:
        raise InvalidInputError(
            f"a timeline of {plan.num_microbatches} microbatches of {len(plan.components)} components, more than "
            f"{MOST_PASSES} passes, is too long to draw",
            where="$.num_microbatches",
        )
    price = price_plan(plan, profile, cluster, strategies)
    names = [c.name for c in plan.components]
    events, seconds = play(
        price, names, plan.num_microbatches, cluster.overlap, schedule_of(plan, strategies)
    )  # fmt: skip
    return Timeline(
        model=plan.model_spec,
        ranks=plan.num_ranks,
        step_time_s=seconds,
        events=tuple(events),
        stages=tuple(s.ranks for s in plan.stages),
    )


def play(
    price: Price, names: Sequence[str], num_microbatches: int, overlap: Overlap, schedule: Schedule | None = None
) -> tuple[list[Event], float]:
    """(events, seconds) of one step; events are sorted by stage. Without a schedule, microbatches run one after the
    other."""
    runs = [StageRun(s, stage, names, overlap) for s, stage in enumerate(price.stages)]
    if schedule is None:
        for k in range(num_microbatches):
            runs[0].forward(k)
            runs[0].backward(k, last=k + 1 == num_microbatches)
    else:
        _pipeline(runs, price.handovers, schedule, num_microbatches)
    for run in runs:
        run.finish(num_microbatches - 1)
    return [e for run in runs for e in run.streams.events], max(run.streams.now for run in runs)


def _pipeline(
    runs: Sequence[StageRun], handovers: Sequence[tuple[float, float]], schedule: Schedule, num_microbatches: int
) -> None:
    """Run every stage's actions in the order of the schedule, each as soon as its input has arrived."""
    count = len(runs)
    orders = [list(schedule.order(s, count, num_microbatches)) for s in range(count)]
    arrived: dict[tuple[int, str, int], float] = {(0, "forward", k): 0.0 for k in range(num_microbatches)}
    free: dict[tuple[int, str], float] = {}
    progress = [0] * count
    while any(d < len(o) for d, o in zip(progress, orders, strict=True)):
        moved = False
        for s, run in enumerate(runs):
            while progress[s] < len(orders[s]):
                action = orders[s][progress[s]]
                ready = arrived.get((s, action.direction, action.microbatch))
                if s + 1 == count and action.direction == "backward":
                    ready = 0.0
                if ready is None:
                    break
                ahead = action.direction == "forward"
                run.streams.rest_until(ready)
                if ahead:
                    run.forward(action.microbatch)
                else:
                    run.backward(action.microbatch, last=progress[s] + 1 == len(orders[s]))
                progress[s], moved = progress[s] + 1, True
                to = s + 1 if ahead else s - 1
                if 0 <= to < count:
                    seconds = handovers[s][0] if ahead else handovers[to][1]
                    link = (s, action.direction)
                    start = max(run.streams.now, free.get(link, 0.0))
                    free[link] = start + seconds
                    arrived[to, action.direction, action.microbatch] = free[link]
                    run.record_transfer(action, start, free[link], to)
        if not moved:
            raise ValueError(f"schedule {schedule.identifier} waits for itself")
