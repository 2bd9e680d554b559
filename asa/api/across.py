"""Numbers and tensors of all ranks in the user's own loop, with gradients: ``asa.gather``, ``asa.reduce``,
``asa.mean_over``.

A training step differentiates the mean of all ranks' losses, weighted by their numbers of samples. Backward through
these functions returns gradients of this mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from asa.api.comparison import gathered
from asa.api.losses import LearningModel, current
from asa.api.tape import Watched
from asa.errors import UsageError
from asa.executor.model.votes import Votes


def _plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor) if isinstance(x, Watched) else x


def _written(result: Tensor, given: Tensor, alone: Callable[[Tensor], Tensor]) -> Tensor:
    """``result``, recorded on the tape of ``given`` as ``alone(given)``, the same operation in one process."""
    if not isinstance(given, Watched) or given.tape.closed or given.tape.strange:
        return result
    found: Tensor = given.tape.note(alone, (given,), {}, result)
    return found


def _spread(*, differentiated: bool) -> LearningModel | None:
    """The model whose batch is being processed; None if there is one rank. ``differentiated``: whether the result
    enters a loss, so that the program handles its loss itself.

    Raises:
        UsageError: there are several ranks, and no model was called yet.
    """
    placed = current()
    if placed is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError("no model of asa.parallelize was called yet: call it first, in this very step")
        return None
    if placed.parallel is None or placed.place.ranks == 1:
        return None
    if placed.trial is not None and differentiated:
        placed.trial.trusted = True
    return placed


def _as_it_is(x: Tensor) -> Tensor:
    return x.clone()


class _Rows(torch.autograd.Function):
    """Gathers the counted rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, votes: Votes, weight: float) -> Tensor:
        own = x.detach().cpu() if weight else x.detach().cpu()[:0]
        parts = gathered(votes, own)
        ctx.votes, ctx.weight, ctx.shape = votes, weight, x.shape
        ctx.first = sum(len(p) for p in parts[: votes.rank])
        ctx.rows = len(own)
        return torch.cat(parts).to(x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        total = _summed(ctx.votes, gradient * ctx.weight)
        if not ctx.rows:
            return gradient.new_zeros(ctx.shape), None, None
        return total[ctx.first : ctx.first + ctx.rows] / ctx.weight, None, None


class _Sum(torch.autograd.Function):
    """Sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, votes: Votes, weight: float) -> Tensor:
        ctx.votes, ctx.weight = votes, weight
        return _summed(votes, x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        total = _summed(ctx.votes, gradient * ctx.weight)
        return total / ctx.weight if ctx.weight else torch.zeros_like(total), None, None


def _summed(votes: Votes, x: Tensor) -> Tensor:
    wire = x.detach().cpu().contiguous().clone()
    dist.all_reduce(wire, group=votes.group)
    return wire.to(x.device)


def gather(x: Tensor) -> Tensor:
    """Gather the rows ``x`` [n, ...] of all ranks to [N, ...] in the order of the global batch, on every rank
    (collective).

    Gradients go back to the rank from which each row came. So a loss that compares samples (contrastive, Dice over the
    batch, a ranking) is computed from gathered outputs and labels on every rank, and equals that of one device::

        loss = contrastive(asa.gather(model(x)), asa.gather(y))

    Raises:
        UsageError: no model was called yet.
    """
    placed = _spread(differentiated=True)
    if placed is None:
        return x
    return _written(_Rows.apply(_plain(x), placed.place.votes, placed.weight_now()), x, _as_it_is)


def reduce(x: Tensor | float, op: Literal["mean", "sum"] = "mean") -> Tensor:
    """Reduce ``x`` of all ranks to one tensor on every rank (collective), with gradients.

    ``mean``: weighted by each rank's number of samples, so that means over the ranks' samples become the mean over the
    global batch. ``sum``: for counts, such as correct answers; a sample that two ranks computed counts once.

    Raises:
        UsageError: another ``op``; no model was called yet.
    """
    if op not in ("mean", "sum"):
        raise UsageError(f"no reduction {op!r}; one of mean, sum")
    placed = _spread(differentiated=isinstance(x, Tensor) and x.requires_grad)
    value = x if isinstance(x, Tensor) else torch.tensor(float(x), dtype=torch.float64)
    if placed is None:
        return value
    weight = placed.weight_now()
    share = weight / placed.place.ranks if op == "mean" else float(weight > 0)
    given, value = value, _plain(value)
    if op == "mean" and not value.dim() and placed.terms is not None and placed.terms.counting:
        placed.terms.tell_of_means(placed.place)
    if share != 1:
        value = value * share if op == "mean" or value.is_floating_point() else value * int(share)
    return _written(_Sum.apply(value, placed.place.votes, weight), given, _as_it_is)


def mean_over(total: Tensor, count: Tensor | float) -> Tensor:
    """The loss ``total / count`` over the whole batch, from each rank's own sums (collective)::

        loss = asa.mean_over(F.cross_entropy(model(x), y, reduction="sum"), (y != -100).sum())

    Each rank returns its part of the loss, scaled so that the mean over ranks and its gradients equal those of one
    device.

    Raises:
        UsageError: no model was called yet.
    """
    placed = _spread(differentiated=True)
    number = float(_plain(count) if isinstance(count, Tensor) else count)
    if placed is None:
        return total / number
    weight, ranks = placed.weight_now(), placed.place.ranks
    counts = placed.place.votes.gather([number if weight else 0.0])
    whole = sum(c[0] for c in counts)
    mine = _plain(total) * (ranks / (whole * weight) if weight and whole else 0.0)
    return _written(mine, total, lambda sums: sums / whole if whole else sums * 0.0)
