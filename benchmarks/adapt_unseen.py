"""The adaptive loop on disturbances that it was not made with, with the cost model as the world.

    python benchmarks/adapt_unseen.py [--only TEXT] [-o RECORD] [--again]

``adapt_loop.py`` has one disturbance that begins, lasts six epochs and ends. Here several things are slow at once, or
by turns, for less than a look lasts, ever more, up and down, or in the middle of the trial of a change; steps are noisy
without a disturbance; ranks need more memory than they were promised.

Of a cell, *total* is the time of all steps and changes; *hindsight* that of somebody who knows every disturbance
beforehand and takes, at every moment, the best of all plans that ran and of those that the planner answers with when it
is told the truth; *never* that of the first plan throughout. *Regret* is by how much the plan in force at the end of
a stretch of at least 200 steps without a change of the machine is slower than the best one, where that loses at least
the time of two changes over the stretch; the worst is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import adapt_loop as known
from adapt_loop import EPOCHS, MOVE_S, STEPS, Cell, first_plan
from simulated_world import Noise, World

from asa.cost.machine.what_if import slower_profile
from asa.interfaces.executor import Placement
from asa.ir.cluster import Cluster
from asa.ir.profile import Profile
from asa.scheduler import adapt
from asa.scheduler.costs import Slowness
from asa.scheduler.model import same
from asa.strategies import offered

ALL = EPOCHS * STEPS
QUIET, RESTLESS = Noise(), Noise(step=0.1, own=0.05, tails=0.05, tail=3.0)
LONG = 200


@dataclass(frozen=True, kw_only=True)
class Slow:
    """By how many times computation of ``ranks``, links of ``levels`` and everything takes longer."""

    ranks: tuple[tuple[int, float], ...] = ()
    levels: tuple[tuple[int, float], ...] = ()
    everything: float = 1.0


State = Callable[[int, int | None], Slow]
"""What is slow in a step, given the step of the first change of plan, if there was one."""


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A cell. ``memory``: from step 1,170 on ranks need that many times what they were promised."""

    name: str
    model: str
    cluster: str
    batch: int
    state: State
    noise: Noise = QUIET
    memory: float = 1.0

    @property
    def cell(self) -> Cell:
        """Its model, cluster and batch, undisturbed."""
        return Cell(model=self.model, cluster=self.cluster, batch=self.batch, what="", factor=1.0)


def between(begins: int, ends: int, slow: Slow) -> State:
    """``slow`` from one step to another."""
    return lambda step, _: slow if begins <= step < ends else Slow()


def _rank(rank: int, factor: float) -> Slow:
    return Slow(ranks=((rank, factor),))


def _wandering(step: int) -> Slow:
    draw, log = random.Random(7), 0.0
    for _ in range(step // 100):
        log = min(math.log(3), max(0.0, log + draw.gauss(0, 0.25)))
    return _rank(1, round(math.exp(log), 3))


def _during_trial(before: Slow, after: Slow) -> State:
    def state(step: int, moved: int | None) -> Slow:
        if not 1170 <= step < 3510:
            return Slow()
        return before if moved is None or step < moved + 10 else after

    return state


def cells() -> Iterator[Unseen]:
    """All of them."""
    begin, end = 3 * STEPS, 9 * STEPS
    two = Slow(ranks=((1, 2.0), (2, 3.0)))
    yield Unseen(name="two slow ranks", model="vgg16", cluster="4090-pcie-4", batch=64, state=between(begin, end, two))
    yield Unseen(
        name="slow for 60 steps", model="resnet50", cluster="a100-nvlink-8", batch=128,
        state=between(begin, begin + 60, _rank(3, 4.0)),
    )  # fmt: skip
    growing = (1.3, 1.7, 2.2, 3.0, 4.0, 5.5, 7.5, 10.0)
    yield Unseen(
        name="links slower and slower", model="vgg16", cluster="4090-pcie-4", batch=64,
        state=lambda s, _: (
            Slow(levels=((0, growing[(s - begin) * 8 // (end - begin)]),)) if begin <= s < end else Slow()
        ),
    )  # fmt: skip
    yield Unseen(
        name="slow in 30 of 60 steps", model="resnet50", cluster="local-gloo-2", batch=64,
        state=lambda s, _: _rank(1, 3.0) if begin <= s < end and s % 60 < 30 else Slow(),
    )  # fmt: skip
    yield Unseen(
        name="slow in every other epoch", model="resnet50", cluster="a100-nvlink-8", batch=128,
        state=lambda s, _: _rank(1, 3.0) if s >= begin and s // STEPS % 2 else Slow(),
    )  # fmt: skip
    yield Unseen(
        name="more memory than promised", model="resnet50", cluster="4090-pcie-4", batch=256,
        state=between(0, 0, Slow()), memory=1.3,
    )  # fmt: skip
    both = Slow(ranks=((2, 3.0),), levels=((1, 6.0),))
    yield Unseen(
        name="rank and links", model="vgg16", cluster="l4-8x1-25g-rdma", batch=128, state=between(begin, end, both)
    )
    yield Unseen(
        name="noise alone", model="vgg16", cluster="4090-pcie-4", batch=64, state=between(0, 0, Slow()),
        noise=RESTLESS,
    )  # fmt: skip
    yield Unseen(
        name="noise and a slow rank", model="vgg16", cluster="4090-pcie-4", batch=64,
        state=between(begin, end, _rank(2, 2.0)), noise=RESTLESS,
    )  # fmt: skip
    yield Unseen(
        name="speed wanders", model="resnet50", cluster="local-gloo-2", batch=64, state=lambda s, _: _wandering(s)
    )
    yield Unseen(
        name="another rank in the trial", model="resnet50", cluster="a100-nvlink-8", batch=128,
        state=_during_trial(_rank(3, 3.0), Slow(ranks=((3, 3.0), (5, 3.0)))),
    )  # fmt: skip
    yield Unseen(
        name="everything in the trial", model="vgg16", cluster="4090-pcie-4", batch=64,
        state=_during_trial(_rank(1, 2.5), Slow(ranks=((1, 2.5),), everything=2.0)),
    )  # fmt: skip
    yield Unseen(
        name="gpt2, slow network", model="gpt2", cluster="a100-2x8-roce", batch=64,
        state=between(begin, end, Slow(levels=((1, 6.0),))),
    )  # fmt: skip
    yield Unseen(
        name="one rank, then another", model="convnext_tiny", cluster="4090-pcie-4", batch=64,
        state=lambda s, _: _rank(1 if s < 6 * STEPS else 3, 3.0) if begin <= s < end else Slow(),
    )  # fmt: skip
    yield Unseen(
        name="slow from the first step", model="swin_t", cluster="4090-pcie-4", batch=64,
        state=between(0, 8 * STEPS, _rank(2, 2.5)),
    )  # fmt: skip
    yield Unseen(
        name="everything faster", model="resnet50", cluster="local-gloo-2", batch=64,
        state=between(begin, end, Slow(everything=0.6)),
    )  # fmt: skip


def _slowness(slow: Slow, cluster: Cluster) -> Slowness:
    ranks, levels, log = dict(slow.ranks), dict(slow.levels), math.log(slow.everything)
    return Slowness(
        common=log,
        ranks=tuple(math.log(ranks.get(r, 1.0)) for r in range(cluster.num_devices)),
        levels=tuple(math.log(levels.get(i, 1.0)) + log for i in range(len(cluster.levels))),
    )


@cache
def _machine(model: str, where: str, slow: Slow) -> tuple[Profile, Cluster]:
    made = known.model_of(Cell(model=model, cluster=where, batch=1, what="", factor=1.0))
    if slow == Slow():
        return made.profile, made.cluster
    truth = _slowness(slow, made.cluster)
    cluster = made.corrected(replace(truth, common=0.0), range(made.cluster.num_devices))[1]
    profile = made.profile if slow.everything == 1 else slower_profile(made.profile, slow.everything)
    return profile, cluster


class _Heavy(World):
    """A world in which ranks need ``factor`` times the promised memory from ``begins`` on."""

    def __init__(self, *args: Any, factor: float, begins: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._factor, self._begins = factor, begins

    def _measured(self, steps: int) -> Any:
        found = super()._measured(steps)
        if self._factor == 1 or self.step < self._begins:
            return found
        peaks = tuple(int(self._factor * b) for b in found.predicted_memory_bytes)
        return replace(found, peak_memory_bytes=peaks)


def run(unseen: Unseen) -> dict[str, Any]:
    """The loop on one cell, and what it made of it."""
    began, cell = time.monotonic(), unseen.cell
    model, plan = known.model_of(cell), first_plan(cell.model, cell.cluster, cell.batch)

    def state(step: int) -> Slow:
        return unseen.state(step, world.moves[0][0] if world.moves else None)

    world = _Heavy(
        plan, lambda step: _machine(cell.model, cell.cluster, state(step)), offered(),
        processes=model.cluster.num_devices, steps=STEPS, window=known.WINDOW, move_s=MOVE_S,
        rebuild_s=MOVE_S, noise=unseen.noise, seed=1, factor=unseen.memory, begins=3 * STEPS,
    )  # fmt: skip
    first = Placement(plan=world.plan, processes=world.processes)
    events: list[dict[str, Any]] = []
    for _ in adapt(world, range(EPOCHS), events.append, model=model):
        pass
    stretches = _stretches([state(step) for step in range(ALL)])
    seen = [first, *(target for _, _, target in world.moves)]
    for _, slow in {s: (b, s) for b, e, s in stretches if e - b >= LONG and s != Slow()}.values():
        seen += _told(unseen, first, slow)
    kinds = [p for i, p in enumerate(seen) if not any(same(p, other) for other in seen[:i])]
    prices = [[world.true_step_s(p, b) for p in kinds] for b, _, _ in stretches]
    regrets = []
    for (begins, ends, _), row in zip(stretches, prices, strict=True):
        if ends - begins >= LONG:
            # A look at the very end of the stretch may find that it is over: the step itself was the old plan's.
            now = next((b for step, b, _ in world.moves if step >= ends), world_placement(world))
            lost = world.true_step_s(now, begins) - min(row)
            regrets.append(lost / min(row) if lost * (ends - begins) > 2 * MOVE_S else 0.0)
    lengths = [e - b for b, e, _ in stretches]
    exact = sum(n * world.true_step_s(_at(world, s), s) for s, n in _runs(world, stretches))
    total = world.spent_s if unseen.noise == QUIET else exact + MOVE_S * len(world.moves)
    return {
        "cell": unseen.name,
        "on": f"{cell.model} b{cell.batch}, {cell.cluster}",
        "moves": len(world.moves),
        "moved_at": [step for step, _, _ in world.moves],
        "plans": [known._words(p) for p in (first, *(target for _, _, target in world.moves))],
        "to_itself": sum(same(a, b) for _, a, b in world.moves),
        "rolled_back": sum(e.get("kind") == "rollback" for e in events),
        "regrets": regrets,
        "over_hindsight": total / _hindsight(prices, lengths),
        "over_never_switching": total / sum(n * row[0] for n, row in zip(lengths, prices, strict=True)),
        "found": [f"step {e['step']}: {e['line']}" for e in events if e["event"] == "finding"],
        "said": [f"step {e.get('step')}: {e['kind']}: {e.get('why', '')}" for e in events if e["event"] == "replan"],
        "seconds": time.monotonic() - began,
    }


def world_placement(world: World) -> Placement:
    """The plan in force."""
    return Placement(plan=world.plan, processes=world.processes)


def _at(world: World, step: int) -> Placement:
    """The plan that ran a step."""
    return next((before for moved, before, _ in world.moves if moved > step), world_placement(world))


def _runs(world: World, stretches: list[tuple[int, int, Slow]]) -> Iterator[tuple[int, int]]:
    """First step and length of every run of steps under one plan on one machine."""
    borders = sorted({0, ALL, *(b for b, _, _ in stretches), *(step for step, _, _ in world.moves)})
    for begins, ends in pairwise(borders):
        yield begins, ends - begins


def _stretches(states: list[Slow]) -> list[tuple[int, int, Slow]]:
    found = [(0, 0, states[0])]
    for step, slow in enumerate(states):
        begins, _, now = found[-1]
        if slow == now:
            found[-1] = begins, step + 1, now
        else:
            found.append((step, step + 1, slow))
    return found


def _told(unseen: Unseen, first: Placement, slow: Slow) -> list[Placement]:
    """What the planner answers when it is told the truth."""
    model = known.model_of(unseen.cell)
    silent = known.world(unseen.cell, QUIET, disturbed=False)
    silent.run_epoch(0)
    return model.best(first, silent.run_epoch(1).measurements, _slowness(slow, model.cluster))


def _hindsight(prices: list[list[float]], lengths: list[int]) -> float:
    """The least time of anybody who knew all plans and disturbances: the first plan at first, then any."""
    least = [0.0 if i == 0 else MOVE_S for i in range(len(prices[0]))]
    for row, n in zip(prices, lengths, strict=True):
        change = min(least) + MOVE_S
        least = [min(cost, change) + n * s for cost, s in zip(least, row, strict=True)]
    return min(least)


def main() -> None:
    """Print a line per cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("-o", "--output", type=Path, help="write a record; cells that it has are not run")
    parser.add_argument("--again", action="store_true", help="run cells that the record has, too")
    parser.add_argument("--say", action="store_true", help="print what the loop said")
    args = parser.parse_args()
    rows = known.read(args.output)
    for unseen in cells():
        if args.only not in unseen.name or (unseen.name in rows and not args.again):
            continue
        row = rows[unseen.name] = run(unseen)
        print(
            f"{row['cell']:28} {row['on']:32} moves {row['moves']} at {row['moved_at']} ({row['to_itself']} to itself, "
            f"{row['rolled_back']} back), regret {100 * max(row['regrets'], default=0.0):5.1f} %, total "
            f"{row['over_hindsight']:.3f} of hindsight, {row['over_never_switching']:.3f} of never  "
            f"[{row['seconds']:.0f} s]",
            flush=True,
        )
        if args.say:
            print("\n".join(f"    {line}" for line in [*row["found"], *row["said"], *row["plans"]]), flush=True)
        if args.output:
            data = {"cells": list(rows.values())}
            args.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
