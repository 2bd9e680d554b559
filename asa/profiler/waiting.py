"""Measures what ranks lose by synchronizing: waiting for the slowest rank, and the cost of FSDP besides its
messages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from asa.ir.cluster import Sharding, Waiting
from asa.ir.units import MIB
from asa.profiler.clock import Clock
from asa.profiler.collectives import CALM_S, message_within, operation
from asa.profiler.interference import training_kernels
from asa.profiler.rounds import agree, slowest, time_together
from asa.profiler.updates import build_optimizer
from asa.sharding.collectives import direct
from asa.sharding.collectives.direct import directly
from asa.sharding.split.local_parts import step_over_parts

_MEETINGS = {1: 48, 3: 24, 6: 24, 12: 12, 24: 6, 48: 3, 96: 3, 192: 3}
"""Number of synchronizations in a sample, by the number of kernels between two of them. Some synchronizations take
several times as long as most, and a step has dozens, so that a few of them say little. All kernels have a turn in each
sample."""
_LEAST_MEETINGS = 0.25
"""Fraction of these synchronizations that is made even if time is short."""
_FEWEST_STRETCHES = 3
_LONG_S, _ALONE = 0.1, 24
"""Seconds of work for which synchronization can be neglected; and the smallest number of kernels to time one alone."""
_MESSAGE_BYTES, _MESSAGE_S = MIB, 0.02
"""Bytes that ranks exchange when they synchronize, about those of an activation; less if the exchange would take longer
than these seconds."""
_MESSAGES = 16
"""Number of messages that take turns, so that each is new to the cache, like one that a step has just made."""
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 40
_LEAST_TURNS, _MOST_TURNS = 5, 25
"""Number of turns of a sharded chain, a whole chain, and the messages alone. Turns are short and many, because the
speed of the machine drifts."""
_UNITS, _MANY = 6, 32
"""Number of units of a chain, and of tensors in each when many are measured."""
_FEWER, _BRIEF_S = 8, 1.0
"""Number of tensors in each if there are fewer than these seconds."""
_SMALL, _LARGE = 64, 2048
"""Sides of the weights of a unit: tiny, and 16 MiB (less over slow links, or if time is short)."""
_LARGE_SHARE = 0.35
_MESSAGES_A_TURN = 2 * 5 * 3 * _UNITS
"""Number of messages in a turn with large units: sharded steps and messages alone, five times each, three per unit."""


def measure_waiting(
    device: torch.device, clock: Clock, groups: Mapping[int, dist.ProcessGroup | None], *, slice_s: float
) -> tuple[Waiting, ...]:
    """Factor by which a stretch of work gets longer if ranks synchronize at its end. All ranks call it; ``groups`` are
    by size.

    Ranks run a kernel, or all of them 1, 2, 4 ... times, then all-reduce a message, repeatedly; and also kernels and
    all-reduces by themselves. The difference is the loss by synchronizing. It has three causes: waiting for the slowest
    rank; caches that hold the work and not the message (the kernels use more memory than a cache has, as a component
    does); and a core that is not available at once.
    """
    factors = []
    for ranks, group in sorted(groups.items()):
        if group is not None:
            factors.append(_grown(device, clock, group, ranks, slice_s=slice_s / len(groups)))
        agree()
    return tuple(factors)


def _grown(device: torch.device, clock: Clock, group: dist.ProcessGroup, ranks: int, *, slice_s: float) -> Waiting:
    kernels = training_kernels(device, group, small=True)
    each = cycle(kernels.work.values())
    words = message_within(_MESSAGE_BYTES, group, device, clock, seconds=_MESSAGE_S) // 4
    messages = cycle([torch.zeros(words, device=device) for _ in range(_MESSAGES)])
    buffer = next(messages)

    def work(stretch: int) -> Tensor:
        for _ in range(stretch):
            next(each)()
        return next(messages).fill_(0.0)

    def seconds(stretch: int, times: int, *, meeting: bool) -> float:
        def once() -> None:
            message = work(stretch) if stretch else buffer
            if meeting:
                direct.all_reduce(message, group=group)

        agree(group=group)
        return clock.timed(once, times)

    for _ in range(5):
        direct.all_reduce(work(1), group=group)
    step = agree(seconds(_ALONE, 1, meeting=False) / _ALONE, group=group)[0]
    rows: dict[int, list[tuple[float, float, float]]] = {k: [] for k in _MEETINGS if k == 1 or k * step < 2 * _LONG_S}

    def seconds_of_a_round(share: float) -> float:
        return step * sum(k * max(1.0, share * _MEETINGS[k]) + max(k, _ALONE) for k in rows)

    while len(rows) > _FEWEST_STRETCHES and seconds_of_a_round(_LEAST_MEETINGS) > slice_s:
        del rows[max(rows)]  # if time is short, drop the longest stretches, where synchronization counts least
    round_s = seconds_of_a_round(1.0)
    share = min(1.0, max(_LEAST_MEETINGS, slice_s / (2 * round_s)))
    meetings = {k: max(1, round(share * _MEETINGS[k])) for k in rows}
    started, rounds = time.perf_counter(), 0
    while rounds < _MOST_ROUNDS and goes_on(rounds, _LEAST_ROUNDS, started, slice_s, group):
        rounds += 1
        for k, times in rows.items():
            both, sums = (seconds(stretch, meetings[k], meeting=True) for stretch in (k, 0))
            worked = seconds(max(k, _ALONE), 1, meeting=False) * k / max(k, _ALONE)
            times.append((both, worked, sums))
    medians = {k: [slowest([t[i] for t in times], group) for i in range(3)] for k, times in rows.items()}
    longest = max(rows)
    unit = medians[longest][1] / longest
    points = [(k * unit, max(1.0, (both - exchange) / worked)) for k, (both, worked, exchange) in medians.items()]
    return Waiting(ranks=ranks, points=_falling(points))


def goes_on(rounds: int, least: int, started: float, slice_s: float, group: dist.ProcessGroup) -> bool:
    """Whether there is time for another round. All ranks of ``group`` call it.

    It ends ``slice_s`` seconds after ``started``, or after twice that if there were fewer than ``least`` rounds. There
    are always at least two rounds.
    """
    spent = agree(time.perf_counter() - started, group=group)[0]
    return rounds < 2 or spent < slice_s or (rounds < least and spent < 2 * slice_s)


def _falling(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The closest curve to ``points`` whose factor does not increase with the seconds, by pooling adjacent violators
    (Barlow et al. 1972). Sorted by ascending seconds."""
    pooled: list[tuple[list[float], float]] = []
    for seconds, factor in sorted(points):
        members = [seconds]
        while pooled and pooled[-1][1] < factor:
            earlier, mean = pooled.pop()
            factor = (mean * len(earlier) + factor * len(members)) / (len(earlier) + len(members))
            members = earlier + members
        pooled.append((members, factor))
    return tuple((s, f) for members, f in pooled for s in members)


def measure_sharding(device: torch.device, clock: Clock, group: dist.ProcessGroup, *, slice_s: float) -> Sharding:
    """Cost of ``fully_shard`` in a step besides its collectives. All ranks of ``group`` call it.

    A chain of linear layers, each a unit, is trained whole and sharded. The difference, less the time of the
    collectives alone, is the ranks' cost of gathering and scattering. It is measured per unit and per tensor (from tiny
    weights, one or many in a unit) and per byte moved (from large ones). Each unit has two all-gathers and one
    reduce-scatter per step, as in ZeRO-3.
    """
    large_s = _LARGE_SHARE * slice_s
    longest_s = min(CALM_S, large_s / (2 * _MESSAGES_A_TURN))
    side = math.isqrt(message_within(4 * _LARGE**2, group, device, clock, seconds=longest_s) // 4)
    many = _MANY if slice_s >= _BRIEF_S else _FEWER
    small = _sharding_overhead(_SMALL, (1, many), device, clock, group, slice_s=0.55 * slice_s)
    one, more = median(x for x, _ in small), median(y - x for x, y in small)
    large = median(x for (x,) in _sharding_overhead(side, (1,), device, clock, group, slice_s=large_s))
    moved = 3 * 4 * (side**2 - _SMALL**2)
    tensor_s = max(0.0, more) / (many - 1) / 3
    return Sharding(
        unit_s=max(0.0, one / 3 - tensor_s),
        byte_s=max(0.0, (large - one) / moved),
        tensor_s=_update(device, clock, group, slice_s=0.1 * slice_s),
        moved_tensor_s=tensor_s,
    )


def _update(device: torch.device, clock: Clock, group: dist.ProcessGroup, *, slice_s: float) -> float:
    """Seconds per tensor by which an optimizer step over small sharded tensors exceeds one over small whole ones."""
    plain, shards = _chain(_SMALL, device), _chain(_SMALL, device)
    _shard(shards, DeviceMesh.from_group(group, device.type))
    steps = []
    for chain in (plain, shards):
        chain(torch.randn(4, _SMALL, device=device)).sum().backward()
        optimizer = build_optimizer("sgd", chain.parameters())
        if chain is shards:
            step_over_parts(optimizer)  # as in the executor
        steps.append(optimizer.step)
    differences: list[float] = []
    for _ in range(_LEAST_ROUNDS):  # alternating, so that a temporary slowdown affects both
        times = [time_together(step, clock, slice_s=slice_s / (2 * _LEAST_ROUNDS), group=group) for step in steps]
        differences.append(times[1] - times[0])
    return max(0.0, median(differences)) / _UNITS


def _shard(chain: nn.Sequential, mesh: DeviceMesh) -> None:
    for unit in chain:
        fully_shard(unit, mesh=mesh)
        directly(unit)
    fully_shard(chain, mesh=mesh)


def _sharding_overhead(
    side: int, tensors: Sequence[int], device: torch.device, clock: Clock, group: dist.ProcessGroup, *, slice_s: float
) -> list[tuple[float, ...]]:  # fmt: skip
    """Seconds per unit and step that sharding takes besides its collectives, for units with ``tensors`` tensors; one
    tuple per turn."""
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, device.type)
    x = torch.randn(4, side, device=device)

    def training(model: nn.Sequential) -> Callable[[], None]:
        def step() -> None:
            model(x).sum().backward()
            for p in model.parameters():
                p.grad = None

        return step

    def moving(words: int) -> Callable[[], None]:
        gather, scatter = (operation(op, words, group, device) for op in ("all_gather", "reduce_scatter"))

        def moves() -> None:
            gather()
            gather()
            scatter()

        return moves

    def trio(count: int) -> tuple[Callable[[], None], ...]:
        plain, shards = _chain(side, device, count), _chain(side, device, count)
        _shard(shards, mesh)
        return training(shards), training(plain), moving(max(1, count * side * side // dist.get_world_size(group)))

    trios = [trio(count) for count in tensors]
    turns: list[tuple[float, ...]] = []
    started, each = time.perf_counter(), slice_s / (3 * len(trios) * _MOST_TURNS)
    while len(turns) < _MOST_TURNS and goes_on(len(turns), _LEAST_TURNS, started, slice_s, group):
        turn = [[time_together(run, clock, slice_s=each, group=group) for run in runs] for runs in trios]
        turns.append(tuple((split - plain) / _UNITS - messages for split, plain, messages in turn))
    return turns


def _chain(side: int, device: torch.device, tensors: int = 1) -> nn.Sequential:
    """A chain of units with ``tensors`` linear layers each."""

    def unit() -> nn.Module:
        layers = [nn.Linear(side, side, bias=False) for _ in range(tensors)]
        return layers[0] if tensors == 1 else nn.Sequential(*layers)

    return nn.Sequential(*(unit() for _ in range(_UNITS))).to(device)
