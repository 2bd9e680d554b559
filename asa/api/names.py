"""Makes the ``state_dict`` of a distributed model with the original names. Tied weights have several names; unused
weights are in no component."""

from __future__ import annotations

from torch import Tensor, nn

from asa.executor.model.exchange import broadcast_tensors
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import full_state
from asa.executor.model.votes import Votes


class StateNames:
    """The names of a model's ``state_dict``, recorded before the model is split."""

    def __init__(self, model: nn.Module) -> None:
        self._alike: dict[int, list[str]] = {}
        self._values: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        for name, tensor in self._values.items():
            self._alike.setdefault(id(tensor), []).append(name)
        self._names = {name: names for names in self._alike.values() for name in names}
        self._unused: dict[str, Tensor] | None = None

    def full(self, model: ParallelModel, votes: Votes | None = None) -> dict[str, Tensor]:
        """All tensors in full, on the CPU of every rank (collective). ``votes``: of all processes of the run, if some
        of them run no rank of the plan."""
        tensors = full_state(model)
        if votes is not None and len(model.processes) < votes.num_ranks:
            tensors = broadcast_tensors(tensors, votes, model.processes[0])
        if self._unused is None:  # tensors that no forward reads are still in the original model
            idle = (n for n, names in self._names.items() if not any(a in tensors for a in names))
            self._unused = {n: self._values[n] for n in idle}
            self._values = {}
        state = {}
        for name, names in self._names.items():
            source = next((a for a in names if a in tensors), None)
            state[name] = self._unused[name].detach().cpu().clone() if source is None else tensors[source]
        return state
