"""How fast the planner is, as a user meets it: whole processes of ``asa plan`` from a profile file.

    python benchmarks/planner.py [--quick] [-o FILE]
    python benchmarks/planner.py --moves 100000

Every row is one process, of modules that are compiled: wall time from its start to its end, its peak resident memory,
the step time it found, and the gaps it proved of its answer and of the best plan found (a win below the noise gives way
to a whole strategy). Cases: the shipped profiles on 8 devices, over fast and slow links, slack and at 1.2 times the
least memory that fits, with the time that a search usually has; a ViT-L-like chain and random chains of 30 components,
in little time, and with what a longer search still gains; 64 devices in 8 nodes, 1,024 devices, 1,000 components;
growth over components and devices; and each solver on instances small enough for all of them. Models that are not
shipped are chains drawn here, written to a temporary folder.

With ``--moves``, something else: so many plans beside some proved ones (another way for a component, another cut,
width, number of microbatches) are priced one by one; none may be faster than a plan called optimal, or than a bound.

The record of a full run is ``benchmarks/records/planner.json``. ``--quick`` runs a part, in about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "planner.json"
sys.path.insert(0, str(ROOT / "planner_tests"))

import known_models  # noqa: E402
from certificate import check  # noqa: E402

import asa  # noqa: E402
from asa.cost.machine import presets  # noqa: E402
from asa.cost.machine.estimate import on_device  # noqa: E402
from asa.cost.memory.peak import needed  # noqa: E402
from asa.ir import codec  # noqa: E402
from asa.ir.cluster import Cluster  # noqa: E402
from asa.ir.graph import Component, LayerGraph, TensorSplit  # noqa: E402
from asa.ir.profile import Profile  # noqa: E402
from asa.ir.units import GIB  # noqa: E402
from asa.planner import Request, plan, usual_limit  # noqa: E402
from asa.planner.answer.infeasible import leanest  # noqa: E402
from asa.planner.space.candidate import Prices  # noqa: E402
from asa.planner.space.space import Space  # noqa: E402
from asa.strategies import offered  # noqa: E402

SHIPPED = ("resnet50", "vit_b_16", "vgg16")
FAST, SLOW, NODES = "a100-nvlink-8", "t4-8x1-25g-tcp", "a100-4x8-roce"
BATCH = 256
TIGHT = 1.2
"""Memory of a tight case, over the least that any plan of one stage needs."""
SOON_S = 0.9
"""Of search, where the whole process is to take a second and a half."""
CURVE_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
LONGEST_S = 120.0
COLUMNS = ("case", "devices", "cluster", "memory", "limit", "wall s", "RSS MiB", "step ms", "gap %", "found %",
           "solver")  # fmt: skip
WIDTHS = (14, 7, 15, 9, 6, 6, 7, 10, 6, 7, 0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process. ``limit_s`` is its ``--time-limit``; ``memory_gib`` None: the device's own."""

    part: str
    name: str
    profile: Path
    cluster: str
    gpus: int
    limit_s: float
    memory_gib: float | None = None
    solver: str = "ilp"
    batch: int = BATCH

    def argv(self, output: Path) -> list[str]:
        """The command."""
        found = ["plan", str(self.profile), "--gpus", str(self.gpus), "--cluster", self.cluster, "--json"]
        found += ["--global-batch", str(self.batch), "--solver", self.solver, "--time-limit", f"{self.limit_s:g}s"]
        found += ["--memory", f"{self.memory_gib:.6f}"] if self.memory_gib is not None else []
        return [*found, "-o", str(output)]


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """The row of one case."""
    out, err = folder / "out.json", folder / "err.txt"
    began = time.perf_counter()
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "asa", *case.argv(folder / "plan.json")], stdout=stdout, stderr=stderr, cwd=folder,
            env=installed(folder),
        )  # fmt: skip
        peak_mib = 0.0
        while process.poll() is None:
            peak_mib = max(peak_mib, resident_mib(process.pid))
            if time.perf_counter() - began > LONGEST_S:
                process.kill()
            time.sleep(0.01)
    row: dict[str, Any] = {
        "part": case.part,
        "case": case.name,
        "devices": case.gpus,
        "cluster": Path(case.cluster).stem,
        "memory_gib": case.memory_gib,
        "solver_asked": case.solver,
        "time_limit_s": case.limit_s,
        "wall_s": round(time.perf_counter() - began, 3),
        "peak_rss_mib": round(peak_mib, 1),
        "exit_code": process.returncode,
    }
    if process.returncode != 0:
        return {
            **row,
            "error": ([*err.read_text().strip().splitlines(), "no word"])[0 if not err.stat().st_size else -2],
        }
    found = json.loads(out.read_text())
    certificate = found["certificate"]
    return {
        **row,
        "step_time_s": found["prediction"]["step_time_s"],
        "gap": certificate["gap"],
        "gap_found": gap_found(found),
        "status": certificate["status"],
        "solver": certificate["solver"],
        "solve_s": round(certificate["solve_s"], 3),
        "stages": len(found["stages"]),
        "ranks": sum(len(s["ranks"]) for s in found["stages"]),
        "microbatches": found["num_microbatches"],
    }


def gap_found(plan: dict[str, Any]) -> float:
    """The gap of the best plan found: smaller than the answer's where that is a whole strategy, to which a win below
    its noise gave way."""
    certificate, answer_s = plan["certificate"], plan["prediction"]["step_time_s"]
    best_s = min([answer_s, *(p["best_s"] for p in certificate.get("curve") or () if p["best_s"] is not None)])
    return min(certificate["gap"], max(0.0, 1 - certificate["lower_bound_s"] / best_s)) if best_s > 0 else 0.0


def installed(folder: Path) -> dict[str, str]:
    """The environment of a process that finds its modules compiled, as they are once the package is installed."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}


def resident_mib(pid: int) -> float:
    """Peak resident memory of a process since it began its program; 0 where the system does not tell.

    Not from ``wait4``: there the memory of this process before the other one began counts, too.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(x.split()[1]) / 1024 for x in status.splitlines() if x.startswith("VmHWM:")), 0.0)


def chain(num_components: int, seed: int) -> LayerGraph:
    """Components drawn at random: parameters and FLOPs over two decades, a third of them narrow."""
    rng = random.Random(seed)
    parts = []
    for i in range(num_components):
        parameters, flops = int(4 * 10 ** rng.uniform(4, 6.7)), 10 ** rng.uniform(7.5, 9.3)
        out, saved = 4 * 10 ** rng.uniform(3.5, 5), 4 * 10 ** rng.uniform(4.5, 6)
        split = None
        if rng.random() > 1 / 3:
            split = TensorSplit(
                max_degree=64, parameter_bytes=parameters, num_parameter_tensors=2, flops_per_sample=flops,
                saved_bytes_per_sample=saved, collectives=(), entry_partial=True, exit_partial=rng.random() < 0.5,
            )  # fmt: skip
        parts.append(
            Component(
                name=f"part{i}", kind="linear", modules=(f"part{i}",), num_parameter_tensors=4,
                parameter_bytes=parameters, largest_parameter_bytes=parameters // 2, buffer_bytes=0,
                flops_per_sample=flops, output_bytes_per_sample=out, saved_bytes_per_sample=max(saved, out),
                batch_norm=False, split=split, why_whole="" if split else "too narrow",
            )
        )  # fmt: skip
    return LayerGraph(
        model=f"chain{num_components}-{seed}", input_shape=(3, 32, 32), num_classes=100,
        input_bytes_per_sample=12288.0, components=tuple(parts),
    )  # fmt: skip


def nodes(count: int) -> Cluster:
    """``count`` nodes of 8: the multi-node preset with more of the same nodes on its network."""
    preset = presets.load(NODES)
    *inner, outer = preset.levels
    return replace(
        preset, name=f"a100-{count}x8", num_devices=8 * count, status="derived",
        levels=(*inner, replace(outer, devices=8 * count)), source=f"{NODES} with {count} nodes",
    )  # fmt: skip


class Files:
    """Profiles and clusters of this run, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def profile(self, name: str, graph: Callable[[], LayerGraph], samples_per_s: float = 500.0) -> Path:
        """A profile of ``graph`` at that speed on one GPU."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            codec.save(known_models.profile(graph(), samples_per_s, 64), path)
        return path

    def random(self, num_components: int, seed: int = 0) -> Path:
        """A profile of :func:`chain`, a millisecond and a half per sample and 30 components."""
        speed = 600.0 * 30 / num_components
        return self.profile(f"chain{num_components}-{seed}", lambda: chain(num_components, seed), min(speed, 2000.0))

    def vit_l(self) -> Path:
        """24 equal blocks of width 1,024 between an embedding and a head."""
        return self.profile("vit-l", lambda: known_models.transformer(24, 1024), 170.0)

    def cluster(self, count: int) -> str:
        """A file of :func:`nodes`."""
        path = self.folder / f"{count}x8.json"
        if not path.is_file():
            codec.save(nodes(count), path)
        return str(path)


def tight(profile: Path, cluster: str, gpus: int) -> float:
    """GiB of a device that has :data:`TIGHT` times what the leanest plan needs."""
    found, where = codec.load(Profile, profile), presets.load(cluster)
    space = Space(on_device(found, where), where, offered(), Request(gpus=gpus, global_batch=BATCH))
    least = leanest(Prices(space))
    assert least is not None, "some plan runs"
    return needed(where.device, TIGHT * least.price.peak.total, least.candidate.ranks) / GIB


def cases(files: Files, *, quick: bool) -> Iterator[Case]:
    """All of them, in the order of the table."""
    for model in SHIPPED:
        path = ROOT / "profiles" / f"{model}.cpu.fp32.json"
        for cluster in (FAST, SLOW):
            for memory in (None, tight(path, cluster, 8)):
                yield Case(
                    part="models", name=model, profile=path, cluster=cluster, gpus=8, limit_s=usual_limit(8),
                    memory_gib=memory,
                )  # fmt: skip
    hard = [("vit-l", files.vit_l()), *((f"random30.{s}", files.random(30, s)) for s in range(1 if quick else 3))]
    for name, path in hard:
        for cluster in (FAST, SLOW):
            for memory in (None, tight(path, cluster, 8)):
                for limit in (SOON_S,) if quick else (SOON_S, 9):
                    yield Case(
                        part="chains", name=name, profile=path, cluster=cluster, gpus=8, limit_s=limit,
                        memory_gib=memory,
                    )  # fmt: skip
    resnet = ROOT / "profiles" / "resnet50.cpu.fp32.json"
    for model in SHIPPED[: 1 if quick else 3]:
        path = ROOT / "profiles" / f"{model}.cpu.fp32.json"
        yield Case(part="scale", name=model, profile=path, cluster=files.cluster(8), gpus=64, limit_s=2, batch=1024)
    if not quick:
        yield Case(part="scale", name="resnet50", profile=resnet, cluster=files.cluster(128), gpus=1024,
                   limit_s=usual_limit(1024), batch=8192)  # fmt: skip
        yield Case(part="scale", name="chain of 1000", profile=files.random(1000), cluster=FAST, gpus=8,
                   limit_s=usual_limit(8))  # fmt: skip
        for name, path in hard[:2]:
            memory = tight(path, SLOW, 8)
            for limit_s in CURVE_S:
                yield Case(part="anytime", name=name, profile=path, cluster=SLOW, gpus=8, limit_s=limit_s,
                           memory_gib=memory)  # fmt: skip
    for n in (8, 32) if quick else (8, 16, 24, 32, 48, 64):
        yield Case(part="components", name=f"random{n}", profile=files.random(n), cluster=FAST, gpus=8, limit_s=9)
    for gpus in (2, 8) if quick else (1, 2, 4, 8, 16, 32, 64):
        yield Case(part="devices", name="resnet50", profile=resnet, cluster=files.cluster(8), gpus=gpus, limit_s=9)
    for n, gpus in ((3, 2),) if quick else ((3, 2), (4, 2), (5, 2), (3, 4), (6, 4)):
        for solver in ("dp", "ilp", "exhaustive"):
            yield Case(part="solvers", name=f"random{n}", profile=files.random(n), cluster=SLOW, gpus=gpus, limit_s=30,
                       solver=solver, batch=8)  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    memory = "slack" if row["memory_gib"] is None else f"{row['memory_gib']:.2f} GiB"
    if "error" in row:
        figures = ["-", "-", "-", f"exit {row['exit_code']}: {row['error'][:70]}"]
    else:
        figures = [f"{1e3 * row['step_time_s']:.3f}", f"{100 * row['gap']:.2f}", f"{100 * row['gap_found']:.2f}",
                   row["solver"]]  # fmt: skip
    cells = [row["case"], str(row["devices"]), row["cluster"], memory, f"{row['time_limit_s']:g} s",
             f"{row['wall_s']:.2f}", f"{row['peak_rss_mib']:.0f}", *figures]  # fmt: skip
    return aligned(cells)


def aligned(cells: Sequence[str]) -> str:
    """One line of the table."""
    return "  ".join(f"{c:<{w}}" for c, w in zip(cells, WIDTHS, strict=True)).rstrip()


def beside(count: int) -> bool:
    """Whether none of so many plans beside proved ones was faster than they or their bounds."""
    problems = [
        (model, cluster, gpus, share)
        for model in SHIPPED
        for cluster, gpus, share in ((FAST, 8, None), (SLOW, 4, None), (FAST, 4, TIGHT))
    ]
    fine = True
    print("plan            cluster          devices  status    plans  step ms    fastest ms  bound ms   floor ms   s")
    for k, (model, cluster, gpus, share) in enumerate(problems):
        began = time.perf_counter()
        profile = codec.load(Profile, ROOT / "profiles" / f"{model}.cpu.fp32.json")
        links, batch = presets.load(cluster), 64
        limit = None if share is None else int(tight(ROOT / "profiles" / f"{model}.cpu.fp32.json", cluster, gpus) * GIB)
        request = Request(gpus=gpus, global_batch=batch, memory_bytes=limit, prefer_simple=False, time_limit_s=20.0)
        found = plan(profile, links, offered(), request)[0]
        trial = check(found, profile, links, offered(), request, tries=count // len(problems), seed=k)
        fine = fine and not trial.refuted
        figures = (trial.answer_s, trial.fastest_s, trial.lower_bound_s, trial.floor_s)
        print(
            f"{model:<15} {cluster:<16} {gpus:<8} {found.certificate.status:<9} {trial.tried:<6} "
            + " ".join(f"{1e3 * x:<10.4f}" for x in figures)
            + f" {time.perf_counter() - began:.0f}" + (" REFUTED" if trial.refuted else ""),
            flush=True,
        )  # fmt: skip
    return fine


def provenance(*, quick: bool) -> dict[str, Any]:
    """What was run where."""
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "asa_version": asa.__version__,
        "revision": revision or None,
        "python_version": platform.python_version(),
        "machine": platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Run, print, and keep the record of a full run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a part, in about a minute; keeps no record unless -o")
    parser.add_argument("-o", "--output", type=Path, help=f"file to write (default: {RECORD.relative_to(ROOT)})")
    parser.add_argument("--moves", type=int, metavar="N", help="price N plans beside proved ones instead")
    args = parser.parse_args()
    if args.moves:
        sys.exit(not beside(args.moves))
    origin = provenance(quick=args.quick)
    if origin["load_before"] > origin["usable_cores"]:
        print(f"other work runs on this machine (load {origin['load_before']}): wall times are too long")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(  # compiles all of it, once
            [sys.executable, "-c", "import asa.cli.commands.plan, asa.planner, asa.report.text.plan, pulp, highspy"],
            cwd=name, env=installed(Path(name)), check=True,
        )  # fmt: skip
        part = ""
        for case in cases(Files(Path(name)), quick=args.quick):
            if case.part != part:
                part = case.part
                print(f"\n{part}\n{aligned(COLUMNS)}")
            rows.append(measured(case, Path(name)))
            print(line(rows[-1]), flush=True)
    path = args.output or (None if args.quick else RECORD)
    if path is not None:
        path.write_text(
            json.dumps({"schema_version": 1, "kind": "planner_benchmark", **origin, "rows": rows}, indent=1) + "\n"
        )
        print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
