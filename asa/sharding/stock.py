"""Checks that a module computes exactly what torch's module of its class computes, so that it may be replaced."""

from __future__ import annotations

from torch import nn

_HARMLESS = frozenset({
    "__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__parameters__", "__constants__", "__repr__",
    "extra_repr", "reset_parameters",
})  # fmt: skip
"""Names that a subclass may define without changing its computation."""
_OWN = ("torch.nn.modules.", "torchvision.ops.stochastic_depth", "asa.")


def stock(module: nn.Module) -> bool:
    """Whether ``module`` is torch's own (or one of asa's), unmodified.

    These are not stock: a subclass with methods of its own (a standardized convolution, a low-rank adapter), a computed
    weight (``parametrizations``, ``weight_norm``), and a module with hooks, which a replacement would lack.
    """
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    if any(hooks) or "forward" in vars(module):
        return False
    for kind in type(module).__mro__:
        if kind.__module__.startswith(_OWN):
            return True
        if not _HARMLESS.issuperset(vars(kind)):
            return False
    return False
