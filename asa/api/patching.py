"""Functions of torch that are replaced, once in a process, by forms that know about ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_replaced: dict[int, tuple[Any, Any]] = {}
"""Functions of modules, by identity, and what replaces them, until :func:`replace_imported`."""


def replace_once(owner: Any, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace the function ``name`` of ``owner`` by ``wrap(function)``, unless it was replaced before, or there is
    none."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "asa"):
        return
    replacement: Any = wrap(original)
    replacement.asa = True
    setattr(owner, name, replacement)
    if isinstance(owner, ModuleType):
        _replaced[id(original)] = original, replacement


def replace_imported() -> None:
    """Replace these functions also in modules that imported them by name before (``from torch.distributed import
    all_reduce``)."""
    for name, module in list(sys.modules.items()) if _replaced else ():
        space = getattr(module, "__dict__", {})
        if name.partition(".")[0] not in ("asa", "torch"):
            for key, value in list(space.items()):
                if id(value) in _replaced:
                    space[key] = _replaced[id(value)][1]
    _replaced.clear()
