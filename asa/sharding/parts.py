"""What a rank holds of sharded parameters (DTensors), and optimizer steps that see nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_held(parameter: Tensor, value: Tensor) -> Tensor:
    """``value``, state of this rank's part of ``parameter``, in the form in which and where ``parameter`` is held."""
    value = value.to(local(parameter).device)
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


class _Parts:
    """Of the parameters of ``optimizer``, which knows sharded ones by its rank's parts between ``enter`` and ``leave``.

    Parts are looked up anew each time: ``fully_shard`` may put a parameter elsewhere between steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._outside: tuple[defaultdict[Tensor, Any], list[list[Tensor]]] | None = None

    @torch.no_grad()
    def enter(self) -> None:
        groups, outer = self._optimizer.param_groups, self._optimizer.state
        inner: defaultdict[Tensor, Any] = defaultdict(dict)
        self._outside = outer, [group["params"] for group in groups]
        for group in groups:
            parts = []
            for p in group["params"]:
                part = local(p)
                parts.append(part)
                if part is not p:
                    part.grad = None if p.grad is None else local(p.grad)
                if p in outer:
                    inner[part] = {key: local(v) if isinstance(v, Tensor) else v for key, v in outer[p].items()}
            group["params"] = parts
        self._optimizer.state = inner

    @torch.no_grad()
    def leave(self) -> None:
        if self._outside is None:
            return
        groups, inner = self._optimizer.param_groups, self._optimizer.state
        outer, lists = self._outside
        for group, parameters in zip(groups, lists, strict=True):
            for p, part in zip(parameters, group["params"], strict=True):
                if part is not p:
                    part.grad = None
                if part in inner:
                    outer[p] = _outwards(p, part, outer.get(p, {}), inner[part])
            group["params"] = parameters
        self._optimizer.state, self._outside = outer, None

    def before(self, _optimizer: Optimizer, args: Any, options: dict[str, Any]) -> Any:
        """In front of a step; a closure, which computes gradients, runs as if outside."""
        self.leave()  # where a step ended with an exception
        self.enter()
        closure = args[1] if len(args) > 1 else options.get("closure")
        if closure is None:
            return None

        def outside() -> Any:
            self.leave()
            try:
                return closure()
            finally:
                self.enter()

        return (args[0], outside), {key: value for key, value in options.items() if key != "closure"}

    def after(self, *_: Any) -> None:
        """Behind a step."""
        self.leave()


def _outwards(p: Tensor, part: Tensor, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """State of ``part`` as that of ``p``; what lies where it lay ``before`` stays the tensor it was."""
    if part is p:
        return now
    found = {}
    for key, value in now.items():
        known = before.get(key)
        if isinstance(known, Tensor) and local(known) is value:
            value = known
        elif isinstance(value, Tensor) and value.shape == part.shape:
            value = as_held(p, value)
        found[key] = value
    return found


def step_over_parts(optimizer: Optimizer) -> Callable[[], None]:
    """Have ``optimizer``, which updates element by element, do so on this rank's parts, as plain tensors: torch has no
    fused SGD for DTensors, and refuses loops over many tensors of which some are sharded and some are not.

    Outside of steps its groups hold the sharded parameters, and its state is sharded like them. Returns what takes that
    back.
    """
    parts = _Parts(optimizer)
    handles = [optimizer.register_step_pre_hook(parts.before), optimizer.register_step_post_hook(parts.after)]

    def undo() -> None:
        parts.leave()
        for handle in handles:
            handle.remove()

    return undo
