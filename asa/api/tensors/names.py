"""Makes the ``state_dict`` of a distributed model with the original names. Tied weights have several names; unused
weights are in no component."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from asa.executor.model.exchange import broadcast_tensors
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import extra_states, full_state, local_tensors
from asa.executor.model.votes import Votes


@dataclass(frozen=True)
class Compared:
    """A state to load, by the names that components use, and how its names differ from the model's."""

    state: dict[str, Tensor]
    differing: _IncompatibleKeys


class StateNames:
    """The names of a model's ``state_dict``, recorded before the model is split."""

    def __init__(self, model: nn.Module) -> None:
        self._alike: dict[int, list[str]] = {}
        self._values: dict[str, Any] = dict(model.state_dict(keep_vars=True))
        self.extra = extra_states(model)
        """Modules with state of their own making beside tensors, by its name."""
        self.marks = {n: dict(vars(t)) for n, t in self._values.items() if isinstance(t, nn.Parameter)}
        """Attributes that a program set on parameters, by name."""
        for name, tensor in self._values.items():
            self._alike.setdefault(id(tensor), []).append(name)
        self._shapes = {n: t.shape for n, t in self._values.items() if isinstance(t, Tensor) and n not in self.extra}
        self._names = {name: self._alike[id(tensor)] for name, tensor in self._values.items()}
        self.order: dict[str, int] = {}
        """Place of the name of each parameter and buffer in the model."""
        self.alike: dict[str, list[str]] = {}
        """All names of a parameter or buffer in the order of the model, by each of them."""
        tensors: dict[int, list[str]] = {}
        for lists in (model.named_parameters, model.named_buffers):
            for name, tensor in lists(remove_duplicate=False):
                self.order[name] = len(self.order)
                self.alike[name] = tensors.setdefault(id(tensor), [])
                self.alike[name].append(name)
        self._unused: dict[str, Tensor] | None = None

    def full(self, model: ParallelModel, votes: Votes | None = None) -> dict[str, Any]:
        """All tensors in full, on the CPU of every rank (collective). ``votes``: of all processes of the run, if some
        of them run no rank of the plan."""
        tensors = full_state(model)
        if votes is not None and len(model.processes) < votes.num_ranks:
            tensors = broadcast_tensors(tensors, votes, model.processes[0])
        if self._unused is None:  # tensors that no forward reads are still in the original model
            self._unused = {
                n: self._values[n] for n, names in self._names.items() if not any(a in tensors for a in names)
            }
            self._values = {}
        state: dict[str, Any] = {}
        for name, names in self._names.items():
            source = next((a for a in names if a in tensors), None)
            if name in self.extra:
                state[name] = self._now(name, model).get_extra_state()
            else:
                state[name] = self._unused[name].detach().cpu().clone() if source is None else tensors[source]
        return state

    def tie(self, copied: nn.Module) -> None:
        """Let the names of a shared tensor stand for one tensor in ``copied``, a copy of the model. Where ranks hold
        shards, layers that share one have no tensor in common."""
        tensors = dict(copied.named_parameters(remove_duplicate=False)) | dict(
            copied.named_buffers(remove_duplicate=False)
        )
        for name, (first, *_) in self._names.items():
            if name != first and first in tensors:
                path, _, leaf = name.rpartition(".")
                home = copied.get_submodule(path)
                registry: dict[str, Any] = home._parameters if leaf in home._parameters else home._buffers
                registry[leaf] = tensors[first]

    def _now(self, name: str, model: ParallelModel) -> nn.Module:
        """The module of an extra state: what runs on this rank, or the original one if none does."""
        original = self.extra[name]
        for component in model.components:
            with contextlib.suppress(AttributeError):
                module = component.get_submodule(name.rpartition(".")[0])
                if type(module) is type(original):
                    return module
        return original

    def compared(self, model: ParallelModel, state: Mapping[str, Any], *, strict: bool) -> Compared:
        """``state`` as the model would load it.

        Raises:
            RuntimeError: with ``strict``, names are missing or too many; shapes are others.
        """
        missing = [name for name in self._names if name not in state]
        unexpected = [name for name in state if name not in self._names]
        if strict and (missing or unexpected):
            what = f"lacks {', '.join(missing[:3])}" if missing else f"has {', '.join(unexpected[:3])}, which are none"
            raise RuntimeError(f"the state {what} of the model's; strict=False loads the others")
        for name, shape in self._shapes.items():
            if name in state and state[name].shape != shape:
                raise RuntimeError(f"{name} has the shape {list(shape)}, and in the state {list(state[name].shape)}")
        local = {item.name for item in local_tensors(model)}
        found: dict[str, Tensor] = {}
        for name in (n for n in self._names if n in state):  # of several names of one tensor, the model's last counts
            found |= dict.fromkeys(local.intersection(self._names[name]), state[name])
            if name in self.extra:
                self._now(name, model).set_extra_state(state[name])
            elif name in (self._unused or {}):
                self._unused[name].data.copy_(state[name])  # type: ignore[index]
        return Compared(found, _IncompatibleKeys(missing, unexpected))
