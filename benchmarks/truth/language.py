"""Training steps of language models that others measured, against what a model's structure alone says.

The published runs (``llm_b200.csv``) are Megatron-LM's: weights and activations in bf16, gradients and optimizer state
in fp32, the state spread over the data-parallel ranks (ZeRO-1), tokens cut with the tensors, 1F1B, one sequence to a
microbatch. A row is predicted in the project's own way: the model traced without values, timed by FLOPs and bytes at a
device's data sheet, its plan priced with the collectives of the preset. The share of the peak that products reach on a
B200 is fitted to these rows (decision 0203); the other constants of estimates were chosen with these rows and others in
sight (decision 0131). What counts as memory beyond the
model's own (copies of logits, buffers of received activations and of weight gradients) was chosen with these rows in
sight, so their errors are in-sample.

Rows with experts are no such model and are refused by name. Of ranks that share a sequence (context parallelism) each
has its part of the tokens and attends to all of them; their exchange of keys and values is not priced.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from asa.cost.constants import constant
from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.cost.planned import price_plan
from asa.errors import InvalidInputError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.graph import Component, InnerCollective, LayerGraph, TensorSplit
from asa.ir.plan import Assignment, Certificate, DataDegree, Plan, Prediction, Stage, TensorDegree
from asa.ir.profile import Profile
from asa.zoo.sizes import SHAPES, LlamaShape

GIB = 2.0**30
_WEIGHT, _GRADIENT, _STATE = 2, 4, 12
"""Bytes per parameter: bf16 weights, fp32 gradients, and master weights with two moments, which are spread."""
_CASE = re.compile(r"(?:_|^)(tp|pp|dp|cp|ep|l|mbc|seq)(\d+)(?=_|$)")
_MODELS = {"llama3-8b": "llama:8b", "llama3-70b": "llama:70b", "llama3-405b": "llama:405b"}

Graphs = Callable[[str, int, int], LayerGraph]
"""The structure of a model by name, number of layers and tokens, its weights and activations in bf16."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measured step: ``model`` cut to ``layers``, in its degrees, and what it took; ``tokens`` of a sequence."""

    case: str
    model: str
    layers: int
    tensor: int
    stages: int
    data: int
    context: int
    experts: int
    microbatches: int
    tokens: int
    seconds: float
    memory_bytes: float


def read(path: Path) -> list[Run]:
    """The runs in ``path``.

    Raises:
        InvalidInputError: a row that cannot be understood.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    found = []
    for row in csv.DictReader(lines):
        named = {key: int(value) for key, value in _CASE.findall(row["case"])}
        named |= {k: int(v) for k, v in re.findall(r"(tp|pp|ep|cp)(\d+)", row["parallel"])}
        if "tp" not in named or "pp" not in named:
            raise InvalidInputError(f"{path}: {row['case']} names no tensor and pipeline degree")
        found.append(
            Run(
                case=row["case"],
                model=row["model"],
                layers=int(row["layer_num"]),
                tensor=named["tp"],
                stages=named["pp"],
                data=named.get("dp", 1),
                context=named.get("cp", 1),
                experts=named.get("ep", 1),
                microbatches=int(row["mbc"]),
                tokens=named.get("seq", 4096),
                seconds=float(row["real_ms"]) / 1e3,
                memory_bytes=float(row["max_allocated_gib_over_ranks"]) * GIB,
            )
        )
    return found


def expressible(run: Run) -> bool:
    """Whether the project has such a model."""
    return run.model in _MODELS


@cache
def traced(model: str, layers: int, tokens: int) -> LayerGraph:
    """See :data:`Graphs`; torch is needed for it."""
    import torch

    from asa.sharding.layers.structure import structure_of
    from asa.zoo.language import language_model
    from asa.zoo.without_values import without_values

    shape = replace(SHAPES[_MODELS[model]], layers=layers)

    def bare() -> torch.nn.Module:
        with without_values():
            return language_model(shape, vocabulary=shape.vocabulary, tokens=tokens).to(torch.bfloat16)

    example = torch.zeros(2, tokens, dtype=torch.int64)
    return structure_of(bare, bare, example, name=model, num_classes=shape.vocabulary).graph


@dataclass(frozen=True)
class Predictor:
    """Predicts runs on a preset."""

    strategies: Strategies
    graphs: Graphs = traced
    preset: str = "b200-nvlink-8"

    def _graph(self, run: Run) -> LayerGraph:
        return _as_megatron(self.graphs(run.model, run.layers, run.tokens // run.context), run)

    def seconds(self, run: Run) -> float:
        """A step of ``run``."""
        graph = _of_context(self._graph(run), run)
        cluster = presets.load(self.preset)
        plan = planned(run, graph)
        return price_plan(plan, _profile(graph, cluster, run), cluster, self.strategies).cost.total_s

    def memory_bytes(self, run: Run) -> float:
        """The most that a rank allocates: states, activations of the microbatches in flight, and what the last of them
        needs for a moment."""
        graph = self._graph(run)
        stage_of = _stages(graph, run.stages)
        return max(_stage_bytes(run, graph, stage_of, stage) for stage in range(run.stages))


def _stage_bytes(run: Run, graph: LayerGraph, stage_of: Sequence[int], stage: int) -> float:
    """Tokens being cut with the tensors, a rank has its part of every activation, and of every large weight."""
    mine = [c for c, s in zip(graph.components, stage_of, strict=True) if s == stage]
    in_flight = min(run.microbatches, run.stages - stage)
    parameters = sum(c.parameter_bytes for c in mine) / _WEIGHT / run.tensor
    states = parameters * (_WEIGHT + _GRADIENT + _STATE / (run.data * run.context))
    kept = [c.saved_bytes_per_sample / run.tensor for c in mine]
    peak = max(sum(kept[: k + 1]) + _moment(c, run.tensor, c is graph.components[-1]) for k, c in enumerate(mine))
    between = 2 * mine[0].output_bytes_per_sample / run.tensor if run.stages > 1 else 0.0  # what comes, either way
    return (1 + constant("activation_margin")) * (states + (in_flight - 1) * sum(kept) + peak + between)


def _moment(c: Component, degree: int, last: bool) -> float:
    """What the backward of a component needs while it lasts: gradients of what it hands on and of half of what it
    keeps, and the gradient of its largest weight before that is added up. In front of the loss, logits as they come and
    in fp32, and their gradient likewise."""
    logits = 4 * c.output_bytes_per_sample
    gradients = logits if last else 2 * c.output_bytes_per_sample + c.saved_bytes_per_sample / 2
    return (gradients + c.largest_parameter_bytes) / degree


def _stages(graph: LayerGraph, stages: int) -> list[int]:
    """The stage of every component: as many blocks to each, the embedding in front and the head behind."""
    count = len(graph)
    blocks = count - 2
    return [min(stages - 1, max(0, i - 1) * stages // blocks) for i in range(count)]


def _as_megatron(graph: LayerGraph, run: Run) -> LayerGraph:
    """With what Megatron-LM does otherwise: the embedding is cut by words, which are then summed over the ranks, and
    SiLU and product of the gated feed-forward are one kernel, which keeps no value between them."""
    first, *blocks, last = graph.components
    words = TensorSplit(
        max_degree=run.tensor, parameter_bytes=first.parameter_bytes, num_parameter_tensors=1, flops_per_sample=0.0,
        saved_bytes_per_sample=0.0, entry_partial=False, exit_partial=False,
        collectives=(InnerCollective(op="all_reduce", phase="forward",
                                     bytes_per_sample=first.output_bytes_per_sample),),
    )  # fmt: skip
    between = _WEIGHT * _shape(run).hidden * run.tokens / run.context
    fused = []
    for c in blocks:
        split = c.split
        if split is not None:
            split = replace(split, saved_bytes_per_sample=split.saved_bytes_per_sample - between)
        fused.append(replace(c, saved_bytes_per_sample=c.saved_bytes_per_sample - between, split=split))
    return replace(graph, components=(replace(first, split=words, why_whole=""), *fused, last))


def _shape(run: Run) -> LlamaShape:
    shape = SHAPES[_MODELS[run.model]]
    assert isinstance(shape, LlamaShape)
    return shape


def _of_context(graph: LayerGraph, run: Run) -> LayerGraph:
    """With what attending to the other ranks' tokens takes: products of its tokens with ``context`` times as many."""
    if run.context == 1:
        return graph
    own = run.tokens // run.context
    more = (run.context - 1) * 2.0 * own * own * _shape(run).width
    parts = []
    for c in graph.components:
        if c.split is None or not c.name.startswith("blocks."):
            parts.append(c)
            continue
        divided = replace(c.split, flops_per_sample=c.split.flops_per_sample + more)
        attention = c.attention_flops_per_sample + more
        parts.append(
            replace(c, flops_per_sample=c.flops_per_sample + more, attention_flops_per_sample=attention, split=divided)
        )
    return replace(graph, components=tuple(parts))


def _profile(graph: LayerGraph, cluster: Cluster, run: Run) -> Profile:
    return estimate(
        graph, cluster.device, model_spec=run.model, model_fingerprint="0" * 16, precision="bf16",
        global_batch=run.microbatches * run.data, max_degree=run.tensor,
    )  # fmt: skip


def tokens_per_second(strategies: Strategies) -> float:
    """Of each of 8 H100 that train Llama 3 8B with FSDP in bf16, two sequences of 8,192 tokens each, every other block
    computed twice: torchtitan publishes 5,762 for that (its selective recomputation takes about as much). Those H100
    have 96 GB at 2.4 TB/s."""
    gpus, each, tokens = 8, 2, 8192
    graph, cluster = traced("llama3-8b", 32, tokens), presets.load("h100-nvlink-8")
    cluster = replace(cluster, device=replace(cluster.device, memory_bandwidth=2.4e12))
    run = Run(
        case="torchtitan", model="llama3-8b", layers=32, tensor=1, stages=1, data=gpus, context=1, experts=1,
        microbatches=1, tokens=tokens, seconds=1.0, memory_bytes=1.0,
    )  # fmt: skip
    plan = planned(run, graph)
    parts = [
        replace(c, data=DataDegree(strategy="zero3", degree=gpus), checkpoint=i % 2 == 1)
        for i, c in enumerate(plan.components)
    ]
    plan = replace(plan, components=tuple(parts), global_batch=gpus * each)
    profile = _profile(graph, cluster, replace(run, microbatches=each))
    return each * tokens / price_plan(plan, profile, cluster, strategies).cost.total_s


def planned(run: Run, graph: LayerGraph) -> Plan:
    """The run as a plan."""
    width = run.tensor * run.data * run.context
    replicas = run.data * run.context
    strategy = "zero1" if replicas > 1 else "replicate"
    return Plan(
        model_spec=run.model, model_fingerprint="0" * 16, profile_fingerprint="", cluster="", cluster_fingerprint="",
        input_shape=graph.input_shape, num_classes=graph.num_classes, strategy="asa", gpus=width * run.stages,
        global_batch=run.microbatches * replicas, precision="bf16", optimizer="adamw", device_type="cuda",
        components=tuple(_assigned(run, c, s, replicas, strategy)
                         for c, s in zip(graph.components, _stages(graph, run.stages), strict=True)),
        stages=tuple(Stage(ranks=tuple(range(s * width, (s + 1) * width))) for s in range(run.stages)),
        schedule="1f1b" if run.stages > 1 else "none", num_microbatches=run.microbatches,
        prediction=_NOTHING, certificate=_NONE, baselines=(), origin="estimated",
    )  # fmt: skip


def _assigned(run: Run, c: Component, stage: int, replicas: int, strategy: str) -> Assignment:
    cut = run.tensor > 1 and c.split is not None
    tokens = cut and c.split is not None and c.split.sequence is not None
    return Assignment(
        name=c.name,
        stage=stage,
        data=DataDegree(strategy=strategy, degree=replicas),
        tensor=TensorDegree(
            strategy="sequence" if tokens else "tensor" if cut else "none", degree=run.tensor if cut else 1
        ),
    )


_NOTHING = Prediction(
    step_time_s=1.0, step_time_low_s=1.0, step_time_high_s=1.0, compute_s=1.0, exposed_communication_s=0.0,
    hidden_communication_s=0.0, update_s=0.0, bubble_s=0.0, memory_bytes_per_rank=(1,), samples_per_s=1.0,
)  # fmt: skip
_NONE = Certificate(solver="hand", status="feasible", lower_bound_s=0.0, gap=1.0, space="", solve_s=0.0)

__all__ = ["GIB", "Predictor", "Run", "expressible", "planned", "read", "tokens_per_second", "traced"]
