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

_NAMED = 4
"""Presets named in one message."""


def names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(p.name[: -len(".json")] for p in _folder().iterdir() if p.name.endswith(".json"))


def load(name: str, devices: int | None = None) -> Cluster:
    """The preset called ``name``.

    Raises:
        UsageError: there is none; the message names similar ones, first those that have ``devices`` devices.
    """
    known = names()
    if name not in known:
        near = [n for n in known if n.startswith(name)] or get_close_matches(name, known, n=8, cutoff=0.4) or known
        if devices is not None:
            near.sort(key=lambda n: (_distance(load(n).num_devices, devices), len(n)))
        raise UsageError(f"no cluster {name!r}: no file, no preset; `asa cluster list` has {', '.join(near[:_NAMED])}")
    return _read(name)


def offered(devices: int, like: str | None = None) -> str:
    """The presets nearest to ``devices`` devices that have so many, as a remedy in words; of the GPU of the preset
    ``like`` where there are any. Empty where none has so many.

    >>> offered(16, like="a100-nvlink-8")
    'presets that have 16: a100-2x8-efa, a100-2x8-ib, a100-2x8-roce'
    """
    enough = [n for n in names() if load(n).num_devices >= devices]
    if like in names():
        gpu = load(like).device.name
        enough = [n for n in enough if load(n).device.name == gpu] or enough
    enough.sort(key=lambda n: load(n).num_devices)
    return f"presets that have {devices}: {', '.join(enough[:_NAMED])}" if enough else ""


def _distance(have: int, asked: int) -> tuple[bool, int]:
    """A sort key: presets with as many devices as asked for first, then the others, the most similar name first."""
    return have < asked, abs(have - asked)


@cache
def _read(name: str) -> Cluster:
    text = _folder().joinpath(f"{name}.json").read_text(encoding="utf-8")
    return codec.loads(Cluster, text, source=f"preset {name}")


def _folder() -> Traversable:
    return files("asa").joinpath("data", "clusters")
