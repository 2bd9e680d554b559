"""Notices when a program replaces a parameter or a module of a distributed model, which its ranks would not see."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.modules import module as torch_modules

from asa.api.steps.distributed_model_base import DistributedModelBase
from asa.errors import UsageError

_OWN = ("asa.", "torch.distributed", "torch.func", "torch._functorch", "torch.nn.utils.stateless", "torch._dynamo")
"""Packages that exchange parameters on purpose."""
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


def _is_distributed(module: nn.Module) -> bool:
    """Whether ranks share ``module``, and a program sets something of it."""
    if not any(id(module) in model.__dict__.get("module_ids", ()) for model in _models):
        return False
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("torch.nn.") or name.startswith(_OWN):
            break
        frame = frame.f_back
    return frame is not None and not name.startswith(_OWN)
