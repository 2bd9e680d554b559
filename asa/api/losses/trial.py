"""Compares a loop's losses with those of one device, for the first occurrences of each form of loss."""

from __future__ import annotations

import itertools
import math
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from asa.api.losses.comparison import Comparison, Difference
from asa.api.losses.tape import Readings, Tape, Watched, functions_followed, of_this_rank, watched_in
from asa.api.messages import say
from asa.api.steps.batches import Share
from asa.api.steps.distributed_model_base import DistributedModelBase
from asa.api.steps.in_step import DECISION, REMEDY
from asa.errors import UsageError
from asa.ir.layout import bounds
from asa.sharding.split.local_parts import local

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_WINDOW, _TIMES, _MOST_COMPARED, _MOST_UNFINISHED = 12, 3, 18, 64
"""Number of backwards checked after the last new form of a loss; number of batches on which each form is compared (on
one, it may agree by chance); largest number of comparisons; largest number of outputs followed without a backward."""
_MOST_RESTARTS = 8
"""Largest number of times that checking starts again because of a new form of loss."""
_SMALL = 8
"""Number of samples per rank below which every loss is checked, if batches usually have more."""
_TRUSTED = "trusted"


class Trial:
    """Checks the losses of a distributed model. All ranks check the same backwards, and agree on what to do."""

    def __init__(self, model: DistributedModelBase) -> None:
        self._model, self._ranks = ref(model), model.rank_context.ranks
        self._remaining = _WINDOW
        self._occurrences: Counter[tuple[float, ...]] = Counter()
        self._sized: set[tuple[tuple[float, ...], tuple[Any, ...]]] = set()
        self._reported_forms: set[tuple[float, ...]] = set()
        self._sizes: set[int] = set()
        self._total = 0
        self._unusual_size = False
        """Whether the batch is small, or of a size for which no loss was compared (equal on all ranks)."""
        self._compared = self._unfinished = 0
        self._reported_reasons: set[str] = set()
        self._hooks = self._warned_of_sizes = self._said_of_counts = self._said_of_places = False
        self._cut_at = 0
        """Number of samples of the first batch by which a tensor from beside it was cut."""
        self._readings = Readings(self._say_of_values, self._name_of, self._say_of_written, self._decide)
        self._given = False
        self._tape: Tape | None = None
        self._graphs: set[int] = set()
        self._restarts = 0
        self.sized = False
        """Whether the program did something else with the number of samples than to make a shape of it."""
        self.asks = False
        """Whether a loss of a new form has occurred that was not checked."""
        self.trusted = False
        """Whether the program itself weights its loss in the next backward."""

    def note(self, graph: int) -> None:
        """Record that a backward through a ``graph`` follows. If its form is new, all ranks check it when it occurs
        again. They are told after the batch."""
        if self.watching:
            self._graphs.add(graph)
        elif graph not in self._graphs:
            self.asks = True

    def check_again(self) -> None:
        """Check the next backwards, because a rank requested it (called on all ranks); up to a limit."""
        self.asks = False
        if self._restarts < _MOST_RESTARTS:
            self._restarts += 1
            self._remaining = max(self._remaining, _WINDOW)
        elif self._restarts == _MOST_RESTARTS:
            self._restarts += 1
            self._report(Difference(unknown="its form keeps changing"), torch.float32, self._model())

    @property
    def watching(self) -> bool:
        """Whether the next backward is checked. Batches are recorded for ever if the program decides by all samples."""
        looks = (self._remaining > 0 or self._unusual_size) and self._unfinished < _MOST_UNFINISHED
        return looks or self._readings.deciding

    def epoch_began(self) -> None:
        """Check again, because a program may have another loss in another epoch."""
        if self._compared < _MOST_COMPARED:
            self._remaining = max(self._remaining, 2)
            # Once more in every epoch: what a loop keeps for each sample may differ between ranks from then on.
            self._occurrences = Counter({form: min(n, _TIMES - 1) for form, n in self._occurrences.items()})
        self._unfinished = 0

    def begin(self, batch: Any, share: Share) -> Any:
        """A batch of the loader, recorded until the next one. This rank has the ``share`` of it."""
        self._close()
        rows = len(share.rows)
        self._total, small = share.total, _SMALL * self._ranks
        self._unusual_size = share.total not in self._sizes or share.total < min(small, max(self._sizes))
        if not self.watching or not rows:
            functions_followed(False)
            return batch
        functions_followed(True)
        model = self._model()
        leave = model.in_step.leave if model is not None and model.in_step is not None else _do_nothing
        self._tape = Tape(rows, share.total, leave, readings=self._readings)
        return self._tape.begin(batch)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded: the batch's tensors behave like any others."""
        tape = self._tape
        if tape is None:
            yield
            return
        problem, tape.problem = tape.problem, "something else is looked at"
        try:
            yield
        finally:
            tape.problem = problem

    def handed(self, inputs: Any) -> Any:
        """The model's inputs as plain tensors."""
        self._given = next(watched_in(inputs), None) is not None
        return (self._tape or Tape(0)).handed(inputs)

    def follow(self, output: Tensor, rows: int) -> Tensor:
        """``output``, recorded until its loss is differentiated. Without gradients it is known to be of this rank's
        samples, if its inputs are the loader's."""
        if self._given and self.watching and self._tape is not None and not output.requires_grad:
            tape = self._tape
            if type(output) is Tensor and output.is_floating_point() and tape.rows == rows and not tape.problem:
                return tape.see(output)
            watched: Tensor = of_this_rank(output, self._readings)
            return watched
        if not self.watching or not output.requires_grad or not output.is_floating_point():
            return output
        self._unfinished += 1
        if self._tape is None:
            functions_followed(True)
            self._tape = Tape(rows, readings=self._readings)
        if self._tape.rows != rows:
            self._tape.problem = self._tape.problem or "the model is called with other samples than those of a batch"
        return output if self._tape.problem else self._tape.follow(output)

    def around(
        self, loss: Tensor, backward: Callable[[], None], problem: str = "", sides: tuple[int, ...] = ()
    ) -> None:
        """Run ``backward`` of ``loss``, and compare the loss if its form is new (collective). ``problem`` says why it
        cannot be compared; ``sides``, on which sides of its bends numbers of the batch are."""
        model = self._model()
        if model is None or not self.watching:
            if self._remaining > 0 and self._unfinished >= _MOST_UNFINISHED:
                unseen = f"of more than {_MOST_UNFINISHED} calls of the model before it, none had a backward"
                self._report(Difference(unknown=unseen), loss.dtype, model)
                self._unfinished = 0
            backward()
            return
        self._remaining = max(0, self._remaining - 1)
        self._unfinished = 0
        self._hooks = self._hooks or _look_for_hooks(model)
        tape = loss.tape if isinstance(loss, Watched) and hasattr(loss, "tape") else None
        if tape is not None:
            tape.problem = tape.problem or problem
        if self._tape is not None and self._tape.hooked and not self._hooks:
            self._hooks = True
            warnings.warn(f"an output of the model has a hook on its gradient, {_HOOK_WARNING}", stacklevel=5)
        form = "" if tape is None or problem else tape.form(loss)
        why = problem or ("" if self._tape is None else self._tape.problem) if tape is None else tape.why_not(loss)
        form, self.trusted = form or (_TRUSTED if self.trusted else ""), False
        number = float(zlib.crc32(form.encode())) if form else 0.0
        at = -1.0 if model.share is None else float(model.share.first)
        side = float(zlib.crc32(repr(sides).encode()))
        every = model.rank_context.votes.gather([number, model.mean_weight, at, float(model.mean_rows), side])
        if len({f[2] for f in every}) > 1:
            raise UsageError(
                f"ranks compute gradients of different batches (from sample {', '.join(f'{f[2]:.0f}' for f in every)} "
                f"on): {REMEDY}"
            )
        forms = tuple(f[0] for f in every)
        sized = forms, tuple(tuple(f[3:]) for f in every)
        repeated = self._occurrences[forms] >= _TIMES
        new = (
            (not repeated or sized not in self._sized)
            and self._compared < _MOST_COMPARED
            and forms not in self._reported_forms
        )
        self._sized.add(sized)
        self._sizes.add(self._total)
        if self._compared >= _MOST_COMPARED and not self._occurrences[forms]:
            self._report(Difference(unknown="it has more forms than are compared"), loss.dtype, model)
        if not self._occurrences[forms]:
            self._remaining = max(self._remaining, _WINDOW)
        self._occurrences[forms] += 1
        if not new or form == _TRUSTED or tape is None or len(set(forms)) > 1 or not form:
            backward()
            if new and not repeated and set(forms) != {float(zlib.crc32(_TRUSTED.encode()))}:
                unlike = "ranks compute it in different ways" if all(forms) and len(set(forms)) > 1 else ""
                self._report(Difference(unknown=why or unlike or "it cannot be followed"), loss.dtype, model)
        else:
            self._compared += 1
            least = max(f[0] for f in model.rank_context.votes.gather([float(tape.fewest(loss))]))
            model.least[:] = [max(*model.least, int(least))]
            comparison = Comparison(model.rank_context.votes, tape, loss, model.mean_weight)
            tape.received.clear()
            backward()
            compared = comparison.difference([tape.received.get(i) for i in range(len(tape.outputs))])
            if repeated:
                compared = replace(compared, unknown="", doubt="")
            told = self._report(compared, loss.dtype, model, rounding_of(tape.outputs))
            if told and (not compared.unknown or self._occurrences[forms] >= _TIMES):  # the cause may show later
                self._reported_forms.add(forms)
        self._stop_if_finished()

    def batch_over(self) -> None:
        """Record that a batch of the loader is over."""
        self._close()

    def note_number(self) -> None:
        """Say once that a number of this rank's samples is known outside of torch."""
        self._readings.note()

    def by_samples(self, share: Share, *, learned: bool) -> None:
        """Say, once per batch, that the program may take another path with this rank's ``share`` of it than on one
        device. ``learned`` says whether the batch had a backward."""
        num_samples, model = len(share.rows), self._model()
        tape = self._tape
        sized = self.sized or (tape is not None and tape.size_used)
        if tape is not None and tape.size_read and not self._said_of_counts and 1 < num_samples < share.total:
            self._said_of_counts = not tape.computes_with_rows()
            if self._said_of_counts and model is not None:
                say(model.rank_context, f"the program asks how many samples a batch has, and gets {num_samples} of "
                    f"{share.total}, this rank's: what it counts or sets by that (samples seen, a rate, an interval) "
                    "is other than on one device; asa.reduce(len(x), 'sum') is the number of all")  # fmt: skip
        if tape is not None and tape.cuts_kept and model is not None:
            self._cut_at = self._cut_at or share.total
            places = {
                tuple(bounds(n, self._ranks, r)[0] for r in range(self._ranks)) for n in (self._cut_at, share.total)
            }
            if len(places) > 1 and not self._said_of_places:
                self._said_of_places = True
                say(model.rank_context, "the program cuts a tensor from beside the batch by the number of samples "
                    f"(kept[:len(x)]), and in a batch of {share.total} ranks begin at other places than in one of "
                    f"{self._cut_at}: a rank's rows of it are those of other samples than on one device")  # fmt: skip
        if (
            self._warned_of_sizes
            or model is None
            or not sized
            or num_samples >= share.total
            or (learned and num_samples > 1)
        ):
            return
        self._warned_of_sizes = True
        say(model.rank_context, f"a batch of {share.total} samples "
            f"{'is one a rank' if learned else 'had no backward'}, and the program asks how many there are: what it "
            f"makes of that (len(x) > 1, loss * len(x)) one device makes of {share.total}, and this rank of its "
            f"{num_samples}")  # fmt: skip

    def _close(self) -> None:
        """Stop recording. Tensors of the batch behave like any others from here on."""
        if self._tape is not None:
            self._tape.closed = True
            self.sized = self.sized or self._tape.size_used
            self._tape = None

    def _decide(self, value: bool, every: bool) -> bool:
        """Whether ``value`` is true on every rank, or on any (collective): one device would ask all samples of the
        batch, and all ranks have to make the same calls."""
        model = self._model()
        if model is None or model.in_step is None:
            return value
        self._readings.deciding = True
        answers = [answer > 0 for (answer,) in model.in_step.figures(DECISION, [float(value)])]
        return all(answers) if every else any(answers)

    def _say_of_values(self) -> None:
        model = self._model()
        if model is not None:
            say(model.rank_context, "a number that is taken out of a tensor (loss.item(), answers as an array), or "
                "that the model returns, is of this rank's samples; asa.reduce(loss) is of the whole batch, by which "
                "a loop that branches is to decide")  # fmt: skip

    def _name_of(self, tensor: Tensor) -> str:
        """The name of the model's tensor in whose memory ``tensor`` is; empty if it is in none."""
        model = self._model()
        if model is None:
            return ""
        where = _memory(tensor)
        for name, held in itertools.chain(model.named_parameters(), model.named_buffers()):
            if where == _memory(held):
                return name
            if held.grad is not None and where == _memory(held.grad):
                return f"the gradient of {name}"
        return ""

    def _say_of_written(self, name: str) -> None:
        warnings.warn(
            f"{name} is changed in the loop by numbers of this rank's samples (a loss, an answer, a product of them), "
            "and on other ranks by those of theirs: one device has one number of all; make it one of all ranks, "
            "asa.reduce(x) or asa.gather(x)",
            stacklevel=6,
        )

    def _stop_if_finished(self) -> None:
        """Drop the record if no further backward is checked."""
        if not self.watching:
            self._close()
            functions_followed(False)

    def _report(
        self, difference: Difference, dtype: torch.dtype, model: DistributedModelBase | None, rounding: float = 0.0
    ) -> bool:
        """Warn of a difference; if it could not be determined, say so once. Returns whether there was anything to
        say. ``rounding``: relative distance of neighbouring numbers of the outputs' type."""
        lines = [] if difference.unknown else sentences(difference, dtype, rounding)
        why = difference.unknown or ("" if lines else difference.doubt)
        if why and why not in self._reported_reasons and model is not None:
            self._reported_reasons.add(why)
            say(model.rank_context, f"whether the loss is a mean over samples was not checked: {why}")
        for line in lines:
            warnings.warn(line, stacklevel=6)
        return bool(lines or difference.unknown)


def _memory(tensor: Tensor) -> int:
    return int(local(tensor).detach().untyped_storage().data_ptr())


def _do_nothing() -> None:
    """Do nothing, because no other rank waits for this one."""


_HOOK_WARNING = (
    "which sees this rank's gradient before ranks have added theirs: one that is not linear (clamping, signs) gives "
    "other numbers than one device"
)


def _look_for_hooks(model: DistributedModelBase) -> bool:
    """Warn of a hook on the gradient of a parameter. Returns whether there is one."""
    with torch._C.DisableTorchFunctionSubclass():  # a part of a parameter refuses what it does not know
        name = next((n for n, p in model.named_parameters() if p._backward_hooks), None)
    if name is not None and model.rank_context.rank == 0:
        warnings.warn(f"{name} has a hook on its gradient, {_HOOK_WARNING}; change p.grad after backward", stacklevel=6)
    return name is not None


def percent(share: float) -> str:
    """``share`` in per cent, with as many decimals as it takes to tell it from 0.

    >>> percent(0.1234), percent(2e-6), percent(0.0)
    ('12.3%', '0.0002%', '0.0%')
    """
    return f"{share:.1%}" if not 0 < share < 5e-4 else f"{share:.{min(-math.floor(math.log10(share)) - 2, 15)}%}"


def tolerance(dtype: torch.dtype) -> float:
    """Relative distance up to which two gradients of type ``dtype`` count as equal."""
    return _TOLERANCES.get(dtype, 5e-2)


def rounding_of(outputs: Iterable[Tensor]) -> float:
    """Largest relative distance of neighbouring numbers of the types of ``outputs``; 0 if there are none."""
    return max((torch.finfo(o.dtype).eps for o in outputs if o.is_floating_point()), default=0.0)


def sentences(difference: Difference, dtype: torch.dtype, rounding: float = 0.0) -> list[str]:
    """Sentences on what differs by more than a loss of type ``dtype``, or outputs with ``rounding``, can tell; empty if
    nothing does."""
    lines = []
    within = max(tolerance(dtype), rounding)
    differs = difference.gradients > within
    if difference.differing_number is not None and not (
        differs and difference.differing_number.is_integer()
    ):  # a count of samples is named below
        lines.append(
            f"a number that differs between ranks ({difference.differing_number:.6g} on rank 0) goes into the loss or "
            "the inputs: one that was taken out of torch (.item()) is of a rank's own samples, and one that is drawn "
            "is a rank's own; asa.reduce makes it that of the batch"
        )
    if difference.differing_tensor:
        lines.append(
            f"{difference.differing_tensor} differs between ranks, and goes into the loss or the inputs: it is made of "
            "a rank's own samples (counts, a queue), or drawn, and one device has one of all; make it of asa.reduce(x) "
            "or asa.gather(x), or draw it with one seed on all ranks"
        )
    if difference.repeated or (difference.stepped and differs):
        lines.append(
            "a tensor with a row for each sample is made beside the batch, by the sample's place in it, and is the "
            "same on all ranks: one device has one for the whole batch; make it in the loader's collate_fn"
        )
    if difference.inputs > within:
        lines.append(
            f"what the model is given differs by {percent(difference.inputs)} from what one device would give it: it "
            "is made of other samples of the batch, or drawn, and each rank has its own; make it in the loader's "
            "collate_fn"
        )
    elif differs:
        sizes = (abs(difference.loss_whole), abs(difference.loss_parts), 1e-30)
        loss = abs(difference.loss_whole - difference.loss_parts) / max(sizes)
        far = f"{percent(loss)} apart" if loss == loss else "one of them is no number"
        lines.append(
            f"the loss is not a mean over samples: over the whole batch it is {difference.loss_whole:.6g}, the mean "
            f"over ranks is {difference.loss_parts:.6g} ({far}), and gradients of the outputs differ by "
            f"{percent(difference.gradients)} from those of one device; use asa.mean_over(loss_sum, count) for sums "
            "and ratios, asa.gather(outputs) for a loss that compares samples"
        )
    return lines
