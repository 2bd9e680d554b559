"""Makes the profile of a model: builds, traces and measures it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from asa import __version__
from asa.errors import UnavailableError, UsageError
from asa.instruments import execution
from asa.instruments.nvml import card_of, watching
from asa.ir import codec
from asa.ir.execution import Compiled, MemoryFormat
from asa.ir.graph import LayerGraph
from asa.ir.profile import Ceilings, Precision, Profile, Provenance, Timing
from asa.ir.units import binary
from asa.launch import give_back_freed_memory, keep_freed_memory
from asa.profiler.ceilings import measure_ceilings
from asa.profiler.chain import Chain, whole_step
from asa.profiler.clock import one_thread, scaled, solo_clock_of
from asa.profiler.components import Subject, Surveyor
from asa.profiler.effort import degrees_up_to
from asa.profiler.loss import WithLoss, of_each_token
from asa.profiler.machine import choose_device, device_record, free_memory, require_precision
from asa.profiler.tokens import cut_by_tokens, token_chain
from asa.profiler.updates import measure_dispatch, measure_updates
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.describe import layer_graph
from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.layers.tensor import detached_copy, split
from asa.sharding.randomness.generators import drawing, draws_note, mixing_note
from asa.sharding.randomness.samples import BySample, SampleContext
from asa.tracing import TracedModel, trace
from asa.tracing.alike import signature, stand_ins
from asa.tracing.component import TracedComponent
from asa.zoo.inputs import Shape, example, of_tokens
from asa.zoo.models import build

Progress = Callable[[float, str], None]
"""Called as ``progress(fraction done, what is being done)``."""

_UPDATES_SHARE = 0.15
_CEILINGS_SHARE, _CEILINGS_S = 0.02, 0.25
"""Share of the time limit for each of the two ceilings, and the most seconds."""
_EXAMPLE_SAMPLES = 2
_MIXED = 1e-2
"""Relative change of an output from which on a model is said to mix samples; kernels of a GPU round in TF32."""
_BEYOND_CACHES = 2**26
"""Bytes of weights from which on a component's weights are never in a cache when it starts."""
_DISTURBED = 0.03
"""Fraction of the core's time used by others from which on a profile reports it."""


def profile_model(
    spec: str,
    *,
    input_shape: Shape,
    num_classes: int,
    global_batch: int,
    device: str = "auto",
    precision: Precision = "fp32",
    time_limit_s: float = 75.0,
    max_tensor_degree: int = 8,
    memory_format: MemoryFormat = "contiguous",
    compiled: Compiled = "none",
    progress: Progress | None = None,
) -> Profile:
    """Build the model that ``spec`` names (see :func:`asa.zoo.models.build`) and measure it.

    Args:
        input_shape: of one sample: (channels, height, width), or (tokens,).
        device: ``auto``, ``cpu`` or ``cuda``.
        time_limit_s: seconds for everything, tracing included. Three repeats of the smallest microbatch are made
            even if they take longer; what there was no time for is listed in ``skipped``.
        max_tensor_degree: the largest tensor degree for which shards are built and timed.

    Raises:
        UsageError: unknown model, impossible number.
        UnavailableError: no such device, or a precision it does not have.
    """
    started = time.perf_counter()
    chosen = choose_device(device)
    _check(global_batch, time_limit_s, max_tensor_degree)
    require_precision(chosen, precision)
    execution.require(chosen, compiled)
    _check_room(input_shape, global_batch, chosen)
    if progress is not None:
        progress(0.0, f"building {spec}")
    model = build(spec, num_classes=num_classes, input_shape=input_shape)
    return profile_module(
        model,
        example(input_shape, _EXAMPLE_SAMPLES),
        spec=spec,
        num_classes=num_classes,
        global_batch=global_batch,
        device=chosen,
        precision=precision,
        time_limit_s=max(1e-3, time_limit_s - (time.perf_counter() - started)),  # the least is measured all the same
        max_tensor_degree=max_tensor_degree,
        memory_format=memory_format,
        compiled=compiled,
        progress=progress,
    )


def profile_module(
    model: nn.Module,
    example: Tensor,
    *,
    spec: str,
    num_classes: int,
    global_batch: int,
    device: torch.device,
    precision: Precision = "fp32",
    time_limit_s: float = 75.0,
    max_tensor_degree: int = 8,
    memory_format: MemoryFormat = "contiguous",
    compiled: Compiled = "none",
    progress: Progress | None = None,
) -> Profile:
    """Measure ``model`` as it is; ``example`` is a batch of a few samples.

    The model is left on ``device`` in training mode; weights and random state are unchanged, but the running statistics
    of its normalization layers have seen random samples.
    """
    started = time.perf_counter()
    report = progress or (lambda _fraction, _what: None)
    _check(global_batch, time_limit_s, max_tensor_degree)
    clock = solo_clock_of(device)
    keep_freed_memory()  # as ranks do
    with _alone(device):
        torch.manual_seed(0)
        model.to(device).train()
        report(0.01, "tracing")
        traced = trace(model, example.to(device), name=spec)
        shape = tuple(example.shape[1:])
        graph = layer_graph(traced, model=spec, input_shape=shape, num_classes=num_classes)
        subject = _subject(model, traced, graph, example, device, precision, max_tensor_degree, memory_format)
        pair = subject.batch(_EXAMPLE_SAMPLES)
        differs = (*mixing_note(model, pair, _MIXED), *draws_note(drawing(traced.components, pair)))
        graph = replace(graph, notes=(*graph.notes, *differs))
        execution.configure_kernels(device, precision)  # not before: tracing has batches of its own
        compile_s = None
        if compiled != "none":
            report(0.03, "compiling")
            compile_s = _compiled(subject, compiled, global_batch)
        spent = time.perf_counter() - started
        surveyor = Surveyor(
            subject,
            clock,
            global_batch=global_batch,
            time_s=max(1.0, (time_limit_s - spent) * (1 - _UPDATES_SHARE)),
            free_bytes=free_memory(device),
            progress=lambda fraction, what: report(0.05 + 0.8 * fraction, what),
        )
        before = time.perf_counter(), time.process_time()
        with watching(card_of(device)) as card:
            surveyor.survey()
        lost = 1 - (time.process_time() - before[1]) / (time.perf_counter() - before[0])
        report(0.87, "optimizer steps")
        remaining_s = time_limit_s - (time.perf_counter() - started)
        modules = {
            degree: {n: c for n, c in zip(subject.names, chain.components, strict=True) if n in subject.split[degree]}
            for degree, chain in subject.chains.items()
            if degree > 0
        }
        reference = surveyor.reference
        begun = reference.now()
        updates = measure_updates(modules, device, slice_s=max(0.5, min(remaining_s, _UPDATES_SHARE * time_limit_s)))
        floor = measure_dispatch(device)
        ceilings = measure_ceilings(device, precision, slice_s=min(_CEILINGS_S, _CEILINGS_SHARE * time_limit_s))
        ended = reference.now()
        surveyor.read()
    sweep, factor = surveyor.steadied(), reference.factor(begun, ended)
    give_back_freed_memory()
    report(1.0, "done")
    note = f"{time.perf_counter() - started:.0f} s of measuring"
    others_share = round(min(lost, 1.0), 3) if device.type == "cpu" and lost > _DISTURBED else 0.0
    if others_share:
        note += f"; other processes took {others_share:.0%} of the core, not counted in the times"
    if device.type == "cuda":
        note += f"; {card.clocks}" if card.clocks else ""
        note += f"; the host took {sweep.host_share:.0%} of the device's time to launch a step at the largest batch"
    return Profile(
        model_spec=spec,
        model_fingerprint=traced.model_fingerprint,
        graph=graph,
        device=device_record(device),
        precision=precision,
        global_batch=global_batch,
        timings=_with_spared(sweep.timings, graph, ceilings if compiled == "none" else None),
        updates=tuple(
            replace(u, component=name, step=scaled(u.step, factor))
            for u in updates
            for name in (u.component, *subject.like[u.component])
        ),
        dispatch_floor_s=factor * floor,
        whole=tuple(sweep.whole),
        skipped=tuple(sweep.skipped),
        by_tokens=_with_spared(sweep.by_tokens, graph, ceilings if compiled == "none" else None) or None,
        provenance=Provenance(
            origin="measured",
            created=codec.now(),
            asa_version=__version__,
            torch_version=torch.__version__,
            note=note,
            disturbed=card.disturbed,
            others_share=others_share,
        ),
        drift=surveyor.drift,
        memory_format=memory_format,
        compiled=compiled,
        compile_s=compile_s,
        ceilings=ceilings,
    )


def _with_spared(timings: Iterable[Timing], graph: LayerGraph, ceilings: Ceilings | None) -> tuple[Timing, ...]:
    """The ``timings`` with the seconds that a second forward leaves out: those of its products at the device's peak
    rate, which are the least. Without ``ceilings`` they are unknown."""
    if ceilings is None:
        return tuple(timings)
    components = {c.name: c for c in graph.components}

    def spared(t: Timing) -> float:
        flops = t.microbatch * components[t.component].spared_flops(t.tensor_degree)
        return min(t.forward.median, flops / ceilings.flops_per_s)

    return tuple(replace(t, spared_s=spared(t)) for t in timings)


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Context in which this process computes with one thread, and after which its random state is as before."""
    with one_thread(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def slowdown(profile: Profile) -> float:
    """Time of forward and backward of the whole model now, over that in ``profile``, which is of such a device: the
    least of three, at the smallest microbatch with such a time. 1 if there is none, or the model was compiled."""
    if not profile.whole or profile.compiled != "none":
        return 1.0
    device, step = choose_device(profile.device.type), min(profile.whole, key=lambda step: step.microbatch)
    shape = profile.graph.input_shape
    clock = solo_clock_of(device)
    with _alone(device):
        model = build(profile.model_spec, num_classes=profile.graph.num_classes, input_shape=shape).to(device).train()
        x = example(shape, step.microbatch).to(device)
        if profile.memory_format == "channels_last":
            model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        execution.configure_kernels(device, profile.precision)
        times = [whole_step(model, x, clock, device, profile.precision) for _ in range(4)]
    return min(times[1:]) / step.whole.median


def _compiled(subject: Subject, compiled: Compiled, global_batch: int) -> float:
    """Compile the components and the whole model, and return the seconds this took for a step of ``global_batch``
    samples of what a plan runs of them."""
    began, x = time.perf_counter(), subject.batch(global_batch)
    for chain in subject.chains.values():
        execution.apply(chain.components, compiled, eager=BySample)
    execution.apply([subject.model], compiled, eager=BySample)  # to see the gain of compiling across components
    chain = subject.chains[1]
    if compiled == "whole":
        whole_step(subject.model, x, solo_clock_of(chain.device), chain.device, chain.precision)
    else:
        chain.step(x, lambda: None)
        chain.clear()
    return time.perf_counter() - began


def _check(global_batch: int, time_limit_s: float, max_tensor_degree: int) -> None:
    if global_batch < 1 or max_tensor_degree < 1:
        raise UsageError(f"global batch {global_batch} and tensor degree {max_tensor_degree} must be at least 1")
    if not time_limit_s > 0:
        raise UsageError(f"a time limit of {time_limit_s:g} s leaves nothing to measure in; the default is 75")


def _check_room(shape: Shape, samples: int, device: torch.device) -> None:
    """Check that the samples of a batch alone fit on the device.

    Raises:
        UnavailableError: they do not.
    """
    each = math.prod(shape) * (8 if of_tokens(shape) else 4)
    free = free_memory(device)
    if each * max(samples, _EXAMPLE_SAMPLES) > free:
        most, option = free // each, "--tokens" if of_tokens(shape) else "--input"
        remedy = f"take a --global-batch far below {most}" if most >= _EXAMPLE_SAMPLES else f"take a smaller {option}"
        raise UnavailableError(
            f"{samples} samples of {'x'.join(map(str, shape))} are {binary(each * samples)} before any of the model, "
            f"{device.type} has {binary(free)} free; {remedy}"
        )


def _subject(
    model: nn.Module,
    traced: TracedModel,
    graph: LayerGraph,
    example: Tensor,
    device: torch.device,
    precision: Precision,
    max_tensor_degree: int,
    memory_format: MemoryFormat = "contiguous",
) -> Subject:
    """The chains to measure: the traced one, and one per tensor degree t with the real shard of every split component;
    if components can split their tokens, another with those shards, under the key -t.

    The shard is the last rank's, which is never smaller than another's (see :func:`asa.ir.layout.bounds`). Components
    that a degree does not split run unsplit in its chain, so that caches are in the same state as in training.
    """
    context = SampleContext()
    make_reproducible(traced.components, context)
    limits = {c.name: c.split.max_degree for c in graph.components if c.split is not None}
    indices = _representatives(traced.components)
    chosen = sorted(set(indices))
    components = [traced.components[i] for i in chosen]
    names = tuple(c.name for c in components)
    like = {graph.components[i].name: tuple(graph.components[j].name for j, k in enumerate(indices) if k == i != j)
            for i in chosen}  # fmt: skip
    words = _words(traced, example.to(device))
    ended: Callable[[list[nn.Module]], list[nn.Module]] = (
        (lambda members: [*members[:-1], WithLoss(members[-1])]) if words else (lambda members: members)
    )
    chains = {1: Chain(ended(list(components)), device, precision)}
    halves = {1: frozenset(names)}
    few = replace(graph, components=tuple(graph.components[i] for i in chosen), uncut=None)
    for degree in degrees_up_to(max_tensor_degree, limits.values())[1:]:
        axis = Axis(size=degree, index=degree - 1)
        divided = frozenset(n for n, most in limits.items() if most >= degree)
        members: list[nn.Module] = [
            split(detached_copy(c, device), axis) if c.name in divided else c for c in components
        ]
        chains[degree] = Chain(ended(members), device, precision)
        halves[degree] = divided
        if halved := cut_by_tokens(few, degree):
            chains[-degree] = Chain(ended(token_chain(components, few, axis, device)), device, precision)
            halves[-degree] = halved
    for module in (m for chain in chains.values() for c in chain.components for m in c.modules()):
        if isinstance(module, BySample):
            module.context = context

    def batch(samples: int) -> Tensor:
        context.samples, context.total = torch.arange(samples, device=device), samples
        if example.is_floating_point():
            values = torch.randn(samples, *example.shape[1:], device=device, dtype=example.dtype)
            return execution.laid_out(values, memory_format)
        if words:
            return torch.randint(0, words, (samples, *example.shape[1:]), device=device)
        return example[:1].to(device).expand(samples, *example.shape[1:]).contiguous()

    weight = sum(p.numel() * p.element_size() for p in model.parameters())
    measured = WithLoss(model) if words else model
    return Subject(model=measured, names=names, chains=chains, split=halves, batch=batch, weight=weight, like=like)


def _representatives(components: list[TracedComponent]) -> list[int]:
    """Indices of the components whose measurements each component gets, usually its own. Of many equal components in a
    row, only a few are measured if their weights are many times larger than a cache; smaller ones would stay in it."""
    indices = stand_ins([signature(c) for c in components])
    weight_bytes = [sum(p.nbytes for p in components[i].parameters()) for i in set(indices)]
    return indices if sum(weight_bytes) > _BEYOND_CACHES else list(range(len(components)))


def _words(traced: TracedModel, x: Tensor) -> int:
    """Size of the vocabulary of a model with logits for every token; 0 for any other model."""
    if x.is_floating_point():
        return 0
    with torch.no_grad():
        output = traced.run(x[:1])
    return int(output.shape[-1]) if isinstance(output, Tensor) and of_each_token(output, x[:1]) else 0
