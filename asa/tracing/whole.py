"""The fallback: a model that cannot be traced, as one component that calls the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from asa.errors import InvalidInputError
from asa.tracing.chain import Slot
from asa.tracing.component import TracedComponent
from asa.tracing.preserve import mode
from asa.tracing.tracer import reason_of


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """The tensors in a model's output, in the order of its structure."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def _graph(num_outputs: int) -> fx.Graph:
    graph = fx.Graph()
    entry = graph.placeholder("x")
    leaves = graph.call_function(tensors_of, (graph.call_module("_whole", (entry,)),))
    graph.output(tuple(graph.call_function(_item, (leaves, i)) for i in range(num_outputs)))
    return graph


def _item(leaves: tuple[Tensor, ...], index: int) -> Tensor:
    return leaves[index]


class WholeModel(TracedComponent):
    """A model as one component. Registries are the model's own, so names are too; the first tensor of its output
    is the main one."""

    def __init__(self, model: nn.Module, sides: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        graphs = [_graph(1 + len(names)) for names in sides]
        super().__init__(
            "model", train=graphs[0], evaluate=graphs[sides[0] != sides[1]], objects={}, sides=sides, whole=model
        )

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model too, which is no submodule."""
        self.__dict__["training"] = mode
        self.__dict__["_whole"].train(mode)
        return self


def _slots(output: Any, names: Iterator[str]) -> Any:
    return pytree.tree_map(lambda leaf: Slot(next(names)) if isinstance(leaf, Tensor) else leaf, output)


def whole(model: nn.Module, example: Tensor) -> tuple[WholeModel, tuple[Any, Any]]:
    """``model`` as one component, and its output structures in both modes; ``example`` is run once in each.

    Raises:
        InvalidInputError: the model fails on ``example``, or returns no tensor.
    """
    structures, sides = [], []
    asked = f"{type(model).__name__} on an input of shape {tuple(example.shape[1:])}"
    for training in (True, False):
        try:
            with mode(model, training), torch.no_grad():
                output = model(example.clone())
        except Exception as error:
            raise InvalidInputError(f"{asked} fails: {reason_of(error)}") from error
        count = len(tensors_of(output))
        if not count:
            raise InvalidInputError(f"{asked} returns no tensor")
        names = tuple(f"output-{i}" for i in range(2, count + 1))
        sides.append(names)
        structures.append(_slots(output, iter(("", *names))))
    return WholeModel(model, (sides[0], sides[1])), (structures[0], structures[1])
