"""Is training under a plan the same as on one device? The big models, on 2, 3 and 4 ranks, under every kind of plan.

    python benchmarks/equivalence.py [--models vgg16,resnet50] [--ranks 2,4] [-o records/equivalence.json]

Prints one row a case and writes the verdicts. ResNet-50, ViT-B/16 and VGG-16 (dropout on), 3x32x32, 100 classes;
data parallel, tensor parallel, uniform hybrid, fully sharded, and a mixed plan whose neighbouring components all
differ in layout. Needs about 10 GiB for VGG-16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.executor.measuring.equivalence import verify
from asa.ir.codec import to_data
from asa.ir.graph import Component, LayerGraph
from asa.ir.plan import Assignment, DataDegree, Plan, Stage, TensorDegree
from asa.planner import Request, plan
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from asa.tracing import trace
from asa.zoo.models import build

INPUT, CLASSES = (3, 32, 32), 100
KINDS = "ddp,tensor,hybrid:d2t2,zero1,zero2,fsdp,mixed,checkpoint,1f1b,gpipe"
Choose = Callable[[int, Component], tuple[str, int, int]]


def kinds(ranks: int) -> dict[str, Choose]:
    """Data strategy, data degree and tensor degree per component, by kind of plan."""
    layouts = [(d, t) for d in range(ranks, 0, -1) for t in range(ranks, 0, -1) if ranks % (d * t) == 0]
    found: dict[str, Choose] = {
        "ddp": lambda _i, _c: ("replicate", ranks, 1),
        "tensor": lambda _i, _c: ("replicate", 1, ranks),
        "zero1": lambda _i, _c: ("zero1", ranks, 1),
        "zero2": lambda _i, _c: ("zero2", ranks, 1),
        "fsdp": lambda _i, _c: ("zero3", ranks, 1),
        "checkpoint": lambda _i, _c: ("replicate", ranks, 1),
        "mixed": lambda i, _c: ("replicate", *layouts[i % len(layouts)]),
    }
    if ranks == 4:
        found["hybrid:d2t2"] = lambda _i, _c: ("replicate", 2, 2)
    return found


def _assign(i: int, c: Component, choose: Choose, *, stage: int = 0, checkpoint: bool = False) -> Assignment:
    data, d, t = choose(i, c)
    t = t if c.split is not None and t <= c.split.max_degree else 1
    return Assignment(
        name=c.name,
        stage=stage,
        data=DataDegree(strategy=data, degree=d),  # type: ignore[arg-type]
        tensor=TensorDegree(strategy="tensor" if t > 1 else "none", degree=t),
        checkpoint=checkpoint,
    )


def plans(base: Plan, graph: LayerGraph, ranks: int) -> dict[str, Plan]:
    """Every kind of plan on so many ranks."""
    found = {}
    for kind, choose in kinds(ranks).items():
        components = tuple(
            _assign(i, c, choose, checkpoint=kind == "checkpoint" and i % 2 == 1)
            for i, c in enumerate(graph.components)
        )
        stage = Stage(ranks=tuple(range(ranks)))
        found[kind] = replace(base, components=components, stages=(stage,), gpus=ranks, strategy="asa")
    cut, first = len(graph.components) // 2, ranks // 2
    widths = (first, ranks - first)
    stages = (Stage(ranks=tuple(range(first))), Stage(ranks=tuple(range(first, ranks))))
    for schedule in ("1f1b", "gpipe"):
        components = tuple(
            _assign(i, c, lambda _i, _c, w=widths[i >= cut]: ("replicate", w, 1), stage=int(i >= cut))
            for i, c in enumerate(graph.components)
        )
        found[schedule] = replace(
            base, components=components, stages=stages, gpus=ranks, strategy="asa", schedule=schedule,
            num_microbatches=4,
        )  # fmt: skip
    return found


def base_plan(graph: LayerGraph, model: str, fingerprint: str) -> Plan:
    """Any plan of the model, to be rewritten."""
    cluster = presets.load("a100-nvlink-8")
    profile = estimate(graph, cluster.device, model_spec=model, model_fingerprint=fingerprint, global_batch=64)
    return plan(profile, cluster, offered(), Request(gpus=2, global_batch=64, strategies=("ddp",)))[0]


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,vit_b_16,vgg16")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("-o", "--output", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    print(f"{'model':10} {'plan':12} ranks  same  {'error':>9} {'floor':>9} fp32 grad  seconds  worst tensor")
    for model in args.models.split(","):
        factory = partial(build, model, num_classes=CLASSES, input_shape=INPUT)
        traced = trace(factory(), torch.zeros((2, *INPUT)), name=model)
        graph = layer_graph(traced, model=model, input_shape=INPUT, num_classes=CLASSES)
        base = base_plan(graph, model, traced.model_fingerprint)
        del traced
        for ranks in map(int, args.ranks.split(",")):
            for kind, case in plans(base, graph, ranks).items():
                if kind not in args.kinds.split(",") or (ranks == 3 and kind in ("zero1", "zero2", "fsdp")):
                    continue
                began = time.monotonic()
                found = verify(case, factory, offered())
                seconds = time.monotonic() - began
                print(
                    f"{model:10} {kind:12} {ranks:5}  {'yes' if found.equivalent else 'NO':5} "
                    f"{found.max_rel_error:9.1e} {found.noise_floor:9.1e} {found.gradient_error_fp32:9.1e} "
                    f"{seconds:8.1f}  {found.worst_tensor}",
                    flush=True,
                )
                document = to_data(found)
                del document["tensors"]
                records.append({"model": model, "plan": kind, "seconds": round(seconds, 1), **document})
                if args.output:
                    args.output.parent.mkdir(parents=True, exist_ok=True)
                    header = {"torch": torch.__version__, "backend": "gloo", "input": INPUT, "classes": CLASSES}
                    args.output.write_text(json.dumps({**header, "cases": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
