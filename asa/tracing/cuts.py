"""Detection of the places where a traced model can be cut: exactly one tensor is alive there. A run of the model
determines them.

A tensor qualifies under these conditions. Every path from the model's input to its main output passes through it (it
dominates the output in the dataflow graph). Nothing else is alive at the cut. Its first dimension is the batch. Nothing
behind the cut writes into its memory. Values that only leave the model (auxiliary heads) do not count: they stay with
the component that computes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx as nx
import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from asa.tracing.fused import fused_attention
from asa.tracing.preserve import attributes, changed_attributes, on_meta, with_tensors
from asa.tracing.program import Program, origin
from asa.tracing.remembered import Remembered
from asa.tracing.shapes import shape_only


@dataclass
class Observation:
    """Results of one run of a program, by node: shapes and types of tensors, storages, which node writes into which
    storage, and ``plain`` values that are not tensors. ``written`` are names of buffers that the run may have changed.
    """

    batch: int
    shapes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    types: dict[fx.Node, torch.dtype] = field(default_factory=dict)
    bytes: dict[fx.Node, int] = field(default_factory=dict)
    floating: set[fx.Node] = field(default_factory=set)
    storage: dict[fx.Node, int] = field(default_factory=dict)
    writes: list[tuple[fx.Node, int]] = field(default_factory=list)
    plain: dict[fx.Node, Any] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)


_HEAVY = 2**26
"""Bytes of weights above which a run with values takes longer than copying the model without values."""
_PLAIN = (bool, int, float, str, torch.Size, torch.dtype, torch.device)


def _tensors(tree: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    fx.node.map_aggregate(tree, lambda v: tensors.append(v) if isinstance(v, torch.Tensor) else None)
    return tensors


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Observer(fx.Interpreter):
    """Runs a program and records it. Values are kept until the end, because the address of a freed storage is used
    again."""

    def __init__(self, program: Program, objects: dict[str, Any], batch: int) -> None:
        super().__init__(torch.nn.Module(), garbage_collect_values=False, graph=program.graph)
        self._objects = objects
        self.observation = Observation(batch)

    def fetch_attr(self, target: str) -> Any:
        return self._objects[target]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._objects[target](*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        read = _tensors(self.fetch_args_kwargs_from_env(n))
        versions = [t._version for t in read]
        value = super().run_node(n)
        self.observation.writes += [(n, _storage(t)) for t, v in zip(read, versions, strict=True) if t._version != v]
        if isinstance(value, torch.Tensor):
            self.observation.shapes[n], self.observation.types[n] = tuple(value.shape), value.dtype
            self.observation.bytes[n] = value.numel() * value.element_size()
            self.observation.storage[n] = _storage(value)
            if value.is_floating_point():
                self.observation.floating.add(n)
        elif isinstance(value, _PLAIN):
            self.observation.plain[n] = value
        return value


def observe(program: Program, example: torch.Tensor) -> Observation:
    """Run ``program`` without gradients on ``example`` (first dimension: batch). The caller preserves the model.

    No tensor values are recorded, so a program with large weights is run on the meta device if possible.
    """
    objects = program.attributes.values()
    tensors = _state_tensors(objects)
    if not example.is_meta and sum(t.nbytes for t in tensors) > _HEAVY and not _recurrent(objects):
        with contextlib.suppress(Exception):  # forward may raise anything if it reads values
            return _observed(program, on_meta(example), with_tensors(program.attributes, tensors, on_meta))
    return _observed(program, example.clone(), program.attributes)


def _observed(program: Program, example: torch.Tensor, objects: dict[str, Any]) -> Observation:
    observer = _Observer(program, objects, example.shape[0])
    written = _watched(objects)
    with torch.no_grad(), fused_attention(), Remembered() if example.is_meta else contextlib.nullcontext():
        observer.run(example)
    observer.observation.written = written()
    return observer.observation


def _watched(objects: dict[str, Any]) -> Callable[[], set[str]]:
    """Function that returns the names of the buffers in ``objects`` that were changed since. Those of a module that
    assigns any attribute, and running statistics, count as changed."""
    homes = {
        f"{t}.{n}".rstrip("."): m for t, o in objects.items() if isinstance(o, nn.Module) for n, m in o.named_modules()
    }
    attributes_before = {path: attributes(m) for path, m in homes.items()}
    buffers = {t: o for t, o in objects.items() if isinstance(o, torch.Tensor) and not isinstance(o, nn.Parameter)}
    buffers |= {f"{path}.{n}": b for path, m in homes.items() for n, b in m.named_buffers(recurse=False)}
    before = {n: (b._version, b if b.is_meta else b.detach().clone()) for n, b in buffers.items()}

    def written() -> set[str]:
        assigning = tuple(
            f"{path}." for path, m in homes.items()
            if isinstance(m, _NormBase) or changed_attributes(m, attributes_before[path])
        )  # fmt: skip
        return {
            n for n, b in buffers.items()
            if n.startswith(assigning) or b._version != before[n][0] or not (b.is_meta or torch.equal(b, before[n][1]))
        }  # fmt: skip

    return written


def _state_tensors(objects: Iterable[Any]) -> list[torch.Tensor]:
    """Parameters, buffers and other tensors among ``objects``, each once."""
    tensors: dict[int, torch.Tensor] = {}
    for item in objects:
        inside = (*item.parameters(), *item.buffers()) if isinstance(item, nn.Module) else (item,)
        tensors |= {id(t): t for t in inside if isinstance(t, torch.Tensor)}
    return list(tensors.values())


def _recurrent(objects: Iterable[Any]) -> bool:
    """Whether ``objects`` contain layers that torch runs differently on the meta device."""
    return any(isinstance(m, nn.RNNBase) for t in objects if isinstance(t, nn.Module) for m in t.modules())


@dataclass(frozen=True)
class Cut:
    """A cut after position ``after`` of the program's order, where the value of ``node`` crosses."""

    node: fx.Node
    after: int
    bytes_per_sample: int

    @property
    def key(self) -> str:
        """Key of the cut, equal in the graphs of both modes."""
        return origin(self.node).key


def order(program: Program) -> list[fx.Node]:
    """Nodes that compute something, in order of execution."""
    return [n for n in program.graph.nodes if n.op not in ("get_attr", "output")]


def constants(runs: tuple[Observation, Observation]) -> dict[fx.Node, Any]:
    """Values that depend only on shapes and not on the batch. A cut passes them on as constants."""
    small, large = (s.plain for s in runs)
    return {n: v for n, v in small.items() if n in large and large[n] == v and shape_only(n)}


def dataflow(program: Program, fixed: Collection[fx.Node]) -> nx.DiGraph:
    """Dataflow graph of the nodes; parameters, buffers and ``fixed`` nodes have no outgoing edges."""
    graph = nx.DiGraph()
    nodes = order(program)
    graph.add_nodes_from(nodes)
    graph.add_edges_from((n, user) for n in nodes if n not in fixed for user in n.users if user.op != "output")
    return graph


def _dominators(program: Program, fixed: Collection[fx.Node]) -> list[fx.Node]:
    """Nodes on every path from input to main output, in order, without both ends."""
    parents = nx.immediate_dominators(dataflow(program, fixed), program.placeholder)
    chain, node = [], program.outputs[-1]
    while node is not program.placeholder and node in parents:
        chain.append(node)
        node = parents[node]
    return chain[:0:-1]


def find_cuts(
    program: Program, runs: tuple[Observation, Observation], recomputed: Collection[fx.Node] = ()
) -> list[Cut]:  # fmt: skip
    """All places where ``program`` may be cut, in order. ``runs`` are on two batch sizes; ``recomputed`` are nodes that
    both sides of a cut recompute."""
    nodes = order(program)
    index = {n: i for i, n in enumerate(nodes)}
    fixed = {*constants(runs), *recomputed}
    *sides, main = program.outputs
    last_use = [
        max((index[u] for u in n.users if u.op != "output" and n not in fixed), default=i) for i, n in enumerate(nodes)
    ]
    last_use[index[main]] = len(nodes)
    alive = [0] * (len(nodes) + 1)
    for i, last in enumerate(last_use):  # a value made at node i is alive after nodes i to last - 1
        alive[i] += 1
        alive[last] -= 1
    for i in range(1, len(alive)):
        alive[i] += alive[i - 1]
    cuts = []
    for node in _dominators(program, fixed):
        first = index[node]
        behind = [first, *(index[s] for s in sides if first < index[s] < last_use[first])]
        positions = [p for p in behind if alive[p] == 1]
        last = max(positions, default=0)
        if positions and _splits_by_batch(node, runs) and not _written_behind(last, node, sides, index, runs[0]):
            small, large = runs
            cuts.append(Cut(node, last, (large.bytes[node] - small.bytes[node]) // (large.batch - small.batch)))
    return cuts


def _splits_by_batch(node: fx.Node, runs: tuple[Observation, Observation]) -> bool:
    shapes = [s.shapes.get(node, ()) for s in runs]
    return (
        all(node in s.floating and shape[:1] == (s.batch,) for s, shape in zip(runs, shapes, strict=True))
        and shapes[0][1:] == shapes[1][1:]
    )


def _written_behind(
    position: int, node: fx.Node, sides: list[fx.Node], index: dict[fx.Node, int], observation: Observation
) -> bool:
    crossing = {observation.storage[n] for n in (node, *sides) if n in observation.storage and index[n] <= position}
    return any(storage in crossing and index.get(writer, -1) > position for writer, storage in observation.writes)


def in_both(train: list[Cut], evaluate: list[Cut]) -> tuple[list[Cut], list[Cut]]:
    """The cuts that exist in both modes, for each mode in its own order."""
    where = {c.key: i for i, c in enumerate(evaluate)}
    common: tuple[list[Cut], list[Cut]] = ([], [])
    reached = -1
    for cut in train:
        i = where.get(cut.key, -1)
        if i > reached:
            reached = i
            common[0].append(cut)
            common[1].append(evaluate[i])
    return common


def segments(program: Program, cuts: list[Cut]) -> list[list[fx.Node]]:
    """The program's nodes between consecutive cuts; the placeholder is in the first segment."""
    nodes = order(program)
    edges = [0, *(c.after + 1 for c in cuts), len(nodes)]
    return [nodes[a:b] for a, b in pairwise(edges)]
