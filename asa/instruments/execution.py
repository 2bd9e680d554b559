"""Having torch compute a component in a given way: in a profile and in training alike, or neither would tell of the
other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from asa.errors import UnavailableError
from asa.ir.execution import Compiled, MemoryFormat


def require(device: torch.device, compiled: Compiled) -> None:
    """Refuse what ``device`` has not.

    Raises:
        UnavailableError: CUDA graphs elsewhere than on CUDA.
    """
    if compiled == "graphs" and device.type != "cuda":
        raise UnavailableError(f"CUDA graphs need a CUDA device, this is {device.type}; choose --compile components")


def settle_kernels(device: torch.device) -> None:
    """Let cuDNN try its kernels on every new shape and keep the fastest. It does so in the first step of a shape, which
    nobody times."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True


def apply(components: Iterable[nn.Module], compiled: Compiled, *, eager: type[nn.Module] | None = None) -> None:
    """Have every component compiled, in place, when it is first called with a shape.

    A component with more shapes than torch keeps (8) falls back to what it does uncompiled. ``eager``: modules that
    stay as they are, since what they compute is another function in every step, which would be compiled each time.
    """
    if compiled == "none":
        return
    components = list(components)
    _keep(len(components))
    for component in components:
        for module in component.modules():
            if eager is not None and isinstance(module, eager):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        component.compile(dynamic=False, mode="reduce-overhead" if compiled == "graphs" else None)


def _keep(components: int) -> None:
    """Have torch keep its usual number of shapes for every component: all share one ``forward``, and it counts by
    function."""
    from torch._dynamo import config

    each = 8
    config.recompile_limit = max(config.recompile_limit, each * components)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, each * components)


def laid_out(x: Tensor, memory_format: MemoryFormat) -> Tensor:
    """A batch in that order in memory: images [N, C, H, W] only. Convolutions hand the order on to what follows."""
    if memory_format == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x
