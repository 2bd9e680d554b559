"""Plans that need least memory; and, in numbers, why no plan fits, and the smallest change after which one would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile
from typing import Any

import numpy as np

from asa.cost.memory.peak import libraries, needed, usable
from asa.cost.planned import Price
from asa.errors import InfeasibleError
from asa.ir.codec import noun
from asa.ir.graph import Component
from asa.ir.units import GIB, MOST_SAMPLES, binary
from asa.planner import clock
from asa.planner.pipeline.staged import Skeleton, StagedSpace
from asa.planner.space import baselines
from asa.planner.space.baselines import even
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import MOST_IN_A_PIPELINE, Allowed, Space, anything, divisors
from asa.planner.stage import memory
from asa.planner.stage.formulate import formulate

_MOST_DEVICES = 64
_LOOK_S = 1.0

MOST_MEMORY = 2**20 * GIB
"""Bytes of the largest memory limit that is suggested, far more than one device has."""


def overfull(space: Space) -> bool:
    """Whether all devices together have less usable memory than one copy of the weights takes."""
    gpus = space.request.gpus
    free = sum(max(0.0, space.room(rank, 1, 1)) for rank in range(gpus))
    return free <= 0 or sum(c.parameter_bytes for c in space.profile.graph.components) > free


def hopeless(prices: Prices, allowed: Allowed = anything) -> bool:
    """Whether no plan fits even without activations: state, gradients and gathered weights alone are too much.

    A quick test: True is certain, False is not. Every component takes its least state, and one at a time takes what it
    needs to compute, in stages of every width and any split of the components over them. Gradients of those in front of
    it may not exist yet.
    """
    space, n = prices.space, len(prices.space.profile.graph)
    if overfull(space):
        return True
    least_bytes: dict[int, list[tuple[float, float, float]]] = {}
    for width in space.single_widths():
        least_bytes[width] = [_least_component_bytes(prices, i, width, allowed) for i in range(n)]
        if max(_least_peaks(least_bytes[width])) <= space.capacity(width):
            return False
    if not space.schedules or space.request.gpus < 2:
        return True
    gpus = space.request.gpus
    free = max(space.room(r, 1, gpus) for r in range(gpus))
    # fewest[i]: the fewest devices that could hold component i and all after it.
    fewest = [float("inf")] * n + [0.0]
    for i in range(n - 1, -1, -1):
        for width, rows in least_bytes.items():
            for stop, _ in enumerate(takewhile(lambda peak: peak <= free, _least_peaks(rows[i:])), i + 1):
                fewest[i] = min(fewest[i], width + fewest[stop])
    return fewest[0] > space.request.gpus


def _least_peaks(rows: Iterable[tuple[float, float, float]]) -> Iterator[float]:
    """Bytes that stages of the first component, of the first two and so on hold at least at their peak. ``rows``: see
    :func:`_least_component_bytes`."""
    state = peak = 0.0
    for own, held, working in rows:
        peak, state = max(peak + held, state + working), state + own
        yield peak


def _least_component_bytes(prices: Prices, index: int, width: int, allowed: Allowed) -> tuple[float, float, float]:
    """The least bytes of a component: of its state, of its state with gradients, and of all that it holds while it
    computes, without activations."""
    space, pricer = prices.space, prices.pricer(width, 1)
    component, optimizer = space.profile.graph.components[index], space.request.optimizer
    least = float("inf"), float("inf"), float("inf")
    for way in space.ways(index, width, 1, allowed):
        share = space.strategies.tensor[way.tensor.strategy].share(component, way.layout.tensor)
        data = space.strategies.data[way.data.strategy].of(way.data)
        memory, footprint = data.memory(share, way.layout.data, optimizer), pricer.cost(index, way).footprint
        shared = 0.0 if way.offload else memory.optimizer - data.least(share, way.layout.data, optimizer)
        state = footprint.state - shared  # what it holds if neighbours run alike
        held = state + footprint.gradients
        least = min(least[0], state), min(least[1], held), min(least[2], held + memory.transient)
    return least


def explain(
    prices: Prices, allowed: Allowed = anything, *, proved: bool = True, smallest: Leanest | None = None
) -> InfeasibleError:
    """The error to raise. It names what does not fit, and a memory, batch or number of devices with which a plan fits.

    ``proved``: the search has shown that nothing fits; otherwise its time was up before. ``smallest``: what
    :func:`leanest` returns, where it is known.
    """
    space, request = prices.space, prices.space.request
    smallest = smallest or (leanest(prices, allowed, few=True) if overfull(space) else None)
    smallest = smallest or leanest(prices, allowed)
    if smallest is None:
        return InfeasibleError(_nothing_runs(space, allowed, proved=proved))
    ranks, peak = prices.busy(smallest.candidate), smallest.price.peak
    name = space.profile.graph.components[peak.index].name
    total = min(space.cluster.memories()[:ranks]) if request.memory_bytes is None else request.memory_bytes
    options = _memory_option(_memory_for(prices, smallest.candidate))
    fewer = _smaller_batch(space)
    if fewer is not None:
        options.append(f"--global-batch {fewer}")
    more = _more_devices(space)
    if more is not None:
        options.append(f"--gpus {more}")
    held, reserved = libraries(space.cluster.device), total - usable(space.cluster.device, total, ranks)
    if total <= reserved:
        advice = f"; try {' or '.join(options)}" if options else ""
        return InfeasibleError(
            f"no plan fits: the context of the device and the allocator take {binary(reserved)} without any "
            f"model; devices have {binary(total)}{advice}"
        )
    deduction = f" (less {binary(reserved - held)} for the context and the allocator)" if reserved > 0 else ""
    advice = f"; try {' or '.join(options)}" if options else "; the model is too large for any device"
    return InfeasibleError(
        f"{'no plan fits' if proved else 'no plan was found in time'}: {name} needs {binary(peak.total + held)} in its "
        f"backward ({binary(peak.state)} state, {binary(peak.activations)} activations) in the plan "
        f"that needs least memory on up to {request.gpus} devices, {_in_words(smallest.candidate)}; devices have "
        f"{binary(total)}{deduction}{advice}"
    )


def _in_words(candidate: Candidate) -> str:
    """A plan in a few words."""
    p, m = len(candidate.widths), candidate.num_microbatches
    stages = f"one stage of {candidate.ranks}" if p == 1 else f"{p} stages of {'/'.join(map(str, candidate.widths))}"
    return f"{stages} {'rank' if stages.endswith(' 1') else 'ranks'} in {m} microbatch{'es' * (m > 1)}"


def remedy(prices: Prices, names: Sequence[str]) -> str:
    """What to try where none of the whole strategies ``names``, the only ones asked for, can run; in words."""
    space = prices.space
    sizes = [_memory_for(prices, c) for n in names for c in _uniform(n, prices)]
    options = _memory_option(min(sizes)) if sizes else []
    if not sizes:
        # Fewer devices may help: stages and splits need as many components, rows or samples as ranks.
        fewer = _first_that(range(space.request.gpus - 1, 1, -1), lambda g: _one_fits(names, _with(space, gpus=g)))
        batches = (space.request.global_batch * factor for factor in (2, 4, 8))
        batches = (b for b in batches if b <= MOST_SAMPLES)
        larger = _first_that(batches, lambda b: _one_fits(names, _with(space, global_batch=b)))
        options += [] if fewer is None else [f"--gpus {fewer}"]
        options += [] if larger is None else [f"--global-batch {larger}"]
    smallest = leanest(prices, space.pinned)
    if smallest is not None and smallest.excess <= 0:
        options.append("--strategies asa")
    return f"try {' or '.join(options)}" if options else "change --gpus, --global-batch, --memory or the pins"


def _memory_option(memory: float) -> list[str]:
    """The option that sets ``memory`` bytes as the limit; none where no device has so much."""
    return [f"--memory {memory / GIB:.3g}GiB"] if memory <= MOST_MEMORY else []


def _uniform(name: str, prices: Prices) -> Iterator[Candidate]:
    """Plans of one whole strategy for every number of microbatches that it and the pins allow. For the best uniform
    split, these are stages of all devices that split only the batch, with and without recomputation."""
    if name == baselines.BEST_AGAIN:
        plain = ("ddp", "zero1", "zero2", "fsdp") if prices.space.request.gpus > 1 else ("single",)
        yield from (c for n in plain for again in ("", baselines.AGAIN) for c in _uniform(n + again, prices))
        return
    try:
        for candidate in baselines.candidates(name, prices):
            if all(prices.space.pinned(i, way) for i, way in enumerate(candidate.ways)):
                yield candidate
    except baselines.Unavailable:
        return


def _memory_for(prices: Prices, candidate: Candidate) -> float:
    """Bytes of memory with which every device fits ``candidate``, with room for the rounding of the printed figure."""
    active = max(s.most for s in prices.of(candidate).stages)
    return needed(prices.space.cluster.device, active, prices.busy(candidate)) * 1.005


def _with(space: Space, **changes: object) -> Prices:
    request = replace(space.request, **changes)  # type: ignore[arg-type]
    return Prices(Space(space.profile, space.cluster, space.strategies, request))


def _fits(prices: Prices) -> bool:
    if hopeless(prices, prices.space.pinned):
        return False
    smallest = leanest(prices, prices.space.pinned)
    return smallest is not None and smallest.excess <= 0


def _first_that(values: Iterable[int], fits: Callable[[int], bool]) -> int | None:
    """The first of ``values`` that ``fits``; None if none is found in time."""
    ends = clock.now() + _LOOK_S
    return next((x for x in takewhile(lambda _: clock.now() < ends, values) if fits(x)), None)


def _smaller_batch(space: Space) -> int | None:
    """The largest of batch/2, batch/4, ... with which something fits; None if none is found in time."""
    batch, least = space.request.global_batch // 2, space.request.microbatches or 1
    if batch < least or hopeless(_with(space, global_batch=batch), space.pinned):
        return None  # weights and state, which no smaller batch reduces, are too large
    halves = (batch >> k for k in range(batch.bit_length()) if batch >> k >= least)
    return _first_that(halves, lambda b: _fits(_with(space, global_batch=b)))


def _one_fits(names: Sequence[str], prices: Prices) -> bool:
    return any(prices.fits(c) for n in names for c in _uniform(n, prices))


def _more_devices(space: Space) -> int | None:
    """A number of devices, more than asked for, on which something fits; the fewest if bisection ends in time."""
    most, ends = min(space.cluster.num_devices, _MOST_DEVICES), clock.now() + _LOOK_S
    low, high = space.request.gpus, min(2 * space.request.gpus, most)
    while high > low and not _fits(_with(space, gpus=high)):
        low, high = high, min(2 * high, most)
    if high <= low:
        return None
    while high - low > 1 and clock.now() < ends:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(_with(space, gpus=middle)) else (middle, high)
    return high


def _nothing_runs(space: Space, allowed: Allowed, *, proved: bool) -> str:
    """The error message where samples or pins leave a component, or all together, no way to run."""
    request, pins, m = space.request, " ".join(map(str, space.request.pins)), space.microbatches()[0]
    for i, component in enumerate(space.profile.graph.components):
        able = [w for w in space.single_widths() if any(True for _ in space.ways(i, w, m))]
        if not able:
            fewer = f" in {m} microbatches; try --microbatches {m // 2} or" if m > 1 else "; try"
            return (
                f"no plan: {component.name} needs at least 2 samples for BatchNorm, the global batch is "
                f"{request.global_batch}{fewer} --global-batch {2 * m}"
            )
        if not any(True for w in able for _ in space.ways(i, w, m, allowed)):
            why = _refusal(space, component) or (
                f"on up to {request.gpus} devices at global batch {request.global_batch} a data degree times a tensor "
                "degree divides the ranks of the stage, and every rank needs a sample"
            )
            return f"no plan: {component.name} cannot run as pinned ({pins}): {why}; change the pin or --gpus"
    return (
        f"{'no plan' if proved else 'no plan was found in time'}: no stage of up to {request.gpus} ranks suits all "
        f"pins ({pins}) at once, and no stages of fewer ranks each their own; change a pin or --gpus"
    )


def _refusal(space: Space, component: Component) -> str:
    """The reason why a component refuses what a pin names; empty if it does not."""
    pages: dict[str, Any] = {**space.strategies.data, **space.strategies.tensor}
    for pin in (p for p in space.request.pins if p.matches(component.name)):
        degree = pin.degree or (1 if pin.strategy in ("none", "replicate") else 2)
        if pin.strategy in pages and (reason := pages[pin.strategy].refusal(component, degree)):
            return str(reason)
    return ""


@noun
class Leanest:
    """A plan with a low peak of memory. ``excess``: bytes by which its peak exceeds what a rank may use."""

    candidate: Candidate
    price: Price
    excess: float


def low_peak_plans(prices: Prices, allowed: Allowed = anything, *, few: bool = False) -> Iterator[Leanest]:
    """Plans with low peaks: single stages of every width (with ``few``: of 1 rank, all ranks, and the largest power of
    two), and pipelines of every number of equal stages, cut so that state and activations are even."""
    gpus = prices.space.request.gpus
    sizes = sorted({1, gpus, 2 ** (gpus.bit_length() - 1)}) if few else prices.space.single_widths()
    for candidate in (*_leanest_stages(prices, allowed, sizes), *_leanest_pipelines(prices, allowed)):
        price = prices.of(candidate)
        yield Leanest(candidate=candidate, price=price, excess=price.peak.total - prices.capacity(candidate))


def leanest(prices: Prices, allowed: Allowed = anything, *, few: bool = False) -> Leanest | None:
    """The plan of :func:`low_peak_plans` with the least ``excess``; None where there is no plan at all."""
    return min(low_peak_plans(prices, allowed, few=few), key=lambda x: x.excess, default=None)


def _leanest_stages(prices: Prices, allowed: Allowed, sizes: Sequence[int]) -> Iterator[Candidate]:
    """Single stages with one microbatch, where gradients need not all be held at once, and with the most microbatches
    that leave each layout's ranks enough samples, where activations are smallest."""
    for width in sizes:
        counts = prices.space.microbatches()
        most = {max((m for m in counts if prices.space.enough_samples(0, d, m)), default=1) for d in divisors(width)}
        fewer = {m // 2 for m in most}  # where a later component needs two samples
        for m in sorted({counts[0], *most, *fewer} & set(counts)):
            formulation = formulate(prices, width, m, allowed, every=True)
            if formulation is None:
                continue
            solution = memory.least_memory(formulation.problem)
            if solution.choice is not None:
                yield formulation.candidate(solution.choice)


def _leanest_pipelines(prices: Prices, allowed: Allowed) -> Iterator[Candidate]:
    """Pipelines with the schedule 1f1b, which keeps the fewest microbatches in flight: with the most microbatches,
    where activations are smallest, and with the fewest, where gradients need not all be held at once."""
    space, n = prices.space, len(prices.space.profile.graph)
    if "1f1b" not in space.schedules:
        return
    staged, kinds = StagedSpace(prices, allowed, every=True), space.cluster.kinds(space.request.gpus)
    several = space.several(space.request.gpus)
    for stages in range(2, min(space.request.gpus, n) + 1):
        width = space.request.gpus // stages
        for w in sorted({next(w for w in several if w <= width), 2 ** (width.bit_length() - 1)}):
            firsts = range(0, stages * w, w)
            if not all(space.placed(a, w) and len(set(kinds[a : a + w])) == 1 for a in firsts):
                continue  # a stage of several has devices of one kind, inside a node or in whole ones
            counts = [m for m in space.microbatches() if m <= MOST_IN_A_PIPELINE]
            least = next((m for m in counts if staged.chain(w, m) is not None), None)
            many = next((m for m in reversed(counts) if staged.chain(w, m) is not None), None)
            for m in dict.fromkeys(m for m in (least, many) if m is not None):
                yield from _leanest_pipeline(space, staged, stages, w, m)


def _leanest_pipeline(space: Space, staged: StagedSpace, stages: int, width: int, m: int) -> Iterator[Candidate]:
    """The pipeline of ``stages`` even stages with ``m`` microbatches; none where the model cannot be cut like that."""
    n = len(space.profile.graph)
    chain, schedule = staged.chain(width, m), space.schedules["1f1b"]
    cuts = [i for i in range(n) if space.profile.graph.cuttable(i)]
    if chain is None or len(cuts) < stages:
        return
    flights = [schedule.in_flight(s, stages, m) for s in range(stages)]
    held = [[0.0, *accumulate(min(c.state + f * c.activations for c in row) for row in chain.configs)] for f in flights]
    starts = tuple(cuts[k] for k in even([np.array(sums)[[*cuts, n]] for sums in held]))
    choices = []
    for s, (start, stop) in enumerate(pairwise((*starts, n))):
        choices.append(memory.least_memory(chain.stage(start, stop, flights[s])).choice)
    fitting = tuple(c for c in choices if c is not None)
    if len(fitting) == stages:
        yield staged.candidate(
            Skeleton(starts=starts, widths=(width,) * stages, num_microbatches=m, schedule="1f1b"), fitting
        )
