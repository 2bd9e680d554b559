"""Every place in the package that asks for CUDA, every line that only CUDA reaches, and which of them were reached.

A finder in front of the import system compiles the package's modules with a mark around each expression that asks: a
comparison of a device's type or a backend with ``cuda``, ``cpu`` or ``nccl``, an ``is_cuda``, a call into
``torch.cuda`` or NVML. A comparison counts when it came out as on a GPU, a call when it returned. A line that only CUDA
reaches stands behind such a comparison or a flag named for it, or in code that is named for CUDA or NVML, and counts
when it began. What was reached is appended to one file by this process and all its forks.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import marshal
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2] / "asa"
_FLAGS = {"cuda", "_cuda", "on_cuda", "is_cuda"}
_ON_A_CPU, _ON_A_GPU = ("device", "type", "backend", "found", "chosen", "place"), ("cuda", "nccl")
_ASKED = ("torch", "pynvml")
_OF_NVML = "instruments/nvml.py"
_OF_PLANS = ("asa/planner/", "asa/cost/")
"""Where a device is one of a plan, whose lines are reached without it."""
_UNKNOWN = {"n", "card", "self._card", "self._last"}
"""What is None in that file where there is no card to ask."""


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes and calls begins with; empty where it begins with none."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _compared(node: ast.AST) -> bool | None:
    """Whether a comparison comes out true on a GPU alone (True), false on a GPU alone (False), or asks for none."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        return None
    right, equal = node.comparators[0], isinstance(node.ops[0], ast.Eq)
    value = right.value if isinstance(right, ast.Constant) else None
    if value in _ON_A_GPU:
        return equal
    return not equal if value == "cpu" and any(w in _text(node.left) for w in _ON_A_CPU) else None


def _implies(test: ast.expr) -> tuple[bool, bool]:
    """Whether only CUDA reaches what follows if ``test`` is true, and if it is false."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _implies(test.operand)[::-1]
    if isinstance(test, ast.BoolOp):
        if_true, if_false = zip(*map(_implies, test.values), strict=True)
        both = isinstance(test.op, ast.And)
        return (any if both else all)(if_true), (all if both else any)(if_false)
    named_so = (isinstance(test, ast.Name) and test.id in _FLAGS) or (
        isinstance(test, ast.Attribute) and test.attr in _FLAGS
    )
    on_gpu = True if named_so else _compared(test)
    return on_gpu is True, on_gpu is False


def _without_a_card(test: ast.expr) -> bool:
    return any(part.removesuffix(" is None") in _UNKNOWN for part in _text(test).split(" or "))


def _ends(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


class _Finder(ast.NodeTransformer):
    """Marks expressions and lines, and lists them."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[str] = []
        self._alone = file.endswith(_OF_NVML)  # whether only CUDA reaches what is visited
        self._has_lines = not file.startswith(_OF_PLANS)

    def _block(self, body: list[ast.stmt], alone: bool) -> list[ast.stmt]:
        """``body`` with a mark in front of every statement that only CUDA reaches."""
        made: list[ast.stmt] = []
        before, self._alone = self._alone, alone
        for node in body:
            silent = (ast.FunctionDef, ast.ClassDef, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.Pass)
            plain = isinstance(node, silent) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            if self._alone and self._has_lines and not plain:
                first = _text(node).splitlines()[0]
                where = f"{self.file}:{node.lineno}: line {first}"
                self.found.append(where)
                made.append(ast.copy_location(ast.Expr(self._mark(ast.Constant(None), where, "call", True)), node))
            behind = isinstance(node, ast.If) and not node.orelse and _ends(node.body) and _implies(node.test)[1]
            made.append(self.visit(node))
            self._alone = self._alone or behind
        self._alone = before
        return made

    def visit_If(self, node: ast.If) -> ast.AST:
        if_true, if_false = _implies(node.test)
        only_cuda = (self._alone or if_true) and not if_false and not _without_a_card(node.test)
        node.test = self.visit(node.test)
        node.body = self._block(node.body, only_cuda)
        node.orelse = self._block(node.orelse, (self._alone or if_false) and not if_true) if node.orelse else []
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before, self._alone = self._alone, self._alone or "cuda" in node.name.lower()
        node.body = [self.visit(s) for s in node.body]
        self._alone = before
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.body = self._block(node.body, False)
        return node

    def visit_Module(self, node: ast.Module) -> ast.AST:
        node.body = [self.visit(s) for s in node.body]
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        blocks = {n: v for n, v in ast.iter_fields(node) if isinstance(v, list) and v and isinstance(v[0], ast.stmt)}
        for name in blocks:
            setattr(node, name, [])
        super().generic_visit(node)
        for name, body in blocks.items():
            setattr(node, name, self._block(body, self._alone))
        return node

    def _marked(self, node: ast.expr, kind: str, yes: bool, text: str) -> ast.expr:
        where = f"{self.file}:{node.lineno}: {text}"
        self.found.append(where)
        return ast.copy_location(self._mark(node, where, kind, yes), node)

    @staticmethod
    def _mark(node: ast.expr, where: str, kind: str, yes: bool) -> ast.expr:
        return ast.Call(
            func=ast.Name(id="__standin_mark__", ctx=ast.Load()),
            args=[ast.Constant(where), node, ast.Constant(kind), ast.Constant(yes)],
            keywords=[],
        )

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        on_gpu = _compared(node)
        text = "" if on_gpu is None else _text(node)
        self.generic_visit(node)
        return node if on_gpu is None else self._marked(node, "test", on_gpu, text)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        asks = isinstance(node.ctx, ast.Load) and node.attr in ("is_cuda", "_cuda")
        text = _text(node) if asks else ""
        self.generic_visit(node)
        return self._marked(node, "test", True, text) if asks else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        asks = _text(node.func).startswith(("torch.cuda.", "pynvml.")) if _root(node.func) in _ASKED else False
        text = _text(node) if asks else ""
        self.generic_visit(node)
        return self._marked(node, "call", True, text) if asks else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        named_so = "cuda" in node.name.lower() and len(node.body) > 1
        node.body = self._block(node.body, self._alone or named_so)  # not annotations and defaults
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node


def is_line(site: str) -> bool:
    """Whether it is a line that only CUDA reaches, not a place that asks."""
    return site.split(": ", 1)[1].startswith("line ")


def named(site: str) -> str:
    """A place without its line: ``file: expression``."""
    file, _, rest = site.partition(":")
    return f"{file}:{rest.partition(':')[2]}"


@cache
def sites() -> tuple[str, ...]:
    """``file:line: expression`` of every place in the package."""
    found: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        finder = _Finder(str(path.relative_to(ROOT.parent)))
        finder.visit(ast.parse(path.read_text()))
        found += finder.found
    return tuple(found)


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        tree = _Finder(str(Path(path).relative_to(ROOT.parent))).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> Any:
        """The marked code, compiled once for all processes; never the compiled file of a run without marks."""
        path = self.get_filename(fullname)
        data = self.get_data(path)
        kept = _compiled() / hashlib.sha256(f"{path}\n".encode() + data).hexdigest()
        with contextlib.suppress(OSError, ValueError, EOFError):
            return marshal.loads(kept.read_bytes())
        code = self.source_to_code(data, path)
        made = kept.with_suffix(f".{os.getpid()}")
        made.write_bytes(marshal.dumps(code))
        made.rename(kept)
        return code


@cache
def _compiled() -> Path:
    """The folder of code that was marked by this file as it is now, under this Python."""
    made_by = hashlib.sha256(Path(__file__).read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"standin-marked-{os.getuid()}-{made_by}"
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder


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
