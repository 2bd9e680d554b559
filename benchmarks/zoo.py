"""Every torchvision classifier and segmentation model, and our own: planned for two ranks, and one step verified.

    python benchmarks/zoo.py [--models resnet18,unet] [--families] [--budget 300] [--total 900] [--again]
                             [-o records/zoo.json]

Each model: built for a small input, traced, its times estimated from FLOPs and bytes (``--measure 20s`` profiles it
instead), planned for two ranks (plain data parallelism where one rank would be best), and one step under that plan
compared with one device in float64 on 2 gloo ranks: every gradient within 1e-6, or ten times the difference that
permuted samples make on one device. Models of more than 150 million parameters are compared in float32 (1e-4), those
that need more memory than is free are skipped, and it is said. Ranks take copies of the model as it was traced before
they were forked. The record is written after every model, and what it holds already is not done again. A model has
``--budget`` seconds, and none begins after ``--total``.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torchvision
from torch import Tensor

from asa.cost.machine.estimate import estimate
from asa.errors import AsaError
from asa.executor.measuring.equivalence import on_one_device
from asa.executor.model.loss import loss_of
from asa.executor.model.materialize import materialize
from asa.executor.model.state import full_gradients
from asa.executor.model.step import played
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.layout import bounds
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.launch import run_ranks
from asa.planner import Request, plan
from asa.profiler.measure import profile_model
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from asa.tracing import TracedModel, trace
from asa.zoo.models import build, default_input, names, segmentation_names

CLASSES, BATCH, RANKS = 10, 8, 2
RECORD = Path(__file__).parent / "records" / "zoo.json"
LARGE = 150e6
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_COARSEST = 1e-2
"""Nothing is shown by gradients that agree no better than this, whatever permuted samples do to them."""
_SMALL = 1e-3
"""Gradients that are zero but for rounding are held against the whole."""


def every_model() -> list[str]:
    """Names, the smallest first."""
    weights = {}
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in (*names(), *segmentation_names()):
        bare = {"weights_backbone": None} if name in segmentation_names() else {}
        with torch.device("meta"):
            try:
                model = torchvision.models.get_model(name, weights=None, **bare)
                weights[name] = sum(p.numel() for p in model.parameters())
            except Exception:  # one of our own, or one that meta cannot build
                weights[name] = 0
    return sorted(weights, key=lambda n: (weights[n], n))


def families(models: list[str]) -> list[str]:
    """The smallest model of every family."""
    found: dict[str, str] = {}
    for name in models:
        found.setdefault(re.split(r"[\d_]", name)[0], name)
    return list(found.values())


def _example(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((BATCH, *shape), generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def _gradients(
    made: Plan, traced: TracedModel, rank: int, dtype: torch.dtype, *, permute: bool = False
) -> dict[str, Tensor]:
    shape = made.input_shape

    def converted(traced: Any) -> None:
        for component in traced.components:
            component.to(dtype)

    model = materialize(
        made, traced, torch.zeros(2, *shape), rank=rank, strategies=offered(), device=torch.device("cpu"),
        batch_norm="exact", prepare=converted,
    )  # fmt: skip
    x, y = _example(shape, dtype)
    samples = torch.arange(BATCH)
    if permute:
        parts = [bounds(BATCH, made.num_microbatches, j) for j in range(made.num_microbatches)]
        samples = torch.cat([samples[a:b].flip(0) for a, b in parts])
    x, y = x[samples], y[samples]
    model.train()
    played(model, samples, 0, lambda rows: x[rows], lambda rows: y[rows], loss_fn=loss_of)
    found = full_gradients(model)
    model.close()
    return found


def _distance(found: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    least = _SMALL * sum(float(g.double().square().sum()) for g in reference.values()) ** 0.5
    errors = {
        n: float((found[n].double() - g.double()).norm()) / max(float(g.double().norm()), least, 1e-300)
        for n, g in reference.items()
    }
    worst = max(errors, key=lambda n: errors[n])
    return errors[worst], worst


def _verified(rank: int, made: Plan, traced: TracedModel, dtype: torch.dtype) -> dict[str, Any]:
    if rank:  # the parent's pages, until they are written to
        _gradients(made, traced, rank, dtype)
        return {}
    spread = _gradients(made, copy.deepcopy(traced), rank, dtype)
    one = _gradients(on_one_device(made), copy.deepcopy(traced), 0, dtype)
    error, worst = _distance(spread, one)
    allowed = TOLERANCE[dtype]
    if error > allowed:
        allowed = max(allowed, 10 * _distance(_gradients(on_one_device(made), traced, 0, dtype, permute=True), one)[0])
    return {"error": error, "allowed": allowed, "worst": worst, "dtype": str(dtype).removeprefix("torch.")}


def _profile(
    name: str, traced: TracedModel, shape: tuple[int, int, int], cluster: Cluster, measure_s: float
) -> Profile:
    if measure_s:
        return profile_model(
            name, input_shape=shape, num_classes=CLASSES, global_batch=BATCH, device="cpu", time_limit_s=measure_s,
            max_tensor_degree=RANKS,
        )  # fmt: skip
    graph = layer_graph(traced, model=name, input_shape=shape, num_classes=CLASSES)
    return estimate(
        graph, cluster.device, model_spec=name, model_fingerprint=traced.model_fingerprint, global_batch=BATCH,
        max_degree=RANKS,
    )  # fmt: skip


def _in_words(made: Plan) -> str:
    kinds = {(c.stage, c.data.strategy, c.data.degree, c.tensor.degree) for c in made.components}
    return f"{len(made.stages)} stages, " + " ".join(f"{s}:{k} d{d}t{t}" for s, k, d, t in sorted(kinds))


def one(name: str, measure_s: float) -> dict[str, Any]:
    """The row of a model."""
    shape, _ = default_input(name)
    began = time.monotonic()
    model = build(name, num_classes=CLASSES, input_shape=shape)
    weights = sum(p.numel() for p in model.parameters())
    row: dict[str, Any] = {"model": name, "input": list(shape), "parameters": weights}
    dtype = torch.float32 if weights > LARGE else torch.float64
    # The traced model, on each rank weights and gradients, and the gathered gradients.
    needed = weights * (4 + dtype.itemsize * (2 * RANKS + 2)) * 1.15
    free = psutil.virtual_memory().available
    if needed > free:
        return row | {"status": "skipped", "reason": f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"}
    cluster = codec.load(Cluster, Path(__file__).parent.parent / "profiles" / "cluster.local-gloo-2.json")
    traced = trace(model, torch.zeros(2, *shape), name=name)
    del model
    profile = _profile(name, traced, shape, cluster, measure_s)
    row |= {"components": len(profile.graph), "uncut": len(profile.graph.uncut or ())}
    row["profile_s"], began = round(time.monotonic() - began, 2), time.monotonic()
    request = Request(gpus=RANKS, global_batch=BATCH, time_limit_s=2.0)
    made = plan(profile, cluster, offered(), request)[0]
    if made.num_ranks == 1:  # the best plan, and nothing to verify
        made = plan(profile, cluster, offered(), replace(request, strategies=("ddp",)))[0]
    row["plan_s"], began = round(time.monotonic() - began, 2), time.monotonic()
    row |= {"ranks": made.num_ranks, "plan": _in_words(made), "microbatches": made.num_microbatches}
    found = run_ranks(made.num_ranks, _verified, made, traced, dtype, threads=1, timeout_s=600)[0]
    row |= found | {"verify_s": round(time.monotonic() - began, 2)}
    good = found["error"] <= min(found["allowed"], _COARSEST)
    reason = "" if good else f"gradients of {found['worst']} differ by {found['error']:.1e}"
    if not good and found["error"] <= found["allowed"]:
        reason += ", permuted samples alone make as much: the model draws by itself"
    return row | {"status": "ok" if good else "failed", "reason": reason}


def _report(connection: Any, name: str, measure_s: float) -> None:
    try:
        row = one(name, measure_s)
    except (AsaError, Exception) as error:
        text = str(error).splitlines()
        row = {"model": name, "status": "failed", "reason": f"{type(error).__name__}: {text[0] if text else ''}"[:300]}
    connection.send(row)


def apart(name: str, budget_s: float, measure_s: float) -> dict[str, Any]:
    """The row of a model, in a process of its own that ends when its time is up."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_report, args=(there, name, measure_s))
    began = time.monotonic()
    process.start()
    there.close()
    try:
        row: dict[str, Any] = here.recv() if here.poll(budget_s) else {}
        reason = f"not done within {budget_s:.0f} s"
    except EOFError:
        row, reason = {}, "its process died"
    process.kill() if not row else process.join(10)
    process.join()
    return row or {
        "model": name, "status": "failed", "reason": reason, "seconds": round(time.monotonic() - began, 1)
    }  # fmt: skip


def main() -> None:
    """Run what is missing in the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names, or all")
    parser.add_argument("--families", action="store_true", help="the smallest model of each family")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds a model may take")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds after which no model begins")
    parser.add_argument("--measure", type=float, default=0.0, help="seconds to profile a model; 0 estimates")
    parser.add_argument("--again", action="store_true", help="also what failed or was skipped before")
    parser.add_argument("-o", "--output", type=Path, default=RECORD)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = args.models.split(",") if args.models else every_model()
    chosen = families(chosen) if args.families else chosen
    rows: dict[str, dict[str, Any]] = {}
    if args.output.is_file():
        rows = {row["model"]: row for row in json.loads(args.output.read_text())["models"]}
    print(f"{'model':32} {'parameters':>11} {'status':8} {'error':>8} {'seconds':>8}  plan, or why not", flush=True)
    began = time.monotonic()
    for name in chosen:
        known = rows.get(name)
        if known is None or (args.again and known["status"] != "ok"):
            if time.monotonic() - began > args.total:
                continue
            rows[name] = apart(name, args.budget, args.measure)
            header = {
                "torch": torch.__version__,
                "torchvision": torchvision.__version__,
                "ranks": RANKS,
                "batch": BATCH,
            }
            args.output.parent.mkdir(parents=True, exist_ok=True)
            ordered = sorted(rows.values(), key=lambda r: str(r["model"]))
            args.output.write_text(json.dumps({**header, "models": ordered}, indent=1) + "\n")
        row = rows[name]
        seconds = sum(row.get(k, 0.0) for k in ("profile_s", "plan_s", "verify_s", "seconds"))
        print(
            f"{name:32} {row.get('parameters', 0):11,} {row['status']:8} {row.get('error', float('nan')):8.0e} "
            f"{seconds:8.1f}  {row['reason'] or row['plan']}",
            flush=True,
        )
    mine = [rows[name] for name in chosen if name in rows]
    good = sum(row["status"] == "ok" for row in mine)
    print(f"{good} of {len(mine)} models planned and verified ({good / len(mine):.1%})")


if __name__ == "__main__":
    main()
