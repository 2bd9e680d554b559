"""A plan as a configuration of torchtitan: a Python function that returns one.

Names: torchtitan/config/{training,parallelism}.py and config/README.md of https://github.com/pytorch/torchtitan (2026).
"""

from __future__ import annotations

import re

from asa.ir.plan import Plan
from asa.report.snippets.grid import Grid, grid_as
from asa.report.snippets.left_out import short
from asa.report.snippets.pieces import header, machines, torchrun
from asa.report.snippets.uniform_choice import Choice

_SCHEDULE = {"gpipe": "GPipe", "1f1b": "1F1B", "layers": "GPipe"}
_BLOCK = re.compile(r"blocks\.(\d+)")


def torchtitan(plan: Plan, choice: Choice) -> str:
    """The module, whose name is passed to ``run_train.sh``. torchtitan counts tokens; a sample without tokens counts as
    one."""
    grid = grid_as(plan, choice.name)
    tokens = plan.input_shape[0] if len(plan.input_shape) == 1 else 1
    rows = max(1, plan.global_batch // (grid.data * plan.num_microbatches))
    recomputed = [c.name for c in plan.components if c.checkpoint]
    kind = "None" if not recomputed else "FullAC.Config()"
    some = 0 < len(recomputed) < len(plan.components)
    precision = "bfloat16" if plan.precision == "bf16" else "float32"
    replicated = grid.strategy == "replicate" and not _sharded_instead(grid)
    shards = 1 if replicated else grid.data if grid.shards == 1 else grid.shards
    lines = [
        f"data_parallel_replicate_degree={grid.data // shards},",
        f"data_parallel_shard_degree={shards},",
        f'fsdp_reshard_after_forward="{"always" if grid.strategy in ("zero3", "hsdp") else "never"}",',
        f"tensor_parallel_degree={grid.tensor},",
        f"enable_sequence_parallel={grid.sequence},",
        f"pipeline_parallel_degree={grid.stages},",
        *(_pipeline(plan, choice.name) if grid.stages > 1 else ()),
    ]
    base, import_line = _base(plan)
    config = f"{base}()" if base else "Trainer.Config(model_spec=model_spec())"
    return f"""\
{header(plan, choice)}#
# {_start(plan, choice)}
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
{import_line}from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    config = {config}
    config.training = TrainingConfig(
        num_tokens_per_microbatch_per_dp_rank={rows * tokens},
        num_tokens_per_train_step={rows * grid.data * plan.num_microbatches * tokens},
        max_context_length={tokens},
        dtype="float32",
        mixed_precision_param="{precision}",
    )
    config.parallelism = ParallelismConfig(
        {(chr(10) + 8 * " ").join(lines)}
    )
{f"    # The plan recomputes {', '.join(recomputed)}; torchtitan, every block.{chr(10)}" if some else ""}\
    config.activation_checkpoint = {kind}
    return config
"""


def _start(plan: Plan, choice: Choice) -> str:
    if machines(plan, choice)[0] == 1:
        return f"NGPU={plan.num_ranks} MODULE=(this file's module) CONFIG=planned ./run_train.sh"
    program = "-m torchtitan.train --module (this file's module) --config planned"
    return torchrun(plan, choice).replace("FILE", program)


def _sharded_instead(grid: Grid) -> bool:
    """Whether replicas become shards: torchtitan either only replicates, or shards beside other dimensions."""
    return grid.data > 1 and (grid.tensor > 1 or grid.stages > 1)


def _pipeline(plan: Plan, name: str) -> list[str]:
    schedule = "gpipe" if short(plan, name if name != "hybrid" else plan.schedule) else plan.schedule
    parts = [[_called(c.name, plan) for c in plan.components if c.stage == s] for s in range(len(plan.stages))]
    named = [", ".join(f'"{m}"' for modules in part for m in modules) for part in parts]
    return [
        f'pipeline_parallel_schedule="{_SCHEDULE[schedule]}",',
        f"num_pp_microbatches={plan.num_microbatches},",
        "pipeline_parallel_module_fqns_per_model_part=[",
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
    """torchtitan's own configuration of the model with its import, or lines that make one if there is none."""
    size = plan.model_spec.removeprefix("llama:")
    if plan.model_spec.startswith("llama:") and size in ("8b", "70b", "405b"):
        return f"llama3_{size}", f"from torchtitan.models.llama3.config_registry import llama3_{size}\n"
    return "", f"from my_models import model_spec  # torchtitan has no {plan.model_spec}: a ModelSpec that you write\n"
