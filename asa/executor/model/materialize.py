"""Builds one rank's part of the computation from a plan and a model.

A rank keeps the components of its stage and drops the others. Every component is split over its tensor group.
Neighbouring components of one layout become one *segment*, wrapped by their data strategy, and boundaries connect
segments. What runs is what the plan was priced for: the collectives in each strategy's ``traffic`` and in
:class:`asa.ir.layout.Boundary`, and the messages of :mod:`asa.ir.transfer`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from asa.errors import InvalidInputError, UsageError
from asa.executor.model.grouped import Grouped
from asa.executor.model.groups import Groups, Purpose, groups_of
from asa.executor.model.modes import Modes
from asa.executor.model.parallel import Links, ParallelModel, PlacedSegment, Segment
from asa.executor.model.parameter_hooks import check_hooks
from asa.executor.model.parameter_memory import check_memory
from asa.executor.model.position import Position
from asa.executor.model.template import TracedTemplate, without_weights
from asa.instruments import execution
from asa.interfaces.schedule import Action, Direction
from asa.interfaces.strategy import Strategies
from asa.ir.layout import Boundary, Layout
from asa.ir.plan import Assignment, CompressionName, DataDegree, Plan
from asa.ir.transfer import Hop, whole
from asa.schedules import schedules
from asa.sharding.collectives.axis import SOLO, Axis
from asa.sharding.collectives.boundary import Crossing
from asa.sharding.collectives.transfer import Link
from asa.sharding.gradients.lent import lend
from asa.sharding.layers.batchnorm import synchronise
from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.layers.propagate import SplitPlan
from asa.sharding.layers.recompute import recompute
from asa.sharding.layers.tensor import plan_split
from asa.sharding.randomness.drawn import keyed
from asa.sharding.randomness.generators import FOREIGN, GIVEN, OWN, drawing
from asa.sharding.randomness.samples import BySample, SampleContext
from asa.tracing import CalledModel, TracedModel, trace
from asa.tracing.component import TracedComponent
from asa.tracing.preserve import preserved

BatchNormMode = Literal["local", "exact"]

StandIn = Callable[[TracedComponent, Assignment, Axis], None]
"""Function that replaces the computation of a component, after it was split over its tensor axis."""


class _Surroundings:
    """The groups, position and settings that a rank needs while its part of the model is built."""

    def __init__(
        self, plan: Plan, rank: int, timeout_s: float, outer: Layout | None, alike: bool, processes: tuple[int, ...],
        groups: Grouped | None, isolated: bool = False,
    ) -> None:  # fmt: skip
        self.alike = alike
        self.position = Position.of(plan, rank)
        self.rank, self.processes = rank, processes
        self.groups = None if groups is None else groups.inner_groups
        if groups is None and not isolated:
            self.groups = _groups(plan, rank, timeout_s, outer, processes)
        self._across = groups
        self.outer = outer or whole(self.position.layouts[-1])

    def axis(self, positions: tuple[int, ...], purpose: Purpose = "activation") -> Axis:
        return SOLO if self.groups is None else self.groups.axis(purpose, self.position.world(positions))

    def crossing(self, boundary: Boundary) -> Crossing | None:
        built = Crossing.build(boundary, self.position.place, self.axis)
        return None if built.silent else built

    def data_axis(self, layout: Layout) -> Axis:
        return self.axis(layout.data_group(self.position.place), "gradient")

    def samples_axis(self, layout: Layout) -> Axis:
        """Axis of all ranks that hold the other samples of the whole batch, for components of ``layout``."""
        if self._across is None:
            return self.data_axis(layout)
        return self._across.all_of(self.position.world(layout.data_group(self.position.place)))

    def gradient_axis(self, layout: Layout, choice: DataDegree, compression: CompressionName) -> Axis:
        """Axis over which gradients of ``layout`` are reduced, in the form that :mod:`asa.strategies` take."""
        parts, position = None, self.position.place
        if choice.shards is not None:
            inside, across = layout.inside_group(position, choice.shards), layout.across_group(position, choice.shards)
            parts = (self.axis(inside, "gradient"), self.axis(across, "gradient"))
        return replace(self.data_axis(layout), parts=parts, compression=compression, alike=self.alike)

    def link(self, hop: Hop, purpose: Purpose) -> Link:
        assert self.groups is not None
        source, target = (hop.source, hop.source_ranks), (hop.target, hop.target_ranks)
        group = self.groups.axis(purpose, (*hop.source_ranks, *hop.target_ranks)).group
        assert group is not None
        ends = (*source, *target) if purpose == "ahead" else (*target, *source)
        return Link(*ends, rank=self.rank, group=group, processes=self.processes)


def _groups(
    plan: Plan, rank: int | None, timeout_s: float, outer: Layout | None, processes: tuple[int, ...]
) -> Groups | None:
    """The plan's process groups, constructed by every process of the run; None for a plan of one rank."""
    return Groups(rank, groups_of(plan, outer), timeout_s, processes) if plan.num_ranks > 1 else None


def _boundaries(position: Position, components: list[TracedComponent], outer: Layout | None) -> list[Boundary | None]:
    """Boundaries before each component of the stage (None before the model's first), and one after the last.

    ``outer`` is the layout of the model's input and output, if it is not that of its first and last components.
    """
    layouts = position.layouts
    into: list[dict[str, Any]] = []
    out: list[dict[str, Any]] = []
    for component, layout in zip(components, layouts, strict=True):
        split = plan_split(component, tokens=layout.sequence)[0] if layout.tensor > 1 else SplitPlan()
        into.append({"entry_partial": split.entry_partial, "entry_tokens": split.tokens})
        out.append({"exit_partial": split.exit_partial, "exit_tokens": split.exit_tokens})
    inner = [Boundary(source=a, target=b, **out[i], **into[i + 1]) for i, (a, b) in enumerate(pairwise(layouts))]
    first, last = layouts[0], layouts[-1]
    entry = None
    if position.arriving or outer is not None or first.sequence:
        entry = Boundary(source=outer or whole(first), target=first, **into[0])
    return [entry, *inner, Boundary(source=last, target=outer or whole(last), **out[-1])]


def _check(plan: Plan, traced: TracedModel, strategies: Strategies) -> None:
    names = [c.name for c in traced.components]
    planned = [c.name for c in plan.components]
    if names != planned:
        i = next((i for i, (a, b) in enumerate(zip(names, planned, strict=False)) if a != b), None)
        where = (
            f"{len(planned)} components, the model has {len(names)}"
            if i is None
            else f"{planned[i]!r} where the model has {names[i]!r}"
        )
        raise InvalidInputError(f"the plan is for another model: it has {where}; profile and plan it again")
    if plan.model_fingerprint != traced.model_fingerprint:
        raise InvalidInputError(
            f"the plan is for another model: its fingerprint is {plan.model_fingerprint or 'missing'}, this "
            f"{plan.model_spec} has {traced.model_fingerprint}; profile and plan it again"
        )
    for a in plan.components:
        if a.data.strategy not in strategies.data or a.tensor.strategy not in strategies.tensor:
            raise UsageError(f"{a.name}: this executor cannot run {a.data.strategy} + {a.tensor.strategy}")
    _check_ties(plan, traced)
    check_hooks(plan, traced)
    check_memory(plan, traced)
    if len(plan.stages) > 1:
        _check_stages(plan, traced)


def _check_ties(plan: Plan, traced: TracedModel) -> None:
    """Check that components that share a parameter run in one layout, because its gradient is one sum. The data
    strategy of the first, which holds the parameter, decides how it is kept.

    Raises:
        UsageError: they do not.
    """
    first: dict[int, int] = {}
    layouts = plan.layouts()
    for i, component in enumerate(traced.components):
        for tie in component.ties:
            j = first.setdefault(tie, i)
            a, b = plan.components[j], plan.components[i]
            if (a.stage, layouts[j]) != (b.stage, layouts[i]):
                raise UsageError(f"{a.name} and {b.name} share a parameter: they must run in one layout, in one stage")


def _check_stages(plan: Plan, traced: TracedModel) -> None:
    """Check that the model can be cut into the plan's stages.

    Raises:
        UsageError: a stage before the last has side outputs, or two stages share a parameter.
    """
    owner: dict[int, int] = {}
    for component, a in zip(traced.components, plan.components, strict=True):
        if component.has_sides() and a.stage + 1 < len(plan.stages):
            raise UsageError(
                f"{a.name} has an output of its own (an auxiliary head) in stage {a.stage} of {len(plan.stages)}: "
                "only the last stage may; plan with one stage"
            )
        for name, tensor in (*component.named_parameters(), *component.named_buffers()):
            if name not in traced.common and owner.setdefault(id(tensor), a.stage) != a.stage:
                raise UsageError(
                    f"{name} is shared by stages {owner[id(tensor)]} and {a.stage}: components that share parameters "
                    "must be in one stage"
                )


def _orders(plan: Plan, strategies: Strategies, stage: int) -> dict[int, tuple[Action, ...]]:
    """Actions of the stage in one step, by number of microbatches. A short last batch may fill fewer microbatches than
    the plan's.

    Raises:
        InvalidInputError: the schedule is unknown.
        UsageError: it refuses this number of stages or microbatches.
    """
    count = range(1, plan.num_microbatches + 1)
    if len(plan.stages) == 1:
        both: tuple[Direction, ...] = ("forward", "backward")
        return {m: tuple(Action(direction=d, microbatch=k) for k in range(m) for d in both) for m in count}
    available = {**schedules(), **strategies.schedules}
    schedule = available.get(plan.schedule)
    if schedule is None:
        raise InvalidInputError(
            f"the plan has {len(plan.stages)} stages and schedule {plan.schedule!r}; this executor runs "
            f"{', '.join(sorted(available))}"
        )
    refusal = schedule.refusal(len(plan.stages), plan.num_microbatches)
    if refusal:
        raise UsageError(refusal)
    return {m: schedule.order(stage, len(plan.stages), m) for m in count}


def materialize(
    plan: Plan,
    model: nn.Module | TracedModel | TracedTemplate,
    example: Tensor,
    *,
    rank: int,
    strategies: Strategies,
    device: torch.device,
    seed: int = 0,
    batch_norm: BatchNormMode = "local",
    keep_template: bool = False,
    prepare: Callable[[TracedModel], None] | None = None,
    stand_in: StandIn | None = None,
    timeout_s: float = 600.0,
    outer: Layout | None = None,
    alike: bool = False,
    processes: tuple[int, ...] | None = None,
    keyed_draws: bool = False,
    runs_discipline: bool = False,
    isolated: bool = False,
) -> ParallelModel:
    """Build the part of ``model`` that process ``rank`` of the run computes under ``plan`` (collective).

    All processes call it with equal weights, also those that run no rank of the plan. The model's own modules are used,
    and those of other stages lose their weights. A traced model is not traced again. The weights of a template are
    uninitialized until the caller loads all of them.

    Arguments:
        example: any batch that the model accepts; two samples are enough.
        keep_template: whether to keep :attr:`ParallelModel.template`, if the model can be copied.
        prepare: called after tracing and before anything is split.
        stand_in: called for every component of the rank's stage.
        timeout_s: seconds for which a rank waits for the others in any collective of the plan.
        outer: layout in which ranks pass their input rows and get their outputs, in a plan of one stage; None for that
            of the plan.
        alike: whether the ranks' weights are known to be equal, so that none are sent before the first step.
        processes: ``processes[i]`` runs rank i; process i if None.
        keyed_draws: whether random numbers drawn by the model's own code become a function of seed, step and sample.
            ``example`` is run once more for that.
        runs_discipline: whether the caller implements the plan's consistency discipline, if it has one.
        isolated: whether this process is in no process group with the others. It never meets them in a collective of
            the model, and they do not call this.

    Raises:
        InvalidInputError: the plan's components are not the model's.
        UsageError: the plan needs something that this executor does not run.
    """
    if plan.consistency is not None and not runs_discipline:
        raise UsageError(
            f"the plan's workers train under {plan.consistency}, which only `asa train`, `asa verify`, "
            "`asa bench` and asa.Job run; use one of those, or plan with other strategies"
        )
    grouped = None
    if plan.groups > 1:
        plan, grouped = plan.of_group(), Grouped(plan, rank, timeout_s)
        processes = grouped.processes
    source = _Source.of(plan, model, example, keep_template=keep_template)
    _check(plan, source.traced, strategies)
    if outer is not None and outer.weights != (plan.stages[0].weights or ()):
        raise UsageError(
            f"the plan divides batches among its ranks in proportion {list(plan.stages[0].weights or ())}, but a loop "
            "of your own gives each rank the same number; use asa.Job, or plan with equal batches"
        )
    runs = tuple(range(plan.num_ranks)) if processes is None else processes
    if prepare is not None and rank in runs:
        prepare(source.traced)
    context = SampleContext(seed=seed)
    if keyed_draws and isinstance(model, nn.Module) and (rank in runs or source.template is not None):
        source.test(model, example, context)
    began = time.perf_counter()
    if rank not in runs:
        groups = None if isolated else _groups(plan, None, timeout_s, outer, runs)
        idle = _idle(plan, source.traced, groups, runs, device)
        return source.passed_on(idle, time.perf_counter() - began)
    own_rank = runs.index(rank)
    position = Position.of(plan, own_rank)
    order = _orders(plan, strategies, position.stage)
    alike = alike or isinstance(model, TracedTemplate)  # its weights are loaded later, on all ranks
    surroundings = _Surroundings(plan, own_rank, timeout_s, outer, alike, runs, grouped, isolated)
    links = _links(surroundings, source.traced)
    traced, elsewhere = _components_of_stage(source.traced, position)
    if not source.reproducible:
        make_reproducible(traced.components, context)
    crossings = [
        None if b is None else surroundings.crossing(b) for b in _boundaries(position, traced.components, outer)
    ]
    assignments = position.assignments(plan)
    for component, assignment, layout in zip(traced.components, assignments, position.layouts, strict=True):
        tensor_axis = surroundings.axis(layout.tensor_group(position.place))
        strategies.tensor[assignment.tensor.strategy].apply(component, tensor_axis)
        if batch_norm == "exact":
            synchronise(component, surroundings.samples_axis(layout))
        if stand_in is not None:
            stand_in(component, assignment, tensor_axis)
        if component.name in source.drawing:
            keyed(component, context, foreign=FOREIGN in source.drawing[component.name])
        if assignment.checkpoint:
            if GIVEN in source.drawing.get(component.name, ()):
                raise UsageError(
                    f"{component.name} draws from a generator that the program made, and would draw other numbers when "
                    "it is computed again in backward: plan without checkpoints, or draw from torch's own generator"
                )
            recompute(component, context)
        component.to(device)
        component.cache_lookups(now=plan.compiled != "none")
    _share_common(traced)
    execution.require(device, plan.compiled)
    execution.configure_kernels(device, plan.precision)
    whole = (
        plan.compiled == "whole" and plan.num_ranks == 1
        and not (isinstance(traced.components[0], CalledModel) or any(a.checkpoint for a in assignments))
    )  # fmt: skip
    if not whole:
        execution.apply(traced.components, plan.compiled, eager=BySample)
    segments = _wrap_segments(plan, traced, crossings, context, strategies, surroundings)
    for component in traced.components:
        if component.ties:
            lend(component)
    for placed in segments if whole else ():
        placed.segment.compile_as_one(BySample)
    parallel = ParallelModel(
        plan, traced, segments, crossings[-1], context, surroundings.groups, runs, device,
        position=position, links=links, order=order, elsewhere=elsewhere,
    )  # fmt: skip
    parallel.grouped = grouped
    source.modes.restore(parallel.components)
    source.modes.check(parallel.components)
    return source.passed_on(parallel, time.perf_counter() - began)


@dataclass
class _Source:
    """A traced model, and what is known of the model's own code.

    Attributes:
        drawing, changed: as in :class:`asa.executor.model.template.TracedTemplate`.
        reproducible: whether the random numbers of its layers follow the context already.
        copy_s: seconds that a copy of the template takes.
    """

    traced: TracedModel
    modes: Modes
    template: TracedTemplate | None = None
    drawing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    changed: Mapping[str, torch.dtype] = field(default_factory=dict)
    reproducible: bool = False
    copy_s: float = 0.0

    @classmethod
    def of(
        cls, plan: Plan, model: nn.Module | TracedModel | TracedTemplate, example: Tensor, *, keep_template: bool
    ) -> _Source:
        """The model, traced if it is not yet, with a template of it if one is to be kept and it can be copied."""
        if isinstance(model, TracedTemplate):
            return cls(model.copy(), model.modes, model, model.drawing, model.changed)
        if isinstance(model, TracedModel):
            source = cls(model, Modes())
        else:
            modes = Modes.of(model)
            # A profile that was measured compared the trace with the model; an estimate did not.
            known_fingerprint = plan.model_fingerprint if plan.origin == "measured" else ""
            traced = trace(model, example, name=plan.model_spec, known_fingerprint=known_fingerprint)
            source = cls(traced, modes)
        if keep_template:
            began = time.perf_counter()
            with contextlib.suppress(Exception):  # a module may raise anything when it is copied
                source.template = TracedTemplate(traced=without_weights(source.traced), modes=source.modes)
            source.copy_s = time.perf_counter() - began
        return source

    def test(self, model: nn.Module, example: Tensor, context: SampleContext) -> None:
        """Run ``example`` to find out which components draw random numbers, and which buffers training changes."""
        make_reproducible(self.traced.components, context)
        self.drawing, self.changed = _test_run(model, self.traced, example, context)
        self.reproducible = True
        if self.template is not None:
            self.template = replace(self.template, drawing=self.drawing, changed=self.changed)

    @property
    def keyed(self) -> tuple[str, ...]:
        """Names of the components that draw other random numbers than one device."""
        return tuple(name for name, operators in self.drawing.items() if {*operators} - {GIVEN, OWN})

    def passed_on(self, parallel: ParallelModel, build_s: float) -> ParallelModel:
        """``parallel``, which took ``build_s`` seconds to build, with what is known of the model."""
        parallel.modes, parallel.changed, parallel.drawing = self.modes, self.changed, self.keyed
        parallel.draws_by_share = tuple(name for name, operators in self.drawing.items() if OWN in operators)
        parallel.template = self.template
        parallel.from_template_s = None if self.template is None else self.copy_s + build_s
        return parallel


def _idle(
    plan: Plan, traced: TracedModel, groups: Groups | None, processes: tuple[int, ...], device: torch.device
) -> ParallelModel:
    """The model of a process that runs no rank of ``plan``: it has no components."""
    position = Position.nowhere()
    order: dict[int, tuple[Action, ...]] = dict.fromkeys(range(1, plan.num_microbatches + 1), ())
    traced, elsewhere = _components_of_stage(traced, position)
    return ParallelModel(
        plan, traced, [], None, SampleContext(), groups, processes, device,
        position=position, links=Links(), order=order, elsewhere=elsewhere,
    )  # fmt: skip


def _test_run(
    model: nn.Module, traced: TracedModel, example: Tensor, context: SampleContext
) -> tuple[dict[str, tuple[str, ...]], dict[str, torch.dtype]]:
    """(drawing, changed) from a run of two samples of ``example``: the components that draw random numbers in training,
    with the functions that they use, and the buffers that training changes, with their types."""
    if example.is_meta or any(p.is_meta for p in model.parameters()):
        return {}, {}
    batch = example[torch.arange(2, device=example.device) % len(example)]
    context.samples, context.total, context.rows = torch.arange(2), 2, slice(0, 2)
    with preserved(model):
        for component in traced.components:
            component.train()
        norms = {id(b) for m in model.modules() if isinstance(m, _BatchNorm) for b in m.buffers(recurse=False)}
        before = {name: (b, b._version) for name, b in model.named_buffers() if id(b) not in norms}
        draws = drawing(traced.components, batch)
        now = dict(model.named_buffers())
        changed = (n for n, (b, version) in before.items() if now.get(n) is not b or b._version != version)
        return draws, {n: before[n][0].dtype for n in changed}


def _components_of_stage(traced: TracedModel, position: Position) -> tuple[TracedModel, frozenset[str]]:
    """The components of the rank's stage, and the names of the tensors of other stages, whose memory is freed."""
    elsewhere: set[str] = set()
    components = traced.components[position.components.start : position.components.stop]
    kept = {m for component in components for m in component.modules()}
    for i, component in enumerate(traced.components):
        if i not in position.components:
            elsewhere |= {n for n, _ in (*component.named_parameters(), *component.named_buffers())}
            if kept.isdisjoint(component.modules()):
                component.to("meta")
                continue
            for module in component.modules():
                if module not in kept:  # a module that only computes from a common buffer is in several components
                    module._apply(lambda t: t.to("meta"), recurse=False)
    own = {n for component in components for n, _ in (*component.named_parameters(), *component.named_buffers())}
    return replace(traced, components=components), frozenset(elsewhere - own)


def _share_common(traced: TracedModel) -> None:
    """Let all components refer to one copy of each common buffer again; each had converted its own."""
    copies: dict[str, Tensor] = {}
    for component in traced.components:
        for name, buffer in component.named_buffers():
            if name in traced.common:
                path, _, leaf = name.rpartition(".")
                component.get_submodule(path)._buffers[leaf] = copies.setdefault(name, buffer)


def _links(surroundings: _Surroundings, traced: TracedModel) -> Links:
    position = surroundings.position

    def trained(until: int) -> bool:
        return any(p.requires_grad for c in traced.components[:until] for p in c.parameters())

    before, behind = position.arriving, position.leaving
    return Links(
        arriving=surroundings.link(before, "ahead") if before else None,
        leaving=surroundings.link(behind, "ahead") if behind else None,
        gradient_out=surroundings.link(before, "back") if before and trained(position.components.start) else None,
        gradient_in=surroundings.link(behind, "back") if behind and trained(position.components.stop) else None,
        input_shape=traced.components[position.components.start].input_shape,
    )


def _wrap_segments(
    plan: Plan, traced: TracedModel, crossings: list[Crossing | None], context: SampleContext, strategies: Strategies,
    surroundings: _Surroundings,
) -> list[PlacedSegment]:  # fmt: skip
    layouts, assignments = surroundings.position.layouts, surroundings.position.assignments(plan)

    def key(i: int) -> tuple[Layout, DataDegree]:
        return layouts[i], assignments[i].data

    wrapped = []
    for (layout, choice), members in groupby(range(len(layouts)), key):
        indices = list(members)
        inner = [None, *(crossings[i] for i in indices[1:])]
        segment = Segment([traced.components[i] for i in indices], inner, context)
        page = strategies.data[choice.strategy].of(choice)
        module = page.apply(segment, surroundings.gradient_axis(layout, choice, plan.compression))
        side_exit = None
        if segment.side_names() or any(traced.components[i].has_sides() for i in indices):
            side_exit = surroundings.crossing(
                Boundary(source=replace(layout, sequence=False), target=surroundings.outer)
            )
        wrapped.append(PlacedSegment(module, segment, layout, crossings[indices[0]], side_exit))
    return wrapped
