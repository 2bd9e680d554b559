"""Numbers and tensors of all ranks in the user's own loop, with gradients: ``asa.gather``, ``asa.reduce``,
``asa.mean_over``.

A training step differentiates the mean of all ranks' losses, weighted by their numbers of samples. Backward through
these functions returns gradients of this mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from asa.api.losses.comparison import gathered
from asa.api.losses.tape import Watched, as_plain
from asa.api.losses.terms import LearningModel, current
from asa.api.messages import say
from asa.api.rank_context import meet_at
from asa.api.steps.registrations import watched_models
from asa.errors import UsageError
from asa.executor.model.votes import Votes

_exchanged = [0]


def _recorded_as(result: Tensor, source: Tensor, local_op: Callable[[Tensor], Tensor]) -> Tensor:
    """``result``, recorded on the tape of ``source`` as ``local_op(source)``, the same operation in one process."""
    if not isinstance(source, Watched) or source.tape.closed or source.tape.problem:
        return result
    recorded: Tensor = source.tape.note(local_op, (source,), {}, result)
    return recorded


def _distributed_model(what: str, *, differentiated: bool) -> LearningModel | None:
    """The model whose batch is being processed, when all ranks have come to ``what`` (collective); None if there is one
    rank. ``differentiated``: whether the result enters a loss, so that the program handles its loss itself.

    Raises:
        UsageError: there are several ranks, and no model was called yet, or another rank does something else.
    """
    model = current()
    if model is None or model.share is None:  # the loop has a batch of another, which it has not called yet
        reading = [m for m in watched_models() if m.share is not None]
        model = cast(LearningModel, reading[0]) if len(reading) == 1 else model
    if model is None and len(watched_models()) == 1:  # behind a pass in which no model is called
        model = cast(LearningModel, watched_models()[0])
    if model is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError("no model of asa.parallelize was called yet: call it first, or take a batch of its loader")
        return None
    if model.parallel is None or model.rank_context.ranks == 1:
        return None
    if model.trial is not None and differentiated:
        model.trial.trusted = True
    meet_at(what)
    _exchanged[0] += 1
    return model


def exchanges() -> int:
    """Number of calls of ``asa.reduce``, ``asa.gather`` and ``asa.mean_over`` so far."""
    return _exchanged[0]


def _identity(x: Tensor) -> Tensor:
    return x.clone()


_identity.across = True  # type: ignore[attr-defined]  # numbers computed from it are of all ranks


class _Rows(torch.autograd.Function):
    """Gathers the counted rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, votes: Votes, weight: float) -> Tensor:
        counted_rows = x.detach().cpu() if weight else x.detach().cpu()[:0]
        parts = gathered(votes, counted_rows)
        ctx.votes, ctx.weight, ctx.shape = votes, weight, x.shape
        ctx.first = sum(len(p) for p in parts[: votes.rank])
        ctx.rows = len(counted_rows)
        return torch.cat(parts).to(x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        total = _summed_over_ranks(ctx.votes, gradient * ctx.weight)
        if not ctx.rows:
            return gradient.new_zeros(ctx.shape), None, None
        return total[ctx.first : ctx.first + ctx.rows] / ctx.weight, None, None


class _Sum(torch.autograd.Function):
    """Sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, votes: Votes, weight: float) -> Tensor:
        ctx.votes, ctx.weight = votes, weight
        return _summed_over_ranks(votes, x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        total = _summed_over_ranks(ctx.votes, gradient * ctx.weight)
        return total / ctx.weight if ctx.weight else torch.zeros_like(total), None, None


def _summed_over_ranks(votes: Votes, x: Tensor) -> Tensor:
    wire = x.detach().cpu().contiguous().clone()
    dist.all_reduce(wire, group=votes.group)
    return wire.to(x.device)


def _tell_if_repeated(model: LearningModel, name: str, x: Tensor, result: Tensor) -> None:
    """Print once that ``result`` counts samples once for every rank: those of a loader of the program's own, of which
    all ranks have computed the same ``x``."""
    if not model.beside or model.__dict__.get("told_of_repeated") or not result.numel():
        return
    ranks = model.rank_context.ranks
    again = torch.cat([x] * ranks) if name == "asa.gather" else x * ranks
    if again.shape == result.shape and bool(result.any()) and torch.equal(again, result):
        model.__dict__["told_of_repeated"] = True
        say(model.rank_context, f"{name} puts together what is the same on all ranks: a loader that was not handed to "
            "asa.parallelize is read whole by every rank, and a sample of it counts once for each; leave "
            f"{name} out there")  # fmt: skip


def gather(x: Tensor) -> Tensor:
    """Gather the rows ``x`` [n, ...] of all ranks to [N, ...] in the order of the global batch, on every rank
    (collective).

    Gradients go back to the rank from which each row came. So a loss that compares samples (contrastive, Dice over the
    batch, a ranking) is computed from gathered outputs and labels on every rank, and equals that of one device::

        loss = contrastive(asa.gather(model(x)), asa.gather(y))

    Raises:
        UsageError: no model was called yet.
    """
    model = _distributed_model("asa.gather", differentiated=True)
    if model is None:
        return x
    rows = _Rows.apply(as_plain(x), model.rank_context.votes, model.weight_now())
    _tell_if_repeated(model, "asa.gather", as_plain(x).detach(), rows.detach())
    return _recorded_as(rows, x, _identity)


def reduce(x: Tensor | float, op: Literal["mean", "sum"] = "mean") -> Tensor:
    """Reduce ``x`` of all ranks to one tensor on every rank (collective), with gradients.

    ``mean``: weighted by each rank's number of samples, so that means over the ranks' samples become the mean over the
    global batch. ``sum``: for counts, such as correct answers; a sample that two ranks computed counts once.

    Raises:
        UsageError: another ``op``; no model was called yet.
    """
    if op not in ("mean", "sum"):
        raise UsageError(f"no reduction {op!r}; one of mean, sum")
    model = _distributed_model("asa.reduce", differentiated=isinstance(x, Tensor) and x.requires_grad)
    value = x if isinstance(x, Tensor) else torch.tensor(float(x), dtype=torch.float64)
    if model is None:
        return value
    weight = model.weight_now()
    share = weight / model.rank_context.ranks if op == "mean" else float(weight > 0)
    source, value = value, as_plain(value)
    if not (value.is_floating_point() or value.is_complex()):  # of one type on all ranks, whatever their shares are
        value = value.to(torch.int64 if op == "sum" else torch.get_default_dtype())
    if op == "mean" and not value.dim() and model.terms is not None and model.terms.counting:
        model.terms.tell_of_means(model.rank_context)
    if share != 1:
        value = value * share if op == "mean" or value.is_floating_point() else value * int(share)
    total = _Sum.apply(value, model.rank_context.votes, weight)
    if op == "sum":
        _tell_if_repeated(model, "asa.reduce", value.detach(), total.detach())
    return _recorded_as(total, source, _identity)


def mean_over(total: Tensor, count: Tensor | float) -> Tensor:
    """The loss ``total / count`` over the whole batch, from each rank's own sums (collective)::

        loss = asa.mean_over(F.cross_entropy(model(x), y, reduction="sum"), (y != -100).sum())

    Each rank returns its part of the loss, scaled so that the mean over ranks and its gradients equal those of one
    device.

    Raises:
        UsageError: no model was called yet.
    """
    model = _distributed_model("asa.mean_over", differentiated=True)
    number = float(as_plain(count))
    if model is None:
        return total / number
    weight, ranks = model.weight_now(), model.rank_context.ranks
    counts = model.rank_context.votes.gather([number if weight else 0.0])
    denominator = sum(c[0] for c in counts)
    scaled = as_plain(total) * (ranks / (denominator * weight) if weight and denominator else 0.0)
    return _recorded_as(scaled, total, lambda sums: sums / denominator if denominator else sums * 0.0)
