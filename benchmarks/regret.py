"""What the planner's choice costs against everything else it could have chosen, measured.

    python benchmarks/regret.py [--budget 10m] [--models A,B] [--batches 32,16,64] [--ranks 2] [--folder DIR]
                                [--random 50] [--changes 999] [--verify 4] [--megabits 1000] [--input 3x224x224]

A cell is one model, batch and number of ranks. In it every whole strategy and hybrid, random feasible plans and every
change of one component of the answer are run: first all of them for a few turns, in groups that fit into memory, each
group beside the answer (those that are foreseen to be fastest first: what there is no time for is what is foreseen to
be slowest, and none foreseen at five times the answer is run); then the fastest of those,
the answer, plain data parallelism, the best whole strategy and the verified
answer (``asa plan --verify``) against each other, as far as memory goes (a hybrid that it does not hold there is judged
by the first turns, and has no ``hybrid_s``). Which plan is the best is decided on the odd rounds of that and how much
faster it is on the even ones, so that the luck of the fastest of many is not counted as speed.

    regret = time of the answer / time of the best - 1
    share  = (DDP - answer) / (DDP - best), of the gain there was over plain data parallelism

With ``--megabits`` every rank has a network namespace of its own and a link of that many Mbit/s to the others, in place
of shared memory (Linux, root, ``iproute2``; elsewhere it says so and stops).

A finished cell is kept in the folder, so that a run that was stopped goes on; ``--budget`` is for the cells that are
missing, and none is begun that would end later. Profiles and clusters in the folder are used again while they are
younger than half an hour. The record holds every plan that was run. In pieces of less than four minutes:

    python benchmarks/regret.py --budget 235s --cell-budget 150s --folder DIR    # again and again
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are forked from here
sys.path.insert(0, str(Path(__file__).resolve().parent))

from menu import Menu
from namespaces import NotPermitted, leave_network, shaped
from regret_scores import Row, scores, show

from asa.cli import bench_setup, options
from asa.cli.commands import verify_plans as verification
from asa.cli.console import Console
from asa.cli.heap import start_program_again
from asa.errors import AsaError
from asa.executor.measuring.benchmark import BenchOptions, Cell, compare
from asa.executor.measuring.contest import contest
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.units import MIB, time_span
from asa.planner import Request
from asa.profiler.collectives import SIZES
from asa.profiler.interconnect import measure_cluster
from asa.profiler.machine import choose_device, free_memory
from asa.profiler.measure import profile_model
from asa.report.text.plan import summary
from asa.strategies import offered
from asa.zoo.models import build

MODELS = {
    "alexnet": (3, 64, 64),
    "resnet18": (3, 32, 32),
    "small_models:wide": (3, 32, 32),
    "small_models:vit": (3, 32, 32),
    "vgg11": (3, 32, 32),
}
OTHERS = (3, 32, 32)
"""Input of any other model."""
CLASSES = 100
PROFILE_S = 25.0
FINALISTS = 5
"""Of the plans screened, those that are run again beside the answer, DDP and the best whole strategy."""
SHARES = {"verify": 0.2, "screen": 0.5, "final": 0.3}
"""Of a cell's time."""
LEAST_ROUNDS = 2
ENOUGH_ROUNDS = 3
HOPELESS = 5.0
"""Plans are left to their predictions where these are so many times the answer's."""
NOISE = 0.02
"""Gains over plain data parallelism below it are none."""
SCREENED, FINAL = 4, 8
"""Plans in the same ranks while many are screened, and in the last contest; the fewer, the less they disturb."""
FARTHEST = 16 * MIB
"""Bytes of the longest message with which shaped links are measured: beyond it, their bandwidth says all."""
FRESH_S = 1800.0
"""Profiles and links older than that are measured anew before another cell."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """All plans in every round: ``least`` rounds at least, ``most`` at most, and in between while time is left."""

    count: int
    least: int
    most: int

    def next(self, rounds: Sequence[Mapping[int, float]], left_s: float, _: float) -> Sequence[int]:
        """As :class:`asa.executor.measuring.contest.Policy`."""
        done = len(rounds)
        longest = max((sum(r.values()) for r in rounds), default=0.0)
        return range(self.count) if done < self.least or (done < self.most and longest < left_s) else ()


@dataclass(kw_only=True)
class Bench:
    """What the cells of a run have in common."""

    folder: Path
    random: int
    changes: int
    verify: int
    seed: int
    megabits: float | None
    shape: tuple[int, int, int] | None
    console: Console

    def cluster(self, ranks: int) -> Cluster:
        """The links of that many ranks, measured in the last half hour."""
        name = f"local-gloo-{ranks}" + (f"x{self.megabits:g}Mbit" if self.megabits else "")
        path = self.folder / "profiles" / f"cluster.{name}.json"
        if not fresh(path):
            say(f"measuring the links of {ranks} ranks")
            sizes = [n for n in SIZES if n <= FARTHEST] if self.megabits else None
            limit_s = bench_setup.MEASURE_LIMIT_S
            codec.save(measure_cluster(ranks, backend="gloo", sizes=sizes, time_limit_s=limit_s, name=name), path)
        return codec.load(Cluster, path)

    def profile(self, model: str, largest: int) -> Profile:
        """The profile of a model, measured in the last half hour."""
        path = self.folder / "profiles" / f"{model.replace(':', '-')}.cpu.fp32.json"
        if not fresh(path):
            say(f"profiling {model}")
            shape = self.shape or MODELS.get(model, OTHERS)
            made = profile_model(
                model, input_shape=shape, num_classes=CLASSES, global_batch=largest, device="cpu",
                time_limit_s=PROFILE_S, max_tensor_degree=4,
            )  # fmt: skip
            codec.save(made, path)
        return codec.load(Profile, path)

    def cell(self, model: str, batch: int, ranks: int, largest: int, budget_s: float) -> Row:
        """One cell, measured."""
        began = time.monotonic()
        profile, cluster = self.profile(model, largest), self.cluster(ranks)
        request = Request(gpus=ranks, global_batch=batch, time_limit_s=4.0)
        menu = Menu(profile, cluster, offered(), request)
        verified = menu.answer
        if self.verify:
            budget = SHARES["verify"] * budget_s
            verified = verification.verify(profile, cluster, request, self.verify, budget, self.console)[0]
            verified = replace(verified, strategy="verified")
        changes, drawn = menu.changes(), menu.random(self.random, self.seed)
        every = len(changes)
        random.Random(self.seed).shuffle(changes)
        static, others = (
            sorted(  # there may be no time for all of them
                (p for p in plans if not hopeless(p, menu.answer)), key=lambda p: p.prediction.step_time_s
            )
            for plans in (menu.static(), [*changes[: self.changes], *drawn])
        )
        pool = distinct([menu.answer, *static, verified, *others])
        screened = self.screen(profile, pool, SHARES["screen"] * budget_s)
        final = self.final(profile, menu, pool, screened, verified, max(10.0, budget_s - (time.monotonic() - began)))
        return {
            "model": model,
            "input_shape": profile.graph.input_shape,
            "ranks": ranks,
            "global_batch": batch,
            "created": codec.now(),
            "plans_known": len(pool),
            "changes_known": every,
            "plans_run": len(screened),
            "confidence": codec.to_data(menu.answer.confidence),
            "gap": menu.answer.certificate.gap,
            "predicted_s": {r.name: r.step_time_s for r in menu.answer.baselines},
            "verified": codec.to_data(verified.measured) if self.verify else None,
            **final,
            "screened": [
                {"plan": p.strategy, "runs": summary(p.components), "predicted_s": p.prediction.step_time_s,
                 "low_s": p.prediction.step_time_low_s, "high_s": p.prediction.step_time_high_s,
                 "step_s": screened[p.conduct]}
                for p in pool if p.conduct in screened
            ],
            "seconds": time.monotonic() - began,
        }  # fmt: skip

    def run(self, profile: Profile, plans: Sequence[Plan], turns: Turns, budget_s: float) -> list[Cell]:
        """Take turns."""
        shape = profile.graph.input_shape
        size = (shape[0], shape[1], shape[2])
        factory = partial(build, profile.model_spec, num_classes=CLASSES, input_shape=size, seed=self.seed)
        data = partial(bench_setup.stand_in, size, CLASSES)
        settings = BenchOptions(device="cpu", budget_s=budget_s, seed=self.seed)
        cells, rounds, _ = contest(plans, factory, offered(), data, settings, turns)
        for i, cell in enumerate(cells):
            cell.turns = [[r[i]] for r in rounds]
        return cells

    def screen(self, profile: Profile, pool: Sequence[Plan], budget_s: float) -> dict[object, float]:
        """Seconds of a step of as many plans as there is time for, each relative to the answer in its own group."""
        ends = time.monotonic() + budget_s
        answer, left = pool[0], list(pool[1:])
        ratios: dict[object, float] = {}
        own: list[float] = []
        while left and (time.monotonic() < ends or not ratios):
            group = [answer, *self.together(left, answer, SCREENED)]
            left = left[len(group) - 1 :]
            try:
                cells = self.run(profile, group, Turns(count=len(group), least=LEAST_ROUNDS, most=ENOUGH_ROUNDS), 0.0)
            except AsaError as error:
                say(f"  {', '.join(p.strategy for p in group[1:])}: {error}")
                continue
            own += cells[0].steps
            for p, cell in zip(group, cells, strict=True):
                ratios[p.conduct] = median(s / a for s, a in zip(cell.steps, cells[0].steps, strict=True))
        return {key: ratio * median(own) for key, ratio in ratios.items()}

    def together(self, plans: Sequence[Plan], beside: Plan, most: int) -> list[Plan]:
        """As many of the first as fit into half of the memory beside another, ``most`` with it; one at least."""
        free = 0.5 * free_memory(choose_device("cpu")) - sum(beside.prediction.memory_bytes_per_rank)
        found: list[Plan] = []
        for p in plans[: most - 1]:
            free -= sum(p.prediction.memory_bytes_per_rank)
            if free < 0 and found:
                break
            found.append(p)
        return found

    def final(
        self, profile: Profile, menu: Menu, pool: Sequence[Plan], screened: Mapping[object, float], verified: Plan,
        budget_s: float,
    ) -> Row:  # fmt: skip
        """The last contest, and what follows from it."""
        order = sorted((p for p in pool if p.conduct in screened), key=lambda p: screened[p.conduct])
        by_name = {p.strategy: p for p in menu.static()}
        hybrids = sorted(
            (by_name[n] for n in menu.hybrids() if n in by_name and by_name[n].conduct in screened),
            key=lambda p: screened[p.conduct],
        )  # fmt: skip
        ddp = by_name.get("ddp")
        if ddp and hopeless(ddp, menu.answer):
            ddp = None
        chosen = distinct([menu.answer, *([ddp] if ddp else []), *hybrids[:1], verified, *order[:FINALISTS]])
        chosen = [menu.answer, *self.together(chosen[1:], menu.answer, FINAL)]
        cells = self.run(profile, chosen, Turns(count=len(chosen), least=6, most=60), budget_s)
        times = {p.conduct: cell for p, cell in zip(chosen, cells, strict=True)}
        best = min(cells, key=lambda c: median(c.steps[::2]))
        mine, sure = times[menu.answer.conduct], times.get(verified.conduct) if self.verify else None
        stock = times.get(ddp.conduct) if ddp else None
        hybrid = times.get(hybrids[0].conduct) if hybrids else None
        first_turns = screened[menu.answer.conduct] / screened[hybrids[0].conduct] if hybrids else None
        slower = compare(profile.model_spec, mine, stock) if stock is not None and stock is not mine else None
        return {
            "rounds": len(mine.steps),
            "best": best.strategy,
            "answer_s": codec.to_data(mine.step_time),
            "best_s": codec.to_data(best.step_time),
            "ddp_s": codec.to_data(stock.step_time) if stock else None,
            "hybrid": hybrids[0].strategy if hybrids else None,
            "hybrid_s": codec.to_data(hybrid.step_time) if hybrid else None,
            "regret": max(0.0, _over(mine, best)),
            "verified_regret": max(0.0, _over(sure, best)) if sure else None,
            "over_ddp": _over(mine, stock) + 1 if stock else None,
            "slower_than_ddp": bool(slower and slower.low > 1),
            "share": _share(mine, stock, best),
            "verified_share": _share(sure, stock, best),
            "over_hybrid": _over(mine, hybrid) + 1 if hybrid else first_turns,
            "verified_over_hybrid": _over(sure, hybrid) + 1 if hybrid and sure else None,
            "verified_slower_than_ddp": bool(
                sure and stock and sure is not stock and compare(profile.model_spec, sure, stock).low > 1
            ),
        }


def _over(one: Cell, other: Cell) -> float:
    """Median of the paired ratios of the even rounds, minus 1."""
    return 0.0 if one is other else median(a / b for a, b in zip(one.steps[1::2], other.steps[1::2], strict=True)) - 1


def _share(mine: Cell | None, stock: Cell | None, best: Cell) -> float | None:
    """Of the gain over plain data parallelism; None where there is none beyond noise."""
    if stock is None or mine is None or _over(stock, best) < NOISE:
        return None
    return 1 - _over(mine, best) / _over(stock, best)


def hopeless(one: Plan, answer: Plan) -> bool:
    """Whether it is foreseen to be so slow beside the answer that it is not worth a turn."""
    return one.prediction.step_time_s > HOPELESS * answer.prediction.step_time_s


def fresh(path: Path) -> bool:
    """Whether the file is there and young enough."""
    return path.is_file() and time.time() - path.stat().st_mtime < FRESH_S


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """Each once, the first of its name."""
    found: dict[object, Plan] = {}
    for p in plans:
        found.setdefault(p.conduct, p)
    return list(found.values())


def say(text: str) -> None:
    """To standard error."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure what is missing, show, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="32,16,64")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--random", type=int, default=50, help="random plans")
    parser.add_argument("--changes", type=int, default=999, help="changes of one component, at most")
    parser.add_argument("--verify", type=int, default=4, help="finalists of the verified answer; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", default="10m", help="for the cells that are missing, in turn")
    parser.add_argument("--cell-budget", default=None, help="of one cell (default: the budget over those missing)")
    parser.add_argument("--folder", type=Path, default=Path("runs/regret"))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--input", type=options.shape, help="CxHxW of every model; each one's own where left out")
    parser.add_argument("--megabits", type=float, help="of a rank's link; shared memory where it is left out")
    args = parser.parse_args()
    start_program_again()  # with the heap that `asa train` has
    if args.megabits:
        try:
            leave_network()
        except NotPermitted as why:
            say(f"skipped: no shaped links here: {why}")
            return
    models, batches = args.models.split(","), [int(b) for b in args.batches.split(",")]
    run = Bench(
        folder=args.folder, random=args.random, changes=args.changes, verify=args.verify, seed=args.seed,
        megabits=args.megabits, shape=args.input, console=Console(as_json=True),
    )  # fmt: skip
    grid = [(m, b, r) for r in map(int, args.ranks.split(",")) for b in batches for m in models]
    paths = {x: args.folder / "cells" / f"{x[0].replace(':', '-')}.{x[1]}.{x[2]}.json" for x in grid}
    missing = [x for x in grid if not paths[x].is_file()]
    ends = time.monotonic() + time_span(args.budget)
    for number, (model, batch, ranks) in enumerate(missing):
        left = ends - time.monotonic()
        own = time_span(args.cell_budget) if args.cell_budget else left / (len(missing) - number)
        prepared = PROFILE_S + bench_setup.MEASURE_LIMIT_S
        if left < (own + prepared if args.cell_budget else 0.5 * own):
            say(f"{len(missing) - number} cells are left for another run")
            break
        say(f"{model}, global batch {batch}, {ranks} ranks: {own:.0f} s")
        with shaped(ranks, args.megabits) if args.megabits else nullcontext():
            cell = run.cell(model, batch, ranks, max(batches), own)
        paths[model, batch, ranks].parent.mkdir(parents=True, exist_ok=True)
        paths[model, batch, ranks].write_text(json.dumps(cell, indent=1) + "\n", encoding="utf-8")
    cells = [json.loads(p.read_text(encoding="utf-8")) for p in sorted((args.folder / "cells").glob("*.json"))]
    show(cells)
    if args.output is not None:
        machine = codec.to_data(bench_setup.machine("cpu", max(c["ranks"] for c in cells)))
        document = {"schema_version": 1, "environment": machine, "megabits": args.megabits, "scores": scores(cells),
                    "cells": cells}  # fmt: skip
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
