"""Plan the golden cases anew: ``make golden``. The diff of ``planner_tests/golden/plans.json`` is the review of a
cost-model change.

Cases: every profile in ``profiles/`` on the measured clusters beside it; and the chains of
``planner_tests/known_models.py`` at published single-GPU rates over presets from NVSwitch to 25 Gbit/s; memory limits
from slack to tight.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "planner_tests" / "golden" / "plans.json"
sys.path.insert(0, str(ROOT / "planner_tests"))

import known_models  # noqa: E402

from asa.cost import presets  # noqa: E402
from asa.errors import InfeasibleError  # noqa: E402
from asa.ir import codec  # noqa: E402
from asa.ir.cluster import Cluster  # noqa: E402
from asa.ir.plan import Plan  # noqa: E402
from asa.ir.profile import Profile  # noqa: E402
from asa.ir.units import GIB  # noqa: E402
from asa.planner import Request, plan  # noqa: E402
from asa.strategies import offered  # noqa: E402

CLUSTERS = ("a100-nvlink-8", "h100-nvlink-8", "v100-dgx1-8", "3090-pcie-8", "l4-pcie-8", "t4-8x1-25g-tcp")
LIMITS_GIB = (None, 4.0)


def profiles() -> Iterator[tuple[str, Profile, int]]:
    """(Name, profile, global batch) of every case."""
    yield "resnet50-224", known_models.profile(known_models.resnet50(), 938.0, 64), 256
    yield "resnet50-32", known_models.profile(known_models.resnet50(32, 100), 9000.0, 64), 256
    yield "vgg16-32", known_models.profile(known_models.vgg16(32, 100), 8000.0, 64), 256
    yield "vit-224", known_models.profile(known_models.transformer(), 500.0, 64), 256


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(Key, figures) of every case, in order."""
    yield from committed()
    for name, profile, batch in profiles():
        for cluster_name in CLUSTERS:
            for limit in LIMITS_GIB:
                cluster = presets.load(cluster_name)
                memory = None if limit is None else int(limit * GIB)
                request = Request(
                    gpus=8, global_batch=batch, memory_bytes=memory, solver="dp", prefer_simple=False
                )  # fmt: skip
                key = f"{name} {cluster_name} {'slack' if limit is None else f'{limit:g}GiB'}"
                try:
                    yield key, figures(plan(profile, cluster, offered(), request)[0])
                except InfeasibleError:
                    yield key, {"infeasible": True}


def committed() -> Iterator[tuple[str, dict[str, Any]]]:
    """The profiles in ``profiles/`` on the clusters measured with them, slack and at half of what that plan takes."""
    folder = ROOT / "profiles"
    clusters = [codec.load(Cluster, path) for path in sorted(folder.glob("cluster.*.json"))]
    for path in sorted(p for p in folder.glob("*.json") if not p.name.startswith("cluster.")):
        profile = codec.load(Profile, path)
        for cluster in (c for c in clusters if c.device.type == profile.device.type):
            request = Request(
                gpus=cluster.num_devices, global_batch=profile.global_batch, solver="dp", prefer_simple=False
            )
            slack = plan(profile, cluster, offered(), request)[0]
            yield f"{path.stem} {cluster.name} slack", figures(slack)
            half = replace(request, memory_bytes=max(slack.prediction.memory_bytes_per_rank) // 2)
            try:
                yield f"{path.stem} {cluster.name} half", figures(plan(profile, cluster, offered(), half)[0])
            except InfeasibleError:
                yield f"{path.stem} {cluster.name} half", {"infeasible": True}


def figures(found: Plan) -> dict[str, Any]:
    """What a reviewer wants to see change, and nothing else."""
    fits = [b for b in found.baselines if b.fits and b.step_time_s is not None]
    best = min(fits, key=lambda b: b.step_time_s or 0.0, default=None)
    ways = [f"{a.data.strategy}{a.data.degree}x{a.tensor.degree}" for a in found.components]
    return {
        "ranks": found.num_ranks,
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


def main() -> None:
    """Write the file anew and say what changed."""
    before = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    found = dict(cases())
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text(dumps(found))
    changed = [key for key in found if before.get(key) != found[key]]
    print(f"{len(found)} plans, {len(changed)} changed")
    for key in changed:
        print(f"  {key}\n    was {before.get(key)}\n    is  {found[key]}")


if __name__ == "__main__":
    main()
