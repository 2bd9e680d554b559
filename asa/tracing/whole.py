"""The fallback for a model that cannot be traced: one component that calls the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from asa.errors import InvalidInputError, place_of
from asa.tracing.chain import BatchDims, Slot, differing
from asa.tracing.component import TracedComponent
from asa.tracing.preserve import mode, preserved
from asa.tracing.records import understood
from asa.tracing.tracer import reason_of


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """Tensors in a model's output, in the order of its structure."""
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
    """A model as one component. Its registries are the model's own, and so are all names. The first tensor of its
    output is the main one."""

    def __init__(self, model: nn.Module, sides: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        graphs = [_graph(1 + len(names)) for names in sides]
        super().__init__(
            "model", train=graphs[0], evaluate=graphs[sides[0] != sides[1]], objects={}, sides=sides, replaced=model
        )

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this component and of the model, which is not a submodule."""
        self.__dict__["training"] = mode
        self.__dict__["_whole"].train(mode)
        return self


def _slots(output: Any, names: Iterator[str]) -> Any:
    return pytree.tree_map(lambda leaf: Slot(next(names)) if isinstance(leaf, Tensor) else leaf, output)


def _run(model: nn.Module, example: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
    call = f"{type(model).__name__} on an input of shape {tuple(example.shape[1:])}"
    try:
        output = understood(model(example.clone()))
    except Exception as error:
        raise InvalidInputError(f"{call} fails: {reason_of(error)}{place_of(error)}") from error
    tensors = tensors_of(output)
    if not tensors:
        raise InvalidInputError(
            f"{call} returns a {type(output).__name__} in which there is no tensor; return a tensor, or tensors in a "
            "tuple, list or dictionary"
        )
    return output, tensors


def outcome(model: nn.Module, example: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the output of ``model`` for ``example``, the main one first.

    Raises:
        InvalidInputError: it fails on ``example``, or returns no tensor.
    """
    output, tensors = _run(model, example)
    return (output["out"], *tensors) if isinstance(output, dict) and "out" in output else tensors


def as_one_component(model: nn.Module, small: Tensor, large: Tensor) -> tuple[WholeModel, tuple[Any, Any], BatchDims]:
    """(component, structures, dimensions): ``model`` as one component, its output structures in both modes, and the
    batch dimension of each output. Both batches are run once in each mode.

    Raises:
        InvalidInputError: the model fails on them, or returns no tensor.
    """
    structures, sides = [], []
    dims: BatchDims = {}
    for training in (True, False):
        runs = []
        for batch in (small, large):  # a model's state after one batch may not fit the next
            with preserved(model), mode(model, training), torch.no_grad():
                runs.append(_run(model, batch))
        (output, tensors), (_, others) = runs
        names = tuple(f"output-{i}" for i in range(2, len(tensors) + 1))
        sides.append(names)
        structures.append(_slots(output, iter(("", *names))))
        dimensions = [differing(tuple(a.shape), tuple(b.shape)) for a, b in zip(tensors, others, strict=False)]
        dims = dict(zip(("", *names), dimensions, strict=False)) | dims
    return WholeModel(model, (sides[0], sides[1])), (structures[0], structures[1]), dims
