"""The result of tracing: a dataflow graph per mode, whose nodes know their origin in the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

CONSTANT = "_tensor_constant"
"""fx's name prefix for tensors that ``forward`` created during tracing."""


@dataclass(frozen=True)
class Origin:
    """Origin of a node: the ``path`` of the module whose ``forward`` made it (for a leaf, its own), what it ``calls``,
    and a ``key`` that is equal in the graphs of both modes."""

    path: str
    calls: str
    key: str


def origin(node: fx.Node) -> Origin:
    """Origin of a node made by :class:`asa.tracing.tracer.ModelTracer`."""
    recorded: Origin = node.meta["origin"]
    return recorded


@dataclass
class Program:
    """The traced model in one mode.

    Attributes:
        attributes: object of every ``get_attr`` and ``call_module`` target.
        structure: the model's output with nodes in place of tensors.
        opaque: why a module had to become a single call, by path.
        contrary: paths of modules that ``model.train(training)`` left in the other mode.
        checkpointed: paths of modules that ran inside ``torch.utils.checkpoint``.
    """

    graph: fx.Graph
    attributes: dict[str, Any]
    structure: Any
    opaque: dict[str, str]
    contrary: frozenset[str]
    checkpointed: tuple[str, ...] = ()

    @property
    def placeholder(self) -> fx.Node:
        """The node of the model's input."""
        return next(n for n in self.graph.nodes if n.op == "placeholder")

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes of the model's outputs, in order of execution, each once. The last one is its *main* output."""
        leaves = {leaf for leaf in pytree.tree_leaves(self.structure) if isinstance(leaf, fx.Node)}
        return [n for n in self.graph.nodes if n in leaves]


def plain_container(module: nn.Module) -> bool:
    """Whether calling ``module`` only calls its children in order, or is not possible at all."""
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return type(module) in (nn.ModuleList, nn.ModuleDict)


def opened(module: nn.Module) -> bool:
    """Whether tracing enters ``module``, rather than recording one call of it.

    Not entered: modules without children, and torch.nn's own (except ``TransformerEncoder``, which only calls its
    layers in a row). They read ``training`` when they run.
    """
    if next(module.children(), None) is None:
        return False
    if plain_container(module) or isinstance(module, nn.TransformerEncoder):
        return True
    return not type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
