"""A plan as a configuration of Hugging Face Accelerate. Keys: https://huggingface.co/docs/accelerate (1.x)."""

from __future__ import annotations

from asa.ir.plan import Plan
from asa.report.snippets.pieces import header
from asa.report.whole import Choice

_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def accelerate(plan: Plan, choice: Choice) -> str:
    """The YAML for ``accelerate launch --config_file FILE script.py``."""
    rows = max(1, plan.global_batch // (plan.num_ranks * plan.num_microbatches))
    cpu = plan.device_type == "cpu"
    kind = {"zero1": "DEEPSPEED", "fsdp": "FSDP", "zero2": "FSDP", "single": "'NO'"}.get(
        choice.name, "MULTI_CPU" if cpu else "MULTI_GPU"
    )
    lines = [
        "# accelerate launch --config_file FILE your_script.py",
        f"# In the script: Accelerator(gradient_accumulation_steps={plan.num_microbatches}), and a DataLoader with "
        f"batch_size={rows}.",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        "machine_rank: 0",
        "num_machines: 1",
        f"num_processes: {plan.num_ranks}",
        f"mixed_precision: '{_PRECISION[plan.precision]}'",
        f"use_cpu: {str(cpu).lower()}",
    ]
    recomputed = any(c.checkpoint for c in plan.components)
    if kind == "DEEPSPEED":
        lines += [
            "deepspeed_config:",
            "  zero_stage: 1",
            f"  gradient_accumulation_steps: {plan.num_microbatches}",
            "  offload_optimizer_device: none",
            "  zero3_init_flag: false",
        ]
    if kind == "FSDP":
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {str(choice.name == 'fsdp').lower()}",
            "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP",
            "  fsdp_min_num_params: 1000000",
            f"  fsdp_activation_checkpointing: {str(recomputed).lower()}",
            "  fsdp_offload_params: false",
            "  fsdp_state_dict_type: FULL_STATE_DICT",
        ]
    return header(plan, choice) + "\n".join(lines) + "\n"
