"""What ranks lose by being in step: waiting for the slowest, and the costs of stock sharding beside its messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from asa.ir.cluster import Sharding, Waiting
from asa.profiler.clock import Clock
from asa.profiler.collectives import operation
from asa.profiler.interference import training_kernels
from asa.profiler.rounds import agree, time_together

_STRETCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Kernels between one meeting of the ranks and the next."""
_LEAST_KERNELS = 512
_MOST_KERNELS = 8192
_UNITS = 6
_SMALL, _LARGE = 64, 2048
"""Sides of the weights of a unit: next to nothing, and 16 MiB."""


def measure_waiting(device: torch.device, clock: Clock, *, slice_s: float) -> tuple[Waiting, ...]:
    """How much a stretch of work grows when ranks meet at its end; called by all ranks.

    All ranks run a short kernel again and again and note when each ended. What would have been waited for is then
    counted: over the median kernel, the mean of the slowest rank's time in stretches of 1, 2, 4 ... kernels.
    """
    kernels = training_kernels(device, small=True)
    run = kernels.work["convolution"]
    for _ in range(20):
        run()
    agree()
    guess = agree(_noted(run, clock, 32)[1])[0]
    count = int(max(_LEAST_KERNELS, min(_MOST_KERNELS, slice_s / max(guess, 1e-7))))
    agree()
    own = torch.tensor(_noted(run, clock, count)[0], dtype=torch.float64)
    everybody = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, own)
    taken = torch.stack(everybody)
    found = []
    for ranks in range(2, len(everybody) + 1):
        unit = float(taken[:ranks].median())
        points = []
        for k in _STRETCHES:
            whole = taken[:ranks, : count // k * k].reshape(ranks, -1, k).sum(2)
            points.append((k * unit, max(1.0, float(whole.amax(0).mean()) / (k * unit))))
        found.append(Waiting(ranks=ranks, points=tuple(points)))
    return tuple(found)


def _noted(run: Callable[[], object], clock: Clock, count: int) -> tuple[list[float], float]:
    """Seconds of each of ``count`` runs, and their median."""
    clock.settle()
    marks = [clock.mark()]
    for _ in range(count):
        run()
        marks.append(clock.mark())
    seconds = clock.seconds(marks)
    return seconds, median(seconds)


def measure_sharding(device: torch.device, clock: Clock, group: dist.ProcessGroup, *, slice_s: float) -> Sharding:
    """What ``fully_shard`` adds to a step beside its collectives; called by all ranks of ``group``.

    A chain of linear layers, each a unit, is trained whole and sharded. The difference, less what the collectives take
    by themselves, is what gathering and scattering cost the ranks: per unit (seen on tiny weights) and per byte moved
    (on large ones). Two gathers and one scatter of each unit a step, as ZeRO-3 does it.
    """
    small = _beside(_SMALL, device, clock, group, slice_s=slice_s / 2)
    large = _beside(_LARGE, device, clock, group, slice_s=slice_s / 2)
    moved = 3 * 4 * (_LARGE**2 - _SMALL**2)
    return Sharding(unit_s=max(0.0, small / 3), byte_s=max(0.0, (large - small) / moved))


def _beside(side: int, device: torch.device, clock: Clock, group: dist.ProcessGroup, *, slice_s: float) -> float:
    """Seconds per unit and step that sharding adds, less the time of its collectives."""
    torch.manual_seed(0)
    plain = _chain(side, device)
    shards = _chain(side, device)
    mesh = DeviceMesh.from_group(group, device.type)
    for unit in shards:
        fully_shard(unit, mesh=mesh)
    fully_shard(shards, mesh=mesh)
    x = torch.randn(4, side, device=device)

    def step(model: nn.Sequential) -> None:
        model(x).sum().backward()
        for p in model.parameters():
            p.grad = None

    words = max(1, side * side // dist.get_world_size(group))
    gather, scatter = (operation(op, words, group, device) for op in ("all_gather", "reduce_scatter"))

    def moves() -> None:
        gather()
        gather()
        scatter()

    taken: list[float] = []
    started = time.perf_counter()
    while len(taken) < 3 or (len(taken) < 7 and agree(time.perf_counter() - started, group=group)[0] < slice_s):
        whole = time_together(lambda: step(shards), clock, slice_s=slice_s / 20, group=group)
        alone = time_together(lambda: step(plain), clock, slice_s=slice_s / 20, group=group)
        messages = time_together(moves, clock, slice_s=slice_s / 20, group=group)
        taken.append((whole - alone) / _UNITS - messages)
    return median(taken)


def _chain(side: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(_UNITS))).to(device)
