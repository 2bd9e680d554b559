"""Notices when a program replaces a parameter or a module of a distributed model, which its ranks would not see."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from asa.api.patching import replace_once
from asa.api.steps.distributed_model_base import DistributedModelBase
from asa.errors import UsageError

_OWN = ("asa.", "torch.distributed", "torch.func", "torch._functorch", "torch.nn.utils.stateless", "torch._dynamo")
"""Packages that exchange parameters on purpose."""
PARTS = "asa_parts"
"""Name of the attribute by which a module that was put together for the program's eyes has what it was made of."""
_OF_DICTS = ["clear", "__delitem__"]
_models: WeakSet[DistributedModelBase] = WeakSet()
_hooked: list[bool] = []
REPLACED = (
    "was replaced or tied behind asa.parallelize, and what runs on the ranks was made before: do it before the call"
)


def watch_registrations(model: DistributedModelBase) -> None:
    """Refuse from now on to replace parameters and modules of ``model``."""
    if not _hooked:
        _hooked.append(True)
        torch_modules.register_module_parameter_registration_hook(_parameter_set)
        torch_modules.register_module_module_registration_hook(_module_set)
        for owner in (WeightNorm, SpectralNorm, BasePruningMethod):
            replace_once(owner, "remove", _refused_for_distributed)
        replace_once(parametrize, "remove_parametrizations", _refused_for_distributed)
        for kind, names in ((nn.ModuleList, ["insert"]), (nn.Sequential, ["insert"]), (nn.ModuleDict, _OF_DICTS)):
            for name in names:
                replace_once(kind, name, _without_registration)
    _models.add(model)


def watched_models() -> list[DistributedModelBase]:
    """Distributed models that exist."""
    return list(_models)


def _parameter_set(module: nn.Module, name: str, value: Any) -> None:
    before = module._parameters.get(name)
    if before is not None and before is not value and _is_distributed(module):
        raise UsageError(f"the parameter {name} of a {type(module).__name__} {REPLACED}")


def _module_set(module: nn.Module, name: str, value: Any) -> None:
    before = module._modules.get(name)
    grows = before is None and isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    if (grows or before is not None) and before is not value and _is_distributed(module):
        raise UsageError(f"the module {name} of a {type(module).__name__} {REPLACED}")


def _without_registration(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, a method of a container that changes its layers without a registration."""

    @wraps(original)
    def checked(container: nn.Module, *args: Any, **options: Any) -> Any:
        if _is_distributed(container):
            raise UsageError(f"a module of a {type(container).__name__} {REPLACED}")
        return original(container, *args, **options)

    return checked


def _refused_for_distributed(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, which makes a computed weight a plain one, for modules that ranks do not share."""

    @wraps(original)
    def checked(*args: Any, **options: Any) -> Any:
        module = next((a for a in (*args, *options.values()) if isinstance(a, nn.Module)), None)
        if module is not None and _is_distributed(module):
            raise UsageError(
                f"what computes a weight of a {type(module).__name__} (a norm, a parametrization, a mask) was removed "
                "behind asa.parallelize, and the plan was made with it: remove it from copy.deepcopy(model), which is "
                "a plain model"
            )
        return original(*args, **options)

    return checked


def _is_distributed(module: nn.Module) -> bool:
    """Whether ranks share ``module``, and a program sets something of it."""
    ids = {id(module), id(module._parameters)}  # a view of a module has another identity
    joined = PARTS in vars(module)
    if not joined and not any(ids & model.__dict__.get("module_ids", set()) for model in _models):
        return False
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("torch.nn.") or name.startswith(_OWN):
            break
        frame = frame.f_back
    return frame is not None and not name.startswith(_OWN)
