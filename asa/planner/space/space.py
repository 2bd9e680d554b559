"""The space that is searched: stage widths, layouts, and the ways in which each component may run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache

from asa.cost.memory.peak import usable
from asa.cost.pricing import Way
from asa.errors import UsageError
from asa.interfaces.schedule import Schedule
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.graph import Component
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, DataStrategyName, TensorDegree, TensorStrategyName
from asa.ir.profile import Profile
from asa.ir.units import GIB
from asa.planner.space.request import TENSOR_NAMES, Pin, Request

_NARROW = 16
"""Ranks up to which a stage may use every layout."""
_WIDEST_SPLIT = 64

TOLERANCE_GIB = 1e-5
"""What is asked of memory, to this much: solvers take limits in GiB, with a tolerance."""
_SPARED = TOLERANCE_GIB * GIB - 1e-3
"""Bytes: by so much a solver may overstep a limit in GiB, so that what is promised stays within what was asked."""

MOST_IN_A_PIPELINE = 1024
"""Microbatches of a pipeline: the bubble is gone long before."""

Allowed = Callable[[int, Way], bool]
"""Whether component i may run that way, beyond what strategies refuse."""


def anything(_index: int, _way: Way) -> bool:
    """Allow everything: no restriction."""
    return True


def widths(gpus: int) -> tuple[int, ...]:
    """Stage widths to try, widest first: all up to 8, then whole nodes of 8, and all ranks."""
    found = {*range(1, min(gpus, 8) + 1), *range(16, gpus + 1, 8), gpus}
    return tuple(sorted(found, reverse=True))


@cache
def layouts(width: int) -> tuple[Layout, ...]:
    """Every layout of a stage: all (data, tensor) whose product divides its width."""
    some = _divisors(width)
    return tuple(Layout(width=width, data=d, tensor=t) for d in some for t in some if width % (d * t) == 0)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


class Space:
    """What a profile, a cluster, the strategies offered and a request leave to choose from."""

    def __init__(self, profile: Profile, cluster: Cluster, strategies: Strategies, request: Request) -> None:
        self.profile = profile
        self.cluster = cluster
        self.strategies = strategies
        self.request = request
        self._layouts: dict[tuple[int, int], tuple[Layout, ...]] = {}
        self._ways: dict[tuple[int, Layout, bool], tuple[Way, ...]] = {}
        self._cut: dict[tuple[int, int], tuple[Layout, ...]] = {}
        self._tensor_degrees: dict[tuple[TensorStrategyName, int], TensorDegree] = {}
        self._data_degrees: dict[tuple[DataStrategyName, Layout], DataDegree | None] = {}
        self._splits: dict[tuple[int, int, bool], list[TensorStrategyName]] = {}
        self.may_cut_tokens = "sequence" in strategies.tensor and request.gpus > 1 and bool(profile.by_tokens)
        """Whether components may cut their tokens, too, where memory binds; prices tell. Unasked only where shards of
        such were measured."""
        self.by_tokens = "sequence" in strategies.tensor and "sequence" in request.named
        """Whether they may, in what is searched: asked for by name, or because of that."""
        self._measured_one = {t.component for t in profile.timings if t.microbatch == 1 and t.tensor_degree == 1}
        self.may_offload = strategies.offload and cluster.device.type == "cuda"
        self.offloading = self.may_offload and request.offload == "always"
        """Whether components may keep their optimizer state on the host; where it is open, prices tell."""
        self.pinned: Allowed = pinned(profile, request.pins) if request.pins else anything
        self.weights: dict[int, tuple[int, ...]] = {}
        """By width, how stages that begin with rank 0 cut a batch; evenly where nothing is said."""

    def weighted(self, weights: dict[int, tuple[int, ...]]) -> Space:
        """A copy in which stages divide batches by ``weights``."""
        found = copy(self)
        found.weights, found._layouts, found._cut, found._ways = weights, {}, {}, {}
        return found

    @property
    def measured(self) -> bool:
        """Whether the model was profiled, undisturbed, and the links were timed: nothing is an estimate."""
        return self.profile.provenance.trusted and self.cluster.status == "measured"

    def microbatches(self) -> tuple[int, ...]:
        """Numbers of microbatches: the one asked for, or powers of two up to the batch."""
        if self.request.microbatches is not None:
            return (self.request.microbatches,)
        return tuple(2**k for k in range(self.request.global_batch.bit_length()))

    def capacity(self, width: int) -> float:
        """Bytes of active memory that a rank may plan with; of unequal devices the least among the first ``width``."""
        return self.room(0, width, width)

    def room(self, first: int, width: int, busy: int) -> float:
        """Bytes per rank for a stage that begins with rank ``first``, where ``busy`` ranks take part."""
        limit = self.request.memory_bytes
        if limit is None and self.cluster.devices is not None:
            limit = min(self.cluster.memories()[first : first + width])
        return usable(self.cluster.device, limit, busy) - _SPARED

    def ways(self, index: int, width: int, num_microbatches: int, allowed: Allowed = anything) -> Iterator[Way]:
        """Every way component ``index`` may run, in a stage of ``width``, with that many microbatches."""
        for layout in self.layouts(width, num_microbatches):
            if self.enough(index, layout, num_microbatches):
                yield from (way for way in self.ways_in(index, layout) if allowed(index, way))

    def ways_in(self, index: int, layout: Layout) -> tuple[Way, ...]:
        """Every way that component ``index`` may run in a layout, if its ranks have samples enough."""
        key = (index, layout, self.offloading)
        if key not in self._ways:
            self._ways[key] = tuple(self._every_way(index, layout))
        return self._ways[key]

    def _every_way(self, index: int, layout: Layout) -> Iterator[Way]:
        component = self.profile.graph.components[index]
        if component.tied and layout.data != layout.width:  # one way for all that share a parameter
            return
        for tensor in self._tensor(index, layout.tensor, layout.sequence):
            named = (tensor, layout.tensor)
            split = self._tensor_degrees.setdefault(named, TensorDegree(strategy=tensor, degree=layout.tensor))
            share = self.strategies.tensor[tensor].share(component, layout.tensor)
            private = [
                (checkpoint, offload)
                for checkpoint in ((False, True) if self.forgets(component) else (False,))
                for offload in self._offloads(share.parameter_bytes > 0)
            ]
            for data in self._data(index, layout, share.parameter_bytes > 0):
                for checkpoint, offload in private:
                    yield Way(layout=layout, data=data, tensor=split, checkpoint=checkpoint, offload=offload)

    def layouts(self, width: int, num_microbatches: int) -> tuple[Layout, ...]:
        """The layouts of a stage that are in the space: all of a narrow stage.

        In a wide one, where there would be thousands of pairs of them, a tensor degree comes with as many data shards
        as there are ranks, or if there are fewer samples than that, with as many as have one (or two). Where tokens may
        be cut, every layout with a tensor degree is there a second time.
        """
        found, key = self.whole_layouts(width, num_microbatches), (width, num_microbatches)
        if not self.by_tokens:
            return found
        if key not in self._cut:
            self._cut[key] = (*found, *(replace(x, sequence=True) for x in found if x.tensor > 1))
        return self._cut[key]

    def whole_layouts(self, width: int, num_microbatches: int) -> tuple[Layout, ...]:
        """The :meth:`layouts` that leave tokens whole."""
        key, weights = (width, num_microbatches), self.weights.get(width, ())
        if weights and key not in self._layouts:
            even = Space.whole_layouts(self.weighted({}), width, num_microbatches)
            self._layouts[key] = tuple(replace(x, weights=weights) for x in even)
        if not weights and (width <= _NARROW or self.request.pins):
            return layouts(width)
        if key not in self._layouts:
            samples = self.request.global_batch // num_microbatches
            found = []
            for tensor in (t for t in _divisors(width) if t <= _WIDEST_SPLIT):
                shards = _divisors(width // tensor)
                most = {shards[-1], *(max((d for d in shards if samples // d >= k), default=1) for k in (1, 2))}
                found += [Layout(width=width, data=d, tensor=tensor) for d in sorted(most)]
            self._layouts[key] = tuple(found)
        return self._layouts[key]

    def forgets(self, component: Component) -> bool:
        """Whether checkpointing a component is offered and saves anything: a checkpoint keeps the component's
        output."""
        return self.strategies.checkpoint and component.saved_bytes_per_sample > component.output_bytes_per_sample

    def _offloads(self, has_parameters: bool) -> tuple[bool, ...]:
        if not self.offloading or not has_parameters:
            return (False,)
        return (True,) if self.request.offload == "always" else (False, True)

    def shards(self, layout: Layout) -> int | None:
        """Over how many neighbours hsdp shards the state of a data group: those inside a node. None where the group has
        no more than one node, or is not aligned with nodes.

        All devices of a cluster with one level are one node: there it is half of the group, if hsdp is asked for by
        name.
        """
        node, degree = self.cluster.node, layout.data
        if len(self.cluster.levels) > 1:
            inside = node // layout.inner if node % layout.inner == 0 else 1
        else:
            halves = (x for x in range(degree // 2, 1, -1) if degree % x == 0)
            inside = next(halves, 1) if "hsdp" in self.request.named else 1
        return inside if 1 < inside < degree and degree % inside == 0 else None

    def data_degree(self, name: DataStrategyName, layout: Layout) -> DataDegree | None:
        """The choice of a data strategy in a layout; None where it has none there."""
        if (name, layout) not in self._data_degrees:
            self._data_degrees[name, layout] = self._new_data_degree(name, layout)
        return self._data_degrees[name, layout]

    def _new_data_degree(self, name: DataStrategyName, layout: Layout) -> DataDegree | None:
        if name != "hsdp":
            return DataDegree(strategy=name, degree=layout.data)
        shards = self.shards(layout)
        return None if shards is None else DataDegree(strategy=name, degree=layout.data, shards=shards)

    def placed(self, offset: int, width: int) -> bool:
        """Whether a stage of that width may begin at that rank."""
        return self.cluster.placed(offset, width)

    def splits(self, index: int, degree: int) -> bool:
        """Whether component ``index`` can be split that far."""
        return bool(self._tensor(index, degree))

    def enough_samples(self, index: int, degree: int, num_microbatches: int) -> bool:
        """Whether every rank has a sample in every microbatch, and BatchNorm something to average over.

        A batch of one is only given to a BatchNorm that was seen to train on one.
        """
        return self.request.global_batch // num_microbatches // degree >= self.fewest_samples(index)

    def enough(self, index: int, layout: Layout, num_microbatches: int) -> bool:
        """Whether a layout, whose shards may be uneven, leaves a component enough samples."""
        return self.samples(layout, num_microbatches) >= self.fewest_samples(index)

    def samples(self, layout: Layout, num_microbatches: int) -> int:
        """Samples of the smallest shard in the smallest microbatch."""
        batch = self.request.global_batch
        if not layout.weights:
            return batch // num_microbatches // layout.data
        return min(layout.fewest(size) for size in (batch // num_microbatches, -(-batch // num_microbatches)))

    def fewest_samples(self, index: int) -> int:
        """Fewest samples of a microbatch on a rank."""
        component = self.profile.graph.components[index]
        return 2 if component.batch_norm and component.name not in self._measured_one else 1

    def _tensor(self, index: int, degree: int, sequence: bool = False) -> list[TensorStrategyName]:
        key = (index, degree, sequence)
        if key not in self._splits:
            component = self.profile.graph.components[index]
            split: TensorStrategyName = "sequence" if sequence else "tensor"
            names: Sequence[TensorStrategyName] = ("none",) if degree == 1 else (split,)
            offered = self.strategies.tensor
            self._splits[key] = [n for n in names if n in offered and not offered[n].refusal(component, degree)]
        return self._splits[key]

    def _data(self, index: int, layout: Layout, has_parameters: bool) -> list[DataDegree]:
        component = self.profile.graph.components[index]
        offered = self.strategies.data
        free = layout.data > 1 and has_parameters and not component.tied
        names = list(offered) if free else [n for n in offered if n == "replicate"]
        choices = [
            self.data_degree(n, layout)  # type: ignore[arg-type]
            for n in names
            if not offered[n].refusal(component, layout.data)
        ]
        return [c for c in choices if c is not None]

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules that a pipeline may have. Layers is 1f1b with one microbatch: it stays a baseline."""
        return {n: s for n, s in self.strategies.schedules.items() if n != "layers"}

    def _wide(self) -> str:
        if self.request.gpus <= 8:
            return ""
        return " up to 8 and multiples of 8" + (
            ", inside a node or in whole ones" if len(self.cluster.levels) > 1 else ""
        )

    def _counts(self, *, piped: bool, many: bool) -> str:
        if self.request.microbatches is not None:
            return f"microbatches as asked for, {self.request.microbatches}"
        most = f", {MOST_IN_A_PIPELINE} at most in a pipeline" if piped and many else ""
        return f"microbatches in powers of two{most}" + (", in one stage" if piped else "") + " while memory binds"

    def describe(self) -> str:
        """The space in words, for the certificate."""
        piped = self.schedules and self.request.gpus > 1
        many = self.request.global_batch > MOST_IN_A_PIPELINE
        checkpoint = " x checkpoint" if self.strategies.checkpoint else ""
        if self.offloading:
            checkpoint += " x offload" if self.request.offload == "auto" else ", optimizer state on the host"
        splits = [n for n in self.strategies.tensor if n != "sequence" or self.by_tokens]
        parts = [
            f"one stage of 1 to {self.request.gpus} ranks"
            + (f", or several of any widths{self._wide()} ({', '.join(self.schedules)})" if piped else ""),
            f"per component data ({', '.join(self.strategies.data)}) x tensor ({', '.join(splits)}) "
            f"of every degree whose product divides the ranks of its stage{checkpoint}",
            self._counts(piped=bool(piped), many=many),
        ]
        if self.request.gpus > _NARROW and not self.request.pins:
            parts.append(f"in stages of more than {_NARROW} ranks none repeats work that has a sample of its own")
        if self.cluster.unequal:
            parts.append(
                "of unequal devices the first ranks are used; a single stage cuts its batch evenly"
                + (" or by any weights, one for ranks of one kind" if self.request.uneven else "")
                + "; stages of several have devices of one kind each"
            )
        if self.request.pins:
            parts.append("pins " + " ".join(str(p) for p in self.request.pins))
        return "; ".join(parts)


def pinned(profile: Profile, pins: Sequence[Pin]) -> Allowed:
    """The restriction that ``pins`` put on each component.

    Raises:
        UsageError: a pin matches no component, or two hold the same choice of one component to different values.
    """
    names = [c.name for c in profile.graph.components]
    held: dict[tuple[int, str], Pin] = {}
    for pin in pins:
        matched = [i for i, name in enumerate(names) if pin.matches(name)]
        if not matched:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise UsageError(f"pin {pin} matches no component of {profile.model_spec}; it has {shown}")
        for i in matched:
            other = held.setdefault((i, pin.axis), pin)
            if (other.strategy, other.degree) != (pin.strategy, pin.degree):
                raise UsageError(f"pins {other} and {pin} contradict each other on component {names[i]}")

    def allowed(index: int, way: Way) -> bool:
        for axis, choice in (("data", way.data), ("tensor", way.tensor)):
            pin = held.get((index, axis))
            if pin is not None and not pin.allows(choice.strategy, choice.degree):
                return False
        return True

    return allowed


def check(strategies: Strategies, pins: Sequence[Pin]) -> None:
    """Refuse pins to strategies that are not offered.

    Raises:
        UsageError: the message names those that are.
    """
    offered = (*strategies.data, *strategies.tensor)
    for pin in pins:
        if pin.degree != 1 and pin.strategy not in offered:
            raise UsageError(f"pin {pin}: {pin.strategy} is not built yet; one of {', '.join(offered)}")


__all__ = ["TENSOR_NAMES", "Allowed", "Space", "Way", "anything", "check", "layouts", "pinned", "widths"]
