"""Holds answers against what an engineer would configure by hand, with a plain enumeration of it.

    python benchmarks/practice.py [--models resnet50 llama:8b] [--gpus 1 8 64] [--batches 8 16] [-o FILE]

By hand means: one split of all devices over data, tensor (also by tokens) and pipeline parallelism, one way to keep
state (plain replicas or ZeRO-1, 2, 3), one number of microbatches, and one share of the blocks recomputed, the same in
every stage.
Stages have as many components each, or are balanced by their compute. All such plans are priced, one by one, by the
closed forms that `planner.verify` uses (:class:`annealing.Annealing`); nothing of the search, and none of its
baselines, is in it. An answer more than 0.5 % slower than the best of them is a failure.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from annealing import Annealing, Trial

from asa.cost.machine import presets, widen
from asa.cost.machine.estimate import estimate
from asa.errors import InfeasibleError
from asa.ir.cluster import Cluster
from asa.ir.layout import Layout
from asa.ir.profile import Precision, Profile
from asa.planner import Request, plan, usual_limit
from asa.strategies import offered

BEHIND = 0.005
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
KINDS = ("replicate", "zero1", "zero2", "zero3")
MODELS = ("resnet50", "vit_b_16", "vit_l_16", "vit_h_14", "gpt2", "gpt2:xl", "llama:8b", "llama:70b")
GPUS = (1, 8, 16, 64, 128, 1024)
_TOKENS = {"gpt2": 1024, "llama": 4096}
_NODE = 8
_NEVER = float("inf")


@dataclass(frozen=True)
class Row:
    """An answer beside the best plan by hand; seconds of a step, and of the search."""

    model: str
    gpus: int
    global_batch: int
    memory_gib: float | None
    answer_s: float
    by_hand_s: float
    by_hand: str
    gap: float
    search_s: float
    priced: int

    @property
    def behind(self) -> float:
        """How much slower the answer is, as a share; negative where it is faster."""
        return self.answer_s / self.by_hand_s - 1 if self.by_hand_s < _NEVER else -1.0


def equal_stages(costs: Sequence[float], p: int, allowed: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """First components of ``p`` stages: of as many components each, and of as much compute each."""
    n = len(costs)
    for weight in ([1.0] * n, list(costs)):
        total, sums = sum(weight), [0.0]
        for w in weight:
            sums.append(sums[-1] + w)
        starts = [0]
        for s in range(1, p):
            left = [c for c in allowed if c > starts[-1]][: None if s == p - 1 else -(p - 1 - s)]
            if not left:
                break
            starts.append(min(left, key=lambda c: abs(sums[c] - total * s / p)))
        if len(starts) == p:
            yield tuple(starts)


def plans(x: Annealing) -> Iterator[tuple[str, Trial]]:
    """Every plan by hand for the request of ``x``, with a name."""
    gpus, n = x.request.gpus, len(x.parts)
    cuts = [i for i in range(1, n) if x.used.graph.cuttable(i)]
    costs = [c.flops_per_sample for c in x.parts]
    degrees = [t for t in (1, 2, 4, 8) if t <= _NODE and gpus % t == 0]
    for t in degrees:
        for p in (p for p in range(1, min(n, gpus // t, 64) + 1) if gpus % (t * p) == 0):
            d = gpus // t // p
            stages = list(equal_stages(costs, p, cuts)) if p > 1 else [(0,)]
            splits = (False, True) if t > 1 and x.by_tokens else (False,)
            for kind, by_tokens in product(KINDS if d > 1 else KINDS[:1], splits):
                layout, split = Layout(width=d * t, data=d, tensor=t, sequence=by_tokens), " by tokens" * by_tokens
                for share in SHARES:
                    # Evenly spread, as a selective policy spreads them; counted over blocks of the whole model.
                    ways = tuple(x.way(i, layout, kind, int((i + 1) * share) > int(i * share)) for i in range(n))
                    for m in (2**k for k in range(11) if 2**k * d <= x.request.global_batch):
                        for starts in dict.fromkeys(stages):
                            for schedule in ("1f1b",) if p > 1 else ("none",):
                                name = f"d{d} t{t}{split} p{p} {kind}, {m} microbatches, {100 * share:g} % recomputed"
                                yield name, Trial(starts, (d * t,) * p, m, schedule, ways)


def best_by_hand(x: Annealing) -> tuple[float, str]:
    """Seconds and name of the fastest plan by hand that fits; infinite where none does."""
    best, named = _NEVER, ""
    for name, trial in plans(x):
        if x.runs(trial) and x.named(trial):
            taken, over = x.seconds(trial)
            if over <= 0 and taken < best:
                best, named = taken, name
    return best, named


def profile_of(spec: str, cluster: Cluster, batch: int) -> Profile:
    """An estimate of ``spec`` on the devices of ``cluster``, from its structure, in bf16, or in fp16 on older ones."""
    from asa.sharding.layers.structure import structure_of
    from asa.zoo.inputs import example
    from asa.zoo.models import build, default_input
    from asa.zoo.without_values import on_meta

    tokens = _TOKENS.get(spec.partition(":")[0])
    shape, classes = default_input(spec, (tokens,) if tokens else (3, 224, 224), None if tokens else 1000)
    make = partial(build, spec, num_classes=classes, input_shape=shape)
    precision: Precision = "bf16" if cluster.device.peak_flops("bf16") else "fp16"
    found = structure_of(
        partial(on_meta, make), make, example(shape), name=spec, num_classes=classes, precision=precision
    )
    return estimate(
        found.graph, cluster.device, model_spec=spec, model_fingerprint=found.fingerprint, precision=precision,
        global_batch=batch, max_degree=_NODE, trained_on_one=found.trains_on_one,
    )  # fmt: skip


def compared(spec: str, profile: Profile, cluster: Cluster, request: Request) -> Row | None:
    """The answer to ``request`` beside the best plan by hand; None where neither has one.

    Raises:
        InfeasibleError: no plan is found, and there is one by hand.
    """
    x = Annealing(profile, cluster, offered(), request, random.Random(0))
    by_hand, name = best_by_hand(x)
    begun = time.process_time()
    try:
        answer = plan(profile, cluster, offered(), request)[0]
    except InfeasibleError:
        if by_hand < _NEVER:
            raise
        return None
    gib = None if request.memory_bytes is None else request.memory_bytes / 2**30
    return Row(
        spec, request.gpus, request.global_batch, gib, answer.prediction.step_time_s, by_hand, name,
        answer.certificate.gap, time.process_time() - begun, x.priced,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", type=int, default=list(GPUS))
    parser.add_argument("--batches", nargs="+", type=int, default=[8], help="samples per device")
    parser.add_argument("--memory", type=float, help="GiB of a device")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    rows = list[Row]()
    for spec in args.models:
        profile = None
        for gpus in args.gpus:
            cluster = presets.load("h100-nvlink-8") if gpus <= _NODE else presets.load("h100-4x8-ib")
            cluster = widen.widened(cluster, gpus) if gpus > cluster.num_devices else cluster
            profile = profile or profile_of(spec, cluster, max(args.batches) * max(args.gpus))
            for each in args.batches:
                request = Request(
                    gpus=gpus, global_batch=each * gpus, optimizer="adamw", offload="never",
                    memory_bytes=args.memory and int(args.memory * 2**30), time_limit_s=usual_limit(gpus),
                )  # fmt: skip
                row = compared(spec, profile, cluster, request)
                if row is None:
                    print(f"{spec:10} x{gpus:<5} batch {each * gpus:<6} does not fit", flush=True)
                    continue
                rows.append(row)
                print(
                    f"{'BEHIND ' if row.behind > BEHIND else ''}{spec:10} x{gpus:<5} batch {row.global_batch:<6} "
                    f"{1e3 * row.answer_s:10.4g} ms, by hand {1e3 * row.by_hand_s:10.4g} ms "
                    f"({100 * row.behind:+.2f} %; {row.by_hand}), "
                    f"gap {100 * row.gap:.2g} %, {row.search_s:.1f} s, {row.priced} priced",
                    flush=True,
                )  # fmt: skip
    worst = max((r.behind for r in rows), default=0.0)
    print(f"{len(rows)} answers, {sum(r.behind > BEHIND for r in rows)} behind, worst {100 * worst:+.2f} %")
    if args.output:
        args.output.write_text(json.dumps([vars(r) for r in rows], indent=1) + "\n", encoding="utf-8")
    return 1 if worst > BEHIND else 0


if __name__ == "__main__":
    sys.exit(main())
