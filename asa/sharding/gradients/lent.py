"""Sharded parameters that several components use: the first holds the shards, and the others see what it gathers.

The others run behind it in forward, and before it in backward. Its weights stay gathered in between
(:func:`asa.sharding.gradients.sharded.gathered_once`). Its gradient is scattered when its own backward is over, and
contains those of all by then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asa.sharding.gradients.sharded import held_in


def lend(component: nn.Module) -> None:
    """Let ``component`` see the parameters that another component holds in shards, as that one sees them."""
    units: dict[FSDPModule, None] = {}
    for attributes in map(vars, component.modules()):
        for name, value in list(attributes.items()):
            held = held_in(value) if isinstance(value, nn.Parameter) else None
            if held is not None:
                unit, owner = held
                owner._setattr_on_modules = partial(_set_both, owner._setattr_on_modules, attributes, name)
                owner._setattr_on_modules(owner.sharded_param)
                units[unit] = None
    if units:
        component.register_forward_hook(partial(_before_backward, tuple(units)))


def _set_both(
    original: Callable[[nn.Parameter], None], attributes: dict[str, Any], name: str, p: nn.Parameter
) -> None:  # fmt: skip
    original(p)
    attributes[name] = p


def _before_backward(units: tuple[FSDPModule, ...], _module: nn.Module, _inputs: Any, outputs: tuple[Any, ...]) -> None:
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(_gathered, units))


def _gathered(units: tuple[FSDPModule, ...], _gradient: Tensor) -> None:
    """Gather the weights of ``units``, if an earlier backward has freed them, and scatter their gradients at the end of
    this backward, even if it does not reach the units themselves."""
    for unit in units:
        unit._get_fsdp_state()._register_root_post_backward_final_callback()
        unit.unshard()
