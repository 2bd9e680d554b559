"""Parameters that several components use. The first component holds them, and the others refer to them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

_LOOSE = (nn.Linear, nn.Embedding)
_MOST = 4
"""Largest number of parameters tied across components. A model that shares more of them shares whole layers."""


def _parameters(thing: Any) -> list[nn.Parameter]:
    if isinstance(thing, nn.Module):
        return list(thing.parameters())
    return [thing] if isinstance(thing, nn.Parameter) else []


def used(objects: Mapping[str, Any]) -> frozenset[int]:
    """Identities of all parameters of a unit."""
    return frozenset(id(p) for thing in objects.values() for p in _parameters(thing))


def shared(units: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Identities of the parameters that more than one unit uses (``units``: objects by target, per unit)."""
    first: dict[int, int] = {}
    several: set[int] = set()
    for index, objects in enumerate(units):
        for p in (p for thing in objects.values() for p in _parameters(thing)):
            if first.setdefault(id(p), index) != index:
                several.add(id(p))
    return frozenset(several)


def loose(units: Sequence[Mapping[str, Any]], ties: frozenset[int]) -> bool:
    """Whether all shared parameters are a few weights of embeddings and linear layers (such as a decoder tied to the
    embedding). Components can share these without being merged."""
    if len(ties) > _MOST:
        return False
    users = [(n, t) for objects in units for n, t in objects.items() if ties & {id(p) for p in _parameters(t)}]
    apart = len({n for n, _ in users}) == len(users)  # no layer is called twice
    return apart and all(isinstance(thing, (*_LOOSE, nn.Parameter)) for _, thing in users)


def lent(units: Sequence[Mapping[str, Any]], ties: frozenset[int]) -> list[tuple[dict[str, Any], frozenset[str]]]:
    """For each unit, its objects, and the targets among them that are parameters held by another unit. A layer with
    such a parameter is replaced by a copy that refers to it."""
    taken: set[int] = set()
    lists = []
    for objects in units:
        others = frozenset(taken & ties)
        mine, borrowed = {}, set()
        for target, thing in objects.items():
            mine[target] = thing
            if others & {id(p) for p in _parameters(thing)}:
                if isinstance(thing, nn.Module):
                    mine[target] = _referring(thing, others)
                else:
                    borrowed.add(target)
        taken |= used(objects)
        lists.append((mine, frozenset(borrowed)))
    return lists


def _referring(module: nn.Module, others: frozenset[int]) -> nn.Module:
    made = copy.copy(module)
    kept = {n: p for n, p in module._parameters.items() if p is None or id(p) not in others}
    made.__dict__["_parameters"] = kept
    made.__dict__.update({n: p for n, p in module._parameters.items() if n not in kept})
    return made
