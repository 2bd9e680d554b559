"""A plan as a configuration of torchtitan: a Python function that returns one.

Names: torchtitan/config/configs.py of torchtitan 0.3.0 (https://pypi.org/project/torchtitan), with which every form of
this module was built. Its main branch renames them from week to week.
"""

from __future__ import annotations

import re

from asa.ir.plan import Plan
from asa.report.snippets.grid import grid_as
from asa.report.snippets.left_out import short
from asa.report.snippets.pieces import RATES, header, torchrun
from asa.report.snippets.uniform_choice import Choice

_SCHEDULE = {"gpipe": "GPipe", "1f1b": "1F1B", "layers": "GPipe"}
_BLOCK = re.compile(r"blocks\.(\d+)")


def torchtitan(plan: Plan, choice: Choice) -> str:
    """The module, whose name is passed to ``torchtitan.train``. torchtitan trains on sequences of tokens; a sample of
    another kind stands as a sequence of one."""
    grid = grid_as(plan, choice.name)
    tokens = plan.input_shape[0] if len(plan.input_shape) == 1 else 1
    rows = max(1, plan.global_batch // (grid.data * plan.num_microbatches))
    recomputed = sum(c.checkpoint for c in plan.components)
    precision = "bfloat16" if plan.precision == "bf16" else "float32"
    shards = 1 if grid.strategy == "replicate" else grid.data if grid.shards == 1 else grid.shards
    lines = [
        f"data_parallel_replicate_degree={grid.data // shards},",
        f"data_parallel_shard_degree={shards},",
        f'fsdp_reshard_after_forward="{"always" if grid.strategy in ("zero3", "hsdp") else "never"}",',
        f"tensor_parallel_degree={grid.tensor},",
        f"enable_sequence_parallel={grid.sequence},",
        f"pipeline_parallel_degree={grid.stages},",
        *(_pipeline(plan, choice.name, rows) if grid.stages > 1 else ()),
    ]
    imports, config = _base(plan)
    start = torchrun(plan, choice).replace("FILE", "-m torchtitan.train --module MODULE --config planned")
    some = f"    # The plan recomputes {recomputed} of {len(plan.components)} components; torchtitan, every block.\n"
    return f"""\
{header(plan, choice)}#
# For torchtitan 0.3.0. Save this as MODULE.py, then
# {start}
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
{imports}
from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    {config}
    config.optimizer = default_adamw({RATES["adamw"]}, betas=(0.9, 0.999))
    config.training = TrainingConfig(
        local_batch_size={rows * (plan.num_microbatches if grid.stages > 1 else 1)},
        global_batch_size={rows * grid.data * plan.num_microbatches},
        seq_len={tokens},
        dtype="float32",
        mixed_precision_param="{precision}",
        disable_cuda_graphs=True,  # as predicted
    )
    config.parallelism = ParallelismConfig(
        {(chr(10) + 8 * " ").join(lines)}
    )
{some if 0 < recomputed < len(plan.components) else ""}\
    config.activation_checkpoint = {"FullAC.Config()" if recomputed else "None"}
    return config
"""


def _pipeline(plan: Plan, name: str, rows: int) -> list[str]:
    schedule = "gpipe" if short(plan, name if name != "hybrid" else plan.schedule) else plan.schedule
    parts = [[_called(c.name, plan) for c in plan.components if c.stage == s] for s in range(len(plan.stages))]
    named = [", ".join(f'"{m}"' for modules in part for m in modules) for part in parts]
    return [
        f'pipeline_parallel_schedule="{_SCHEDULE[schedule]}",',
        f"pipeline_parallel_microbatch_size={rows},",
        "module_fqns_per_model_part=[",
        *(f"    [{part}]," for part in named),
        "],",
    ]


def _called(component: str, plan: Plan) -> list[str]:
    """torchtitan's names for the modules of a component; they differ for Llama models."""
    if not plan.model_spec.startswith("llama:"):
        return [component]
    block = _BLOCK.fullmatch(component)
    if block:
        return [f"layers.{block.group(1)}"]
    return ["tok_embeddings"] if component == "embedding" else ["norm", "lm_head"]


def _base(plan: Plan) -> tuple[str, str]:
    """Import lines, and lines that make ``config``: torchtitan's own for the model, if it has one."""
    size = plan.model_spec.removeprefix("llama:")
    if not plan.model_spec.startswith("llama:") or size not in ("8b", "70b", "405b"):
        what = f"from my_models import model_spec  # torchtitan has no {plan.model_spec}: a ModelSpec that you write"
        return what, "config = Trainer.Config(model_spec=model_spec())  # and your data and loss"
    if size != "405b":
        return f"from torchtitan.models.llama3.config_registry import llama3_{size}", f"config = llama3_{size}()"
    return (
        "from torchtitan.models.llama3 import model_registry\n"
        "from torchtitan.models.llama3.config_registry import llama3_70b",
        'config = llama3_70b()  # llama3_405b computes in float8\n    config.model_spec = model_registry("405B")\n'
        '    config.hf_assets_path = "./assets/hf/Llama-3.1-405B"',
    )
