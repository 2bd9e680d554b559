"""Stock ``DistributedDataParallel`` as the strategies use it."""

from __future__ import annotations

from inspect import signature
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asa.sharding.axis import Axis
from asa.sharding.bucket import shared
from asa.sharding.compression import compress
from asa.sharding.segment import segment_of


def replicated(module: nn.Module, axis: Axis) -> nn.Module:
    """``module`` with gradients averaged over ``axis`` in buckets during backward; itself where there is nothing to do.

    Buffers are not broadcast every step: the executor averages them where they are read. Buckets go through memory that
    the ranks share, where they share any, and by messages elsewhere.
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
    if axis.compression != "none":
        compress(wrapped, axis)
    elif axis.group is not None and segment_of(axis.group) is not None:
        wrapped.register_comm_hook(axis.group, shared)
    return wrapped
