"""Functions over lists of tensors, some of which are parts, as optimizers and gradient clipping call them."""

from __future__ import annotations

from typing import Any

import torch

from asa.sharding.split.elements import ELEMENTWISE
from asa.sharding.split.part import Call, TensorPart, beside_whole, handles, held_of, matched, refuse, wrapped
from asa.sharding.split.totals import norms


def elementwise_each(call: Call) -> Any:
    """Results of the function on this rank's part of every tensor."""
    first, *rest = call.args

    def matched_values(values: Any) -> Any:
        if not isinstance(values, list | tuple):
            return refuse(call.name, values.parted) if isinstance(values, TensorPart) else values
        return [
            matched(v, leader) if isinstance(leader, TensorPart) else beside_whole(call.name, v)
            for v, leader in zip(values, first, strict=True)
        ]

    more = {key: matched_values(v) for key, v in call.options.items()}
    results = call.func([held_of(t) for t in first], *map(matched_values, rest), **more)
    if call.in_place:
        return first
    return tuple(
        wrapped(f, leader) if isinstance(leader, TensorPart) else f for f, leader in zip(results, first, strict=True)
    )


def norm_each(call: Call) -> Any:
    """Norms of all tensors, with one message for all tensors that the same ranks hold."""
    tensors, order, dtype = _norm_arguments(*call.args, **call.options)
    values = dict(enumerate(tensors))
    unsplit = [i for i, t in values.items() if not isinstance(t, TensorPart)]
    if unsplit:
        values |= zip(unsplit, torch._foreach_norm([tensors[i] for i in unsplit], order, dtype=dtype), strict=True)
    parts = {i: t for i, t in values.items() if isinstance(t, TensorPart)}
    values |= zip(parts, norms(list(parts.values()), order, dtype), strict=True)
    return tuple(values[i] for i in range(len(tensors)))


def _norm_arguments(tensors: Any, ord: float = 2, dtype: torch.dtype | None = None) -> tuple[Any, float, Any]:
    return tensors, ord, dtype


def unscaled(call: Call) -> Any:
    """Divide gradients by a loss scale, and record whether any of this rank's gradients are not finite."""
    return call.func([held_of(t) for t in call.args[0]], *call.args[1:], **call.options)


handles((f"_foreach_{name}" for name in ELEMENTWISE), elementwise_each)
handles((f"_foreach_{name}_" for name in ELEMENTWISE), elementwise_each)
handles(("_foreach_norm",), norm_each)
handles(("_amp_foreach_non_finite_check_and_unscale_",), unscaled)
