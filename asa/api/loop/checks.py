"""``asa.check``: checks that a loop's loss on parts of a batch equals that on the whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asa.api.losses.comparison import Comparison
from asa.api.losses.tape import Watched
from asa.api.losses.terms import search_graph
from asa.api.losses.trial import Trial, rounding_of, sentences
from asa.api.model.distributed_model import distributed_models
from asa.errors import UsageError


@dataclass(frozen=True)
class Check:
    """Result of a check; ``print`` it. ``exact``: whether the loss is that of one device."""

    exact: bool
    text: str

    def __str__(self) -> str:
        return self.text


def check(step: Callable[..., Tensor], *batch: Any) -> Check:
    """Check that the loss of ``step(*batch)`` on the ranks' parts of a batch equals that on the whole batch.

    ``step`` calls a model of ``asa.parallelize`` in training mode and returns the loss; it does not differentiate it.
    The loss is computed on this rank's samples, and again from the outputs and labels of all ranks (collective)::

        for x, y in loader:
            print(asa.check(lambda: loss_fn(model(x), y)))
            break

    Nothing is updated. Interactions of samples inside the model (BatchNorm) are not checked.

    Raises:
        UsageError: ``step`` calls no such model, or returns no loss from it.
    """
    models = distributed_models()
    before = {id(m): m.trial for m in models}
    trials = {id(m): Trial(m) for m in models}
    paused = [t for t in before.values() if t is not None]
    for m in models:
        m.__dict__["trial"] = trials[id(m)]
    try:
        with contextlib.ExitStack() as pauses:
            for trial in paused:
                pauses.enter_context(trial.paused())
            loss = step(*batch)
    finally:
        for m in models:
            m.__dict__["trial"] = before[id(m)]
    if not isinstance(loss, Tensor) or loss.dim():
        raise UsageError(f"step returned {type(loss).__name__}, not a loss of one number")
    if not models:
        return Check(True, "one rank has the whole batch: there is nothing to compare")
    model, nodes, *_ = search_graph([loss])
    if model is None or model.terms is None:
        raise UsageError("the loss of step was not computed by a model of asa.parallelize in training mode")
    tape = loss.tape if isinstance(loss, Watched) and hasattr(loss, "tape") else None
    if not model.rank_context.votes.everyone(tape is not None) or tape is None:
        if trials[id(model)].trusted:
            return Check(True, "not compared: the loss states its denominator, or contains the whole batch")
        return Check(
            False, "not known: the loss is computed inside the model, or by operations that cannot be recorded"
        )
    with torch._C.DisableTorchFunctionSubclass():
        after = model.terms.before(nodes, model.mean_weight, model.mean_rows)
        received = torch.autograd.grad(loss, tape.outputs, allow_unused=True, retain_graph=True)
        after()
    difference = Comparison(model.rank_context.votes, tape, loss, model.mean_weight).difference(list(received))
    if difference.unknown:
        return Check(False, f"not known: {difference.unknown}")
    lines = sentences(difference, loss.dtype, rounding_of(tape.outputs))
    if not lines and difference.doubt:
        return Check(False, f"not known: {difference.doubt}")
    if not lines:
        return Check(True, f"the loss is that of one device: gradients differ by {difference.gradients:.1e}")
    return Check(False, "; ".join(lines))
