"""Clusters that come with the package: published bandwidth tables, each naming where it is from and how sure it is.

Made by ``benchmarks/make_presets.py`` from public measurements; ``status`` tells measured from derived and guessed.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from asa.errors import UsageError
from asa.ir import codec
from asa.ir.cluster import Cluster


def names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(p.name[: -len(".json")] for p in _folder().iterdir() if p.name.endswith(".json"))


@cache
def load(name: str) -> Cluster:
    """The preset called ``name``.

    Raises:
        UsageError: there is none; names those that are near.
    """
    known = names()
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.4) or known
        raise UsageError(f"no cluster {name!r}: neither a file nor a preset; presets: {', '.join(near)}")
    text = _folder().joinpath(f"{name}.json").read_text(encoding="utf-8")
    return codec.loads(Cluster, text, source=f"preset {name}")


def _folder() -> Traversable:
    return files("asa").joinpath("data", "clusters")
