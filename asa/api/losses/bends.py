"""Where a loss bends a number of a whole batch: a mean whose absolute value is taken, that is clamped, of which the
larger of two is taken, or that is multiplied by whether it is large. On one side, such a loss is a mean over samples;
ranks may be on both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_MOST = 4
"""Largest number of bends that are looked at: a loss that is put together sample by sample has more."""
_MOST_BELOW = 64
"""Largest number of autograd's nodes below a bend that are searched for a single sample."""


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError("a bend of many numbers")
        return float(value.detach())
    return float(value)


def _place(value: float, least: Any, most: Any) -> int:
    return int(most is not None and value > _number(most)) - int(least is not None and value < _number(least))


def _factor(node: Any) -> int:
    """The factor of a product that is a tensor of one 0 or 1, as ``loss > c`` is. A number of Python's (a weight that
    has become 1) does not decide the type of a result."""
    factor = node._saved_other if node._saved_self is None else node._saved_self
    if factor is None or factor.dim() or factor.requires_grad:
        raise ValueError("no single number")
    narrow = torch.zeros((), dtype=torch.float16 if factor.is_floating_point() else torch.int8)
    if factor.dtype not in (torch.bool, torch.result_type(factor, narrow)) or factor not in (0, 1):
        raise ValueError("a weight")
    return int(factor)


def _largest(node: Any) -> int:
    if node.next_functions[0][0].name() not in ("StackBackward0", "CatBackward0"):
        raise ValueError("elements of a tensor")
    return int((node._saved_self == node._saved_result).flatten().int().argmax())


_SIDES: dict[str, Callable[[Any], int]] = {
    "AbsBackward0": lambda n: int(_number(n._saved_self) > 0),
    "ReluBackward0": lambda n: int(_number(n._saved_result) > 0),
    "ClampBackward0": lambda n: _place(_number(n._saved_self), n._saved_min, n._saved_max),
    "ClampBackward1": lambda n: _place(_number(n._saved_self), n._saved_min, n._saved_max),
    "ClampMinBackward0": lambda n: _place(_number(n._saved_self), n._saved_min, None),
    "ClampMinBackward1": lambda n: _place(_number(n._saved_self), n._saved_min, None),
    "ClampMaxBackward0": lambda n: _place(_number(n._saved_self), None, n._saved_max),
    "ClampMaxBackward1": lambda n: _place(_number(n._saved_self), None, n._saved_max),
    "MaximumBackward0": lambda n: int(_number(n._saved_self) > _number(n._saved_other)),
    "MinimumBackward0": lambda n: int(_number(n._saved_self) > _number(n._saved_other)),
    "WhereBackward0": lambda n: int(_number(n._saved_condition)),
    "LeakyReluBackward0": lambda n: int(_number(n._saved_self) > 0),
    "ThresholdBackward0": lambda n: int(_number(n._saved_self) > _number(n._saved_threshold)),
    "HardtanhBackward0": lambda n: _place(_number(n._saved_self), n._saved_min_val, n._saved_max_val),
    "MulBackward0": _factor,
    "MaskedFillBackward0": lambda n: int(_number(n._saved_mask)),
    "HuberLossBackward0": lambda n: _place(
        _number(n._saved_self) - _number(n._saved_target), -n._saved_delta, n._saved_delta
    ),
    "SmoothL1LossBackward0": lambda n: _place(
        _number(n._saved_self) - _number(n._saved_target), -n._saved_beta, n._saved_beta
    ),
    "MaxBackward1": _largest,
    "MinBackward1": _largest,
}
"""By the name of autograd's node, on which side of its bend the number is."""


_BY_ROW = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Neg",
    "Exp",
    "Sigmoid",
    "Tanh",
    "View",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Clone",
)
"""Beginnings of the names of nodes that keep the rows of a batch."""
_DECIDED = ("MulBackward0", "WhereBackward0", "MaskedFillBackward0")
"""Nodes whose side is a tensor beside the number, which may be one of the program's (a schedule)."""


def bends(name: str) -> bool:
    """Whether autograd's node of this ``name`` may bend a number."""
    return name in _SIDES


def sides(nodes: Iterable[Any], below: Callable[[Any], Iterable[Any]]) -> tuple[int, ...]:
    """On which sides of bends a loss is, of those of its ``nodes`` that bend one number of the batch; empty if there
    are none, or too many. ``below``: the nodes below one, up to outputs of the model."""
    found = []
    for node in nodes:
        try:
            side = _SIDES[node.name()](node)
        except (ValueError, AttributeError, RuntimeError):  # many numbers, or changed in place
            continue
        if not _of_one_sample(node, below):
            found.append(side)
    return tuple(found) if len(found) <= _MOST else ()


def sides_of(loss: Tensor, outputs: Iterable[Tensor], *, masks: bool = True) -> tuple[int, ...]:
    """:func:`sides` of a ``loss`` of ``outputs``; without ``masks``, only those that the number itself is on."""
    ends = {o.grad_fn for o in outputs}

    def below(node: Any) -> Iterable[Any]:
        pending, visited = [node], set(ends)
        while pending and len(visited) < 32 * _MOST_BELOW:
            if (one := pending.pop()) is not None and one not in visited:
                visited.add(one)
                yield one
                pending += [following for following, _ in one.next_functions]

    with torch._C.DisableTorchFunctionSubclass():
        nodes = (n for n in below(loss.grad_fn) if bends(n.name()) and (masks or n.name() not in _DECIDED))
        return sides(nodes, below)


def masks_by(loss_fn: Callable[[Any, Any], Tensor] | None, output: Any, labels: Any) -> bool:
    """Whether ``loss_fn`` makes a single 0 or 1 of the ``output``, as ``loss > c`` is; True, too, if it fails on a copy
    of that, or is None."""
    if loss_fn is None:
        return True
    found = False

    class OfOutput(Tensor):
        """A tensor that is made of the output."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal found
            with torch._C.DisableTorchFunctionSubclass():
                made = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls)]
                found = found or any(t.numel() == 1 and not t.requires_grad and t in (0, 1) for t in made)
            return super().__torch_function__(func, types, args, kwargs)

    def marked(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad).as_subclass(OfOutput)

    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            loss_fn(pytree.tree_map(marked, output), labels)
    except Exception:  # whatever a program's own code raises
        return True
    return found


def _of_one_sample(node: Any, below: Callable[[Any], Iterable[Any]]) -> bool:
    """Whether the number that ``node`` bends is of one sample: taken out of a batch, or the only row of one."""
    saved = (getattr(node, kept, None) for kept in ("_saved_self", "_saved_result"))
    row = any(isinstance(bent, Tensor) and bent.dim() > 0 for bent in saved)
    for count, one in enumerate(below(node)):
        name = one.name()
        if name == "UnbindBackward0" or (name == "SelectBackward0" and one._saved_dim == 0):
            return True
        row = row and (not count or name.partition("Backward")[0] in _BY_ROW)
        if count > _MOST_BELOW:
            return False
    return row
