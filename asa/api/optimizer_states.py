"""An optimizer's ``state_dict`` as one device would have it: full tensors, in the order the user handed them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from asa.errors import UsageError
from asa.executor.parallel import ParallelModel
from asa.executor.state import full_optimizer_state, load_full_optimizer_state, restored, stored

Names = Sequence[Sequence[tuple[str, ...]]]
"""Per group and parameter, as they were handed in: all names of it in the model."""


def plain_states(optimizer: Optimizer, model: ParallelModel, names: Names) -> Callable[[], None]:
    """Have ``state_dict`` and ``load_state_dict`` of ``optimizer`` speak of the plain model. Collective from then on
    where the plan shards or splits anything. Returns what takes that back."""
    first = [sum(map(len, names[:i])) for i in range(len(names))]

    def saved(_optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        full: dict[str, dict[str, Any]] = {}
        for key, value in full_optimizer_state(model, optimizer).items():
            name, _, what = key.rpartition("/")
            plain, entry = restored(what, value)
            full.setdefault(name, {})[plain] = entry
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for start, group, parameters in zip(first, found["param_groups"], names, strict=True):
            groups.append({**group, "params": list(range(start, start + len(parameters)))})
            for i, alike in enumerate(parameters):
                if known := next((full[name] for name in alike if name in full), None):
                    state[start + i] = known
        return {**found, "state": state, "param_groups": groups}

    def loaded(_optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        if [len(g["params"]) for g in given["param_groups"]] != [len(g) for g in names]:
            raise UsageError(
                f"the state is of groups of {[len(g['params']) for g in given['param_groups']]} parameters, the "
                f"optimizer was made with {[len(g) for g in names]}"
            )
        here = {name for component in model.components for name, _ in component.named_parameters()}
        full: dict[str, Tensor] = {}
        for group, parameters in zip(given["param_groups"], names, strict=True):
            for number, alike in zip(group["params"], parameters, strict=True):
                name = next((n for n in alike if n in here), None)
                for what, value in given["state"].get(number, {}).items():
                    if name is not None:
                        key, tensor = stored(what, value)
                        full[f"{name}/{key}"] = tensor
        load_full_optimizer_state(model, optimizer, full)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for mine, group in zip(optimizer.param_groups, given["param_groups"], strict=True):
            groups.append({**group, "params": list(range(count, count + len(mine["params"])))})
            groups[-1] |= {key: mine[key] for key in ("foreach", "fused") if key in mine}
            for i, p in enumerate(mine["params"]):
                if p in optimizer.state:
                    state[count + i] = optimizer.state[p]
            count += len(mine["params"])
        return {**given, "state": state, "param_groups": groups}

    handles = [
        optimizer.register_state_dict_post_hook(saved),
        optimizer.register_load_state_dict_pre_hook(loaded),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
