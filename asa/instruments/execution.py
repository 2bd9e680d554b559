"""Settings of how torch computes a component; the same in a profile and in training, so that times can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

import torch
from torch import Tensor, nn

from asa.errors import UnavailableError
from asa.ir.execution import Compiled, MemoryFormat
from asa.ir.profile import Precision


def require(device: torch.device, compiled: Compiled) -> None:
    """Check that ``device`` supports this kind of compilation.

    Raises:
        UnavailableError: CUDA graphs on another device than CUDA.
    """
    if compiled == "graphs" and device.type != "cuda":
        raise UnavailableError(f"CUDA graphs need a CUDA device, this is {device.type}; choose --compile components")


_products: str | None = None
"""Torch's precision of float32 products before this process computed in TF32; None if it does not."""


def configure_kernels(device: torch.device, precision: Precision) -> None:
    """Let cuDNN try its kernels on every new shape and keep the fastest. That happens in the first step of a shape,
    which is not timed.

    In ``tf32``, matrix products take TF32 from now on, in backward too, until this is called for another precision.
    Convolutions in fp32 follow torch's own setting, which allows TF32.
    """
    global _products
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = True
    if precision == "tf32" and _products is None:
        _products = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
    elif precision != "tf32" and _products is not None:
        torch.set_float32_matmul_precision(_products)
        _products = None


def apply(components: Iterable[nn.Module], compiled: Compiled, *, eager: type[nn.Module] | None = None) -> None:
    """Compile every component, in place, at its first call with each shape.

    A component with more shapes than torch keeps (8) runs uncompiled for further ones. ``eager``: modules that are not
    compiled, since they compute another function in every step and would be compiled each time.
    """
    if compiled == "none":
        return
    components = list(components)
    if compiled == "graphs":
        _in_graphs.update(components)
    _keep(len(components))
    _leave_out(components, eager)
    for component in components:
        component.compile(dynamic=False, mode="reduce-overhead" if compiled == "graphs" else None)


def as_one(
    run: Callable[[Tensor], tuple[Tensor, ...]], components: Iterable[nn.Module], *, eager: type[nn.Module]
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """``run``, which computes all ``components``, compiled as one function; ``eager`` as in :func:`apply`."""
    _leave_out(components, eager)
    return torch.compile(run, dynamic=False)


def _leave_out(components: Iterable[nn.Module], eager: type[nn.Module] | None) -> None:
    for module in (m for component in components for m in component.modules()):
        if eager is not None and isinstance(module, eager):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]


_in_graphs: WeakSet[nn.Module] = WeakSet()
"""Components of this process that run as CUDA graphs."""


def begin_step() -> bool:
    """Tell torch that a step begins, forward alone or with its backward, if components of this process run as CUDA
    graphs; whether some do. Outputs of the last step may be overwritten from now on.

    Torch would otherwise take each component that runs without gradients for a step of its own, and refuse the output
    of the one before.
    """
    graphs = len(_in_graphs) > 0
    if graphs:
        torch.compiler.cudagraph_mark_step_begin()
    return graphs


def _keep(components: int) -> None:
    """Raise torch's limit of compiled shapes to the usual number for each component: all share one ``forward``, and
    torch counts by function."""
    from torch._dynamo import config

    each = 8
    config.recompile_limit = max(config.recompile_limit, each * components)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, each * components)


def laid_out(x: Tensor, memory_format: MemoryFormat) -> Tensor:
    """The batch ``x`` in the given memory format, if it is images [N, C, H, W]; otherwise unchanged. Later layers keep
    the format of their inputs."""
    if memory_format == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x
