"""Detection of stochastic depth in any module, by what it does to test inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = ("drop", "depth")
_SAMPLES, _SEED = 4096, 20_160_330
_SHAPES = ((2, 3), (2, 2, 2))
"""Shapes of a test sample: tokens, and a map."""
_SIGMAS = 5


def drops_samples(module: nn.Module) -> tuple[float, bool] | None:
    """(p, scaled): probability with which ``module`` drops whole samples, each independently, and whether it scales up
    the rest. None for a module that does anything else.

    This is stochastic depth (Huang et al. 2016, "Deep networks with stochastic depth"; ``DropPath`` of timm and of many
    other repositories). Only modules with a fitting class name are tested. A module is refused if it has parameters,
    children or hooks, changes a batch in evaluation, or drops with a probability that is none of its attributes.
    """
    if not any(part in type(module).__name__.lower() for part in _NAMES) or not _is_bare(module):
        return None
    for shape in _SHAPES:
        with contextlib.suppress(Exception):  # foreign code may fail on inputs of these shapes
            return _measured(module, torch.ones(_SAMPLES, *shape))
    return None


def _is_bare(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    members = (module.children(), module.parameters(), module.buffers())
    return not any(hooks) and all(next(iter(x), None) is None for x in members)


def _measured(module: nn.Module, ones: Tensor) -> tuple[float, bool] | None:
    other = torch.linspace(-1, 1, ones.numel()).view_as(ones)
    factors, changed, untouched = _run(module, ones), _run(module, other), _run(module, other, training=False)
    if not (factors.shape == ones.shape and torch.equal(untouched, other)):
        return None
    of_sample = factors.flatten(1)[:, 0]
    alike = torch.equal(factors, of_sample.view(-1, *(1,) * (ones.dim() - 1)).expand_as(ones))
    if not alike or not torch.allclose(changed, other * factors):
        return None
    scale = float(of_sample.max())
    dropped = float((of_sample == 0).double().mean())
    if scale <= 0 or not bool(((of_sample == 0) | (of_sample == scale)).all()):
        return None
    for p in _rates(module):
        likely = abs(dropped - p) <= _SIGMAS * math.sqrt(p * (1 - p) / _SAMPLES)
        for scaled, factor in ((True, 1 / (1 - p)), (False, 1.0)):
            if likely and math.isclose(scale, factor, rel_tol=1e-5):
                return p, scaled
    return None


def _rates(module: nn.Module) -> Iterator[float]:
    attributes: dict[str, Any] = vars(module)
    for value in attributes.values():
        if isinstance(value, float) and 0 < value < 1:
            yield from (value, 1 - value)  # some modules store the probability of keeping a sample


def _run(module: nn.Module, batch: Tensor, *, training: bool = True) -> Tensor:
    was = module.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        try:
            module.train(training)
            output: Tensor = module(batch.clone())
        finally:
            module.train(was)
    return output
