"""Local parts of parameters (DTensors and split ones), and optimizer steps that use only these."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from asa.errors import UsageError
from asa.sharding.split import TensorPart, held_of

_OPTIMIZERS = inspect.getfile(Optimizer)
"""The file of what torch runs an optimizer's step in."""


def local(tensor: Tensor) -> Tensor:
    """This rank's local part of ``tensor``."""
    tensor = held_of(tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_memory(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory for optimizer state of this rank's part of ``parameter``. It has the strides that the optimizer would
    give it: fused kernels match elements of state and parameter by their position in memory."""
    return torch.empty_like(local(parameter.detach()), dtype=dtype, device=device)


def as_held(parameter: Tensor, value: Tensor) -> Tensor:
    """``value`` in the form and on the device of ``parameter``; ``value`` is state of this rank's part of it."""
    if isinstance(parameter, TensorPart):
        return TensorPart(as_held(parameter.held, value), parameter.parted)
    value = value.to(local(parameter).device)
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


_entered: list[_Parts] = []
"""The optimizer's step over parts that runs now; the last one if that ended with an exception."""


def stepping() -> Optimizer | None:
    """The optimizer whose own step runs now over this rank's parts; None if none does."""
    frame = sys._getframe() if _entered else None
    while frame is not None and frame.f_code.co_filename != _OPTIMIZERS:
        frame = frame.f_back
    return None if frame is None else _entered[0].optimizer


class _Parts:
    """Local parts of the parameters of ``optimizer``.

    Between ``enter`` and ``leave``, the optimizer's groups contain only the local parts that it updates. ``elsewhere``
    are the identities of parameters that another rank updates. The parts are looked up anew each time, because
    ``fully_shard`` may move a parameter between steps.
    """

    def __init__(self, optimizer: Optimizer, elsewhere: frozenset[int]) -> None:
        self.optimizer, self._elsewhere = optimizer, elsewhere
        self._outside: tuple[defaultdict[Tensor, Any], list[list[Tensor]], list[tuple[Tensor, Tensor]]] | None = None

    @torch.no_grad()
    def enter(self) -> None:
        groups, outer = self.optimizer.param_groups, self.optimizer.state
        inner: defaultdict[Tensor, Any] = defaultdict(dict)
        pairs: list[tuple[Tensor, Tensor]] = []
        self._outside = outer, [group["params"] for group in groups], pairs
        for group in groups:
            parts = []
            for p in group["params"]:
                held = held_of(p)
                if id(held) in self._elsewhere:
                    continue
                part = local(held)
                parts.append(part)
                pairs.append((p, part))
                if part is not held:
                    part.grad = None if held.grad is None else local(held.grad)
                if p in outer:
                    state = outer[p]
                    inner[part] = state if part is p else {k: local(v) if _tensor(v) else v for k, v in state.items()}
            group["params"] = parts
        self.optimizer.state = inner
        _entered[:] = [self]

    @torch.no_grad()
    def leave(self) -> None:
        if self._outside is None:
            return
        _entered.clear()
        inner = self.optimizer.state
        outer, lists, pairs = self._outside
        for p, part in pairs:
            if part is not held_of(p):
                part.grad = None
            if part in inner:
                outer[p] = _outwards(p, part, outer.get(p, {}), inner[part])
        for group, parameters in zip(self.optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
        self.optimizer.state, self._outside = outer, None

    def before(self, _optimizer: Optimizer, args: Any, options: dict[str, Any]) -> Any:
        """Enter before a step; a closure, which computes gradients, runs outside."""
        self.leave()  # in case the last step ended with an exception
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
        """Leave after a step."""
        self.leave()


class _OfAnotherRank(dict[str, Any]):
    """The entry of ``optimizer.state`` for a parameter that another rank updates; reading it raises an error."""

    def __missing__(self, key: str) -> Any:
        raise UsageError(
            f"optimizer.state has {key!r} of a parameter only on the rank that updates it, and another rank updates "
            "this one: take optimizer.state_dict() on every rank, or parameters for which p in optimizer.state, or "
            "plan with strategies=('ddp',)"
        )


class _States(defaultdict[Tensor, Any]):
    """State of an optimizer, some of whose parameters are updated ``elsewhere`` (identities of what is held)."""

    def __init__(self, elsewhere: frozenset[int], states: dict[Tensor, Any]) -> None:
        super().__init__(dict, states)
        self._elsewhere = elsewhere

    def __missing__(self, key: Tensor) -> Any:
        return _OfAnotherRank() if id(held_of(key)) in self._elsewhere else super().__missing__(key)

    def __reduce__(self) -> Any:  # a copy or a file has what this rank has
        return defaultdict, (dict,), None, None, iter(self.items())


def _tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _outwards(p: Tensor, part: Tensor, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """State of ``p`` with the values of ``now``, the state of ``part``. Entries whose tensor is unchanged keep their
    object from ``before``."""
    if part is p:
        return now
    state = {}
    for key, value in now.items():
        earlier = before.get(key)
        if isinstance(earlier, Tensor) and local(earlier) is value:
            value = earlier
        elif isinstance(value, Tensor) and value.shape == part.shape:
            value = as_held(p, value)
        state[key] = value
    return state


def step_over_parts(optimizer: Optimizer, elsewhere: Iterable[Tensor] = ()) -> Callable[[], None]:
    """Make ``optimizer``, which must update element by element, run on this rank's parts as plain tensors. Returns a
    function that undoes this.

    Torch has no fused SGD for DTensors, and refuses loops over a mixture of sharded and other tensors. Outside of
    steps, the optimizer's groups contain the sharded and split parameters (and those that are updated ``elsewhere``),
    and its state is sharded like them. All other hooks around a step see this form, too, also those that are added
    later.
    """
    others = frozenset(map(id, elsewhere))
    parts = _Parts(optimizer, others)
    enters, leaves = optimizer.register_step_pre_hook(parts.before), optimizer.register_step_post_hook(parts.after)
    before: Any = optimizer._optimizer_step_pre_hooks
    behind: Any = optimizer._optimizer_step_post_hooks
    original = optimizer.register_step_pre_hook
    behind.move_to_end(leaves.id, last=False)

    def register(hook: Any) -> RemovableHandle:
        handle = original(hook)
        before.move_to_end(enters.id)
        return handle

    optimizer.register_step_pre_hook = register  # type: ignore[method-assign]

    def follow(_optimizer: Optimizer) -> None:
        if others:
            optimizer.state = _States(others, optimizer.state)

    follow(optimizer)
    loads = optimizer.register_load_state_dict_post_hook(follow)

    def undo() -> None:
        parts.leave()
        optimizer.state = defaultdict(dict, optimizer.state)
        loads.remove()
        optimizer.__dict__.pop("register_step_pre_hook", None)
        enters.remove()
        leaves.remove()

    return undo
