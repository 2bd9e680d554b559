"""The cluster to use where none is named: the one that was measured, or the preset of the same GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asa.cost.machine import presets, widen
from asa.errors import UnavailableError, UsageError
from asa.ir.cluster import Cluster, Device, alone
from asa.ir.profile import DeviceRecord

_ADDITIONS = {"ti", "super", "ada", "d", "laptop", "mobile"}
"""Words behind a number that make another chip of it."""


def nearest(known: Sequence[Cluster], record: DeviceRecord, gpus: int | None) -> Cluster:
    """A cluster out of ``known`` (measured here) with that device and enough ranks, else a preset of that GPU, else,
    for a CPU, the largest measured one with more ranks on its cores. For one rank it is the device alone.

    Raises:
        UsageError: there are some, but none with so many devices.
        UnavailableError: there is none.
    """
    device, device_name = record.type, record.name
    local = [c for c in known if c.device.type == device]
    measured = [c for c in local if c.num_devices >= (gpus or 1)]
    if measured:
        return min(measured, key=lambda c: (c.device.name != device_name, c.num_devices))
    shipped = [presets.load(name) for name in presets.names()]
    fits = [c for c in shipped if c.device.type == device and c.num_devices >= (gpus or 1)]
    fits = [c for c in fits if device == "cpu" or same_gpu(c.device.name, device_name)]
    if fits:
        return min(fits, key=lambda c: c.num_devices)
    if gpus == 1:
        return alone(Device(name=record.name, type=record.type, memory_bytes=record.memory_bytes))
    if local and gpus is not None:
        largest = max(local, key=lambda c: (c.num_devices, c.device.name == device_name))
        if widen.possible(largest, gpus):
            return widen.widened(largest, gpus)
        raise UsageError(
            f"asked for {gpus} devices, the largest {device} cluster known, {largest.name}, has {largest.num_devices}; "
            f"lower --gpus, or name a larger one with --cluster ({_named(gpus)})"
        )
    wanted, flag = (f"{gpus} {device} devices", f" --gpus {gpus}") if gpus else (f"{device} devices", "")
    raise UnavailableError(
        f"no cluster of {wanted} is known; run `asa cluster measure{flag}` on the machine, or name one with --cluster "
        f"for an estimate ({_named(gpus)})"
    )


def _named(gpus: int | None) -> str:
    """The presets that could be named, in words."""
    return (presets.offered(gpus) if gpus else "") or "`asa cluster list`"


def same_gpu(a: str, b: str) -> bool:
    """Whether two GPU names mean the same chip: equal ones, those that share a word such as A100 or V100, and those of
    one number, as RTX 3090 has, with the same addition to it (Ti, Super, Ada, D).

    >>> same_gpu("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"), same_gpu("Tesla V100", "NVIDIA H100")
    (True, False)
    >>> same_gpu("NVIDIA GeForce RTX 3070 Ti", "GeForce RTX 3070 Ti"), same_gpu("RTX 3070 Ti", "RTX 3070")
    (True, False)
    """

    def words(name: str) -> set[str]:
        return set(re.split(r"[^a-z0-9]+", name.lower()))

    def chips(name: str) -> set[str]:
        of_letters = {w for w in words(name) if re.fullmatch(r"[a-z]+\d+[a-z]*", w)}
        more = "".join(sorted(words(name) & _ADDITIONS))
        return of_letters | {w + more for w in words(name) if re.fullmatch(r"\d{3,4}", w)}

    ignored = {w for w in chips(a) | chips(b) if w.startswith(("sxm", "hbm", "pcie"))}
    return a == b or bool(chips(a) & chips(b) - ignored)
