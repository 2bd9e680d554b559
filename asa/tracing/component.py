"""A component: a part of a traced model that runs by itself, on the model's own modules and parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from keyword import iskeyword
from typing import Any, Self, cast

import torch
from torch import Tensor, fx, nn

from asa.tracing.again import copy_recomputed
from asa.tracing.ties import refer

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def cut_out(
    nodes: list[fx.Node], entry: fx.Node, leaving: list[fx.Node], fixed: dict[fx.Node, Any],
    recomputed: Mapping[fx.Node, Any],
) -> fx.Graph:  # fmt: skip
    """The graph of ``nodes``. It reads the value of ``entry`` and returns the values of ``leaving`` as a tuple.

    Parameters and buffers are read where they are first used here, even if another component read them first. Values of
    ``fixed`` nodes from outside become constants; nodes in ``recomputed`` are recomputed.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {entry: graph.placeholder("x")}

    def copy_of(node: fx.Node) -> fx.Node:
        # Nodes get new names, so that equal parts of different graphs are equal.
        new = graph.create_node(
            node.op, node.target, fx.node.map_arg(node.args, copied), fx.node.map_arg(node.kwargs, copied)
        )
        new.meta.update(node.meta)
        return new

    def copied(node: fx.Node) -> Any:
        if node not in copies:
            if node in fixed and not isinstance(fixed[node], torch.device):
                return fixed[node]
            assert node in recomputed or node.op == "get_attr", f"{node} crosses a cut"
            copies[node] = (
                copy_recomputed(graph, copies[entry], node, recomputed, copied) if node in recomputed else copy_of(node)
            )
        return copies[node]

    for node in nodes:
        if node is not entry and node.op != "placeholder":
            copies[node] = copy_of(node)
    graph.output(tuple(copied(n) for n in leaving))
    graph.lint()
    return graph


class _Graph(fx.GraphModule):
    """Compiled when it gets a graph with nodes. Torch would compile the empty graph that it begins with, too.

    Layers may have names that are keywords of Python (``nn.ModuleDict({"in": ...})``): torch would write ``self.in``.
    """

    def recompile(self) -> Any:
        if not len(self.graph.nodes):
            return None
        targets = {str(n.target) for n in self.graph.nodes if n.op in ("call_module", "get_attr")}
        named = sorted((t for t in targets if any(map(iskeyword, t.split(".")))), key=len, reverse=True)
        if not named:
            return super().recompile()
        with self.graph.on_generate_code(lambda _: partial(_without_keywords, named)):
            return super().recompile()


def _without_keywords(targets: list[str], body: list[str]) -> list[str]:
    """The lines of ``body``, with ``targets`` looked up by ``getattr`` where torch wrote keywords. Longer targets are
    first."""
    text = "\0".join(body)
    for target in targets:
        written = right = "self"
        for atom in target.split("."):
            written = f"{written}.{atom}" if atom.isidentifier() else f'getattr({written}, "{atom}")'
            plain = atom.isidentifier() and not iskeyword(atom)
            right = f"{right}.{atom}" if plain else f'getattr({right}, "{atom}")'
        text = re.sub(rf"\b{re.escape(written)}(?!\w)", right.replace("\\", r"\\"), text)
    return text.split("\0")


class _Names:
    """Holder of the modules and tensors that a graph's targets stand for, as attributes."""


def _looked_up(module: fx.GraphModule) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The graph of ``module`` as a function that holds its submodules directly, because a look-up by path in every call
    takes as long as a small kernel. Parameters and buffers are still looked up at each use."""
    graph, names = copy.deepcopy(module.graph), _Names()
    for i, node in enumerate(graph.nodes):
        if node.op == "call_module":
            setattr(names, f"m{i}", module.get_submodule(node.target))
            node.target = f"m{i}"
        elif node.op == "get_attr":
            path, _, leaf = node.target.rpartition(".")
            setattr(names, f"m{i}", module.get_submodule(path))
            node.target = f"m{i}.{leaf}"
    holder = _Graph(nn.Module(), fx.Graph(), class_name="CachedGraph")
    holder.graph = graph
    return partial(cast(Any, type(holder)).forward, names)


class TracedComponent(nn.Module):
    """One component, callable in both modes: ``forward(x)`` returns ``(main, *sides)``.

    Its submodules, parameters and buffers are the model's own objects under their names in the model, so the keys of
    ``state_dict`` are the model's. ``train_graph`` and ``eval_graph`` (one object if the modes agree) look names up in
    this module. So replacing ``component.layer1.conv`` replaces it in both, until :meth:`cache_lookups` is called.
    """

    name: str
    train_graph: fx.GraphModule
    eval_graph: fx.GraphModule
    _runs: dict[fx.GraphModule, Callable[[Tensor], tuple[Tensor, ...]]] | None
    input_shape: tuple[int, ...] = ()
    """Shape of one sample of the component's input; set by :func:`asa.tracing.build.trace`."""
    input_dtype: torch.dtype = torch.float32
    ties: frozenset[int] = frozenset()
    """Identities of parameters that other components use, too. The first component holds such a parameter, and the
    others refer to it. So it has one gradient, however often it is used."""

    def __init__(
        self,
        name: str,
        *,
        train: fx.Graph,
        evaluate: fx.Graph,
        objects: dict[str, Any],
        sides: tuple[tuple[str, ...], tuple[str, ...]],
        volatile: frozenset[str] = frozenset(),
        contrary: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset()),
        replaced: nn.Module | None = None,
        borrowed: frozenset[str] = frozenset(),
    ) -> None:
        """Arguments:
        objects: module, parameter or buffer for each target of the graphs.
        sides: names of the side outputs in training and in evaluation.
        volatile: targets of buffers that are not saved.
        contrary: submodules that the model's own ``train`` leaves in the other mode, in training and in evaluation.
        replaced: a module that this one replaces, with all its registries.
        borrowed: targets of parameters that another component holds."""
        super().__init__()
        self.name = name
        self._sides = sides
        self._contrary = contrary
        self.__dict__["_whole"] = replaced
        if replaced is not None:
            self.__dict__.update({registry: replaced.__dict__[registry] for registry in _REGISTRIES})
        for target in sorted(objects, key=lambda t: t.count(".")):
            self._adopt(target, objects[target], persistent=target not in volatile, borrowed=target in borrowed)
        self._bind(train, evaluate)

    def _adopt(self, target: str, value: Any, *, persistent: bool, borrowed: bool) -> None:
        *parents, leaf = target.split(".")
        home: nn.Module = self
        for atom in parents:
            if atom not in home._modules:
                home.add_module(atom, nn.Module())
            home = cast(nn.Module, home._modules[atom])
        if getattr(home, leaf, None) is value:
            return
        if borrowed:
            refer(home, {leaf: value})
        elif isinstance(value, nn.Parameter):
            home.register_parameter(leaf, value)
        elif isinstance(value, Tensor):
            home.register_buffer(leaf, value, persistent=persistent)
        elif isinstance(value, nn.Module):
            home.add_module(leaf, value)
        else:
            setattr(home, leaf, value)

    def _bind(self, train: fx.Graph, evaluate: fx.Graph) -> None:
        first = self.over(train)
        self.__dict__["train_graph"] = first
        self.__dict__["eval_graph"] = first if evaluate is train else self.over(evaluate)
        self.__dict__["_runs"] = None

    def over(self, graph: fx.Graph) -> fx.GraphModule:
        """``graph`` as a module that looks names up in this one. It is not a submodule, but shares the registries."""
        module = _Graph(nn.Module(), fx.Graph(), class_name="TracedGraph")
        for registry in _REGISTRIES:
            module.__dict__[registry] = self.__dict__[registry]
        module.__dict__["_whole"] = self.__dict__["_whole"]
        module.graph = graph
        return module

    def cache_lookups(self, *, now: bool = False) -> None:
        """Make the graphs look up their submodules only once, at the next run or ``now``, which torch's compiler could
        not follow. None may be replaced after that."""
        self.__dict__["_runs"] = {graph: _looked_up(graph) for graph in self.graphs()} if now else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedComponent:
        """A copy with its own tensors, which the graphs of the copy use."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        graphs = ("train_graph", "eval_graph", "_runs")
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in graphs})
        train = copy.deepcopy(self.train_graph.graph)
        same = self.eval_graph is self.train_graph
        new._bind(train, train if same else copy.deepcopy(self.eval_graph.graph))
        return new

    def train(self, mode: bool = True) -> Self:
        """Set the mode as the model's own ``train`` would, so that frozen modules stay in their mode."""
        super().train(mode)
        for path in self._contrary[0 if mode else 1]:
            self.get_submodule(path).training = not mode
        return self

    def side_outputs(self) -> tuple[str, ...]:
        """Names of the outputs other than the main one, in the current mode."""
        return self._sides[0 if self.training else 1]

    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """The distinct graphs: one if both modes agree, otherwise those of training and evaluation."""
        return tuple(dict.fromkeys((self.train_graph, self.eval_graph)))

    def has_sides(self) -> bool:
        """Whether there are side outputs in any mode."""
        return any(self._sides)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run on ``x``, the main output of the previous component, batch first; returns (main, side outputs)."""
        graph = self.train_graph if self.training else self.eval_graph
        if self._runs is None or not isinstance(graph, fx.GraphModule):
            return cast(tuple[Tensor, ...], graph(x))
        run = self._runs.get(graph)
        if run is None:
            run = self._runs[graph] = _looked_up(graph)
        return run(x)

    def extra_repr(self) -> str:
        """Text of name and side outputs."""
        return f"{self.name!r}" + (f", sides={self._sides}" if any(self._sides) else "")
