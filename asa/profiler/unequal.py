"""Measures the speeds of ranks with devices of several kinds, relative to the first."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from asa.ir.cluster import Contention, RankDevice
from asa.ir.profile import DeviceRecord
from asa.profiler.clock import Clock
from asa.profiler.interference import training_kernels
from asa.profiler.rounds import agree

_ROUNDS = 5
_SAMPLE_S = 5e-3


def measure_devices(device: torch.device, record: DeviceRecord, clock: Clock) -> tuple[RankDevice, ...] | None:
    """Every rank's device with its speed relative to the first, from the training kernels. None if all have the same
    name and memory (collective).

    Ranks take turns, so that none disturbs another. Devices of one kind get the same speed, their median.
    """
    records: list[DeviceRecord] = [record] * dist.get_world_size()
    dist.all_gather_object(records, record)
    kinds = [(r.name, r.memory_bytes) for r in records]
    if device.type != "cuda" or len(set(kinds)) == 1:
        return None
    return described(kinds, _seconds(device, clock))


def described(kinds: Sequence[tuple[str, int]], seconds: Sequence[Sequence[float]]) -> tuple[RankDevice, ...]:
    """Devices with the names and bytes in ``kinds``, and with speeds from their ``seconds`` for each kernel.

    A speed is the geometric mean over kernels, rounded to two digits. Devices of one kind have one speed.
    """
    speeds: dict[str, float] = {}
    for name in dict.fromkeys(n for n, _ in kinds):
        samples = [s for (n, _), s in zip(kinds, seconds, strict=True) if n == name]
        ratios = [math.log(a / median(x)) for a, x in zip(seconds[0], zip(*samples, strict=True), strict=True)]
        speeds[name] = 1.0 if name == kinds[0][0] else float(f"{math.exp(sum(ratios) / len(ratios)):.2g}")
    return tuple(RankDevice(name=n, speed=speeds[n], memory_bytes=memory) for n, memory in kinds)


def _seconds(device: torch.device, clock: Clock) -> list[list[float]]:
    """For each rank, the median seconds of each kernel, run alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kernels = training_kernels(device)
    kernels.step()
    medians = []
    for turn in range(ranks):
        row = []
        for run in kernels.work.values():
            agree()
            samples = [0.0]
            if rank == turn:
                started = time.perf_counter()
                run()
                clock.synchronize()
                inner = max(1, int(_SAMPLE_S / max(time.perf_counter() - started, 1e-7)))
                samples = [clock.timed(run, inner) for _ in range(_ROUNDS)]
            row.append(agree(median(samples))[0])
        medians.append(row)
    return medians


def without_speeds(contention: tuple[Contention, ...], devices: tuple[RankDevice, ...]) -> tuple[Contention, ...]:
    """``contention`` (the slowest rank compared with the first alone), corrected for the speeds of slower devices."""
    corrected = []
    for c in contention:
        slowest = min(1.0, *(d.speed for d in devices[: c.ranks]))
        memory = None if c.memory_slowdown is None else max(1.0, c.memory_slowdown * slowest)
        corrected.append(replace(c, slowdown=max(1.0, c.slowdown * slowest), memory_slowdown=memory))
    return tuple(corrected)
