"""Sums, means, norms and extremes of a split tensor: their values for the whole tensor, and their gradients.

Every rank of the axis has the same value in its loss, and differentiates it with respect to its own part. Only first
derivatives are possible: gradients cannot be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asa.sharding.split.elements import elementwise
from asa.sharding.split.part import Call, TensorPart, handles, refuse
from asa.sharding.split.wire import HALF, Split, gathered, largest, summed, value_with_gradient


def _dims(part: TensorPart, dim: Any) -> tuple[int, ...]:
    """Dimensions to reduce, as non-negative numbers."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(part.dim()))
    return tuple(n % part.dim() for n in (dim if isinstance(dim, list | tuple) else (dim,)))


def _along(call: Call, dims: tuple[int, ...], keepdim: bool) -> Any:
    """Result of a reduction along dimensions that are not sharded."""
    part = call.args[0]
    result = call.func(part.held, *call.args[1:], **call.options)
    dim = part.parted.dim if keepdim else part.parted.dim - sum(n < part.parted.dim for n in set(dims))
    wrap = [TensorPart(f, part.parted.at(dim)) for f in (result if isinstance(result, tuple) else (result,))]
    return type(result)(wrap) if isinstance(result, tuple) else wrap[0]


def _named(args: Sequence[Any], options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Arguments by name, whether given by position or name; numpy's names are replaced by torch's."""
    torchs = {"axis": "dim", "keepdims": "keepdim"}
    return dict(zip(names, args, strict=False)) | {torchs.get(key, key): v for key, v in options.items()}


def total(call: Call) -> Any:
    """Sums: ``sum``, ``mean`` and ``count_nonzero``."""
    (part, *more), options, name = call.args, call.options, call.name
    arguments = _named(more, options, "dim", "keepdim")
    dims = _dims(part, arguments.get("dim"))
    if part.parted.dim not in dims:
        return _along(call, dims, arguments.get("keepdim", False))
    if name == "count_nonzero":
        return summed(gathered(part.held.ne(0).sum(dims)), part.parted)
    held, dtype = part.held, arguments.get("dtype")
    dtype = dtype or (held.dtype if held.is_floating_point() or held.is_complex() or name == "mean" else torch.int64)
    addend = gathered(held.sum(dims, arguments.get("keepdim", False), dtype=torch.float32 if dtype in HALF else dtype))
    if name == "mean":
        addend = addend / math.prod(part.shape[n] for n in set(dims))
    return value_with_gradient(addend, summed(addend, part.parted), part.parted).to(dtype)


def extreme(call: Call) -> Any:
    """``max``, ``min``, ``amax`` and ``amin``. The gradient is divided equally among all equal extremes."""
    if (isinstance(call.args[-1], Tensor) and len(call.args) > 1) or "other" in call.options:
        return elementwise(call)
    (part, *more), options, name = call.args, call.options, call.name
    arguments = _named(more, options, "dim", "keepdim")
    dims, keepdim = _dims(part, arguments.get("dim")), arguments.get("keepdim", False)
    if part.parted.dim not in dims:
        return _along(call, dims, keepdim)
    if name in ("max", "min") and arguments.get("dim") is not None:
        refuse(f"{name}(dim), which says where,", part.parted)
    local = gathered((part.held.amin if name.endswith("min") else part.held.amax)(dims, keepdim))
    value = -largest(-local, part.parted) if name.endswith("min") else largest(local, part.parted)
    return value_with_gradient(_shared(part.held, local, value, dims, part.parted), value, part.parted)


def _shared(held: Tensor, local: Tensor, value: Tensor, dims: tuple[int, ...], split: Split) -> Tensor:
    """``local``, this rank's extreme, with a gradient that accounts for equal elements on other ranks."""
    if not (local.requires_grad and torch.is_grad_enabled()):
        return local
    with torch.no_grad():
        shape = [1 if n in dims else s for n, s in enumerate(held.shape)] if len(set(dims)) < held.dim() else []
        count = gathered(held.eq(local.reshape(shape)).sum(dims)).reshape(local.shape) * local.eq(value)
        share = count / summed(count, split).clamp(min=1)
    return local * share.to(local.dtype)


def truth(call: Call) -> Any:
    """Reductions of booleans: ``all`` and ``any``."""
    (part, *more), options, name = call.args, call.options, call.name
    arguments = _named(more, options, "dim", "keepdim")
    dims = _dims(part, arguments.get("dim"))
    if part.parted.dim not in dims:
        return _along(call, dims, arguments.get("keepdim", False))
    against = part.held.ne(0) if name == "any" else part.held.eq(0)
    some_true = summed(gathered(against.sum(dims, arguments.get("keepdim", False))), part.parted) > 0
    return some_true if name == "any" else ~some_true


def norm(call: Call) -> Any:
    """``norm`` under all its names, as a vector norm."""
    (part, *more), options, name = call.args, call.options, call.name
    arguments = _named(more, options, "ord" if name.startswith("linalg") else "p", "dim", "keepdim", "dtype")
    if name == "linalg_matrix_norm":
        arguments = {"ord": "fro", "dim": (-2, -1)} | arguments
    order = arguments.get("p" if name == "norm" else "ord", 2)
    dims = _dims(part, arguments.get("dim"))
    if part.parted.dim not in dims:
        return _along(call, dims, arguments.get("keepdim", False))
    of_matrix = len(dims) == 2 and name in ("linalg_norm", "linalg_matrix_norm")
    order = 2.0 if order in ("fro", None) else math.inf if order == "inf" else order
    if isinstance(order, str) or order < 0 or (of_matrix and arguments.get("ord") not in ("fro", None)):
        refuse(f"{name} of order {order}", part.parted)
    return _norm(part, float(order), dims, arguments.get("keepdim", False), arguments.get("dtype"))


def _norm(part: TensorPart, order: float, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    held = part.held if dtype is None else part.held.to(dtype)
    local = gathered(torch.linalg.vector_norm(held, order, dims, keepdim))
    if order == math.inf:
        value = largest(local, part.parted)
        return value_with_gradient(_shared(held.abs(), local, value, dims, part.parted), value, part.parted)
    return _joined(local, summed(_power(local, order), part.parted), order, part.parted)


def _power(local: Tensor, order: float) -> Tensor:
    wide = local.detach().double()
    return wide if order == 0 else wide.pow(order)


def _joined(local: Tensor, powers: Tensor, order: float, split: Split) -> Tensor:
    """Norm of the whole tensor from the sum of the powers of its parts' norms; d whole / d part = (part / whole) **
    (order - 1)."""
    total_norm = powers if order == 0 else powers.pow(1 / order)
    value = total_norm.to(local.dtype)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return value
    wide = local.detach().double()
    slope = torch.where(wide == 0, 0.0, (wide / total_norm).pow(order - 1))
    return value_with_gradient(local * slope.to(local.dtype), value, split)


def norms(parts: Sequence[TensorPart], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norm of each tensor, with one message for all tensors that the same ranks hold (if none is
    differentiated)."""
    if order == math.inf or (torch.is_grad_enabled() and any(p.requires_grad for p in parts)):
        return [_norm(p, order, tuple(range(p.dim())), False, dtype) for p in parts]
    local = [gathered(torch.linalg.vector_norm(p.held, order, dtype=dtype)) for p in parts]
    values: dict[int, Tensor] = {}
    for first in range(len(parts)):
        if first in values:
            continue
        split = parts[first].parted
        alike = [i for i, p in enumerate(parts) if p.parted.axis.group is split.axis.group]
        powers = summed(torch.stack([_power(local[i], order) for i in alike]), split)
        values |= {i: _joined(local[i], power, order, split) for i, power in zip(alike, powers.unbind(), strict=True)}
    return [values[i] for i in range(len(parts))]


def spread(call: Call) -> Any:
    """``std`` and ``var`` over all elements."""
    (part, *more), options, name = call.args, call.options, call.name
    arguments = _named(more, options, "unbiased")
    less = arguments.pop("correction", None)
    unbiased = arguments.pop("unbiased", True)
    if arguments or not isinstance(unbiased, bool):
        refuse(f"{name} along dimensions", part.parted)
    mean: Any = part.mean()
    variance: Any = (part - mean).square().sum() / (part.numel() - (int(unbiased) if less is None else less))
    return variance.sqrt() if name == "std" else variance


def product(call: Call) -> Any:
    """Products and distance: ``dot`` and ``vdot`` of two vectors, ``dist`` of two tensors."""
    one, other, *more = call.args
    if call.name == "dist":
        return torch.linalg.vector_norm(one - other, *more, *call.options.values())
    return (one * other).sum()


handles(("sum", "mean", "count_nonzero"), total)
handles(("max", "min", "amax", "amin"), extreme)
handles(("all", "any"), truth)
handles(("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "frobenius_norm"), norm)
handles(("std", "var"), spread)
handles(("dot", "vdot", "dist"), product)
