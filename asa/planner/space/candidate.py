"""Candidates (plans during the search) and their prices in closed form, without a solver."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from asa.cost.memory.peak import libraries
from asa.cost.menu import Menu
from asa.cost.planned import Price, StagePrice, price, ways_of
from asa.cost.pricing import Pricer, Way, times_of
from asa.cost.shards import Shards
from asa.cost.states import States
from asa.cost.traffic.collectives import Links
from asa.cost.way import PHASES
from asa.cost.work.compute import LeastTimes, Times
from asa.cost.work.spread import slowest_rank, working
from asa.interfaces.strategy import Strategies
from asa.ir.codec import noun
from asa.ir.layout import Layout, largest_shard
from asa.ir.plan import DataDegree, Plan, ScheduleName, TensorDegree
from asa.ir.profile import Profile
from asa.ir.units import binary
from asa.planner import clock
from asa.planner.space.space import Allowed, Space, anything

_KEPT = 50_000
"""Most components of all candidates together whose prices are cached."""


@noun
class Candidate:
    """A way for every component, in stages of ``widths`` ranks that begin with components ``starts``.

    ``origin``: the strategy that it comes from. A single stage has the schedule ``none``.
    """

    origin: str
    num_microbatches: int
    ways: tuple[Way, ...]
    widths: tuple[int, ...]
    starts: tuple[int, ...] = (0,)
    schedule: ScheduleName = "none"

    @classmethod
    def of(cls, plan: Plan, profile: Profile, strategies: Strategies) -> Candidate:
        """The candidate that ``plan`` was made of.

        Raises:
            InvalidInputError: the plan and the profile do not belong together.
        """
        return cls(
            origin=plan.strategy, widths=tuple(len(s.ranks) for s in plan.stages), starts=plan.starts(),
            schedule=plan.schedule, num_microbatches=plan.num_microbatches, ways=ways_of(plan, profile, strategies),
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Number of ranks of all stages together."""
        return sum(self.widths)

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for candidates that run the same way."""
        return (self.widths, self.starts, self.schedule, self.num_microbatches, self.ways)

    def stage(self, index: int) -> int:
        """The stage of component ``index``."""
        return bisect_right(self.starts, index) - 1

    def width(self, index: int) -> int:
        """Number of ranks of the stage of component ``index``."""
        return self.widths[self.stage(index)]

    @property
    def weights(self) -> dict[int, tuple[int, ...]]:
        """The weights by which stages divide their batch, by stage width; stages without weights are left out."""
        cut = {w: self.ways[start].layout.weights for w, start in zip(self.widths, self.starts, strict=True)}
        return {w: x for w, x in cut.items() if x}

    def with_way(self, index: int, way: Way) -> Candidate:
        """A copy in which component ``index`` has the way ``way``."""
        return replace(self, ways=(*self.ways[:index], way, *self.ways[index + 1 :]))


class Prices:
    """Prices of ways and candidates in one space, each computed once.

    ``known``: prices for the same profile, cluster, strategies, batch and optimizer under another limit of memory or
    devices, from which shared results are taken.
    """

    def __init__(self, space: Space, known: Prices | None = None) -> None:
        self.space = space
        self._times: Times = times_of(space.profile, space.strategies) if known is None else known._times
        self.like = self._times.like
        self.fewest = np.array([space.fewest_samples(i) for i in range(len(space.profile.graph))])
        self._slow: dict[float, float] = {}
        self._computes: dict[tuple[int, int, bool], np.ndarray] = {} if known is None else known._computes
        self._pricers: dict[tuple[object, ...], Pricer] = {} if known is None else known._pricers
        self._states: dict[tuple[int, int], States] = {} if known is None else known._states
        self._menus: dict[tuple[object, ...], Menu] = {}
        self._splits: dict[int, np.ndarray] = {}
        self.uniform: dict[object, list[Way]] = {}
        """Cache of the ways of the whole strategies, which are the same for any number of microbatches."""
        self._leasts: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._insides: dict[tuple[int, int, bool], np.ndarray] = {} if known is None else known._insides
        self._priced_candidates: dict[tuple[object, ...], Price] = {}
        if space.may_offload and space.request.offload == "auto" and not self._plain_fits():
            space.offloading = True

    def _plain_fits(self) -> bool:
        """Whether plain data parallelism on all devices fits with some number of microbatches."""
        space, gpus, count = self.space, self.space.request.gpus, len(self.space.profile.graph)

        def has_samples(degree: int, m: int) -> bool:
            return all(space.enough_samples(i, degree, m) for i in range(count))

        degree = next((d for d in range(gpus, 0, -1) if gpus % d == 0 and has_samples(d, 1)), 1)
        way = Way(
            layout=Layout(width=gpus, data=degree, tensor=1),
            data=DataDegree(strategy="replicate", degree=degree),
            tensor=TensorDegree(strategy="none", degree=1),
        )
        for m in space.microbatches():
            if not has_samples(degree, m):
                break
            replicated = Candidate(origin="ddp", widths=(gpus,), num_microbatches=m, ways=(way,) * count)
            if self.fits(replicated):
                return True
        return False

    @cached_property
    def least_times(self) -> LeastTimes:
        """The least times of so many samples or more."""
        return LeastTimes(self._times, self.space.request.global_batch)

    def at_least_on(self, batch: int, weights: dict[int, tuple[int, ...]]) -> Prices:
        """Prices for another batch, which stages divide by ``weights``, if more samples took no less time and memory.
        No division in which each rank has as many samples, or more, has lower prices."""
        prices = Prices(self.space.weighted(weights, batch), self)
        prices._times, prices._pricers, prices._computes = self.least_times, {}, {}
        return prices

    def pricer(self, width: int, num_microbatches: int, busy: int | None = None, first: int = 0) -> Pricer:
        """The pricer for stages of ``width`` ranks from rank ``first`` on, while ``busy`` ranks work at the same time
        (None: ``width``, as in a single stage)."""
        working, s = width if busy is None else busy, self.space
        speeds = s.cluster.speeds(range(first, first + width))
        spare = self._spare(first, width)
        key = (width, num_microbatches, working, speeds, spare)
        if key not in self._pricers:
            self._pricers[key] = Pricer(
                s.profile, self._times, s.cluster, s.strategies, width=width, global_batch=s.request.global_batch,
                num_microbatches=num_microbatches, optimizer=s.request.optimizer, busy=working,
                compression=s.request.compression, speeds=speeds, spare=spare,
                states=self._states.get((width, working)),
            )  # fmt: skip
            self._states.setdefault((width, working), self._pricers[key].states)
        return self._pricers[key]

    def menu(self, pricer: Pricer, allowed: Allowed) -> Menu:
        """All allowed ways of all components on stages of ``pricer``, whether or not they have enough samples."""
        space, width, m = self.space, pricer.width, pricer.num_microbatches
        layouts = space.layouts(width, m)
        shared = space.shared(layouts[0], m)
        key = (width, pricer.busy, layouts, allowed, shared)
        if key not in self._menus:
            ways = [
                [w for x in layouts for w in space.ways_in(i, x, m) if allowed is anything or allowed(i, w)]
                for i in range(len(space.profile.graph))
            ]
            stored = None if allowed is anything else lambda i, way: allowed(i, replace(way, checkpoint=False))
            self._menus[key] = self.menu_of(pricer, ways, forgetting=stored)
        return self._menus[key]

    def menu_of(
        self, pricer: Pricer, ways: Sequence[Sequence[Way]], forgetting: Callable[[int, Way], bool] | None = None
    ) -> Menu:
        """The menu of ``ways``, a sequence for each component, on stages of ``pricer``. ``forgetting`` as for
        :class:`asa.cost.menu.Menu`."""
        return Menu(
            self.space.profile.graph, pricer.states, self._times, self.space.request.optimizer, ways,
            forgetting=forgetting,
        )  # fmt: skip

    def _spare(self, first: int, width: int) -> tuple[float, ...]:
        """For each rank of a stage, the bytes that its device has more than the smallest; empty where all are equal, or
        a memory limit was given."""
        space = self.space
        if space.cluster.devices is None:
            return ()
        if space.request.memory_bytes is not None or len(set(space.cluster.memories()[first : first + width])) < 2:
            return ()
        least = space.room(first, width, width)
        return tuple(space.room(r, 1, width) - least for r in range(first, first + width))

    def compute(self, width: int, num_microbatches: int, busy: int | None = None, first: int = 0) -> list[float]:
        """For each component the least seconds of forward and backward of one microbatch in a stage of ``width`` ranks
        from rank ``first`` on, with the collectives of tensor parallelism inside it, but no other communication;
        infinite where it cannot run there."""
        busy = width if busy is None else busy
        at_once = working(width, busy, num_microbatches)
        if at_once not in self._slow:
            self._slow[at_once] = slowest_rank(self.space.profile, self.space.cluster, at_once)
        alone_s, inside_s = self._least(width, num_microbatches, first)
        seconds: list[float] = (alone_s * self._slow[at_once] + inside_s).min(axis=0, initial=np.inf).tolist()
        return seconds

    def _least(self, width: int, num_microbatches: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of compute while no other rank works, and of the collectives inside, layout x component."""
        space, batch = self.space, self.space.request.global_batch
        speeds = space.cluster.speeds(range(first, first + width))
        key = (width, num_microbatches, speeds)
        if key in self._leasts:
            return self._leasts[key]
        alone_s, inside_s = list[np.ndarray](), list[np.ndarray]()
        if speeds or width in space.weights:
            cut = Shards(width=width, global_batch=batch, num_microbatches=num_microbatches, speeds=speeds)
            for layout in space.whole_layouts(width, num_microbatches):
                alone_s.append(self._unequal(layout, cut))
                inside_s.append(np.zeros(len(self.fewest)))
        else:
            for samples, tensor, fewest in self._shards(width, num_microbatches):
                alone_s.append(np.where(self.fewest <= fewest, self.compute_on(samples, tensor), np.inf))
                inside_s.append(self._inside(samples, tensor))
        shape = (-1, len(self.fewest))
        self._leasts[key] = np.array(alone_s).reshape(shape), np.array(inside_s).reshape(shape)
        return self._leasts[key]

    def _inside(self, samples: int, tensor: int) -> np.ndarray:
        """For each component, split ``tensor`` ways, the least seconds of its collectives in forward and backward of
        ``samples`` samples, while no other ranks communicate."""
        key = (samples, tensor, self.space.by_tokens)
        if key not in self._insides:
            space, graph = self.space, self.space.profile.graph
            links, of_kind = Links(space.cluster, tensor, tensor), dict[int, float]()
            for i, kind in enumerate(self.like):
                if kind not in of_kind:
                    names = {n for cut in (False, space.by_tokens) for n in space.splitting(i, tensor, cut)}
                    traffic = [space.strategies.tensor[n].traffic(graph.components[i], tensor, samples) for n in names]
                    of_kind[kind] = min(
                        (sum(links.seconds(c) for c in row if c.phase in PHASES[:2]) for row in traffic), default=0.0
                    )
            self._insides[key] = np.array([of_kind[kind] for kind in self.like])
        return self._insides[key]

    def _shards(self, width: int, num_microbatches: int) -> list[tuple[int, int, int]]:
        """For each layout without weights: samples of the largest shard, tensor degree, samples of the smallest
        shard."""
        batch = self.space.request.global_batch
        microbatch, smallest = largest_shard(batch, num_microbatches), batch // num_microbatches
        shards = [
            (largest_shard(microbatch, x.data), x.tensor, smallest // x.data)
            for x in self.space.whole_layouts(width, num_microbatches) if x.data <= smallest
        ]  # fmt: skip
        return list(dict.fromkeys(shards))

    def prepare(self, among: Sequence[int]) -> None:
        """Interpolate the times of all shards of stages of the widths ``among`` at once."""
        needed: dict[int, dict[int, None]] = {}
        for w in among:
            for m in self.space.microbatches() if w not in self.space.weights else ():
                for samples, tensor, _ in self._shards(w, m):
                    needed.setdefault(tensor, {})[samples] = None
        for tensor, sizes in needed.items():
            self._times.prepare(sizes, tensor)

    def _unequal(self, layout: Layout, cut: Shards) -> np.ndarray:
        """For each component the seconds of the slowest rank, in a layout with uneven shards or on unequal devices."""
        fewest = min(layout.fewest(size) for size in cut.sizes)
        if fewest < 1:
            return np.full(len(self.fewest), np.inf)
        rank_s = [self.compute_on(n, layout.tensor) / speed for n, speed in cut.timed(layout)]
        return np.where(self.fewest <= fewest, np.max(rank_s, axis=0), np.inf)

    def compute_in(self, layouts: Sequence[Layout], num_microbatches: int, busy: int) -> np.ndarray:
        """For each component the seconds of forward and backward of one microbatch in its layout of ``layouts``,
        without communication, on devices of one speed of which ``busy`` work at the same time."""
        seconds = np.zeros(len(layouts))
        for layout in dict.fromkeys(layouts):
            pricer = self.pricer(layout.width, num_microbatches, busy)
            samples = pricer.local(layout)
            times = self._times.least if layout.sequence else self._times.both
            layout_s = times(samples, layout.tensor) * pricer.slowed(samples, pricer.shards.slowest)
            seconds = np.where([x is layout or x == layout for x in layouts], layout_s, seconds)
        return seconds

    def compute_of(self, data: int, tensor: int, num_microbatches: int, stages: int) -> np.ndarray:
        """For each component the seconds of forward and backward of one microbatch on stages of ``data`` x ``tensor``
        equal devices, without communication, while ``stages`` such stages work at the same time. Components that
        cannot be split count whole."""
        width = data * tensor
        split = [tensor > 1 and self.space.splits(i, tensor) for i in range(len(self.space.profile.graph))]
        layouts = [Layout(width=width, data=data, tensor=t) for t in (1, tensor)]
        return self.compute_in([layouts[s] for s in split], num_microbatches, width * stages)

    def at_least(self, candidate: Candidate) -> float:
        """A lower bound on the seconds of a pipeline, from compute alone: one microbatch passes all stages before some
        stage, and that one computes all microbatches. 0 for a single stage and on unequal devices."""
        if self.space.cluster.unequal or len(candidate.widths) == 1:
            return 0.0
        m = candidate.num_microbatches
        component_s = self.compute_in([w.layout for w in candidate.ways], m, self.busy(candidate))
        stages = np.add.reduceat(component_s, candidate.starts)
        front = np.cumsum(stages) - stages
        return float((front + m * stages).max())

    def compute_on(self, samples: int, tensor: int) -> np.ndarray:
        """For each component, split ``tensor`` ways, the seconds of forward and backward of ``samples`` on one of the
        profile's devices while no other works; infinite where it cannot be split."""
        key = (samples, tensor, self.space.by_tokens)
        if key not in self._computes:
            if tensor not in self._splits:
                count = len(self.space.profile.graph)
                self._splits[tensor] = np.array([self.space.splits(i, tensor) for i in range(count)])
            seconds = (self._times.least if self.space.by_tokens else self._times.both)(samples, tensor)
            seconds = seconds * self._times.whole_ratio(samples)
            self._computes[key] = np.where(self._splits[tensor], seconds, np.inf)
        return self._computes[key]

    def prepare_on(self, sizes: Sequence[int], tensor: int) -> None:
        """Interpolate the times of :meth:`compute_on` for many numbers of samples at once."""
        self._times.prepare(sizes, tensor)

    def repeated(self, samples: int, tensor: int) -> np.ndarray:
        """For each component, a second forward as a share of its seconds, split ``tensor`` ways; the smaller one, where
        tokens may be split, too."""
        kinds = (False, True) if self.space.by_tokens else (False,)
        passes = np.array([self._times.passes(samples, tensor, by_tokens=x) for x in kinds])
        again = np.array([self._times.again(samples, tensor, by_tokens=x) for x in kinds])
        share: np.ndarray = (again / np.maximum(passes.sum(axis=1), np.finfo(float).tiny)).min(axis=0)
        return share

    def capacity(self, candidate: Candidate) -> float:
        """Bytes of active memory that a rank of ``candidate`` may use."""
        return self.space.capacity(self.busy(candidate))

    def fits(self, candidate: Candidate) -> bool:
        """Whether every rank has enough memory. Every plan has to pass this test, wherever it comes from."""
        return self.of(candidate).peak.total <= self.capacity(candidate)

    def lacking(self, candidate: Candidate) -> str:
        """The memory that a rank of ``candidate`` needs, of what it may use, in words: as predicted, with libraries."""
        more, free = libraries(self.space.cluster.device), self.capacity(candidate)
        rest = f" of {binary(free + more)}"
        if free <= 0:
            rest = ", and the context of the device leaves nothing of its memory"
        return f"{binary(self.of(candidate).peak.total + more)}{rest}"

    def excess(self, stage: StagePrice, first: int, width: int, busy: int) -> float:
        """Bytes by which a stage from rank ``first`` on exceeds what its ranks may use, on the rank where that is most;
        not positive where all fit."""
        if not stage.peaks:
            return stage.peak.total - self.space.room(first, width, busy)
        return max(p.total - self.space.room(first + r, 1, busy) for r, p in enumerate(stage.peaks))

    def busy(self, candidate: Candidate) -> int:
        """Number of ranks that slow each other down: those of a single stage, or all that a pipeline may use."""
        return candidate.ranks if len(candidate.widths) == 1 else self.space.request.gpus

    def of(self, candidate: Candidate) -> Price:
        """The price of a candidate."""
        key = candidate.key
        if key not in self._priced_candidates:
            if len(self._priced_candidates) > _KEPT // len(candidate.ways):
                del self._priced_candidates[next(iter(self._priced_candidates))]
            self._priced_candidates[key] = self._of(candidate)
        return self._priced_candidates[key]

    def _of(self, candidate: Candidate) -> Price:
        m, busy = candidate.num_microbatches, self.busy(candidate)
        clock.count("component", len(candidate.ways))
        clock.count("action", m * len(candidate.widths))
        schedule = self.space.strategies.schedules[candidate.schedule] if len(candidate.widths) > 1 else None
        firsts = [0, *accumulate(candidate.widths[:-1])]
        pricers = [self.pricer(w, m, busy, first) for w, first in zip(candidate.widths, firsts, strict=True)]
        total = price(pricers, candidate.starts, candidate.ways, self.space.cluster.overlap, schedule)
        return self._levelled(total, candidate, firsts) if self.space.cluster.devices else total

    def _levelled(self, price: Price, candidate: Candidate, firsts: list[int]) -> Price:
        """The price with the peak of the stage that comes closest to the limit of its devices, shifted so that it
        compares with :meth:`capacity`."""
        busy, free = self.busy(candidate), self.capacity(candidate)
        placed_stages = zip(price.stages, firsts, candidate.widths, strict=True)
        peaks = [replace(s.peak, total=free + self.excess(s, first, width, busy)) for s, first, width in placed_stages]
        return replace(price, peak=max(peaks, key=lambda p: p.total))
