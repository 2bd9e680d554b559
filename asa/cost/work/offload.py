"""Seconds of an optimizer step on the host (Ren et al. 2021, "ZeRO-Offload").

Gradients are copied to the host, the host updates, and parameters are copied back, one after the other
(:mod:`asa.executor.model.offload`). The devices of a host share its memory bandwidth; each has its own link.
"""

from __future__ import annotations

from typing import Any

from asa.cost.constants import constant
from asa.cost.work.compute import PASSES
from asa.ir.cluster import Cluster
from asa.ir.plan import OptimizerName


def host_update(cluster: Cluster, optimizer: OptimizerName, updated_bytes: Any, busy: int) -> Any:
    """Seconds to update ``updated_bytes`` of a device's parameters (a number or an array) on its host, while ``busy``
    devices do the same."""
    link = cluster.device.host_bandwidth or constant("fallback_host_bandwidth")
    neighbours = max(1, min(busy, cluster.host))
    arithmetic = PASSES[optimizer] * updated_bytes * neighbours / constant("host_update_bandwidth")
    return 2 * updated_bytes / link + arithmetic
