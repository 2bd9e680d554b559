"""What the text of a program says of a place where it reads a value: whether it decides by it if a loop goes on or a
backward is made, or only makes a shape of it."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from types import CodeType
from typing import Any

_SHAPING = frozenset((
    "view", "reshape", "expand", "repeat", "repeat_interleave", "unflatten", "split", "chunk", "narrow", "zeros",
    "ones", "full", "empty", "rand", "randn", "randint", "randperm", "arange", "eye", "linspace", "new_zeros",
    "new_ones", "new_full", "new_empty", "broadcast_to", "unfold", "mean_over", "reduce",
))  # fmt: skip
"""Names of functions and methods whose arguments are shapes and numbers of rows."""


def _now(file: str) -> object:
    """A value that changes when ``file`` changes, as a program may that a notebook runs again."""
    linecache.checkcache(file)
    linecache.getlines(file)
    return linecache.cache.get(file, ())[:2]


@cache
def _tree(file: str, _version: object) -> ast.AST:
    """The program in ``file``, in which each node knows the one above it; empty if it cannot be read."""
    tree = ast.Module([], [])
    with suppress(SyntaxError, ValueError):
        tree = ast.parse("".join(linecache.getlines(file)))
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.above = node  # type: ignore[attr-defined]
    return tree


@cache
def _decisions(file: str, version: object) -> frozenset[int]:
    """The lines that say whether a loop goes on, or a backward is made: tests of ``while``, and of an ``if`` behind
    which a loop is left, or that holds a backward, or passes over one."""
    tests: list[ast.expr] = []
    for node in ast.walk(_tree(file, version)):
        if isinstance(node, ast.While):
            tests.append(node.test)
        if isinstance(node, ast.If):
            loop, function = _around(node, ast.While | ast.For), _around(node, ast.FunctionDef)
            ends = loop is not None and any(isinstance(s, ast.Break | ast.Return) for s in node.body)
            over = {ast.Continue: loop, ast.Return: function}
            passes = any(_learns(over.get(type(s))) for s in node.body)
            tests += [node.test] if ends or passes or _learns(node) else []
    return frozenset(line for t in tests for line in range(t.lineno, (t.end_lineno or t.lineno) + 1))


def _around(node: Any, kinds: Any) -> ast.AST | None:
    """The nearest of these ``kinds`` that ``node`` is in."""
    while node is not None and not isinstance(node, kinds):
        node = getattr(node, "above", None)
    return node  # type: ignore[no-any-return]


def _learns(node: ast.AST | None) -> bool:
    """Whether there is a backward in ``node``."""
    calls = (n.func for n in (ast.walk(node) if node is not None else ()) if isinstance(n, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr == "backward" for called in calls)


def decides(file: str, line: int) -> bool:
    """Whether ``line`` of a program decides by a test whether a loop goes on, or whether a backward is made."""
    return line in _decisions(file, _now(file))


@cache
def _at(code: CodeType, instruction: int) -> ast.AST | None:
    """The expression that an instruction of a program computes; None if it is not found."""
    place: Any = next(islice(code.co_positions(), instruction // 2, None), None)
    for node in ast.walk(_tree(code.co_filename, _now(code.co_filename))):
        if isinstance(node, ast.expr) and place == (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset):
            return node
    return None


def _above(node: ast.AST | None) -> Iterator[ast.AST]:
    """``node`` and the expressions that it is part of, from within."""
    while isinstance(node, ast.expr | ast.keyword):
        yield node
        node = getattr(node, "above", None)


def becomes_a_shape(frame: Any) -> bool:
    """Whether what a program reads in ``frame`` is an argument of a function that takes shapes, or a bound of a slice,
    and is not compared. A local variable that keeps it may only be an argument of such functions."""
    node = _at(frame.f_code, frame.f_lasti)
    return _is_shape(node) or _kept_for_shapes(node)


def _is_shape(node: ast.AST | None, slices: bool = True) -> bool:
    for each in _above(node):
        if isinstance(each, ast.Compare | ast.BoolOp | ast.IfExp | ast.NamedExpr | ast.Lambda):
            return False
        if isinstance(each, ast.Slice):
            return slices
        if isinstance(each, ast.Call) and each is not node:
            name = each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
            if name in _SHAPING or name in ("max", "min"):
                return name in _SHAPING
    return False


def _kept_for_shapes(node: ast.AST | None) -> bool:
    """Whether ``node`` is kept by local variables of a function that are assigned once, and only become shapes. What is
    cut by them counts as a decision: see :func:`cut_by`."""
    statement: Any = next((getattr(each, "above", None) for each in _above(node) if not _reads_a_part(each)), None)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target, function = statement.targets[0], getattr(statement, "above", None)
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    while function is not None and not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = getattr(function, "above", None)
    if isinstance(function, ast.ClassDef | None) or not all(isinstance(n, ast.Name) for n in names):
        return False
    kept = {n.id for n in names if isinstance(n, ast.Name)}
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in kept]
    outside = any(isinstance(n, ast.Global | ast.Nonlocal) and kept & {*n.names} for n in ast.walk(function))
    written = sum(not isinstance(n.ctx, ast.Load) for n in uses)
    return written == len(names) and not outside and all(
        _is_shape(n, slices=False) for n in uses if isinstance(n.ctx, ast.Load)
    )  # fmt: skip


def _reads_a_part(node: ast.AST) -> bool:
    """Whether ``node`` is the object in ``node[0]``, of which the subscript is read."""
    above = getattr(node, "above", None)
    return isinstance(above, ast.Subscript) and above.value is node and isinstance(above.slice, ast.Constant)


def index_read(frame: Any) -> Any:
    """The constant by which a program indexes what it reads in ``frame`` (``x.shape[1]``); None if there is none."""
    above = getattr(_at(frame.f_code, frame.f_lasti), "above", None)
    with suppress(ValueError, AttributeError):
        return ast.literal_eval(above.slice)  # type: ignore[union-attr]
    return None


def cut_by(frame: Any) -> Any:
    """What a program cuts by the number that it reads in ``frame`` (``kept[:len(x)]``, ``self.kept[:len(x)]``); None if
    it cuts nothing, or what it cuts has no name."""
    for each in _above(_at(frame.f_code, frame.f_lasti)):
        if isinstance(each, ast.Slice):
            subscript = each.above if not isinstance(each.above, ast.Tuple) else each.above.above  # type: ignore[attr-defined]
            return _named(getattr(subscript, "value", None), frame)
    return None


def _named(node: ast.AST | None, frame: Any) -> Any:
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    return getattr(_named(node.value, frame), node.attr, None) if isinstance(node, ast.Attribute) else None
