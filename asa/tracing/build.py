""":func:`trace` turns any model into a chain of components that computes bitwise what the model computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from asa.errors import InvalidInputError
from asa.ir.graph import Component
from asa.tracing import ties
from asa.tracing.again import repeatable
from asa.tracing.blocks import Segment, attends, describe, find_blocks, within
from asa.tracing.called import UNCUT
from asa.tracing.chain import BatchDims, TracedModel, batch_dims, side_names, structure_of
from asa.tracing.component import TracedComponent, cut_out
from asa.tracing.cuts import Cut, Observation, constants, find_cuts, in_both, observe, segments
from asa.tracing.facts import measure
from asa.tracing.fingerprint import code, model_fingerprint
from asa.tracing.merge import Unit, join_shared, merge
from asa.tracing.preserve import foreign_state, mode, preserved
from asa.tracing.program import CONSTANT, Program
from asa.tracing.tracer import reason_of, trace_mode
from asa.tracing.verify import disagreement
from asa.tracing.whole import as_one_component

BATCHES = (2, 3)
"""Sizes of the batches that a trace runs. BatchNorm needs two samples, and values per sample need a difference."""

_Graphs = list[tuple[fx.Graph, tuple[str, ...]]]


def _batches(example: Tensor) -> tuple[Tensor, Tensor]:
    if example.dim() < 1 or not example.shape[0]:
        raise InvalidInputError(f"an example input needs a batch of at least 1, got shape {tuple(example.shape)}")
    data = example.detach()
    small, large = (data[torch.arange(n, device=data.device) % len(data)] for n in BATCHES)
    return small, large


def _unit_graphs(
    program: Program, cuts: list[Cut], units: list[Unit], fixed: dict[fx.Node, Any], recomputed: dict[fx.Node, Any]
) -> _Graphs:
    """One graph per unit, with the names of its side outputs."""
    nodes = segments(program, cuts)
    crossings = [c.node for c in cuts]
    names = side_names(program)
    graphs = []
    for unit in units:
        unit_nodes = [n for segment in nodes[unit.start : unit.stop] for n in segment]
        entry = crossings[unit.start - 1] if unit.start else program.placeholder
        main = crossings[unit.stop - 1] if unit.stop <= len(crossings) else program.outputs[-1]
        sides = [n for n in names if n in set(unit_nodes)]
        graphs.append((cut_out(unit_nodes, entry, [main, *sides], fixed, recomputed), tuple(names[n] for n in sides)))
    return graphs


def _targets(graph: fx.Graph) -> list[str]:
    # In the order of the graph, not of a set: hashes of strings differ between processes.
    return list(dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")))


def _parameter_ids(graph: fx.Graph, program: Program) -> set[int]:
    """Identities of the parameters that ``graph`` reads."""
    items = [program.attributes[t] for t in _targets(graph)]
    parameters = [p for t in items for p in (t.parameters() if isinstance(t, nn.Module) else [t])]
    return {id(p) for p in parameters if isinstance(p, nn.Parameter)}


def _rename_constants(train: Program, evaluate: Program) -> None:
    """Give two names to constants that the two traces created under one name but with different values."""
    for node in evaluate.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr" and target.startswith(CONSTANT):
            constant, other = evaluate.attributes[target], train.attributes.get(target)
            if other is not None and not (other.dtype == constant.dtype and torch.equal(other, constant)):
                node.target = f"{target}_in_evaluation"
                evaluate.attributes[node.target] = constant


def _one_graph(train: Program, evaluate: Program) -> tuple[Program, Program]:
    """Both programs, on one graph if the modes compute the same. This is for models without values, where only shapes
    are needed.

    Raises:
        InvalidInputError: ``forward`` creates tensors, whose values are unknown on the meta device.
    """
    created = [str(n.target) for p in (train, evaluate) for n in p.graph.nodes if str(n.target).startswith(CONSTANT)]
    if created:
        raise InvalidInputError(
            "forward creates tensors while it is traced, whose values are unknown on the meta device"
        )
    if code(train.graph) != code(evaluate.graph):
        return train, evaluate
    same = replace(train, contrary=evaluate.contrary, opaque=evaluate.opaque, checkpointed=evaluate.checkpointed)
    return train, same


def _volatile(model: nn.Module) -> set[str]:
    """Names of buffers that are not part of the saved state."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _inside(paths: frozenset[str], objects: dict[str, Any]) -> frozenset[str]:
    """Paths, out of ``paths``, that are in a component with ``objects``: called modules and everything below them."""
    called = [t for t, item in objects.items() if isinstance(item, nn.Module)]
    return frozenset(p for p in paths if any(within(p, t) for t in called))


def _joined_blocks(units: list[Unit], segments: list[Segment], blocks: list[str]) -> list[str]:
    """Sentences on units that consist of several repeated blocks."""
    notes = []
    for unit in units:
        inside = [b for b in blocks if any(s.touches(b) for s in segments[unit.start : unit.stop])]
        if len(inside) > 1:
            notes.append(f"{inside[0]} to {inside[-1]} form one component: more than one tensor passes between them")
    return notes


def _shared_buffers(components: list[TracedComponent], written: set[str]) -> tuple[frozenset[str], list[str]]:
    """(names, sentences) of buffers that several components hold: names of those that are copied to every stage, and
    sentences on the others. ``written`` are names of buffers that a run changes."""
    holders: dict[int, list[tuple[str, str]]] = {}
    common, notes = set(), []
    for component in components:
        for name, buffer in component.named_buffers():
            holders.setdefault(id(buffer), []).append((component.name, name))
            if buffer.requires_grad:
                written = written | {name}
    for several in holders.values():
        (first, name), (last, _) = several[0], several[-1]
        if len(several) < 2:
            continue
        if any(n in written for _, n in several):
            notes.append(f"{first} to {last} share the buffer {name}, which forward writes: they stay in one stage")
        elif len({n for _, n in several}) > 1:  # a checkpoint of one stage has only the first name
            notes.append(f"{first} to {last} share the buffer {name} under several names: they stay in one stage")
        else:
            common.add(name)
    return frozenset(common), notes


def _components(
    model: nn.Module, programs: tuple[Program, Program], small: Tensor, large: Tensor
) -> tuple[list[TracedComponent], list[str], BatchDims, frozenset[str]]:
    runs: list[tuple[Observation, Observation]] = []
    for program, training in zip(programs, (True, False), strict=True):
        if runs and program.graph is programs[0].graph:
            runs.append(runs[0])
            break
        with mode(model, training):
            runs.append((observe(program, small), observe(program, large)))
    recomputed = [repeatable(p, s) for p, s in zip(programs, runs, strict=True)]
    cuts = in_both(*(find_cuts(p, s, a) for p, s, a in zip(programs, runs, recomputed, strict=True)))
    nodes = [segments(p, c) for p, c in zip(programs, cuts, strict=True)]
    summaries = [describe([*a, *b], programs, cut) for a, b, cut in zip(*nodes, [*cuts[0], None], strict=True)]
    opaque = {**programs[0].opaque, **programs[1].opaque}
    notes = [f"{path} is one call: {why}" for path, why in opaque.items()]
    if programs[0].checkpointed:
        first, *more = (path or "the model" for path in programs[0].checkpointed)
        where = f"{first} and {len(more)} more" if more else first
        notes.append(f"torch.utils.checkpoint around {where} is left out: the plan chooses what is computed twice")
    blocks = find_blocks(model, summaries, set(opaque))
    units = merge(model, summaries, blocks, ("embedding", "head") if attends(model) else ("stem", "classifier"))
    notes += _joined_blocks(units, summaries, blocks)
    while True:
        modes = zip(programs, cuts, runs, recomputed, strict=True)
        graphs = [_unit_graphs(p, c, units, constants(r), nodes) for p, c, r, nodes in modes]
        objects = [
            {t: programs[1].attributes[t] for t in _targets(b)} | {t: programs[0].attributes[t] for t in _targets(a)}
            for (a, _), (b, _) in zip(*graphs, strict=True)
        ]
        tied = ties.shared(objects)
        if ties.loose(objects, tied):
            break
        pairs = zip(*graphs, strict=True)
        ids = [_parameter_ids(a, programs[0]) | _parameter_ids(b, programs[1]) for (a, _), (b, _) in pairs]
        joined = join_shared(units, ids)
        if joined == units:
            break
        notes.append(f"{len(units) - len(joined)} components were merged into others that share their parameters")
        units = joined
    volatile = _volatile(model)
    components = []
    holdings = ties.assigned(objects, tied)
    for unit, (train, train_sides), (evaluate, eval_sides), (unit_objects, borrowed), whole_of in zip(
        units, *graphs, holdings, objects, strict=True
    ):
        if code(train) == code(evaluate):
            evaluate = train
        component = TracedComponent(
            unit.name,
            train=train,
            evaluate=evaluate,
            objects=unit_objects,
            sides=(train_sides, eval_sides),
            volatile=frozenset(t for t in unit_objects if t in volatile or t.startswith(CONSTANT)),
            contrary=(_inside(programs[0].contrary, unit_objects), _inside(programs[1].contrary, unit_objects)),
            borrowed=borrowed,
        )
        component.ties = tied & ties.used(whole_of)
        entry = cuts[0][unit.start - 1].node if unit.start else programs[0].placeholder
        component.input_shape, component.input_dtype = runs[0][0].shapes[entry][1:], runs[0][0].types[entry]
        components.append(component)
    if tied:
        names = ", ".join(c.name for c in components if c.ties)
        notes.append(f"{names} share parameters: they stay in one stage, and are not split")
    common, said = _shared_buffers(components, {name for pair in runs for run in pair for name in run.written})
    dims = [batch_dims(p, a.shapes, b.shapes) for p, (a, b) in zip(programs, runs, strict=True)]
    return components, notes + said, dims[1] | dims[0], common


def _set_mode(components: list[TracedComponent], training: bool) -> None:
    for component in components:
        component.train(training)


def trace(model: nn.Module, example: Tensor, *, name: str, known_fingerprint: str = "") -> TracedModel:
    """Trace ``model`` into a chain of components.

    ``example`` is an input [batch >= 1, ...] on the model's device. Batches of two and three of its samples are run,
    and the model is left as it was. Facts and graphs hold for inputs of its shape, with any batch size. Modules that
    cannot be traced become one call. A model that cannot be traced, or whose components do not compute exactly the
    same, becomes one component. ``notes`` say why.

    ``known_fingerprint`` is the fingerprint of an earlier trace that was compared with the model. If this trace has the
    same fingerprint, comparison and measurement are left out, and ``facts`` are empty.

    Raises:
        InvalidInputError: the model does not run on ``example``, returns no tensor, or contains TorchScript.
    """
    small, large = _batches(example)
    traced: TracedModel | None = None
    except_one: set[str] | None = set()
    with preserved(model), torch.enable_grad():
        while True:
            try:
                traced, reason = _traced(name, model, small, large, known_fingerprint, except_one)
            except Exception as error:  # a model's code may raise anything on symbolic values, or in components
                reason = reason_of(error)
            if not (reason and except_one):
                break
            except_one = None  # what holds for all batches but those of one sample is not used
        if traced is None or reason:
            only, structures, dims = as_one_component(model, small, large)
            components: list[TracedComponent] = [only]
            facts = _weighed(model, components, small, large)
            traced = _chain(
                name, model, components, structures, dims, [f"the model is one component: {reason}"], small, facts
            )
    own_modules = set(model.modules())
    for component in traced.components:
        for module in set(component.modules()) - own_modules:
            module.training = model.training
    return traced


def _traced(
    name: str, model: nn.Module, small: Tensor, large: Tensor, known_fingerprint: str, except_one: set[str] | None
) -> tuple[TracedModel, str]:
    """The components of ``model``, and how they differ from it: arguments of :func:`trace`, and ``except_one`` of
    :class:`asa.tracing.shapes.Oracle`. A batch of one sample is compared, too, if an answer does not hold for it."""
    if why := getattr(model, UNCUT, ""):
        raise fx.proxy.TraceError(why)
    before = foreign_state()
    train, evaluate = (trace_mode(model, training, (small, large), except_one) for training in (True, False))
    programs = (train, evaluate)
    if foreign_state()[: len(before)] != before:  # numpy may have been imported meanwhile
        raise fx.proxy.TraceError("its forward draws from Python's or numpy's generators")
    programs = _one_graph(*programs) if small.is_meta else programs
    if not small.is_meta:
        _rename_constants(*programs)
    components, notes, dims, common = _components(model, programs, small, large)
    structures = (structure_of(programs[0]), structure_of(programs[1]))
    if known_fingerprint and known_fingerprint == model_fingerprint(model, components):
        return _chain(name, model, components, structures, dims, notes, small, [], common), ""
    facts = _weighed(model, components, small, large)
    traced = _chain(name, model, components, structures, dims, notes, small, facts, common)
    for batch in (small, small[:1]) if except_one else (small,):
        if reason := disagreement(model, traced.run, lambda t: _set_mode(components, t), batch):
            return traced, reason
    return traced, ""


def _weighed(model: nn.Module, components: list[TracedComponent], small: Tensor, large: Tensor) -> list[Component]:
    with preserved(model):
        _set_mode(components, True)
        return measure(model, components, small, large)


def _chain(
    name: str,
    model: nn.Module,
    components: list[TracedComponent],
    structures: tuple[Any, Any],
    dims: BatchDims,
    notes: list[str],
    small: Tensor,
    facts: list[Component],
    common: frozenset[str] = frozenset(),
) -> TracedModel:
    names = {n for c in components for n, _ in (*c.named_parameters(), *c.named_buffers())}
    return TracedModel(
        name=name,
        components=components,
        facts=facts,
        input_bytes_per_sample=float(small[0].numel() * small.element_size()),
        model_fingerprint=model_fingerprint(model, components),
        notes=tuple(notes),
        unused=tuple(n for n, _ in (*model.named_parameters(), *model.named_buffers()) if n not in names),
        structures=structures,
        batch_dims=dims,
        common=common,
    )
