"""Compression of gradients in messages between ranks.

``fp16`` and ``bf16`` cast a bucket before it is averaged, and back afterwards. ``powersgd`` sends factors of low rank
and keeps the residual for the next step (Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization"). It uses torch's own communication hook; checkpoints do not contain the residual.

For sharded components, ``fp16`` and ``bf16`` set the type in which gradients are reduce-scattered. Factors are for
whole gradients only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

from asa.ir.plan import POWERSGD_RANK
from asa.sharding.collectives.axis import Axis
from asa.sharding.gradients.bucket import Bucket, Send

REDUCED: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Type of a gradient in messages, for compressions that only change the type."""

_WHOLE_STEPS = 2
"""Number of steps with whole gradients before factors are sent, as required by torch's hook."""


def compressed(axis: Axis) -> Send:
    """A function that averages buckets over ``axis`` with the compression of ``axis``, which must not be ``none``."""
    if axis.compression == "powersgd":
        return _factors(axis)
    dtype, group = REDUCED[axis.compression], axis.group

    def send(bucket: Bucket) -> Callable[[], None]:
        small = bucket.flat.to(dtype).div_(axis.size)
        work = dist.all_reduce(small, group=group, async_op=True)

        def wait() -> None:
            if work is not None:
                work.wait()
            bucket.flat.copy_(small)

        return wait

    return send


def _factors(axis: Axis) -> Send:
    state = powersgd.PowerSGDState(
        axis.group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=_WHOLE_STEPS
    )

    def send(bucket: Bucket) -> Callable[[], None]:
        travelling: Any = _AsTorchHasIt(bucket)
        coming = powersgd.powerSGD_hook(state, travelling)

        def wait() -> None:
            mean: Tensor = coming.wait()
            if mean.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(mean)

        return wait

    return send


class _AsTorchHasIt:
    """A bucket with the methods of torch's own buckets."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def buffer(self) -> Tensor:
        return self._bucket.flat

    def index(self) -> int:
        return self._bucket.number

    def gradients(self) -> list[Tensor]:
        return [self._bucket.view(i) for i in range(len(self._bucket.parameters))]

    def is_last(self) -> bool:
        return self._bucket.last
