"""Holds plans at the usual limit against longer searches and against plans by hand, on cases drawn from a grid.

    python benchmarks/limits.py [--cases 40] [--seed 0] [--longer 15] [--against FILE] [-o FILE]

The grid has every preset on up to 8 of its devices, the shipped models, memory of 100, 75, 50 and 35 % of what plain
data parallelism holds, and batches from 8 to 4,096. Each case is searched at the usual limit, and again for
``--longer`` seconds; the best uniform plan is enumerated apart (:mod:`practice`). The fastest plan of the three, and of
the file ``--against``, is the best known one; with that file no longer search is made. The table shows how much slower
the first plan is than the best known one, and its gap.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from annealing import Annealing  # noqa: E402
from practice import best_by_hand  # noqa: E402

from asa.cost.machine import presets  # noqa: E402
from asa.cost.memory.peak import usable  # noqa: E402
from asa.errors import InfeasibleError  # noqa: E402
from asa.ir import codec  # noqa: E402
from asa.ir.cluster import Cluster  # noqa: E402
from asa.ir.profile import Profile  # noqa: E402
from asa.planner import Request, plan, usual_limit  # noqa: E402
from asa.strategies import offered  # noqa: E402

MODELS = ("resnet50", "vit_b_16", "vgg16")
SHARES = (1.0, 0.75, 0.5, 0.35)
BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
MOST = 8
SOON_S = 0.05
CLOSE = 0.005
NEVER = float("inf")


@dataclass(frozen=True)
class Row:
    """A case; seconds of a step of its plan at the usual limit, of a longer search, and by hand; infinite for none."""

    case: str
    first_s: float
    bound_s: float
    longer_s: float
    by_hand_s: float
    best_s: float

    @property
    def behind(self) -> float:
        """By what fraction the first plan is slower than the best one known."""
        return self.first_s / self.best_s - 1 if self.best_s < NEVER else 0.0

    @property
    def gap(self) -> float:
        """The gap of the first plan."""
        return 1 - self.bound_s / self.first_s if self.first_s < NEVER else 1.0


def request_of(profile: Profile, cluster: Cluster, batch: int, share: float) -> Request:
    """A request with ``share`` of the memory that plain data parallelism holds beyond the context of a device."""
    gpus = min(MOST, cluster.num_devices)
    asked = Request(gpus=gpus, global_batch=batch, optimizer="adamw", prefer_simple=False, offload="never")
    free = usable(cluster.device, None, gpus)
    soon = plan(profile, cluster, offered(), replace(asked, time_limit_s=SOON_S))[0]
    held = next(b.memory_bytes_max for b in soon.baselines if b.name == "ddp")
    held = free if held is None else min(free, held)
    return replace(asked, memory_bytes=int(cluster.device.memory_bytes - free + share * held))


def searched(profile: Profile, cluster: Cluster, request: Request, seconds: float) -> tuple[float, float]:
    """Seconds of a step of the plan found in so many seconds of search, and its bound."""
    try:
        found = plan(profile, cluster, offered(), replace(request, time_limit_s=seconds))[0]
    except InfeasibleError:
        return NEVER, NEVER
    return found.prediction.step_time_s, found.certificate.lower_bound_s


def main() -> int:
    """Print a line per case and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longer", type=float, default=15.0, help="seconds of the longer search")
    parser.add_argument("--against", type=Path, help="a file of an earlier run, with the best steps known")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    known = {} if args.against is None else {r["case"]: r for r in json.loads(args.against.read_text())["rows"]}
    grid = [(m, c, s, b) for m in MODELS for c in presets.names() for s in SHARES for b in BATCHES]
    rows = list[Row]()
    for model, name, share, batch in random.Random(args.seed).sample(grid, args.cases):
        profile, cluster = codec.load(Profile, ROOT / "profiles" / f"{model}.cpu.fp32.json"), presets.load(name)
        request = request_of(profile, cluster, batch, share)
        case = f"{model} {name} x{request.gpus} batch {batch} memory {100 * share:g} %"
        first_s, bound_s = searched(profile, cluster, request, usual_limit(request.gpus))
        if case in known:
            longer_s, by_hand_s, best_s = (known[case][k] or NEVER for k in ("longer_s", "by_hand_s", "best_s"))
        else:
            longer_s = searched(profile, cluster, request, args.longer)[0]
            by_hand_s = best_by_hand(Annealing(profile, cluster, offered(), request, random.Random(0)))[0]
            best_s = NEVER
        rows.append(Row(case, first_s, bound_s, longer_s, by_hand_s, min(best_s, first_s, longer_s, by_hand_s)))
        x = rows[-1]
        print(
            f"{'BEHIND ' if x.behind > CLOSE else '':7}{case:62} {1e3 * first_s:9.4g} ms, best "
            f"{1e3 * x.best_s:9.4g} ms ({100 * x.behind:.2f} % behind), gap {100 * x.gap:.2f} %",
            flush=True,
        )
    done = [x for x in rows if x.best_s < NEVER]
    count = len(done)
    summary = {
        "cases": len(rows),
        "with_a_plan": count,
        "plans_within_half_a_percent": sum(x.behind <= CLOSE for x in done),
        "worst_behind": max((x.behind for x in done), default=0.0),
        "gaps_within_one_percent": sum(x.gap <= 0.01 for x in done),
        "gaps_within_three_percent": sum(x.gap <= 0.03 for x in done),
        "worst_gap": max((x.gap for x in done), default=0.0),
    }
    print(json.dumps(summary, indent=1))
    if args.output:
        finite = [{k: None if v == NEVER else v for k, v in vars(x).items()} for x in rows]
        args.output.write_text(json.dumps({"kind": "limits", "seed": args.seed, **summary, "rows": finite}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
