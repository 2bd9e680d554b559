"""Checks that a module defines a name, from its source, before anything is imported. If the source is not clear, the
check passes."""

from __future__ import annotations

import ast
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path

from asa.errors import InvalidInputError, UsageError
from asa.reading import read_bytes

_OPAQUE = frozenset({"globals", "setattr", "exec", "eval", "__getattr__", "modules", "vars", "__path__"})
"""Words in a source with which it may define names that cannot be read there."""


def check_defined(spec: str, module: str, attribute: str, what: str = "model") -> None:
    """Check, as far as the source shows, that the module and the name of ``package.module:factory`` exist.

    Raises:
        UsageError: there is no module ``module``, or no ``attribute`` in it (similar names are given).
    """
    first, *rest = module.split(".")
    if first in sys.modules:
        return
    paths = [p for p in (Path.cwd() / first, Path.cwd() / f"{first}.py") if p.exists()] or _installed(first)
    for part in rest:
        if not paths or any(_opaque(path / "__init__.py") for path in paths):
            return
        paths = [inner for path in paths for inner in _inside(path, part)]
        if not paths:
            raise UsageError(f"{what} {spec!r}: no module {module!r} to import from here or the installed packages")
    sources = [path / "__init__.py" if path.is_dir() else path for path in paths]
    # With several places of one name, or an extension module, the import decides.
    if len(sources) != 1 or sources[0].suffix != ".py":
        return
    defined, name = _names(sources[0]), attribute.partition(".")[0]
    if defined is not None and name not in defined and not any(_inside(path, name) for path in paths):
        matches = get_close_matches(name, [n for n in defined if not n.startswith("_")], n=3)
        hint = f"; did you mean {', '.join(matches)}?" if matches else ""
        raise UsageError(f"{what} {spec!r}: {module} has no {attribute!r}{hint}")


def _installed(package: str) -> list[Path]:
    """Locations of an installed package or module; empty if unknown."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        return []
    if spec.submodule_search_locations:
        return [Path(p) for p in spec.submodule_search_locations]
    return [Path(str(spec.origin))]


def _inside(path: Path, part: str) -> list[Path]:
    """Modules and packages called ``part`` in the package at ``path``."""
    if not path.is_dir():
        return []
    return [p for p in path.iterdir() if p.name == part or (p.is_file() and p.name.startswith(f"{part}."))]


def _opaque(source: Path) -> bool:
    return source.is_file() and b"__path__" in read_bytes(source)


def _names(source: Path) -> frozenset[str] | None:
    """All names that a module's source binds; None if unknown."""
    try:
        tree = ast.parse(read_bytes(source))
    except (InvalidInputError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in _OPAQUE:
                return None
            names.add(name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name in _OPAQUE:
                return None
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            if any(alias.name == "*" for alias in node.names):
                return None
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return frozenset(names)
