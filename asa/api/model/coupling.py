"""Detects models whose output or gradient for a sample depends on other samples of its batch. BatchNorm is excluded."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from asa.api.calls import Call, arguments, samples_of
from asa.api.generators import generators_now
from asa.api.losses.terms import search_graph
from asa.api.losses.trial import percent
from asa.api.plans.planning import device_of
from asa.errors import UsageError
from asa.ir.plan import Plan
from asa.tracing.preserve import mode, preserved
from asa.tracing.records import numbers_in, understood
from asa.tracing.whole import tensors_of

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
KEEPS, FOLLOWS = -1.0, -2.0
"""Results of :func:`coupled` for a model whose output changes between calls with the same samples: by the number of
calls, or by the samples of earlier ones."""
_LOOSER, _SCALE, _ELEMENTS, _FEWEST = 10.0, 1000.0, 1 << 22, 2
"""Factor on the tolerance for gradients; factor between the gradients of halves and whole, as for a mean over fewer
samples; largest number of elements for gradients; least number of samples in a half."""

CHANGED = (
    "the model's forward changes its inputs in place: what holds them behind the call (the loop, a list of batches in "
    "the next epoch) has other values than on one device; write x = x * a instead of x *= a"
)
"""What a program is told of a model for which :func:`changes_inputs` is true."""


class _WithoutBatchStatistics(TorchFunctionMode):
    """Context in which ``torch.nn.functional.batch_norm`` uses no batch statistics, so that samples are independent."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        x: Tensor = args[0] if args else (kwargs or {})["input"]
        channels = x.shape[1]
        return F.batch_norm(x, x.new_zeros(channels), x.new_ones(channels))


def coupled(model: nn.Module, call: Call | None, *, exact: bool = False) -> float:
    """Relative change of outputs, or of gradients of a sum over samples, when a batch is computed in two halves; 0 if
    there is none or it cannot be determined; ``KEEPS`` or ``FOLLOWS`` if the model changes from call to call. Gradients
    that are not proportional to those of the outputs (clamped, normalized on the way) change, too.

    ``call`` has at least two samples. Dropout is ignored, and so is BatchNorm, which is handled elsewhere: its layers,
    and with ``exact`` all calls of its function. The model is left unchanged.
    """
    if call is None:
        return 0.0
    try:
        call, samples = _of_several(call, 2 * _FEWEST)  # a single sample has no batch statistics
        with preserved(model), torch.no_grad(), _WithoutBatchStatistics() if exact else nullcontext():
            for module in model.modules():
                if isinstance(module, _NormBase) or "drop" in type(module).__name__.lower():
                    module.eval()
            change = _change(model, call, samples)
            if change is None:
                model.eval()
                change = _change(model, call, samples)
        return change or 0.0
    except Exception:  # any error of the model on another batch size
        return 0.0


def fewest_rows(model: nn.Module, call: Call | None, *, exact: bool = False) -> int:
    """Smallest number of samples on which the model runs in training with finite outputs; 1 if it fails on more, too.
    BatchNorm layers are excluded, and with ``exact`` also calls of ``batch_norm``."""
    if call is None:
        return 1
    try:
        (call, samples), device = _of_several(call, 2 * _FEWEST), device_of(model)
    except Exception:  # the inputs cannot be cut into samples
        return 1

    def runs(count: int) -> bool:
        try:
            with (
                preserved(model),
                torch.no_grad(),
                _WithoutBatchStatistics() if exact else nullcontext(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                for module in model.modules():
                    if isinstance(module, _NormBase):
                        module.eval()
                output = _run(model, call, samples, slice(0, count), device)
        except Exception:  # any error of the model on so few samples
            return False
        outputs = [t for t in tensors_of(output) if t.is_floating_point()]
        return all(bool(t.isfinite().all()) for t in outputs)

    if runs(1):
        return 1
    return next((count for count in range(2, samples + 1) if runs(count)), 1)


class Scored(nn.Module):
    """A model with its loss: called with inputs and labels."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model, self._loss_fn = model, loss_fn

    def forward(self, inputs: Any, labels: Any) -> Tensor:
        """The loss."""
        args, options = arguments(inputs)
        loss: Tensor = self._loss_fn(self.model(*args, **options), labels)
        return loss


def keeps_rows(model: nn.Module, call: Call) -> bool:
    """Whether the model keeps state with one row per sample between calls, such as a recurrent state."""
    (call, samples), device = _of_several(call, 2), device_of(model)
    one, all_ = slice(0, 1), slice(0, samples)

    def fails(*runs: slice) -> bool:
        try:
            with preserved(model), torch.no_grad():
                for rows in runs:
                    _run(model, call, samples, rows, device)
        except Exception:  # whatever a model's own code raises
            return True
        return False

    return (fails(all_, one) or fails(one, all_)) and not fails(one)


def returns_numbers(model: nn.Module, call: Call) -> bool:
    """Whether there is a Python number in the model's output, which a trace would keep as it was."""
    samples, device = samples_of(call), device_of(model)
    try:
        with preserved(model), torch.no_grad():
            return numbers_in(_run(model, call, samples, slice(0, samples), device))
    except Exception:  # whatever a model's own code raises
        return False


def normalises_parts(model: nn.Module, call: Call | None) -> str:
    """The name of a BatchNorm that a forward in training calls several times, each time with some of the samples; empty
    if there is none."""
    if call is None:
        return ""
    rows: dict[str, list[int]] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, n=name: rows.setdefault(n, []).append(len(args[0])))  # type: ignore[misc]
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
    ]
    try:
        call, samples = _of_several(call, 2 * _FEWEST)
        with preserved(model), mode(model, True), torch.no_grad():
            _run(model, call, samples, slice(0, samples), device_of(model))
    except Exception:  # any error of the model on another batch size
        rows.clear()
    finally:
        for handle in handles:
            handle.remove()
    return next((n for n, each in rows.items() if len(each) > 1 and max(each) < samples), "")


def changes_inputs(model: nn.Module, call: Call | None) -> bool:
    """Whether a forward writes into the tensors that it is called with."""
    if call is None:
        return False
    inputs = [t.to(device_of(model), copy=True) for t in tensors_of((call.args, call.options))]
    given = iter(inputs)
    args, options = pytree.tree_map(
        lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, (call.args, call.options)
    )
    before = [t._version for t in inputs]
    try:
        with preserved(model), torch.no_grad():
            model(*args, **options)
    except Exception:  # whatever a model's own code raises
        return False
    return [t._version for t in inputs] != before


def warning_of(change: float, plan: Plan) -> list[str]:
    """Warnings about a model with the result ``change`` of :func:`coupled`, under ``plan``."""
    if change == KEEPS and plan.num_microbatches > 1:
        return [
            f"the model keeps something from call to call, and its output moves by that: {plan.num_microbatches} times "
            "a step here, once on one device"
        ]
    shared = max(layout.data for layout in plan.layouts()) * plan.num_microbatches > 1
    if change == FOLLOWS and shared:
        return [
            "the model keeps something from call to call, and its output moves by the samples that it had before: on "
            "each rank by its own; keep it in a buffer that is changed in the loop by numbers of all ranks, "
            "asa.reduce(x), or plan with strategies=('tensor',)"
        ]
    if change <= 0 or not shared:
        return []
    return [
        "the model computes a sample's output, or its gradient, from other samples of the batch, too "
        f"({percent(change)} apart when a batch is halved): a rank has its own samples, and gets other numbers than "
        "one device; have outputs depend on one sample each, take BatchNorm with batch_norm='exact', or plan with "
        "strategies=('tensor',)"
    ]


def _change(model: nn.Module, call: Call, samples: int) -> float | None:
    """Change of outputs as in :func:`coupled`; None if the model draws random numbers."""
    half = samples // 2
    if not half:
        return 0.0
    device = device_of(model)
    torch.manual_seed(0)
    before = generators_now()
    full, first, second, repeated = (
        pytree.tree_leaves(_run(model, call, samples, slice(*ends), device))
        for ends in ((0, samples), (0, half), (half, samples), (0, samples))
    )
    if generators_now() != before:
        return None
    if any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in zip(full, repeated, strict=True)):
        return FOLLOWS if _follows(model, call, samples, device) else KEEPS
    worst = 0.0
    for all_, a, b in zip(full, first, second, strict=True):
        if not isinstance(all_, Tensor) or not all_.is_floating_point() or not all_.dim():
            continue
        if len(all_) % samples or a.shape[1:] != all_.shape[1:] or len(a) + len(b) != len(all_):
            continue
        views = len(all_) // samples  # of each sample, view by view (x.repeat(2, 1)) or side by side
        ways = [torch.cat([a, b])]
        if views > 1 and len(a) == views * half:
            ways.append(torch.cat([t.reshape(views, -1, *t.shape[1:]) for t in (a, b)], 1).reshape(all_.shape))
        size = all_.double().norm().clamp(min=1e-12)
        off = min(float((way - all_).double().norm() / size) for way in ways)
        worst = max(worst, off if off > _TOLERANCES.get(all_.dtype, 0.1) else 0.0)
    worst = max(worst, _scalar_change(model, call, samples, device))
    return worst or _gradient_change(model, call, samples, device)


def _follows(model: nn.Module, call: Call, samples: int, device: torch.device) -> bool:
    """Whether the model's output depends on which samples it was called with before, and not only how often."""
    half = samples // 2

    def after(rows: slice) -> list[Any]:
        with preserved(model):
            _run(model, call, samples, rows, device)
            return pytree.tree_leaves(_run(model, call, samples, slice(0, samples), device))

    one, other = after(slice(0, half)), after(slice(half, samples))
    return any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _scalar_change(model: nn.Module, call: Call, samples: int, device: torch.device) -> float:
    """Relative distance of the model's scalars with gradients (a loss that it returns or stores in an attribute) from
    the means of those of two halves. Cross-entropies are excluded, because their denominators are summed over ranks."""
    half = samples // 2
    with torch.enable_grad():
        full, first, second = (
            _numbers(model, _run(model, call, samples, slice(*ends), device))
            for ends in ((0, samples), (0, half), (half, samples))
        )
    worst = 0.0
    for name, all_ in full.items():
        a, b = first.get(name), second.get(name)
        if a is None or b is None or search_graph([all_]).terms:
            continue
        mean = (float(a.detach()) * half + float(b.detach()) * (samples - half)) / samples
        size = max(abs(float(all_.detach())), abs(mean), 1e-12)
        off = abs(float(all_.detach()) - mean) / size
        worst = max(worst, off if not off <= _LOOSER * _TOLERANCES.get(all_.dtype, 0.1) else 0.0)
    return worst


def _numbers(model: nn.Module, output: Any) -> dict[str, Tensor]:
    """Single numbers with gradients in ``output`` and in attributes of modules."""
    candidates = {str(i): t for i, t in enumerate(pytree.tree_leaves(output))}
    candidates |= {f"{path}.{k}": t for path, m in model.named_modules() for k, t in vars(m).items()}
    return {k: t for k, t in candidates.items() if isinstance(t, Tensor) and not t.dim() and t.grad_fn is not None}


def _of_several(call: Call, least: int) -> tuple[Call, int]:
    """The call and its number of samples; each is repeated once if there are fewer than ``least``."""
    samples = samples_of(call)
    if samples >= least:
        return call, samples

    def twice(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.repeat_interleave(2, 0) if value.shape[:1] == (samples,) else value
        if isinstance(value, list) and len(value) == samples:
            return [one for one in value for _ in range(2)]
        return tuple(map(twice, value)) if type(value) is tuple else value

    options = {name: twice(value) for name, value in call.options.items()}
    return Call(tuple(map(twice, call.args)), options), 2 * samples


def _gradient_change(model: nn.Module, call: Call, samples: int, device: torch.device) -> float:
    parameters, remaining = [], _ELEMENTS
    for p in sorted((p for p in model.parameters() if p.requires_grad), key=Tensor.numel):
        if (remaining := remaining - p.numel()) > 0:
            parameters.append(p)
    half = samples // 2

    def gradients(rows: slice, scale: float) -> list[Tensor]:
        with torch.enable_grad():
            out = pytree.tree_leaves(_run(model, call, samples, rows, device))
            indices = range(*rows.indices(samples))
            total = sum(
                (scale * t * _slopes(samples, t)[indices[0] : indices[-1] + 1]).sum()
                for t in out
                if isinstance(t, Tensor) and t.requires_grad and t.shape[:1] == (len(indices),)
            )
        if not isinstance(total, Tensor):
            return []
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters, grads, strict=True)]

    try:
        full, first, second = (
            gradients(slice(*ends), scale)
            for ends, scale in (((0, samples), 1.0), ((0, half), _SCALE), ((half, samples), _SCALE))
        )
    except Exception:  # whatever a model's own code raises in backward
        return 0.0
    off = sum(
        float(((a + b) / _SCALE - w).double().square().sum()) for w, a, b in zip(full, first, second, strict=True)
    )
    size = sum(float(w.double().square().sum()) for w in full)
    change = (off / size) ** 0.5 if size else 0.0
    kind = next((w.dtype for w in full), torch.float32)
    return change if change > min(_LOOSER * _TOLERANCES.get(kind, 0.1), 0.3) else 0.0


def _slopes(samples: int, like: Tensor) -> Tensor:
    """Gradients for outputs of ``samples`` samples, different for every element."""
    shape = (samples, *like.shape[1:])
    count = like[:1].numel() * samples
    return (1.5 + torch.arange(count, device=like.device, dtype=torch.float64).sin()).reshape(shape).to(like.dtype)


def _run(model: nn.Module, call: Call, samples: int, rows: slice, device: torch.device) -> Any:
    def selected(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value[rows] if value.shape[:1] == (samples,) else value).to(device, copy=True)
        if isinstance(value, list) and len(value) == samples:
            return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value[rows])
        if type(value) is tuple:
            return tuple(selected(one) for one in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise UsageError(f"a {type(value).__name__} cannot be halved")

    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        options = {name: selected(value) for name, value in call.options.items()}
        return understood(model(*map(selected, call.args), **options))
    finally:  # buffers changed by forward must not affect the next run
        for buffer, value in buffers:
            buffer.copy_(value)
