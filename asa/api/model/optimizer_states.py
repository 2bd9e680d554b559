"""An optimizer's ``state_dict`` as on one device: full tensors, in the order in which the user passed them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from asa.api.model import model_interface
from asa.errors import UsageError
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.parameter_hooks import replaced
from asa.executor.model.state import full_optimizer_state, load_full_optimizer_state, restored, stored
from asa.sharding.split import TensorPart, held_of

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


def plain_states(optimizer: Optimizer, model: ParallelModel, names: Names) -> Callable[[], None]:
    """Let ``state_dict`` and ``load_state_dict`` of ``optimizer`` use the plain model's state. From then on they are
    collective if the plan shards or splits anything. Returns a function that undoes this."""
    first = [sum(map(len, names[:i])) for i in range(len(names))]

    def saved(_optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if model.state_axis is not None or any(map(replaced, model.plan.components)):
            model.meet("optimizer.state_dict() of a plan that shares it out", within_s=model_interface.MEETING_S)
        full: dict[str, dict[str, Any]] = {}
        for key, value in full_optimizer_state(model, over_local_tensors(optimizer)).items():
            name, _, what = key.rpartition("/")
            plain, entry = restored(what, value)
            full.setdefault(name, {})[plain] = entry
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for start, group, parameters in zip(first, state_dict["param_groups"], names, strict=True):
            groups.append({**group, "params": list(range(start, start + len(parameters)))})
            for i, alike in enumerate(parameters):
                if entry_of_parameter := next((full[name] for name in alike if name in full), None):
                    state[start + i] = entry_of_parameter
        return {**state_dict, "state": state, "param_groups": groups}

    def loaded(_optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if [len(g["params"]) for g in state_dict["param_groups"]] != [len(g) for g in names]:
            raise UsageError(
                f"the state is of groups of {[len(g['params']) for g in state_dict['param_groups']]} parameters, the "
                f"optimizer was made with {[len(g) for g in names]}"
            )
        local_names = {name for component in model.components for name, _ in component.named_parameters()}
        full: dict[str, Tensor] = {}
        for group, parameters in zip(state_dict["param_groups"], names, strict=True):
            for number, alike in zip(group["params"], parameters, strict=True):
                name = next((n for n in alike if n in local_names), None)
                for what, value in state_dict["state"].get(number, {}).items():
                    if name is not None:
                        key, tensor = stored(what, value)
                        full[f"{name}/{key}"] = tensor
        load_states(model, optimizer, full)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for local_group, group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            groups.append({**group, "params": list(range(count, count + len(local_group["params"])))})
            groups[-1] |= {key: local_group[key] for key in ("foreach", "fused") if key in local_group}
            for i, p in enumerate(local_group["params"]):
                if p in optimizer.state:
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
