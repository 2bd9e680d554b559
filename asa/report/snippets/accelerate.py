"""A plan as a script for Hugging Face Accelerate. API: https://huggingface.co/docs/accelerate (1.10 and later).

It is a script and not a file for ``accelerate launch``, because on CPUs that starts one process whatever the file says,
and a file cannot express microbatches or the rows of a rank. ``torchrun`` starts the ranks everywhere.
"""

from __future__ import annotations

from asa.ir.plan import Plan
from asa.report.snippets import pieces
from asa.report.snippets.grid import Grid, grid_as
from asa.report.snippets.uniform_choice import Choice

_PRECISION = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}


def accelerate(plan: Plan, choice: Choice) -> str:
    """The script; ``torchrun`` starts it on every rank."""
    ranks, name = plan.num_ranks, choice.name
    more, build = pieces.model_lines(plan)
    loss_import, loss = pieces.loss_lines(plan)
    grid = grid_as(plan, name)
    rows = max(1, plan.global_batch // (grid.data * plan.num_microbatches))
    x, y = pieces.batch_lines(plan, str(rows), "device=accelerator.device")
    x += pieces.engine_cast(plan) if name == "zero1" else ""
    imports, options, code = _how(plan, name, grid)
    split = (
        f"""
split(model, accelerator.torch_device_mesh["tp"])
model.tp_size = {grid.tensor}"""
        if grid.tensor > 1
        else ""
    )
    import_lines = "\n".join(sorted({loss_import, more, *imports}, key=lambda line: (line.startswith("from"), line)))
    return f"""\
{pieces.header(plan, choice)}#
# {pieces.torchrun(plan, choice)}
import os

import torch
{import_lines}

RANKS, MICROBATCHES, STEPS = {ranks}, {plan.num_microbatches}, int(os.environ.get("STEPS", "10"))
{code}
accelerator = Accelerator(
    cpu={plan.device_type == "cpu"},
    mixed_precision="{_PRECISION[plan.precision]}",
    gradient_accumulation_steps=MICROBATCHES,
{options})
if accelerator.num_processes != RANKS:
    raise SystemExit(f"{{accelerator.num_processes}} processes of {{RANKS}}: start this with the torchrun line above")
torch.manual_seed(0)
model = {build}{split}
optimizer = {pieces.optimizer(plan, "model.parameters()")}
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(STEPS):
    for part in range(MICROBATCHES):
        # Your data here: this rank's rows of a microbatch.
        torch.manual_seed((step * MICROBATCHES + part) * {grid.data} + accelerator.process_index // {grid.tensor})
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


def _how(plan: Plan, name: str, grid: Grid) -> tuple[list[str], str, str]:
    """Imports, arguments of the ``Accelerator`` for the strategy, and code for what it does not do itself."""
    if name == "zero1":
        plugin = f"DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps={plan.num_microbatches})"
        return ["from accelerate import Accelerator, DeepSpeedPlugin"], f"    deepspeed_plugin={plugin},\n", ""
    if name in ("single", "ddp"):
        return ["from accelerate import Accelerator"], "", ""
    imports, options, code = ["from accelerate.parallelism_config import ParallelismConfig"], "", ""
    shards = grid.data if grid.shards == 1 else grid.shards
    sizes = [f"dp_replicate_size={grid.data // shards}"] if grid.data > shards else []
    sizes += [f"dp_shard_size={shards}"] if shards > 1 else []
    if grid.tensor > 1:
        sizes.append(f"tp_size={grid.tensor}")
        imports += pieces.SPLIT_IMPORTS
        code = f"\n\n{pieces.split_code(plan)}"
    if shards > 1:
        imports.append("from accelerate import Accelerator, FullyShardedDataParallelPlugin")
        options = (
            f"    fsdp_plugin=FullyShardedDataParallelPlugin(\n        fsdp_version=2, "
            f"reshard_after_forward={grid.strategy in ('zero3', 'hsdp')}, "
            f"activation_checkpointing={any(c.checkpoint for c in plan.components)},\n        "
            'auto_wrap_policy="size_based_wrap", min_num_params=1_000_000,\n    ),\n'
        )
    else:
        imports.append("from accelerate import Accelerator")
    return imports, f"    parallelism_config=ParallelismConfig({', '.join(sizes)}),\n{options}", code
