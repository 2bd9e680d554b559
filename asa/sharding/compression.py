"""Gradients made smaller for their way between ranks: stock communication hooks of ``DistributedDataParallel``.

``fp16`` and ``bf16`` cast a bucket before it is averaged and back afterwards. ``powersgd`` sends factors of low rank
and keeps what they miss for the next step (Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization"); what it keeps belongs to a run and is in no checkpoint. Sharded components take the first
two as the type in which their gradients are scattered; factors are for whole gradients only.
"""

from __future__ import annotations

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from asa.ir.plan import POWERSGD_RANK
from asa.sharding.axis import Axis

REDUCED: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Type of a gradient on its way, where that is all that changes."""

_WHOLE_STEPS = 2
"""Steps before factors are sent: DDP settles its buckets in them."""


def compress(module: DistributedDataParallel, axis: Axis) -> None:
    """Have ``module`` send its gradients as ``axis.compression`` says."""
    if axis.compression == "powersgd":
        state = powersgd.PowerSGDState(
            axis.group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=_WHOLE_STEPS
        )
        module.register_comm_hook(state, powersgd.powerSGD_hook)
    elif axis.compression != "none":
        module.register_comm_hook(
            axis.group, {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}[axis.compression]
        )
