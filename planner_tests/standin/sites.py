"""Every place in the package that asks for CUDA, and which of them were reached with yes for an answer.

A finder in front of the import system compiles the package's modules with a mark around each such expression: a
comparison of a device's type or a backend with ``cuda``, ``cpu`` or ``nccl``, an ``is_cuda``, a flag named for it, a
call into ``torch.cuda`` or NVML. A comparison or flag counts when it came out as on a GPU, a call when it returned.
What was reached is appended to one file by this process and all its forks.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2] / "asa"
_FLAGS = {"cuda", "_cuda", "on_cuda", "is_cuda"}


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


class _Finder(ast.NodeTransformer):
    """Marks expressions; with ``mark=None`` only lists them."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[str] = []

    def _marked(self, node: ast.expr, kind: str, yes: bool, text: str) -> ast.expr:
        where = f"{self.file}:{node.lineno}: {text}"
        self.found.append(where)
        call = ast.Call(
            func=ast.Name(id="__standin_mark__", ctx=ast.Load()),
            args=[ast.Constant(where), node, ast.Constant(kind), ast.Constant(yes)],
            keywords=[],
        )
        return ast.copy_location(call, node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        text = _text(node)
        self.generic_visit(node)
        if len(node.ops) != 1:
            return node
        left, right, op = node.left, node.comparators[0], node.ops[0]
        subject = _text(left)
        words = ("device", "type", "backend", "found", "chosen", "place")
        if isinstance(op, (ast.Eq, ast.NotEq)) and isinstance(right, ast.Constant) and right.value in ("cuda", "nccl"):
            return self._marked(node, "test", isinstance(op, ast.Eq), text)
        host = isinstance(op, (ast.Eq, ast.NotEq)) and isinstance(right, ast.Constant) and right.value == "cpu"
        if host and any(w in subject for w in words):
            return self._marked(node, "test", isinstance(op, ast.NotEq), text)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        text = _text(node)
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and node.attr in ("is_cuda", "_cuda"):
            return self._marked(node, "test", True, text)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = _text(node)
        self.generic_visit(node)
        if text.startswith(("torch.cuda.", "pynvml.")):
            return self._marked(node, "call", True, text)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(s) for s in node.body]  # not annotations and defaults
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node


def named(site: str) -> str:
    """A place without its line: ``file: expression``."""
    file, _, rest = site.partition(":")
    return f"{file}:{rest.partition(':')[2]}"


def sites() -> list[str]:
    """``file:line: expression`` of every place in the package."""
    found: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        finder = _Finder(str(path.relative_to(ROOT.parent)))
        finder.visit(ast.parse(path.read_text()))
        found += finder.found
    return found


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        tree = _Finder(str(Path(path).relative_to(ROOT.parent))).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> Any:  # never the compiled file of a run without marks
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _PackageFinder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "asa" and not name.startswith("asa."):
            return None
        where = [str(ROOT.parent)] if path is None else path
        hooks = (importlib.machinery.FileFinder.path_hook((_Loader, [".py"])),)
        for entry in where:
            spec = hooks[0](str(entry)).find_spec(name)
            if spec is not None:
                return spec
        return None


def watch(log: Path) -> None:
    """From now on modules of the package are imported with marks, and what is reached is written to ``log``."""
    assert not any(n == "asa" or n.startswith("asa.") for n in sys.modules), "imported without marks"
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    seen: set[str] = set()

    def mark(where: str, value: Any, kind: str, yes: bool) -> Any:
        if where not in seen and (kind == "call" or bool(value) == yes):
            seen.add(where)
            os.write(out, f"{where}\n".encode())
        return value

    import builtins

    builtins.__standin_mark__ = mark  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _PackageFinder)  # type: ignore[arg-type]
