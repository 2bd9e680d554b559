"""Explains in numbers why no plan fits, and names the smallest change of the request after which one would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from asa.cost.memory.peak import usable
from asa.errors import InfeasibleError
from asa.ir.units import GIB, MOST_SAMPLES
from asa.planner import clock
from asa.planner.answer.leanest import leanest
from asa.planner.space import baselines
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.request import Pin
from asa.planner.space.space import Allowed, Space, anything, widths

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
    needs to compute, in stages of every width and any split of the components over them.
    """
    space, n = prices.space, len(prices.space.profile.graph)
    if overfull(space):
        return True
    least_bytes: dict[int, list[tuple[float, float]]] = {}
    for width in widths(space.request.gpus):
        least_bytes[width] = [_least_component_bytes(prices, i, width, allowed) for i in range(n)]
        working = max(w for _, w in least_bytes[width])
        if working < float("inf") and sum(h for h, _ in least_bytes[width]) + working <= space.capacity(width):
            return False
    if not space.schedules or space.request.gpus < 2:
        return True
    gpus = space.request.gpus
    free = max(space.room(r, 1, gpus) for r in range(gpus))
    # fewest[i]: the fewest devices that could hold component i and all after it.
    fewest = [float("inf")] * n + [0.0]
    for i in range(n - 1, -1, -1):
        for width, rows in least_bytes.items():
            state = working = 0.0
            for stop in range(i, n):
                state, working = state + rows[stop][0], max(working, rows[stop][1])
                if state + working > free:
                    break
                fewest[i] = min(fewest[i], width + fewest[stop + 1])
    return fewest[0] > space.request.gpus


def _least_component_bytes(prices: Prices, index: int, width: int, allowed: Allowed) -> tuple[float, float]:
    """Bytes of a component's least state and gradients, and the least it needs beyond these while it computes."""
    space, pricer = prices.space, prices.pricer(width, 1)
    component = space.profile.graph.components[index]
    needs = []
    for way in space.ways(index, width, 1, allowed):
        share = space.strategies.tensor[way.tensor.strategy].share(component, way.layout.tensor)
        data = space.strategies.data[way.data.strategy].of(way.data)
        gathered = data.memory(share, way.layout.data, space.request.optimizer).transient
        footprint = pricer.component(index, way).footprint
        needs.append((footprint.state + footprint.gradients, gathered))
    if not needs:
        return float("inf"), float("inf")
    least = min(held for held, _ in needs)
    return least, min(held + gathered for held, gathered in needs) - least


def explain(prices: Prices, allowed: Allowed = anything, *, proved: bool = True) -> InfeasibleError:
    """The error to raise. It names what does not fit, and a memory, batch or number of devices with which a plan fits.

    ``proved``: the search has shown that nothing fits; otherwise its time was up before.
    """
    space, request = prices.space, prices.space.request
    smallest = leanest(prices, allowed, few=True) if overfull(space) else None
    smallest = smallest or leanest(prices, allowed)
    if smallest is None:
        return InfeasibleError(_nothing_runs(space, allowed, proved=proved))
    ranks, peak = prices.busy(smallest.candidate), smallest.price.peak
    name = space.profile.graph.components[peak.index].name
    total = min(space.cluster.memories()[:ranks]) if request.memory_bytes is None else request.memory_bytes
    needed = _memory_for(space, peak.total, ranks)
    options = _memory_option(needed)
    fewer = _smaller_batch(space)
    if fewer is not None:
        options.append(f"--global-batch {fewer}")
    more = _more_devices(space)
    if more is not None:
        options.append(f"--gpus {more}")
    reserved = total - usable(space.cluster.device, total, ranks)
    if total <= reserved:
        advice = f"; try {' or '.join(options)}" if options else ""
        return InfeasibleError(
            f"no plan fits: the context of the device and the allocator take {reserved / GIB:.3g} GiB without any "
            f"model; devices have {total / GIB:.3g} GiB{advice}"
        )
    deduction = f" (less {reserved / GIB:.2f} GiB for the context and the allocator)" if reserved > 0 else ""
    advice = f"; try {' or '.join(options)}" if options else "; the model is too large for any device"
    return InfeasibleError(
        f"{'no plan fits' if proved else 'no plan was found in time'}: {name} needs {peak.total / GIB:.3g} GiB in its "
        f"backward ({peak.state / GIB:.3g} GiB state, {peak.activations / GIB:.3g} GiB activations) in the plan "
        f"that needs least memory on up to {request.gpus} devices, {_in_words(smallest.candidate)}; devices have "
        f"{total / GIB:.3g} GiB{deduction}{advice}"
    )


def _in_words(candidate: Candidate) -> str:
    """A plan in a few words."""
    p, m = len(candidate.widths), candidate.num_microbatches
    stages = f"one stage of {candidate.ranks}" if p == 1 else f"{p} stages of {'/'.join(map(str, candidate.widths))}"
    return f"{stages} {'rank' if stages.endswith(' 1') else 'ranks'} in {m} microbatch{'es' * (m > 1)}"


def remedy(prices: Prices, names: Sequence[str]) -> str:
    """What to try where none of the whole strategies ``names``, the only ones asked for, can run; in words."""
    space = prices.space
    needed = [_memory_for(space, prices.of(c).peak.total, prices.busy(c)) for n in names for c in _uniform(n, prices)]
    options = _memory_option(min(needed)) if needed else []
    if not needed:
        fewer, larger = _fewer_devices(space, names), _larger_batch(space, names)
        options += [] if fewer is None else [f"--gpus {fewer}"]
        options += [] if larger is None else [f"--global-batch {larger}"]
    smallest = leanest(prices, space.pinned)
    if smallest is not None and smallest.excess <= 0:
        options.append("--strategies asa")
    return f"try {' or '.join(options)}" if options else "change --gpus, --global-batch, --memory or the pins"


def _memory_option(memory: float) -> list[str]:
    """The option that sets ``memory`` bytes as the limit; none where no device has so much."""
    return [f"--memory {memory / GIB:.3g}"] if memory <= MOST_MEMORY else []


def _uniform(name: str, prices: Prices) -> Iterator[Candidate]:
    """Plans of one whole strategy for every number of microbatches that it and the pins allow."""
    try:
        for candidate in baselines.candidates(name, prices):
            if all(prices.space.pinned(i, way) for i, way in enumerate(candidate.ways)):
                yield candidate
    except baselines.Unavailable:
        return


def _memory_for(space: Space, active: float, width: int) -> float:
    """Bytes of device memory that leave ``active`` bytes usable, a little more to allow for rounding."""
    low, high = active, 2 * active + 8 * GIB
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if usable(space.cluster.device, int(middle), width) >= active else (middle, high)
    return high * 1.005  # room for the rounding of the figure that is printed


def _with(space: Space, **changes: object) -> Prices:
    request = replace(space.request, **changes)  # type: ignore[arg-type]
    return Prices(Space(space.profile, space.cluster, space.strategies, request))


def _fits(prices: Prices) -> bool:
    if hopeless(prices, prices.space.pinned):
        return False
    smallest = leanest(prices, prices.space.pinned)
    return smallest is not None and smallest.excess <= 0


def _smaller_batch(space: Space) -> int | None:
    """The largest of batch/2, batch/4, ... with which something fits; None if none is found in time."""
    batch, ends = space.request.global_batch // 2, clock.now() + _LOOK_S
    if batch and hopeless(_with(space, global_batch=batch), space.pinned):
        return None  # weights and state, which no smaller batch reduces, are too large
    while batch >= 1 and clock.now() < ends:
        if _fits(_with(space, global_batch=batch)):
            return batch
        batch //= 2
    return None


def _fewer_devices(space: Space, names: Sequence[str]) -> int | None:
    """The most devices, fewer than asked for, on which one of the whole strategies fits; None if none is found in time.
    Fewer may help: stages and splits need as many components, rows or samples as ranks."""
    ends = clock.now() + _LOOK_S
    for gpus in range(space.request.gpus - 1, 1, -1):
        if _one_fits(names, _with(space, gpus=gpus)):
            return gpus
        if clock.now() > ends:
            break
    return None


def _larger_batch(space: Space, names: Sequence[str]) -> int | None:
    """The least of 2, 4 and 8 times the batch with which one of the whole strategies fits; None where none does."""
    batch = space.request.global_batch
    larger = (batch * factor for factor in (2, 4, 8) if batch * factor <= MOST_SAMPLES)
    return next((b for b in larger if _one_fits(names, _with(space, global_batch=b))), None)


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
    request = space.request
    graph = space.profile.graph
    for i, component in enumerate(graph.components):
        if not any(True for w in widths(request.gpus) for _ in space.ways(i, w, 1, allowed)):
            runs_unpinned = any(True for w in widths(request.gpus) for _ in space.ways(i, w, 1))
            if runs_unpinned:
                return (
                    f"no plan: {component.name} cannot run as pinned ({_in_text(request.pins)}) on up to "
                    f"{request.gpus} devices at global batch {request.global_batch}: a data degree times a tensor "
                    "degree divides the ranks of the stage, and every rank needs a sample; change the pin or --gpus"
                )
            return (
                f"no plan: {component.name} needs at least 2 samples for BatchNorm, the global batch is "
                f"{request.global_batch}; try --global-batch {2 * request.global_batch}"
            )
    return (
        f"{'no plan' if proved else 'no plan was found in time'}: no stage of up to {request.gpus} ranks suits all "
        f"pins ({_in_text(request.pins)}) at once, and no stages of fewer ranks each their own; change a pin or --gpus"
    )


def _in_text(pins: tuple[Pin, ...]) -> str:
    return " ".join(str(p) for p in pins)
