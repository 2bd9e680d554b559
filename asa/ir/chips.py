"""Names of GPUs: whether two of them mean the same chip."""

from __future__ import annotations

import re

_ADDITIONS = {"ti", "super", "ada", "d", "laptop", "mobile"}
"""Words after a GPU's number that mean a different chip."""


def chips(name: str) -> set[str]:
    """The words of a GPU's name that mean its chip: A100 or V100, or a number such as 3090 with an addition (Ti, Super,
    Ada, D).

    >>> sorted(chips("NVIDIA A100-SXM4-80GB") | chips("GeForce RTX 3070 Ti")), chips("a GPU")
    (['3070ti', 'a100'], set())
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    more = "".join(sorted(words & _ADDITIONS))
    named = {w for w in words if re.fullmatch(r"[a-z]+\d+[a-z]*", w) and not w.startswith(("sxm", "hbm", "pcie"))}
    return named | {w + more for w in words if re.fullmatch(r"\d{3,4}", w)}


def same_gpu(a: str, b: str) -> bool:
    """Whether two GPU names mean the same chip: they are equal, or share one of :func:`chips`.

    >>> same_gpu("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"), same_gpu("Tesla V100", "NVIDIA H100")
    (True, False)
    >>> same_gpu("NVIDIA GeForce RTX 3070 Ti", "GeForce RTX 3070 Ti"), same_gpu("RTX 3070 Ti", "RTX 3070")
    (True, False)
    """
    return a == b or bool(chips(a) & chips(b))


def other_gpu(a: str, b: str) -> bool:
    """Whether two GPU names surely mean different chips. A name without one may mean any.

    >>> other_gpu("Tesla V100", "NVIDIA H100"), other_gpu("Tesla V100", "a GPU")
    (True, False)
    """
    return bool(chips(a) and chips(b)) and not same_gpu(a, b)


def may_be_alike(kind: str, a: str, b: str) -> bool:
    """Whether times of one of two devices of that ``kind`` hold for the other: processors, and GPUs that may be of one
    chip."""
    return kind == "cpu" or not other_gpu(a, b)
