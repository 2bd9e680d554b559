"""The whole strategies, with one choice for the whole network, as candidates of the space.

A component that refuses its part (nothing to split, nothing to shard) runs whole on each of the ranks that would have
split it, as in the stock implementations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from asa.cost.machine import presets
from asa.cost.pricing import Way
from asa.errors import UsageError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.codec import noun
from asa.ir.consistency import NAMES, Discipline, is_discipline, parse
from asa.ir.layout import Layout
from asa.ir.plan import DataStrategyName, ScheduleName, TensorDegree, TensorStrategyName
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.request import Request
from asa.planner.space.space import MOST_IN_A_PIPELINE, Space
from asa.planner.space.space import check as check_pins

_DATA: dict[str, DataStrategyName] = {
    "ddp": "replicate",
    "zero1": "zero1",
    "zero2": "zero2",
    "fsdp": "zero3",
    "hsdp": "hsdp",
}
_PIPELINES: tuple[ScheduleName, ...] = ("layers", "gpipe", "1f1b")
_LATER = ("interleaved", "zero_bubble", "zbv", "v_half")
AGAIN = "+ckpt"
"""Suffix of a whole strategy in which every component that can recomputes its activations."""
_AGAIN = ("ddp", "fsdp", "tensor")
"""Strategies whose variants with recomputation are priced as baselines of every plan."""
BEST_AGAIN = "hybrid" + AGAIN
"""The best uniform split, with recomputation of as many components as memory requires."""
_HYBRID = re.compile(r"hybrid:(?:d(\d{1,5}))?(?:t(\d{1,5}))?(?:p(\d{1,5}))?")


@noun
class Degrees:
    """A uniform strategy: data, tensor and pipeline degree (``d``, ``t``, ``p``), the data strategy and the schedule.
    ``sequence``: split components also split their tokens, where they can. ``again``: activations are recomputed."""

    data: DataStrategyName
    d: int
    t: int
    p: int = 1
    schedule: ScheduleName = "none"
    sequence: bool = False
    again: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks that the strategy uses."""
        return self.d * self.t * self.p


class Unavailable(Exception):
    """A whole strategy cannot run as asked; the message says why in a few words."""


def names(strategies: Strategies, gpus: int) -> tuple[str, ...]:
    """Names of all whole strategies that are offered, with every hybrid of ``gpus`` devices."""
    offered = ["single", *(n for n, data in _DATA.items() if data in strategies.data)]
    if "tensor" in strategies.tensor:
        offered.append("tensor")
    offered += [n for n in _PIPELINES if n in strategies.schedules]
    offered += _hybrids(strategies, gpus)
    if "tensor" in strategies.tensor or "1f1b" in strategies.schedules:
        offered.append("hybrid")
    if strategies.checkpoint:
        offered += [n + AGAIN for n in _AGAIN if n in offered] + [BEST_AGAIN]
    return tuple(offered)


def _hybrids(strategies: Strategies, gpus: int) -> list[str]:
    """Names of all splits of the devices over at least two of data, tensor and pipeline parallelism."""
    factors = [x for x in range(gpus, 0, -1) if gpus % x == 0]
    splits = [(d, t, gpus // d // t) for d in factors for t in factors if gpus % (d * t) == 0]
    return [
        "hybrid:" + "".join(f"{letter}{x}" for letter, x in zip("dtp", split, strict=True) if x > 1)
        for split in splits
        if sum(x > 1 for x in split) > 1
        and (split[1] == 1 or "tensor" in strategies.tensor)
        and (split[2] == 1 or "1f1b" in strategies.schedules)
    ]


def check(requested: tuple[str, ...], strategies: Strategies, gpus: int) -> None:
    """Refuse strategies in ``requested`` that are unknown or not offered.

    Raises:
        UsageError: names those that are offered.
    """
    offered = ("asa", *names(strategies, gpus), *(["sequence"] if "sequence" in strategies.tensor else []))
    for name in requested:
        if is_discipline(name):
            parse(name).workers(gpus)
            continue
        base = name.removesuffix(AGAIN) if strategies.checkpoint and name != "asa" + AGAIN else name
        hybrid = _HYBRID.fullmatch(base) if base != "hybrid:" else None
        if (base in offered and not base.endswith(AGAIN)) or (
            hybrid is not None and (hybrid.group(3) is None or "1f1b" in strategies.schedules)
        ):
            continue
        if hybrid is not None or name in (*_LATER, *_DATA, *_PIPELINES):
            raise UsageError(f"strategy {name} is not built yet; one of {', '.join(offered)}")
        called = "; of the whole model it is called fsdp" if name == "zero3" else ""
        near = "".join(f"; did you mean {n}?" for n in get_close_matches(name.lower(), (*offered, *NAMES), n=1))
        raise UsageError(f"no strategy {name!r}{called or near}; one of {', '.join((*offered, *NAMES))}")


def check_request(cluster: Cluster | None, strategies: Strategies, request: Request) -> None:
    """Refuse a request that no model can satisfy. ``cluster`` is None where it is yet to be measured: then only what no
    cluster can satisfy is refused.

    Raises:
        UsageError: unknown strategies, a discipline among others, pins to strategies not offered, more devices than the
            cluster has, or offload on a CPU.
    """
    if cluster is not None and request.gpus > cluster.num_devices:
        larger = presets.offered(request.gpus, like=cluster.name)
        larger = larger or "one of several nodes is widened to as many as are asked for"
        raise UsageError(
            f"asked for {request.gpus} devices, cluster {cluster.name} has {cluster.num_devices}; lower --gpus, name "
            f"a larger --cluster ({larger}), or measure one"
        )
    if cluster is not None and request.offload == "always" and cluster.device.type == "cpu":
        raise UsageError(
            f"offload saves nothing on {cluster.name}: what a CPU rank holds is in host memory already; leave it out, "
            "or name a cluster of CUDA devices (`asa verify PLAN --device cpu` runs such a plan here)"
        )
    check(request.strategies or ("asa",), strategies, request.gpus)
    requested_discipline(request)
    check_pins(strategies, request.pins)


def requested_discipline(request: Request) -> Discipline | None:
    """The discipline that ``request`` names, or None.

    Raises:
        UsageError: it is malformed, or one of several strategies.
    """
    strategies = request.strategies or ()
    disciplines = [s for s in strategies if is_discipline(s)]
    if not disciplines:
        return None
    discipline = parse(disciplines[0])
    if len(disciplines) > 1 or (len(strategies) > 1 and discipline.groups is None):
        raise UsageError(
            f"{disciplines[0]} runs where it is asked for by name and is not chosen among {len(strategies)} "
            f"strategies; ask for --strategies {disciplines[0]} alone, or compare them with asa bench"
        )
    return discipline


def members(name: str, strategies: Strategies, gpus: int) -> tuple[str, ...]:
    """The whole strategies that ``name`` stands for: itself, and for ``hybrid`` every uniform split of the devices."""
    if name != "hybrid":
        return (name,)
    ends = [n for n in ("tensor", "gpipe", "1f1b") if n in names(strategies, gpus)]
    return ("ddp", *_hybrids(strategies, gpus), *ends) if gpus > 1 else ("single",)


def candidates(name: str, prices: Prices) -> Iterator[Candidate]:
    """Candidates of one whole strategy (other than ``asa`` and ``hybrid``), one for each number of microbatches in
    ascending order, as long as there are enough samples.

    Raises:
        Unavailable: it cannot run with any number of microbatches.
    """
    counts = [m for m in prices.space.microbatches() if m >= _fewest(name, prices)]
    if not counts:
        raise Unavailable("with one microbatch it is called layers")
    for m in counts:
        try:
            candidate = uniform(name, prices, m)
        except Unavailable:
            if m == counts[0]:
                raise
            return
        yield candidate
        if candidate.schedule == "layers" or (len(candidate.widths) > 1 and 2 * m > MOST_IN_A_PIPELINE):
            return


def _fewest(name: str, prices: Prices) -> int:
    """The fewest microbatches of a strategy: a pipeline with a single one is called ``layers``."""
    degrees = _degrees(name.removesuffix(AGAIN), prices.space.request.gpus)
    return 2 if degrees.p > 1 and degrees.schedule != "layers" else 1


def at_least(name: str, prices: Prices) -> float:
    """A lower bound on the seconds of compute under one whole strategy on equal devices, wherever it is cut; 0 if it
    cannot run."""
    counts = [m for m in prices.space.microbatches() if _fewest(name, prices) <= m]
    try:
        uniform(name, prices, counts[0] if counts else 1)
    except Unavailable:
        return 0.0
    x, bounds = _degrees(name.removesuffix(AGAIN), prices.space.request.gpus), list[float]()
    for m in counts:
        if prices.space.request.global_batch // m < x.d or (x.p > 1 and m > MOST_IN_A_PIPELINE):
            break
        component_s = prices.compute_of(x.d, x.t, m, x.p)
        # A stage waits for those before it and then computes all microbatches; optimal cuts give later stages less.
        bounds.append(max(m * float(component_s.max()), float(component_s.sum()) / (1 - (1 - 1 / m) ** x.p)))
    return min(bounds, default=0.0)


def uniform(name: str, prices: Prices, num_microbatches: int) -> Candidate:
    """The candidate of one whole strategy (other than ``asa`` and ``hybrid``).

    Raises:
        Unavailable: fewer samples, devices or components than it needs.
    """
    space = prices.space
    gpus = space.request.gpus
    degrees = replace(_degrees(name.removesuffix(AGAIN), gpus), again=name.endswith(AGAIN))
    width = degrees.d * degrees.t
    if degrees.ranks > gpus:
        raise Unavailable(f"needs {degrees.ranks} devices, there are {gpus}")
    if name.removesuffix(AGAIN) != "single" and degrees.ranks == 1:
        raise Unavailable("needs at least 2 devices")
    if degrees.t > 1 and "tensor" not in space.strategies.tensor:
        raise Unavailable("strategy tensor is not offered")
    if degrees.p > 1 and not all(space.placed(s * width, width) for s in range(degrees.p)):
        raise Unavailable(f"its stages of {width} devices would lie across nodes")
    _check_samples(space, degrees, num_microbatches)
    if degrees not in prices.uniform:
        prices.uniform[degrees] = [_way(i, degrees, space) for i in range(len(space.profile.graph))]
    ways = prices.uniform[degrees]
    if degrees.t > 1 and all(w.layout.tensor == 1 for w in ways):
        raise Unavailable(f"no component can be split {degrees.t} ways")
    if degrees.again and not any(w.checkpoint for w in ways):
        raise Unavailable("no component has activations to compute again")
    if degrees.sequence and not any(w.layout.sequence for w in ways):
        raise Unavailable(f"no component can be cut by tokens {degrees.t} ways")
    starts = (0,) if degrees.p == 1 else _balanced(prices, ways, degrees, num_microbatches)
    return Candidate(
        origin=name, widths=(width,) * degrees.p, starts=starts, schedule=degrees.schedule,
        num_microbatches=num_microbatches, ways=tuple(ways),
    )  # fmt: skip


def _check_samples(space: Space, degrees: Degrees, num_microbatches: int) -> None:
    """Check that every component has enough samples on every rank.

    Raises:
        Unavailable: names the first component that has too few.
    """
    for i, component in enumerate(space.profile.graph.components):
        if not space.enough_samples(i, degrees.d, num_microbatches):
            per_rank = space.request.global_batch / num_microbatches / degrees.d
            least = "1 sample" if per_rank < 1 else "2 samples for BatchNorm"
            raise Unavailable(f"{component.name} needs {least} per rank, gets {per_rank:.3g}")


def _way(index: int, degrees: Degrees, space: Space) -> Way:
    component, d, t = space.profile.graph.components[index], degrees.d, degrees.t
    pages: list[TensorStrategyName] = ["sequence", "tensor"] if degrees.sequence else ["tensor"]
    able = [n for n in pages if t > 1 and not space.strategies.tensor[n].refusal(component, t)]
    split: TensorStrategyName = able[0] if able else "none"
    layout = Layout(width=d * t, data=d, tensor=t if able else 1, sequence=split == "sequence")
    data = degrees.data
    has_parameters = component.parameter_bytes > 0
    shards = data in space.strategies.data and not space.strategies.data[data].refusal(component, d)
    choice = space.data_degree(data if d > 1 and has_parameters and shards else "replicate", layout)
    if choice is None:
        single_node = len(space.cluster.levels) == 1
        reason = "needs several nodes, or 4 or more devices of one node where it is asked for by name"
        raise Unavailable(reason if single_node else "needs several nodes of several devices")
    return Way(
        layout=layout,
        data=choice,
        tensor=TensorDegree(strategy=split, degree=layout.tensor),
        checkpoint=degrees.again and space.forgets(component),
        offload=space.offloads(has_parameters)[0],
    )


def _balanced(prices: Prices, ways: list[Way], degrees: Degrees, num_microbatches: int) -> tuple[int, ...]:
    """Starts of ``p`` stages such that the most compute of a stage is least, each on its own devices.

    Raises:
        Unavailable: fewer components or cuts than stages, or the schedule is not offered or refuses them.
    """
    p, n = degrees.p, len(ways)
    schedule = prices.space.strategies.schedules.get(degrees.schedule)
    if schedule is None:
        raise Unavailable(f"schedule {degrees.schedule} is not offered")
    if p > n:
        raise Unavailable(f"needs a component for each of its {p} stages, the model has {n}")
    if refusal := schedule.refusal(p, num_microbatches):
        raise Unavailable(refusal)
    cuts = [i for i in range(n) if prices.space.profile.graph.cuttable(i)]
    if len(cuts) < p:
        raise Unavailable(f"may be cut into {len(cuts)} stages, not {p}")
    width, gpus = degrees.d * degrees.t, prices.space.request.gpus
    if prices.space.cluster.unequal:
        pricers = (prices.pricer(width, num_microbatches, gpus, s * width) for s in range(p))
        sums = [_sums([sum(pricer.cell(i, w)[:2]) for i, w in enumerate(ways)], cuts) for pricer in pricers]
    else:
        sums = [_sums(prices.compute_in([w.layout for w in ways], num_microbatches, gpus), cuts)] * p
    return tuple(cuts[k] for k in even(sums))


def _sums(row: Any, cuts: list[int]) -> Any:
    return np.concatenate([[0.0], np.cumsum(row)])[[*cuts, len(row)]]


def even(sums: Sequence[Any]) -> list[int]:
    """Points at which stages begin such that the largest sum over a stage is least. ``sums[s]``: for stage s, the sums
    in front of each point and, last, of everything; one array for all stages where these are alike."""
    first_stages = _first_stages if all(row is sums[0] for row in sums) else _every_stage
    # best[i]: least maximum over the remaining stages if they start at point i; ends: where the first of them ends.
    best, ends = sums[-1][-1] - sums[-1][:-1], []
    for stages_left in range(2, len(sums) + 1):
        best, stop = first_stages(sums[-stages_left], best, len(sums[0]) - 1 - stages_left)
        ends.append(stop)
    starts = [0]
    for stop in reversed(ends):
        starts.append(int(stop[starts[-1]]))
    return starts


def _first_stages(sums: Any, behind: Any, last: int) -> tuple[Any, Any]:
    """For every start up to ``last``, the least maximum of the stage that starts there and of the stages ``behind`` it,
    and the stage's earliest end; infinite for later starts.

    With a later end the stage takes longer and those behind it less, so the least maximum is where the two cross.
    """
    start = np.arange(last + 1)
    cross = np.searchsorted((sums[: last + 2] - behind[: last + 2])[1:], sums[start]) + 1
    nearby = np.clip(cross[:, None] + np.arange(-2, 2), start[:, None] + 1, last + 1)
    least = np.maximum(sums[nearby] - sums[start, None], behind[nearby]).min(axis=1)
    first = np.searchsorted(-behind[: last + 2], -least)
    slowest, stop = np.full(len(behind), np.inf), np.full(len(behind), len(behind))
    slowest[start], stop[start] = least, np.maximum(first, start + 1)
    return slowest, stop


def _every_stage(sums: Any, behind: Any, _last: int) -> tuple[Any, Any]:
    """The result of :func:`_first_stages` where stages differ: then a later start may make those behind it slower."""
    at = np.arange(len(behind))
    slowest = np.where(at > at[:, None], np.maximum(sums[:-1] - sums[:-1, None], behind), np.inf)
    return slowest.min(axis=1), slowest.argmin(axis=1)


def _degrees(name: str, gpus: int) -> Degrees:
    if name == "single":
        return Degrees(data="replicate", d=1, t=1)
    if name == "tensor":
        return Degrees(data="replicate", d=1, t=gpus)
    if name == "sequence":
        return Degrees(data="replicate", d=1, t=gpus, sequence=True)
    if name in _PIPELINES:
        return Degrees(data="replicate", d=1, t=1, p=gpus, schedule=name)
    hybrid = _HYBRID.fullmatch(name)
    if hybrid is not None:
        d, t, p = (int(x) if x else 1 for x in hybrid.groups())
        if min(d, t, p) < 1:
            raise UsageError(f"{name}: degrees are at least 1")
        return Degrees(data="replicate", d=d, t=t, p=p, schedule="1f1b" if p > 1 else "none")
    return Degrees(data=_DATA[name], d=gpus, t=1)
