"""The loss of a job over microbatches and ranks: known denominators are summed up, anything else is tried once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from asa.api.tape import MOST_BYTES
from asa.api.trial import tolerance
from asa.errors import UsageError
from asa.executor.model.votes import Votes

LossWeight = Callable[[Any], Tensor | float] | Literal["sum"] | None
_MEAN = 1


class JobLoss:
    """``loss_fn`` as microbatches need it. ``weight``: what a mean loss divides by, from the labels; ``sum`` where the
    loss is a sum; None where it is a mean over samples, or a cross-entropy, whose denominator is seen.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], weight: LossWeight, votes: Votes) -> None:
        if weight is not None and weight != "sum" and not callable(weight):
            raise UsageError(f"weight is {weight!r}: a function of the labels, or 'sum'")
        self._loss_fn, self._weight, self._votes = loss_fn, weight, votes
        self._counting: bool | None = None if weight is None else True
        self.tried = self._warned = False
        self._sum = 0.0
        self._seen: list[tuple[Any, Any]] = []
        self.rows = 0
        """Samples of the microbatch whose loss comes next."""

    def begin(self) -> None:
        """A step begins."""
        self._sum = 0.0
        self._seen.clear()

    def __call__(self, output: Any, labels: Any, counts: bool) -> Tensor:
        """The loss of a microbatch, as a mean over its samples. ``counts``: whether no other rank has the same rows."""
        loss = self._loss_fn(output, labels)
        if not self.tried:
            self._seen.append(pytree.tree_map(_detached, (output, labels)))
        if self._weight == "sum":
            return loss / max(1, self.rows)
        seen = _denominator(loss) if self._weight is None else float(self._weight(labels))
        if self._weight is None and seen is None:
            return loss
        assert seen is not None
        if self._counting is False:
            if seen != self.rows and not self._warned:
                self._warned = True
                warnings.warn(
                    "targets are ignored by the loss, or weighed, for the first time now: microbatches and ranks count "
                    "by their samples, which one device would not do; say weight=, a function of the labels",
                    stacklevel=4,
                )
            return loss
        self._sum += seen if counts else 0.0
        if not seen:  # a mean over nothing is 0/0; of the whole batch it is no part
            return torch.nan_to_num(loss) * 0.0
        return loss if seen == self.rows else loss * (seen / max(1, self.rows))

    def factor(self, batch: int) -> float:
        """By what the gradients and the loss of a step over ``batch`` samples are to be multiplied (collective)."""
        if self._weight == "sum":
            return float(batch)
        if self._counting is False:
            return 1.0
        total = sum(s[0] for s in self._votes.gather([self._sum]))
        if self._counting is None:
            self._counting = total not in (0.0, float(batch))
        return batch / total if total else 1.0

    def checked(self, loss: float, counts: bool, dtype: torch.dtype) -> None:
        """Compare ``loss``, the mean over the first step's samples as it was put together, with that of its whole batch
        (collective, once).

        Raises:
            UsageError: they differ.
        """
        if self.tried:
            return
        self.tried = True
        whole = self._whole(counts)
        self._seen.clear()
        if whole is None or whole != whole:
            return
        off = abs(whole - loss) / max(abs(whole), abs(loss), 1e-30)
        if off > tolerance(dtype):
            raise UsageError(
                f"the loss is no mean over samples: over the whole batch it is {whole:.6g}, put together from "
                f"microbatches and ranks it would be {loss:.6g} ({off:.1%} apart); say weight=, a function of the "
                "labels that gives what the mean divides by, or weight='sum'; a loss that compares samples needs a "
                "plan of one rank and one microbatch"
            )

    def _whole(self, counts: bool) -> float | None:
        votes = self._votes
        mine = self._seen if counts else []
        flat = [pytree.tree_flatten(one) for one in mine]
        leaves = [[leaf for leaf in one if isinstance(leaf, Tensor)] for one, _ in flat]
        size = sum(t.nbytes for one in leaves for t in one)
        if sum(s[0] for s in votes.gather([float(size)])) > MOST_BYTES:
            return None
        specs: list[list[list[Any]]] = []
        parts: list[list[Tensor]] = []
        for rank in range(votes.num_ranks):
            own = [[[str(t.dtype)[6:], list(t.shape)] for t in one] for one in leaves]
            spec = votes.tell(own, source=rank)
            specs += spec
            for i, one in enumerate(spec):
                row = []
                for k, (kind, shape) in enumerate(one):
                    tensor = torch.empty(shape, dtype=getattr(torch, kind))
                    if rank == votes.rank:
                        tensor.copy_(leaves[i][k])
                    wire = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
                    votes.broadcast(wire, source=rank)
                    row.append(tensor)
                parts.append(row)
        first = next((r for r, s in enumerate(votes.gather([float(bool(mine))])) if s[0]), None)
        if first is None or len({len(one) for one in specs}) > 1:
            return None
        value: float | None = None
        if votes.rank == first:
            device = leaves[0][0].device
            joined = iter([_joined([row[k] for row in parts]).to(device) for k in range(len(parts[0]))])
            values, structure = flat[0]
            batch = pytree.tree_unflatten([next(joined) if isinstance(v, Tensor) else v for v in values], structure)
            try:
                with torch.no_grad():
                    value = float(self._loss_fn(*batch))
            except Exception:  # a loss that cannot take more samples than a microbatch has
                value = None
        found = votes.tell(value, source=first)
        return None if found is None else float(found)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts[0].dim() else parts[0]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _denominator(loss: Tensor) -> float | None:
    """What a loss that is a mean cross-entropy, and nothing else, was divided by."""
    node: Any = loss.grad_fn
    if node is None or not node.name().startswith("NllLoss") or node._saved_reduction != _MEAN:
        return None
    return float(node._saved_total_weight)
