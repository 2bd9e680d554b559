"""Tries to refute certificates: looks for plans that are faster than a bound, or than a plan called optimal.

    python benchmarks/attack.py [--answers 300] [--moves 4000] [--seed 0] [--laws 100] [--seconds S] [-o FILE]

Requests are drawn: a model, a cluster (a preset, one with other links on all levels or one, one with nodes of another
size, one of unequal devices in any order, some with memory of their own), 1 to 64 devices, a batch (also one that no
number of devices divides, or of fewer samples than devices), an optimizer, pins, microbatches, and memory from slack to
hardly enough. Each answer is attacked by annealing over cuts, widths, microbatches, schedules, ways and weights, from
the answer and from plans drawn at random. A plan is priced by the closed forms that `planner.verify` uses
(:mod:`asa.cost.planned`), with the memory that is printed; nothing of the search is used, not even to say which plans
there are. Whoever finds a plan of the named space that fits and is faster than ``lower_bound_s``, or than an answer
called optimal, has refuted it; so has one who finds a plan where nothing is said to fit. A plan outside the named space
that could be run, too, and is more than 1 % faster is *missed*.

With ``--laws``, so many requests are asked again with one device more, links twice as fast, devices a quarter faster,
more memory, or without a pin, a number of microbatches or a whole strategy: what is proved then may not be above what
was found before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "planner_tests"), str(ROOT / "benchmarks")]

import known_models  # noqa: E402
from annealing import CLOSE, NEVER, Annealing, Trial  # noqa: E402

from asa.cost.machine import presets, widen  # noqa: E402
from asa.cost.memory.peak import usable  # noqa: E402
from asa.errors import AsaError, InfeasibleError  # noqa: E402
from asa.interfaces.strategy import Strategies  # noqa: E402
from asa.ir import codec  # noqa: E402
from asa.ir.cluster import Cluster, RankDevice  # noqa: E402
from asa.ir.plan import Plan  # noqa: E402
from asa.ir.profile import Profile  # noqa: E402
from asa.planner import Pin, Request, plan, verify  # noqa: E402
from asa.strategies import offered  # noqa: E402


@dataclass(frozen=True)
class Verdict:
    """What became of an attack. Seconds; ``beyond_s`` is the fastest plan outside the named space."""

    case: str
    status: str
    answer_s: float
    lower_bound_s: float
    fastest_s: float
    priced: int
    refuted: str = ""
    beyond_s: float = NEVER
    missed: str = ""


def attack(
    answer: Plan, profile: Profile, cluster: Cluster, strategies: Strategies, request: Request, *, moves: int,
    seed: int, case: str = "",
) -> Verdict:  # fmt: skip
    """Half of the moves from the answer, half from plans at random; of both a quarter beyond the named space."""
    ordered = cluster.ordered(cluster.fastest_first())
    x = Annealing(profile, ordered, strategies, request, random.Random(seed), answer.certificate.space)
    own, said = x.answered(answer), answer.prediction.step_time_s
    taken, over = x.seconds(own)
    again = verify(answer, profile, cluster, strategies).step_time_s
    refuted = ""
    if max(abs(taken - said), abs(again - said)) > 1e-6 * said or over > 0:
        refuted = f"the answer takes {taken:.9g} s and oversteps its memory by {100 * over:.3g} %, it says {said:.9g} s"
    elif not (x.runs(own) and x.named(own)):
        refuted = f"the answer is not in the space that its certificate names: {shown(own)}"
    _walks(x, own, moves)
    bound, (best, found), (beyond, outside) = answer.certificate.lower_bound_s, x.best, x.beyond
    if best < bound * (1 - CLOSE) and found is not None:
        refuted = f"a plan takes {best:.9g} s, the bound is {bound:.9g} s: {shown(found)}"
    elif answer.certificate.status == "optimal" and best < said * (1 - 2e-6) and found is not None:
        refuted = f"a plan takes {best:.9g} s, {said:.9g} s are called optimal: {shown(found)}"
    missed = f"{100 * (1 - beyond / said):.3g} % faster: {shown(outside)}" if outside and beyond < 0.99 * said else ""
    return Verdict(case, answer.certificate.status, said, bound, best, x.priced, refuted, beyond, missed)


def attack_refusal(
    profile: Profile, cluster: Cluster, strategies: Strategies, request: Request, *, moves: int, seed: int, case: str
) -> Verdict:
    """An attack on the statement that nothing fits."""
    ordered = cluster.ordered(cluster.fastest_first())
    x = Annealing(profile, ordered, strategies, request, random.Random(seed))
    _walks(x, None, moves, fit=True)
    inside, outside = (f"a plan fits: {shown(t)}" if t is not None else "" for _, t in (x.best, x.beyond))
    return Verdict(case, "nothing fits", NEVER, NEVER, x.best[0], x.priced, inside, x.beyond[0], outside)


def _walks(x: Annealing, own: Trial | None, moves: int, *, fit: bool = False) -> None:
    if own is not None:
        x.annealed(own, moves * 3 // 8)
        x.annealed(own, moves // 8, wide=True)
    for k in range(4):
        drawn = (x.drawn() for _ in range(300))
        start = next((s for s in drawn if x.runs(s) and (k == 3 or x.named(s))), None)
        if start is not None and not (fit and x.best[1]):
            x.annealed(start, moves // 8, wide=k == 3, fit=fit)


def shown(x: Trial) -> str:
    """A plan in a line: stages with their widths, microbatches, and runs of components that run alike."""
    runs = list[list[str]]()
    for i, way in enumerate(x.ways):
        layout = way.layout
        text = f"{way.data.strategy} d{layout.data}t{layout.tensor}" + " again" * way.checkpoint + " host" * way.offload
        if runs and runs[-1][0] == text and i not in x.starts:
            runs[-1].append(text)
        else:
            runs.append([text])
    ways = ", ".join(f"{len(r)} x {r[0]}" for r in runs)
    weights = x.ways[0].layout.weights
    cut = f", weights {'/'.join(map(str, weights))}" if weights else ""
    return f"stages at {x.starts} of {x.widths} ranks, m={x.microbatches}, {x.schedule}{cut}: {ways}"


def faster_links(cluster: Cluster, factor: float, only: int | None = None) -> Cluster:
    """All messages, or those of one level, in ``1 / factor`` of their time."""
    levels = [
        level if only not in (None, k) else replace(level, tables=tuple(
            replace(t, points=tuple((size, s / factor) for size, s in t.points)) for t in level.tables
        ))
        for k, level in enumerate(cluster.levels)
    ]  # fmt: skip
    where = "links" if only is None else cluster.levels[only].name
    return replace(cluster, levels=tuple(levels), name=f"{cluster.name}-{where}-{factor:.3g}")


def unequal(cluster: Cluster, gpus: int, rng: random.Random) -> Cluster:
    """One or a few slow devices, or devices of two or three kinds, in any order."""
    slow = [RankDevice(name=f"slow{k}", speed=1 / rng.uniform(1.3, 6)) for k in range(rng.choice([1, 1, 2]))]
    fast = RankDevice(name="fast", speed=1.0)
    if rng.random() < 0.5:
        few = rng.randint(1, min(3, gpus - 1))
        devices = [fast] * (gpus - few) + [rng.choice(slow) for _ in range(few)]
    else:
        devices = [fast, slow[0], *(rng.choice([fast, *slow]) for _ in range(gpus - 2))]
    devices += [min(slow, key=lambda d: d.speed)] * (cluster.num_devices - gpus)
    if rng.random() < 0.6:
        rng.shuffle(devices)
    return replace(cluster, devices=tuple(devices))


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
    if not small and rng.random() < 0.1:  # measured, on processors that slow each other down
        name = rng.choice(["resnet50", "vgg16", "vit_b_16"])
        profile = codec.load(Profile, ROOT / "profiles" / f"{name}.cpu.fp32.json")
        cluster = codec.load(Cluster, ROOT / "profiles" / f"cluster.local-gloo-{rng.choice([2, 4])}.json")
    if not small and len(cluster.levels) > 1 and rng.random() < 0.5:
        cluster = widen.widened(cluster, 64) if widen.possible(cluster, 64) else cluster
    if not small and len(cluster.levels) > 1 and rng.random() < 0.2:  # nodes of another size, or none
        inner, *outer = cluster.levels
        each = rng.choice([2, 4, 0])
        levels = (replace(inner, devices=each), *outer) if each else outer
        cluster = replace(cluster, levels=tuple(levels), name=f"{cluster.name}-in-nodes-of-{each or 'all'}")
    cluster = faster_links(cluster, math.exp(rng.uniform(-1.2, 1.2)))
    if len(cluster.levels) > 1 and rng.random() < 0.3:
        cluster = faster_links(cluster, math.exp(rng.uniform(-2.5, 0)), rng.randrange(len(cluster.levels)))
    most = cluster.num_devices
    numbers = (1, 2, 3, 4, 5, 6, 7, 8, rng.randint(9, 16), rng.randint(9, 16), 16, rng.randint(17, 64), 32, 64)
    gpus = min(most, rng.choice([1, 2, 3, 4, 4])) if small else rng.choice([g for g in numbers if g <= most])
    if rng.random() < 0.45 and gpus > 1:
        cluster = unequal(cluster, gpus, rng)
    usual = rng.choice([16, 30, 64, 128] if small else [32, 64, 100, 256, 512])
    batch = rng.choice([usual, usual, rng.randint(gpus + 1, 4 * gpus + 4), rng.randint(max(2, gpus // 2), gpus + 2)])
    request = Request(
        gpus=gpus, global_batch=batch, optimizer=rng.choice(["sgd", "adamw"]), prefer_simple=False, offload="never",
        uneven=rng.random() < 0.9, time_limit_s=0.4 if small else 2.0,
    )  # fmt: skip
    memory = "slack"
    if rng.random() < 0.7:
        free = plan(profile, cluster, offered(), replace(request, time_limit_s=0.3))[0]
        held = max(free.prediction.memory_bytes_per_rank)
        context = cluster.device.memory_bytes - usable(cluster.device, None, gpus)
        shares = [1.05, 0.9, 0.75, 0.6, 0.45, 0.3]
        sizes = [int(context + 1.1 * held * rng.choice(shares)) for _ in range(3)]
        if cluster.devices is not None and rng.random() < 0.5:  # each kind of device has its own, or some of a kind
            kinds = list(dict.fromkeys(cluster.devices))
            own = {d: replace(d, memory_bytes=rng.choice(sizes)) for d in kinds}
            devices = [own[d] if rng.random() < 0.9 else replace(d, memory_bytes=sizes[0]) for d in cluster.devices]
            cluster, memory = replace(cluster, devices=tuple(devices)), "each its memory"
        else:
            request = replace(request, memory_bytes=sizes[0], offload="auto" if rng.random() < 0.2 else "never")
            memory = f"{sizes[0] / 2**30:.3g} GiB, offload {request.offload}"
    fixed = ""
    if rng.random() < 0.1:
        request = replace(request, microbatches=min(2 ** rng.randint(0, 3), 2 ** (batch.bit_length() - 1)))
        fixed = f", {request.microbatches} microbatches"
    if rng.random() < 0.12:
        part, strategy = rng.choice(profile.graph.components), rng.choice(["replicate", "zero1", "zero3", "tensor"])
        request = replace(request, pins=(Pin(pattern=part.name, strategy=strategy),))
        fixed += f", {request.pins[0]}"
    mixed = ""
    if cluster.devices is not None:
        mixed = f" ({' '.join(f'{d.speed:.3g}' for d in cluster.devices[:16])})"
    said = (
        f"{name} of {len(profile.graph)}, {gpus} x {cluster.name}{mixed}, batch {batch}, {request.optimizer}, "
        f"{memory}{fixed}"
    )
    return said, profile, cluster, request


def laws(profile: Profile, cluster: Cluster, request: Request, before: Plan, rng: random.Random) -> Iterator[str]:
    """For each law what is broken, empty where it holds: a request that leaves more room has no bound above what was
    found with less."""
    ordered = cluster.ordered(cluster.fastest_first())
    more: dict[str, tuple[Cluster, Request]] = {"links twice as fast": (faster_links(cluster, 2.0), request)}
    pairs: list[tuple[str, Plan, Plan]] = []
    if request.gpus < cluster.num_devices:
        asked = replace(request, gpus=request.gpus + 1)
        after = plan(profile, cluster, offered(), asked)[0]
        space = Annealing(profile, ordered, offered(), asked, rng, after.certificate.space)
        searched = space.several_widths if len(before.stages) > 1 else space.single_widths
        if all(len(s.ranks) in searched for s in before.stages):  # else the plan of before is not in the space of after
            priced = verify(replace(before, gpus=asked.gpus), profile, cluster, offered())  # with so many devices busy
            pairs.append(("one device more", replace(before, prediction=priced), after))
    if request.memory_bytes is not None:
        more["more memory"] = (cluster, replace(request, memory_bytes=int(1.15 * request.memory_bytes)))
    if cluster.devices is not None:
        quick = tuple(replace(d, speed=d.speed * 1.25) for d in cluster.devices)
        more["faster devices"] = (replace(cluster, devices=quick), request)
        memories = [int(1.15 * m) for m in cluster.memories()]
        roomy = tuple(replace(d, memory_bytes=m) for d, m in zip(cluster.devices, memories, strict=True))
        if any(d.memory_bytes is not None for d in cluster.devices):
            more["devices of more memory"] = (replace(cluster, devices=roomy), request)
    pairs += [(name, before, plan(profile, other, offered(), asked)[0]) for name, (other, asked) in more.items()]
    component = rng.choice(before.components)
    pin = Pin(pattern=component.name, strategy=component.data.strategy, degree=component.data.degree)
    less: dict[str, Request] = {}
    if not request.pins:
        less["a pin less"] = replace(request, pins=(pin,))
        less["any strategy"] = replace(request, strategies=(rng.choice(["ddp", "fsdp", "tensor", "1f1b", "hybrid"]),))
    if request.microbatches is None and 2 * before.num_microbatches <= request.global_batch:
        less["any microbatches"] = replace(request, microbatches=2 * before.num_microbatches)
    space = Annealing(profile, ordered, offered(), request, rng, before.certificate.space)
    for name, asked in less.items():
        try:
            tighter = plan(profile, cluster, offered(), asked)[0]
        except AsaError:  # not so many devices, samples or bytes
            continue
        if space.named(space.answered(tighter)):  # with pins, components of wide stages may repeat work, too
            pairs.append((name, tighter, before))
    for name, tighter, found in pairs:
        taken, least = tighter.prediction.step_time_s, found.certificate.lower_bound_s
        broken = least > taken * (1 + CLOSE)
        yield f"{name}: {taken:.6g} s before, at least {least:.6g} s then" if broken else ""


def written(verdict: Verdict) -> dict[str, Any]:
    """A verdict for a record: what is infinite or empty is left out."""
    return {k: v for k, v in vars(verdict).items() if v != "" and not (isinstance(v, float) and math.isinf(v))}


def _report(verdict: Verdict) -> None:
    for what, said in (("REFUTED", verdict.refuted), ("MISSED", verdict.missed)):
        if said:
            print(f"{what} {verdict.case} ({verdict.status}): {said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=300)
    parser.add_argument("--moves", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--laws", type=int, default=100, help="answers that are asked for again with more room")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no answer later than this")
    parser.add_argument("--small", action="store_true", help="chains of a few components on up to four devices")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    verdicts, refusals, broken, asked_again = list[Verdict](), list[Verdict](), list[str](), 0
    ends = time.monotonic() + args.seconds
    for k in itertools.takewhile(lambda _: time.monotonic() < ends, range(args.answers)):
        rng = random.Random(args.seed * 1_000_003 + k)
        case, profile, cluster, request = drawn(rng, small=args.small)
        named = {"moves": args.moves, "seed": k, "case": f"{k}: {case}"}
        try:
            answer = plan(profile, cluster, offered(), request)[0]
        except InfeasibleError as why:
            if "in time" in str(why):
                continue
            refusals.append(attack_refusal(profile, cluster, offered(), request, **named))
            _report(refusals[-1])
            continue
        verdicts.append(attack(answer, profile, cluster, offered(), request, **named))
        _report(verdicts[-1])
        if k < args.laws:
            for said in laws(profile, cluster, request, answer, rng):
                asked_again += 1
                if said:
                    broken.append(f"{verdicts[-1].case}: {said}")
                    print(f"BROKEN {broken[-1]}", flush=True)
    refuted = [v for v in (*verdicts, *refusals) if v.refuted]
    missed = [v for v in (*verdicts, *refusals) if v.missed]
    optimal = sum(v.status == "optimal" for v in verdicts)
    faster = sorted((1 - v.fastest_s / v.answer_s for v in verdicts), reverse=True)[:5]
    tried = sum(v.priced for v in (*verdicts, *refusals))
    print(f"{len(verdicts)} answers ({optimal} called optimal; {len(refusals)} requests refused), {tried} plans")
    print(f"{len(refuted)} refuted; {len(broken)} of {asked_again} laws broken; {len(missed)} missed")
    print("faster than the answer, within its gap: " + ", ".join(f"{100 * max(0.0, x):.2g} %" for x in faster))
    if args.output:
        record = {
            "kind": "attack", "seed": args.seed, "answers": len(verdicts), "moves": args.moves, "optimal": optimal,
            "refusals": len(refusals), "plans_priced": tried, "refuted": len(refuted), "missed": len(missed),
            "laws_tried": asked_again, "laws_broken": broken, "verdicts": [written(v) for v in (*verdicts, *refusals)],
        }  # fmt: skip
        args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if refuted or broken else 0


if __name__ == "__main__":
    sys.exit(main())
