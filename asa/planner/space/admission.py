"""Checks a request as far as that needs no model."""

from __future__ import annotations

from asa.cost.machine import presets
from asa.errors import UsageError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.planner.space import baselines
from asa.planner.space.request import Request
from asa.planner.space.space import check


def check_request(cluster: Cluster | None, strategies: Strategies, request: Request) -> None:
    """Refuse a request that no model can satisfy. ``cluster`` is None where it is yet to be measured: then only what no
    cluster can satisfy is refused.

    Raises:
        UsageError: unknown strategies, pins to strategies not offered, more devices than the cluster has, or offload on
            a CPU.
    """
    if cluster is not None and request.gpus > cluster.num_devices:
        larger = presets.offered(request.gpus, like=cluster.name)
        larger = larger or "one of several nodes is widened to as many as are asked for"
        raise UsageError(
            f"asked for {request.gpus} devices, cluster {cluster.name} has {cluster.num_devices}; lower --gpus, name "
            f"a larger --cluster ({larger}), or measure one"
        )
    if cluster is not None and request.offload == "always" and cluster.device.type == "cpu":
        raise UsageError(
            f"offload saves nothing on {cluster.name}: what a CPU rank holds is in host memory already; leave it out, "
            "or name a cluster of CUDA devices (`asa verify PLAN --device cpu` runs such a plan here)"
        )
    baselines.check(request.strategies or ("asa",), strategies, request.gpus)
    check(strategies, request.pins)
