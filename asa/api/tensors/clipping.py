"""Gradient clipping for sharded models: the norm is over all ranks, also in ``torch.nn.utils.clip_grad_norm_``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from asa.api.patching import replace_once
from asa.api.tensors.collectives import over_processes
from asa.errors import UsageError
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import local_tensors
from asa.sharding.split import held_of
from asa.sharding.split.local_parts import local
from asa.sharding.split.wire import gathered

_split: WeakSet[ParallelModel] = WeakSet()
"""Models whose gradients no rank holds in full."""
_of_jobs: WeakSet[ParallelModel] = WeakSet()
"""Models of jobs. Their optimizer has only the parameters that this rank updates, but clipping applies to all."""


@torch.no_grad()
def total_norm(model: ParallelModel, norm_type: float = 2.0, only: set[int] | None = None) -> Tensor:
    """Norm of all gradients over ranks and shards, as a float64 scalar on the CPU (collective). ``only``: ``id`` of the
    parameters whose gradients count; None for all."""
    total, most = torch.zeros((), dtype=torch.float64), norm_type == math.inf
    layout_of = {
        id(t): layout for c, layout in zip(model.components, model.layouts, strict=True) for t in c.parameters()
    }
    for item in local_tensors(model):
        gradient = item.tensor.grad if isinstance(item.tensor, nn.Parameter) else None
        if gradient is None or (only is not None and id(item.tensor) not in only):
            continue
        layout = layout_of[id(item.tensor)]
        parts = item.axis.size if item.shard is not None else 1
        own_part = local(gradient)
        if isinstance(gradient, DTensor):
            mesh, placements = gradient.device_mesh, gradient.placements
            parts *= math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_shard())
        if most:
            total = torch.maximum(total, own_part.double().abs().max().cpu()) if own_part.numel() else total
        else:  # several ranks hold the same part: each adds its share
            total += own_part.double().abs().pow(norm_type).sum().cpu() * parts / layout.width
    if model.plan.num_ranks > 1:
        sums = torch.stack([total.masked_fill(total.isnan(), 0), total.isnan().double()])
        sums = over_processes(model, sums, dist.ReduceOp.MAX if most else dist.ReduceOp.SUM)
        total, nan_flag = sums  # NaN is sent as a flag: a maximum over ranks may ignore it
        total = total.masked_fill(nan_flag > 0, math.nan)
    return total if most else total.pow(1 / norm_type)


@torch.no_grad()
def scale(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients whose norm is ``norm`` so that it is at most ``max_norm``."""
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for p in map(held_of, parameters):
        if p.grad is not None and factor < 1:
            p.grad.mul_(factor)


def clip(model: ParallelModel, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over ranks and shards is at most ``max_norm``; returns the norm
    (collective)."""
    norm = total_norm(model)
    scale(model.parameters(), max_norm, norm)
    return norm


@torch.no_grad()
def clip_own(model: ParallelModel, max_norm: float, weight: float) -> None:
    """Scale this rank's gradients so that the norm of those of its own batch is at most ``max_norm``. They are
    ``weight`` times these; with a weight of 0, the rank has no samples."""
    if weight:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        scale(model.parameters(), max_norm, norm / weight)


def understood_by_torch(model: ParallelModel, *, job: bool = False) -> None:
    """Patch ``torch.nn.utils.clip_grad_norm_`` so that parameters of ``model`` are clipped by the norm over all ranks.
    Without this, each rank would use the norm of its own shards. Other calls are unchanged. ``job``: the model is that
    of a job, whose optimizer has only the parameters that this rank updates."""
    replicated = all(a.data.strategy == "replicate" and a.tensor.degree == 1 for a in model.plan.components)
    if replicated and len(model.plan.stages) == 1:
        return
    _split.add(model)
    if job:
        _of_jobs.add(model)
    for where, before in ((clip_grad, "_"), (nn.utils, "")):  # the names inside torch and the public ones
        replace_once(where, f"{before}get_total_norm", _norm)
        replace_once(where, f"{before}clip_grads_with_norm_", _scaled)
        replace_once(where, "clip_grad_value_", _clamped)


def _checked(norm: Tensor, error_if_nonfinite: bool, gradients: list[Tensor], model: ParallelModel) -> Tensor:
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm for gradients from `parameters` is non-finite ({float(norm)}), so it cannot be clipped"
        )  # torch's words, which programs look for
    return norm.to(device=model.device, dtype=gradients[0].dtype if gradients else torch.float32)


def _norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Tensor:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        requested = {id(held_of(t)) for t in listed}
        for model in _of_jobs:
            updated = {id(p.grad) for p in model.updated if p.grad is not None}
            if requested == updated:
                return _checked(total_norm(model, float(norm_type)), error_if_nonfinite, listed, model)
            if requested & updated:
                raise UsageError(
                    "a Job cannot clip some of its parameters, of which ranks update different ones: clip all of them "
                    "at once, or give asa.Job max_norm"
                )
        norms, counted, of_model = [], set[int](), None
        for model in _split if requested else ():
            only = {id(p): id(p.grad) for p in model.parameters() if p.grad is not None and id(p.grad) in requested}
            if only:
                norms.append(total_norm(model, float(norm_type), set(only)))
                counted, of_model = counted | set(only.values()), model
        others = [t for t in listed if id(held_of(t)) not in counted]
        if of_model is None:
            return original(listed, norm_type, error_if_nonfinite, foreach)
        if others:  # of another model, or no gradients
            rest = original(others, norm_type, False, foreach)
            norms.append(gathered(rest).detach().double().cpu())
        total = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        return _checked(total, error_if_nonfinite, listed, of_model)

    return norm


def _clamped(original: Callable[..., None]) -> Callable[..., None]:
    @torch.no_grad()
    def clamped(parameters: Any, clip_value: float, foreach: Any = None) -> None:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        sharded = {id(p) for model in _split for p in model.parameters()}
        if others := [p for p in listed if id(held_of(p)) not in sharded]:
            original(others, clip_value, foreach)
        for gradient in (held_of(p).grad for p in listed if id(held_of(p)) in sharded):
            if gradient is not None:  # elementwise, so each rank clamps its own part
                local(gradient).clamp_(-clip_value, clip_value)

    return clamped


def _scaled(original: Callable[..., None]) -> Callable[..., None]:
    def scaled(parameters: Any, max_norm: float, norm: Tensor, foreach: Any = None) -> None:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        sharded = {id(p) for model in _split for p in model.parameters()}
        if any(id(held_of(p)) in sharded for p in listed):
            scale(listed, float(max_norm), norm)
        else:
            original(listed, max_norm, norm, foreach)

    return scaled
