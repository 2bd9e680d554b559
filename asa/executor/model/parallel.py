"""One rank's part of a model under a plan: segments connected by boundaries, stages connected by links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asa.executor.model.grouped import Grouped
from asa.executor.model.groups import Groups, Purpose, all_ranks
from asa.executor.model.modes import Modes
from asa.executor.model.position import Position
from asa.executor.model.reduction import Reduction
from asa.executor.model.template import TracedTemplate
from asa.instruments.execution import as_one, begin_step, laid_out
from asa.interfaces.schedule import Action
from asa.ir.layout import Layout
from asa.ir.plan import Plan
from asa.sharding.collectives.axis import SOLO, Axis
from asa.sharding.collectives.boundary import Crossing
from asa.sharding.collectives.means import mean
from asa.sharding.collectives.transfer import Link
from asa.sharding.gradients.neighbours import Neighbours, acquaint
from asa.sharding.gradients.updates import shared_update
from asa.sharding.randomness.drawn import seeded
from asa.sharding.randomness.samples import SampleContext, named
from asa.tracing import CalledModel, TracedModel
from asa.tracing.component import TracedComponent
from asa.tracing.preserve import foreign_state
from asa.zoo.data import draws

_LOOKS, _MODEL_DRAWS = 2, named("model draws")
"""Number of steps in which a model that is called as a whole is checked for random numbers, and the key of these
numbers."""


def _nobody(_what: str, *, within_s: float) -> None:
    """Do nothing. This is the barrier for ranks that always arrive, because they run asa's own code."""


class Segment(nn.Module):
    """Consecutive components of one layout and data strategy, with the boundaries between them."""

    def __init__(self, components: list[TracedComponent], crossings: list[Crossing | None], context: SampleContext):
        super().__init__()
        self.components = nn.ModuleList(components)
        self._traced = components
        self.crossings = crossings
        self.context = context
        self.neighbours = Neighbours()
        self._as_one: Callable[[Tensor], tuple[Tensor, ...]] | None = None

    def compile_as_one(self, eager: type[nn.Module]) -> None:
        """Compile all components, with no boundaries between them, as one function. Steps in which components have
        hooks run without it."""

        def straight(x: Tensor) -> tuple[Tensor, ...]:
            sides: list[Tensor] = []
            for component in self._traced:
                x, *more = component(x)
                sides += more
            return (x, *sides)

        self._as_one = as_one(straight, self._traced, eager=eager)

    def side_names(self) -> list[str]:
        """Names of the side outputs, in the order ``forward`` returns them."""
        return [name for c in self._traced for name in c.side_outputs()]

    def forward(self, *args: Any, **options: Any) -> Any:
        """Outputs for this rank's rows (main, then side outputs), from one tensor. For a model that is called as a
        whole, its own output."""
        if isinstance(self._traced[0], CalledModel):
            return self._traced[0](*args, **options)
        (x,) = args
        if self._as_one is not None and not any(c._forward_pre_hooks for c in self._traced):
            return self._as_one(x)
        return self._chained(x)

    def _chained(self, x: Tensor) -> tuple[Tensor, ...]:
        sides: list[Tensor] = []
        first, last = self._traced[0], self._traced[-1]
        for crossing, component in zip(self.crossings, self._traced, strict=True):
            if crossing is not None:
                x = crossing(x, self.context.total)
            if component is last:
                self.neighbours.before_last()
            x, *more = component(x)
            if component is first:
                self.neighbours.behind_first(x)
            if more:
                sides += more
        return (x, *sides)


@dataclass(frozen=True)
class PlacedSegment:
    """A segment with its layout, the crossing by which data enters it, and the crossing that converts side outputs to
    the last layout."""

    module: nn.Module
    segment: Segment
    layout: Layout
    entry: Crossing | None
    side_exit: Crossing | None


@dataclass(frozen=True, kw_only=True)
class Links:
    """A rank's links to the stages before and after its own; None where there is no stage.

    ``input_shape`` is the shape of one incoming sample. Gradients are sent back if anything in an earlier stage is
    trained.
    """

    arriving: Link | None = None
    leaving: Link | None = None
    gradient_out: Link | None = None
    gradient_in: Link | None = None
    input_shape: tuple[int, ...] = ()

    @property
    def linked(self) -> bool:
        """Whether there is another stage on either side."""
        return self.arriving is not None or self.leaving is not None

    def finish_sends(self, keep: int = 0) -> None:
        """Wait until at most ``keep`` microbatches are still being sent in each direction."""
        for link in (self.leaving, self.gradient_out):
            if link is not None:
                link.finish_sends(keep)


class ParallelModel:
    """One rank's part of a model under a plan. Methods that are collective say so.

    A process that runs no rank has a model without components. It computes nothing in a step, but takes part in
    collectives of the whole run.

    Attributes:
        components, layouts: those of the rank's own stage.
        elsewhere: names of the parameters and buffers that other stages hold.
        order: this rank's actions in a step.
        owner: index in the data group of the rank that updates a parameter, where updates are divided.
        processes: the processes of the run that run the ranks of the plan.
    """

    def __init__(
        self, plan: Plan, traced: TracedModel, segments: list[PlacedSegment], last: Crossing | None,
        context: SampleContext, groups: Groups | None, processes: tuple[int, ...], device: torch.device, *,
        position: Position, links: Links, order: dict[int, tuple[Action, ...]], elsewhere: frozenset[str],
    ) -> None:  # fmt: skip
        self.plan, self.processes, self.device = plan, processes, device
        self.grouped: Grouped | None = None
        """The other groups of the run, if each runs this plan on its share of the batch."""
        self.traced, self.context = traced, context
        self.position, self.links, self.elsewhere = position, links, elsewhere
        self.layouts = position.layouts
        self._segments, self._last, self._groups, self._order = segments, last, groups, order
        modules = [p.module for p in segments]
        self.reduction = Reduction(modules)
        self._updates = [u for u in map(shared_update, modules) if u is not None]
        self.owner = {p: i for u in self._updates for p, i in zip(u.parameters, u.owner, strict=True)}
        self.training = True
        self.modes = Modes()
        self.changed: Mapping[str, torch.dtype] = {}
        """Names of buffers, other than BatchNorm's, that a forward in training changes."""
        self.drawing: tuple[str, ...] = ()
        """Names of components that draw random numbers in code of their own."""
        self.draws_by_share: tuple[str, ...] = ()
        """Names of components with generators of Python's or numpy's, which draw for this rank's samples."""
        self.template: TracedTemplate | None = None
        """The model without weights, from which it can be built again under another plan."""
        self.from_template_s: float | None = None
        """Seconds that building this part again from the template takes; None without one."""
        self.meet: Callable[..., None] = _nobody
        self.updating: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context around the exchange of updates."""
        self.needs = 1
        """Number of samples of a microbatch that every rank needs at least, if the batch has that many; equal on all
        ranks."""
        self.draws = False
        """Whether random numbers were observed in training, for a model that is called as a whole."""
        self._rows: dict[int, list[slice]] = {}
        self._shapes = [{b.shape for b in c.buffers()} for c in self.components]
        if device.type == "cuda":  # on other devices FSDP gathers synchronously
            self.gather_across()

    @property
    def whole_plan(self) -> Plan:
        """The plan of the whole run: that of all groups, if there are several."""
        return self.plan if self.grouped is None else self.grouped.plan

    @property
    def all_processes(self) -> tuple[int, ...]:
        """The processes of the whole run, of all groups in order."""
        return self.processes if self.grouped is None else self.grouped.all_processes

    @property
    def components(self) -> list[TracedComponent]:
        """The components of this rank's stage, as this rank holds them."""
        return self.traced.components

    def axis(self, purpose: Purpose, positions: tuple[int, ...]) -> Axis:
        """This rank's axis among the ranks at ``positions`` of its stage."""
        return SOLO if self._groups is None else self._groups.axis(purpose, self.position.world(positions))

    @property
    def state_axis(self) -> Axis | None:
        """Axis of all ranks of the plan, on the host; None if every rank has the whole optimizer state and all
        weights."""
        if self.idle or self._groups is None or (len(self.plan.stages) == 1 and not self._updates):
            return None
        return self._groups.axis("state", all_ranks(self.plan))

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """The plan's own group of all processes, on the host; None if not each of them runs a rank of the plan."""
        all_run = self._groups is not None and len(self.processes) == dist.get_world_size()
        return self._groups.axis("state", all_ranks(self.plan)).group if self._groups is not None and all_run else None

    @property
    def tensor_axes(self) -> list[Axis]:
        """The tensor axis of every component."""
        return [self.axis("activation", layout.tensor_group(self.position.place)) for layout in self.layouts]

    def parameters(self) -> list[nn.Parameter]:
        """This rank's shards, in component order, each once."""
        return list(dict.fromkeys(p for c in self.components for p in c.parameters()))

    @property
    def updated(self) -> list[nn.Parameter]:
        """The parameters that this rank's optimizer updates."""
        others = {p for u in self._updates for p in u.others}
        return [p for p in self.parameters() if p not in others]

    @property
    def offloaded(self) -> set[nn.Parameter]:
        """Parameters whose optimizer state is on the host."""
        parts = zip(self.components, self.position.assignments(self.plan), strict=True)
        return {p for component, a in parts if a.offload for p in component.parameters()}

    def share_updates(self) -> None:
        """Broadcast what each rank has updated to the other ranks that hold it; call after every optimizer step
        (collective)."""
        with self.updating():
            for update in self._updates:
                update.publish()

    def zero_grad(self) -> None:
        """Set all gradients to None, also those of parameters that other ranks update."""
        for p in self.parameters():
            p.grad = None

    def train(self, mode: bool = True, *, all_alike: bool = False) -> None:
        """Set training or evaluation mode. In training, modules that were in evaluation mode when the model was passed
        stay there, unless ``all_alike``, which is what a program's own ``train()`` means."""
        self.training = mode
        self.reduction.release()
        for segment in self._segments:
            segment.module.train(mode)
        if mode and not all_alike:
            self.modes.restore(self.components)

    def follow(self, mode: bool) -> None:
        """Take over a mode that was set module by module (``module.training = mode``)."""
        self.training = mode
        self.reduction.release()
        for segment in self._segments:
            segment.module.training = mode

    def eval(self) -> None:
        """Set evaluation mode."""
        self.train(False)

    @property
    def rank(self) -> int | None:
        """The rank of the plan that this process runs; None if it runs none."""
        return None if self.idle else self.position.ranks[self.position.place]

    @property
    def idle(self) -> bool:
        """Whether this process runs no rank of the plan."""
        return self.position.idle

    @property
    def reads(self) -> bool:
        """Whether this rank's stage is the first, which reads the data."""
        return self.position.arriving is None and not self.idle

    @property
    def concludes(self) -> bool:
        """Whether this rank's stage is the last, which has the outputs, labels and loss."""
        return self.position.leaving is None and not self.idle

    def order(self, microbatches: int) -> tuple[Action, ...]:
        """This rank's actions in a step of ``microbatches`` microbatches."""
        return self._order[microbatches]

    def input_rows(self, batch: int) -> tuple[int, int]:
        """Start and stop of the rows of a batch that this rank reads; none after the first stage."""
        return self.layouts[0].rows_of(batch, self.position.place) if self.reads else (0, 0)

    def output_rows(self, batch: int) -> tuple[int, int]:
        """Start and stop of the rows of a batch whose outputs this rank gets; none before the last stage."""
        return self.layouts[-1].rows_of(batch, self.position.place) if self.concludes else (0, 0)

    def counts_rows(self) -> bool:
        """Whether this rank counts its output rows; exactly one of the ranks with the same output rows does."""
        return self.concludes and self.position.place % self.layouts[-1].inner == 0

    def loss_scale(self, batch: int) -> float:
        """Factor on the mean loss over :meth:`output_rows`; 1 if all data shards are equal."""
        if self.idle:
            return 0.0
        start, stop = self.output_rows(batch)
        return (stop - start) * self.layouts[-1].data / batch

    def _rows_of(self, total: int) -> list[slice]:
        """This rank's rows, in every segment, of a microbatch of ``total`` samples. Cached, because every step needs
        the same few."""
        if total not in self._rows:
            self._rows[total] = [slice(*p.layout.rows_of(total, self.position.place)) for p in self._segments]
        return self._rows[total]

    def compute(self, value: Any, samples: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """(main, sides): run the stage from its input to its output; returns the main value and the side outputs.

        ``value`` is this rank's rows of the microbatch ``samples`` (global indices, int64). For a model that is called
        as a whole, it is the positional and keyword arguments, and the main value is what the model returns.
        """
        context, total = self.context, len(samples)
        if self.called:
            args, options = value
            return self.call(samples[slice(*self.output_rows(total))], step, total, *args, **options), {}
        context.step, context.total = step, total
        context.start = int(samples[0]) if total and samples.device.type == "cpu" else 0
        if self.training:
            self.reduction.begin()
        if self.reads:
            value = laid_out(value, self.plan.memory_format)
        sides: dict[str, Tensor] = {}
        for part, rows in zip(self._segments, self._rows_of(total), strict=True):
            if part.entry is not None:
                value = part.entry(value, total)
            context.samples, context.rows = samples[rows], rows
            value, *extra = part.module(value)
            if extra:
                for name, side in zip(part.segment.side_names(), extra, strict=True):
                    sides[name] = self._converted(part.side_exit, side, total, name)
        if self.concludes:
            return self._converted(self._last, value, total, ""), sides
        return value if self._last is None else self._last(value, total), sides

    @property
    def called(self) -> bool:
        """Whether the model is one component whose own ``forward`` is called (:meth:`call`)."""
        return bool(self.components) and isinstance(self.components[0], CalledModel)

    def call(self, samples: Tensor, step: int, total: int, *args: Any, **options: Any) -> Any:
        """Output for this rank's rows of a model that is called as a whole.

        ``samples`` are global indices (int64) of the rows. ``total`` is the number of rows on all ranks.
        """
        self.context.step, self.context.total, self.context.samples = step, total, samples
        if not self.training:
            return self._segments[0].module(*args, **options)
        self.reduction.begin()
        # Random numbers drawn by the model's own code are seeded by the rank's first sample and the step.
        first = int(samples[0]) if len(samples) and samples.device.type == "cpu" else 0
        with seeded(draws.key(self.context.seed, step, first, _MODEL_DRAWS), foreign=True):
            before = (bytes(torch.get_rng_state().numpy()), foreign_state()) if step < _LOOKS else None
            output = self._segments[0].module(*args, **options)
            if before is not None and before != (bytes(torch.get_rng_state().numpy()), foreign_state()):
                self.draws = True
        return output

    def _converted(self, crossing: Crossing | None, output: Tensor, total: int, name: str) -> Tensor:
        """An output of the model, converted to the layout in which outputs are returned."""
        return output if crossing is None else crossing.leave(output, total, self.traced.batch_dims.get(name, 0))

    def left(self, value: Tensor, total: int) -> Tensor:
        """``value``, which a call with ``total`` samples left in an attribute of the model, in the layout in which
        outputs are returned: a mean over samples, or a row for each."""
        rows = value.shape[:1] == (total,)
        if self.called or self._last is None or (value.dim() and not rows):
            return value
        return self._last.leave(value, total, 0 if rows else None)

    def forward(self, x: Any, samples: Tensor, step: int) -> Any:
        """The model's own output for :meth:`output_rows` of the microbatch ``samples``; None before the last stage.

        ``x`` are :meth:`input_rows` of the microbatch; ignored after the first stage. Nothing is kept between stages
        for a backward pass: a step with gradients is :func:`asa.executor.model.step.played`.
        """
        if self.idle:
            return None
        links, total = self.links, len(samples)
        if begin_step():
            links.finish_sends()  # what is still being sent would be overwritten
        value = x
        if links.arriving is not None:
            dtype = links.arriving.hear_dtype(self.training, self.device)
            value = links.arriving.receive(total, links.input_shape, dtype, self.device).wait()
        assert value is not None
        value, sides = self.compute(value, samples, step)
        if links.leaving is None:
            return self.traced.assemble(value, sides)
        links.leaving.tell_dtype(self.training, value.dtype, self.device)
        links.leaving.send(value, total)
        links.finish_sends(keep=2)
        return None

    __call__ = forward

    def gather_across(self) -> None:
        """Make each segment start gathering the weights of the next one, as components do inside a segment."""
        segments = [p.segment for p in self._segments]
        acquaint(segments, [s.neighbours for s in segments])

    @property
    def sharded(self) -> list[FSDPModule]:
        """FSDP modules: the units whose weights are gathered and whose gradients are reduce-scattered."""
        return [m for p in self._segments for m in p.module.modules() if isinstance(m, FSDPModule)]

    def buckets(self) -> list[Tensor]:
        """Memory of communication buckets, which outlives the step and of which gradients are views; empty before the
        first reduction."""
        return self.reduction.buckets()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which gradients are not reduced: every rank keeps its own."""
        self.reduction.quiet = True
        try:
            yield
        finally:
            self.reduction.quiet = False

    def average_buffers(self) -> None:
        """Average running statistics over each data group, weighted by the ranks' shares of the samples (collective).
        What is equal on all ranks does not change.

        A buffer whose shape has changed, such as a state with one row for each sample, stays this rank's own.
        """
        for component, layout, shapes in zip(self.components, self.layouts, self._shapes, strict=True):
            buffers = ((n, b) for n, b in component.named_buffers() if n not in self.traced.common)
            floats = [b for _, b in buffers if b.is_floating_point()]
            axis = self.axis("gradient", layout.data_group(self.position.place))
            if axis.group is None or not floats:
                continue
            same_shape = torch.tensor([float(b.shape in shapes) for b in floats], device=self.device)
            dist.all_reduce(same_shape, op=dist.ReduceOp.MIN, group=axis.group)
            floats = [b for b, same in zip(floats, same_shape.tolist(), strict=True) if same]
            if not floats:
                continue
            share = layout.share(layout.data_index(self.position.place)) * axis.size if layout.weights else 1.0
            flat = mean(torch.cat([b.reshape(-1) for b in floats]), group=axis.group, ranks=axis.size, weight=share)
            for buffer, part in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
                buffer.copy_(part.view_as(buffer))

    def close(self) -> None:
        """Destroy the plan's process groups (collective)."""
        self.links.finish_sends()
        if self._groups is not None:
            self._groups.close()
        if self.grouped is not None:
            self.grouped.close()
