"""Clusters that come with the package: published bandwidth tables, each with its source and its ``status``.

``benchmarks/make_presets.py`` makes them from public measurements; ``status`` says whether a table was measured,
derived or estimated.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from asa.errors import UsageError
from asa.ir import codec
from asa.ir.cluster import Cluster

_NAMES = 4
"""The most presets that one message names."""


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
        close = [n for n in known if n.startswith(name)] or get_close_matches(name, known, n=8, cutoff=0.4) or known
        if devices is not None:
            have = {n: load(n).num_devices for n in close}  # enough devices first, then about as many
            close.sort(key=lambda n: (have[n] < devices, abs(have[n] - devices), len(n)))
        raise UsageError(f"no cluster {name!r}: no file, no preset; `asa cluster list` has {', '.join(close[:_NAMES])}")
    return _read(name)


def offered(devices: int, like: str | None = None) -> str:
    """Text for an error message: the smallest presets with at least ``devices`` devices, of the same GPU as the preset
    ``like`` if there are any. Empty if no preset is large enough.

    >>> offered(16, like="a100-nvlink-8")
    'presets that have 16: a100-2x8-efa, a100-2x8-ib, a100-2x8-roce'
    """
    fitting = [n for n in names() if load(n).num_devices >= devices]
    if like in names():
        gpu = load(like).device.name
        fitting = [n for n in fitting if load(n).device.name == gpu] or fitting
    fitting.sort(key=lambda n: load(n).num_devices)
    return f"presets that have {devices}: {', '.join(fitting[:_NAMES])}" if fitting else ""


@cache
def _read(name: str) -> Cluster:
    text = _folder().joinpath(f"{name}.json").read_text(encoding="utf-8")
    return codec.loads(Cluster, text, source=f"preset {name}")


def _folder() -> Traversable:
    return files("asa").joinpath("data", "clusters")
