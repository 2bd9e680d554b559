"""The space that is searched: stage widths, layouts, and the ways in which each component may run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from difflib import get_close_matches
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
from asa.planner.space.request import Pin, Request

NARROW = 16
"""Most ranks of a stage that may use every layout."""
_WIDEST_SPLIT = 64

_ROUNDED = 1e-2
"""Bytes by which a sum of memory may exceed a limit, because of rounding."""

MOST_IN_A_PIPELINE = 1024
"""Most microbatches of a pipeline; its bubble is negligible long before."""

Allowed = Callable[[int, Way], bool]
"""A restriction: whether component i may run in a way, besides what strategies refuse."""


def anything(_index: int, _way: Way) -> bool:
    """Allow everything: no restriction."""
    return True


_BY_EIGHT = 128
"""Width up to which multiples of 8 are tried; beyond, steps are a sixteenth to an eighth of a width (decision 0196)."""


def widths(gpus: int) -> tuple[int, ...]:
    """Widths of stages in the space, widest first: all up to 8, multiples of 8 up to 128, multiples of 16 up to 256, of
    32 up to 512 and so on, and ``gpus`` itself."""
    sizes = {*range(1, min(gpus, 8) + 1), *range(16, min(gpus, _BY_EIGHT) + 1, 8), gpus}
    for from_, step in _wide_steps(gpus):
        sizes |= {*range(from_ + step, min(gpus, 2 * from_) + 1, step)}
    return tuple(sorted(sizes, reverse=True))


def _wide_steps(gpus: int) -> Iterator[tuple[int, int]]:
    """Widths beyond which wider steps begin, with the step, below ``gpus``."""
    from_, step = _BY_EIGHT, 16
    while from_ < gpus:
        yield from_, step
        from_, step = 2 * from_, 2 * step


@cache
def layouts(width: int) -> tuple[Layout, ...]:
    """All layouts of a stage: every pair of data and tensor degree whose product divides its width."""
    some = divisors(width)
    return tuple(Layout(width=width, data=d, tensor=t) for d in some for t in some if width % (d * t) == 0)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, ascending; of a width, the data degrees that a stage may have."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


class Space:
    """All plans that a profile, a cluster, the offered strategies and a request allow."""

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
        self.by_tokens = "sequence" in strategies.tensor and ("sequence" in request.named or bool(profile.by_tokens))
        """Whether layouts that split tokens are searched: where such shards were measured, or asked for by name."""
        self._measured_one = {t.component for t in profile.timings if t.microbatch == 1 and t.tensor_degree == 1}
        self._tied = [i for i, c in enumerate(profile.graph.components) if c.tied]
        self.may_offload = strategies.offload and cluster.device.type == "cuda"
        self.offloading = self.may_offload and request.offload == "always"
        """Whether components may keep their optimizer state on the host. With ``auto``, the prices decide."""
        self.pinned: Allowed = pinned(profile, request.pins) if request.pins else anything
        self.weights: dict[int, tuple[int, ...]] = {}
        """Weights by which stages from rank 0 on divide a batch, by width; stages of other widths divide it evenly."""

    def weighted(self, weights: dict[int, tuple[int, ...]], batch: int | None = None) -> Space:
        """A copy in which stages divide batches by ``weights``, with another ``batch`` if one is given."""
        space = copy(self)
        space.request = self.request if batch is None else replace(self.request, global_batch=batch)
        space.weights, space._layouts, space._cut, space._ways = weights, {}, {}, {}
        return space

    @property
    def measured(self) -> bool:
        """Whether nothing is estimated: the model was profiled without disturbance, and the links were measured."""
        return self.profile.provenance.trusted and self.cluster.status == "measured"

    def microbatches(self) -> tuple[int, ...]:
        """Numbers of microbatches in the space: the one asked for, or all powers of two up to the batch."""
        if self.request.microbatches is not None:
            return (self.request.microbatches,)
        return tuple(2**k for k in range(self.request.global_batch.bit_length()))

    def capacity(self, width: int) -> float:
        """Bytes of active memory that a rank may use; for unequal devices the least among the first ``width``."""
        return self.room(0, width, width)

    def room(self, first: int, width: int, busy: int) -> float:
        """Bytes of active memory that each rank of a stage from rank ``first`` on may use; ``busy`` ranks take part.
        Bounds and searches have this limit, and what exceeds it does not fit."""
        limit = self.request.memory_bytes
        if limit is None and self.cluster.devices is not None:
            limit = min(self.cluster.memories()[first : first + width])
        return usable(self.cluster.device, limit, busy) + _ROUNDED

    def ways(self, index: int, width: int, num_microbatches: int, allowed: Allowed = anything) -> Iterator[Way]:
        """Every allowed way of component ``index`` in a stage of ``width`` ranks with ``num_microbatches``."""
        for layout in self.layouts(width, num_microbatches):
            if self.enough(index, layout, num_microbatches):
                yield from (w for w in self.ways_in(index, layout, num_microbatches) if allowed(index, w))

    def ways_in(self, index: int, layout: Layout, num_microbatches: int) -> tuple[Way, ...]:
        """Every way of component ``index`` in ``layout``, whether or not its ranks have enough samples."""
        tied = self.profile.graph.components[index].tied
        if tied and layout.data != self.shared(layout, num_microbatches):
            return ()
        return self.ways_on_any(index, layout)

    def ways_on_any(self, index: int, layout: Layout) -> tuple[Way, ...]:
        """Every way of component ``index`` in ``layout``; one that shares a parameter may have any data degree."""
        key = (self.profile.graph.like[index], layout, self.offloading)
        if key not in self._ways:
            self._ways[key] = tuple(self._every_way(index, layout))
        return self._ways[key]

    def _every_way(self, index: int, layout: Layout) -> Iterator[Way]:
        component = self.profile.graph.components[index]
        if component.tied and layout.tensor > 1:  # they are not split
            return
        for tensor in self.splitting(index, layout.tensor, layout.sequence):
            named = (tensor, layout.tensor)
            split = self._tensor_degrees.setdefault(named, TensorDegree(strategy=tensor, degree=layout.tensor))
            share = self.strategies.tensor[tensor].share(component, layout.tensor)
            private = [
                (checkpoint, offload)
                for checkpoint in ((False, True) if self.forgets(component) else (False,))
                for offload in self.offloads(share.parameter_bytes > 0)
            ]
            for data in self._data(index, layout, share.parameter_bytes > 0):
                for checkpoint, offload in private:
                    yield Way(layout=layout, data=data, tensor=split, checkpoint=checkpoint, offload=offload)

    def layouts(self, width: int, num_microbatches: int) -> tuple[Layout, ...]:
        """The layouts of a stage that are in the space. A narrow stage has all of them.

        In a wide stage, where pairs of layouts would number thousands, each tensor degree has the data degree that uses
        all ranks and, with fewer samples than that, the largest that leaves each rank one sample, or two. Where tokens
        may be split, every layout with a tensor degree exists a second time with split tokens.
        """
        plain, key = self.whole_layouts(width, num_microbatches), (width, num_microbatches)
        if not self.by_tokens:
            return plain
        if key not in self._cut:
            self._cut[key] = (*plain, *(replace(x, sequence=True) for x in plain if x.tensor > 1))
        return self._cut[key]

    def whole_layouts(self, width: int, num_microbatches: int) -> tuple[Layout, ...]:
        """The layouts of :meth:`layouts` that do not split tokens."""
        key, weights = (width, num_microbatches), self.weights.get(width, ())
        if key not in self._layouts:
            narrow = width <= NARROW or self.request.pins
            even = layouts(width) if narrow else tuple(self._wide_layouts(width, num_microbatches, weights))
            self._layouts[key] = tuple(replace(x, weights=weights) for x in even) if weights else even
        return self._layouts[key]

    def _wide_layouts(self, width: int, num_microbatches: int, weights: tuple[int, ...]) -> Iterator[Layout]:
        for tensor in (t for t in divisors(width) if t <= _WIDEST_SPLIT):
            even = [Layout(width=width, data=d, tensor=tensor) for d in divisors(width // tensor)]
            some = [replace(x, weights=weights) for x in even] if weights else even
            samples = [self.samples(x, num_microbatches) for x in some]
            most = {len(even) - 1, *(max((i for i, n in enumerate(samples) if n >= k), default=0) for k in (1, 2))}
            yield from (even[i] for i in sorted(most))

    def shared(self, layout: Layout, num_microbatches: int) -> int:
        """The data degree of components that share a parameter, in a stage with a component in ``layout``: the largest
        that leaves each of their ranks enough samples. They all run in one layout."""
        fewest = max((self.fewest_samples(i) for i in self._tied), default=1)
        some = (replace(layout, data=d, tensor=1, sequence=False) for d in reversed(divisors(layout.width)))
        return next((x.data for x in some if self.samples(x, num_microbatches) >= fewest), layout.width)

    def forgets(self, component: Component) -> bool:
        """Whether recomputation is offered and saves memory: the activations of the component exceed its output, which
        is kept."""
        return self.strategies.checkpoint and component.saved_bytes_per_sample > component.output_bytes_per_sample

    def offloads(self, has_parameters: bool) -> tuple[bool, ...]:
        """Whether the optimizer state of a component may be on the host: all choices, the usual one first."""
        if not self.offloading or not has_parameters:
            return (False,)
        return (True,) if self.request.offload == "always" else (False, True)

    def shards(self, layout: Layout) -> int | None:
        """The number of neighbours over which hsdp shards the state of a data group: those inside a node. None where
        the group lies inside one node, or is not aligned with nodes.

        In a cluster with one level all devices are one node. There it is the largest proper divisor of the group's
        size, if hsdp is asked for by name.
        """
        node, degree = self.cluster.node, layout.data
        if len(self.cluster.levels) > 1:
            inside = node // layout.inner if node % layout.inner == 0 else 1
        else:
            halves = (x for x in range(degree // 2, 1, -1) if degree % x == 0)
            inside = next(halves, 1) if "hsdp" in self.request.named else 1
        return inside if 1 < inside < degree and degree % inside == 0 else None

    def data_degree(self, name: DataStrategyName, layout: Layout) -> DataDegree | None:
        """The data strategy ``name`` with its degree in ``layout``; None where it cannot run there."""
        if (name, layout) not in self._data_degrees:
            shards = self.shards(layout) if name == "hsdp" else None
            able = name != "hsdp" or shards is not None
            degree = DataDegree(strategy=name, degree=layout.data, shards=shards) if able else None
            self._data_degrees[name, layout] = degree
        return self._data_degrees[name, layout]

    def several(self, gpus: int) -> tuple[int, ...]:
        """Widths of ``gpus`` ranks that a stage of several may have: :func:`widths` and whole nodes, if they fit in."""
        sizes = {*widths(gpus), *range(self.cluster.node, min(gpus, 16) + 1, self.cluster.node)}
        return tuple(w for w in sorted(sizes, reverse=True) if self.placed(0, w))

    def placed(self, offset: int, width: int) -> bool:
        """Whether a stage of ``width`` ranks may begin at rank ``offset``."""
        return self.cluster.placed(offset, width)

    def splits(self, index: int, degree: int) -> bool:
        """Whether component ``index`` can be split ``degree`` ways."""
        return bool(self.splitting(index, degree))

    def enough_samples(self, index: int, degree: int, num_microbatches: int) -> bool:
        """Whether every one of ``degree`` ranks has the fewest samples of component ``index`` in every microbatch."""
        return self.request.global_batch // num_microbatches // degree >= self.fewest_samples(index)

    def enough(self, index: int, layout: Layout, num_microbatches: int) -> bool:
        """Whether ``layout``, whose shards may be uneven, leaves component ``index`` enough samples on every rank."""
        return self.samples(layout, num_microbatches) >= self.fewest_samples(index)

    def samples(self, layout: Layout, num_microbatches: int) -> int:
        """Number of samples of the smallest shard of the smallest microbatch."""
        batch = self.request.global_batch
        if not layout.weights:
            return batch // num_microbatches // layout.data
        return min(layout.fewest(size) for size in (batch // num_microbatches, -(-batch // num_microbatches)))

    def fewest_samples(self, index: int) -> int:
        """The fewest samples of a microbatch that a component needs on a rank; two for BatchNorm, unless measured."""
        component = self.profile.graph.components[index]
        return 2 if component.batch_norm and component.name not in self._measured_one else 1

    def splitting(self, index: int, degree: int, sequence: bool = False) -> list[TensorStrategyName]:
        """The tensor strategy that splits component ``index`` into ``degree`` shards, if one can; ``sequence``: where
        its layout splits tokens."""
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
        free = layout.data > 1 and has_parameters
        names = list(offered) if free else [n for n in offered if n == "replicate"]
        choices = [
            self.data_degree(n, layout)  # type: ignore[arg-type]
            for n in names
            if not offered[n].refusal(component, layout.data)
        ]
        return [c for c in choices if c is not None]

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules that a pipeline may have. ``layers`` is left out: it is 1f1b with one microbatch."""
        return {n: s for n, s in self.strategies.schedules.items() if n != "layers"}

    def _wide(self) -> str:
        whole = ", inside a node or in whole ones" if len(self.cluster.levels) > 1 else ""
        nodes = " or up to 16 in whole nodes" if whole and self.cluster.node not in (8, 16) else ""
        beyond = "".join(f", beyond {w} of {step}" for w, step in _wide_steps(self.request.gpus))
        return whole if self.request.gpus <= 8 else f" up to 8 and multiples of 8{beyond}{nodes}{whole}"

    def _counts(self, *, piped: bool, many: bool) -> str:
        if self.request.microbatches is not None:
            return f"microbatches as asked for, {self.request.microbatches}"
        most = f", {MOST_IN_A_PIPELINE} at most in a pipeline" if piped and many else ""
        return f"microbatches in powers of two{most}" + (", in one stage" if piped else "") + " while memory binds"

    def single_widths(self) -> tuple[int, ...]:
        """Widths of single stages, widest first: all up to 16, :func:`widths`, a node, divisors of the batch, the
        fewest ranks with up to 4 samples each, the batch times powers of two, and where devices of another kind
        begin."""
        gpus, batch, kinds = self.request.gpus, self.request.global_batch, self.cluster.kinds(self.request.gpus)
        some = {w for w in range(1, gpus) if w <= NARROW or batch % w == 0 or kinds[w] != kinds[w - 1]}
        some |= {batch << k for k in range(gpus.bit_length())} | {-(-batch // k) for k in (2, 3, 4)}
        some.add(self.cluster.node)
        return tuple(sorted({*widths(gpus), *(w for w in some if w < gpus)}, reverse=True))

    def describe(self) -> str:
        """The space in words, for the certificate."""
        gpus = self.request.gpus
        piped = self.schedules and gpus > 1
        many, wide = self.request.global_batch > MOST_IN_A_PIPELINE, gpus > NARROW
        some = "of its divisors, of its half, third or quarter rounded up"
        checkpoint = " x checkpoint" if self.strategies.checkpoint else ""
        if self.offloading:
            checkpoint += " x offload" if self.request.offload == "auto" else ", optimizer state on the host"
        splits = [n for n in self.strategies.tensor if n != "sequence" or self.by_tokens]
        parts = [
            f"one stage of 1 to {min(gpus, NARROW)} ranks"
            + (f", of a multiple of 8 ranks, of a power of two times the batch, {some}, or of {gpus}" * wide)
            + (", or of a node" if wide and NARROW < self.cluster.node < gpus and self.cluster.node % 8 else "")
            + (", or of the first ranks up to another kind" if wide and self.cluster.unequal else "")
            + (f", or several of any widths{self._wide()} ({', '.join(self.schedules)})" if piped else "")
            + (f", priced with all {gpus} devices busy" if piped and gpus > 2 else ""),
            f"per component data ({', '.join(self.strategies.data)}) x tensor ({', '.join(splits)}) "
            f"of every degree whose product divides the ranks of its stage{checkpoint}",
            self._counts(piped=bool(piped), many=many),
        ]
        if wide and not self.request.pins:
            two = "only where more ranks would have fewer than two samples"
            parts.append(f"in stages of more than {NARROW} ranks work is repeated {two}")
        if self.cluster.unequal:
            parts.append(
                "of unequal devices the first ranks are used; a single stage cuts its batch evenly"
                + (" or by any weights" if self.request.uneven else "")
                + "; stages of several have devices of one kind each"
                + ", also as many as its longest row has" * (gpus > 8)
            )
        if self._tied:
            parts.append(
                "components that share a parameter have the largest data degree that leaves each rank a sample; lower "
                "degrees are tried in the plan found only"
            )
        if self.request.pins:
            parts.append("pins " + " ".join(str(p) for p in self.request.pins))
        return "; ".join(parts)


def pinned(profile: Profile, pins: Sequence[Pin]) -> Allowed:
    """The restriction that ``pins`` put on the ways of components. Where a component has no parameters, a data strategy
    has nothing to do, and replicas are as good as what a pin names.

    Raises:
        UsageError: a pin matches no component, or two pins contradict each other on one component.
    """
    components = profile.graph.components
    names, bare = [c.name for c in components], {i for i, c in enumerate(components) if not c.parameter_bytes}
    pin_of: dict[tuple[int, str], Pin] = {}
    for pin in pins:
        matched = [i for i, name in enumerate(names) if pin.matches(name)]
        if not matched:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            near = get_close_matches(pin.pattern, names, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"it has {shown}"
            raise UsageError(f"pin {pin} matches no component of {profile.model_spec}; {hint}")
        for i in matched:
            other = pin_of.get((i, pin.axis), pin)
            same = (other.strategy, other.degree) == (pin.strategy, pin.degree)
            loose, exact = sorted((other, pin), key=lambda p: p.degree or 0)
            if not same and (loose.degree or not exact.degree or not loose.allows(exact.strategy, exact.degree)):
                raise UsageError(f"pins {other} and {pin} contradict each other on component {names[i]}")
            pin_of[i, pin.axis] = exact

    def allowed(index: int, way: Way) -> bool:
        for axis, choice in (("data", way.data), ("tensor", way.tensor)):
            pin = pin_of.get((index, axis))
            same = pin is not None and axis == "data" and index in bare
            if pin is not None and not pin.allows(pin.strategy if same else choice.strategy, choice.degree):
                return False
        return True

    return allowed


def check(strategies: Strategies, pins: Sequence[Pin]) -> None:
    """Refuse pins to strategies that are not offered.

    Raises:
        UsageError: names those that are offered.
    """
    offered = (*strategies.data, *strategies.tensor)
    for pin in pins:
        if pin.degree != 1 and pin.strategy not in offered:
            raise UsageError(f"pin {pin}: {pin.strategy} is not built yet; one of {', '.join(offered)}")
