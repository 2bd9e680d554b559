"""The user's optimizer over the parameters a rank holds: the same object, groups and hyperparameters as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from asa.api.optimizer_states import plain_states
from asa.api.scaling import understood_by_scalers
from asa.errors import UsageError
from asa.executor.parallel import ParallelModel
from asa.executor.state import held, load_full_optimizer_state, stored
from asa.ir.plan import OptimizerName
from asa.sharding.parts import step_over_parts

_ELEMENTWISE = {
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop",
}  # fmt: skip
"""Of ``torch.optim``: those that update element by element, so that shards add up to wholes."""


def elementwise(optimizer: Optimizer) -> bool:
    """Whether a shard of a parameter is updated as the same part of the whole would be."""
    kind = type(optimizer)
    return kind.__name__ in _ELEMENTWISE and kind.__module__.startswith("torch.optim")


def planned_as(optimizer: Optimizer) -> OptimizerName:
    """What the planner takes it for: its state is one word a parameter, or two."""
    return "sgd" if type(optimizer).__name__ in ("SGD", "Adagrad", "RMSprop") else "adamw"


def check_shared(optimizer: Optimizer) -> None:
    """Refuse an optimizer that does not take the same steps on every rank.

    Raises:
        UsageError: it decides by a loss, of which each rank has its own.
    """
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            "LBFGS decides by the loss how often it is evaluated, and every rank has a loss of its own: "
            "choose an optimizer whose step needs no closure, or train on one device"
        )


class Rebinding:
    """An optimizer between the model it was made for and the one that is placed.

    Made before the model is split (its parameters are known by name then), applied after.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        named: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            named.setdefault(id(p), []).append(name)
        self.optimizer = optimizer
        self._undo: list[Callable[[], None]] = []
        self._names: list[list[tuple[str, ...]]] = []
        self._group: dict[str, int] = {}
        self._state: dict[str, Tensor] = {}
        for index, group in enumerate(optimizer.param_groups):
            self._names.append([tuple(named.get(id(p), ())) for p in group["params"]])
            for p in group["params"]:
                if id(p) not in named:
                    raise UsageError(
                        "the optimizer holds a parameter that is not the model's; make it of model.parameters()"
                    )
                for name in named[id(p)]:
                    self._group[name] = index
                    for key, value in optimizer.state.get(p, {}).items():
                        what, tensor = stored(key, value)
                        self._state[f"{name}/{what}"] = tensor.detach().cpu().clone()

    def apply(self, model: ParallelModel) -> Optimizer:
        """Have the optimizer update what this rank is to update of ``model``; its state so far goes along."""
        optimizer, updated = self.optimizer, {id(p) for p in model.updated}
        while self._undo:
            self._undo.pop()()
        found: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for item in held(model):
            if isinstance(item.tensor, nn.Parameter) and id(item.tensor) in updated and item.name in self._group:
                found[self._group[item.name]].append(item.tensor)
        for group, parameters in zip(optimizer.param_groups, found, strict=True):
            group["params"] = parameters
        optimizer.state.clear()
        if self._state:
            known = {item.name for item in held(model)} | model.elsewhere
            state = {key: value for key, value in self._state.items() if key.rsplit("/", 1)[0] in known}
            load_full_optimizer_state(model, optimizer, state)
            self._state = {}  # from now on whoever moves the optimizer on moves its state
        self._undo.append(plain_states(optimizer, model, self._names))
        if any(isinstance(p, DTensor) for group in found for p in group):
            self._undo.append(step_over_parts(optimizer))
        others = [i.tensor for i in held(model) if i.name in self._group and id(i.tensor) not in updated]
        trained = [p for p in others if isinstance(p, nn.Parameter)]
        if model.owner:
            self._undo.append(_share_updates(optimizer, model, trained))
        understood_by_scalers(optimizer, model, trained)
        return optimizer


def _share_updates(optimizer: Optimizer, model: ParallelModel, others: list[nn.Parameter]) -> Callable[[], None]:
    """After a step what other ranks updated (``others``) arrives here; gradients of those parameters are forgotten with
    the rest. Returns what takes that back."""
    honest = optimizer.zero_grad

    def forget() -> None:
        for p in others:
            p.grad = None

    def zero_grad(set_to_none: bool = True) -> None:
        honest(set_to_none)
        forget()

    def stepped(_optimizer: Optimizer, _args: Any, _options: Any) -> None:
        model.share_updates()

    def undo() -> None:
        optimizer.__dict__.pop("zero_grad", None)
        handle.remove()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    handle = optimizer.register_step_post_hook(stepped)
    return undo
