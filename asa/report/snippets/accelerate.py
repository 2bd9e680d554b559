"""A plan as a script for Hugging Face Accelerate. API: https://huggingface.co/docs/accelerate (1.10 and later).

A script and not a file for ``accelerate launch``: on CPUs that starts one process whatever the file says, and what a
file cannot say (microbatches, the rows of a rank) is said once. ``torchrun`` starts the ranks everywhere.
"""

from __future__ import annotations

from asa.ir.plan import Plan
from asa.report.snippets.pieces import CLASSES, RATES, batch_lines, header, loss_lines, model_lines
from asa.report.whole import Choice

_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def accelerate(plan: Plan, choice: Choice) -> str:
    """The script; ``torchrun`` starts it on every rank."""
    ranks, name = plan.num_ranks, choice.name
    more, build = model_lines(plan)
    loss_import, loss = loss_lines(plan)
    shards = 1 if name == "single" else ranks
    rows = max(1, plan.global_batch // (shards * plan.num_microbatches))
    x, y = batch_lines(plan, str(rows), "device=accelerator.device")
    imports, options = _how(plan, name)
    own = "\n".join(sorted({loss_import, more, *imports}, key=lambda line: (line.startswith("from"), line)))
    return f"""\
{header(plan, choice)}#
# torchrun --standalone --nproc-per-node {ranks} FILE
import os

import torch
{own}

RANKS, MICROBATCHES, STEPS = {ranks}, {plan.num_microbatches}, int(os.environ.get("STEPS", "10"))

accelerator = Accelerator(
    cpu={plan.device_type == "cpu"},
    mixed_precision="{_PRECISION[plan.precision]}",
    gradient_accumulation_steps=MICROBATCHES,
{options})
if accelerator.num_processes != RANKS:
    raise SystemExit(f"{{accelerator.num_processes}} processes of {{RANKS}}: start this with the torchrun line above")
torch.manual_seed(0)
model = {build}
optimizer = torch.optim.{CLASSES[plan.optimizer]}(model.parameters(), {RATES[plan.optimizer]})
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(STEPS):
    for part in range(MICROBATCHES):
        # Your data here: this rank's rows of a microbatch.
        torch.manual_seed((step * MICROBATCHES + part) * RANKS + accelerator.process_index)
        x = {x}
        y = {y}
        with accelerator.accumulate(model):
            loss = {loss}(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"step {{step}} loss {{float(accelerator.reduce(loss.detach(), 'mean')):.6f}}")
accelerator.end_training()
"""


def _how(plan: Plan, name: str) -> tuple[list[str], str]:
    """Imports, and arguments of the ``Accelerator`` that say how the model is spread."""
    if name == "zero1":
        made = f"DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps={plan.num_microbatches})"
        return ["from accelerate import Accelerator, DeepSpeedPlugin"], f"    deepspeed_plugin={made},\n"
    if name not in ("fsdp", "zero2", "hsdp"):
        return ["from accelerate import Accelerator"], ""
    inside = min((c.data.shards or plan.num_ranks for c in plan.components), default=1) if name == "hsdp" else 0
    sizes = f"dp_shard_size={inside or plan.num_ranks}"
    if inside and inside < plan.num_ranks:
        sizes = f"dp_replicate_size={plan.num_ranks // inside}, {sizes}"
    recomputed = any(c.checkpoint for c in plan.components)
    plugin = (
        f"FullyShardedDataParallelPlugin(\n        fsdp_version=2, reshard_after_forward={name != 'zero2'}, "
        f"activation_checkpointing={recomputed},\n        "
        'auto_wrap_policy="size_based_wrap", min_num_params=1_000_000,\n    )'
    )
    return (
        [
            "from accelerate import Accelerator, FullyShardedDataParallelPlugin",
            "from accelerate.parallelism_config import ParallelismConfig",
        ],
        f"    parallelism_config=ParallelismConfig({sizes}),\n    fsdp_plugin={plugin},\n",
    )
