"""One training step up to the gradients: every microbatch forward and back, in the order of the plan's schedule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asa.executor.loss import loss_of
from asa.executor.parallel import ParallelModel
from asa.interfaces.schedule import Action
from asa.ir.layout import bounds
from asa.ir.plan import Plan
from asa.ir.transfer import UNDER_WAY
from asa.launch import faults
from asa.sharding.transfer import Arrival


@dataclass(frozen=True)
class MicrobatchRows:
    """Rows of the global batch: a whole microbatch, what this rank reads of it, and whose outputs it ends up with."""

    start: int
    stop: int
    read: slice
    kept: slice


def microbatches_of(plan: Plan, batch: int) -> int:
    """Into how many microbatches a batch is cut: the plan's number, fewer of a batch too small to give every rank a
    sample of each."""
    widest = max(layout.least for layout in plan.layouts())
    return max(1, min(plan.num_microbatches, batch // widest))


_known_rows: WeakKeyDictionary[ParallelModel, dict[int, list[MicrobatchRows]]] = WeakKeyDictionary()


def microbatch_rows(model: ParallelModel, batch: int) -> list[MicrobatchRows]:
    """This rank's rows of a global batch of ``batch`` samples, microbatch by microbatch. Not to be changed."""
    known = _known_rows.setdefault(model, {})
    if batch not in known:  # the same in every step
        known[batch] = _microbatch_rows(model, batch)
    return known[batch]


def _microbatch_rows(model: ParallelModel, batch: int) -> list[MicrobatchRows]:
    found = []
    count = microbatches_of(model.plan, batch)
    for j in range(count):
        start, stop = bounds(batch, count, j)
        if stop > start:
            read, kept = (
                slice(start + a, start + b)
                for a, b in (model.input_rows(stop - start), model.output_rows(stop - start))
            )
            found.append(MicrobatchRows(start, stop, read, kept))
    return found


@lru_cache(maxsize=64)
def _turns(order: tuple[Action, ...]) -> tuple[tuple[Action, Action | None, bool], ...]:
    """Every action, what follows it, and whether nothing but its own backward does (a forward), or no backward at all
    (a backward)."""
    found = []
    for i, action in enumerate(order):
        behind = order[i + 1 :]
        if action.direction == "forward":
            final = behind == (replace(action, direction="backward"),)
        else:
            final = all(a.direction == "forward" for a in behind)
        found.append((action, behind[0] if behind else None, final))
    return tuple(found)


class _Left(torch.autograd.Function):
    """Where a value has left the stage: backward begins here, with the one gradient in ``arrived``, which nobody else
    holds. Neither is the value held: both would be there until the whole stage's backward is over."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, arrived: list[Tensor]) -> Tensor:
        ctx.arrived = arrived
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.arrived.pop(), None


@dataclass(frozen=True)
class _Flight:
    """A microbatch between its forward and its backward: where gradients leave the stage, and where they enter; between
    stages, of what form the gradient is, and where it is put."""

    entry: Tensor
    exit: Tensor
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    arrived: list[Tensor] = field(default_factory=list)


def _left(entry: Tensor, value: Tensor) -> _Flight:
    """The flight of a microbatch that left the stage as ``value``."""
    arrived: list[Tensor] = []
    end = _Left.apply(value, arrived) if value.requires_grad else value.new_zeros(())
    return _Flight(entry, end, tuple(value.shape[1:]), value.dtype, arrived)


@dataclass(kw_only=True)
class _Step:
    """A step as one rank plays it."""

    model: ParallelModel
    samples: Tensor
    step: int
    inputs: Callable[[slice], Tensor]
    labels: Callable[[slice], Tensor]
    loss_fn: Callable[..., Tensor]
    precision: Callable[[], AbstractContextManager[object]]
    rows: list[MicrobatchRows]
    loss: Tensor
    flights: dict[int, _Flight] = field(default_factory=dict)
    coming: dict[Action, Arrival] = field(default_factory=dict)

    def play(self) -> None:
        """Every action of the order. What the next one waits for is on its way while this one computes."""
        if self.rows and self.model.links.arriving is not None:
            self.model.reduction.gather()
        for action, following, final in _turns(self.model.order(len(self.rows)) if self.rows else ()):
            self._expect(action)
            if following is not None:
                self._expect(following)
            faults.reached(action.direction)
            if action.direction == "forward":
                self._forward(action, straight_to_last=final)
            else:
                self._backward(action, last=final)
        self.model.links.settle()

    def _size(self, action: Action) -> int:
        part = self.rows[action.microbatch]
        return part.stop - part.start

    def _expect(self, action: Action) -> None:
        """Begin to receive what ``action`` starts from, if that comes from another stage and its form is known."""
        model, links, size = self.model, self.model.links, self._size(action)
        if action in self.coming:
            return
        if action.direction == "forward" and links.arriving is not None:
            dtype = links.arriving.hear_dtype(model.training, model.device)
            self.coming[action] = links.arriving.receive(size, links.input_shape, dtype, model.device)
        elif action.direction == "backward" and links.gradient_in is not None and action.microbatch in self.flights:
            left = self.flights[action.microbatch]
            self.coming[action] = links.gradient_in.receive(size, left.shape, left.dtype, model.device)

    def _forward(self, action: Action, *, straight_to_last: bool) -> None:
        model, links, part, size = self.model, self.model.links, self.rows[action.microbatch], self._size(action)
        if links.arriving is not None:
            value = self.coming.pop(action).wait().requires_grad_(links.gradient_out is not None)
        else:
            value = self.inputs(part.read)
        entry = value
        with model.reduction.forward(straight_to_last=straight_to_last), self.precision():
            value, sides = model.compute(value, self.samples[part.start : part.stop], self.step)
            if model.concludes:
                loss = self.loss_fn(model.traced.assemble(value, sides), self.labels(part.kept))
        if links.leaving is not None:
            links.leaving.tell_dtype(model.training, value.dtype, model.device)
            links.leaving.send(value, size)
            self.flights[action.microbatch] = _left(entry, value)
            return
        scale = model.loss_scale(size) * size / len(self.samples)
        self.loss += loss.detach().to(self.loss.dtype) * scale / model.layouts[-1].data
        self.flights[action.microbatch] = _Flight(entry, loss if scale == 1 else loss * scale)

    def _backward(self, action: Action, *, last: bool) -> None:
        model, links = self.model, self.model.links
        flight = self.flights.pop(action.microbatch)
        if links.gradient_in is not None:
            assert model.position.leaving is not None
            scale = model.position.leaving.gradient_scale
            gradient = self.coming.pop(action).wait()
            flight.arrived.append(gradient if scale == 1 else gradient * scale)
            del gradient
        if links.leaving is not None:
            # It has arrived by now, or is about to: what was sent need not be kept.
            links.leaving.settle(keep=len(self.flights))
        sent = self._send_when_known(flight.entry, self._size(action))
        with model.reduction.backward(last=last, in_flight=len(self.flights)):
            if flight.exit.requires_grad:
                flight.exit.backward()
        if links.gradient_out is not None:
            if not sent:
                links.gradient_out.send(torch.zeros_like(flight.entry), self._size(action))
            links.gradient_out.settle(keep=UNDER_WAY)

    def _send_when_known(self, entry: Tensor, size: int) -> list[Tensor]:
        """Have the gradient of what entered the stage sent as soon as it is there: a backward that reduces gradients
        ends when all of them are reduced, which no other stage need wait for. The list fills as it is sent."""
        sent: list[Tensor] = []
        out = self.model.links.gradient_out
        if out is not None:

            def send(gradient: Tensor) -> None:
                sent.append(gradient)
                out.send(gradient, size)

            entry.register_hook(send)
        return sent


def forward_backward(
    model: ParallelModel,
    samples: Tensor,
    step: int,
    inputs: Callable[[slice], Tensor],
    labels: Callable[[slice], Tensor],
    *,
    loss_fn: Callable[..., Tensor] = loss_of,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """Gradients of the mean loss over ``samples`` (global indices of the whole batch); this rank's addend of it.

    ``inputs`` (asked on the first stage) and ``labels`` (on the last) give tensors on the model's device for rows of
    the global batch. The addends of the ranks for which :meth:`ParallelModel.counts_rows` holds sum to the loss.
    ``precision`` makes the context of forward and loss (autocast).
    """
    found = _Step(
        model=model,
        samples=samples,
        step=step,
        inputs=inputs,
        labels=labels,
        loss_fn=loss_fn,
        precision=precision,
        rows=microbatch_rows(model, len(samples)),
        loss=torch.zeros((), dtype=torch.float64, device=model.device),
    )
    found.play()
    return found.loss
