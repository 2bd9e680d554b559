"""Tries to refute certificates: looks for plans that are faster than a bound, or than a plan called optimal.

    python benchmarks/attack.py [--answers 300] [--moves 4000] [--seed 0] [--laws 100] [-o FILE]

Requests are drawn: a model, a cluster (a preset, one with other links, one of unequal devices), 1 to 64 devices, a
batch, an optimizer, and memory from slack to hardly enough. Each answer is attacked by annealing over cuts, widths,
microbatches, schedules, ways and weights, from the answer and from plans drawn at random. A plan is priced by the
closed forms that `planner.verify` uses (:mod:`asa.cost.planned`), with the memory that is printed; nothing of the
search is used, not even to say which plans there are. Whoever finds a plan that fits and is faster than
``lower_bound_s``, or than an answer called optimal, has refuted it.

With ``--laws``, so many requests are asked again with one device more, links twice as fast, devices a quarter faster,
more memory, or a pin less: what is proved then may not be above what was found before.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "planner_tests"), str(ROOT / "benchmarks")]

import known_models  # noqa: E402
from annealing import CLOSE, Annealing  # noqa: E402

from asa.cost.machine import presets, widen  # noqa: E402
from asa.cost.memory.peak import usable  # noqa: E402
from asa.errors import InfeasibleError  # noqa: E402
from asa.interfaces.strategy import Strategies  # noqa: E402
from asa.ir.cluster import Cluster, RankDevice  # noqa: E402
from asa.ir.plan import Plan  # noqa: E402
from asa.ir.profile import Profile  # noqa: E402
from asa.planner import Pin, Request, plan  # noqa: E402
from asa.strategies import offered  # noqa: E402


@dataclass(frozen=True)
class Verdict:
    """What became of an attack. Seconds."""

    case: str
    status: str
    answer_s: float
    lower_bound_s: float
    fastest_s: float
    priced: int
    refuted: str = ""


def attack(
    answer: Plan, profile: Profile, cluster: Cluster, strategies: Strategies, request: Request, *, moves: int,
    seed: int, case: str = "",
) -> Verdict:  # fmt: skip
    """Half of the moves from the answer, half from plans at random."""
    x = Annealing(profile, cluster, strategies, request, random.Random(seed))
    own = x.answered(answer)
    said = answer.prediction.step_time_s
    taken, over = x.seconds(own)
    refuted = ""
    if abs(taken - said) > 1e-6 * said or over > 0:
        refuted = f"the answer takes {taken:.9g} s and oversteps its memory by {100 * over:.3g} %, it says {said:.9g} s"
    best, _ = x.annealed(own, moves // 2)
    for _ in range(3):
        start = next((s for s in (x.drawn() for _ in range(200)) if x.possible(s)), None)
        if start is not None:
            best = min(best, x.annealed(start, moves // 6)[0])
    bound = answer.certificate.lower_bound_s
    if best < bound * (1 - CLOSE):
        refuted = f"a plan takes {best:.9g} s, the bound is {bound:.9g} s"
    elif answer.certificate.status == "optimal" and best < said * (1 - 2e-6):
        refuted = f"a plan takes {best:.9g} s, {said:.9g} s are called optimal"
    return Verdict(case, answer.certificate.status, said, bound, best, x.priced, refuted)


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    """All messages in ``1 / factor`` of their time."""
    levels = [
        replace(level, tables=tuple(
            replace(t, points=tuple((size, s / factor) for size, s in t.points)) for t in level.tables
        ))
        for level in cluster.levels
    ]  # fmt: skip
    return replace(cluster, levels=tuple(levels), name=f"{cluster.name}-links-{factor:.3g}")


def drawn(rng: random.Random, *, small: bool = False) -> tuple[str, Profile, Cluster, Request]:
    """A request at random: what it is, in words, and all that it takes."""
    models: list[tuple[str, Callable[[], Any]]] = [
        ("chain", lambda: known_models.transformer(rng.randint(1, 3), rng.choice([256, 512, 1024]), 197)),
        ("vgg16", known_models.vgg16),
    ]
    if not small:
        models += [("resnet50", known_models.resnet50), ("vit", known_models.transformer)]
    name, model = rng.choice(models)
    profile = known_models.profile(model(), rng.choice([100.0, 400.0, 2000.0]), 64)
    known = [presets.load(n) for n in presets.names()]
    cluster = rng.choice([c for c in known if c.devices is None and (not small or c.num_devices <= 8)])
    if not small and len(cluster.levels) > 1 and rng.random() < 0.5:
        cluster = widen.widened(cluster, 64) if widen.possible(cluster, 64) else cluster
    cluster = faster_links(cluster, math.exp(rng.uniform(-1.2, 1.2)))
    most = cluster.num_devices
    gpus = (
        rng.randint(1, min(4, most))
        if small
        else rng.choice([g for g in (1, 2, 3, 4, 5, 6, 8, 16, 32, 64) if g <= most])
    )
    if rng.random() < 0.3 and 1 < gpus <= 8:
        slow = rng.randint(1, gpus - 1)
        speeds = [1.0] * (gpus - slow) + [rng.choice([0.9, 0.7, 0.5, 0.3])] * (most - gpus + slow)
        cluster = replace(cluster, devices=tuple(RankDevice(name=f"at {s:g}", speed=s) for s in speeds))
    batch = rng.choice([16, 30, 64, 128] if small else [32, 64, 100, 256, 512])
    request = Request(
        gpus=gpus, global_batch=batch, optimizer=rng.choice(["sgd", "adamw"]), prefer_simple=False, offload="never",
        time_limit_s=0.4 if small else 2.0,
    )  # fmt: skip
    if rng.random() < 0.7:
        free = plan(profile, cluster, offered(), request)[0]
        held = max(free.prediction.memory_bytes_per_rank)
        context = cluster.device.memory_bytes - usable(cluster.device, None, gpus)
        share = rng.choice([1.05, 0.9, 0.75, 0.6, 0.45, 0.3])
        request = replace(request, memory_bytes=int(context + 1.1 * held * share))
    memory = "slack" if request.memory_bytes is None else f"{request.memory_bytes / 2**30:.3g} GiB"
    mixed = ", unequal" if cluster.unequal else ""
    said = (
        f"{name} of {len(profile.graph)}, {gpus} x {cluster.name}{mixed}, batch {batch}, {request.optimizer}, {memory}"
    )
    return said, profile, cluster, request


def laws(profile: Profile, cluster: Cluster, request: Request, before: Plan, rng: random.Random) -> Iterator[str]:
    """For each law what is broken, empty where it holds: a request that leaves more room has no bound above what was
    found with less."""
    more: dict[str, tuple[Cluster, Request]] = {"links twice as fast": (faster_links(cluster, 2.0), request)}
    if request.gpus < cluster.num_devices and not cluster.unequal:
        more["one device more"] = (cluster, replace(request, gpus=request.gpus + 1))
    if request.memory_bytes is not None:
        more["more memory"] = (cluster, replace(request, memory_bytes=int(1.15 * request.memory_bytes)))
    if cluster.devices is not None:
        quick = tuple(replace(d, speed=d.speed * 1.25) for d in cluster.devices)
        more["faster devices"] = (replace(cluster, devices=quick), request)
    component = rng.choice(before.components)
    pin = Pin(pattern=component.name, strategy=component.data.strategy, degree=component.data.degree)
    pairs = [(name, before, plan(profile, other, offered(), asked)[0]) for name, (other, asked) in more.items()]
    pairs.append(("a pin less", plan(profile, cluster, offered(), replace(request, pins=(pin,)))[0], before))
    for name, less, found in pairs:
        taken, least = less.prediction.step_time_s, found.certificate.lower_bound_s
        broken = least > taken * (1 + CLOSE)
        yield f"{name}: {taken:.6g} s before, at least {least:.6g} s then" if broken else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=300)
    parser.add_argument("--moves", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--laws", type=int, default=100, help="answers that are asked for again with more room")
    parser.add_argument("--small", action="store_true", help="chains of a few components on up to four devices")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    verdicts, broken, infeasible, asked_again = list[Verdict](), list[str](), 0, 0
    for k in range(args.answers):
        rng = random.Random(args.seed * 1_000_003 + k)
        try:
            case, profile, cluster, request = drawn(rng, small=args.small)
            answer = plan(profile, cluster, offered(), request)[0]
        except InfeasibleError:
            infeasible += 1
            continue
        found = attack(answer, profile, cluster, offered(), request, moves=args.moves, seed=k, case=f"{k}: {case}")
        verdicts.append(found)
        if found.refuted:
            print(f"REFUTED {found.case}: {found.refuted}", flush=True)
        if k < args.laws:
            for said in laws(profile, cluster, request, answer, rng):
                asked_again += 1
                if said:
                    broken.append(f"{found.case}: {said}")
                    print(f"BROKEN {broken[-1]}", flush=True)
    refuted = [v for v in verdicts if v.refuted]
    optimal = sum(v.status == "optimal" for v in verdicts)
    missed = sorted((1 - v.fastest_s / v.answer_s for v in verdicts), reverse=True)[:5]
    tried = sum(v.priced for v in verdicts)
    print(f"{len(verdicts)} answers ({optimal} called optimal; {infeasible} requests without a plan), {tried} plans")
    print(f"{len(refuted)} refuted; {len(broken)} of {asked_again} laws broken")
    print("faster than the answer, within its gap: " + ", ".join(f"{100 * max(0.0, x):.2g} %" for x in missed))
    if args.output:
        record = {
            "kind": "attack", "seed": args.seed, "answers": len(verdicts), "moves": args.moves, "optimal": optimal,
            "plans_priced": tried, "refuted": len(refuted), "laws_tried": asked_again, "laws_broken": broken,
            "verdicts": [vars(v) for v in verdicts],
        }  # fmt: skip
        args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if refuted or broken else 0


if __name__ == "__main__":
    sys.exit(main())
