"""Derives how a component's tensors split over a tensor axis, in one pass over its traced graph.

Every value is *whole* (the same on all ranks of the axis), *sharded* along one dimension, or *partial* (ranks hold
addends). A layer with weights that reads a whole value is split by columns (outputs), and its output is sharded. A
layer that reads a sharded value is split by rows (inputs); its output is partial, and is reduced at once. Attention
splits by heads: columns and rows in one module. Elementwise operations, pooling, BatchNorm and depthwise convolutions
keep a value sharded. All other operations gather it first. This is the alternation of Shoeybi et al. 2019
(Megatron-LM), derived from the graph and not from the model's name.

Two reductions can move into the boundary around the component, where they may fuse with a change of batch shards: that
of the input's gradient (``entry_partial``) and that of the output (``exit_partial``).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from asa.sharding.stock import stock

Action = Literal["column", "row", "heads", "local", "depthwise"]


@dataclass(frozen=True)
class Cut:
    """A value that is sharded along ``dim`` in ``units`` indivisible units of ``unit`` elements each. With ``tokens``,
    units are positions in a sequence, and not parts of what layers compute (:mod:`asa.sharding.layers.tokens`)."""

    dim: int
    units: int
    unit: int = 1
    tokens: bool = False


@dataclass
class SplitPlan:
    """Result of the walk, by node of the graph."""

    actions: dict[str, Action] = field(default_factory=dict)
    """How each module is split, by path."""
    cuts: dict[str, Cut] = field(default_factory=dict)
    """Cut of what each module shards, by path: its output; for ``row`` its input."""
    states: dict[fx.Node, Cut | None] = field(default_factory=dict)
    gathers: dict[tuple[fx.Node, fx.Node], Cut] = field(default_factory=dict)
    """Pairs (value, consumer) between which a gather is inserted."""
    readers: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Column- or head-split nodes that read each whole value. The gradients that they return for it are partial."""
    reduced: list[fx.Node] = field(default_factory=list)
    """Nodes whose output is reduced in forward."""
    hoisted: set[fx.Node] = field(default_factory=set)
    """Values whose gradient is reduced by the boundary before the component."""
    exit_partial: bool = False
    tokens: int = 0
    """Number of tokens in the input if it is split by tokens; 0 otherwise."""
    exit_tokens: int = 0
    """Number of tokens in the output if it is split by tokens; 0 otherwise."""
    gathered: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Column- or head-split nodes that read all tokens of each value that is split by tokens."""
    scattered: list[fx.Node] = field(default_factory=list)
    """Nodes whose partial output is reduce-scattered by tokens."""
    tokenwise: list[fx.Node] = field(default_factory=list)
    """Layers with parameters that read only a rank's own tokens."""

    @property
    def entry_partial(self) -> bool:
        """Whether the input's gradient is a partial sum."""
        return bool(self.hoisted)

    @property
    def max_degree(self) -> int:
        """Largest number of ranks that all cuts allow."""
        return min((c.units for c in self.cuts.values()), default=1)


_ELEMENTWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh,
    nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Identity, nn.Dropout, nn.Dropout2d,
)  # fmt: skip
_SPATIAL_MODULES = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
ELEMENTWISE_FUNCTIONS = {
    F.relu, torch.relu, F.gelu, F.silu, F.hardswish, F.hardsigmoid, torch.sigmoid, F.sigmoid, torch.tanh, F.relu6,
    F.dropout, F.dropout2d, F.leaky_relu, "relu", "relu_", "sigmoid", "tanh", "contiguous",
}  # fmt: skip
BINARY_FUNCTIONS = {
    operator.add, operator.mul, operator.sub, operator.iadd, operator.imul, torch.add, torch.mul, torch.sub,
}  # fmt: skip
_SPATIAL = {F.adaptive_avg_pool2d, F.max_pool2d, F.avg_pool2d}


def is_elementwise(module: nn.Module) -> bool:
    """Whether ``module`` treats all elements alike, or all samples, as stochastic depth does."""
    return isinstance(module, _ELEMENTWISE_MODULES) or type(module).__name__ in {"StochasticDepth", "SampleDropout"}


def _keeps_channels(node: fx.Node, cut: Cut) -> bool:
    """Whether pooling keeps its channels sharded, which it does unless it also returns indices."""
    return cut.dim == 1 and hasattr(node.meta.get("tensor_meta"), "shape")


def _depthwise(m: nn.Conv2d) -> bool:
    return m.groups == m.in_channels and m.groups > 1


def splits_by_heads(m: nn.Module, node: fx.Node) -> bool:
    """Whether ``node`` calls ``m`` as plain self-attention without masks, which independent heads compute exactly."""
    if not isinstance(m, nn.MultiheadAttention):
        return bool(getattr(m, "head_parallel", False))
    plain = m.in_proj_weight is not None and m.bias_k is None and not m.add_zero_attn
    query = node.args[0] if node.args else None
    same = len(node.args) >= 3 and node.args[1] is query and node.args[2] is query
    # A mask or averaged weights would need more than the heads' own outputs.
    others = {k for k, v in node.kwargs.items() if v is not None and v is not False} - {"average_attn_weights"}
    return plain and same and len(node.args) == 3 and not others and node.kwargs.get("need_weights") is False


def independent_groups(m: nn.Module) -> int:
    """Number of consecutive parts of its input's last dimension that ``m``, a module without parameters, treats
    independently; 0 if it does not."""
    return int(getattr(m, "independent_groups", 0))


def _flattening_from(dim: int) -> list[tuple[tuple[int, ...], dict[str, int]]]:
    """Arguments, behind the tensor, with which ``flatten`` joins dimension ``dim`` and all behind it."""
    return [((dim,), {}), ((dim, -1), {}), ((dim,), {"end_dim": -1}), ((), {"start_dim": dim})]


def _last_dim(node: fx.Node) -> int:
    return len(node.meta["tensor_meta"].shape) - 1


class Walk:
    """One pass over the graph in topological order. Nodes have ``tensor_meta`` from shape propagation."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.plan = SplitPlan()
        self.seen_modules: set[str] = set()

    def run(self) -> SplitPlan:
        calls = [n.target for n in self.module.graph.nodes if n.op == "call_module"]
        self.repeated = {t for t in calls if calls.count(t) > 1} | self._tied()
        for node in self.module.graph.nodes:
            self.plan.states[node] = self._visit(node)
        self._hoist()
        return self.plan

    def _tied(self) -> set[str]:
        """Targets that share a parameter with another one, and so cannot be split."""
        users: dict[int, set[str]] = {}
        for node in self.module.graph.nodes:
            if node.op in {"call_module", "get_attr"}:
                target = str(node.target)
                target_module = attrgetter(target)(self.module)
                for p in target_module.parameters() if isinstance(target_module, nn.Module) else [target_module]:
                    users.setdefault(id(p), set()).add(target)
        return {t for targets in users.values() if len(targets) > 1 for t in targets}

    def _cut_of(self, value: object) -> Cut | None:
        return self.plan.states.get(value) if isinstance(value, fx.Node) else None

    def _gather_inputs(self, node: fx.Node) -> None:
        """Gather all sharded inputs of ``node`` first."""
        for value in node.all_input_nodes:
            cut = self.plan.states.get(value)
            if cut is not None:
                self.plan.gathers[value, node] = cut

    def _visit(self, node: fx.Node) -> Cut | None:
        if node.op in {"placeholder", "get_attr"}:
            return None
        if node.op == "call_module":
            return self._visit_module(node)
        if node.op in {"call_function", "call_method"}:
            cut = self._visit_function(node)
            if cut is not None:
                return cut
        self._gather_inputs(node)
        return None

    def _column(self, node: fx.Node, path: str, cut: Cut, action: Action) -> Cut:
        self.plan.actions[path] = action
        self.plan.cuts[path] = cut
        self.plan.readers.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
        return cut

    def _row(self, node: fx.Node, path: str, cut: Cut) -> None:
        self.plan.actions[path] = "row"
        self.plan.cuts[path] = cut
        self.plan.reduced.append(node)

    def _visit_module(self, node: fx.Node) -> Cut | None:
        path = str(node.target)
        m = self.module.get_submodule(path)
        source = node.args[0] if node.args else None
        cut = self._cut_of(source)
        if not stock(m):
            self._gather_inputs(node)
            return None
        if path not in self.repeated and "tensor_meta" in node.meta:
            if isinstance(m, nn.Linear):
                if cut is None:
                    units = self._groups(node, m.out_features)
                    return self._column(node, path, Cut(_last_dim(node), units, m.out_features // units), "column")
                if cut.dim == _last_dim(node):
                    self._row(node, path, cut)
                    return None
            elif isinstance(m, nn.Conv2d) and m.padding_mode == "zeros":
                if m.groups == 1 and cut is None:
                    return self._column(node, path, Cut(1, m.out_channels), "column")
                if m.groups == 1 and cut is not None and cut.dim == 1:
                    self._row(node, path, cut)
                    return None
                if _depthwise(m) and cut is not None and cut.dim == 1:
                    self.plan.actions[path], self.plan.cuts[path] = "depthwise", cut
                    return Cut(1, cut.units, cut.unit * (m.out_channels // m.in_channels))
            elif isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) and cut is not None and cut.dim == 1:
                self.plan.actions[path], self.plan.cuts[path] = "local", cut
                return cut
        if path not in self.repeated and cut is None and splits_by_heads(m, node):
            self._column(node, path, Cut(2, int(m.num_heads), int(m.head_dim)), "heads")  # type: ignore[arg-type]
            self.plan.reduced.append(node)
            return None
        if independent_groups(m):
            return self._grouped(node, independent_groups(m))
        if cut is not None and (is_elementwise(m) or (isinstance(m, _SPATIAL_MODULES) and _keeps_channels(node, cut))):
            return cut
        if cut is not None and isinstance(m, nn.Flatten) and m.end_dim == -1 and m.start_dim == cut.dim:
            return self._flattened(source, cut)
        self._gather_inputs(node)
        return None

    def _groups(self, node: fx.Node, width: int) -> int:
        """Number of parts into which ``width`` outputs can be split: the number of groups of heads, if attention reads
        them."""
        readers = [self.module.get_submodule(str(u.target)) for u in node.users if u.op == "call_module"]
        counts = [n for n in map(independent_groups, readers) if n and width % n == 0]
        return counts[0] if counts else width

    def _grouped(self, node: fx.Node, groups: int) -> Cut | None:
        """The cut of attention over groups of heads, if all its inputs are cut by groups. Otherwise None, and the
        inputs are gathered."""
        last = _last_dim(node)
        cuts = [self._cut_of(a) for a in node.args]
        if all(c is not None and (c.dim, c.units) == (last, groups) for c in cuts) and not node.kwargs:
            return Cut(last, groups, int(node.meta["tensor_meta"].shape[-1]) // groups)
        self._gather_inputs(node)
        return None

    def _flattened(self, source: object, cut: Cut) -> Cut:
        assert isinstance(source, fx.Node)
        rest = source.meta["tensor_meta"].shape[cut.dim + 1 :]
        return Cut(cut.dim, cut.units, cut.unit * int(torch.Size(rest).numel()))

    def _visit_function(self, node: fx.Node) -> Cut | None:
        target = node.target
        source = node.args[0] if node.args else None
        cut = self._cut_of(source)
        if target in BINARY_FUNCTIONS:
            return self._binary(node)
        if cut is None:
            return None
        if target in ELEMENTWISE_FUNCTIONS or (target in _SPATIAL and _keeps_channels(node, cut)):
            return cut
        if target in {torch.flatten, "flatten"} and (node.args[1:], node.kwargs) in _flattening_from(cut.dim):
            return self._flattened(source, cut)
        if target in {torch.mean, "mean"}:
            return self._mean(node, cut)
        return None

    def _mean(self, node: fx.Node, cut: Cut) -> Cut | None:
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        rank = len(node.args[0].meta["tensor_meta"].shape)  # type: ignore[union-attr]
        if not isinstance(dims, int | list | tuple):
            return None
        reduced = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}  # type: ignore[operator]
        return cut if all(d > cut.dim for d in reduced) else None

    def _binary(self, node: fx.Node) -> Cut | None:
        values = node.all_input_nodes
        cuts = [self.plan.states.get(v) for v in values]
        if any(c is None for c in cuts) or not cuts or len(set(cuts)) != 1:
            return None
        ranks = {len(v.meta["tensor_meta"].shape) for v in values if "tensor_meta" in v.meta}
        return cuts[0] if len(ranks) == 1 else None

    def _hoist(self) -> None:
        """Move the outermost reductions into the boundaries where that is exact."""
        plan = self.plan
        if not plan.actions:
            return
        (entry,) = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        plan.hoisted = self._hoistable(entry)
        output = next(n for n in reversed(self.module.graph.nodes) if n.op == "output")
        results = output.all_input_nodes
        if len(results) == 1 and results[0] in plan.reduced and len(results[0].users) == 1:
            plan.exit_partial = plan.actions.get(str(results[0].target)) == "row"

    def _hoistable(self, entry: fx.Node) -> set[fx.Node]:
        """Values between the input and split readers, if *all* of the input's gradient comes through those readers;
        otherwise an empty set.

        Reduction commutes with the backward of everything without parameters, which is linear in the gradient.
        Gradients of parameters in between would become partial, too.
        """
        frontier, passed = [entry], set()
        while frontier:
            value = frontier.pop()
            for user in value.users:
                if user in self.plan.readers.get(value, []):
                    passed.add(value)
                elif self._passes_gradient(user) and self.plan.states[user] is None:
                    frontier.append(user)
                else:
                    return set()
        return passed

    def _passes_gradient(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return not any(True for _ in self.module.get_submodule(str(node.target)).parameters())
        return node.op == "call_function" and node.target in {torch.flatten, F.adaptive_avg_pool2d, F.relu}


def propagate(module: fx.GraphModule) -> SplitPlan:
    """Derive how ``module`` (one tensor in, shapes propagated) splits over a tensor axis, for any degree."""
    return Walk(module).run()
