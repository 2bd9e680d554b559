"""Write predictions down before anybody measures them: ``benchmarks/sealed/MACHINE.jsonl``.

    python benchmarks/make_sealed.py [--machines A,B] [--revise] [--folder DIR] [--profiles DIR [--after DIR] [--json]]

Per machine, model and batch every strategy is planned for it, and its step time with interval, peak memory and place in
the order are appended with a hash chain (:mod:`asa.ir.sealed`). A cell that is sealed stays as it is: a second run adds
only cells that are missing, and with ``--revise`` a further revision of those whose prediction is another one today.
Profiles are estimates from FLOPs and bytes unless one measured on that very GPU lies in ``profiles/``; the plan of each
cell says which (``origin``). With ``--profiles`` only cells with a measured profile in that folder are planned, for
every machine with its GPU, and put in DIR behind what was sealed ``--after``: predictions made anew from a new card's
profiles, to be sent back. ``asa bench --check-sealed`` on such a machine measures them and prints the score.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

import asa
from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.cost.machine.nearest import same_gpu
from asa.errors import InfeasibleError, InvalidInputError, UsageError
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.graph import LayerGraph
from asa.ir.plan import Plan
from asa.ir.profile import Precision, Profile
from asa.ir.sealed import FIRST, Claim, digest, newest, read
from asa.planner import Request, plan
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from asa.tracing import trace
from asa.zoo.models import build

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "sealed"
MACHINES = {"a100-nvlink-8": 1, "h100-nvlink-8": 1, "v100-dgx1-8": 1, "t4-pcie-4": 1, "a100-2x8-ib": 2}
"""Cluster presets, with their number of nodes."""
Workload = tuple[str, tuple[int, int, int], int, int]
WORKLOADS: tuple[Workload, ...] = (
    ("resnet50", (3, 32, 32), 100, 256),
    ("resnet50", (3, 224, 224), 1000, 512),
    ("vit_b_16", (3, 224, 224), 1000, 512),
    ("vgg16", (3, 32, 32), 100, 256),
    ("convnext_large", (3, 32, 32), 100, 256),
)
"""Model, input shape, classes and global batch."""
STRATEGIES = ("ddp", "fsdp", "tensor", "1f1b", "hybrid", "asa")
LIMIT_S = 4.0


@cache
def structure(model: str, shape: tuple[int, int, int], classes: int) -> tuple[LayerGraph, str]:
    """The model's graph, and its fingerprint."""
    torch.set_num_threads(1)
    traced = trace(build(model, num_classes=classes, input_shape=shape), torch.zeros(2, *shape), name=model)
    return layer_graph(traced, model=model, input_shape=shape, num_classes=classes), traced.model_fingerprint


@cache
def measured(folder: Path) -> tuple[Profile, ...]:
    """Profiles in a folder of files of several kinds: those of the usual way to compute, that nothing disturbed."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(InvalidInputError):
            found.append(codec.load(Profile, path))
    return tuple(p for p in found if not p.execution and not p.provenance.disturbed)


def sealed(claim: Claim, *, revision: int, written: str, asa_version: str, previous: str) -> str:
    """Line of text for a new seal."""
    content = {
        "claim": codec.to_data(claim),
        "revision": revision,
        "written": written,
        "asa_version": asa_version,
        "previous": previous,
    }
    return json.dumps({**content, "sha256": digest(content)}, separators=(",", ":"), allow_nan=False) + "\n"


def profile_of(
    model: str, shape: tuple[int, int, int], classes: int, batch: int, cluster: Cluster, precision: Precision,
    folder: Path = ROOT / "profiles",
) -> Profile | None:  # fmt: skip
    """The one that was measured on that GPU, if there is one."""
    for found in measured(folder):
        if (
            (found.model_spec, found.graph.input_shape, found.graph.num_classes) == (model, shape, classes)
            and (found.device.type, found.precision) == (cluster.device.type, precision)
            and same_gpu(found.device.name, cluster.device.name)
            and found.global_batch * cluster.num_devices >= batch
        ):
            return found
    return None


def estimated(
    model: str, shape: tuple[int, int, int], classes: int, batch: int, cluster: Cluster, precision: Precision
) -> Profile:
    """What would be expected of that GPU."""
    graph, fingerprint = structure(model, shape, classes)
    return estimate(
        graph, cluster.device, model_spec=model, model_fingerprint=fingerprint, precision=precision,
        global_batch=batch, max_degree=cluster.num_devices,
    )  # fmt: skip


def claims(
    machine: str, precision: Precision = "fp32", *, profiles: Path | None = None,
    workloads: Iterable[Workload] = WORKLOADS,
) -> Iterator[Claim]:  # fmt: skip
    """Every cell of a machine that a plan exists for; given ``profiles``, those that one of them is of."""
    cluster = presets.load(machine)
    for model, shape, classes, batch in workloads:
        cell = (model, shape, classes, batch, cluster, precision)
        profile = profile_of(*cell) if profiles is None else profile_of(*cell, profiles)
        if profile is None:
            if profiles is not None:
                continue
            profile = estimated(*cell)
        found: dict[str, Plan] = {}
        request = Request(gpus=cluster.num_devices, global_batch=batch, time_limit_s=LIMIT_S)
        prices = Prices(Space(profile, cluster, offered(), request))
        for strategy in STRATEGIES:
            wanted = replace(request, strategies=(strategy,))
            try:
                chosen = plan(profile, cluster, offered(), wanted, known=prices)[0]
                certificate = replace(chosen.certificate, curve=None)
                found[strategy] = replace(chosen, baselines=(), notes=(), certificate=certificate)
            except (InfeasibleError, UsageError) as error:
                print(f"  {machine} {model} {shape[1]} {batch} {strategy}: {error}", file=sys.stderr)
        order = sorted(found, key=lambda s: found[s].prediction.step_time_s)
        for strategy, chosen in found.items():
            yield Claim(
                machine=machine,
                device_name=cluster.device.name,
                num_devices=cluster.num_devices,
                num_nodes=MACHINES[machine],
                strategy=strategy,
                plan=chosen,
                place=1 + order.index(strategy),
                among=len(order),
            )


def seal(machine: str, folder: Path, made: Iterable[Claim], *, revise: bool) -> tuple[list[str], int]:
    """Append what is missing of ``made`` (and with ``revise`` what changed) to the machine's file; the lines that were
    added, and how many cells were left.

    Raises:
        InvalidInputError: the file that is there was tampered with.
    """
    path = folder / f"{machine}.jsonl"
    there = read(path) if path.is_file() else []
    last = {s.claim.key: s for s in newest(there)}
    previous = there[-1].sha256 if there else FIRST
    lines = []
    left = 0
    for claim in made:
        old = last.get(claim.key)
        if old is not None and (not revise or foretold(old.claim) == foretold(claim)):
            left += 1
            continue
        written = datetime.now(UTC).isoformat(timespec="seconds")
        revision = 1 if old is None else old.revision + 1
        line = sealed(claim, revision=revision, written=written, asa_version=asa.__version__, previous=previous)
        previous = codec.parse(line, source="the seal")["sha256"]
        lines.append(line)
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:  # nothing that is there is ever written over
        stream.writelines(lines)
    read(path)
    return lines, left


def foretold(claim: Claim) -> tuple[object, ...]:
    """What a measurement is held against."""
    p = claim.plan
    return p.components, p.stages, p.schedule, p.num_microbatches, p.prediction, claim.place, claim.among


def _workload(text: str) -> Workload:
    """``MODEL:CxHxW:CLASSES:BATCH``."""
    model, shape, classes, batch = text.rsplit(":", 3)
    channels, height, width = map(int, shape.split("x"))
    return model, (channels, height, width), int(classes), int(batch)


def main() -> None:
    """Seal, and say how many."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--revise", action="store_true", help="add a revision of cells that are foretold otherwise now")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--profiles", type=Path, help="folder of new profiles; only their cells are sealed")
    parser.add_argument("--after", type=Path, default=FOLDER, help="with --profiles: what was sealed before")
    parser.add_argument("--also", type=_workload, nargs="+", default=[], metavar="MODEL:CxHxW:CLASSES:BATCH")
    parser.add_argument("--json", action="store_true", help="print the new lines as one JSON document")
    args = parser.parse_args()
    told: dict[str, list[str]] = {}
    total = 0
    for machine in args.machines.split(","):
        began = time.perf_counter()
        made = list(claims(machine, profiles=args.profiles, workloads=dict.fromkeys((*WORKLOADS, *args.also))))
        if args.profiles is not None and not made:
            continue
        before, path = args.after / f"{machine}.jsonl", args.folder / f"{machine}.jsonl"
        if args.profiles is not None and before.is_file():  # as often as it is made anew
            args.folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(before.read_bytes())
        try:
            told[machine], left = seal(machine, args.folder, made, revise=args.revise or args.profiles is not None)
        except InvalidInputError as error:
            raise SystemExit(str(error)) from None
        added = len(told[machine])
        total += added + left
        took = time.perf_counter() - began
        print(f"{machine}: {added} cells sealed, {left} were and stay; {took:.0f} s", file=sys.stderr, flush=True)
    print(json.dumps({"sealed": told}) if args.json else f"{total} cells")


if __name__ == "__main__":
    main()
