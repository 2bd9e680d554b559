"""One training step up to the gradients: every microbatch forward and back, in the order of the plan's schedule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asa.executor.model.loss import loss_of
from asa.executor.model.parallel import ParallelModel
from asa.interfaces.schedule import Action
from asa.ir.layout import bounds
from asa.ir.plan import Plan
from asa.ir.transfer import UNDER_WAY
from asa.launch import faults
from asa.sharding.transfer import Arrival


@dataclass(frozen=True)
class MicrobatchRows:
    """Rows of the global batch: a whole microbatch, what this rank reads of it, and whose outputs it ends up with.
    ``weight``: of the mean loss over those outputs in what this rank differentiates."""

    start: int
    stop: int
    read: slice
    kept: slice
    weight: float

    @property
    def size(self) -> int:
        """Samples of the microbatch."""
        return self.stop - self.start


def microbatches_of(plan: Plan, batch: int) -> int:
    """Into how many microbatches a batch is cut: the plan's number, fewer of a batch too small to give every rank a
    sample of each."""
    widest = max(layout.least for layout in plan.layouts())
    return max(1, min(plan.num_microbatches, batch // widest))


@dataclass(frozen=True)
class _Turn:
    """An action and what follows it. ``final``: a backward behind which there is no other."""

    action: Action
    following: Action | None
    final: bool


@dataclass(frozen=True)
class _Script:
    """What a rank does with a batch of some size, in every step the same."""

    rows: list[MicrobatchRows]
    turns: tuple[_Turn, ...]


_scripts: WeakKeyDictionary[ParallelModel, dict[int, _Script]] = WeakKeyDictionary()


def _script(model: ParallelModel, batch: int) -> _Script:
    known = _scripts.setdefault(model, {})
    found = known.get(batch)
    if found is None:
        rows = _microbatch_rows(model, batch)
        found = known[batch] = _Script(rows, _turns(model.order(len(rows))) if rows else ())
    return found


def microbatch_rows(model: ParallelModel, batch: int) -> list[MicrobatchRows]:
    """This rank's rows of a global batch of ``batch`` samples, microbatch by microbatch. Not to be changed."""
    return _script(model, batch).rows


def _microbatch_rows(model: ParallelModel, batch: int) -> list[MicrobatchRows]:
    found = []
    count = microbatches_of(model.plan, batch)
    for j in range(count):
        start, stop = bounds(batch, count, j)
        size = stop - start
        if size:
            read, kept = (slice(start + a, start + b) for a, b in (model.input_rows(size), model.output_rows(size)))
            found.append(MicrobatchRows(start, stop, read, kept, model.loss_scale(size) * size / batch))
    return found


def _turns(order: tuple[Action, ...]) -> tuple[_Turn, ...]:
    found = []
    for i, action in enumerate(order):
        behind = order[i + 1 :]
        final = all(a.direction == "forward" for a in behind)
        found.append(_Turn(action, behind[0] if behind else None, final))
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

    entry: Any
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
class Step:
    """A step as one rank plays it. ``losses``: the mean of every microbatch, and what it weighs."""

    model: ParallelModel
    samples: Tensor
    step: int
    inputs: Callable[[slice], Any]
    labels: Callable[[slice], Tensor]
    rows: list[MicrobatchRows]
    loss_fn: Callable[..., Tensor] = loss_of
    precision: Callable[[], AbstractContextManager[object]] = nullcontext
    losses: list[tuple[Tensor, float]] = field(default_factory=list)
    flights: dict[int, _Flight] = field(default_factory=dict)
    coming: dict[int, Arrival] = field(default_factory=dict)
    gradients: dict[int, Arrival] = field(default_factory=dict)
    beside: list[Step] = field(default_factory=list)
    """Steps that are under way at once, this one among them, where a pipeline is not drained between them."""

    def play(self, turns: tuple[_Turn, ...]) -> None:
        """Every action of the order. What the next one waits for is on its way while this one computes."""
        linked = self.model.links.linked
        if turns and self.model.links.arriving is not None:
            self.model.reduction.gather()
        for turn in turns:
            action = turn.action
            if linked:
                self.expect(action)
                if turn.following is not None:
                    self.expect(turn.following)
            faults.reached(action.direction)
            if action.direction == "forward":
                self.forward(action.microbatch)
            else:
                self.backward(action.microbatch, last=turn.final)
        self.model.links.settle()

    @property
    def loss(self) -> Tensor:
        """This rank's addend of the mean loss over the batch, float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for loss, weight in self.losses:
            total += loss.to(total.dtype) * weight / self.model.layouts[-1].data
        return total

    @property
    def _in_flight(self) -> int:
        return sum(len(s.flights) for s in self.beside or (self,))

    def expect(self, action: Action) -> None:
        """Begin to receive what ``action`` starts from, if that comes from another stage and its form is known."""
        model, links, j = self.model, self.model.links, action.microbatch
        if action.direction == "forward":
            if links.arriving is not None and j not in self.coming:
                dtype = links.arriving.hear_dtype(model.training, model.device)
                size = self.rows[j].size
                self.coming[j] = links.arriving.receive(size, links.input_shape, dtype, model.device)
        elif links.gradient_in is not None and j in self.flights and j not in self.gradients:
            left, size = self.flights[j], self.rows[j].size
            self.gradients[j] = links.gradient_in.receive(size, left.shape, left.dtype, model.device)

    def forward(self, j: int) -> None:
        """Compute microbatch ``j`` and hand it on, or take its loss."""
        model, links, part = self.model, self.model.links, self.rows[j]
        if links.arriving is not None:
            value = self.coming.pop(j).wait().requires_grad_(links.gradient_out is not None)
        else:
            value = self.inputs(part.read)
        entry = value
        with self.precision():
            value, sides = model.compute(value, self.samples[part.start : part.stop], self.step)
            if links.leaving is None:
                loss = self.loss_fn(model.traced.assemble(value, sides), self.labels(part.kept))
        if links.leaving is not None:
            links.leaving.tell_dtype(model.training, value.dtype, model.device)
            links.leaving.send(value, part.size)
            self.flights[j] = _left(entry, value)
            return
        self.losses.append((loss.detach(), part.weight))
        self.flights[j] = _Flight(entry, loss if part.weight == 1 else loss * part.weight)

    def backward(self, j: int, *, last: bool) -> None:
        """Go back through microbatch ``j``, which went forward; ``last``: it is the step's last to do so."""
        model, links = self.model, self.model.links
        flight, size = self.flights.pop(j), self.rows[j].size
        if links.gradient_in is not None:
            assert model.position.leaving is not None
            scale = model.position.leaving.gradient_scale
            gradient = self.gradients.pop(j).wait()
            flight.arrived.append(gradient if scale == 1 else gradient * scale)
            del gradient
        if links.leaving is not None:
            # It has arrived by now, or is about to: what was sent need not be kept.
            links.leaving.settle(keep=self._in_flight)
        sent = self._send_when_known(flight.entry, size)
        with model.reduction.backward(last=last, in_flight=self._in_flight):
            if flight.exit.requires_grad:
                flight.exit.backward()
        if links.gradient_out is not None:
            if not sent:
                links.gradient_out.send(torch.zeros_like(flight.entry), size)
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


def played(
    model: ParallelModel,
    samples: Tensor,
    step: int,
    inputs: Callable[[slice], Any],
    labels: Callable[[slice], Tensor],
    *,
    loss_fn: Callable[..., Tensor] = loss_of,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """A step, to its gradients: those of the mean loss over ``samples`` (global indices of the whole batch).

    ``inputs`` (asked on the first stage) and ``labels`` (on the last) give tensors on the model's device for rows of
    the global batch. The losses of the ranks for which :meth:`ParallelModel.counts_rows` holds sum to the loss.
    ``precision`` makes the context of forward and loss (autocast).
    """
    script = _script(model, len(samples))
    found = Step(
        model=model, samples=samples, step=step, inputs=inputs, labels=labels, loss_fn=loss_fn, precision=precision,
        rows=script.rows,
    )  # fmt: skip
    found.play(script.turns)
    return found


def forward_backward(
    model: ParallelModel,
    samples: Tensor,
    step: int,
    inputs: Callable[[slice], Any],
    labels: Callable[[slice], Tensor],
    *,
    loss_fn: Callable[..., Tensor] = loss_of,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """:func:`played`, and this rank's addend of the loss."""
    return played(model, samples, step, inputs, labels, loss_fn=loss_fn, precision=precision).loss
