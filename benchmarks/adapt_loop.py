"""The adaptive loop on machines that get slower and recover, with the cost model as the world.

    python benchmarks/adapt_loop.py [--noise] [--clean] [--only TEXT] [--drawn N --seed S] [-o RECORD] [--again]

Each cell is a model on a cluster and a disturbance: one rank, the links, or everything takes longer from the fourth of
twelve epochs on, until the ninth has passed. Its *oracle* is the planner told the truth; *best* is the fastest plan
that the oracle, or anybody else in the cell, had, priced under the truth. *Regret* is by how much a step of the plan
in force at the end of the disturbance takes longer than under the best one; *stay* that of the plan of the beginning.
*To itself*: changes to the layout that was in force. *Total* is the time of all steps and changes, over that of
somebody who switches at the right moments with hindsight. *Malleus*: a step of the plan that Malleus's two integer
programs over device speeds (``malleus.py``) answer with, told the truth; the loop should never be over 1 % behind.

``--drawn`` takes cells at random in place of the 93: other models, clusters and batches, one rank or several, links and
ranks at once, any factor from 1.2 to 16.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import malleus
import practice
from simulated_world import Noise, World

from asa.cli.replanning import solve_again
from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.cost.machine.what_if import slower_profile
from asa.errors import InvalidInputError
from asa.interfaces.executor import Placement
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner import Request, plan
from asa.scheduler import Model, Policy, adapt
from asa.scheduler.costs import Slowness
from asa.scheduler.model import same
from asa.strategies import offered

ROOT = Path(__file__).resolve().parent.parent
EPOCHS, STEPS, BEGINS, ENDS = 12, 390, 3, 9
WINDOW = 20
"""Steps between two observations, as where a step is short."""
MOVE_S = 2.0
SOLVE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``ranks`` and ``level``: which processes and which level of links are disturbed, everything where neither is
    given; ``factor``: by how many times it takes longer."""

    model: str
    cluster: str
    batch: int
    what: str
    factor: float
    ranks: tuple[int, ...] = ()
    level: int | None = None

    @property
    def everything(self) -> bool:
        """Whether all devices and all links are slower alike."""
        return not self.ranks and self.level is None

    @property
    def name(self) -> str:
        return f"{self.model} b{self.batch}, {self.cluster}: {self.what} x{self.factor:g}"


PLACES = (
    ("local-gloo-2", 64, ("resnet50", "vgg16", "vit_b_16")),
    ("local-gloo-2", 16, ("resnet50",)),
    ("4090-pcie-4", 64, ("resnet50", "vgg16", "vit_b_16")),
    ("4090-pcie-4", 256, ("resnet50",)),
    ("a100-nvlink-8", 128, ("resnet50", "vgg16", "vit_b_16")),
    ("l4-8x1-25g-rdma", 128, ("resnet50", "vgg16", "vit_b_16")),
    ("a100-2x8-roce", 256, ("resnet50", "vgg16", "vit_b_16")),
)


def cells() -> Iterator[Cell]:
    """All 93: 42 with a slow rank, 34 with slow links, 17 on which everything is slower."""
    for where, batch, models in PLACES:
        for model in models:
            cluster = cluster_of(where)
            ranks = (4 / 3, 2.0, 4.0) if where in ("local-gloo-2", "4090-pcie-4") else (2.0, 4.0)
            base = {"model": model, "cluster": where, "batch": batch}
            # A rank in the middle: neither the first nor the last of its host.
            slow = cluster.num_devices // 2 - 1 if cluster.num_devices > 2 else 1
            for factor in ranks:
                yield Cell(**base, what=f"rank {slow}", factor=factor, ranks=(slow,))  # type: ignore[arg-type]
            for factor in (4.0, 16.0):
                level = len(cluster.levels) - 1
                yield Cell(**base, what=f"links of {cluster.levels[level].name}", factor=factor, level=level)  # type: ignore[arg-type]
            yield Cell(**base, what="everything", factor=2.0)  # type: ignore[arg-type]


MODELS = ("resnet18", "densenet121", "mobilenet_v3_large", "convnext_tiny", "vgg13", "vit_b_32", "swin_t", "gpt2")


def drawn(rng: random.Random) -> Cell:
    """A cell at random."""
    while True:
        where = rng.choice(presets.names())
        cluster = cluster_of(where)
        if cluster.num_devices > 1:
            break
    some = rng.sample(range(cluster.num_devices), rng.choice((1, 1, 1, 2))) if rng.random() < 0.7 else []
    level = rng.randrange(len(cluster.levels)) if rng.random() < (0.2 if some else 0.8) else None
    what = [f"rank {r}" for r in sorted(some)]
    if level is not None:
        what.append(f"links of {cluster.levels[level].name}")
    return Cell(
        model=rng.choice(MODELS), cluster=where, batch=cluster.num_devices * 2 ** rng.randint(1, 5),
        what=" and ".join(what) or "everything", factor=round(math.exp(rng.uniform(math.log(1.2), math.log(16))), 2),
        ranks=tuple(sorted(some)), level=level,
    )  # fmt: skip


@cache
def cluster_of(name: str) -> Cluster:
    own = ROOT / "profiles" / f"cluster.{name}.json"
    return codec.load(Cluster, own) if own.is_file() else presets.load(name)


@cache
def profile_of(model: str, cluster: str) -> Profile:
    """Measured on CPU ranks, estimated elsewhere."""
    if model in MODELS:
        return practice.profile_of(model, cluster_of(cluster), 256)
    own = codec.load(Profile, ROOT / "profiles" / f"{model}.cpu.fp32.json")
    device = cluster_of(cluster)
    if device.device.type == "cpu":
        return own
    return estimate(
        own.graph, device.device, model_spec=own.model_spec, model_fingerprint=own.model_fingerprint,
        global_batch=256, max_degree=8,
    )  # fmt: skip


@cache
def first_plan(model: str, cluster: str, batch: int) -> Plan:
    gpus = cluster_of(cluster).num_devices
    request = Request(gpus=gpus, global_batch=batch, time_limit_s=2 * SOLVE_S)
    return plan(profile_of(model, cluster), cluster_of(cluster), offered(), request)[0]


def model_of(cell: Cell) -> Model:
    return Model(
        profile=profile_of(cell.model, cell.cluster), cluster=cluster_of(cell.cluster), strategies=offered(),
        solve=solve_again,
    )  # fmt: skip


def slowness(cell: Cell) -> Slowness:
    """The truth while it is disturbed."""
    cluster, log = cluster_of(cell.cluster), math.log(cell.factor)
    return Slowness(
        common=log if cell.everything else 0.0,
        ranks=tuple(log if r in cell.ranks else 0.0 for r in range(cluster.num_devices)),
        levels=tuple(log if cell.everything or i == cell.level else 0.0 for i in range(len(cluster.levels))),
    )


def world(cell: Cell, noise: Noise, *, disturbed: bool = True, window: int = WINDOW) -> World:
    """The machine of a cell, its first plan running."""
    model = model_of(cell)
    everyone = range(model.cluster.num_devices)
    clean = model.profile, model.cluster
    worse = model.corrected(slowness(cell), everyone)
    if cell.everything:
        worse = slower_profile(model.profile, cell.factor), worse[1]

    def machine(step: int) -> tuple[Profile, Cluster]:
        return worse if disturbed and BEGINS * STEPS <= step < ENDS * STEPS else clean

    return World(
        first_plan(cell.model, cell.cluster, cell.batch), machine, offered(), processes=len(everyone), steps=STEPS,
        window=window, move_s=MOVE_S, rebuild_s=MOVE_S, noise=noise, seed=1,
    )  # fmt: skip


@cache
def oracle(cell: Cell) -> Placement:
    """What the planner answers when it is told the truth."""
    model = model_of(cell)
    first = first_plan(cell.model, cell.cluster, cell.batch)
    now = Placement(plan=first, processes=tuple(range(first.num_ranks)))
    silent = world(cell, Noise())
    silent.run_epoch(0)
    truth = slowness(cell)
    found = model.best(now, silent.run_epoch(1).measurements, truth)
    return min(found, key=lambda p: model.step_s(p, truth))


def by_speeds(cell: Cell, made: World) -> float:
    """Seconds of a step of the fastest plan that Malleus's rule answers with, under the truth; of its answers, those
    that asa's cost model can price."""
    first = first_plan(cell.model, cell.cluster, cell.batch)
    now, times = Placement(plan=first, processes=tuple(range(first.num_ranks))), [math.inf]
    rates = [math.exp(log) for log in slowness(cell).ranks]
    profile = profile_of(cell.model, cell.cluster)
    seconds = dict.fromkeys((c.name for c in profile.graph.components), 0.0)
    for t in sorted(profile.timings, key=lambda t: (-t.tensor_degree, t.microbatch)):  # whole, largest: last
        seconds[t.component] = t.forward.median + t.backward.median
    for answer in malleus.answers(now, rates, list(seconds.values())):
        try:
            times.append(made.true_step_s(answer, BEGINS * STEPS))
        except InvalidInputError:
            continue
    return min(times)


def run(cell: Cell, noise: Noise, *, disturbed: bool = True, policy: Policy | None = None) -> dict[str, Any]:
    """The loop on one cell, and what it made of it."""
    began, model, made = time.monotonic(), model_of(cell), world(cell, noise, disturbed=disturbed)
    first = Placement(plan=made.plan, processes=made.processes)
    events: list[dict[str, Any]] = []
    for _ in adapt(made, range(EPOCHS), events.append, model=model, policy=policy):
        pass
    back = Placement(plan=made.plan, processes=made.processes)
    # A look after the last disturbed step may find that it is over, and change the plan: the step itself was the old's.
    last = next((before for step, before, _ in made.moves if step >= ENDS * STEPS), back)
    at, clean = BEGINS * STEPS, 0
    told = oracle(cell) if disturbed else first
    seen = [first, last, told, *(target for _, _, target in made.moves)]
    best = min(made.true_step_s(p, at) for p in seen)
    quiet_best = min(made.true_step_s(p, clean) for p in seen)
    stay, now = made.true_step_s(first, at), made.true_step_s(last, at)
    return {
        "cell": cell.name,
        "kind": "everything" if cell.everything else "links" if not cell.ranks else "rank",
        "undisturbed_s": made.true_step_s(first, clean),
        "stay_s": stay,
        "last_s": now,
        "oracle_s": made.true_step_s(told, at),
        "best_s": best,
        "malleus_s": by_speeds(cell, made) if disturbed else None,
        "stay_regret": stay / best - 1,
        "regret": now / best - 1,
        "moves": len(made.moves),
        "to_itself": sum(same(a, b) for _, a, b in made.moves),
        "moved_at": [step for step, _, _ in made.moves],
        "rolled_back": sum(e.get("kind") == "rollback" for e in events),
        "back_regret": made.true_step_s(back, clean) / quiet_best - 1,
        "back_loses_s": (EPOCHS - ENDS) * STEPS * (made.true_step_s(back, clean) - quiet_best),
        "total_s": made.spent_s,
        "never_switch_s": EPOCHS * STEPS * made.true_step_s(first, clean)
        + ((ENDS - BEGINS) * STEPS * (stay - made.true_step_s(first, clean)) if disturbed else 0.0),
        "hindsight_s": _hindsight(made, seen, first, disturbed=disturbed),
        "plan": _words(last),
        "best_plan": _words(min(seen, key=lambda p: made.true_step_s(p, at))),
        "found": [e["line"] for e in events if e["event"] == "finding"],
        "said": [f"{e['kind']}: {e.get('why', '')}" for e in events if e["event"] == "replan"],
        "seconds": time.monotonic() - began,
    }


def _hindsight(made: World, seen: list[Placement], first: Placement, *, disturbed: bool) -> float:
    """The least time of anybody who knew all plans and when the disturbance begins and ends."""
    clean, middle = (EPOCHS - ENDS + BEGINS) * STEPS, (ENDS - BEGINS) * STEPS
    start = made.true_step_s(first, 0)
    if not disturbed:
        return EPOCHS * STEPS * start
    found = (EPOCHS * STEPS - middle) * start + middle * made.true_step_s(first, BEGINS * STEPS)
    for p in seen:
        worse, after = made.true_step_s(p, BEGINS * STEPS), made.true_step_s(p, 0)
        there_and_back = clean * start + middle * worse + 2 * MOVE_S
        there = BEGINS * STEPS * start + middle * worse + (EPOCHS - ENDS) * STEPS * after + MOVE_S
        found = min(found, there_and_back, there)
    return found


def _words(placement: Placement) -> str:
    p = placement.plan
    stages = " | ".join(
        f"{len(s.ranks)}" + (f" ({':'.join(map(str, s.weights))})" if s.weights else "") for s in p.stages
    )
    return f"{p.strategy} on {stages}, {p.num_microbatches} mb, processes {list(placement.processes)}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all cells: how often the loop came within 5 % of the best plan where another one is over 5 % better."""
    worth = [r for r in rows if r["stay_regret"] > 0.05]
    return {
        "cells": len(rows),
        "another_is_better": len(worth),
        "within_5_percent": sum(r["regret"] <= 0.05 for r in worth),
        "behind_malleus_by_1_percent": [
            r["cell"] for r in rows if r["malleus_s"] and r["last_s"] > 1.01 * r["malleus_s"]
        ],
        "median_regret": statistics.median(r["regret"] for r in rows),
        "worst_regret": max(r["regret"] for r in rows),
        "moves": sum(r["moves"] for r in rows),
        "to_itself": sum(r["to_itself"] for r in rows),
        "back_within_5_percent": sum(r["back_regret"] <= 0.05 for r in rows),
        "not_back_though_it_pays": [
            r["cell"] for r in rows if r["back_regret"] > 0.05 and r["back_loses_s"] > 2 * MOVE_S
        ],
        "moves_where_nothing_is_better": sum(r["moves"] for r in rows if r["stay_regret"] <= 0.001),
        "worst_over_hindsight": max(r["total_s"] / r["hindsight_s"] for r in rows),
        "worst_over_never_switching": max(r["total_s"] / r["never_switch_s"] for r in rows),
    }


def read(record: Path | None) -> dict[str, dict[str, Any]]:
    """Rows of a record by the names of their cells; none where there is no such file."""
    if record is None or not record.is_file():
        return {}
    return {row["cell"]: row for row in json.loads(record.read_text())["cells"]}


def write(record: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write a record, in place of what it was."""
    data = {"summary": summary(list(rows.values())), "cells": list(rows.values())}
    beside = record.with_name(f"{record.name}.tmp")
    beside.write_text(json.dumps(data, indent=1) + "\n")
    beside.replace(record)


def main() -> None:
    """Print a line per cell, and what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", action="store_true", help="steps vary by 3 %%, figures of ranks and links by 2 %%")
    parser.add_argument("--clean", action="store_true", help="no disturbance: nothing may be changed")
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("-o", "--output", type=Path, help="write a record")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="this many cells at random")
    parser.add_argument("--seed", type=int, default=0, help="of the cells at random")
    parser.add_argument("--again", action="store_true", help="run cells that the record has, too")
    args = parser.parse_args()
    noise = Noise(step=0.03, own=0.02) if args.noise else Noise()
    rng = random.Random(args.seed)
    every = [drawn(rng) for _ in range(args.drawn)] or list(cells())
    known = read(args.output)
    for cell in every:
        if args.only not in cell.name or (args.clean and not args.drawn and not cell.everything):
            continue
        if cell.name in known and not args.again:
            continue
        row = known[cell.name] = run(cell, noise, disturbed=not args.clean)
        if args.output:  # after every cell: a run that is cut short goes on from here
            write(args.output, known)
        print(
            f"{row['cell']:58} {1e3 * row['undisturbed_s']:8.1f} ms, stay {1e3 * row['stay_s']:8.1f}, asa "
            f"{1e3 * row['last_s']:8.1f}, best {1e3 * row['best_s']:8.1f}, Malleus "
            f"{1e3 * (row['malleus_s'] or row['stay_s']):8.1f}, regret {100 * row['regret']:6.1f} %, moves "
            f"{row['moves']} ({row['to_itself']} to itself), back {100 * row['back_regret']:5.1f} %, total "
            f"{row['total_s'] / row['hindsight_s']:.3f} of hindsight  [{row['seconds']:.0f} s]",
            flush=True,
        )
    print(json.dumps(summary(list(known.values())), indent=1))


if __name__ == "__main__":
    main()
