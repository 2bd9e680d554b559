"""One training step up to the gradients: forward and backward of every microbatch, in the order of the plan's
schedule."""

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
from asa.instruments.execution import begin_step
from asa.interfaces.schedule import Action
from asa.ir.layout import bounds
from asa.ir.plan import Plan
from asa.ir.transfer import UNDER_WAY
from asa.launch import faults
from asa.sharding.collectives.transfer import Arrival


@dataclass(frozen=True)
class MicrobatchRows:
    """Rows of one microbatch in the global batch: all of them (``start`` to ``stop``), those that this rank reads, and
    those whose outputs it keeps.

    ``weight`` is the weight of the mean loss over those outputs in the loss that this rank differentiates.
    """

    start: int
    stop: int
    read: slice
    kept: slice
    weight: float

    @property
    def size(self) -> int:
        """Number of samples of the microbatch."""
        return self.stop - self.start


def microbatches_of(plan: Plan, batch: int, needs: int = 1) -> int:
    """Number of microbatches into which a batch of ``batch`` samples is cut. It is the plan's number, or less if the
    batch is too small to give every rank ``needs`` samples of each."""
    widest = max(layout.least for layout in plan.layouts())
    most = max(1, min(plan.num_microbatches, batch // widest))
    return next((m for m in range(most, 0, -1) if plan.fewest(batch, m) >= needs), most) if needs > 1 else most


@dataclass(frozen=True)
class _Turn:
    """An action, and the one after it. ``final`` says that no backward comes after this action."""

    action: Action
    following: Action | None
    final: bool


_Script = tuple[list[MicrobatchRows], tuple[_Turn, ...]]
"""A rank's rows and actions for batches of one size. They are the same in every step."""
_scripts: WeakKeyDictionary[ParallelModel, dict[int, _Script]] = WeakKeyDictionary()


def _script(model: ParallelModel, batch: int) -> _Script:
    scripts = _scripts.setdefault(model, {})
    if batch not in scripts:
        rows = _microbatch_rows(model, batch)
        scripts[batch] = rows, _turns(model.order(len(rows))) if rows else ()
    return scripts[batch]


def microbatch_rows(model: ParallelModel, batch: int) -> list[MicrobatchRows]:
    """This rank's rows of a global batch of ``batch`` samples, by microbatch. The list is cached; do not change it."""
    return _script(model, batch)[0]


def _microbatch_rows(model: ParallelModel, batch: int) -> list[MicrobatchRows]:
    parts = []
    count = microbatches_of(model.plan, batch, model.needs)
    for j in range(count):
        start, stop = bounds(batch, count, j)
        size = stop - start
        if size:
            read, counted = (slice(start + a, start + b) for a, b in (model.input_rows(size), model.output_rows(size)))
            parts.append(MicrobatchRows(start, stop, read, counted, model.loss_scale(size) * size / batch))
    return parts


def _turns(order: tuple[Action, ...]) -> tuple[_Turn, ...]:
    turns = []
    for i, action in enumerate(order):
        behind = order[i + 1 :]
        final = all(a.direction == "forward" for a in behind)
        turns.append(_Turn(action, behind[0] if behind else None, final))
    return tuple(turns)


class _StageExit(torch.autograd.Function):
    """Marks where a value left the stage. Backward starts here, with the gradient popped from ``arrived``.

    It keeps neither the gradient nor the value. Both would otherwise live until the stage's whole backward is over.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, arrived: list[Tensor]) -> Tensor:
        ctx.arrived = arrived
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.arrived.pop(), None


@dataclass(frozen=True)
class _Flight:
    """A microbatch between its forward and its backward.

    ``entry`` is where gradients leave the stage, ``exit`` where they enter. Between stages, ``shape`` and ``dtype`` are
    those of the gradient, and ``arrived`` is the list that receives it.
    """

    entry: Any
    exit: Tensor
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    arrived: list[Tensor] = field(default_factory=list)


def _flight_of(entry: Tensor, value: Tensor) -> _Flight:
    """Make the :class:`_Flight` of a microbatch whose output ``value`` has left the stage."""
    arrived: list[Tensor] = []
    end = _StageExit.apply(value, arrived) if value.requires_grad else value.new_zeros(())
    return _Flight(entry, end, tuple(value.shape[1:]), value.dtype, arrived)


@dataclass(kw_only=True)
class Step:
    """One step as a rank runs it. ``losses`` are the mean loss of every microbatch, with its weight."""

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
    unfinished: list[Step] = field(default_factory=list)
    """Steps in flight at the same time, including this one, if the pipeline is not drained between them."""

    def play(self, turns: tuple[_Turn, ...]) -> None:
        """Run all actions in order. During one of them, the data for the next is already being received."""
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
        self.model.links.finish_sends()

    @property
    def loss(self) -> Tensor:
        """This rank's addend of the mean loss over the batch, float64 scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for loss, weight in self.losses:
            total += loss.to(total.dtype) * weight / self.model.layouts[-1].data
        return total

    @property
    def _in_flight(self) -> int:
        return sum(len(s.flights) for s in self.unfinished or (self,))

    def expect(self, action: Action) -> None:
        """Start to receive the input of ``action``, if it comes from another stage and its shape is known."""
        model, links, j = self.model, self.model.links, action.microbatch
        if action.direction == "forward":
            if links.arriving is not None and j not in self.coming:
                dtype = links.arriving.hear_dtype(model.training, model.device)
                size = self.rows[j].size
                self.coming[j] = links.arriving.receive(size, links.input_shape, dtype, model.device)
        elif links.gradient_in is not None and j in self.flights and j not in self.gradients:
            flight, size = self.flights[j], self.rows[j].size
            self.gradients[j] = links.gradient_in.receive(size, flight.shape, flight.dtype, model.device)

    def forward(self, j: int) -> None:
        """Run microbatch ``j`` forward, and send its output to the next stage or compute its loss."""
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
            self.flights[j] = _flight_of(entry, value)
            return
        self.losses.append((loss.detach(), part.weight))
        self.flights[j] = _Flight(entry, loss if part.weight == 1 else loss * part.weight)

    def backward(self, j: int, *, last: bool) -> None:
        """Run microbatch ``j`` backward. ``last`` says whether this is the step's last backward."""
        model, links = self.model, self.model.links
        flight, size = self.flights.pop(j), self.rows[j].size
        if links.gradient_in is not None:
            assert model.position.leaving is not None
            scale = model.position.leaving.gradient_scale
            gradient = self.gradients.pop(j).wait()
            flight.arrived.append(gradient if scale == 1 else gradient * scale)
            del gradient
        if links.leaving is not None:
            # The last transfer has arrived or soon will, so its buffer need not be kept.
            links.leaving.finish_sends(keep=self._in_flight)
        sent = self._send_when_computed(flight.entry, size)
        with model.reduction.backward(last=last, in_flight=self._in_flight):
            if flight.exit.requires_grad:
                flight.exit.backward()
        if links.gradient_out is not None:
            if not sent:
                links.gradient_out.send(torch.zeros_like(flight.entry), size)
            links.gradient_out.finish_sends(keep=UNDER_WAY)

    def _send_when_computed(self, entry: Tensor, size: int) -> list[Tensor]:
        """Send the gradient of the stage's input as soon as autograd has computed it. Returns a list that is filled
        when it is sent.

        A backward that reduces gradients ends only after the reduction, and no other stage needs to wait for that.
        """
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
    """Run a step up to its gradients, which are those of the mean loss over ``samples`` (global indices of the whole
    batch).

    ``inputs`` (called on the first stage) and ``labels`` (on the last) return tensors on the model's device for rows of
    the global batch. The losses of the ranks with :attr:`ParallelModel.counts_rows` sum to the loss. ``precision``
    makes the context of forward and loss (autocast).
    """
    rows, turns = _script(model, len(samples))
    begin_step()
    running = Step(
        model=model, samples=samples, step=step, inputs=inputs, labels=labels, loss_fn=loss_fn, precision=precision,
        rows=rows,
    )  # fmt: skip
    running.play(turns)
    return running
