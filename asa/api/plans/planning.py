"""``asa.plan``: the planner of ``asa plan``, for a module or a profile in memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asa.api.arguments import check_model, read
from asa.api.messages import naming_arguments
from asa.errors import InvalidInputError, UsageError
from asa.ir import codec, shipped
from asa.ir.chips import may_be_alike
from asa.ir.cluster import Cluster
from asa.ir.plan import OptimizerName, Plan
from asa.ir.profile import DeviceRecord, Precision, Profile
from asa.planner import Request, check_request, parse_pin, usual_limit
from asa.planner import plan as solve
from asa.strategies import offered

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@naming_arguments(of_plan=True)
def plan(
    model: nn.Module | Profile,
    example_input: Tensor | None = None,
    *,
    gpus: int,
    cluster: Cluster | Path | str | None = None,
    global_batch: int | None = None,
    num_classes: int | None = None,
    memory_bytes: int | None = None,
    strategies: Sequence[str] | str | None = None,
    pins: Sequence[str] | str = (),
    optimizer: OptimizerName = "sgd",
    precision: Precision = "fp32",
    time_limit_s: float = 75.0,
) -> Plan:
    """The best plan for ``model`` on ``gpus`` devices of ``cluster``.

    Args:
        model: a module, which is measured now on the device of its parameters and left unchanged; or a profile of one.
            For a ``cluster`` with other devices the module is not run: times are estimated from its structure,
            and it may be on the meta device, without weights.
        example_input: a batch of at least one sample [N, ...], tokens as int64 [N, T]; needed with a module.
        cluster: a cluster, its file, or a preset's name (``asa cluster list``). By default it is chosen as in ``asa
            plan``: measured here before (``profiles/``), or the preset with the same GPU.
        global_batch: samples per step over all devices; by default the profile's, or 64 with a module.
        num_classes: number of outputs of the model; by default determined by running it.
        memory_bytes: memory that may be used on each device, if less than it has.
        strategies, pins: like ``--strategies`` and ``--pin``: texts with commas, or lists of texts.
        time_limit_s: seconds for measuring.

    Raises:
        UsageError: a module without an example, or a request that contradicts itself.
        UnavailableError: no cluster is named, and none with enough such devices is known.
        InfeasibleError: no plan fits; names the limiting constraint and the nearest remedy.
    """
    if not isinstance(model, Profile):
        check_model(model)
    wishes = read(strategies=strategies, pins=pins, memory_bytes=memory_bytes, optimizer=optimizer)
    gpus, time_limit_s = (read(gpus=gpus, time_limit_s=time_limit_s)[k] for k in ("gpus", "time_limit_s"))
    read(cluster=cluster, global_batch=global_batch, num_classes=num_classes, precision=precision)
    if global_batch is None:
        global_batch = model.global_batch if isinstance(model, Profile) else 64
    from asa.cost.machine import widen

    request = Request(
        gpus=gpus,
        global_batch=global_batch,
        time_limit_s=usual_limit(gpus),
        **{**wishes, "pins": tuple(parse_pin(text) for text in wishes["pins"])},
    )
    named = None if cluster is None else named_cluster(cluster, gpus)
    if named is not None and len(named.levels) > 1 and widen.possible(named, gpus):
        named = widen.widened(named, gpus)
    if not isinstance(model, Profile) and example_input is None:
        raise UsageError("planning for a module needs an example_input, a batch of at least one sample")
    if named is None and not isinstance(model, Profile) and device_of(model).type == "meta":
        raise UsageError("a model on meta cannot be measured; name the cluster to plan for: `asa cluster list`")
    # Everything is checked before the model is measured, which takes longer.
    chosen = named or nearest_cluster(
        model.device if isinstance(model, Profile) else _record(device_of(model)), gpus
    )  # fmt: skip
    check_request(chosen, offered(), request)
    if isinstance(model, Profile):
        model.check_runs_on(gpus)
        profile = model
    elif _is_elsewhere(chosen, device_of(model)):
        profile = estimated(
            model, one_tensor(example_input), chosen, num_classes=num_classes, global_batch=global_batch,
            precision=precision, gpus=gpus,
        )  # fmt: skip
    else:
        profile = measured(
            model, one_tensor(example_input), num_classes=num_classes, global_batch=global_batch,
            precision=precision, limit_s=time_limit_s,
        )  # fmt: skip
    return solve(profile, chosen, offered(), request)[0]


def _is_elsewhere(cluster: Cluster, device: torch.device) -> bool:
    """Whether ``cluster`` has other devices than ``device``: another kind, or another GPU."""
    kind = device.type
    return cluster.device.type != kind or not may_be_alike(kind, _record(device).name, cluster.device.name)


def _record(device: torch.device) -> DeviceRecord:
    from asa.profiler.machine import device_record

    return device_record(device)


def named_cluster(cluster: Cluster | Path | str, gpus: int | None = None) -> Cluster:
    """The named cluster, for ``gpus`` devices.

    Raises:
        UsageError: no preset has that name.
        InvalidInputError: the file cannot be used.
    """
    from asa.cost.machine import presets

    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Path) or cluster.endswith(".json"):
        return codec.load(Cluster, Path(cluster))
    local = {c.name: c for c in known_clusters()}
    return local[cluster] if cluster in local else presets.load(cluster, gpus)


def nearest_cluster(device: DeviceRecord, gpus: int) -> Cluster:
    """The known cluster that fits ``device`` best.

    Raises:
        UnavailableError: there is none.
    """
    from asa.cost.machine.nearest import nearest

    return nearest(known_clusters(), device, gpus)


def known_clusters() -> list[Cluster]:
    """Stored clusters: those in ``profiles/`` of the working directory, and those shipped with the package. Files that
    cannot be used are skipped."""
    folders = (Path("profiles"), shipped.FOLDER)
    clusters = []
    for path in shipped.each_once(p for folder in folders for p in sorted(folder.glob("cluster.*.json"))):
        try:
            clusters.append(codec.load(Cluster, path))
        except InvalidInputError:
            continue
    return clusters


def measured(
    model: nn.Module, example: Tensor, *, num_classes: int | None, global_batch: int, precision: Precision,
    limit_s: float, max_degree: int = 8, device: torch.device | None = None,
) -> Profile:  # fmt: skip
    """A profile of a copy of ``model``, measured now on ``device``, or on the device of its parameters."""
    from asa.profiler.measure import profile_module
    from asa.tracing.surroundings import surroundings_preserved

    shaped(model)
    with surroundings_preserved(model):
        # Measuring uses random samples, which may change the running statistics of a copy only.
        return profile_module(
            _copied(model, example),
            example,
            spec=spec_of(model),
            num_classes=num_classes or outputs_of(model, example),
            global_batch=global_batch,
            device=device or device_of(model),
            precision=precision,
            time_limit_s=limit_s,
            max_tensor_degree=max_degree,
        )


def _copied(model: nn.Module, example: Tensor) -> nn.Module:
    """A copy of ``model``.

    Raises:
        InvalidInputError: it cannot be copied, or a copy uses parameters of the model itself.
    """
    import torch

    from asa.tracing import histories, outcome
    from asa.tracing.preserve import mode, preserved
    from asa.tracing.tracer import reason_of

    try:
        copied = copy.deepcopy(model, histories(model))
    except Exception as error:  # whatever the objects in a model raise
        raise InvalidInputError(
            f"the model cannot be copied ({reason_of(error)}), and what is measured is a copy: keep what cannot be "
            "copied (locks, files, generators) out of its attributes"
        ) from error
    try:
        with preserved(copied), mode(copied, False), torch.enable_grad():
            outputs = outcome(copied, example[:2].to(device_of(model)))
    except Exception:  # measuring says why it does not run
        return copied
    nodes, names = [t.grad_fn for t in outputs], {id(p): name for name, p in model.named_parameters()}
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if name := names.get(id(getattr(node, "variable", None))):
            raise InvalidInputError(
                f"a copy of the model uses {name} of the model itself: a layer refers to another one by a function or "
                "a weak reference, which copies do not follow; let it refer to the layer, or hand the tensor to its "
                "forward"
            )
        following = {n for n, _ in getattr(node, "next_functions", ()) if n is not None} - seen
        seen |= following
        nodes += following
    return copied


def estimated(
    model: nn.Module, example: Tensor, cluster: Cluster, *, num_classes: int | None, global_batch: int,
    precision: Precision, gpus: int,
) -> Profile:  # fmt: skip
    """Estimated profile of ``model`` on the devices of ``cluster``, from its structure."""
    from asa.cost.machine.estimate import estimate
    from asa.sharding.layers.structure import stripped, structure_of
    from asa.tracing import histories
    from asa.tracing.surroundings import surroundings_preserved

    shaped(model)
    with surroundings_preserved(model):
        structure = structure_of(
            lambda: stripped(model), lambda: copy.deepcopy(model, histories(model)), example, name=spec_of(model),
            num_classes=num_classes or outputs_of(model, example), precision=precision,
        )  # fmt: skip
    return estimate(
        structure.graph, cluster.device, model_spec=spec_of(model), model_fingerprint=structure.fingerprint,
        precision=precision, global_batch=global_batch, max_degree=gpus, trained_on_one=structure.trains_on_one,
    )  # fmt: skip


def one_tensor(example: Any) -> Tensor:
    """``example``, if a model can be planned with it.

    Raises:
        UsageError: it is not one tensor with at least one sample.
    """
    import torch

    if isinstance(example, torch.Tensor) and example.dim() and len(example):
        return example
    kind = f"a tensor of shape {tuple(example.shape)}" if isinstance(example, torch.Tensor) else type(example).__name__
    raise UsageError(
        f"example_input is {kind}, not one tensor [N, ...] of at least one sample; a model of other inputs can be put "
        "into a module that takes one"
    )


def check_plain(model: nn.Module) -> None:
    """Check that a model is not already distributed over ranks, before any rank waits for another.

    Raises:
        UsageError: it is, as a whole or in part.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel):
            inside = f"{path or 'model'}.module"
            raise UsageError(f"{path or 'the model'} is in {kind}: pass what is inside ({inside}); asa distributes it")
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            raise UsageError(f"{path or 'the model'} is sharded already ({kind}): pass the plain model; asa shards it")


def shaped(model: nn.Module) -> None:
    """Check that no lazy module of a model lacks its shape.

    Raises:
        UsageError: one does.
    """
    from torch.nn.parameter import is_lazy

    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise UsageError(f"{type(model).__name__} has lazy modules without a shape: run it on one batch first")


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's parameters."""
    import torch

    return next((p.device for p in model.parameters()), torch.device("cpu"))


def spec_of(model: nn.Module) -> str:
    """Name of a module of the user's own in plans and profiles."""
    return f"{type(model).__module__}:{type(model).__qualname__}"


def outputs_of(model: nn.Module, example: Tensor) -> int:
    """Number of classes of a model: the second dimension of its main output, or 1 if it has none. For a model that
    returns one row per token, it is the last dimension.

    Raises:
        InvalidInputError: the model fails on ``example``, or returns no tensor.
    """
    import torch

    from asa.tracing import outcome
    from asa.tracing.preserve import mode, preserved

    with preserved(model), mode(model, False), torch.no_grad():
        output = outcome(model, example[:1].to(device_of(model)))[0]
    by_token = not example.is_floating_point() and output.dim() == 3 and output.shape[1:2] == example.shape[1:]
    return int(output.shape[-1 if by_token else 1]) if output.dim() > 1 else 1
