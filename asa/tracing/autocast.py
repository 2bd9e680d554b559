"""Mixed precision: ``torch.autocast``, and its casts on tensors without values, on the meta device, where it does not
work. Saved and output tensors then have the sizes that they have when training at half precision.

The lists are those of ``torch.autocast`` for CUDA, as far as models use them: products and convolutions in the lower
type, norms, softmax and losses in fp32, everything else in the widest type of its inputs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from asa.ir.profile import Precision

LOWER: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of products, by precision."""
_LOWER = frozenset({
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "conv1d",
    "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
    "multi_head_attention_forward", "chain_matmul", "mv", "prelu",
})  # fmt: skip
_FULL = frozenset({
    "layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "exp",
    "log", "pow", "__pow__", "rsqrt", "reciprocal", "softplus", "cumsum", "sum", "prod", "norm", "cdist",
})  # fmt: skip


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Context for a forward pass in ``precision``; parameters and optimizer stay in fp32."""
    if precision not in LOWER:
        return nullcontext()
    return torch.autocast(device.type, dtype=LOWER[precision])


class AutocastOnMeta(TorchFunctionMode):
    """Context in which functions get meta tensors cast as autocast to ``lower`` would cast them."""

    def __init__(self, lower: torch.dtype) -> None:
        super().__init__()
        self.lower = lower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.cast_arguments(getattr(func, "__name__", ""), args, kwargs or {})
        return func(*args, **kwargs)

    def cast_arguments(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """``args`` and ``kwargs``, cast for the function ``name``."""
        kind = self.lower if name in _LOWER else torch.float32 if name in _FULL else None
        if kind is None:
            return args, kwargs

        def cast(value: Any) -> Any:
            real = isinstance(value, Tensor) and value.is_meta and value.is_floating_point()
            return value.to(kind) if real and value.dtype != torch.float64 else value

        return tree_map(cast, args), tree_map(cast, kwargs)
