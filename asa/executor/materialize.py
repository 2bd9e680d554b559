"""A plan and a model become one rank's part of the computation.

Every component is split over its tensor group, neighbours of one layout become one *segment* wrapped by their data
strategy, and boundaries join segments. What runs is what the plan priced: the collectives of each page's
``traffic`` and of :class:`asa.ir.layout.Boundary`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from asa.errors import InvalidInputError, UsageError
from asa.executor.groups import Groups, Purpose
from asa.interfaces.strategy import Strategies
from asa.ir.layout import Boundary, Layout, bounds, gather_groups
from asa.ir.plan import Assignment, Plan
from asa.sharding.axis import SOLO, Axis
from asa.sharding.batchnorm import synchronise
from asa.sharding.boundary import Crossing
from asa.sharding.randomness import make_reproducible
from asa.sharding.samples import SampleContext
from asa.sharding.tensor import plan_split
from asa.tracing import TracedModel, trace
from asa.tracing.component import TracedComponent

BatchNormMode = Literal["local", "exact"]


class Segment(nn.Module):
    """Neighbouring components of one layout and data strategy, with the boundaries between them."""

    def __init__(self, components: list[TracedComponent], crossings: list[Crossing | None], context: SampleContext):
        super().__init__()
        self.components = nn.ModuleList(components)
        self._traced = components
        self.crossings = crossings
        self.context = context

    def side_names(self) -> list[str]:
        """Names of the side outputs, in the order ``forward`` returns them."""
        return [name for c in self._traced for name in c.side_outputs()]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(main, *sides) from this rank's rows."""
        sides: list[Tensor] = []
        for crossing, component in zip(self.crossings, self.components, strict=True):
            if crossing is not None:
                x = crossing(x, self.context.total)
            x, *more = component(x)
            sides += more
        return (x, *sides)


@dataclass(frozen=True)
class Placed:
    """A segment as it stands in the network: how data comes in, and how side outputs reach the last layout."""

    module: nn.Module
    segment: Segment
    layout: Layout
    entry: Crossing | None
    side_exit: Crossing | None


class ParallelModel:
    """One rank's part of a model under a plan. Collective calls say so."""

    def __init__(
        self, plan: Plan, traced: TracedModel, placed: list[Placed], last: Crossing | None, context: SampleContext,
        groups: Groups | None, rank: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.plan, self.rank, self.device = plan, rank, device
        self.traced, self.context = traced, context
        self._placed, self._last, self._groups = placed, last, groups
        self.layouts = plan.layouts()

    @property
    def components(self) -> list[TracedComponent]:
        """The components as this rank holds them."""
        return self.traced.components

    @property
    def tensor_axes(self) -> list[Axis]:
        """The tensor axis of every component."""
        solo = Axis(size=1, index=0)
        groups = self._groups
        if groups is None:
            return [solo for _ in self.components]
        return [groups.axis("activation", layout.tensor_group(self.rank)) for layout in self.layouts]

    def parameters(self) -> list[nn.Parameter]:
        """This rank's shards, in component order, each once."""
        return list(dict.fromkeys(p for c in self.components for p in c.parameters()))

    def train(self, mode: bool = True) -> None:
        """Training mode, or evaluation."""
        for place in self._placed:
            place.module.train(mode)

    def eval(self) -> None:
        """Evaluation mode."""
        self.train(False)

    def input_rows(self, batch: int) -> tuple[int, int]:
        """Rows of a batch that this rank reads."""
        first = self.layouts[0]
        return bounds(batch, first.data, first.data_index(self.rank))

    def output_rows(self, batch: int) -> tuple[int, int]:
        """Rows of a batch whose outputs this rank ends up with."""
        last = self.layouts[-1]
        return bounds(batch, last.data, last.data_index(self.rank))

    def counts_rows(self) -> bool:
        """Whether this rank, among those with the same output rows, is the one that counts them."""
        return self.rank % self.layouts[-1].inner == 0

    def loss_scale(self, batch: int) -> float:
        """Factor on the mean loss over :meth:`output_rows`: 1 where shards are even."""
        start, stop = self.output_rows(batch)
        return (stop - start) * self.layouts[-1].data / batch

    def forward(self, x: Tensor, samples: Tensor, step: int) -> Any:
        """The model's own output, for :meth:`output_rows` of the microbatch ``samples`` (global indices, int64).

        ``x``: :meth:`input_rows` of it.
        """
        context, total = self.context, len(samples)
        context.step, context.total = step, total
        sides: dict[str, Tensor] = {}
        value = x
        for place in self._placed:
            if place.entry is not None:
                value = place.entry(value, total)
            start, stop = bounds(total, place.layout.data, place.layout.data_index(self.rank))
            context.samples = samples[start:stop]
            value, *extra = place.module(value)
            for name, side in zip(place.segment.side_names(), extra, strict=True):
                sides[name] = side if place.side_exit is None else place.side_exit(side, total)
        if self._last is not None:
            value = self._last(value, total)
        return self.traced.assemble(value, sides)

    __call__ = forward

    def bucket_gradients(self) -> list[Tensor]:
        """Gradients that lie in communication buckets, which outlive the step (after the first backward)."""
        wrapped = [p.module for p in self._placed if isinstance(p.module, DistributedDataParallel)]
        return [p.grad for m in wrapped for p in m.parameters() if p.grad is not None]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them: all but the last microbatch of a step."""
        with ExitStack() as stack:
            for place in self._placed:
                if isinstance(place.module, DistributedDataParallel):
                    stack.enter_context(place.module.no_sync())
                elif isinstance(place.module, FSDPModule):
                    place.module.set_requires_gradient_sync(False)
                    stack.callback(place.module.set_requires_gradient_sync, True)
            yield

    def average_buffers(self) -> None:
        """Make running statistics one over each data group (collective)."""
        if self._groups is None:
            return
        for component, layout in zip(self.components, self.layouts, strict=True):
            floats = [b for b in component.buffers() if b.is_floating_point()]
            axis = self._groups.axis("gradient", layout.data_group(self.rank))
            if axis.group is None or not floats:
                continue
            flat = torch.cat([b.reshape(-1) for b in floats])
            dist.all_reduce(flat, group=axis.group)
            flat /= axis.size
            for buffer, part in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
                buffer.copy_(part.view_as(buffer))

    def close(self) -> None:
        """Leave the plan's process groups (collective)."""
        if self._groups is not None:
            self._groups.close()


def groups_of(plan: Plan) -> list[tuple[Purpose, tuple[int, ...]]]:
    """Every process group the plan needs, in the order in which all ranks create them."""
    layouts = plan.layouts()
    pairs = [*pairwise(layouts), *((layout, layouts[-1]) for layout in layouts)]
    found: list[tuple[Purpose, tuple[int, ...]]] = []
    for layout in dict.fromkeys(layouts):
        found += [("gradient", group) for group in layout.data_groups()]
        found += [("activation", group) for group in layout.tensor_groups()]
    for source, target in dict.fromkeys(pairs):
        meeting = Boundary(source=source, target=target).meeting
        for end in (source, target):
            found += [("activation", group) for group in gather_groups(end.width, end.data, meeting)]
    return list(dict.fromkeys(g for g in found if len(g[1]) > 1))


def _boundaries(plan: Plan, traced: TracedModel) -> list[Boundary]:
    """One in front of every component but the first, and one behind the last."""
    layouts = plan.layouts()
    partial = []
    for component, layout in zip(traced.components, layouts, strict=True):
        split = plan_split(component)[0] if layout.tensor > 1 else None
        partial.append((split.entry_partial, split.exit_partial) if split else (False, False))
    found = [
        Boundary(source=layouts[i - 1], target=layouts[i], exit_partial=partial[i - 1][1], entry_partial=partial[i][0])
        for i in range(1, len(layouts))
    ]
    last = layouts[-1]
    whole = Layout(width=last.width, data=last.data, tensor=1)
    return [*found, Boundary(source=last, target=whole, exit_partial=partial[-1][1])]


def _check(plan: Plan, traced: TracedModel, strategies: Strategies) -> None:
    if len(plan.stages) != 1:
        raise UsageError(f"the plan has {len(plan.stages)} pipeline stages; this executor runs one")
    names = [c.name for c in traced.components]
    planned = [c.name for c in plan.components]
    if names != planned:
        first = next((a, b) for a, b in zip([*names, "end"], [*planned, "end"], strict=False) if a != b)
        raise InvalidInputError(f"the plan is for another model: it has {first[1]!r} where the model has {first[0]!r}")
    if plan.model_fingerprint != traced.model_fingerprint:
        raise InvalidInputError(
            f"the plan is for another model: its fingerprint is {plan.model_fingerprint or 'missing'}, this "
            f"{plan.model_spec} has {traced.model_fingerprint}; profile and plan it again"
        )
    for a in plan.components:
        if a.checkpoint or a.data.strategy not in strategies.data or a.tensor.strategy not in strategies.tensor:
            raise UsageError(f"{a.name}: this executor cannot run {a.data.strategy} + {a.tensor.strategy}"
                             f"{' + checkpoint' if a.checkpoint else ''}")  # fmt: skip


def materialize(
    plan: Plan,
    model: nn.Module,
    example: Tensor,
    *,
    rank: int,
    strategies: Strategies,
    device: torch.device,
    seed: int = 0,
    batch_norm: BatchNormMode = "local",
    prepare: Callable[[TracedModel], None] | None = None,
    timeout_s: float = 600.0,
) -> ParallelModel:
    """Build ``rank``'s part of ``model`` under ``plan``. Collective: all ranks call it with equal weights.

    ``example`` is any batch the model takes (two samples do); the model's own modules are taken over. ``prepare``
    is called once the model is traced and before anything is split. ``timeout_s``: how long a rank waits for the
    others in any collective of the plan.

    Raises:
        InvalidInputError: the plan's components are not the model's.
        UsageError: the plan asks for something this executor does not run.
    """
    traced = trace(model, example, name=plan.model_spec)
    _check(plan, traced, strategies)
    if prepare is not None:
        prepare(traced)
    context = SampleContext(seed=seed)
    make_reproducible(traced.components, context)
    boundaries = _boundaries(plan, traced)
    layouts = plan.layouts()
    groups = Groups(rank, groups_of(plan), timeout_s) if plan.num_ranks > 1 else None

    def axis_of(ranks: tuple[int, ...], purpose: Purpose = "activation") -> Axis:
        return SOLO if groups is None else groups.axis(purpose, ranks)

    crossings: list[Crossing | None] = [None]
    for b in boundaries:
        crossing = Crossing.build(b, rank, axis_of)
        crossings.append(None if crossing.silent else crossing)
    for component, assignment, layout in zip(traced.components, plan.components, layouts, strict=True):
        strategies.tensor[assignment.tensor.strategy].apply(component, axis_of(layout.tensor_group(rank)))
        if batch_norm == "exact":
            synchronise(component, axis_of(layout.data_group(rank), "gradient"))
        component.to(device)
    placed = _place(plan, traced, crossings, context, rank, strategies, axis_of)
    return ParallelModel(plan, traced, placed, crossings[-1], context, groups, rank, device)


def _place(
    plan: Plan, traced: TracedModel, crossings: list[Crossing | None], context: SampleContext, rank: int,
    strategies: Strategies, axis_of: Callable[..., Any],
) -> list[Placed]:  # fmt: skip
    layouts = plan.layouts()

    def key(i: int) -> tuple[Layout, str]:
        a: Assignment = plan.components[i]
        return layouts[i], a.data.strategy

    placed = []
    for (layout, strategy), members in groupby(range(len(layouts)), key):
        indices = list(members)
        inner = [None, *(crossings[i] for i in indices[1:])]
        segment = Segment([traced.components[i] for i in indices], inner, context)
        module = strategies.data[strategy].apply(segment, axis_of(layout.data_group(rank), "gradient"))
        side_exit = None
        if segment.side_names() or any(traced.components[i].has_sides() for i in indices):
            crossing = Crossing.build(Boundary(source=layout, target=layouts[-1]), rank, axis_of)
            side_exit = None if crossing.silent else crossing
        placed.append(Placed(module, segment, layout, crossings[indices[0]], side_exit))
    return placed
