"""What of a plan another tool's snippet leaves out beside the strategy itself, in sentences."""

from __future__ import annotations

from asa.ir.plan import Plan

STAGED = ("layers", "gpipe", "1f1b")
"""Whole strategies of several stages."""

_ALONE = ("single", "tensor", *STAGED)
"""Whole strategies that do not cut a microbatch."""


def parts_of(plan: Plan, name: str) -> int:
    """Into how many parts a batch is cut under the whole strategy ``name``: shards times microbatches."""
    return plan.num_microbatches * (1 if name in _ALONE else plan.num_ranks)


def even_batch(plan: Plan, name: str) -> int:
    """The largest batch up to the plan's whose parts are equal; at least one sample for each."""
    parts = parts_of(plan, name)
    return max(1, plan.global_batch // parts) * parts


def short(plan: Plan, name: str) -> bool:
    """Whether torch refuses 1F1B for having fewer microbatches than stages; GPipe computes the same."""
    return name == "1f1b" and plan.num_microbatches < len(plan.stages)


def lost(plan: Plan, name: str, tool: str) -> tuple[str, ...]:
    """What ``tool`` leaves out of ``plan`` where it runs the whole strategy ``name``."""
    notes = []
    if plan.compression != "none":
        notes.append(f"{tool} sends gradients as they are, the plan as {plan.compression}")
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
    """Gaps of one tool's snippets."""
    notes = []
    recomputed = sum(c.checkpoint for c in plan.components)
    if short(plan, name):
        notes.append(
            f"torch runs 1F1B from as many microbatches as stages on, the plan has {plan.num_microbatches} and "
            f"{len(plan.stages)}: this is GPipe"
        )
    if tool == "torch" and name in STAGED:
        if plan.precision != "fp32":
            notes.append(f"a pipeline of torch in {plan.precision}: this is fp32")
        if recomputed:
            notes.append(f"a pipeline of torch recomputes nothing by itself, the plan {recomputed} components")
    elif tool == "torch" and plan.precision == "fp16":
        notes.append("fp16 without a scaled loss: add torch.amp.GradScaler")
    if tool == "torchtitan" and plan.precision == "fp16":
        notes.append("torchtitan has no fp16: this is fp32")
    if tool == "accelerate" and recomputed and name not in ("fsdp", "zero2"):
        notes.append("accelerate recomputes nothing without FSDP: that is the script's own business")
    return notes
