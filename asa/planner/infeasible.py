"""Why nothing fits, in numbers, and the nearest change that would make something fit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from asa.cost.memory import usable
from asa.cost.planned import Price
from asa.errors import InfeasibleError
from asa.ir.codec import noun
from asa.ir.units import GIB
from asa.planner import baselines, dp
from asa.planner.candidate import Candidate, Prices
from asa.planner.formulate import formulate
from asa.planner.pipelines import Skeleton
from asa.planner.problem import Chain
from asa.planner.request import Pin
from asa.planner.space import Allowed, Space, anything, widths
from asa.planner.staged import StagedSpace

_MOST_DEVICES = 64
_LOOK_S = 1.0

MOST_MEMORY = 2**20 * GIB
"""Of one device, by far."""


@noun
class Leanest:
    """The plan with the lowest peak, and by how many bytes that peak oversteps what a rank may use."""

    candidate: Candidate
    price: Price
    excess: float


def hopeless(prices: Prices, allowed: Allowed = anything) -> bool:
    """Whether state, gradients and gathered weights alone leave no plan, activations for nothing.

    A necessary condition that is quickly tested: every component at its leanest, and one at a time with what it needs
    while it computes, in stages of every width and any split of the components over them.
    """
    space, n = prices.space, len(prices.space.profile.graph)
    lean: dict[int, list[tuple[float, float]]] = {}
    for width in widths(space.request.gpus):
        lean[width] = [_leanest_component(prices, i, width, allowed) for i in range(n)]
        working = max(w for _, w in lean[width])
        if working < float("inf") and sum(h for h, _ in lean[width]) + working <= space.capacity(width):
            return False
    if not space.schedules or space.request.gpus < 2:
        return True
    gpus = space.request.gpus
    free = max(space.room(r, 1, gpus) for r in range(gpus))
    # fewest[i]: the fewest devices that could hold the components from i on.
    fewest = [float("inf")] * n + [0.0]
    for i in range(n - 1, -1, -1):
        for width, rows in lean.items():
            held = working = 0.0
            for stop in range(i, n):
                held, working = held + rows[stop][0], max(working, rows[stop][1])
                if held + working > free:
                    break
                fewest[i] = min(fewest[i], width + fewest[stop + 1])
    return fewest[0] > space.request.gpus


def _leanest_component(prices: Prices, index: int, width: int, allowed: Allowed) -> tuple[float, float]:
    """The least state of a component, and the least by which it exceeds that while it computes, in bytes."""
    space, pricer = prices.space, prices.pricer(width, 1)
    component = space.profile.graph.components[index]
    found = []
    for way in space.ways(index, width, 1, allowed):
        share = space.strategies.tensor[way.tensor.strategy].share(component, way.layout.tensor)
        data = space.strategies.data[way.data.strategy].of(way.data)
        gathered = data.memory(share, way.layout.data, space.request.optimizer).transient
        footprint = pricer.component(index, way).footprint
        found.append((footprint.state + footprint.gradients, gathered))
    if not found:
        return float("inf"), float("inf")
    least = min(held for held, _ in found)
    return least, min(held + gathered for held, gathered in found) - least


def leanest(prices: Prices, allowed: Allowed = anything) -> Leanest | None:
    """The plan that comes closest to fitting, as far as it is looked for; None where no plan exists at all.

    Every single stage is tried, and for every number of equal stages of a pipeline the cuts that spread the least
    state and activations evenly.
    """
    found = (
        Leanest(candidate=c, price=price, excess=price.peak.total - prices.capacity(c))
        for c in (*_leanest_stages(prices, allowed), *_leanest_pipelines(prices, allowed))
        for price in (prices.of(c),)
    )
    return min(found, key=lambda x: x.excess, default=None)


def _leanest_stages(prices: Prices, allowed: Allowed) -> Iterator[Candidate]:
    """With one microbatch gradients do not exist all at once. Of several, the more the leaner, as long as each layout's
    ranks have samples."""
    for width in widths(prices.space.request.gpus):
        counts = _microbatches(prices.space)
        divisors = [d for d in range(1, width + 1) if width % d == 0]
        most = {max((m for m in counts if prices.space.enough_samples(0, d, m)), default=1) for d in divisors}
        fewer = {m // 2 for m in most}  # where a later component needs two samples
        for m in sorted({1, *most, *fewer} - {0}):
            formulation = formulate(prices, width, m, allowed, every=True)
            if formulation is None:
                continue
            found = dp.least_memory(formulation.problem)
            if found.choice is not None:
                yield formulation.candidate(found.choice)


def _leanest_pipelines(prices: Prices, allowed: Allowed) -> Iterator[Candidate]:
    """1f1b holds no more microbatches than any other schedule; the smaller they are, the better."""
    space, n = prices.space, len(prices.space.profile.graph)
    schedule = space.schedules.get("1f1b")
    if schedule is None:
        return
    staged = StagedSpace(prices, allowed, every=True)
    for stages in range(2, min(space.request.gpus, n) + 1):
        width = space.request.gpus // stages
        counts = [m for m in _microbatches(space) if staged.chain(width, m) is not None]
        if not counts:
            continue
        chain = staged.chain(width, counts[-1])
        assert chain is not None
        flights = [schedule.in_flight(s, stages, counts[-1]) for s in range(stages)]
        starts = _even(chain, flights)
        if not all(space.profile.graph.cuttable(start) for start in starts):
            continue
        choices = []
        for s, (start, stop) in enumerate(pairwise((*starts, n))):
            choices.append(dp.least_memory(chain.stage(start, stop, flights[s])).choice)
        made = tuple(c for c in choices if c is not None)
        if len(made) == stages:
            skeleton = Skeleton(
                starts=starts, widths=(width,) * stages, num_microbatches=counts[-1], schedule="1f1b"
            )  # fmt: skip
            yield staged.candidate(skeleton, made)


def _even(chain: Chain, flights: Sequence[int]) -> tuple[int, ...]:
    """Starts of stages, stage s with ``flights[s]`` microbatches in flight, such that the fullest holds least."""
    n, stages = len(chain.names), len(flights)
    held = [[0.0, *accumulate(min(c.state + f * c.activations for c in row) for row in chain.configs)] for f in flights]
    best = [(held[-1][n] - held[-1][i], n) for i in range(n)]
    ends = [best]
    for s in range(stages - 2, -1, -1):
        behind = ends[0]
        row = []
        for i in range(n):
            cuts = range(i + 1, n - (stages - 2 - s))
            row.append(min(((max(held[s][j] - held[s][i], behind[j][0]), j) for j in cuts), default=(float("inf"), n)))
        ends.insert(0, row)
    starts = [0]
    for s in range(stages - 1):
        starts.append(ends[s][starts[-1]][1])
    return tuple(starts)


def _microbatches(space: Space) -> list[int]:
    """One microbatch, and all powers of two: memory rarely falls further than the last that can run."""
    return [2**k for k in range(space.request.global_batch.bit_length())]


def explain(prices: Prices, allowed: Allowed = anything, *, proved: bool = True) -> InfeasibleError:
    """The error to raise: what binds, and the nearest batch, memory or number of devices that fits.

    Not ``proved``: time was up before the search had seen that there is none.
    """
    space, request = prices.space, prices.space.request
    found = leanest(prices, allowed)
    if found is None:
        return InfeasibleError(_nothing_runs(space, allowed))
    ranks, peak = prices.busy(found.candidate), found.price.peak
    name = space.profile.graph.components[peak.index].name
    total = space.cluster.device.memory_bytes if request.memory_bytes is None else request.memory_bytes
    needed = _memory_for(space, peak.total, ranks)
    tries = _told(needed)
    fewer = _smaller_batch(space)
    if fewer is not None:
        tries.append(f"--global-batch {fewer}")
    more = _more_devices(space)
    if more is not None:
        tries.append(f"--gpus {more}")
    aside = total - usable(space.cluster.device, total, ranks)
    kept = f" ({aside / GIB:.2f} GiB of them for the context and the allocator)" if aside > 0 else ""
    tried = f"; try {' or '.join(tries)}" if tries else "; the model is too large for any device"
    return InfeasibleError(
        f"{'no plan fits' if proved else 'no plan was found in time'}: {name} needs {peak.total / GIB:.3g} GiB in its "
        f"backward ({peak.state / GIB:.3g} GiB state, {peak.activations / GIB:.3g} GiB activations) under every "
        f"strategy up to {request.gpus} devices, devices have {total / GIB:.3g} GiB{kept}{tried}"
    )


def remedy(prices: Prices, names: Sequence[str]) -> str:
    """What to try where only the whole strategies ``names`` were asked for, and none of them can be had."""
    space = prices.space
    needed = [_memory_for(space, prices.of(c).peak.total, prices.busy(c)) for n in names for c in _uniform(n, prices)]
    said = _told(min(needed)) if needed else []
    found = leanest(prices, space.pinned)
    if found is not None and found.excess <= 0:
        said.append("--strategies asa")
    return f"try {' or '.join(said)}" if said else "change --gpus, --global-batch, --memory or the pins"


def _told(memory: float) -> list[str]:
    """So much memory as an option, where devices could have it."""
    return [f"--memory {memory / GIB:.3g}"] if memory <= MOST_MEMORY else []


def _uniform(name: str, prices: Prices) -> Iterator[Candidate]:
    """One whole strategy in one microbatch and in all powers of two, as far as it and the pins go."""
    try:
        for candidate in baselines.candidates(name, prices):
            if all(prices.space.pinned(i, way) for i, way in enumerate(candidate.ways)):
                yield candidate
    except baselines.Unavailable:
        return


def _memory_for(space: Space, active: float, width: int) -> float:
    """Device memory that leaves ``active`` bytes usable."""
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
    found = leanest(prices, prices.space.pinned)
    return found is not None and found.excess <= 0


def _smaller_batch(space: Space) -> int | None:
    """The largest halving of the global batch under which something fits, if it is soon found."""
    batch, ends = space.request.global_batch // 2, time.monotonic() + _LOOK_S
    if batch and hopeless(_with(space, global_batch=batch), space.pinned):
        return None  # what does not depend on the batch is too much already
    while batch >= 1 and time.monotonic() < ends:
        if _fits(_with(space, global_batch=batch)):
            return batch
        batch //= 2
    return None


def _more_devices(space: Space) -> int | None:
    """The fewest doubled devices, within the cluster, under which something fits."""
    gpus = 2 * space.request.gpus
    while gpus <= min(space.cluster.num_devices, _MOST_DEVICES):
        if _fits(_with(space, gpus=gpus)):
            return gpus
        gpus *= 2
    return None


def _nothing_runs(space: Space, allowed: Allowed) -> str:
    """No width lets every component run at all: samples or pins forbid it."""
    request = space.request
    graph = space.profile.graph
    for i, component in enumerate(graph.components):
        if not any(True for w in widths(request.gpus) for _ in space.ways(i, w, 1, allowed)):
            free = any(True for w in widths(request.gpus) for _ in space.ways(i, w, 1))
            if free:
                return (
                    f"no plan: {component.name} cannot run as pinned ({_shown(request.pins)}) on up to "
                    f"{request.gpus} devices at global batch {request.global_batch}: a data degree times a tensor "
                    "degree divides the ranks of the stage, and every rank needs a sample; change the pin or --gpus"
                )
            return (
                f"no plan: {component.name} needs at least 2 samples for BatchNorm, the global batch is "
                f"{request.global_batch}; try --global-batch {2 * request.global_batch}"
            )
    return (
        f"no plan: no stage of up to {request.gpus} ranks suits all pins "
        f"({_shown(request.pins)}) at once; change a pin or --gpus"
    )


def _shown(pins: tuple[Pin, ...]) -> str:
    return " ".join(str(p) for p in pins)
