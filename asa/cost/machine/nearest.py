"""The cluster to use if the user names none: a measured one, or the preset of the same GPU."""

from __future__ import annotations

from collections.abc import Sequence

from asa.cost.machine import presets, widen
from asa.errors import UnavailableError, UsageError
from asa.ir.chips import may_be_alike, same_gpu
from asa.ir.cluster import Cluster, Device, alone
from asa.ir.profile import DeviceRecord


def nearest(known: Sequence[Cluster], record: DeviceRecord, gpus: int | None) -> Cluster:
    """The first of: a cluster of ``known`` (measured here) with this device and at least ``gpus`` ranks; a preset of
    this GPU; for one rank, the device alone; the largest known cluster, widened to ``gpus`` ranks.
    Clusters of another GPU are passed over.

    Raises:
        UsageError: clusters of this type are known, but none has so many devices.
        UnavailableError: no cluster of this type is known.
    """
    device, device_name = record.type, record.name
    local = [c for c in known if c.device.type == device and may_be_alike(device, c.device.name, device_name)]
    measured = [c for c in local if c.num_devices >= (gpus or 1)]
    if measured:
        return min(measured, key=lambda c: (c.device.name != device_name, c.num_devices))
    shipped = [presets.load(name) for name in presets.names()]
    candidates = [c for c in shipped if c.device.type == device and c.num_devices >= (gpus or 1)]
    candidates = [c for c in candidates if device == "cpu" or same_gpu(c.device.name, device_name)]
    if candidates:
        return min(candidates, key=lambda c: c.num_devices)
    if gpus == 1:
        return alone(Device(name=record.name, type=record.type, memory_bytes=record.memory_bytes))
    if local and gpus is not None:
        largest = max(local, key=lambda c: (c.num_devices, c.device.name == device_name))
        if widen.possible(largest, gpus):
            return widen.widened(largest, gpus)
        raise UsageError(
            f"asked for {gpus} devices, the largest {device} cluster known, {largest.name}, has {largest.num_devices}; "
            f"lower --gpus, or name a larger one with --cluster ({_offered(gpus)})"
        )
    devices, flag = (f"{gpus} {device} devices", f" --gpus {gpus}") if gpus else (f"{device} devices", "")
    raise UnavailableError(
        f"no cluster of {devices} is known; run `asa cluster measure{flag}` on the machine, or name one with --cluster "
        f"for an estimate ({_offered(gpus)})"
    )


def _offered(gpus: int | None) -> str:
    """Presets that the user could name, for an error message."""
    return (presets.offered(gpus) if gpus else "") or "`asa cluster list`"
