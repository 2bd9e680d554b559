"""PipeDream's problem: its published profiles, and the exact optimum under its own assumptions.

The profiler's ``graph.txt`` has one line a layer, ``node -- description -- forward_compute_time=,
backward_compute_time=, activation_size=, parameter_size=`` (milliseconds and bytes, at the profile's minibatch), and
one indented line an edge, ``node -- node``. The ``Input`` node is the loading of data and is dropped.

The recurrence is PipeDream's (Narayanan et al., SOSP 2019; ``optimizer_graph_hierarchical.py`` of
msr-fiddle/pipedream), with the states of a general graph, its downsets, in place of the prefixes of a chain:

    A[I][m] = min over J below I and m' <= m of
              max(A[J][m - m'], (T(I - J) + 4 (m' - 1) w(I - J) / (B m')) / m', 2 a(J) / (B m'))

T: forward and backward seconds, w: parameter bytes, a(J): bytes of all activations that leave J, B: bytes/s. The middle
term is a stage replicated on m' devices; the last, which can be left out, the transfer into it, forward and back.
Objectives are comparable, cuts are not: several may attain the optimum.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asa.errors import InvalidInputError, UsageError
from asa.reading import read_text
from benchmarks.truth.downsets import downsets, topological

_NUMBER = r"=\s*(\[[^\]]*\]|[^,\s]+)"
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FIGURES = re.compile(r",\s*".join(name + _NUMBER for name in _FIELDS))
_MILLI = 1e-3


@dataclass(frozen=True)
class Layer:
    """One node of a profile. ``seconds``: forward and backward together."""

    name: str
    description: str
    seconds: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class Workload:
    """A profiled model: layers in topological order, edges between their numbers."""

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Stage:
    """Some layers, by number, on ``replicas`` devices."""

    layers: tuple[int, ...]
    replicas: int


@dataclass(frozen=True)
class Optimum:
    """Seconds per minibatch of the slowest stage or transfer, stages that attain it, and the states looked at."""

    seconds: float
    stages: tuple[Stage, ...]
    downsets: int


def load(path: Path) -> Workload:
    """The profile in the file at ``path``.

    Raises:
        InvalidInputError: it cannot be read or is no such profile; names the line or the node.
    """
    return parse(read_text(path), source=str(path))


def parse(text: str, *, source: str) -> Workload:
    """The profile in ``text``; ``source`` names it in messages.

    Raises:
        InvalidInputError: as :func:`load`.
    """
    found: dict[str, Layer] = {}
    arrows: list[tuple[str, str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split(" -- ")]
        if line[0].isspace():
            if len(parts) != 2 or not all(parts):
                raise InvalidInputError(f"{source}: an edge is `<tab>node -- node`", where=f"line {number}")
            arrows.append((parts[0], parts[1], number))
            continue
        layer = _layer(parts, source, number)
        if layer.name in found:
            raise InvalidInputError(f"{source}: {layer.name} appears twice", where=f"line {number}")
        found[layer.name] = layer
    if not found:
        raise InvalidInputError(f"{source} has no nodes", where="line 1")
    for u, v, number in arrows:
        for name in (u, v):
            if name not in found:
                raise InvalidInputError(f"{source}: an edge names {name}, which is no node", where=f"line {number}")
    return _connected(found, arrows, source)


def _layer(parts: list[str], source: str, number: int) -> Layer:
    where = f"line {number}"
    figures = _FIGURES.fullmatch(parts[2]) if len(parts) == 3 else None
    if figures is None:
        raise InvalidInputError(
            f"{source}: a node is `name -- description -- {', '.join(f'{f}=' for f in _FIELDS)}`", where=where
        )
    values = []
    for name, written in zip(_FIELDS, figures.groups(), strict=True):
        try:
            # Layers of several outputs, as an LSTM's, list the size of each.
            value = math.fsum(float(one) for one in written.strip("[]").split(";"))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise InvalidInputError(f"{source}: {name} is {written}, not a number from 0", where=where)
        values.append(value)
    forward, backward, activation, parameters = values
    return Layer(parts[0], parts[1], (forward + backward) * _MILLI, activation, parameters)


def _connected(found: dict[str, Layer], arrows: list[tuple[str, str, int]], source: str) -> Workload:
    """Without its Input node, in topological order, with one beginning: a lost edge shows as a second one."""
    inputs = {name for name, layer in found.items() if layer.description.startswith("Input")}
    fed = {v for _, v, _ in arrows}
    starts = [name for name in found if name not in fed]
    if len(starts) > 1 and len(found) > 1:
        raise InvalidInputError(
            f"{source}: {len(starts)} nodes have no incoming edge; the file may be cut short", where=f"node {starts[1]}"
        )
    kept = {name: i for i, name in enumerate(n for n in found if n not in inputs)}
    if not kept:
        raise InvalidInputError(f"{source} has nothing but input nodes", where="line 1")
    edges = [(kept[u], kept[v]) for u, v, _ in arrows if u in kept and v in kept]
    names = list(kept)
    everything = list(found)
    place = {name: i for i, name in enumerate(everything)}
    topological(everything, [(place[u], place[v]) for u, v, _ in arrows], source=source)
    order = topological(names, edges, source=source)
    rank = {v: i for i, v in enumerate(order)}
    moved = tuple(sorted({(rank[u], rank[v]) for u, v in edges}))
    return Workload(tuple(found[names[v]] for v in order), moved)


def optimum(workload: Workload, devices: int, bandwidth: float, *, activations: bool) -> Optimum:
    """The fastest pipeline on exactly ``devices`` devices, proved by the recurrence over all downsets.

    ``bandwidth`` in bytes/s; ``activations``: whether transfers between stages count.

    Raises:
        UsageError: no devices or no bandwidth.
        InvalidInputError: the graph has too many downsets.
    """
    if devices < 1 or not 0 < bandwidth < math.inf:
        raise UsageError(f"{devices} devices at {bandwidth} bytes/s: at least one, and a rate above 0")
    count = len(workload.layers)
    sets = downsets(count, workload.edges, source="the profile")
    seconds = sets.sums([layer.seconds for layer in workload.layers])
    parameters = sets.sums([layer.parameter_bytes for layer in workload.layers])
    leaving = np.zeros(len(sets))
    for u in range(count):
        readers = [v for a, v in workload.edges if a == u]
        leaves = sets.inside[:, u] & ~sets.inside[:, readers].all(axis=1) if readers else np.zeros(len(sets), bool)
        leaving += leaves * workload.layers[u].activation_bytes
    best = np.full((len(sets), devices + 1), np.inf)
    best[0, 0] = 0.0
    come_from: dict[tuple[int, int], tuple[int, int]] = {}
    for i in range(1, len(sets)):
        below = sets.below(i)
        work, weights = seconds[i] - seconds[below], parameters[i] - parameters[below]
        for replicas in range(1, devices + 1):
            load = (work + 4 * (replicas - 1) * weights / (bandwidth * replicas)) / replicas
            if activations:
                load = np.maximum(load, 2 * leaving[below] / (bandwidth * replicas))
            for m in range(replicas, devices + 1):
                values = np.maximum(best[below, m - replicas], load)
                at = int(values.argmin())
                if values[at] < best[i, m]:
                    best[i, m] = values[at]
                    come_from[i, m] = (int(below[at]), replicas)
    stages: list[Stage] = []
    i, m = len(sets) - 1, devices
    while i:
        j, replicas = come_from[i, m]
        inside = np.flatnonzero(sets.inside[i] & ~sets.inside[j])
        stages.insert(0, Stage(tuple(int(v) for v in inside), replicas))
        i, m = j, m - replicas
    return Optimum(float(best[-1, devices]), tuple(stages), len(sets))
