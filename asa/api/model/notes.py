"""Notes on what differs from one device under a plan, one sentence each, printed once before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from asa.errors import UsageError
from asa.executor.model.parallel import ParallelModel
from asa.executor.training.optimizer import cut_parameters
from asa.ir.plan import Plan
from asa.sharding.randomness.samples import BySample
from asa.tracing.whole import WholeModel


def trained_norms(model: nn.Module) -> list[str]:
    """Names of BatchNorm modules that normalize with batch statistics; those in evaluation mode are excluded."""
    evaluating = not model.training
    return [n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and (m.training or evaluating)]


def check_exact(plan: Plan, norms: Sequence[str]) -> None:
    """Check that BatchNorm sees all samples of a batch under the plan, if it must.

    Raises:
        UsageError: the plan has microbatches.
    """
    if norms and plan.num_microbatches > 1:
        raise UsageError(
            f"batch_norm='exact' has {norms[0]} normalise over a batch of {plan.global_batch} samples, and the plan "
            f"computes {plan.num_microbatches} microbatches one after another; plan without microbatches, or take "
            "batch_norm='local'"
        )


def differences(
    plan: Plan, model: ParallelModel, norms: Sequence[str], writes: Sequence[str],
    batch_norm: Literal["local", "exact"], *, by_samples: bool = True,
) -> list[str]:  # fmt: skip
    """Sentences on what ``model`` computes otherwise under ``plan`` than on one device: in ``norms``
    (:func:`trained_norms`), in other buffers that forward changed, in embeddings with ``max_norm``, and by ``writes``,
    the parameters that forward changes (``by_samples``: by its inputs).

    Raises:
        UsageError: forward cannot change ``writes``, because ranks hold shards of one, or components run, which were
            traced and change nothing.
    """
    _check_written(model, writes)
    notes = of_changed_buffers(plan, norms, model.changed, batch_norm)
    if max(layout.data for layout in plan.layouts()) == 1:  # ranks read the same rows
        return notes
    shortened = [n for c in model.components for n, m in c.named_modules() if getattr(m, "max_norm", None) is not None]
    if shortened:
        notes.append(
            f"{_several(shortened)} shortens rows of its weight in forward (max_norm), on each rank those of its "
            "samples, and not where ranks hold shards: weights differ from one device's; leave max_norm out, and "
            "shorten the parameter in the loop behind each update"
        )
    counted = [n for c in model.components for n, m in c.named_modules() if getattr(m, "scale_grad_by_freq", False)]
    if counted:
        notes.append(
            f"{_several(counted)} divides gradients by the count of a word (scale_grad_by_freq), on each rank among "
            "its samples: weights differ from one device's; leave scale_grad_by_freq out"
        )
    if writes and by_samples:
        notes.append(
            f"forward changes {_several(writes)}, which are parameters: on each rank by the samples it computes; make "
            "them buffers, or change them in the loop by numbers of all ranks (asa.reduce)"
        )
    return notes


def of_changed_buffers(
    plan: Plan, norms: Sequence[str], changed: Mapping[str, torch.dtype], batch_norm: Literal["local", "exact"]
) -> list[str]:
    """Sentences on ``norms`` and on the buffers that forward ``changed``, with their types."""
    notes = []
    ranks, parts = max(layout.data for layout in plan.layouts()), plan.num_microbatches
    share = max(1, plan.global_batch // (ranks * parts))
    if norms and batch_norm == "local" and ranks * parts > 1:
        notes.append(
            f"BatchNorm ({_several(norms)}) normalises over the {share} samples that a rank computes at once, not over "
            f"the {plan.global_batch} of a batch" + ("; batch_norm='exact' does that" if parts == 1 else "")
        )
    if changed and parts > 1:
        notes.append(f"forward changes {_several([*changed])}: {parts} times a step, once for each microbatch")
    averaged = [n for n, dtype in changed.items() if dtype.is_floating_point]
    own = [n for n in changed if n not in averaged]
    ends = "averaged when the loader is through", "not averaged, which floating-point numbers alone are"
    for names, end in zip((averaged, own), ends, strict=True):
        if names and ranks > 1:
            notes.append(f"forward changes {_several(names)}: on each rank by the samples it computes, and {end}")
    return notes


def _check_written(model: ParallelModel, names: Sequence[str]) -> None:
    if name := next((n for n in cut_parameters(model) if n in names), None):
        raise UsageError(
            f"forward changes {name}, of which ranks hold shards under this plan: make it a buffer, or plan with "
            "strategies=('ddp',)"
        )
    if names and not model.called and not any(isinstance(component, WholeModel) for component in model.components):
        raise UsageError(
            f"forward changes {names[0]}, and components of a model that is cut change no parameters: leave out plan= "
            "to have the model run whole, or change it in the loop"
        )


def drawing(model: ParallelModel) -> str:
    """Names of the modules that draw random numbers in training; empty if there are none."""
    modules = [
        path
        for component in model.components
        for path, m in component.named_modules()
        if isinstance(m, BySample) and getattr(m, "p", 1) > 0
    ]
    names = list(dict.fromkeys((*modules, *model.drawing)))
    return _several(names) if names else ""


def drawing_by_share(model: ParallelModel) -> str:
    """A line on modules that draw from a generator of their own as often as this rank has samples; empty if none does,
    or a rank has all samples."""
    if not model.draws_by_share or max(layout.data for layout in model.layouts) == 1:
        return ""
    return (
        f"{_several(model.draws_by_share)} draws random numbers from a generator of Python's or numpy's that it keeps, "
        "for the samples of its rank: one device draws others; with a torch.Generator ranks draw those of one device"
    )


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
