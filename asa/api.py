"""For people with their own program: what the commands do, on objects instead of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asa.errors import UsageError
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import OptimizerName, Plan
from asa.ir.profile import Precision, Profile
from asa.planner import Request, parse_pin
from asa.planner import plan as solve

if TYPE_CHECKING:
    from torch import Tensor, nn


def plan(
    model: nn.Module | Profile,
    example_input: Tensor | None = None,
    *,
    gpus: int,
    cluster: Cluster | Path | str,
    global_batch: int | None = None,
    num_classes: int | None = None,
    memory_bytes: int | None = None,
    strategies: Sequence[str] | None = None,
    pins: Sequence[str] = (),
    optimizer: OptimizerName = "sgd",
    precision: Precision = "fp32",
    time_limit_s: float = 75.0,
) -> Plan:
    """The best plan for ``model`` on ``gpus`` devices of ``cluster``.

    Args:
        model: a module, measured now on the device its parameters are on and left as it was; or a profile of one.
        example_input: a batch of at least one sample [N, ...]; needed with a module.
        cluster: a cluster, its file, or a preset's name (``asa cluster list``).
        global_batch: samples per step over all devices; by default the profile's, or 64 with a module.
        num_classes: outputs of the model, found by running it when left out.
        memory_bytes: what one device may hold, if less than it has.
        strategies, pins: as ``--strategies`` and ``--pin``.
        time_limit_s: for measuring.

    Raises:
        UsageError: a module without an example, or a request that contradicts itself.
        InfeasibleError: no plan fits; names what binds and the nearest remedy.
    """
    from asa.strategies import offered

    if isinstance(model, Profile):
        profile = model
    elif example_input is None:
        raise UsageError("planning for a module needs an example_input, a batch of at least one sample")
    else:
        profile = _measured(model, example_input, num_classes, global_batch or 64, precision, time_limit_s)
    request = Request(
        gpus=gpus,
        global_batch=global_batch or profile.global_batch,
        memory_bytes=memory_bytes,
        strategies=tuple(strategies) if strategies is not None else None,
        pins=tuple(parse_pin(text) for text in pins),
        optimizer=optimizer,
    )
    return solve(profile, _cluster(cluster), offered(), request)[0]


def _cluster(cluster: Cluster | Path | str) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Path) or cluster.endswith(".json"):
        return codec.load(Cluster, Path(cluster))
    from asa.cost import presets

    return presets.load(cluster)


def _measured(
    model: nn.Module, example: Tensor, num_classes: int | None, global_batch: int, precision: Precision, limit_s: float
) -> Profile:
    import copy

    import torch

    from asa.profiler.measure import profile_module

    if num_classes is None:
        was = model.training
        with torch.no_grad():
            output = model.eval()(example[:1])
        model.train(was)
        num_classes = int(output.shape[-1]) if isinstance(output, torch.Tensor) else 1
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    name = f"{type(model).__module__}:{type(model).__qualname__}"
    # Measuring feeds random samples through: the running statistics of a copy may see them.
    return profile_module(
        copy.deepcopy(model), example, spec=name, num_classes=num_classes, global_batch=global_batch, device=device,
        precision=precision, time_limit_s=limit_s,
    )  # fmt: skip
