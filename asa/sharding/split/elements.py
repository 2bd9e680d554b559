"""Element-wise functions, computed on each rank's part; the result is a part, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asa.sharding.split.part import Call, TensorPart, beside_whole, handles, matched, parts_in, refuse, wrapped

_NAMES = """
    abs absolute neg negative positive sign sgn sqrt rsqrt square reciprocal exp exp2 expm1 log log1p log2 log10
    sin cos tan tanh sigmoid erf relu silu gelu softplus hardshrink softshrink
    floor ceil round trunc frac nan_to_num isfinite isnan isinf isposinf isneginf logical_not bitwise_not
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power
    maximum minimum fmax fmin clamp clip clamp_min clamp_max lerp addcmul addcdiv atan2 hypot copysign xlogy where
    eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose logical_and logical_or logical_xor
    bitwise_and bitwise_or bitwise_xor masked_fill conj resolve_conj resolve_neg
    fill zero copy detach clone contiguous to type_as cpu cuda float double half bfloat16 int long bool requires_grad
    zeros_like ones_like full_like empty_like
    """
ELEMENTWISE = frozenset(_NAMES.split())
"""Element-wise functions and methods; a final underscore marks the in-place form."""

_OPERATORS = """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __rdiv__ __truediv__ __rtruediv__ __floordiv__
    __rfloordiv__ __mod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__
    __or__ __xor__ __rand__ __ror__ __rxor__ __invert__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__
    __imod__ __ipow__ __iand__ __ior__ __ixor__
    """

_RANDOM = """
    normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ random_ rand_like randn_like kaiming_uniform_
    kaiming_normal_
    """


def elementwise(call: Call) -> Any:
    """Result of the function on this rank's parts."""
    parts = parts_in((*call.args, *call.options.values()))
    lead = max(parts, key=Tensor.dim)
    if call.name == "where" and len(call.args) < 3 and not {"other", "y"} & call.options.keys():
        refuse("where", lead.parted)
    if call.name in ("to", "type_as") and call.args[0] is not lead and not isinstance(call.args[0], TensorPart):
        return call.args[0].to(device=lead.device, dtype=lead.dtype)
    if call.in_place and not isinstance(call.args[0], TensorPart):
        more = {key: beside_whole(call.name, v) for key, v in call.options.items()}
        return call.func(*(beside_whole(call.name, a) for a in call.args), **more)
    args = [matched(a, lead) for a in call.args]
    result = call.func(*args, **{key: matched(v, lead) for key, v in call.options.items()})
    return call.args[0] if call.in_place else wrapped(result, lead)


def random_part(call: Call) -> Any:
    """This rank's part of random numbers drawn for the whole tensor. With equal seeds they are those that one device
    draws."""
    part, *more = call.args
    full = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    part_drawn = part.parted.cut(call.func(full, *more, **call.options))
    if not call.in_place:
        return TensorPart(part_drawn, part.parted)
    with torch.set_grad_enabled(torch.is_grad_enabled() and getattr(call.func, "__module__", "") != "torch.nn.init"):
        part.held.copy_(part_drawn)
    return part


def new_like(call: Call) -> Any:
    """A new tensor of the same type and device whose content does not depend on the values of this one."""
    return call.func(call.args[0].held, *call.args[1:], **call.options)


def same(call: Call) -> bool:
    """Whether all elements are equal (or close) to those of another tensor."""
    compare: Any = torch.isclose if call.name == "allclose" else torch.eq
    return bool(compare(*call.args, **call.options).all())


def set_item(call: Call) -> Any:
    """``t[...] = part`` of a whole tensor; of a part, only all of it can be set."""
    target, index, value = call.args
    if not isinstance(target, TensorPart):
        return call.func(target, index, beside_whole("t[...] = p", value))
    if index is not Ellipsis and index != slice(None):
        refuse(call.name, target.parted)
    return target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)


handles(ELEMENTWISE, elementwise)
handles((f"{name}_" for name in ELEMENTWISE), elementwise)
handles(_OPERATORS.split(), elementwise)
handles(_RANDOM.split(), random_part)
handles(("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"), new_like)
handles(("equal", "allclose"), same)
handles(("__setitem__",), set_item)
