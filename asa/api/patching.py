"""Functions of torch that are replaced, once in a process, by forms that know about ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace_once(owner: Any, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace the function ``name`` of ``owner`` by ``wrap(function)``, unless it was replaced before, or there is
    none."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "asa"):
        return
    replacement: Any = wrap(original)
    replacement.asa = True
    setattr(owner, name, replacement)
