"""The loss of a job over microbatches and ranks: known denominators are summed, other losses are tested once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from asa.api.losses.bends import masks_by, sides_of
from asa.api.losses.tape import MOST_BYTES
from asa.api.losses.terms import denominator_of_sum
from asa.api.losses.trial import percent, tolerance
from asa.api.messages import say
from asa.api.rank_context import RankContext
from asa.errors import UsageError, WorkersFailedError
from asa.tracing.whole import tensors_of

LossWeight = Callable[[Any], Tensor | float] | Literal["sum"] | None
_EPOCHS, _STEPS = 3, 3
"""Number of epochs, and of first steps in each, in which the loss of the whole batch is computed for comparison. On a
single batch the two losses may agree by chance."""


class JobLoss:
    """``loss_fn``, computed by microbatches. ``weight``: function from the labels to the denominator of a mean loss;
    ``sum`` if the loss is a sum; None for a mean over samples, or for a cross-entropy, whose denominator is known."""

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], weight: LossWeight, context: RankContext) -> None:
        if weight is not None and weight != "sum" and not callable(weight):
            raise UsageError(f"weight is {weight!r}: a function of the labels, or 'sum'")
        self._loss_fn, self._weight, self._context, self._votes = loss_fn, weight, context, context.votes
        self._counting: bool | None = None if weight is None else True
        self.tried = self._warned = self._reported = self._bent = False
        self._sides: set[tuple[int, ...]] = set()
        self._own_sides: set[tuple[int, ...]] = set()
        """On which sides of its bends the loss was when it was compared: of all, and of those without masks."""
        self._epochs = self._steps = 0
        self._sum = 0.0
        self._recorded: list[tuple[Any, Any]] = []
        self.rows = 0
        """Number of samples in the microbatch whose loss comes next."""

    def begin(self) -> None:
        """Begin a step."""
        self._sum = 0.0
        self._recorded.clear()

    def __call__(self, output: Any, labels: Any, counts: bool) -> Tensor:
        """The loss of a microbatch, as a mean over its samples. ``counts``: whether this rank is the one that counts
        these rows."""
        loss = self._loss_fn(output, labels)
        if not self.tried:
            self._recorded.append(pytree.tree_map(_detached, (output, labels)))
        self._look_at_bends(loss, output, labels)
        if self._weight == "sum":
            return loss / max(1, self.rows)
        denominator = self._denominator(loss, labels)
        if denominator is None:
            return loss
        if self._counting is False:
            if denominator != self.rows and not self._warned:
                self._warned = True
                warnings.warn(
                    "targets are ignored by the loss, or weighed, for the first time now: microbatches and ranks count "
                    "by their samples, which one device would not do; say weight=, a function of the labels",
                    stacklevel=4,
                )
            return loss
        self._sum += denominator if counts else 0.0
        if not denominator:  # a mean over no samples is 0/0 and does not contribute to the batch
            return torch.nan_to_num(loss) * 0.0
        return loss if denominator == self.rows else loss * (denominator / max(1, self.rows))

    def _look_at_bends(self, loss: Tensor, output: Any, labels: Any) -> None:
        """Warn once if the loss bends a mean on another side than where it was compared."""
        if self._bent or not loss.requires_grad:
            return
        outputs = tensors_of(output)
        sides = sides_of(loss, outputs)
        if not self.tried:
            self._sides.add(sides)
            self._own_sides.add(sides_of(loss, outputs, masks=False))
        elif sides not in self._sides:
            self._sides.add(sides)
            own = sides_of(loss, outputs, masks=False)
            # A weight that has become 0 or 1 by a schedule is no mask of the outputs.
            self._bent = own not in self._own_sides or masks_by(copied(self._loss_fn), output, labels)
        if self._bent:
            warnings.warn(
                "the loss bends a mean (its absolute value, a clamp, the larger of two), and is now on another side of "
                "the bend than in the steps in which it was compared: microbatches and ranks bend means of their own "
                "samples, and one device that of all; bend each sample's loss, or use a plan of one rank and one "
                "microbatch",
                stacklevel=5,
            )

    def _denominator(self, loss: Tensor, labels: Any) -> float | None:
        """What a mean ``loss`` was divided by; None for its number of samples."""
        return float(self._weight(labels)) if callable(self._weight) else denominator_of_sum(loss)

    def weighed(self, output: Any, labels: Any, rows: int) -> tuple[float, float]:
        """The loss of ``rows`` samples without training, times its denominator, and the denominator."""
        with torch.enable_grad():  # autograd's node of a cross-entropy contains its denominator
            for leaf in tensors_of(output):
                if leaf.is_leaf and leaf.is_floating_point() and self._weight is None:
                    leaf.requires_grad_()
            loss = self._loss_fn(output, labels)
        if self._weight == "sum":
            return float(loss.detach()), float(rows)
        denominator = self._denominator(loss, labels)
        weight = float(rows) if denominator is None else denominator
        return (float(loss.detach()) * weight if weight else 0.0), weight

    def factor(self, batch: int) -> float:
        """Factor for the gradients and the loss of a step over ``batch`` samples (collective)."""
        if self._weight == "sum":
            return float(batch)
        if self._counting is False:
            return 1.0
        total = sum(s[0] for s in self._votes.gather([self._sum]))
        if self._counting is None:
            self._counting = total not in (0.0, float(batch))
        return batch / total if total else 1.0

    def checked(self, loss: float, counts: bool, dtype: torch.dtype) -> None:
        """Compare ``loss``, the mean over a step's samples combined from its parts, and the gradients of the outputs
        with those of the whole batch (collective, in the first steps of the first epochs).

        Raises:
            UsageError: they differ in the first step.
        """
        if self.tried:
            return
        first = not self._epochs and not self._steps
        self._steps += 1
        self.tried = self._steps >= _STEPS
        try:
            result, why = self._whole_batch_loss(counts)
        except WorkersFailedError as error:
            if not error.lost or error.rank == self._context.rank:
                raise
            result, why = None, str(error)  # the others continue without it
        self._recorded.clear()
        if result is None or result[0] != result[0]:
            if not self._reported:
                say(
                    self._context,
                    f"whether the loss is a mean over samples was not checked: {why or 'it is no number'}",
                )
            self._reported = True
            return
        whole_loss, gradients = result
        off = abs(whole_loss - loss) / max(abs(whole_loss), abs(loss), 1e-30)
        if max(off, gradients) <= tolerance(dtype):
            return
        text = (
            f"the loss is not a mean over samples: over the whole batch it is {whole_loss:.6g}, put together from "
            f"microbatches and ranks it would be {loss:.6g} ({percent(off)} apart), and gradients of the outputs "
            f"differ by {percent(gradients)}; say weight=, a function of the labels that gives what the mean divides "
            "by, or weight='sum'; a loss that compares samples needs a plan of one rank and one microbatch, and a sum "
            "of losses that divide by different targets is right under asa.parallelize"
        )
        if first:
            raise UsageError(text)
        self.tried, self._epochs = True, _EPOCHS
        warnings.warn(text, stacklevel=4)

    def check_again(self) -> None:
        """Check again in a new epoch, because a loss may change between epochs."""
        if self._steps:
            self._epochs, self._steps = self._epochs + 1, 0
        self.tried = self._epochs >= _EPOCHS

    @property
    def state(self) -> list[Any]:
        """What a rank that comes late needs to know, as a JSON value: how losses are divided and what was checked."""
        return [self._counting, self.tried, self._epochs, self._steps]

    def adopt(self, state: list[Any]) -> None:
        """Continue from the :attr:`state` of another rank."""
        self._counting, self.tried, self._epochs, self._steps = state

    def _whole_batch_loss(self, counts: bool) -> tuple[tuple[float, float] | None, str]:
        """The loss of the whole batch and the distance of its gradients from those of the parts; or why they are
        unknown."""
        votes = self._votes
        local = self._recorded if counts else []
        flat = [pytree.tree_flatten(one) for one in local]
        leaves = [[leaf for leaf in one if isinstance(leaf, Tensor)] for one, _ in flat]
        size = sum(t.nbytes for one in leaves for t in one)
        if sum(s[0] for s in votes.gather([float(size)])) > MOST_BYTES:
            return None, "its whole batch has too many outputs"
        if len(votes.live) < votes.num_ranks:
            return None, "a rank is lost"
        specs: list[list[list[Any]]] = []
        parts: list[list[Tensor]] = []
        for rank in range(votes.num_ranks):
            descriptions = [[[str(t.dtype)[6:], list(t.shape)] for t in one] for one in leaves]
            spec = votes.tell(descriptions, source=rank)
            specs += spec
            for i, one in enumerate(spec):
                row = []
                for k, (kind, shape) in enumerate(one):
                    tensor = torch.empty(shape, dtype=getattr(torch, kind))
                    if rank == votes.rank:
                        tensor.copy_(leaves[i][k])
                    votes.broadcast(tensor, source=rank)
                    row.append(tensor)
                parts.append(row)
        first = next((r for r, s in enumerate(votes.gather([float(bool(local))])) if s[0]), None)
        if first is None or len({len(one) for one in specs}) > 1:
            return None, "ranks have outputs of different forms"
        value: tuple[float, float] | None = None
        why = ""
        if votes.rank == first:
            loss_fn = copied(self._loss_fn) or self._loss_fn
            try:
                value = self._by_parts(loss_fn, parts, flat[0][1], flat[0][0], leaves[0][0].device)
            except Exception as error:  # a loss that cannot take more samples than a microbatch has
                why = f"it does not take the whole batch ({type(error).__name__}: {str(error)[:80]})"
        answer, why = votes.tell([value, why], source=first)
        return (None if answer is None else (float(answer[0]), float(answer[1]))), str(why)

    def _by_parts(
        self, loss_fn: Any, parts: list[list[Tensor]], structure: Any, like: list[Any], device: torch.device
    ) -> tuple[float, float]:
        """The loss over all ``parts`` together, and the distance of the outputs' gradients from those of the parts."""

        def computed(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor], float]:
            values = iter([t.to(device) for t in tensors])
            output, labels = pytree.tree_unflatten(
                [next(values) if isinstance(v, Tensor) else v for v in like], structure
            )
            outputs = [t for t in tensors_of(output) if t.is_floating_point()]
            for t in outputs:
                t.requires_grad_()
            with torch.enable_grad():
                loss = loss_fn(output, labels)
                divided = 1.0 if self._weight == "sum" else self._denominator(loss, labels)
                slopes = torch.autograd.grad(loss, outputs, allow_unused=True) if loss.requires_grad else ()
            rows = float(len(outputs[0])) if outputs and outputs[0].dim() else 1.0
            gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(outputs, slopes, strict=False)]
            return loss, gradients, rows if divided is None else divided

        fresh = [[t.clone() for t in row] for row in parts]
        value, slopes, _ = computed([_joined([row[k] for row in fresh]) for k in range(len(fresh[0]))])
        gradients, weights = zip(*(computed(row)[1:] for row in fresh), strict=True)
        total = 1.0 if self._weight == "sum" else sum(weights) or 1.0
        off = size = 0.0
        for k, expected in enumerate(slopes):
            combined = [slopes_of_part[k] * (w / total) for slopes_of_part, w in zip(gradients, weights, strict=True)]
            if not expected.dim() or sum(map(len, combined)) != len(expected):
                continue
            off += float((torch.nan_to_num(torch.cat(combined)) - expected).double().square().sum())
            size += float(expected.double().square().sum())
        return float(value.detach()), (off / size) ** 0.5 if size else 0.0


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts[0].dim() else parts[0]


def copied(loss_fn: Any) -> Any:
    """A copy of the loss, with its internal state or closure, so that the original does not change; None if it cannot
    be copied."""
    try:
        if isinstance(loss_fn, FunctionType) and loss_fn.__closure__:
            cells = copy.deepcopy([cell.cell_contents for cell in loss_fn.__closure__])
            return FunctionType(
                loss_fn.__code__, loss_fn.__globals__, loss_fn.__name__, loss_fn.__defaults__,
                tuple(map(CellType, cells)),
            )  # fmt: skip
        return copy.deepcopy(loss_fn)
    except Exception:
        return None


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
