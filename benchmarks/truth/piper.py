"""Piper's problem: its published workloads, and the value of a given pipeline in them.

A workload is a graph of layers; each layer has variants per tensor-parallel degree (with and without recomputation).
A pipeline cuts the graph into stages, each with a data degree d (dividing the microbatches of a batch), a tensor degree
t and one variant per layer. Time per sample, ``TPS`` in msr-fiddle/piper (``algo.cpp``), is the maximum over stages of

    sum_v p_v / d  +  ( 2 sum_edges (c + sync) / d  +  4 (d - 1) sum_v w_v / (d N) ) / B

over the edges that enter or leave the stage, N microbatches a batch, B bytes/s; memory of a stage, with s the sum of
the data degrees of it and of all stages behind it, is ``sum_v A_v ceil(s / d) + B_v``. The unit of p is the file's and
is added to seconds of transfer as the original does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asa.errors import InvalidInputError
from asa.reading import read_text
from benchmarks.truth.downsets import topological


@dataclass(frozen=True)
class Variant:
    """A way to run a layer on t devices: time per sample, bytes of parameters, memory A per sample in flight and B."""

    name: str
    time: float
    parameter_bytes: float
    memory_each: float
    memory_fixed: float
    sync_in: Mapping[int, float]
    sync_out: Mapping[int, float]


@dataclass(frozen=True)
class Node:
    """A layer and its variants by tensor degree."""

    name: str
    variants: Mapping[int, tuple[Variant, ...]]


@dataclass(frozen=True)
class Edge:
    """``bytes`` per sample from one node to another."""

    source: int
    target: int
    bytes: float


@dataclass(frozen=True)
class Workload:
    """A problem: nodes in topological order, ``microbatches`` per batch, memory per device, bytes/s from each."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    devices: int
    memory_bytes: float
    bandwidth: float
    microbatches: int

    def on(self, devices: int, memory_bytes: float, bandwidth: float | None = None) -> Workload:
        """The same layers on other devices."""
        return replace(self, devices=devices, memory_bytes=memory_bytes, bandwidth=bandwidth or self.bandwidth)


@dataclass(frozen=True)
class Stage:
    """Layers by number, data and tensor degree, and the variant of each layer."""

    nodes: tuple[int, ...]
    data: int
    tensor: int
    variants: tuple[int, ...]


def contributions(
    workload: Workload, inside: frozenset[int], data: int, tensor: int, in_flight: int
) -> list[list[tuple[float, float]]]:
    """Per node of a stage, in order, (time per sample, memory) of each variant; ``in_flight`` is ceil(s / d)."""
    crossing: dict[int, list[tuple[int, float, bool]]] = {v: [] for v in inside}
    for e in workload.edges:
        if (e.source in inside) != (e.target in inside):
            at, other = (e.target, e.source) if e.target in inside else (e.source, e.target)
            crossing[at].append((other, e.bytes, at == e.target))
    found = []
    for v in sorted(inside):
        rows = []
        for variant in workload.nodes[v].variants[tensor]:
            sent = math.fsum(c + (variant.sync_in if arrives else variant.sync_out)[u] for u, c, arrives in crossing[v])
            synced = 4 * (data - 1) * variant.parameter_bytes / (data * workload.microbatches)
            time = variant.time / data + (2 * sent / data + synced) / workload.bandwidth
            rows.append((time, variant.memory_each * in_flight + variant.memory_fixed))
        found.append(rows)
    return found


def value(workload: Workload, stages: tuple[Stage, ...]) -> float:
    """Time per sample of a pipeline, infinite where it does not fit; written apart from the search, to check it.

    Raises:
        InvalidInputError: the stages are no pipeline of this workload.
    """
    place = {v: i for i, stage in enumerate(stages) for v in stage.nodes}
    if sorted(v for stage in stages for v in stage.nodes) != list(range(len(workload.nodes))):
        raise InvalidInputError("the stages do not hold every node once")
    if any(place[e.source] > place[e.target] for e in workload.edges):
        raise InvalidInputError("an edge points from a later stage to an earlier one")
    behind = sum(stage.data for stage in stages)
    if behind > workload.microbatches or sum(s.data * s.tensor for s in stages) > workload.devices:
        raise InvalidInputError("more devices or replicas than there are")
    slowest = 0.0
    for stage in stages:
        if workload.microbatches % stage.data:
            raise InvalidInputError(f"{stage.data} replicas do not divide {workload.microbatches} microbatches")
        rows = contributions(workload, frozenset(stage.nodes), stage.data, stage.tensor, -(-behind // stage.data))
        picked = [row[c] for row, c in zip(rows, stage.variants, strict=True)]
        if math.fsum(m for _, m in picked) > workload.memory_bytes:
            return math.inf
        slowest = max(slowest, math.fsum(t for t, _ in picked))
        behind -= stage.data
    return slowest


def load(path: Path) -> Workload:
    """The workload in the file at ``path``.

    Raises:
        InvalidInputError: it cannot be read or is no such workload; names the place in it.
    """
    return parse(read_text(path), source=str(path))


def parse(text: str, *, source: str) -> Workload:
    """The workload in ``text``; ``source`` names it in messages.

    Raises:
        InvalidInputError: as :func:`load`.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"{source} is not valid JSON: {error.msg}", where=f"line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise InvalidInputError(f"{source} is nested too deeply", where="$") from None
    return _Reader(source).workload(data)


@dataclass(frozen=True)
class _Reader:
    """Takes the document apart, every number checked; a place is a JSON path."""

    source: str

    def wrong(self, message: str, where: str) -> InvalidInputError:
        return InvalidInputError(f"{self.source}: {message}", where=where)

    def entry(self, data: Any, key: str, where: str, kind: type) -> Any:
        if not isinstance(data, dict) or key not in data:
            raise self.wrong(f"{key} is missing", where)
        if not isinstance(data[key], kind):
            raise self.wrong(f"not {'an array' if kind is list else 'an object'}", f"{where}.{key}")
        return data[key]

    def number(self, data: Any, key: str, where: str, least: float = 0.0) -> float:
        if not isinstance(data, dict) or key not in data:
            raise self.wrong(f"{key} is missing", where)
        found = data[key]
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found) or found < least:
            raise self.wrong(f"{found!r} is not a number from {least:g}", f"{where}.{key}")
        return float(found)

    def whole(self, data: Any, key: str, where: str, least: int) -> int:
        found = self.number(data, key, where, least)
        if found != int(found):
            raise self.wrong(f"{found!r} is not a whole number", f"{where}.{key}")
        return int(found)

    def workload(self, data: Any) -> Workload:
        devices, microbatches = self.whole(data, "maxDevices", "$", 1), self.whole(data, "mbsInBatch", "$", 1)
        memory, bandwidth = (self.number(data, key, "$", 1e-9) for key in ("maxMemoryPerDevice", "bandwidth"))
        nodes = self.entry(data, "nodes", "$", list)
        if not nodes:
            raise self.wrong("there are no nodes", "$.nodes")
        ids: dict[int, int] = {}
        for i, node in enumerate(nodes):
            if ids.setdefault(self.whole(node, "id", f"$.nodes[{i}]", 0), i) != i:
                raise self.wrong(f"node {node['id']} appears twice", f"$.nodes[{i}].id")
        arrows = []
        for i, edge in enumerate(self.entry(data, "edges", "$", list)):
            where = f"$.edges[{i}]"
            ends = []
            for key in ("sourceId", "destId"):
                end = self.whole(edge, key, where, 0)
                if end not in ids:
                    raise self.wrong(f"{end} is no node", f"{where}.{key}")
                ends.append(ids[end])
            arrows.append((ends[0], ends[1], self.number(edge, "communicationCost", where)))
        pairs = [(u, v) for u, v, _ in arrows]
        if len(set(pairs)) < len(pairs):
            twice = next(i for i, pair in enumerate(pairs) if pair in pairs[:i])
            raise self.wrong("this edge appears twice", f"$.edges[{twice}]")
        order = topological([str(node["id"]) for node in nodes], pairs, source=self.source)
        rank = {i: at for at, i in enumerate(order)}
        rename = {identity: rank[i] for identity, i in ids.items()}
        made = [self.node(nodes[i], f"$.nodes[{i}]", rename) for i in order]
        edges = tuple(Edge(rank[u], rank[v], c) for u, v, c in arrows)
        self.neighbours(made, edges, order)
        return Workload(tuple(made), edges, devices, memory, bandwidth, microbatches)

    def node(self, data: Any, where: str, rename: Mapping[int, int]) -> Node:
        offered = {}
        for degree, rows in self.entry(data, "TMPCs", where, dict).items():
            here = f"{where}.TMPCs.{degree}"
            if not degree.isdecimal() or int(degree) < 1 or not isinstance(rows, list):
                raise self.wrong("not an array of variants under a tensor degree", here)
            offered[int(degree)] = tuple(self.variant(row, f"{here}[{i}]", rename) for i, row in enumerate(rows))
        offered = {degree: rows for degree, rows in offered.items() if rows}
        if not offered:
            raise self.wrong("the node has no variant", f"{where}.TMPCs")
        return Node(str(data.get("name", data["id"])), offered)

    def variant(self, row: Any, where: str, rename: Mapping[int, int]) -> Variant:
        time, parameters, each, fixed = (
            self.number(row, key, where) for key in ("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB")
        )
        syncs: list[dict[int, float]] = []
        for key in ("syncTimeFw", "syncTimeBw"):
            table = self.entry(row, key, where, dict)
            for other in table:
                if not other.isdecimal() or int(other) not in rename:
                    raise self.wrong(f"{other!r} is no node", f"{where}.{key}")
            syncs.append({rename[int(o)]: self.number(table, o, f"{where}.{key}") for o in table})
        return Variant(str(row.get("id", "")), time, parameters, each, fixed, syncs[0], syncs[1])

    def neighbours(self, nodes: list[Node], edges: tuple[Edge, ...], order: list[int]) -> None:
        """Every variant states a synchronisation for every edge of its node."""
        for e in edges:
            for at, other, side in ((e.target, e.source, "Fw"), (e.source, e.target, "Bw")):
                for degree, rows in nodes[at].variants.items():
                    for i, v in enumerate(rows):
                        if other not in (v.sync_in if side == "Fw" else v.sync_out):
                            where = f"$.nodes[{order[at]}].TMPCs.{degree}[{i}].syncTime{side}"
                            raise self.wrong("an edge of the graph is missing", where)
