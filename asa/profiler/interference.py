"""Measures how ranks on one machine slow each other down, when computing at once and when computing during messages.

Cores share caches, memory and clocks. Gloo adds gradients on the same cores that compute, and NCCL's kernels use
multiprocessors. Three kernels represent training: a convolution with its gradients, a matrix product with its
gradients, and an optimizer's step over more memory than a cache has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor

from asa.ir.cluster import Contention, Overlap
from asa.ir.units import MIB
from asa.profiler.clock import Clock
from asa.profiler.collectives import message_within
from asa.profiler.machine import free_memory
from asa.profiler.rounds import agree
from asa.profiler.updates import build_optimizer

_PASS_BYTES = 32 * MIB
_MATRIX = 1024
_BUCKET_BYTES = 16 * MIB  # less over slow links
_BUCKETS = 4
_GPU_SCALE = 32
"""Factor on the work for a GPU, whose kernels would otherwise end before they run at the same time."""
_SCALE_BYTES = 256 * MIB
"""Bytes of free memory for each unit of that factor. Buckets, kernels and their gradients take about half of it."""
_SAMPLE_S = 0.02
_MOST_ROUNDS = 15
_TRIES, _TRIES_S = 5, 0.5
_PRODUCT_S = 0.03
"""Seconds of a matrix product that is long enough to have the rate of longer ones."""


@dataclass(frozen=True)
class Kernels:
    """Kernels that represent training."""

    work: dict[str, Callable[[], object]]

    def step(self) -> None:
        """Run each of them once."""
        for run in self.work.values():
            run()


def training_kernels(device: torch.device, group: dist.ProcessGroup | None = None, *, small: bool = False) -> Kernels:
    """Convolution, matrix product and optimizer step: about 5 ms each on one core, a few tenths of a millisecond on a
    GPU.

    All ranks of ``group`` (None: all there are) call it, and get equal work. With ``small`` it is a tenth of that.
    """
    scale = _common_scale(device, group)
    convolution = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).to(device)
    linear = torch.nn.Linear(768, 768).to(device)
    side = 10 if small else 32
    maps = torch.randn(4 * scale, 64, side, side, device=device, requires_grad=True)
    tokens = torch.randn((25 if small else 256) * scale, 768, device=device, requires_grad=True)
    weights = torch.ones(scale * _PASS_BYTES // (30 if small else 3) // 4, device=device, requires_grad=True)
    weights.grad = torch.full_like(weights, 1e-3)
    optimizer = build_optimizer("sgd", [weights])

    def both_ways(module: torch.nn.Module, x: Tensor) -> Callable[[], object]:
        y = module(x)
        gradient = torch.ones_like(y)
        inputs = [x, *module.parameters()]
        return lambda: torch.autograd.grad(module(x), inputs, gradient)

    return Kernels(
        work={
            "convolution": both_ways(convolution, maps),
            "matrix product": both_ways(linear, tokens),
            "memory": optimizer.step,
        }
    )


def _common_scale(device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Scale of work that fits the device with the least memory in ``group``. All its ranks call it."""
    return int(-agree(-float(_scale(device)), group=group)[0]) if device.type == "cuda" else 1


def _scale(device: torch.device) -> int:
    """Scale of the work on ``device`` relative to one core."""
    return max(1, min(_GPU_SCALE, free_memory(device) // _SCALE_BYTES)) if device.type == "cuda" else 1


def measure_contention(
    device: torch.device, clock: Clock, *, slice_s: float, small: bool = False
) -> tuple[Contention, ...]:
    """Slowdown of the slowest rank's kernels when 1, 2, ... all ranks run them at once. All ranks call it.

    Numbers of ranks take turns, so that drift of the machine affects all of them. With ``small``, samples take a
    quarter of the time.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kernels = training_kernels(device, small=small)
    sample_s = _SAMPLE_S / 4 if small else _SAMPLE_S
    kernels.step()
    inner: dict[str, int] = {}
    pause: dict[str, float] = {}
    for kind, run in kernels.work.items():
        agree()
        seconds = agree(clock.timed(run, 2) if rank == 0 else 0.0)[0]
        inner[kind] = max(1, int(sample_s / max(seconds, 1e-7)))
        pause[kind] = inner[kind] * seconds
    samples: dict[tuple[str, int], list[float]] = {}
    started, rounds = time.perf_counter(), 0
    while rounds < 3 or (rounds < _MOST_ROUNDS and agree(time.perf_counter() - started)[0] < slice_s):
        rounds += 1
        for kind, run in kernels.work.items():
            for active in range(1, ranks + 1):
                agree()
                seconds = 0.0
                if rank < active:
                    seconds = clock.timed(run, inner[kind])
                else:
                    # Waiting inside a collective would take processor time from the working ranks.
                    time.sleep(pause[kind])
                samples.setdefault((kind, active), []).append(agree(seconds)[0])
    slowdowns = []
    for active in range(1, ranks + 1):
        slower = {kind: max(1.0, median(samples[kind, active]) / median(samples[kind, 1])) for kind in kernels.work}
        memory = slower.pop("memory")
        slowdowns.append(Contention(ranks=active, slowdown=fmean(slower.values()), memory_slowdown=memory))
    return tuple(slowdowns)


def measure_overlap(device: torch.device, clock: Clock, group: dist.ProcessGroup, *, slice_s: float) -> Overlap:
    """Slowdown of kernels and of queued all-reduces while both run on ``group``. All its ranks call it.

    Both are first measured alone, on all ranks at once, then together. Kernels run for as long as messages are in
    flight, so that neither has the machine to itself.
    """
    scale = _common_scale(device, group)
    kernels = training_kernels(device, group)
    words = message_within(scale * _BUCKET_BYTES, group, device, clock) // 4
    buckets = [torch.zeros(words, device=device) for _ in range(_BUCKETS)]
    kernels.step()
    alone_c, alone_m, both_c, both_m = [], [], [], []
    started, rounds = time.perf_counter(), 0
    while rounds < 3 or (rounds < _MOST_ROUNDS and agree(time.perf_counter() - started, group=group)[0] < slice_s):
        rounds += 1
        agree(group=group)
        steps = [clock.timed(kernels.step) for _ in range(5)]
        alone_c.append(agree(median(steps), group=group)[0])
        clock.synchronize()
        agree(group=group)
        begin = time.perf_counter()
        for work in _send(buckets, group):
            work.wait()
        clock.synchronize()
        alone_m.append(agree(time.perf_counter() - begin, group=group)[0])
        agree(group=group)
        begin = time.perf_counter()
        pending = _send(buckets, group)
        kernel_s = _while_pending(pending, kernels, clock)
        lasted = time.perf_counter() - begin
        for work in pending:
            work.wait()
        together = agree(kernel_s or median(steps), lasted, group=group)
        both_c.append(together[0])
        both_m.append(together[1])
    return Overlap(
        compute_slowdown=max(1.0, median(both_c) / median(alone_c)),
        communication_slowdown=max(1.0, median(both_m) / median(alone_m)),
    )


def _send(buckets: list[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start an all-reduce of every bucket, as data parallelism does in backward."""
    started = (dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets)
    return [work for work in started if work is not None]


def _while_pending(pending: list[dist.Work], kernels: Kernels, clock: Clock) -> float:
    """Run kernels until all messages have arrived. Returns the seconds of one run of each kernel meanwhile, in sum; 0
    if messages were too short."""
    samples: dict[str, list[float]] = {kind: [] for kind in kernels.work}
    for kind, run in cycle(kernels.work.items()):
        if all(work.is_completed() for work in pending):
            break
        start = clock.mark()  # on this stream only, so that it does not wait for the messages
        run()
        samples[kind].append(clock.seconds([start, clock.mark()])[0])
    return sum(median(times) for times in samples.values()) if all(samples.values()) else 0.0


def measure_together(
    device: torch.device, clock: Clock, group: dist.ProcessGroup, *, small: bool = False
) -> Callable[[], float]:
    """A function that measures the current speed of the ranks of ``group``: seconds of the slowest rank for each kernel
    and an all-reduce of a bucket.

    All ranks call it. With ``small`` it runs a tenth of the kernels and a sixteenth of the bucket.
    """
    most = _common_scale(device, group) * _BUCKET_BYTES // (16 if small else 1)
    words = message_within(most, group, device, clock) // 4
    kernels, bucket = training_kernels(device, group, small=small), torch.zeros(words, device=device)

    def work() -> None:
        kernels.step()
        dist.all_reduce(bucket, group=group)

    def seconds() -> float:
        agree(group=group)
        return agree(clock.timed(work), group=group)[0]

    return seconds


def measure_peaks(device: torch.device, clock: Clock) -> tuple[float, float, float]:
    """fp32 and bf16 FLOP/s of a large matrix product, and bytes/s of a copy: the best of a few runs on one rank alone.

    The sides of the matrix are doubled until a product takes ``_PRODUCT_S`` or the largest size is reached. A CPU
    without instructions for bf16 is about a hundred times slower in bf16 than in fp32.
    """

    scale = _scale(device)
    largest = _MATRIX * (8 if scale > 1 else 1)

    def best(run: Callable[[], object]) -> float:
        samples = [clock.timed(run)]
        while len(samples) < 2 or (len(samples) < _TRIES and sum(samples) < _TRIES_S):
            samples.append(clock.timed(run))
        return min(samples)

    def rate(dtype: torch.dtype) -> float:
        side = largest // 8
        while True:
            a = torch.randn(side, side, device=device).to(dtype)
            seconds = best(partial(torch.matmul, a, a))
            if seconds >= _PRODUCT_S or side >= largest:
                return 2.0 * side**3 / seconds
            side *= 2

    size = scale * _PASS_BYTES
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return rate(torch.float32), rate(torch.bfloat16), 2.0 * size / best(lambda: target.copy_(source))
