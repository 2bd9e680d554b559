"""A plan as flags of Megatron-LM's ``pretrain_gpt.py``. Names: megatron/training/arguments.py and the README of
Megatron-FSDP in https://github.com/NVIDIA/Megatron-LM (2026)."""

from __future__ import annotations

import shlex

from asa.ir.plan import Plan
from asa.report.snippets.grid import Grid, grid_as
from asa.report.snippets.pieces import header, machines
from asa.report.snippets.uniform_choice import Choice
from asa.zoo.sizes import GPT2Shape, LlamaShape, shape_of

_SHARDED = {"zero2": "optim_grads", "zero3": "optim_grads_params", "hsdp": "optim_grads_params"}
_ROTARY_BASE = 500_000


def megatron(plan: Plan, choice: Choice) -> str:
    """A shell script, with Megatron-LM's mock data and tokenizer."""
    grid, shape = grid_as(plan, choice.name), shape_of(plan.model_spec)
    flags = [*_model(plan, shape), *_layout(plan, grid), *_training(plan, grid)]
    count, each = machines(plan, choice)
    where, meeting = "", ""
    if count > 1:
        where = f", on each of {count} machines, with HEAD=the name of the first"
        meeting = ' --rdzv-backend c10d --rdzv-endpoint "$HEAD:29400"'
    return f"""\
{header(plan, choice)}#
# in a checkout of Megatron-LM{where}: bash FILE
torchrun --nproc-per-node {each} --nnodes {count}{meeting} pretrain_gpt.py \\
    {(" " + chr(92) + chr(10) + "    ").join(flags)}
"""


def _model(plan: Plan, shape: GPT2Shape | LlamaShape | None) -> list[str]:
    if shape is None:
        return []
    tokens = plan.input_shape[0]
    flags = [
        f"--num-layers {shape.layers} --hidden-size {shape.width} --num-attention-heads {shape.heads}",
        f"--seq-length {tokens} --max-position-embeddings {max(tokens, shape.tokens)}",
        f"--tokenizer-type NullTokenizer --vocab-size {plan.num_classes - 1} --mock-data",
        "--attention-dropout 0.0 --hidden-dropout 0.0",
    ]
    if isinstance(shape, GPT2Shape):
        return [*flags, "--position-embedding-type learned_absolute"]
    tied = [] if shape.tied else ["--untie-embeddings-and-output-weights"]
    return [
        *flags,
        f"--ffn-hidden-size {shape.hidden} --group-query-attention --num-query-groups {shape.kv_heads}",
        f"--position-embedding-type rope --rotary-base {_ROTARY_BASE} --normalization RMSNorm --norm-epsilon 1e-5",
        "--swiglu --disable-bias-linear",
        *tied,
    ]


def _layout(plan: Plan, grid: Grid) -> list[str]:
    flags = [
        f"--tensor-model-parallel-size {grid.tensor} --pipeline-model-parallel-size {grid.stages}",
        *(["--sequence-parallel"] if grid.sequence else []),
    ]
    if grid.stages > 1:
        flags.append(f"--pipeline-model-parallel-layout {shlex.quote(_stages(plan))}")
    if grid.strategy == "zero1" or (grid.strategy in _SHARDED and grid.stages > 1):
        flags.append("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
    elif grid.strategy in _SHARDED:
        flags += [
            f"--use-megatron-fsdp --data-parallel-sharding-strategy {_SHARDED[grid.strategy]}",
            "--use-distributed-optimizer --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor",
        ]
        if grid.strategy == "hsdp":
            replicas = grid.data // grid.shards
            flags.append(f"--num-distributed-optimizer-instances {replicas} --outer-dp-sharding-strategy no_shard")
    elif grid.data > 1:
        flags.append("--overlap-grad-reduce")
    return flags


def _stages(plan: Plan) -> str:
    """The stages in Megatron-LM's notation: E embedding, t a block, L head and loss, | between stages."""
    parts = []
    for stage in range(len(plan.stages)):
        names = [c.name for c in plan.components if c.stage == stage]
        blocks = sum(name not in ("embedding", "head") for name in names)
        inner = f"t*{blocks}" if blocks > 1 else "t" * blocks
        parts.append(("E" if "embedding" in names else "") + inner + ("L" if "head" in names else ""))
    return "|".join(parts)


def _training(plan: Plan, grid: Grid) -> list[str]:
    rows = max(1, plan.global_batch // (grid.data * plan.num_microbatches))
    flags = [
        f"--micro-batch-size {rows} --global-batch-size {rows * grid.data * plan.num_microbatches}",
        *([f"--{plan.precision}"] if plan.precision in ("bf16", "fp16") else []),
        "--optimizer adam --lr 1e-3 --weight-decay 0.05 --train-iters 10"
        if plan.optimizer == "adamw"
        else "--optimizer sgd --sgd-momentum 0.9 --lr 0.1 --weight-decay 5e-4 --train-iters 10",
    ]
    fullest = max(
        sum(c.checkpoint and c.name not in ("embedding", "head") for c in plan.components if c.stage == s)
        for s in range(len(plan.stages))
    )
    if fullest:
        flags.append(f"--recompute-granularity full --recompute-method block --recompute-num-layers {fullest}")
    return flags
