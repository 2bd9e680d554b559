"""Models that compute a sample's output from other samples of its batch, without being a BatchNorm."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from asa.api.calls import Call, samples_of
from asa.api.generators import generators_now
from asa.api.planning import device_of
from asa.errors import UsageError
from asa.ir.plan import Plan
from asa.tracing.preserve import preserved

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}


class _Each(TorchFunctionMode):
    """Inside, ``torch.nn.functional.batch_norm`` leaves statistics of the batch out: every sample stays on its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        x: Tensor = args[0] if args else (kwargs or {})["input"]
        channels = x.shape[1]
        return F.batch_norm(x, x.new_zeros(channels), x.new_ones(channels))


def coupled(model: nn.Module, call: Call | None, *, exact: bool = False) -> float:
    """How far outputs move when a batch is computed in two halves, relative to their size; 0 where they do not, or
    where that cannot be told.

    ``call`` has two samples or more. What is drawn is left out, and BatchNorm, which is looked after elsewhere: layers
    of it and, where it is ``exact``, whatever calls its function. The model is left as it was.
    """
    if call is None:
        return 0.0
    try:
        samples = samples_of(call)
        with preserved(model), torch.no_grad(), _Each() if exact else nullcontext():
            for module in model.modules():
                if isinstance(module, _NormBase) or "drop" in type(module).__name__.lower():
                    module.eval()
            apart = _apart(model, call, samples)
            if apart is None:
                model.eval()
                apart = _apart(model, call, samples)
        return apart or 0.0
    except Exception:  # whatever a model's own code raises on a batch of another size
        return 0.0


def warning_of(apart: float, plan: Plan) -> list[str]:
    """What is to be said of it under ``plan``."""
    shared = max(layout.data for layout in plan.layouts()) * plan.num_microbatches > 1
    if not apart or not shared:
        return []
    return [
        f"the model computes a sample's output from other samples of the batch, too ({apart:.1%} apart when a batch is "
        "halved): a rank has its own samples, and gets other numbers than one device; have outputs depend on one "
        "sample each, take BatchNorm with batch_norm='exact', or plan with strategies=('tensor',)"
    ]


def _apart(model: nn.Module, call: Call, samples: int) -> float | None:
    """How far outputs move, as in :func:`coupled`; None where the model draws random numbers."""
    half = samples // 2
    if not half:
        return 0.0
    device = device_of(model)
    torch.manual_seed(0)
    before = generators_now()
    whole, first, second = (
        pytree.tree_leaves(_run(model, call, samples, slice(*ends), device))
        for ends in ((0, samples), (0, half), (half, samples))
    )
    if generators_now() != before:
        return None
    worst = 0.0
    for all_, a, b in zip(whole, first, second, strict=True):
        if not isinstance(all_, Tensor) or not all_.is_floating_point() or not all_.dim():
            continue
        if len(all_) % samples or a.shape[1:] != all_.shape[1:] or len(a) + len(b) != len(all_):
            continue
        off = float((torch.cat([a, b]) - all_).double().norm() / all_.double().norm().clamp(min=1e-12))
        worst = max(worst, off if off > _TOLERANCES.get(all_.dtype, 0.1) else 0.0)
    return worst


def _run(model: nn.Module, call: Call, samples: int, rows: slice, device: torch.device) -> Any:
    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value[rows] if value.shape[:1] == (samples,) else value).to(device)
        if isinstance(value, list) and len(value) == samples:
            return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value[rows])
        if type(value) is tuple:
            return tuple(taken(one) for one in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise UsageError(f"a {type(value).__name__} cannot be halved")

    held = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        return model(*map(taken, call.args), **{name: taken(value) for name, value in call.options.items()})
    finally:  # what forward leaves in buffers is not to reach the next run
        for buffer, value in held:
            buffer.copy_(value)
