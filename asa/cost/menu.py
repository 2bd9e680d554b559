"""All ways of all components on stages of one width, priced at once: arrays, an entry a way.

What :class:`asa.cost.pricing.Pricer` says of one component run one way, this says of all of them, by the same formulas;
tests hold the one against the other. What does not depend on the number of microbatches is looked up once; what
strategies declare of a component in a layout, or of its state, is asked for once, whoever else it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from asa.cost.memory.peak import margin
from asa.cost.pricing import Pricer
from asa.cost.states import Kept, States
from asa.cost.traffic.launching import Launches, awaited
from asa.cost.traffic.prefetch import Gathers, Hidden, hidden
from asa.cost.traffic.sharing import alongside
from asa.cost.way import Way
from asa.cost.work.compute import Times, adding
from asa.cost.work.offload import host_update
from asa.cost.work.spread import waitings
from asa.interfaces.strategy import OPTIMIZER_WORDS, DataStrategy
from asa.ir.graph import LayerGraph
from asa.ir.layout import Layout
from asa.ir.plan import OptimizerName, TensorDegree
from asa.ir.traffic import Collective, Phase

_PHASES: tuple[Phase, ...] = ("forward", "backward", "gradient", "update")


@dataclass
class PricedWays:
    """Seconds and bytes as in :class:`asa.cost.step.ComponentCost`, an entry a way; ``forward`` and ``backward`` with
    what blocks in them, ``window``: backward compute of the last microbatch, ``once``: once per step but for
    synchronisation, ``bucket`` included. ``least_state`` and ``least_transient``: what is left of these at least,
    whatever is run beside it (:mod:`asa.cost.memory.together`); ``added``: of the state, gradients that microbatches
    add up."""

    forward: Any
    backward: Any
    bucket: Any
    once: Any
    prompt: Any
    late: Any
    window: Any
    state: Any
    activations: Any
    gradients: Any
    transient: Any
    least_state: Any
    least_transient: Any
    added: Any


class Menu:
    """``ways``: those of every component, not all of them none. ``component`` and ``layout`` (in ``layouts``) are
    indices, an entry a way; ``saving``: those that are another one with a checkpoint, as ``forgetting`` says of a
    component and a way with one."""

    def __init__(
        self, graph: LayerGraph, states: States, times: Times, optimizer: OptimizerName,
        ways: Sequence[Sequence[Way]], forgetting: Callable[[int, Way], bool],
    ) -> None:  # fmt: skip
        self._graph, self._states, self._times = graph, states, times
        self._launch = np.array([times.launch(c) for c in graph.components])
        self.ways = [w for row in ways for w in row]
        self.component = np.repeat(np.arange(len(ways)), [len(row) for row in ways])
        each, like = _keeping(ways)
        self.layouts: tuple[Layout, ...] = tuple(dict.fromkeys(w.layout for _, w in each))
        number = {layout: k for k, layout in enumerate(self.layouts)}
        self.layout = np.array([number[w.layout] for _, w in each], dtype=np.int64)[like]
        self.checkpoint = np.array([w.checkpoint for w in self.ways], dtype=bool)
        self.saving = self.checkpoint.copy()
        for at in np.flatnonzero(self.checkpoint).tolist():
            self.saving[at] = forgetting(int(self.component[at]), self.ways[at])
        self.offload = np.array([w.offload for w in self.ways], dtype=bool)
        self._known: dict[tuple[Pricer, bytes], PricedWays] = {}
        self._largest_of: dict[TensorDegree, tuple[int, float]] = {}
        self._cells: dict[tuple[int, int], Way] = {}
        for i, way in each:
            self._cells.setdefault((i, number[way.layout]), way)
        self._keep(each, like, optimizer)

    def _keep(self, each: list[tuple[int, Way]], like: Any, optimizer: OptimizerName) -> None:
        """What keeping states costs, once for each of them. ``each`` and ``like`` as of :func:`_keeping`."""
        kept = [self._states.kept(i, w) for i, w in each]
        which: dict[int, int] = {}
        distinct: list[Kept] = []
        for k in kept:
            if id(k) not in which:
                which[id(k)] = len(distinct)
                distinct.append(k)
        to = np.array([which[id(k)] for k in kept], dtype=np.int64)[like]

        def spread(values: list[Any]) -> Any:
            return np.array(values, dtype=float)[to]

        self._prompt, self._late = spread([k.prompt for k in distinct]), spread([k.late for k in distinct])
        self._update_moved = spread([k.update_moved for k in distinct])
        self._shared, self._scattered = spread([k.shared for k in distinct]), spread([k.scattered for k in distinct])
        self._copied = spread([k.copied for k in distinct])
        self._handled = {p: spread([k.handled[p] for k in distinct]) for p in _PHASES}
        self._blocking = spread([k.blocking for k in distinct]) > 0
        self._moving = spread([k.blocking or k.repeated for k in distinct]) > 0
        present = [[c for c in k.moved if c.ranks > 1 and c.bytes > 0] for k in distinct]
        self._count = {p: spread([sum(c.phase == p for c in x) for x in present]) for p in _PHASES}
        taken = self._states.links.seconds
        self._moved = {
            p: spread([sum(taken(c) for c in x if c.phase == p) for x in present]) for p in _PHASES[:2]
        }  # fmt: skip
        idle = Launches(0.0, 0.0, 0.0, 0.0)
        self._launches: Any = None
        if any(k.launches for k in distinct):
            self._launches = np.stack(
                [spread([getattr(k.launches or idle, f.name) for k in distinct]) for f in fields(Launches)]
            )
        held = [k.held for k in distinct]
        self._state, self._gradients = spread([x.state for x in held]), spread([x.gradients for x in held])
        self._added = spread([x.gradients if x.accumulated is None else x.accumulated for x in held])
        self._kept, self._optimizer = spread([x.kept for x in held]), spread([x.optimizer for x in held])
        self._parameters, self._updating = spread([x.parameters for x in held]), spread([x.updating for x in held])
        self._page = [kept[k].page for k in like.tolist()]
        self._own = np.array([type(p).transient is not DataStrategy.transient for p in self._page], dtype=bool)
        shares = [self._states.share(i, way.tensor) for i, way in each]
        self._share = [shares[k] for k in like.tolist()]
        size, largest, tensors, update, apart = [], [], [], [], []
        known: dict[tuple[int, int], float] = {}
        for (i, way), k, share in zip(each, kept, shares, strict=True):
            size.append(share.parameter_bytes)
            largest.append(share.largest_parameter_bytes)
            tensors.append(share.num_parameter_tensors)
            update.append(self._states.update(i, way.tensor))
            own = type(k.page).transient is not DataStrategy.transient
            if not own and (id(share), id(k)) not in known:
                known[id(share), id(k)] = k.page.memory(share, way.layout.data, "sgd").transient
            apart.append(0.0 if own else known[id(share), id(k)])
        self._size, self._largest, self._tensors, self._update, self._apart = (
            np.array(x, dtype=float)[like] for x in (size, largest, tensors, update, apart)
        )
        full = OPTIMIZER_WORDS[optimizer] * self._size
        ahead = [self._states.ahead(i, w) for i, w in each]
        none = Gathers(0.0, 0.0, 0.0, 0.0)
        self._ahead: Any = None
        if any(ahead):
            self._ahead = np.array([[getattr(x or none, f.name) for x in ahead] for f in fields(Gathers)])[:, like]
        joint = [w.data.degree > 1 and k.page.joint for (_, w), k in zip(each, kept, strict=True)]
        self._joint = np.array(joint, dtype=bool)[like]
        self._buckets = spread([x.buckets for x in held])
        least = [
            k.page.least(s, w.layout.data, optimizer, self._others(i, w)) if w.data.degree > 1 and k.page.joint else 0.0
            for (i, w), k, s in zip(each, kept, shares, strict=True)
        ]
        self._repeated = np.where(
            self._joint & ~self.offload, self._optimizer - np.array(least, dtype=float)[like], 0.0
        )
        self._part = np.divide(self._optimizer, full, out=np.zeros(len(full)), where=full > 0)

    @cached_property
    def wrapping(self) -> Any:
        """Per way a number that is equal for ways that are wrapped, split and kept alike; -1 where a way depends on no
        neighbour."""
        known: dict[object, int] = {}
        keys = [(w.layout, w.data, w.tensor, w.offload) for w in self.ways]
        found = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
        return np.where(self._joint, found, -1)

    def _others(self, index: int, way: Way) -> float:
        """The component with the largest parameter, for :meth:`asa.interfaces.strategy.DataStrategy.least`."""
        if way.tensor not in self._largest_of:
            self._largest_of[way.tensor] = self._states.largest(way.tensor)
        largest, others = self._largest_of[way.tensor]
        return others if index == largest else float("inf")

    def enough(self, samples: Sequence[int], fewest: Any) -> Any:
        """Whether the component of each way has enough samples: ``samples`` on a rank per layout, ``fewest`` per
        component."""
        return np.array(samples)[self.layout] >= np.asarray(fewest)[self.component]

    def priced(self, pricer: Pricer, which: Any) -> PricedWays:
        """The ways ``which`` (indices), on the stages that ``pricer`` prices; others have these arrays, too."""
        key = (pricer, which.tobytes())
        if key not in self._known:
            self._known[key] = self._priced(pricer, which)
        return self._known[key]

    def _priced(self, pricer: Pricer, which: Any) -> PricedWays:
        m, several = pricer.num_microbatches, pricer.num_microbatches > 1
        i, k = self.component[which], self.layout[which]
        cells = self._in_cells(pricer, which)
        forward, backward, saved, transient, kept, beside = (x[k, i] for x in cells[:6])
        again = self.checkpoint[which]
        saved_, transient_ = np.where(again, kept, saved), np.where(again, beside, transient)
        split = np.array([x.tensor > 1 for x in self.layouts], dtype=bool)[k]
        inside = {p: x[k, i] for p, x in zip(_PHASES[:2], cells[6:8], strict=True)}
        counts = {p: x[k, i] for p, x in zip(_PHASES, cells[8:], strict=True)}

        def met(phase: Phase, compute: Any, once: Phase) -> Any:
            moving, blocking = self._moving[which], self._blocking[which]
            apart = np.where(blocking, self._count[once][which] + counts[once], 0.0) / m
            number = counts[phase] + np.where(moving, self._count[phase][which], 0.0) + apart
            number = np.maximum(number, np.where(split, 1.0, 0.0))
            stretch = compute / np.where(number > 0, number, 1.0)
            waited = compute * (waitings(pricer.cluster, pricer.width, stretch) - 1)
            taken = inside[phase] + np.where(moving, self._moved[phase][which], 0.0)
            return np.where(number > 0, taken + waited, 0.0) + np.where(moving, self._handled[phase][which], 0.0)

        ahead, back = met("forward", forward, "update"), met("backward", backward, "gradient")
        back = back + np.where(again, inside["forward"], 0.0)
        added = adding(self._update[which] * pricer.slow_memory / pricer.shards.slowest, pricer.optimizer, m)
        backward = backward + np.where(again, forward, 0.0) + added
        copying = self._copied[which] * pricer.slow / pricer.shards.slowest + self._handled["gradient"][which]
        met_s = (
            self._shared[which] * inside["forward"],
            self._shared[which] * (inside["backward"] + np.where(again, inside["forward"], 0.0)),
        )
        saved_s = self._prefetched(pricer, which, cells[:2], backward, met_s)
        sync = self._prompt[which] + self._late[which]
        held_up = alongside(sync, compute=backward, collectives=met_s[1], least=np.minimum) + saved_s.queued
        held_up = np.minimum(sync, held_up)
        free = 1 - np.divide(held_up, sync, out=np.zeros(len(sync)), where=sync > 0)
        host = self._awaited(pricer, which, forward, backward, counts)
        updated = self._updated(pricer, which)
        copying = copying + host.gradient + np.where(self.offload[which], 0.0, updated * pricer.held_up_by_update)
        own = transient_ * margin()
        transient_ = own + self._transient(pricer, which, saved_)
        fresh = np.where(
            np.array([x.data == 1 for x in self.layouts], dtype=bool)[k] & several, self._largest[which], 0.0
        )
        state = self._state[which] + (self._added[which] + self._kept[which] if several else 0.0)
        state = state - np.where(self.offload[which], self._optimizer[which], 0.0)
        lone = transient_ if pricer.states.prefetching else own + self._transient(pricer, which, saved_, alone=True)
        lone = np.minimum(lone, transient_) + fresh - self._unmade(pricer, which)
        return PricedWays(
            forward=forward + ahead - saved_s.forward + host.forward,
            backward=backward + back - saved_s.backward + host.backward,
            bucket=copying,
            once=copying + updated + self._update_moved[which] - saved_s.once + host.update + held_up,
            prompt=self._prompt[which] * free,
            late=self._late[which] * free,
            window=backward + copying - saved_s.covered,
            state=state,
            activations=saved_ * margin() + (0.0 if several else self._kept[which]),
            gradients=0.0 * state if several else self._gradients[which],
            transient=np.maximum(transient_ + fresh, self._updating[which]),
            least_state=state - self._repeated[which],
            least_transient=np.maximum(lone, self._updating[which]),
            added=self._added[which] if several else 0.0 * state,
        )

    def _unmade(self, pricer: Pricer, which: Any) -> Any:
        """By how much less is there beside a backward that makes its gradients itself
        (:meth:`asa.cost.pricing.Pricer.as_made`)."""
        found = np.zeros(len(which))
        if pricer.num_microbatches > 1 or not pricer.times.unmade:
            return found
        known: dict[tuple[int, int], float] = {}
        for at in np.flatnonzero(self._buckets[which] == 0).tolist():
            key = (int(self.component[which[at]]), int(self.layout[which[at]]))
            if key not in known:
                known[key] = pricer.keeping.unmade(self._graph.components[key[0]], self.layouts[key[1]])
            found[at] = known[key]
        return found

    def _prefetched(self, pricer: Pricer, which: Any, passes: Any, own: Any, met: tuple[Any, Any]) -> Hidden:
        """What gathers ahead save. ``passes``: seconds forward and backward x layout x component; ``own``: of the ways'
        backward; ``met``: of collectives inside each pass, on the same links."""
        if self._ahead is None:
            return Hidden(forward=0.0, backward=0.0, once=0.0, covered=0.0, queued=0.0)
        rows = self._ahead[:, which]
        gathers = Gathers(*rows)
        i, k, last = self.component[which], self.layout[which], len(self._graph) - 1
        ahead = passes[0][k, np.maximum(0, i - 1)]
        behind = passes[1][k, np.minimum(last, i + 1)]
        behind = behind + np.where(self.checkpoint[which], passes[0][k, np.minimum(last, i + 1)], 0.0)
        for at in np.flatnonzero(rows.any(axis=0)).tolist():  # looked up one by one, as cells are
            way = self.ways[int(which[at])]
            if way.layout.weights or way.layout.sequence or pricer.shards.speeds:
                ahead[at] = pricer.pass_of(int(i[at]) - 1, way)[0] if rows[0, at] + rows[2, at] else 0.0
                behind[at] = pricer.pass_of(int(i[at]) + 1, way)[1] if rows[1, at] else 0.0
        return hidden(
            gathers, pricer.cluster.overlap, ahead=ahead, behind=behind, own=own, met=met,
            scattered=self._scattered[which], microbatches=pricer.num_microbatches, least=np.minimum,
        )  # fmt: skip

    def _awaited(self, pricer: Pricer, which: Any, forward: Any, backward: Any, counts: dict[Phase, Any]) -> Launches:
        """What devices wait for of their hosts' work on communication. ``counts``: of collectives inside."""
        if not pricer.states.apart:
            return Launches(0.0, 0.0, 0.0, 0.0)
        kept = (0.0, 0.0, 0.0, 0.0) if self._launches is None else self._launches[:, which]
        ahead, back = (pricer.states.collective_s * counts[phase] for phase in _PHASES[:2])
        launches = Launches(*kept).beside(ahead, np.where(self.checkpoint[which], back + ahead, back))
        floor = self._launch[self.component[which]]
        return awaited(launches, forward=forward, backward=backward, floor=floor, most=np.maximum)

    def _updated(self, pricer: Pricer, which: Any) -> Any:
        """Seconds of the optimizer step."""
        part = self._part[which]
        update = part * self._update[which] * pricer.slow_update
        if pricer.cluster.sharding is not None:
            cut = self._parameters[which] < self._size[which]
            update = update + np.where(cut, pricer.cluster.sharding.tensor_s * self._tensors[which], 0.0)
        update = update / pricer.shards.slowest
        away = np.flatnonzero(self.offload[which])
        if len(away):
            sizes = part[away] * self._size[which[away]]
            update[away] = host_update(pricer.cluster, pricer.optimizer, sizes, pricer.busy)
        return update

    def _transient(self, pricer: Pricer, which: Any, saved: Any, *, alone: bool = False) -> Any:
        """Bytes beside the component's own, of strategies that say it by what is around; ``alone``: where no neighbour
        of those that are joint is run alike."""
        found = self._apart[which]
        known: dict[tuple[object, ...], float] = {}  # alike whether or not its state is on the host
        for at in np.flatnonzero(self._own[which]).tolist():
            w = int(which[at])
            key = (self.component[w], self.layout[w], id(self._page[w]), saved[at])
            if key not in known:
                way, i = self.ways[w], int(self.component[w])
                alike = range(i, i + 1) if alone and self._joint[w] else None
                beside = pricer.around.of(i, way.tensor, float(saved[at]), alike)
                known[key] = self._page[w].transient(self._share[w], way.layout.data, beside)
            found[at] = known[key]
        return found

    def _in_cells(self, pricer: Pricer, which: Any) -> Any:
        """What a component in a layout does, whoever keeps its state: quantity x layout x component. Seconds forward
        and backward; bytes saved and transient, and the same under a checkpoint; seconds of what is inside forward and
        backward; how many collectives there are of each phase."""
        n = len(self._graph)
        found = np.zeros((8 + len(_PHASES), len(self.layouts), n))
        wanted = np.zeros((len(self.layouts), n), dtype=bool)
        wanted[self.layout[which], self.component[which]] = True
        outputs = np.array([c.output_bytes_per_sample for c in self._graph.components])
        inner: dict[tuple[int, int], list[float]] = {}
        for k, layout in enumerate(self.layouts):
            if not wanted[k].any():
                continue
            alike = not (layout.weights or layout.sequence or pricer.shards.speeds)
            if alike:
                samples = pricer.local(layout)
                found[:2, k] = self._times.passes(samples, layout.tensor) * pricer.slowed(samples)
                saved, transient = self._times.sizes(samples, layout.tensor)
                kept = np.minimum(saved, samples * outputs)
                found[2:6, k] = saved, transient, kept, transient + saved - kept
            for i in np.flatnonzero(wanted[k]).tolist() if not alike or layout.tensor > 1 else ():
                way = self._cells[i, k]
                if not alike:
                    found[:6, k, i] = _one(pricer, i, layout)
                key = (self._states.like[i], k)
                if key not in inner:
                    inner[key] = _inside(pricer, pricer.inner(i, way))
                found[6:, k, i] = inner[key]
        return found


def _keeping(ways: Sequence[Sequence[Way]]) -> tuple[list[tuple[int, Way]], Any]:
    """Components with ways that keep their state; and of each way, which of these keeps it alike: the next ways often
    do, with a checkpoint or an optimizer on the host."""
    each: list[tuple[int, Way]] = []
    like: list[int] = []
    for i, row in enumerate(ways):
        last: Way | None = None
        for way in row:
            if last is None or not (way.layout is last.layout and way.tensor is last.tensor and way.data is last.data):
                each.append((i, way))
                last = way
            like.append(len(each) - 1)
    return each, np.array(like, dtype=np.int64)


def _one(pricer: Pricer, index: int, layout: Layout) -> tuple[float, ...]:
    """The first quantities of a cell where ranks differ, or tokens are cut."""
    component = pricer.graph.components[index]
    work, slow = pricer.longest(component, layout)
    held = [pricer.keeping.component(component, layout, checkpoint=again) for again in (False, True)]
    return (work.forward_s * slow, work.backward_s * slow, *held[0], *held[1])


def _inside(pricer: Pricer, traffic: Sequence[Collective]) -> list[float]:
    present = [c for c in traffic if c.ranks > 1 and c.bytes > 0]
    taken = [sum(pricer.states.links.seconds(c) for c in present if c.phase == p) for p in _PHASES[:2]]
    return [*taken, *(float(sum(c.phase == p for c in present)) for p in _PHASES)]
