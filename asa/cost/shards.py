"""Shards of a microbatch on the ranks of one stage: their samples, the speed of their devices, and their activations.

Microbatches of a step differ by at most one sample, and so do even shards; uneven shards and devices differ by more.
Time is that of the slowest rank; memory is that of the rank that holds most, or comes closest to its device's limit.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any

from asa.cost.memory.peak import margin
from asa.cost.work.compute import Times
from asa.ir.graph import Component, LayerGraph
from asa.ir.layout import Layout, largest_shard


class Shards:
    """Shards of ``num_microbatches`` in a step of ``global_batch``, on ``width`` ranks.

    ``speeds``: one per rank, relative to the profiled device; ``spare``: bytes that each rank's device has beyond the
    smallest device. Both are empty if all are equal. ``rank``: the rank whose memory is computed, None for all.
    """

    def __init__(
        self, *, width: int, global_batch: int, num_microbatches: int, speeds: tuple[float, ...] = (),
        spare: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        self.width, self.speeds, self.spare = width, speeds, spare
        self.rank: int | None = None
        self.microbatch = largest_shard(global_batch, num_microbatches)
        self.sizes = {self.microbatch, global_batch // num_microbatches} - {0}
        self._rows: dict[Layout, tuple[int, ...]] = {}
        self._timed: dict[Layout, tuple[tuple[int, float], ...]] = {}
        self._peak_shards: dict[Layout, tuple[tuple[int, float], ...]] = {}

    @property
    def slowest(self) -> float:
        """The speed of the slowest rank."""
        return min(self.speeds, default=1.0)

    def at(self, rank: int) -> Shards:
        """A copy that computes the memory of the stage's rank number ``rank``."""
        shards = copy(self)
        shards.rank, shards._peak_shards = rank, {}
        return shards

    def rows(self, layout: Layout) -> tuple[int, ...]:
        """Samples of every shard, in the microbatch in which the shard is largest; at least 1."""
        if layout not in self._rows:
            sizes_of = zip(*(layout.sizes(size) for size in self.sizes), strict=True)
            self._rows[layout] = tuple(max(1, *sizes) for sizes in sizes_of)
        return self._rows[layout]

    def largest(self, layout: Layout) -> int:
        """Samples of the largest shard."""
        return max(self.rows(layout)) if layout.weights else largest_shard(self.microbatch, layout.data)

    def timed(self, layout: Layout) -> tuple[tuple[int, float], ...]:
        """Pairs (samples, speed) of the shards that may take longest: for each speed the largest shard. A shard has
        the speed of its slowest rank."""
        if not layout.weights and not self.speeds:
            return ((self.largest(layout), 1.0),)
        if layout not in self._timed:
            largest: dict[float, int] = {}
            for i, samples in enumerate(self.rows(layout)):
                speed = min(self.speeds[i * layout.inner : (i + 1) * layout.inner], default=1.0)
                largest[speed] = max(samples, largest.get(speed, 1))
            self._timed[layout] = tuple((samples, speed) for speed, samples in largest.items())
        return self._timed[layout]

    def of_peak(self, layout: Layout) -> tuple[tuple[int, float], ...]:
        """Pairs (samples, spare bytes) of the shards that may determine the peak memory."""
        if not layout.weights:
            return ((self.largest(layout), 0.0),)
        if layout not in self._peak_shards:
            self._peak_shards[layout] = self._decisive(layout)
        return self._peak_shards[layout]

    def _decisive(self, layout: Layout) -> tuple[tuple[int, float], ...]:
        rows = self.rows(layout)
        if self.rank is not None:
            return ((rows[layout.data_index(self.rank)], 0.0),)
        if not self.spare:
            return ((max(rows), 0.0),)
        spare = [min(self.spare[i : i + layout.inner]) for i in range(0, self.width, layout.inner)]
        return tuple(dict.fromkeys(zip(rows, spare, strict=True)))


class Keeping:
    """Bytes of activations on the rank that determines the peak, without :func:`asa.cost.memory.peak.margin`.

    Spare bytes of a larger device are subtracted from what its rank holds: a part from the transient bytes, the rest
    from the components, in proportion to the bytes saved per sample. In total no more is subtracted than is spare. Each
    component counts with the rank for which the difference is largest. So if the sum fits the smallest device, every
    rank fits its own device.
    """

    def __init__(self, graph: LayerGraph, times: Times, shards: Shards) -> None:
        self._graph, self._times, self.shards = graph, times, shards

    def component(self, component: Component, layout: Layout, *, checkpoint: bool) -> tuple[float, float]:
        """Bytes saved by forward for backward, and transient bytes during backward.

        With a checkpoint only the output is saved; backward repeats forward first, so the other saved bytes become
        transient. Sequence parallelism gathers tokens into buffers of its own, which are transient, too.
        """
        pairs = []
        for samples, spare in self.shards.of_peak(layout):
            work = self._times.work(component, samples, layout.tensor)
            saved, transient = work.saved_bytes, work.transient_bytes
            output = float(samples * component.output_bytes_per_sample)
            sequence = component.split.sequence if layout.sequence and component.split else None
            if sequence is not None:
                saved = max(0.0, saved - samples * sequence.spared(layout.tensor))
                transient += samples * max((c.bytes_per_sample for c in sequence.collectives), default=0.0)
                output *= sequence.share(layout.tensor) if sequence.exit else 1.0
            if checkpoint:
                output = min(saved, output)
                saved, transient = output, transient + saved - output
            if spare > 0:
                passing, staying = self._parts
                saved -= spare * staying * component.saved_bytes_per_sample / margin()
                transient -= spare * passing / margin()
            pairs.append((saved, transient))
        return max(s for s, _ in pairs), max(t for _, t in pairs)

    def unmade(self, layout: Layout) -> Any:
        """For each component, the bytes of its gradients that backward has not yet computed at its peak."""
        return self._times.every(self.shards.largest(layout), layout.tensor)[-1]

    def input(self, layout: Layout) -> float:
        """Bytes of the model's input."""
        sample_bytes = self._graph.input_bytes_per_sample
        return max(
            samples * sample_bytes - (spare * self._parts[1] * sample_bytes / margin() if spare else 0.0)
            for samples, spare in self.shards.of_peak(layout)
        )

    def part(self, size: float, layout: Layout) -> float:
        """The most bytes that a rank holds of a tensor of ``size`` bytes for the whole microbatch."""
        if not layout.weights:
            return size / layout.data
        return size * max(samples for samples, _ in self.shards.of_peak(layout)) / self.shards.microbatch

    @cached_property
    def _parts(self) -> tuple[float, float]:
        """How a spare byte is distributed: the share subtracted from transient bytes, and the share subtracted per byte
        that a sample leaves in a component or in the model's input. In total at most one byte."""
        components = self._graph.components
        works = [self._times.work(c, self.shards.microbatch, 1) for c in components]
        passing, saved = max(w.transient_bytes for w in works), sum(w.saved_bytes for w in works)
        sample_bytes = sum(c.saved_bytes_per_sample for c in components) + self._graph.input_bytes_per_sample
        share = passing / max(1.0, passing + saved)
        return share, (1 - share) / max(1.0, sample_bytes)
