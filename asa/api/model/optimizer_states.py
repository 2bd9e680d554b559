"""An optimizer's ``state_dict`` as on one device: full tensors, in the order in which the user passed them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from asa.api.model import model_interface
from asa.errors import UsageError
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.parameter_hooks import replaced
from asa.executor.model.state import full_optimizer_state, load_full_optimizer_state, local_tensors, restored, stored
from asa.sharding.split import TensorPart, held_of

_STORED = Tensor | int | float | None
"""Types of state that can be saved and moved whatever the plan is."""
Names = Sequence[Sequence[tuple[str, ...]]]
"""For each group and parameter, in the user's order, all its names in the model."""


def over_local_tensors(optimizer: Optimizer) -> Any:
    """``optimizer`` as the executor uses it, over the tensors that this rank holds."""
    groups = optimizer.param_groups
    if not any(isinstance(p, TensorPart) for group in groups for p in group["params"]):
        return optimizer
    states = {held_of(p): {key: held_of(v) for key, v in entry.items()} for p, entry in optimizer.state.items()}
    return SimpleNamespace(
        state=defaultdict(dict, states), param_groups=[{**g, "params": list(map(held_of, g["params"]))} for g in groups]
    )


@dataclass(frozen=True)
class FullStates:
    """An optimizer's state under no plan: full tensors by ``name/key``, and by name of the parameter what is neither a
    tensor nor a number."""

    tensors: dict[str, Tensor]
    others: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, model: ParallelModel, optimizer: Optimizer) -> FullStates:
        """The state of ``optimizer`` (collective).

        Raises:
            UsageError: it is neither tensors nor numbers, and not every rank has all of it.
        """
        view, others = _without_lists(optimizer, model)
        names = {id(item.tensor): item.name for item in local_tensors(model)}
        return cls(full_optimizer_state(model, view), {names[p]: o for p, o in others.items() if p in names})

    def load(self, model: ParallelModel, optimizer: Optimizer) -> None:
        """Load this rank's part of it."""
        load_states(model, optimizer, self.tensors)
        for item in local_tensors(model) if self.others else ():
            if item.name in self.others:
                optimizer.state[item.tensor].update(self.others[item.name])


def load_states(model: ParallelModel, optimizer: Optimizer, full: dict[str, Tensor]) -> None:
    """Load this rank's part of the ``full`` optimizer state; each tensor is sharded like its parameter."""
    view = over_local_tensors(optimizer)
    load_full_optimizer_state(model, view, full)
    if view is optimizer:
        return
    optimizer.state.clear()
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        local = held_of(p)
        if local not in view.state:
            continue
        entry = view.state[local]
        if isinstance(p, TensorPart):
            alike = {k: v for k, v in entry.items() if isinstance(v, Tensor) and v.shape == local.shape}
            entry |= {key: TensorPart(value, p.parted) for key, value in alike.items()}
        optimizer.state[p] = entry


def _names_now(optimizer: Optimizer, model: ParallelModel, names: Names) -> list[list[tuple[str, ...] | Tensor]]:
    """Names of the parameters in each group of ``optimizer`` now: ``names``, and those that a program has added since.
    A parameter that is none of the model's stands for itself."""
    of: dict[int, str] = {id(item.tensor): item.name for item in local_tensors(model)}
    now: list[list[tuple[str, ...] | Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        here = [of.get(id(held_of(p)), p) for p in group["params"]]
        made = names[index] if index < len(names) else ()
        known = {name for alike in made for name in alike}
        own = [name for name in here if isinstance(name, str)]
        if own and known.isdisjoint(own):  # another group than the one that it was
            made, known = (), set()
        added: list[tuple[str, ...] | Tensor] = [(name,) for name in own if name not in known]
        added += [p for p in here if isinstance(p, Tensor) and not isinstance(p, DTensor)]
        now.append([*made, *added])
    return now


def _without_lists(optimizer: Optimizer, model: ParallelModel) -> tuple[Any, dict[int, dict[str, Any]]]:
    """(optimizer, others): ``optimizer`` as the executor uses it, without state that is neither a tensor nor a number,
    and this state by identity of the parameter, if every rank has all of it."""
    entries = {p: e for p, e in optimizer.state.items() if isinstance(e, dict)}
    others = {id(p): {k: v for k, v in e.items() if not isinstance(v, _STORED)} for p, e in entries.items()}
    if not any(others.values()) or not _whole(model):
        return over_local_tensors(optimizer), {}
    states = {p: {k: v for k, v in e.items() if k not in others[id(p)]} for p, e in entries.items()}
    return SimpleNamespace(state=defaultdict(dict, states), param_groups=optimizer.param_groups), others


def _whole(model: ParallelModel) -> bool:
    """Whether every rank updates all parameters, which it has whole."""
    return not model.owner and not any(map(replaced, model.plan.components)) and len(model.plan.stages) == 1


def _strided(value: Tensor, form: Tensor) -> Tensor:
    """``value`` with the strides of ``form``, if it has that shape."""
    if value.shape != form.shape or value.stride() == form.stride():
        return value
    return torch.empty_like(form, dtype=value.dtype, device=value.device).copy_(value)


def plain_states(
    optimizer: Optimizer, model: ParallelModel, names: Names, forms: Mapping[str, Tensor]
) -> Callable[[], None]:
    """Let ``state_dict`` and ``load_state_dict`` of ``optimizer`` use the plain model's state. It has the shapes and
    strides of ``forms``, the plain model's parameters without values, by name: fused kernels match state and parameter
    by their positions in memory. From then on they are collective if the plan shards or splits anything. Returns a
    function that undoes this."""

    def saved(_optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if model.state_axis is not None or any(map(replaced, model.plan.components)):
            model.meet("optimizer.state_dict() of a plan that shares it out", within_s=model_interface.MEETING_S)
        model.reduction.release()  # a forward may have put whole parameters in the place of shards
        full: dict[str, dict[str, Any]] = {}
        states = FullStates.of(model, optimizer)
        for key, value in states.tensors.items():
            name, _, what = key.rpartition("/")
            plain, entry = restored(what, value)
            if isinstance(entry, Tensor) and name in forms:
                entry = _strided(entry, forms[name])
            full.setdefault(name, {})[plain] = entry
        for name, others in states.others.items():
            full.setdefault(name, {}).update(others)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        start = 0
        for group, parameters in zip(state_dict["param_groups"], _names_now(optimizer, model, names), strict=True):
            groups.append({**group, "params": list(range(start, start + len(parameters)))})
            for i, alike in enumerate(parameters):
                if isinstance(alike, Tensor):
                    entry_of_parameter = optimizer.state.get(alike)
                else:
                    entry_of_parameter = next((full[name] for name in alike if name in full), None)
                if entry_of_parameter:
                    state[start + i] = entry_of_parameter
            start += len(parameters)
        return {**state_dict, "state": state, "param_groups": groups}

    def loaded(_optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        model.reduction.release()
        now = _names_now(optimizer, model, names)
        if [len(g["params"]) for g in state_dict["param_groups"]] != [len(g) for g in now]:
            raise UsageError(
                f"the state is of groups of {[len(g['params']) for g in state_dict['param_groups']]} parameters, the "
                f"optimizer has groups of {[len(g) for g in now]}"
            )
        local_names = {name for component in model.components for name, _ in component.named_parameters()}
        full: dict[str, Tensor] = {}
        outside: dict[Tensor, Any] = {}
        others: dict[str, dict[str, Any]] = {}
        for group, parameters in zip(state_dict["param_groups"], now, strict=True):
            for number, alike in zip(group["params"], parameters, strict=True):
                if isinstance(alike, Tensor):
                    outside[alike] = state_dict["state"].get(number)
                    continue
                name = next((n for n in alike if n in local_names), None)
                for what, value in state_dict["state"].get(number, {}).items():
                    if name is not None and not isinstance(value, _STORED) and _whole(model):
                        others.setdefault(name, {})[what] = value
                    elif name is not None:
                        key, tensor = stored(what, value)
                        full[f"{name}/{key}"] = tensor
        FullStates(full, others).load(model, optimizer)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for local_group, group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            groups.append({**group, "params": list(range(count, count + len(local_group["params"])))})
            groups[-1] |= {key: local_group[key] for key in ("foreach", "fused") if key in local_group}
            for i, p in enumerate(local_group["params"]):
                if outside.get(p) is not None:
                    state[count + i] = outside[p]
                elif p in optimizer.state:
                    state[count + i] = optimizer.state[p]
            count += len(local_group["params"])
        return {**state_dict, "state": state, "param_groups": groups}

    handles = [
        optimizer.register_state_dict_post_hook(saved),
        optimizer.register_load_state_dict_pre_hook(loaded),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
