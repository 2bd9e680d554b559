"""Measures the machine's own ranks as a cluster: cost of messages, and how much ranks slow each other down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from asa import __version__
from asa.errors import UnavailableError, UsageError
from asa.instruments.nvml import card_of, topology, watching
from asa.ir.cluster import Cluster, CollectiveTable, Contention, Device, Level, Overlap, RankDevice, Sharding
from asa.launch import run_ranks, tell, usable_cores
from asa.profiler.clock import clock_of, solo_clock_of
from asa.profiler.collectives import SIZES, measure_tables
from asa.profiler.drift import Reference
from asa.profiler.interference import measure_contention, measure_overlap, measure_peaks, measure_together
from asa.profiler.machine import device_record
from asa.profiler.rounds import agree
from asa.profiler.unequal import measure_devices, without_speeds
from asa.profiler.waiting import measure_sharding, measure_waiting
from asa.sharding.collectives.segment import segment_of

Backend = Literal["gloo", "nccl"]

_TABLES_SHARE, _CONTENTION_SHARE, _OVERLAP_SHARE, _WAITING_SHARE, _SHARDING_SHARE = 0.55, 0.17, 0.12, 0.06, 0.1
_BRIEF_S = 10.0
"""Time limit in seconds below which only every other message size is measured, with less work but the same number of
readings."""
_LEAST_BYTES = 64
_IN_TURN = Overlap(compute_slowdown=2.0, communication_slowdown=2.0)
"""Overlap of messages that a rank's own thread sends: nothing is computed meanwhile, so nothing is saved."""


@dataclass(frozen=True)
class _Task:
    backend: Backend
    sizes: tuple[int, ...]
    time_limit_s: float
    source: str
    name: str | None = None


def measure_cluster(
    num_ranks: int,
    *,
    backend: Backend = "gloo",
    sizes: Sequence[int] | None = None,
    time_limit_s: float = 90.0,
    name: str | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> Cluster:
    """Start ``num_ranks`` ranks on this machine and measure between them.

    It measures every collective on groups of 2, 3, ... all ranks (rank 0 and its neighbours) over message sizes; the
    slowdown of computation when several ranks compute at once; and how much computation and messages slow each other
    down.

    Args:
        backend: ``gloo`` (a rank is one core, one thread) or ``nccl`` (a rank is one CUDA device).
        sizes: message sizes in bytes; 1 KiB to 256 MiB if None.
        time_limit_s: approximate duration. If it is short, each quantity is still measured three times, on less work.
        name: name of the cluster; ``local-<backend>-<ranks>`` if None.
        progress: called as ``progress(fraction done, what is being done)``.

    Raises:
        UsageError: no rank, or messages too small to divide.
        UnavailableError: fewer devices than ranks (nccl).
        WorkersFailedError: a rank failed.
    """
    chosen = _sizes(time_limit_s) if sizes is None else tuple(sorted(set(sizes)))
    if num_ranks < 1 or not time_limit_s > 0:
        raise UsageError(f"cannot measure {num_ranks} ranks in {time_limit_s:g} s; both must be above zero")
    if not chosen or chosen[0] < _LEAST_BYTES:
        raise UsageError(f"messages to measure have at least {_LEAST_BYTES} bytes, asked {min(chosen, default=0)}")
    if backend == "nccl" and not dist.is_nccl_available():
        raise UnavailableError("this torch has no nccl; measure with gloo")
    today = datetime.now(UTC).date().isoformat()
    source = f"asa cluster measure, {today}, asa {__version__}, torch {torch.__version__}, {backend}"
    task = _Task(backend=backend, sizes=chosen, time_limit_s=time_limit_s, source=source, name=name)

    def on_message(_rank: int, message: tuple[float, str]) -> None:
        if progress is not None:
            progress(*message)

    return run_ranks(
        num_ranks,
        _on_rank,
        task,
        backend=backend,
        threads=1 if backend == "gloo" else None,
        limit_s=300 + 5 * time_limit_s,
        on_message=on_message,
    )[0]


def _sizes(time_limit_s: float) -> tuple[int, ...]:
    """Message sizes in bytes for which there is time."""
    return tuple(SIZES[::2] if time_limit_s < _BRIEF_S else SIZES)


def measure_group(*, backend: Backend = "gloo", time_limit_s: float = 20.0) -> Cluster:
    """Measure a cluster between the ranks of the process group to which this process belongs (collective).

    All links count as one level, with the measured speed of groups of each size. Use the result of rank 0, because
    those of other ranks lack the groups to which they do not belong.
    """
    today = datetime.now(UTC).date().isoformat()
    source = f"measured in the running group, {today}, asa {__version__}, torch {torch.__version__}, {backend}"
    task = _Task(backend=backend, sizes=_sizes(time_limit_s), time_limit_s=time_limit_s, source=source)
    with torch.random.fork_rng(devices=[]):
        return _on_rank(dist.get_rank(), task)


def _on_rank(rank: int, task: _Task) -> Cluster:
    """The cluster as measured on each rank. All are equal, except for rank 0's device and tables. The source of one of
    GPUs also tells of connections between them, and of what disturbed the measurement."""
    if task.backend != "nccl":
        return _measured(rank, task)
    with watching(card_of(torch.device("cuda", torch.cuda.current_device()))) as card:
        cluster = _measured(rank, task)
    every = [""] * dist.get_world_size()
    dist.all_gather_object(every, card.disturbed)
    why = "; ".join(f"rank {r}: {text}" for r, text in enumerate(every) if text)
    source = "; ".join(filter(None, (task.source, topology(), f"not to be trusted: {why}" * bool(why))))
    return replace(cluster, status="estimated" if why else "measured", source=source)


def _measured(rank: int, task: _Task) -> Cluster:
    device = torch.device("cuda", torch.cuda.current_device()) if task.backend == "nccl" else torch.device("cpu")
    clock, ranks = clock_of(device), dist.get_world_size()
    brief = task.time_limit_s < _BRIEF_S
    torch.manual_seed(rank)

    def report(fraction: float, what: str) -> None:
        if rank == 0:
            tell((fraction, what))

    report(0.0, "the device alone")
    peaks = measure_peaks(device, clock) if rank == 0 else (0.0, 0.0, 0.0)
    agree()
    contention: tuple[Contention, ...] = (Contention(ranks=1, slowdown=1.0),)
    overlap, waiting, sharding = Overlap(), None, None
    tables: tuple[CollectiveTable, ...] = ()
    devices: tuple[RankDevice, ...] | None = None
    reference: Reference | None = None
    shared_memory = False
    if ranks > 1:
        report(0.02, "computing at once")
        # With a core for every rank, only caches, memory and clocks are shared; time of other processes must not count.
        solo_clock = solo_clock_of(device) if ranks <= usable_cores() else clock
        contention = measure_contention(device, solo_clock, slice_s=_CONTENTION_SHARE * task.time_limit_s, small=brief)
        devices = measure_devices(device, device_record(device), solo_clock)
        contention = contention if devices is None else without_speeds(contention, devices)
        groups = _nested_groups(rank, ranks)
        everybody = groups[ranks]
        assert everybody is not None
        reference = Reference(measure_together(device, clock, everybody, small=brief))
        reference.read()
        tables, spans = _tables(task, device, groups, report, reference)
        report(_CONTENTION_SHARE + _TABLES_SHARE, "computing while messages travel")
        shared_memory = device.type == "cpu" and segment_of(everybody) is not None
        overlap = (
            _IN_TURN if shared_memory else _worst_overlap(device, groups, slice_s=_OVERLAP_SHARE * task.time_limit_s)
        )
        reference.read()
        report(1 - _WAITING_SHARE - _SHARDING_SHARE, "waiting for each other")
        waiting = measure_waiting(device, clock, groups, slice_s=_WAITING_SHARE * task.time_limit_s)
        report(1 - _SHARDING_SHARE, "sharded units")
        reference.read()
        begun = reference.now()
        sharding = measure_sharding(device, clock, everybody, slice_s=_SHARDING_SHARE * task.time_limit_s)
        ended = reference.now()
        reference.read()
        tables = tuple(_at_speed(t, reference.factor(*s)) for t, s in zip(tables, spans, strict=True))
        factor = reference.factor(begun, ended)
        sharding = Sharding(**{f.name: factor * getattr(sharding, f.name) for f in fields(Sharding)})
    record = device_record(device)
    own_device = Device(
        name=record.name,
        type=record.type,
        memory_bytes=record.memory_bytes,
        peak_fp32_flops=peaks[0],
        peak_bf16_flops=peaks[1],
        memory_bandwidth=peaks[2],
    )
    report(1.0, "done")
    level = Level(
        name="loopback" if task.backend == "gloo" else "nccl inside the machine", devices=ranks, tables=tables
    )
    return Cluster(
        name=task.name or f"local-{task.backend}-{ranks}", backend=task.backend, device=own_device, num_devices=ranks,
        levels=(level,) if ranks > 1 else (), contention=contention, overlap=overlap, waiting=waiting,
        sharding=sharding, status="measured", source=task.source, devices=devices,
        drift=reference.drift if reference else None, shared_memory=shared_memory,
    )  # fmt: skip


def _at_speed(table: CollectiveTable, factor: float) -> CollectiveTable:
    return replace(table, points=tuple((size, factor * s) for size, s in table.points))


def _nested_groups(rank: int, ranks: int) -> dict[int, dist.ProcessGroup | None]:
    """Groups of ranks 0 to n - 1, for n from 2 to all; None for groups without this rank."""
    groups: dict[int, dist.ProcessGroup | None] = {}
    for size in range(2, ranks + 1):
        group = dist.new_group(list(range(size)))
        groups[size] = group if rank < size and isinstance(group, dist.ProcessGroup) else None
    return groups


def _tables(
    task: _Task,
    device: torch.device,
    groups: dict[int, dist.ProcessGroup | None],
    report: Callable[[float, str], None],
    reference: Reference,
) -> tuple[tuple[CollectiveTable, ...], list[tuple[float, float]]]:
    """(tables, spans): tables of all groups to which this rank belongs, and when each was measured; other ranks wait.
    Larger groups get more of the time.

    All ranks read the ``reference`` after each group, and between the collectives of the largest group, too.
    """
    tables: list[CollectiveTable] = []
    spans: list[tuple[float, float]] = []
    last = reference.now()

    def between(everybody: bool) -> None:
        nonlocal last
        spans.append((last, reference.now()))
        if everybody:
            reference.read()
        last = reference.now()

    begun = _CONTENTION_SHARE
    for size, group in groups.items():
        part = _TABLES_SHARE * size / sum(groups)
        if group is not None:
            tables += measure_tables(
                group,
                device,
                clock_of(device),
                sizes=task.sizes,
                slice_s=part * task.time_limit_s,
                source=task.source,
                report=partial(_report_part, report, begun, part),
                between=partial(between, size == max(groups)),
            )
        begun += part
        agree()
        if size != max(groups):
            reference.read()
            last = reference.now()
    return tuple(tables), spans


def _report_part(report: Callable[[float, str], None], base: float, part: float, fraction: float, what: str) -> None:
    report(base + part * fraction, what)


def _worst_overlap(device: torch.device, groups: dict[int, dist.ProcessGroup | None], *, slice_s: float) -> Overlap:
    """The larger slowdowns of computation and of communication, among two ranks and all ranks."""
    clock = clock_of(device)
    sizes = sorted({2, max(groups)})
    overlaps = []
    for size in sizes:
        group = groups[size]
        if group is not None:
            overlaps.append(measure_overlap(device, clock, group, slice_s=slice_s / len(sizes)))
        agree()
    return Overlap(
        compute_slowdown=max(o.compute_slowdown for o in overlaps),
        communication_slowdown=max(o.communication_slowdown for o in overlaps),
    )
