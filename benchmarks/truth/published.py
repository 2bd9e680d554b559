"""Steps of FSDP training of language models that others measured, against estimates from a model's structure.

The rows (``published.csv``) are of 0.1 to 70 billion parameters, on 8 to 128 A100 or H100, with 512 to 65,536 tokens.
A row is predicted as :mod:`benchmarks.truth.language` does: the model traced without values with weights and
activations in bf16, timed by data sheets, its plan priced with a preset's links. What products reach on an A100 was
taken from the rows of titan and ibm (decision 0203); nothing was fitted to those of mpt, whose attention was an older
and slower kernel.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path

from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.cost.machine.widen import widened
from asa.cost.planned import price_plan
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.graph import LayerGraph
from asa.ir.plan import DataDegree
from asa.zoo.sizes import SHAPES, GPT2Shape, LlamaShape
from benchmarks.truth.language import Run, planned

FILE = Path(__file__).with_name("published.csv")
_FEW = 3
"""Blocks that are traced: a first one, one that stands for all in the middle, and the last, which ends with a norm."""


def _mpt(layers: int, width: int, heads: int) -> GPT2Shape:
    return GPT2Shape(layers=layers, width=width, heads=heads, vocabulary=50_368)


def _llama2(layers: int, width: int, heads: int, kv_heads: int, hidden: int) -> LlamaShape:
    return LlamaShape(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, hidden=hidden, vocabulary=32_000
    )  # fmt: skip


_SHAPES: dict[str, GPT2Shape | LlamaShape] = {
    "mpt-125m": _mpt(12, 768, 12), "mpt-760m": _mpt(24, 1536, 12), "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20), "mpt-13b": _mpt(40, 5120, 40), "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64), "llama3-8b": SHAPES["llama:8b"], "llama3-70b": SHAPES["llama:70b"],
    "llama2-13b": _llama2(40, 5120, 40, 40, 13_824), "llama2-34b": _llama2(48, 8192, 64, 8, 22_016),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28_672),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Step:
    """A measured step: ``micro`` sequences a rank in each of ``microbatches``, and its ``seconds``. ``every``: each
    block with a number divisible by it has its forward computed twice; 0 for none."""

    source: str
    device: str
    gpus: int
    model: str
    tokens: int
    micro: int
    microbatches: int
    every: int
    seconds: float


def read(path: Path = FILE) -> list[Step]:
    """The steps in ``path``."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    steps = []
    for row in csv.DictReader(lines):
        micro, count, tokens = int(row["micro"]), int(row["microbatches"]), int(row["tokens"])
        steps.append(
            Step(
                source=row["source"], device=row["device"], gpus=int(row["gpus"]), model=row["model"], tokens=tokens,
                micro=micro, microbatches=count, every={"none": 0, "half": 2, "all": 1}[row["recompute"]],
                seconds=micro * count * tokens / float(row["tokens_per_s"]),
            )
        )  # fmt: skip
    return steps


@cache
def traced(model: str, tokens: int) -> LayerGraph:
    """The structure of a model of the table; torch is needed for it."""
    import torch

    from asa.sharding.layers.structure import structure_of
    from asa.zoo.language import language_model
    from asa.zoo.without_values import without_values

    shape = _SHAPES[model]

    def bare() -> torch.nn.Module:
        with without_values():
            few = replace(shape, layers=_FEW)
            return language_model(few, vocabulary=shape.vocabulary, tokens=tokens).to(torch.bfloat16)

    example = torch.zeros(2, tokens, dtype=torch.int64)
    few = structure_of(bare, bare, example, name=model, num_classes=shape.vocabulary).graph
    first, block, _, last, *head = few.components
    blocks = [replace(block, name=f"blocks.{i}") for i in range(shape.layers - 1)]
    return replace(few, components=(first, *blocks, replace(last, name=f"blocks.{shape.layers - 1}"), *head))


@cache
def cluster(device: str, gpus: int) -> Cluster:
    """The preset of that device with as many GPUs."""
    if gpus <= 8:
        return presets.load(f"{device}-nvlink-8")
    found = presets.load("h100-4x8-ib" if device == "h100" else "a100-4x8-roce")
    return found if gpus <= found.num_devices else widened(found, gpus)


def predicted(step: Step, strategies: Strategies) -> float:
    """Seconds of the step."""
    graph, links = traced(step.model, step.tokens), cluster(step.device, step.gpus)
    run = Run(
        case="", model=step.model, layers=0, tensor=1, stages=1, data=step.gpus, context=1, experts=1,
        microbatches=step.microbatches, tokens=step.tokens, seconds=1.0, memory_bytes=1.0,
    )  # fmt: skip
    plan, blocks = planned(run, graph), range(1, len(graph) - 1)
    parts = [
        replace(
            c, data=DataDegree(strategy="zero3", degree=step.gpus),
            checkpoint=step.every > 0 and i in blocks and i % step.every == 0,
        )
        for i, c in enumerate(plan.components)
    ]  # fmt: skip
    plan = replace(plan, components=tuple(parts), global_batch=step.gpus * step.micro * step.microbatches)
    profile = estimate(
        graph, links.device, model_spec=step.model, model_fingerprint="0" * 16, precision="bf16",
        global_batch=step.micro, max_degree=1,
    )  # fmt: skip
    return price_plan(plan, profile, links, strategies).cost.total_s


@dataclass(frozen=True)
class Accuracy:
    """Predicted over measured seconds: the geometric mean, the root mean square of logarithms around it, and of
    ``pairs`` more than 10 % apart how many are in the measured order."""

    ratio: float
    spread: float
    ordered: int
    pairs: int


def accuracy(judged: Sequence[tuple[Step, float]]) -> dict[str, Accuracy]:
    """By source and device, of (step, predicted seconds)."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step, seconds in judged:
        groups[f"{step.source} {step.device}"].append((step.seconds, seconds))
    found = {}
    for name, times in groups.items():
        logs = [math.log(p / m) for m, p in times]
        mean = sum(logs) / len(logs)
        apart = [(a, b) for a, b in combinations(times, 2) if abs(math.log(a[0] / b[0])) > math.log(1.1)]
        found[name] = Accuracy(
            ratio=math.exp(mean),
            spread=math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs)),
            ordered=sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in apart),
            pairs=len(apart),
        )
    return found


__all__ = ["FILE", "Accuracy", "Step", "accuracy", "cluster", "predicted", "read", "traced"]
