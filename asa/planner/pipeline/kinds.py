"""Unequal devices: the kind of each rank, the weights by which a stage may divide its batch, and stages of one kind.

The pipeline search counts a stage's devices and the devices in front of it. Where devices are of several kinds, a
device of kind k counts as ``u_k`` instead of 1, chosen so that the count of a stage also tells the kind of its devices.
Offsets are sums of the counts in front. :meth:`KindSpace.placed` tells which stage may begin at which offset. Nothing
else changes, so the proofs hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

from asa.ir.cluster import Cluster
from asa.ir.layout import Layout, lowest_terms
from asa.planner.pipeline.practice import FINE, quickest
from asa.planner.pipeline.staged import NEVER_MS, StagedSpace
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Allowed, divisors

_STEPS = 24
"""Most weights tried for a stage with devices of two speeds, besides equal ones and those in proportion to speed."""
_TOGETHER, _EACH = 8, 4
"""Largest group of ranks that gets a weight as a whole, where the batch has fewer than so many samples for each rank;
with more, weights of single ranks are fine enough."""
_FINEST = 2**16
"""Most samples of a batch that weights distinguish."""


def kinds(cluster: Cluster, ranks: int) -> tuple[int, ...]:
    """Kind of each rank, numbered by first appearance. Devices of one kind have the same speed and memory."""
    devices = cluster.kinds(ranks)
    order = list(dict.fromkeys(devices))
    return tuple(order.index(x) for x in devices)


def weights(cluster: Cluster, width: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """Uneven weights by which a stage of the first ``width`` ranks may divide a batch.

    With two speeds: every whole number of samples for a rank of the faster kind, and one for a rank of the other kind,
    the rest spread over the other ranks; where there are many, only those near the share by speed and others at
    intervals. With many, or with more than two speeds, also weights in proportion to speed.

    >>> from asa.cost.machine import presets
    >>> weights(presets.load("a100-nvlink-8"), 8, 64)
    ()
    """
    speeds = [cluster.speed(r) for r in range(width)]
    order = list(dict.fromkeys(speeds))
    if len(order) < 2:
        return ()
    choices, batch = [], min(batch, _FINEST)
    if len(order) == 2:
        first_count, second_count = (speeds.count(s) for s in order)
        most = (batch - second_count) // first_count
        step = 1 if most <= _STEPS else -(-2 * most // _STEPS)
        near = round(batch * order[0] / sum(speeds)) - _STEPS // 4  # single samples count where the optimum is likely
        rows = {*range(1, most + 1, step), *range(max(1, near), min(most, near + _STEPS // 2) + 1)}
        pairs = [(k * second_count, batch - k * first_count) for k in sorted(rows)]
        pairs += [(batch - second_count, first_count)] * (step == 1 and batch > second_count)
        choices += [tuple(pair[s != order[0]] for s in speeds) for pair in pairs]
        if step == 1:
            return _distinct(choices)
    return _distinct([*choices, tuple(max(1, round(FINE * s / max(speeds))) for s in speeds)])


def _distinct(choices: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Weights in lowest terms, each once, without equal shares."""
    return tuple(w for w in dict.fromkeys(lowest_terms(w) for w in choices) if w)


def views(prices: Prices, solved: Callable[[int], bool] = lambda _: False) -> list[tuple[Prices, tuple[int, ...]]]:
    """Prices with one choice of batch weights for each width that has devices of several speeds: first equal shares for
    all widths, then every choice with the widths that it concerns. Widths that are ``solved`` with all choices at once
    have equal shares alone."""
    space = prices.space
    pairs = [(prices, space.single_widths())]
    if not space.cluster.unequal or not space.request.uneven:
        return pairs
    batch, some = space.request.global_batch, [w for w in space.single_widths() if not solved(w)]
    choices = {
        w: _distinct(
            [
                *(quickest(prices, w, g) for g in divisors(w) if g == 1 or (g <= _TOGETHER and batch < _EACH * w)),
                *weights(space.cluster, w, batch),
            ]
        )
        for w in some
    }
    for k in range(max((len(c) for c in choices.values()), default=0)):
        cut = {w: c[k] for w, c in choices.items() if k < len(c)}
        pairs.append((Prices(space.weighted(cut), prices), tuple(cut)))
    return pairs


class KindSpace(StagedSpace):
    """Stages whose devices are all of one kind, counted as the module describes."""

    def __init__(self, prices: Prices, allowed: Allowed) -> None:
        super().__init__(prices, allowed)
        kind_of = kinds(prices.space.cluster, self._busy)
        longest = dict.fromkeys(kind_of, 0)
        for k, run in groupby(kind_of):
            longest[k] = max(longest[k], len(list(run)))
        units = numbering(longest)
        self._kinds = kind_of
        self._starts = [0, *accumulate(units[k] for k in kind_of)]
        self._stages = {u * w: (k, w) for k, u in units.items() for w in prices.space.several(longest[k])}
        self.gpus = self._starts[-1]

    def first(self, offset: int) -> int:
        """The first rank at an offset."""
        return min(bisect_right(self._starts, offset) - 1, self._busy)

    def width(self, number: int) -> int:
        """Number of devices of a stage, from its count."""
        return self._stages.get(number, (0, number))[1]

    def widths(self) -> tuple[int, ...]:
        """Counts of all possible stages, ascending; at least one device is left for another stage."""
        return tuple(sorted(n for n in self._stages if n < self.gpus))

    def placed(self, offset: int, width: int) -> bool:
        """Whether a stage may begin there: on devices of its kind, inside a node or on whole nodes."""
        kind, count = self._stages[width]
        first = self.first(offset)
        if self._starts[first] != offset or set(self._kinds[first : first + count]) != {kind}:
            return False
        return first + count <= self._busy and self._prices.space.placed(first, count)

    def hop(self, offset: int) -> int:
        """Level of the link in front of the rank at that offset."""
        return super().hop(self.first(offset))

    def example(self, width: int) -> int:
        """First rank from which as many devices of the stage's kind follow as the stage has."""
        kind, count = self._stages[width]
        return next(r for r in range(self._busy) if self._kinds[r : r + count] == (kind,) * count)

    def transfers(
        self, cuts: Sequence[int], num_microbatches: int, source: Layout, target: Layout, offset: int
    ) -> list[tuple[float, float]]:
        """Milliseconds of transfers, as by :meth:`StagedSpace.transfers`; layouts may have widths counted by kind."""
        ends = [(self.width(x.width), x.data) for x in (source, target)]
        if any(width % data for width, data in ends):
            return [(NEVER_MS, NEVER_MS)] * len(cuts)
        front, behind = (Layout(width=width, data=data, tensor=1) for width, data in ends)
        return super().transfers(cuts, num_microbatches, front, behind, offset)


def numbering(longest: dict[int, int]) -> dict[int, int]:
    """The count of a device of each kind, such that sums of up to ``longest[k]`` devices of kind k differ between
    kinds.

    The kind with the longest run counts 1, so that its counts are numbers of devices.

    >>> numbering({0: 4, 1: 4}), numbering({0: 1, 1: 3})
    ({0: 1, 1: 5}, {1: 1, 0: 4})
    """
    units: dict[int, int] = {}
    used: set[int] = set()
    for kind, most in sorted(longest.items(), key=lambda x: -x[1]):
        unit = next(u for u in range(1, 10**6) if not used & {u * w for w in range(1, most + 1)})
        units[kind] = unit
        used |= {unit * w for w in range(1, most + 1)}
    return units


def pipelines(prices: Prices, allowed: Allowed) -> StagedSpace:
    """The space of pipeline plans on the cluster's devices."""
    return KindSpace(prices, allowed) if prices.space.cluster.unequal else StagedSpace(prices, allowed)
