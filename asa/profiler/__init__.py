"""Measures times and memory of a model's components on a device, and of messages between ranks.

::

    profile = profile_model("resnet50", input_shape=(3, 32, 32), num_classes=100, global_batch=64)
    cluster = measure_cluster(2)                    # this machine's own ranks: tables, contention, overlap
    save(profile, profile_path(profile))            # profiles/resnet50.cpu.fp32.json

Imported lazily: :mod:`asa.profiler.paths` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asa.profiler.paths import profile_path

if TYPE_CHECKING:
    from asa.profiler.interconnect import measure_cluster
    from asa.profiler.measure import profile_model, profile_module

__all__ = ["measure_cluster", "profile_model", "profile_module", "profile_path"]


def __getattr__(name: str) -> Any:
    if name == "measure_cluster":
        from asa.profiler.interconnect import measure_cluster

        return measure_cluster
    if name in ("profile_model", "profile_module"):
        from asa.profiler import measure

        return getattr(measure, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
