"""Stock ``DistributedDataParallel`` as the strategies use it."""

from __future__ import annotations

from inspect import signature
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asa.sharding.axis import Axis
from asa.sharding.compression import compress


def replicated(module: nn.Module, axis: Axis) -> nn.Module:
    """``module`` with gradients averaged over ``axis`` in buckets during backward; itself where there is nothing to do.

    Buffers are not broadcast every step: the executor averages them where they are read.
    """
    if axis.size == 1 or not any(p.requires_grad for p in module.parameters()):
        return module
    # The option has a new name since torch 2.15; the old one warns there.
    names = signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options = {buffers: False}
    if axis.alike and "init_sync" in names:
        options["init_sync"] = False
    wrapped = DistributedDataParallel(
        module, process_group=axis.group, gradient_as_bucket_view=True, **cast(Any, options)
    )
    compress(wrapped, axis)
    return wrapped
