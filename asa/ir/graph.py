"""The model from the planner's view: a chain of components with their memory, FLOPs and possible splits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from math import prod
from typing import Literal

from asa.errors import InvalidInputError
from asa.ir.codec import later, noun
from asa.ir.layout import largest_shard
from asa.ir.traffic import CollectiveOp
from asa.ir.units import MOST_AMOUNT, MOST_CLASSES, MOST_VALUES

_MOST_COMPONENTS = 2_000
_MOST_TENSORS = 100_000


def firsts(keys: Iterable[object]) -> tuple[int, ...]:
    """For each key, the index of the first one that is equal.

    >>> firsts("abac")
    (0, 1, 0, 3)
    """
    first: dict[object, int] = {}
    return tuple(first.setdefault(key, i) for i, key in enumerate(keys))


def check_form(input_shape: Sequence[int], num_classes: int, *, where: str) -> None:
    """Check that input shape and number of classes are possible.

    Raises:
        InvalidInputError: they are not.
    """
    if any(size < 1 for size in input_shape):
        raise InvalidInputError(f"inputs of {list(input_shape)}: sizes are at least 1", where=f"{where}.input_shape")
    if prod(input_shape) > MOST_VALUES:
        problem = f"inputs of {list(input_shape)}: {prod(input_shape)} values, the most is {MOST_VALUES}"
        raise InvalidInputError(problem, where=f"{where}.input_shape")
    if not 0 <= num_classes <= MOST_CLASSES:
        raise InvalidInputError(f"{num_classes} classes, 0 to {MOST_CLASSES}", where=f"{where}.num_classes")


def check_count(model: object, count: int) -> None:
    """Check that a graph does not have too many components.

    Raises:
        InvalidInputError: it has; gives their number.
    """
    if count > _MOST_COMPONENTS:
        raise InvalidInputError(
            f"graph of {model} has {count} components, the most is {_MOST_COMPONENTS}", where="$.graph.components"
        )


@noun
class InnerCollective:
    """One collective *inside* a tensor-parallel component, on its tensor group.

    ``bytes_per_sample`` is the size of the whole tensor (the reduced buffer of an all_reduce, the gathered
    output of an all_gather, the input of a reduce_scatter) divided by the samples in it.
    """

    op: CollectiveOp
    phase: Literal["forward", "backward"]
    bytes_per_sample: float


@noun
class SequenceSplit:
    """What sequence parallelism divides in a component beyond its :class:`TensorSplit`: operations on single tokens.

    Attributes:
        tokens: number of tokens in the component's input, dimension 1.
        exit: whether the output has the same tokens and stays split; otherwise it is whole.
        collectives: all-gathers and reduce-scatters of tokens. They replace the collectives of the tensor split, and
            its partial entry and exit.
        summed_parameter_bytes: bytes of parameters that every rank holds whole but uses for some tokens only. Their
            gradients are summed over the tensor group, in one all-reduce per microbatch.
        saved_bytes_per_sample: bytes that every rank saves under tensor parallelism alone, and that sequence
            parallelism divides.
    """

    tokens: int
    exit: bool
    collectives: tuple[InnerCollective, ...]
    summed_parameter_bytes: int
    saved_bytes_per_sample: float

    def __post_init__(self) -> None:
        parts = [self.tokens, self.summed_parameter_bytes, self.saved_bytes_per_sample]
        parts += [c.bytes_per_sample for c in self.collectives]
        if self.tokens < 2 or min(parts) < 0 or max(parts) > MOST_AMOUNT:
            raise ValueError(f"a split by tokens needs 2 or more of them, and bytes of 0 to {MOST_AMOUNT:g}")

    @property
    def exit_tokens(self) -> int:
        """Number of tokens of the output that stays split; 0 if it is whole."""
        return self.tokens if self.exit else 0

    def share(self, degree: int) -> float:
        """Largest fraction of the tokens that a rank has, 0 to 1."""
        return largest_shard(self.tokens, degree) / self.tokens

    def spared(self, degree: int) -> float:
        """Reduction in saved bytes per sample on a rank, compared with tensor parallelism alone."""
        return (1 - self.share(degree)) * self.saved_bytes_per_sample


@noun
class TensorSplit:
    """What tensor parallelism can divide in a component.

    A degree t divides ``parameter_bytes``, ``flops_per_sample`` and ``saved_bytes_per_sample`` by t. Each of these is
    the *divisible part* of the component's own value. ``max_degree`` is the size of the narrowest split dimension;
    shards differ by at most one index of it.

    Attributes:
        entry_partial: whether the gradient with respect to the component's input leaves backward as a partial sum over
            the tensor group.
        exit_partial: whether the output leaves forward as a partial sum.
        collectives: collectives inside the component. The sums of partial values are not among them: the boundary
            prices and performs those.
        sequence: what sequence parallelism divides in addition; None if nothing, and in older files.
    """

    max_degree: int
    parameter_bytes: int
    num_parameter_tensors: int
    flops_per_sample: float
    saved_bytes_per_sample: float
    collectives: tuple[InnerCollective, ...]
    entry_partial: bool
    exit_partial: bool
    sequence: SequenceSplit | None = later()

    def __post_init__(self) -> None:
        parts = [self.parameter_bytes, self.num_parameter_tensors, self.flops_per_sample, self.saved_bytes_per_sample]
        parts += [c.bytes_per_sample for c in self.collectives]
        if self.max_degree < 1 or min(parts) < 0 or max(parts) > MOST_AMOUNT:
            raise ValueError(f"a split needs max_degree >= 1, and bytes, tensors and FLOPs of 0 to {MOST_AMOUNT:g}")


@noun
class Component:
    """A part of the model between two cut points at which exactly one tensor passes.

    Activations are counted at the precision that they have in this graph.

    Attributes:
        parameter_bytes, buffer_bytes: bytes of the stored (master) tensors.
        flops_per_sample: FLOPs of forward; a multiply-add is 2.
        attention_flops_per_sample: those of them in fused attention; 0 in older files.
        spared_flops_per_sample: those of them that a second forward leaves out, because no gradient depends on them; 0
            in older files.
        saved_bytes_per_sample: bytes that autograd saves from forward to backward, without parameters; with the output,
            if that is saved.
        tied: whether it shares a parameter with other components. Such components are in one stage and one layout, and
            are not split; the first of them holds the parameter, and its data strategy decides how.
    """

    name: str
    kind: Literal["convolution", "attention", "linear", "recurrent", "other"]
    modules: tuple[str, ...]
    num_parameter_tensors: int
    parameter_bytes: int
    largest_parameter_bytes: int
    buffer_bytes: int
    flops_per_sample: float
    output_bytes_per_sample: float
    saved_bytes_per_sample: float
    batch_norm: bool
    split: TensorSplit | None
    why_whole: str = ""
    tied: bool | None = later()
    attention_flops_per_sample: float = later(0.0)
    spared_flops_per_sample: float = later(0.0)

    def spared_flops(self, degree: int) -> float:
        """FLOPs of a sample that a second forward leaves out on a rank of tensor degree ``degree``."""
        split = self.split.flops_per_sample if self.split is not None else 0.0
        return self.spared_flops_per_sample - (1 - 1 / degree) * min(self.spared_flops_per_sample, split)


DEPENDS = "what training computes depends on the plan"
"""End of a note on a model whose results on several ranks, or in several microbatches, are not those of one device."""


@noun
class LayerGraph:
    """Components in topological order. Component i passes exactly one tensor to component i + 1.

    Attributes:
        input_bytes_per_sample: size of the first component's input.
        uncut: indices of components at which no stage may begin, because more than that tensor would cross: the output
            of an auxiliary head, or a weight that is used on both sides.
        notes: remarks on the model itself: what could not be traced, what draws random numbers.
    """

    model: str
    input_shape: tuple[int, ...]
    num_classes: int
    input_bytes_per_sample: float
    components: tuple[Component, ...]
    uncut: tuple[int, ...] | None = later()
    notes: tuple[str, ...] = later(())

    def __post_init__(self) -> None:
        if not self.components:
            raise InvalidInputError(f"graph of {self.model} has no component", where="$.graph.components")
        check_count(self.model, len(self.components))
        names: set[str] = set()
        for i, c in enumerate(self.components):
            if c.name in names:
                raise InvalidInputError(f"component {c.name!r} appears twice", where=f"$.graph.components[{i}].name")
            names.add(c.name)
            if c.num_parameter_tensors > _MOST_TENSORS:
                raise InvalidInputError(
                    f"component {c.name!r} has {c.num_parameter_tensors} parameter tensors, above {_MOST_TENSORS}",
                    where=f"$.graph.components[{i}].num_parameter_tensors",
                )
            for field in (
                "num_parameter_tensors",
                "parameter_bytes",
                "largest_parameter_bytes",
                "buffer_bytes",
                "flops_per_sample",
                "attention_flops_per_sample",
                "spared_flops_per_sample",
                "output_bytes_per_sample",
                "saved_bytes_per_sample",
            ):
                if not 0 <= getattr(c, field) <= MOST_AMOUNT:
                    raise InvalidInputError(
                        f"component {c.name!r} has {field} {getattr(c, field)}, not 0 to {MOST_AMOUNT:g}",
                        where=f"$.graph.components[{i}].{field}",
                    )
        if any(not 0 < i < len(self.components) for i in self.uncut or ()):
            raise InvalidInputError(
                f"cuts {self.uncut} are not before components 1 to {len(self.components) - 1}",
                where="$.graph.uncut",
            )
        check_form(self.input_shape, self.num_classes, where="$.graph")
        if not 0 <= self.input_bytes_per_sample <= MOST_AMOUNT:
            raise InvalidInputError(
                f"input of {self.input_bytes_per_sample} bytes per sample", where="$.graph.input_bytes_per_sample"
            )

    def __len__(self) -> int:
        return len(self.components)

    def component(self, name: str) -> Component:
        """The component called ``name``.

        Raises:
            KeyError: there is none.
        """
        for c in self.components:
            if c.name == name:
                return c
        raise KeyError(name)

    @cached_property
    def like(self) -> tuple[int, ...]:
        """For each component, the index of the first one that differs from it only in its names."""
        names = [f.name for f in fields(Component) if f.name not in ("name", "modules", "why_whole")]
        return firsts(tuple(getattr(c, n) for n in names) for c in self.components)

    def cuttable(self, index: int) -> bool:
        """Whether a stage may begin with component ``index``."""
        return index not in (self.uncut or ())

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(c.parameter_bytes for c in self.components)
