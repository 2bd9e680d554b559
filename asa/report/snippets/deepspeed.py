"""A plan as a configuration of DeepSpeed. Keys: https://www.deepspeed.ai/docs/config-json/."""

from __future__ import annotations

import json

from asa.ir.plan import Plan
from asa.report.snippets.pieces import batch_lines, engine_cast, header, loss_lines, machines, model_lines
from asa.report.snippets.uniform_choice import Choice

_STAGE = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
_OPTIMIZER = {
    "sgd": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}},
    "adamw": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.05}},
}


def deepspeed(plan: Plan, choice: Choice) -> str:
    """A script with the configuration in it, for ``deepspeed --num_gpus N FILE``."""
    ranks, parts = plan.num_ranks, plan.num_microbatches
    rows = max(1, plan.global_batch // (ranks * parts))
    config = {
        "train_batch_size": rows * ranks * parts,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": parts,
        "optimizer": _OPTIMIZER[plan.optimizer],
        "zero_optimization": {"stage": _STAGE[choice.name], "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": plan.precision == "bf16"},
        "fp16": {"enabled": plan.precision == "fp16"},
    }
    more, build = model_lines(plan)
    loss_import, loss = loss_lines(plan)
    x, y = batch_lines(plan, str(rows), "device=engine.device")
    x += engine_cast(plan)
    count, each = machines(plan, choice)
    where = f"--hostfile HOSTS --num_nodes {count} " if count > 1 else ""
    literal = json.dumps(config, indent=4).replace("true", "True").replace("false", "False")
    return f"""\
{header(plan, choice)}#
# deepspeed {where}--num_gpus {each} FILE
import deepspeed
import torch
{loss_import}
{more}

CONFIG = {literal}

model = {build}
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
for step in range(10 * engine.gradient_accumulation_steps()):
    # Your data here: this rank's rows of a microbatch.
    x = {x}
    y = {y}
    loss = {loss}(engine(x), y)
    engine.backward(loss)
    engine.step()
"""
