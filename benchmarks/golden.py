"""Plan the golden cases anew: ``make golden``. The diff of ``planner_tests/golden/plans.json`` is the review of a
cost-model change.

Cases: the profiles that are shipped on the clusters measured with them (profiles of one's own beside them change
nothing), and the chains of ``planner_tests/known_models.py`` at published single-GPU rates over presets from NVSwitch
to 25 Gbit/s; memory limits from slack to tight, in shares of what plain data parallelism would take on the same
devices.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "planner_tests" / "golden" / "plans.json"
sys.path.insert(0, str(ROOT / "planner_tests"))

import known_models  # noqa: E402

from asa.cost.machine import presets  # noqa: E402
from asa.cost.machine.estimate import on_device  # noqa: E402
from asa.cost.memory.peak import needed  # noqa: E402
from asa.errors import InfeasibleError  # noqa: E402
from asa.ir import codec  # noqa: E402
from asa.ir.cluster import Cluster  # noqa: E402
from asa.ir.plan import Plan  # noqa: E402
from asa.ir.profile import Profile  # noqa: E402
from asa.ir.units import GIB  # noqa: E402
from asa.planner import Request, plan  # noqa: E402
from asa.planner.space import baselines  # noqa: E402
from asa.planner.space.candidate import Prices  # noqa: E402
from asa.planner.space.space import Space  # noqa: E402
from asa.strategies import offered  # noqa: E402

CLUSTERS = (
    "a100-nvlink-8",
    "h100-nvlink-8",
    "b200-nvlink-8",
    "v100-dgx1-8",
    "3090-pcie-8",
    "l4-pcie-8",
    "l4-8x1-25g-rdma",
    "t4-8x1-25g-tcp",
)
SHIPPED = ("resnet50.cpu.fp32", "vgg16.cpu.fp32", "vit_b_16.cpu.fp32")
SHIPPED_CLUSTERS = ("local-gloo-2", "local-gloo-4")
SHARES = (None, 0.75, 0.5, 0.3)
LIMIT_S = 6.0
"""Longest search of a case; where it ends with a gap, another machine may come to another plan."""
_SLOWER = 0.005
"""Share by which a plan may be slower than the stored one."""

Solve = Callable[[], dict[str, Any]]


def profiles() -> Iterator[tuple[str, Profile, int]]:
    """(Name, profile, global batch) of every case."""
    yield "resnet50-224", known_models.profile(known_models.resnet50(), 938.0, 64), 256
    yield "resnet50-32", known_models.profile(known_models.resnet50(32, 100), 9000.0, 64), 256
    yield "vgg16-32", known_models.profile(known_models.vgg16(32, 100), 8000.0, 64), 256
    yield "vit-224", known_models.profile(known_models.transformer(), 500.0, 64), 256


def cases() -> Iterator[tuple[str, Solve]]:
    """(Key, what gives its figures) of every case, in order."""
    yield from committed()
    for name, profile, batch in profiles():
        for cluster_name in CLUSTERS:
            cluster = presets.load(cluster_name)
            request = Request(gpus=8, global_batch=batch, prefer_simple=False, time_limit_s=LIMIT_S)
            for share in SHARES:
                key = f"{name} {cluster_name} {'slack' if share is None else f'{100 * share:g}%'}"
                yield key, partial(solved, profile, cluster, request, share)


def committed() -> Iterator[tuple[str, Solve]]:
    """The shipped profiles on the clusters measured with them, slack and at half of what stock data parallelism
    takes."""
    folder = ROOT / "profiles"
    clusters = [codec.load(Cluster, folder / f"cluster.{name}.json") for name in SHIPPED_CLUSTERS]
    for name in SHIPPED:
        profile = codec.load(Profile, folder / f"{name}.json")
        for cluster in clusters:
            request = Request(
                gpus=cluster.num_devices,
                global_batch=profile.global_batch,
                prefer_simple=False,
                time_limit_s=LIMIT_S,
            )
            for share, memory in ((None, "slack"), (0.5, "half")):
                yield f"{name} {cluster.name} {memory}", partial(solved, profile, cluster, request, share)


def solved(profile: Profile, cluster: Cluster, request: Request, share: float | None) -> dict[str, Any]:
    """The figures of one case, in devices of ``share`` of what plain data parallelism needs; None: their own."""
    if share is not None:
        prices = Prices(Space(on_device(profile, cluster), cluster, offered(), request))
        stock = prices.of(baselines.uniform("ddp", prices, 1)).peak.total
        request = replace(request, memory_bytes=needed(cluster.device, share * stock, request.gpus))
    try:
        return figures(plan(profile, cluster, offered(), request)[0])
    except InfeasibleError:
        return {"infeasible": True}


def figures(found: Plan) -> dict[str, Any]:
    """What a reviewer wants to see change, and nothing else."""
    fits = [b for b in found.baselines if b.fits and b.step_time_s is not None]
    best = min(fits, key=lambda b: b.step_time_s or 0.0, default=None)
    ways = [f"{a.data.strategy}{a.data.degree}x{a.tensor.degree}{'c' * a.checkpoint}" for a in found.components]
    return {
        "ranks": found.num_ranks,
        "stages": " ".join(
            f"{found.components[i].name}*{len(s.ranks)}" for i, s in zip(found.starts(), found.stages, strict=True)
        ),
        "schedule": found.schedule,
        "microbatches": found.num_microbatches,
        "ways": " ".join(f"{way}*{len(list(run))}" for way, run in groupby(ways)),
        "step_ms": round(found.prediction.step_time_s * 1e3, 4),
        "exposed_ms": round(found.prediction.exposed_communication_s * 1e3, 4),
        "memory_gib": round(max(found.prediction.memory_bytes_per_rank) / GIB, 4),
        "gap": round(found.certificate.gap, 6),
        "best_baseline": best.name if best else None,
        "best_baseline_ms": round((best.step_time_s or 0.0) * 1e3, 4) if best else None,
    }


def dumps(found: dict[str, dict[str, Any]]) -> str:
    """One case a line, so that a diff reads well."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def slower(before: dict[str, Any] | None, after: dict[str, Any]) -> float:
    """Share by which a plan is slower than the one in the file; 0 where there is none to compare."""
    if not before or "step_ms" not in before or "step_ms" not in after:
        return 0.0
    return float(after["step_ms"] / before["step_ms"] - 1)


def main() -> None:
    """Solve the cases, say what changed, and write the file anew unless only asked to check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a plan is over 0.5 %% slower")
    args = parser.parse_args()
    before = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    found = {key: solve() for key, solve in cases() if args.cases in key}
    if not found:
        parser.error(f"no case has {args.cases!r} in its name")
    changed = [key for key in found if before.get(key) != found[key]]
    print(f"{len(found)} plans, {len(changed)} changed")
    for key in changed:
        print(f"  {key}: {100 * slower(before.get(key), found[key]):+.2f} %")
        print(f"    was {before.get(key)}\n    is  {found[key]}")
    if args.check:
        raise SystemExit(any(slower(before.get(key), found[key]) > _SLOWER for key in found))
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text(dumps(before | found if args.cases else found))


if __name__ == "__main__":
    main()
