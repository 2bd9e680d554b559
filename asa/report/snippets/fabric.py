"""A plan as a script for Lightning Fabric. API: https://lightning.ai/docs/fabric/stable/api/strategies.html."""

from __future__ import annotations

import re

from asa.ir.plan import Plan
from asa.report.snippets.pieces import CLASSES, RATES, batch_lines, header, listed, loss_lines, model_lines, names
from asa.report.whole import Choice

_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_SHARD = """\
def parallelize(model, mesh):
    modules = dict(model.named_modules())
    for name in UNITS:
        if name in modules and any(True for _ in modules[name].parameters()):
            fully_shard(modules[name], mesh=mesh["data_parallel"], reshard_after_forward={reshard})
    return fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward={reshard})
"""
_SPLIT = '''\
def parallelize(model, mesh):
    """Linear layers of the components in UNITS, pair by pair; convolutions and attention stay whole."""
    modules = dict(model.named_modules())
    for name in UNITS:
        linear = [n for n, m in modules[name].named_modules() if type(m) is nn.Linear] if name in modules else []
        for module in modules[name].modules() if linear else ():
            if getattr(module, "inplace", False):
                module.inplace = False
        how = {}
        for first, second in zip(linear[::2], linear[1::2]):
            how |= {first: ColwiseParallel(), second: RowwiseParallel()}
        if len(linear) % 2:
            how[linear[-1]] = ColwiseParallel(output_layouts=Replicate())
        if how:
            parallelize_module(modules[name], mesh["tensor_parallel"], how.get("", how))
    return model
'''


def fabric(plan: Plan, choice: Choice) -> str:
    """The script; it starts its own processes."""
    name, ranks = choice.name, plan.num_ranks
    more, build = model_lines(plan)
    loss_import, loss = loss_lines(plan)
    imports, extra, constants = [], "", ""
    if name in ("fsdp", "zero2"):
        imports = [
            "from lightning.fabric.strategies import ModelParallelStrategy",
            "from torch.distributed.fsdp import fully_shard",
        ]
        constants = f"UNITS = {listed(names(plan))}\n\n\n"
        extra = _SHARD.format(reshard=name == "fsdp")
        strategy = f"ModelParallelStrategy(parallelize, data_parallel_size={ranks}, tensor_parallel_size=1)"
    elif name == "tensor":
        imports = [
            "from lightning.fabric.strategies import ModelParallelStrategy",
            "from torch import nn",
            "from torch.distributed.tensor import Replicate",
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        ]
        constants = f"UNITS = {listed(names(plan, tensor=True) or names(plan))}\n\n\n"
        extra = _SPLIT
        strategy = f"ModelParallelStrategy(parallelize, data_parallel_size=1, tensor_parallel_size={ranks})"
    elif name == "ddp":
        imports = ["from lightning.fabric.strategies import DDPStrategy"]
        strategy = "DDPStrategy(gradient_as_bucket_view=True)"
    else:
        strategy = '"auto"'
    shards = 1 if name in ("single", "tensor") else ranks
    rows = max(1, plan.global_batch // (shards * plan.num_microbatches))
    waits = f"part + 1 < {plan.num_microbatches}" if name in ("ddp", "fsdp", "zero2") else "False"
    x, y = batch_lines(plan, str(rows), "device=fabric.device")
    lines = "\n".join(imports)
    text = f"""\
{header(plan, choice)}#
# python FILE
import torch
{loss_import}
{more}
from lightning.fabric import Fabric
{lines}

{constants}{extra}

strategy = {strategy}
fabric = Fabric(
    accelerator="{plan.device_type}", devices={ranks}, strategy=strategy, precision="{_PRECISION[plan.precision]}"
)
fabric.launch()
fabric.seed_everything(0)
model = fabric.setup({build})
optimizer = torch.optim.{CLASSES[plan.optimizer]}(model.parameters(), {RATES[plan.optimizer]}, foreach=False)
optimizer = fabric.setup_optimizers(optimizer)
for step in range(10):
    for part in range({plan.num_microbatches}):
        # Your data here: this rank's rows of a microbatch.
        x = {x}
        y = {y}
        with fabric.no_backward_sync(model, enabled={waits}):
            fabric.backward({loss}(model(x), y) / {plan.num_microbatches})
    optimizer.step()
    optimizer.zero_grad()
"""
    return re.sub("\n{4,}", "\n\n\n", text)
