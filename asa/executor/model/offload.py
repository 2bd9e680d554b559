"""Optimizer state and updates on the host (Ren et al. 2021, "ZeRO-Offload").

The optimizer updates copies in host memory. Gradients are copied there before its step, and new parameters are copied
back after it. Forward and backward use only the device's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from asa.sharding.split.local_parts import local

_COPIES = "asa_host_copies"


class HostCopies:
    """Host copies of this rank's part of ``parameters``, each once. They are in page-locked memory if the device is a
    GPU, which makes copies faster."""

    @torch.no_grad()
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.of: dict[nn.Parameter, nn.Parameter] = {}
        self._copied_state: dict[nn.Parameter, tuple[int, int]] = {}
        for p in parameters:
            shard = local(p.detach())
            copy = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=shard.is_cuda)
            self.of[p] = nn.Parameter(copy)

    @torch.no_grad()
    def take(self, *_: Any) -> None:
        """Copy gradients to the host, and parameters too if anything except :meth:`give` has written to them."""
        for p, copy in self.of.items():
            if self._copied_state.get(p) != _state(p):
                copy.copy_(local(p.detach()), non_blocking=True)
            if p.grad is None:
                copy.grad = None
                continue
            if copy.grad is None:
                copy.grad = torch.empty_like(copy, pin_memory=copy.is_pinned())
            copy.grad.copy_(local(p.grad), non_blocking=True)
        if any(local(p).is_cuda for p in self.of):
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def give(self, *_: Any) -> None:
        """Copy updated parameters to the device."""
        for p, copy in self.of.items():
            if copy.grad is not None:
                local(p.detach()).copy_(copy, non_blocking=True)
            self._copied_state[p] = _state(p)


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """Address and version of the parameter's data; they change whenever it is written to or replaced."""
    shard = local(parameter.detach())
    return shard.data_ptr(), shard._version


def attach(optimizer: torch.optim.Optimizer, copies: HostCopies) -> None:
    """Copy gradients before and parameters after every step of ``optimizer``, which updates ``copies``."""
    optimizer.register_step_pre_hook(copies.take)
    optimizer.register_step_post_hook(copies.give)
    optimizer.__dict__[_COPIES] = copies


def updated_in(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """The tensor that ``optimizer`` updates for ``parameter``: its copy on the host if it has one, otherwise the
    parameter itself."""
    copies: HostCopies | None = optimizer.__dict__.get(_COPIES)
    copied = None if copies is None or not isinstance(parameter, nn.Parameter) else copies.of.get(parameter)
    return parameter if copied is None else copied
