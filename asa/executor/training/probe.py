"""A fixed computation and a fixed message, whose times show how fast every process currently is."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from asa.executor.model.votes import Votes
from asa.interfaces.executor import Probe
from asa.ir.measurements import Transfer
from asa.ir.units import MIB
from asa.sharding.collectives import direct
from asa.sharding.collectives.waits import level_of, waits

_SIZE = {"cpu": 256, "cuda": 4096}
_TIMES = {"cpu": 48, "cuda": 8}
"""Number of matrix products. They take tens of milliseconds, so that other programs on the core run in between."""
_IDLE_TIMES, _IDLE_S = 3, 0.2
"""How often, and for how many seconds, an idle process computes at least while others train. A process that has just
waited gets more of a core that it shares, and one that is held up for 100 ms at a time may not be in a shorter
computation: both would look faster than training would be."""
_MESSAGE_BYTES = MIB
_MESSAGES = 5


def probe(votes: Votes, device: torch.device, idle_s: float | None = None, *, compute: bool = True) -> Probe:
    """Measure computation (if ``compute``) and messages of all processes at the same time (collective). ``idle_s``: the
    result of :func:`measure_idle` on a process that called it, which then does not compute again."""
    votes.gather([0.0])
    began = time.perf_counter()
    computing_s = (_computing(device) if idle_s is None else idle_s) if compute else 0.0
    messages = _messages(device) if votes.num_ranks > 1 else []
    rows_of_ranks = votes.gather([time.perf_counter() - began, computing_s, *messages])
    took_s = max(rank[0] for rank in rows_of_ranks)
    links: tuple[Transfer, ...] = ()
    if messages:
        # All wait for the last rank to arrive, which waits for none: the shortest time is that of the transfer itself.
        seconds = median(min(rank[2 + i] for rank in rows_of_ranks) for i in range(_MESSAGES))
        level = level_of(range(votes.num_ranks))
        links = (
            Transfer(
                op="all_reduce", level=level, group_size=votes.num_ranks, num_bytes=float(_MESSAGE_BYTES),
                seconds=seconds, n=_MESSAGES,
            ),
        )  # fmt: skip
    compute_s = tuple(rank[1] for rank in rows_of_ranks) if compute else ()
    return Probe(compute_s=compute_s, links=links, took_s=took_s)


def measure_idle(device: torch.device) -> float:
    """Seconds of the computation of a probe on an idle process, as the mean of several in a row, while others train."""
    seconds: list[float] = []
    while len(seconds) < _IDLE_TIMES or sum(seconds) < _IDLE_S:
        seconds.append(_computing(device))
    return sum(seconds) / len(seconds)


def _computing(device: torch.device) -> float:
    """Seconds of a fixed number of matrix products, after one for warm-up."""
    size = _SIZE[device.type]
    x = torch.full((size, size), 1 / size, device=device)
    y = torch.empty_like(x)
    torch.mm(x, x, out=y)
    _synchronise(device)
    began = time.perf_counter()
    for _ in range(_TIMES[device.type]):
        torch.mm(x, x, out=y)
    _synchronise(device)
    return time.perf_counter() - began


def _messages(device: torch.device) -> list[float]:
    """Seconds of each of several all-reduces over all processes, after one for warm-up. They are sent in the same way
    as gradients."""
    x = torch.zeros(_MESSAGE_BYTES // 4, device=device)
    seconds = []
    observed, waits.on = waits.on, False  # these are not transfers of the plan
    try:
        for _ in range(1 + _MESSAGES):
            began = time.perf_counter()
            direct.all_reduce(x, group=dist.group.WORLD)
            _synchronise(device)
            seconds.append(time.perf_counter() - began)
    finally:
        waits.on = observed
    return seconds[1:]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
