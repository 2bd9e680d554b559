"""A plan as code or configuration for other tools, with notes on what each cannot express."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asa.ir.plan import Plan
from asa.report.snippets.accelerate import accelerate
from asa.report.snippets.deepspeed import deepspeed
from asa.report.snippets.fabric import fabric
from asa.report.snippets.grid import Grid
from asa.report.snippets.megatron import megatron
from asa.report.snippets.script import torch_script
from asa.report.snippets.titan import torchtitan
from asa.report.snippets.uniform_choice import Choice


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool. ``able``: whole strategies that it runs; ``grids``: whether it runs a uniform grid that is none of them.
    ``write``: makes the text for a plan under the chosen strategy."""

    able: tuple[str, ...]
    recompute: Literal["each", "all", "none"]
    write: Callable[[Plan, Choice], str]
    grids: Callable[[Grid], bool] = lambda _grid: False


TOOLS: dict[str, Tool] = {
    "torch": Tool(
        able=("single", "ddp", "zero1", "zero2", "fsdp", "tensor", "layers", "gpipe", "1f1b"),
        recompute="each",
        write=torch_script,
    ),
    "accelerate": Tool(
        able=("single", "ddp", "zero1", "zero2", "fsdp", "hsdp"),
        recompute="all",
        write=accelerate,
        grids=lambda grid: grid.stages == 1 and grid.data > 1 and not grid.sequence,
    ),
    "fabric": Tool(
        able=("single", "ddp", "zero2", "fsdp", "tensor"),
        recompute="none",
        write=fabric,
        grids=lambda grid: grid.stages == 1 and not grid.sequence and grid.strategy != "hsdp",
    ),
    "deepspeed": Tool(able=("single", "ddp", "zero1", "zero2", "fsdp"), recompute="none", write=deepspeed),
    "torchtitan": Tool(
        able=("single", "ddp", "zero2", "fsdp", "hsdp", "tensor", "gpipe", "1f1b"),
        recompute="each",
        write=torchtitan,
        grids=lambda _grid: True,
    ),
    "megatron": Tool(
        able=("single", "ddp", "zero1", "zero2", "fsdp", "hsdp", "tensor", "1f1b"),
        recompute="each",
        write=megatron,
        grids=lambda _grid: True,
    ),
}
"""Tools by name."""
