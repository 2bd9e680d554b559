"""A plan as a torchtitan configuration. Keys: torchtitan/config/job_config.py of https://github.com/pytorch/torchtitan."""

from __future__ import annotations

from asa.ir.plan import Plan
from asa.report.lost import even_batch, short
from asa.report.snippets.pieces import header
from asa.report.whole import Choice

_SCHEDULE = {"gpipe": "GPipe", "1f1b": "1F1B"}


def torchtitan(plan: Plan, choice: Choice) -> str:
    """The TOML. torchtitan trains models that are registered with it, each with its own parallelize function."""
    ranks, name = plan.num_ranks, choice.name
    data = ranks if name in ("ddp", "zero2", "fsdp") else 1
    staged = name in _SCHEDULE
    recomputed = [c.name for c in plan.components if c.checkpoint]
    mode = "none" if not recomputed else "full" if len(recomputed) == len(plan.components) else "selective"
    rows = max(1, plan.global_batch // (data * (1 if staged else plan.num_microbatches)))
    lines = [
        "# torchtitan has no model of this name: register a TrainSpec for it, whose parallelize function applies what",
        "# stands below"
        + (" (tensor parallelism of convolutions is not to be had from DTensor)." if name == "tensor" else "."),
        "[model]",
        f'name = "{plan.model_spec}"',
        "",
        "[training]",
        f"local_batch_size = {rows}",
        f"global_batch_size = {even_batch(plan, name)}",
        f'mixed_precision_param = "{"bfloat16" if plan.precision == "bf16" else "float32"}"',
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {ranks if name == 'ddp' else 1}",
        f"data_parallel_shard_degree = {ranks if name in ('zero2', 'fsdp') else 1}",
        f'fsdp_reshard_after_forward = "{"never" if name == "zero2" else "always"}"',
        f"tensor_parallel_degree = {ranks if name == 'tensor' else 1}",
        f"pipeline_parallel_degree = {len(plan.stages) if staged else 1}",
    ]
    if staged:
        schedule = "gpipe" if short(plan, name) else name
        parts = [[c.name for c in plan.components if c.stage == s] for s in range(len(plan.stages))]
        lines += [
            f'pipeline_parallel_schedule = "{_SCHEDULE[schedule]}"',
            f"pipeline_parallel_microbatch_size = {max(1, plan.global_batch // plan.num_microbatches)}",
            "module_fqns_per_model_part = [",
            *("    [" + ", ".join(f'"{n}"' for n in part) + "]," for part in parts),
            "]",
        ]
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    if mode == "selective":
        lines.append(f"# the plan recomputes {', '.join(recomputed)}")
    return header(plan, choice) + "\n".join(lines) + "\n"
