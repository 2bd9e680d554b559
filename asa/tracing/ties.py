"""Parameters that several components use. The first component holds them, and the others refer to them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

_LOOSE = (nn.Linear, nn.Embedding)
_REFERRED = "asa_referred"
"""Attribute of a module for the names of the parameters to which it only refers."""
_MOST = 4
"""Largest number of parameters tied across components. A model that shares more of them shares whole layers."""


def _parameters(item: Any) -> list[nn.Parameter]:
    if isinstance(item, nn.Module):
        return list(item.parameters())
    return [item] if isinstance(item, nn.Parameter) else []


def used(objects: Mapping[str, Any]) -> frozenset[int]:
    """Identities of all parameters of a unit."""
    return frozenset(id(p) for item in objects.values() for p in _parameters(item))


def shared(units: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Identities of the parameters that more than one unit uses (``units``: objects by target, per unit)."""
    first: dict[int, int] = {}
    several: set[int] = set()
    for index, objects in enumerate(units):
        for p in (p for item in objects.values() for p in _parameters(item)):
            if first.setdefault(id(p), index) != index:
                several.add(id(p))
    return frozenset(several)


def loose(units: Sequence[Mapping[str, Any]], ties: frozenset[int]) -> bool:
    """Whether all shared parameters are a few weights of embeddings and linear layers (such as a decoder tied to the
    embedding). Components can share these without being merged."""
    if len(ties) > _MOST:
        return False
    users = [(n, t) for objects in units for n, t in objects.items() if ties & {id(p) for p in _parameters(t)}]
    distinct = len({n for n, _ in users}) == len(users)  # no layer is called twice
    return distinct and all(isinstance(t, nn.Parameter) or _is_plain_layer(t, ties) for _, t in users)


def _is_plain_layer(item: nn.Module, ties: frozenset[int]) -> bool:
    """Whether ``item`` is an embedding or a linear layer that has its shared parameters itself, not in a module inside
    it (a parametrization), which a copy of the layer would have, too."""
    own = {id(p) for p in item.parameters(recurse=False)}
    return isinstance(item, _LOOSE) and all(id(p) in own for p in item.parameters() if id(p) in ties)


def assigned(units: Sequence[Mapping[str, Any]], ties: frozenset[int]) -> list[tuple[dict[str, Any], frozenset[str]]]:
    """The objects of each unit, and the names among them of parameters that belong to an earlier unit. A layer with
    such a parameter is replaced by a copy that refers to it."""
    used_before: set[int] = set()
    lists = []
    for objects in units:
        others = frozenset(used_before & ties)
        held_objects, borrowed = {}, set()
        for target, item in objects.items():
            held_objects[target] = item
            if others & {id(p) for p in _parameters(item)}:
                if isinstance(item, nn.Module):
                    held_objects[target] = _referring(item, others)
                else:
                    borrowed.add(target)
        used_before |= used(objects)
        lists.append((held_objects, frozenset(borrowed)))
    return lists


def _referring(module: nn.Module, others: frozenset[int]) -> nn.Module:
    copied = copy.copy(module)
    held = {n: p for n, p in module._parameters.items() if p is None or id(p) not in others}
    copied.__dict__["_parameters"] = held
    refer(copied, {n: p for n, p in module._parameters.items() if n not in held})
    return copied


def refer(module: nn.Module, parameters: Mapping[str, Any]) -> None:
    """Let ``module`` refer to ``parameters`` that another component holds, as attributes."""
    module.__dict__.update(parameters)
    module.__dict__[_REFERRED] = (*module.__dict__.get(_REFERRED, ()), *parameters)


def referred(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to which ``module`` only refers, by their names in it."""
    return {name: vars(module)[name] for name in vars(module).get(_REFERRED, ())}
