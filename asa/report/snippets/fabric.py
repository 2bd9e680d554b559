"""A plan as a script for Lightning Fabric. API: https://lightning.ai/docs/fabric/stable/api/strategies.html."""

from __future__ import annotations

import re

from asa.ir.plan import Plan
from asa.report.snippets import pieces
from asa.report.snippets.grid import Grid, grid_as
from asa.report.snippets.uniform_choice import Choice

_PRECISION = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_SHARD = """\
def shard(model, mesh):
    modules = dict(model.named_modules())
    for name in NAMES:
        if name in modules and any(True for _ in modules[name].parameters()):
            fully_shard(modules[name], mesh=mesh, reshard_after_forward={reshard})
    return fully_shard(model, mesh=mesh, reshard_after_forward={reshard})
"""


def fabric(plan: Plan, choice: Choice) -> str:
    """The script; it starts its own processes."""
    name, (count, each) = choice.name, pieces.machines(plan, choice)
    devices = f"devices={each}" + (f", num_nodes={count}" if count > 1 else "")
    start = "python FILE" if count == 1 else pieces.torchrun(plan, choice)
    more, build = pieces.model_lines(plan)
    loss_import, loss = pieces.loss_lines(plan)
    grid = grid_as(plan, name)
    imports, code = _how(plan, name, grid)
    strategy = {"ddp": "DDPStrategy(gradient_as_bucket_view=True)", "single": '"auto"'}.get(
        name, f"ModelParallelStrategy(parallelize, data_parallel_size={grid.data}, tensor_parallel_size={grid.tensor})"
    )
    rows = max(1, plan.global_batch // (grid.data * plan.num_microbatches))
    waits = f"part + 1 < {plan.num_microbatches}" if grid.data > 1 else "False"
    x, y = pieces.batch_lines(plan, str(rows), "device=fabric.device")
    lines = "\n".join(imports)
    text = f"""\
{pieces.header(plan, choice)}#
# {start}
import os

import torch
{loss_import}
{more}
from lightning.fabric import Fabric
{lines}

{code}

strategy = {strategy}
fabric = Fabric(
    accelerator="{plan.device_type}", {devices}, strategy=strategy, precision="{_PRECISION[plan.precision]}"
)
fabric.launch()
torch.manual_seed(0)
model = fabric.setup({build})
optimizer = {pieces.optimizer(plan, "model.parameters()", ", foreach=False")}
optimizer = fabric.setup_optimizers(optimizer)
group = fabric.global_rank // {grid.tensor}  # ranks of one tensor group see the same samples
for step in range(int(os.environ.get("STEPS", "10"))):
    for part in range({plan.num_microbatches}):
        # Your data here: this rank's rows of a microbatch.
        torch.manual_seed((step * {plan.num_microbatches} + part) * {grid.data} + group)
        x = {x}
        y = {y}
        with fabric.no_backward_sync(model, enabled={waits}):
            loss = {loss}(model(x), y)
            fabric.backward(loss / {plan.num_microbatches})
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"step {{step}} loss {{float(fabric.all_reduce(loss.detach(), reduce_op='mean')):.6f}}")
"""
    return re.sub("\n{4,}", "\n\n\n", text)


def _how(plan: Plan, name: str, grid: Grid) -> tuple[list[str], str]:
    """Imports, and functions that distribute the model."""
    if name in ("single", "ddp"):
        return (["from lightning.fabric.strategies import DDPStrategy"] if name == "ddp" else []), ""
    imports, code, steps = ["from lightning.fabric.strategies import ModelParallelStrategy"], "", []
    if grid.tensor > 1:
        imports += pieces.SPLIT_IMPORTS
        code += pieces.split_code(plan)
        steps.append('split(model, mesh["tensor_parallel"])')
    if grid.data > 1:
        imports.append("from torch.distributed.fsdp import fully_shard")
        reshard = grid.strategy in ("zero3", "hsdp")
        code += f"NAMES = {pieces.listed(pieces.names(plan))}\n\n\n{_SHARD.format(reshard=reshard)}\n\n"
        steps.append('shard(model, mesh["data_parallel"])')
    body = "\n".join(f"    {step}" for step in steps)
    return imports, f"{code}def parallelize(model, mesh):\n{body}\n    return model\n"
