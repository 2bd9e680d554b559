"""The traced model: its components in order, and how their outputs form the model's own output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from asa.ir.graph import Component
from asa.tracing.component import TracedComponent
from asa.tracing.program import Program, origin

Shape = tuple[int, ...]
BatchDims = dict[str, int | None]
"""Batch dimension of each output by name, None if it has none; the main output is named ``""``."""


@dataclass(frozen=True)
class Slot:
    """Position of an output in the model's output structure; ``side`` is its name, empty for the main output."""

    side: str


def side_names(program: Program) -> dict[fx.Node, str]:
    """Names for the outputs other than the main one: the path of the module that makes each."""
    names: dict[fx.Node, str] = {}
    for node in program.outputs[:-1]:
        base = origin(node).path or origin(node).calls
        name, n = base, 1
        while name in names.values():
            n += 1
            name = f"{base}-{n}"
        names[node] = name
    return names


def batch_dims(program: Program, small: Mapping[fx.Node, Shape], large: Mapping[fx.Node, Shape]) -> BatchDims:
    """The batch dimension of each output of ``program``, by name, from their shapes for two batch sizes."""
    names = side_names(program)
    return {names.get(node, ""): differing(small.get(node, ()), large.get(node, ())) for node in program.outputs}


def differing(small: Shape, large: Shape) -> int | None:
    """The first dimension in which two shapes differ, if any.

    >>> differing((4, 2, 8), (4, 3, 8))
    1
    """
    return next((d for d, (a, b) in enumerate(zip(small, large, strict=False)) if a != b), None)


def structure_of(program: Program) -> Any:
    """The model's output structure with a :class:`Slot` in place of every tensor."""
    names = side_names(program)
    return pytree.tree_map(
        lambda leaf: Slot(names.get(leaf, "")) if isinstance(leaf, fx.Node) else leaf, program.structure
    )


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A chain of components. Each reads the main output of the one before, batch first.

    Attributes:
        notes: what could not be traced or separated, and why.
        unused: parameters and buffers of the model that are in no component, because ``forward`` never reads them.
        structures: output structures in training and in evaluation.
        batch_dims: batch dimension of each output.
        common: names of buffers that several components read and none writes. Each stage has its own copy.
    """

    name: str
    components: list[TracedComponent]
    facts: list[Component]
    input_bytes_per_sample: float
    model_fingerprint: str
    notes: tuple[str, ...]
    unused: tuple[str, ...]
    structures: tuple[Any, Any]
    batch_dims: BatchDims
    common: frozenset[str] = frozenset()

    @property
    def note(self) -> str:
        """All notes in one line; empty if everything was traced."""
        return "; ".join(self.notes)

    @property
    def uncut(self) -> frozenset[int]:
        """Indices of components at which no pipeline stage may begin, because more than one tensor would cross.

        Side outputs must be made in the last stage. A tensor that several components hold must be in one stage, unless
        it is a buffer that none of them writes.
        """
        indices: set[int] = set()
        first: dict[int, int] = {}
        for i, component in enumerate(self.components):
            if component.has_sides():
                indices.update(range(i + 1, len(self.components)))
            named = (*component.named_parameters(), *component.named_buffers())
            ids = {id(tensor) for name, tensor in named if name not in self.common}
            for tensor in ids | component.ties:
                indices.update(range(first.setdefault(tensor, i) + 1, i + 1))
        return frozenset(indices)

    def assemble(self, main: Tensor, sides: dict[str, Tensor]) -> Any:
        """The output of the model itself, made from those of its components.

        ``main`` is the last component's first output; ``sides`` are the side outputs of all components, by name. The
        mode is that of the last component.
        """

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, Slot):
                return leaf
            return sides[leaf.side] if leaf.side else main

        structure = self.structures[0 if self.components[-1].training else 1]
        return fill(structure) if isinstance(structure, Slot) else pytree.tree_map(fill, structure)

    def run(self, x: Tensor) -> Any:
        """Run the components one after the other; returns the model's own output for ``x`` [batch, ...]."""
        sides: dict[str, Tensor] = {}
        for component in self.components:
            x, *extra = component(x)
            sides.update(zip(component.side_outputs(), extra, strict=True))
        return self.assemble(x, sides)
