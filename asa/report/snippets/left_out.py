"""Sentences on what another tool's snippet leaves out of a plan, besides the strategy itself."""

from __future__ import annotations

from asa.ir.consistency import WAITS_FOR
from asa.ir.plan import Plan
from asa.report.snippets.grid import STAGED, grid_as
from asa.zoo.sizes import shape_of


def parts_of(plan: Plan, name: str) -> int:
    """Number of parts into which a batch is cut under the whole strategy ``name``: shards times microbatches."""
    return plan.num_microbatches * grid_as(plan, name).data


def even_batch(plan: Plan, name: str) -> int:
    """The largest batch, up to the plan's, whose parts are equal; at least one sample per part."""
    parts = parts_of(plan, name)
    return max(1, plan.global_batch // parts) * parts


def short(plan: Plan, name: str) -> bool:
    """Whether torch refuses 1F1B because there are fewer microbatches than stages; GPipe computes the same."""
    staged = plan.schedule if name == "hybrid" else name
    return staged == "1f1b" and plan.num_microbatches < len(plan.stages)


def left_out(plan: Plan, name: str, tool: str) -> tuple[str, ...]:
    """Sentences on what ``tool`` leaves out of ``plan`` when it runs the whole strategy ``name``."""
    notes = []
    if plan.compression != "none":
        notes.append(f"{tool} sends gradients as they are, the plan as {plan.compression}")
    if plan.consistency is not None:
        waits = WAITS_FOR[plan.consistency.name]
        notes.append(
            f"{tool} has all ranks take every step together, the plan trains under {plan.consistency}: {waits}"
        )
    if plan.memory_format != "contiguous" or plan.compiled != "none":
        ways = [w for w in (plan.memory_format, f"compiled: {plan.compiled}") if not w.endswith(("contiguous", "none"))]
        notes.append(f"{tool} computes as the model is written, predictions are for {', '.join(ways)}")
    offloaded = sum(c.offload for c in plan.components)
    if offloaded:
        notes.append(
            f"{tool} keeps the optimizer's state on the device, the plan that of {offloaded} components on the host"
        )
    batch = even_batch(plan, name)
    if batch != plan.global_batch and (tool != "torch" or name in STAGED):
        notes.append(
            f"a global batch of {plan.global_batch} is not of {parts_of(plan, name)} equal parts: this one trains on "
            f"{batch} samples a step"
        )
    return (*notes, *_of_tool(plan, name, tool))


def _of_tool(plan: Plan, name: str, tool: str) -> list[str]:
    """Sentences on what the snippets of one tool cannot express."""
    notes = []
    if plan.precision == "tf32":
        notes.append('products in TF32: call torch.set_float32_matmul_precision("high") first; this is fp32')
    recomputed = sum(c.checkpoint for c in plan.components)
    if short(plan, name):
        notes.append(
            f"torch runs 1F1B from as many microbatches as stages on, the plan has {plan.num_microbatches} and "
            f"{len(plan.stages)}: this is GPipe"
        )
    if tool == "torch" and name in STAGED:
        if plan.precision not in ("fp32", "tf32"):
            notes.append(f"a pipeline of torch in {plan.precision}: this is fp32")
        if recomputed:
            notes.append(f"a pipeline of torch recomputes nothing by itself, the plan {recomputed} components")
    elif tool == "torch" and plan.precision == "fp16":
        notes.append("fp16 without a scaled loss: add torch.amp.GradScaler")
    if plan.precision in ("bf16", "fp16") and (tool == "deepspeed" or (tool, name) == ("accelerate", "zero1")):
        notes.append(f"DeepSpeed holds {_halves(plan)}")
    if tool == "torchtitan":
        notes += _of_titan(plan, name)
    if tool == "megatron":
        notes += _of_megatron(plan, name)
    grid = grid_as(plan, name)
    if (
        tool in ("accelerate", "fabric")
        and grid.data > 1
        and grid.tensor > 1
        and grid.strategy in ("replicate", "zero1")
    ):
        notes.append(f"{tool} keeps no replicas beside tensors: the states of the {grid.data} are sharded")
    if tool == "accelerate" and grid.tensor > 1:
        notes.append(
            "accelerate 1.15 splits tensors beside shards with transformers 4 alone, of which it imports a piece"
        )
    if tool == "accelerate" and recomputed and name not in ("fsdp", "zero2", "hsdp", "hybrid"):
        notes.append("accelerate recomputes nothing without FSDP: that is the script's own business")
    return notes


def _halves(plan: Plan) -> str:
    return (
        f"weights in {plan.precision}, and in fp32 beside the optimizer's state; the plan holds them in fp32 alone, so "
        "memory and rounding differ"
    )


def _of_titan(plan: Plan, name: str) -> list[str]:
    grid, notes = grid_as(plan, name), []
    if plan.precision == "fp16":
        notes.append("torchtitan has no fp16: this is fp32")
    if plan.optimizer == "sgd":
        notes.append("torchtitan has no SGD: this is AdamW, whose state is twice as large")
    if grid.strategy == "zero1":
        notes.append("torchtitan has no zero1: gradients are sharded, too")
    if any(c.checkpoint for c in plan.components) and not all(c.checkpoint for c in plan.components):
        notes.append("torchtitan recomputes every block or none")
    if len(plan.input_shape) > 1:
        notes.append("torchtitan trains on sequences of tokens: a sample of images stands as a sequence of one")
    return notes


def _of_megatron(plan: Plan, name: str) -> list[str]:
    grid, notes = grid_as(plan, name), []
    if shape_of(plan.model_spec) is None:
        notes.append(f"Megatron-LM has no model {plan.model_spec}: these are the flags of its layout alone")
    if grid.strategy in ("zero2", "zero3", "hsdp") and grid.stages > 1:
        notes.append(f"Megatron-LM shards no more than the optimizer beside stages, the plan has {grid.strategy}")
    if plan.optimizer == "sgd" and grid.strategy != "replicate":
        notes.append(f"Megatron-LM shards the state of Adam alone: take AdamW for {grid.strategy}")
    if plan.precision in ("bf16", "fp16"):
        notes.append(f"Megatron-LM holds {_halves(plan)}")
    if short(plan, name) or (grid.stages > 1 and plan.schedule != "1f1b"):
        notes.append(f"Megatron-LM runs stages by 1F1B, the plan by {plan.schedule}")
    if any(c.checkpoint for c in plan.components) and len({c.checkpoint for c in plan.components[1:-1]}) > 1:
        notes.append("Megatron-LM recomputes the first blocks of each stage, as many as the plan does in the fullest")
    return notes
