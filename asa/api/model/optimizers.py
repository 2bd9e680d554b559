"""The user's optimizer over the parameters a rank holds: the same object, with the same groups and hyperparameters."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from asa.api.messages import say
from asa.api.model.optimizer_states import load_states, plain_states
from asa.api.rank_context import RankContext
from asa.api.tensors.scaling import understood_by_scalers
from asa.api.tensors.views import TensorViews
from asa.errors import UsageError
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.parameter_hooks import hooked
from asa.executor.model.parameter_memory import in_one_memory
from asa.executor.model.state import local_tensors, stored
from asa.executor.training.optimizer import cut_parameters, doubt_about_parts, state_words, updates_parts
from asa.interfaces.strategy import OPTIMIZER_WORDS
from asa.ir.optimizers import planned_as
from asa.ir.plan import OptimizerName
from asa.sharding.split import TensorPart
from asa.sharding.split.local_parts import step_over_parts


def elementwise(optimizer: Optimizer, declared: bool | None = None) -> bool:
    """Whether a shard of a parameter is updated as that part of the whole would be; ``declared``: the user's own
    statement."""
    if declared is not None:
        return declared
    return updates_parts(optimizer)


def planned_like(optimizer: Optimizer, context: RankContext) -> OptimizerName:
    """The optimizer that the planner assumes for this one, because it needs the same memory. A line says so if it keeps
    more."""
    name, kept = planned_as(type(optimizer).__name__), state_words(optimizer) or 0.0
    if kept > OPTIMIZER_WORDS[name]:
        name = "adamw"
    if kept > OPTIMIZER_WORDS[name]:
        say(
            context,
            f"{type(optimizer).__name__} keeps {kept:g} bytes of state for each byte of a parameter; memory is "
            f"predicted with {OPTIMIZER_WORDS[name]}, so plan with less memory than there is (memory_bytes=)",
        )
    return name


def check_whole(optimizer: Optimizer) -> None:
    """Check that ranks can follow the steps of ``optimizer``.

    Raises:
        UsageError: it wraps another one, and has nothing of ``torch.optim.Optimizer`` itself.
    """
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise UsageError(
            f"{type(optimizer).__name__} did not call Optimizer.__init__, so its steps cannot be followed: hand in the "
            "optimizer that it wraps, and wrap that behind the call"
        )


def check_shared(optimizer: Optimizer) -> None:
    """Refuse an optimizer that does not take the same steps on every rank.

    Raises:
        UsageError: its steps depend on a loss, which differs between ranks.
    """
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            "LBFGS decides by the loss how often it is evaluated, and every rank has a loss of its own: "
            "choose an optimizer whose step needs no closure, or train on one device"
        )


def others_over(model: nn.Module, optimizer: Optimizer) -> list[Optimizer]:
    """Other optimizers in this process with parameters of ``model``; a program may use several in its loop."""
    return [o for o in _optimizers_of(model.parameters()) if o is not optimizer]


def _optimizers_of(parameters: Iterable[Tensor]) -> list[Optimizer]:
    """The optimizers in this process that hold some of ``parameters``."""
    ids = set(map(id, parameters))
    # ``type``, because ``isinstance`` may initialise a lazy object.
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    return [o for o in optimizers if any(id(p) in ids for g in getattr(o, "param_groups", ()) for p in g["params"])]


def hand_over(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Let optimizers that made no step yet, and hold parameters ``before``, by name, hold those that the model has
    ``now``."""
    names = {id(p): name for name, p in before.items() if name in now}
    for optimizer in _optimizers_of(before.values()):
        for group in () if optimizer.state else optimizer.param_groups:
            group["params"][:] = [now[names[id(p)]] if id(p) in names else p for p in group["params"]]


def no_shards_because(optimizer: Optimizer, model: nn.Module, declared: bool | None) -> str:
    """Why no rank may update a shard of a parameter; empty if shards are allowed."""
    name = next((name for name, p in model.named_parameters() if hooked(p)), None)
    if name is not None:
        return f"{name} has a hook on its gradient"
    name = next((name for name, p in model.named_parameters() if not p.numel()), None)
    if name is not None:
        return f"{name} has no elements"
    if both := in_one_memory(model.named_parameters()):
        return f"{both[0]} and {both[1]} are two parameters in one memory"
    kind = type(optimizer).__name__
    if elementwise(optimizer, declared):
        return ""
    if declared is None and not type(optimizer).__module__.startswith("torch.optim"):
        return f"{kind} is not known to update element by element (say elementwise=True if it does)"
    return f"{kind} uses all elements of a parameter together"


def lost_epsilon(optimizer: Optimizer) -> str:
    """A sentence on an ``eps`` of ``optimizer`` that is 0 in the type of its parameters; empty if there is none.

    A fused kernel computes in float32."""
    for group in optimizer.param_groups:
        eps = None if group.get("fused") else group.get("eps")
        for p in group["params"] if isinstance(eps, float) and eps > 0 else ():
            if p.is_floating_point() and not torch.tensor(eps, dtype=p.dtype):
                least = torch.finfo(p.dtype).smallest_normal * torch.finfo(p.dtype).eps
                return (
                    f"eps={eps:g} of {type(optimizer).__name__} is 0 in {p.dtype}, whose least number is {least:.1g}: "
                    "where squares of gradients are 0, too, weights become NaN, as on one device; use eps=1e-4, or "
                    "float32 weights and torch.autocast"
                )
    return ""


class Rebinding:
    """Moves an optimizer from the model it was made for to the distributed one.

    Made before the model is split (its parameters are known by name then), applied after that.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, *, elementwise: bool = False) -> None:
        """Record the optimizer's parameters by name. ``elementwise``: it is known to update element by element."""
        self.elementwise = elementwise
        if told := lost_epsilon(optimizer):
            warnings.warn(told, stacklevel=2)
        named: dict[int, list[str]] = {}
        self._forms: dict[str, Tensor] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            named.setdefault(id(p), []).append(name)
            if not is_lazy(p):
                self._forms[name] = torch.empty_like(p.detach(), device="meta")
        self.optimizer = optimizer
        self._undo: list[Callable[[], None]] = []
        self._names: list[list[tuple[str, ...]]] = []
        self._group: dict[str, int] = {}
        self._state: dict[str, Tensor] = {}
        self._trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
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

    def outside(self, model: ParallelModel) -> list[str]:
        """Names of the optimizer's trained parameters that are in no component of ``model``, because no forward reads
        them."""
        local_names = {item.name for item in local_tensors(model)}
        optimized = [names for group in self._names for names in group if names]
        return [names[0] for names in optimized if names[0] in self._trained and not local_names.intersection(names)]

    def apply(self, model: ParallelModel, views: TensorViews | None = None) -> Optimizer:
        """Let the optimizer update what this rank updates of ``model``, keeping its state.

        ``views``: the user's program's view of the parameters. The groups then contain everything that this rank holds.

        Raises:
            UsageError: the rank holds shards, and the optimizer needs whole parameters.
        """
        optimizer, updated = self.optimizer, {id(p) for p in model.updated}
        cut = next((name for name in cut_parameters(model) if name in self._group), None)
        if cut is not None and not self.elementwise:
            remedy = 'plan="auto" and strategies=("ddp",) keep them whole'
            warnings.warn(doubt_about_parts(optimizer, cut, remedy), stacklevel=2)
        elif model.owner and isinstance(optimizer, LBFGS):
            raise UsageError(
                "LBFGS updates all parameters together, and the plan has each rank update some of them; "
                'plan="auto" and strategies=("ddp",) have every rank update all'
            )
        elif model.owner and not self.elementwise and not type(optimizer).__module__.startswith("torch.optim"):
            warnings.warn(
                f"the plan has each rank update some of the parameters: correct only if {type(optimizer).__name__} "
                'updates each parameter by itself (no norm or vector of all gradients); otherwise plan="auto" and '
                "strategies=('ddp',) have every rank update all",
                stacklevel=2,
            )
        while self._undo:
            self._undo.pop()()
        parameters_of_groups: list[list[tuple[int, Tensor]]] = [[] for _ in optimizer.param_groups]
        places = {name: number for group in self._names for number, alike in enumerate(group) for name in alike}
        elsewhere: list[Tensor] = []
        for item in local_tensors(model):
            if not isinstance(item.tensor, nn.Parameter) or item.name not in self._group:
                continue
            if id(item.tensor) not in updated:
                if views is None:
                    continue
                elsewhere.append(item.tensor)
            parameters_of_groups[self._group[item.name]].append(
                (places[item.name], item.tensor if views is None else views.item(item))
            )
        for group, parameters in zip(optimizer.param_groups, parameters_of_groups, strict=True):
            # In its place: some optimizers (LBFGS) keep the list itself.
            group["params"][:] = [p for _, p in sorted(parameters, key=lambda placed: placed[0])]
        optimizer.state.clear()
        if self._state:
            names = {item.name for item in local_tensors(model)} | model.elsewhere
            state = {key: value for key, value in self._state.items() if key.rsplit("/", 1)[0] in names}
            load_states(model, optimizer, state)
            self._state = {}  # later moves take the state from the optimizer
        self._undo.append(plain_states(optimizer, model, self._names, self._forms))
        if model.owner:
            self._undo.append(_share_updates(optimizer, model))
        if elsewhere or any(isinstance(p, DTensor | TensorPart) for group in parameters_of_groups for _, p in group):
            self._undo.append(step_over_parts(optimizer, elsewhere))
        if views is not None:
            understood_by_scalers(optimizer, model)
        return optimizer


def _share_updates(optimizer: Optimizer, model: ParallelModel) -> Callable[[], None]:
    """Exchange updates between ranks after each step, before other hooks see them. Returns a function that undoes
    this."""

    def stepped(_optimizer: Optimizer, _args: Any, _options: Any) -> None:
        model.share_updates()

    handle = optimizer.register_step_post_hook(stepped)
    behind: Any = optimizer._optimizer_step_post_hooks
    behind.move_to_end(handle.id, last=False)
    return handle.remove
