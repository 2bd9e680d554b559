"""Attention and RMSNorm on tensors without values, with the memory of a GPU's fused kernels.

On the meta device torch decomposes ``scaled_dot_product_attention`` into products and a softmax, which save the scores
of all pairs of positions for backward. Devices with a fused kernel do not. Inside :func:`fused_attention` the CPU's
fused kernel stands for all of them. What that kernel cannot do (dropout, a trained mask) is decomposed as before.
Likewise RMSNorm saves its input and one number per row, and not its normalized rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from asa.tracing.autocast import AutocastOnMeta

_stock = F.scaled_dot_product_attention


@contextmanager
def fused_attention() -> Iterator[None]:
    """Context in which attention on meta tensors is one call that saves its inputs and its output.

    Graphs call torch's function itself, and torch's own layers look it up by name, so both are replaced.
    """
    with patch.object(F, "scaled_dot_product_attention", _attention), _Calls():
        yield


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        other = _attention if func is _stock else _rms_norm if func is F.rms_norm else None
        if other is None:
            return func(*args, **kwargs or {})
        kwargs = kwargs or {}
        for outer in _get_current_function_mode_stack():
            if isinstance(outer, AutocastOnMeta):
                args, kwargs = outer.cast_arguments(func.__name__, args, kwargs)
        return other(*args, **kwargs)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if not x.is_meta or (weight is not None and weight.dtype != x.dtype):
        return F.rms_norm(x, shape, weight, eps)
    output: Tensor = _RMSNorm.apply(x, weight)
    return output


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with the saved tensors of the fused kernel; torch's own is decomposed on the meta device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        """An output of the shape of ``x``."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Fail, because no backward runs on the meta device."""
        raise AssertionError("backward through tensors without values")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    alike = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == value.shape[-1]
    trained = attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4))
    if not query.is_meta or dropout_p or not alike or trained:
        return _stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return output
