"""Compares a loop's losses with those of one device, for the first occurrences of each form of loss."""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from asa.api.batches import Share
from asa.api.comparison import Comparison, Difference
from asa.api.in_step import REMEDY
from asa.api.said import say
from asa.api.spread_model import SpreadModel
from asa.api.tape import Tape, Watched, functions_followed
from asa.errors import UsageError

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_WINDOW, _TIMES, _MOST_COMPARED, _MOST_UNFINISHED = 12, 3, 18, 64
"""Number of backwards checked after the last new form of a loss; number of batches on which each form is compared (on
one, it may agree by chance); largest number of comparisons; largest number of outputs followed without a backward."""
_MOST_ASKED = 8
"""Largest number of times that checking starts again because of a new form of loss."""
_SMALL = 8
"""Number of samples per rank below which every loss is checked, if batches usually have more."""
_TRUSTED = "trusted"


class Trial:
    """Checks the losses of a distributed model. All ranks check the same backwards, and agree on what to do."""

    def __init__(self, placed: SpreadModel) -> None:
        self._placed, self._ranks = ref(placed), placed.place.ranks
        self._left = _WINDOW
        self._seen: Counter[tuple[float, ...]] = Counter()
        self._sized: set[tuple[tuple[float, ...], tuple[float, ...]]] = set()
        self._told: set[tuple[float, ...]] = set()
        self._sizes: set[int] = set()
        self._total = 0
        self._odd = False
        """Whether the batch is small, or of a size for which no loss was compared (equal on all ranks)."""
        self._compared = self._unfinished = 0
        self._said: set[str] = set()
        self._hooks = self._said_own = self._said_samples = False
        self._tape: Tape | None = None
        self._graphs: set[int] = set()
        self._asked = 0
        self.sized = False
        """Whether the program read the number of samples."""
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

    def look_again(self) -> None:
        """Check the next backwards, because some rank has asked for it (on all ranks); up to a limit."""
        self.asks = False
        if self._asked < _MOST_ASKED:
            self._asked += 1
            self._left = max(self._left, _WINDOW)
        elif self._asked == _MOST_ASKED:
            self._asked += 1
            self._tell(Difference(unknown="its form keeps changing"), torch.float32, self._placed())

    @property
    def watching(self) -> bool:
        """Whether the next backward is checked."""
        return (self._left > 0 or self._odd) and self._unfinished < _MOST_UNFINISHED

    def epoch_began(self) -> None:
        """Check again, because a program may have another loss in another epoch."""
        self._left = max(self._left, 2) if self._compared < _MOST_COMPARED else self._left
        self._unfinished = 0

    def begin(self, batch: Any, share: Share) -> Any:
        """A batch of the loader, recorded until the next one. This rank has the ``share`` of it."""
        self._close()
        rows = len(share.rows)
        self._total, small = share.total, _SMALL * self._ranks
        self._odd = share.total not in self._sizes or share.total < min(small, max(self._sizes))
        if not self.watching or not rows:
            functions_followed(False)
            return batch
        functions_followed(True)
        placed = self._placed()
        leave = placed.pace.leave if placed is not None and placed.pace is not None else _stay
        self._tape = Tape(rows, share.total, leave)
        return self._tape.begin(batch)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded: the batch's tensors behave like any others."""
        tape = self._tape
        if tape is None:
            yield
            return
        strange, tape.strange = tape.strange, "something else is looked at"
        try:
            yield
        finally:
            tape.strange = strange

    def handed(self, inputs: Any) -> Any:
        """The model's inputs as plain tensors."""
        return (self._tape or Tape(0)).handed(inputs)

    def follow(self, output: Tensor, rows: int) -> Tensor:
        """``output``, recorded until its loss is differentiated."""
        if not self.watching or not output.requires_grad or not output.is_floating_point():
            return output
        self._unfinished += 1
        if self._tape is None:
            functions_followed(True)
            self._tape = Tape(rows)
        if self._tape.rows != rows:
            self._tape.strange = self._tape.strange or "the model is called with other samples than those of a batch"
        return output if self._tape.strange else self._tape.follow(output)

    def around(self, loss: Tensor, backward: Callable[[], None], strange: str = "") -> None:
        """Run ``backward`` of ``loss``, and compare the loss if its form is new (collective). ``strange`` says why it
        cannot be compared."""
        placed = self._placed()
        if placed is None or not self.watching:
            if self._left > 0 and self._unfinished >= _MOST_UNFINISHED:
                unseen = f"of more than {_MOST_UNFINISHED} calls of the model before it, none had a backward"
                self._tell(Difference(unknown=unseen), loss.dtype, placed)
                self._unfinished = 0
            backward()
            return
        self._left = max(0, self._left - 1)
        self._unfinished = 0
        self._hooks = self._hooks or _look_for_hooks(placed)
        tape = loss.tape if isinstance(loss, Watched) and hasattr(loss, "tape") else None
        if tape is not None:
            tape.strange = tape.strange or strange
        if self._tape is not None and self._tape.hooked and not self._hooks:
            self._hooks = True
            warnings.warn(f"an output of the model has a hook on its gradient, {_SEES_ITS_OWN}", stacklevel=5)
        form = "" if tape is None or strange else tape.form(loss)
        why = strange or ("" if self._tape is None else self._tape.strange) if tape is None else tape.why_not(loss)
        form, self.trusted = form or (_TRUSTED if self.trusted else ""), False
        number = float(zlib.crc32(form.encode())) if form else 0.0
        at = -1.0 if placed.share is None else float(placed.share.first)
        every = placed.place.votes.gather([number, placed.weight, at, float(placed.rows)])
        if len({f[2] for f in every}) > 1:
            raise UsageError(
                f"ranks compute gradients of different batches (from sample {', '.join(f'{f[2]:.0f}' for f in every)} "
                f"on): {REMEDY}"
            )
        forms = tuple(f[0] for f in every)
        sized = forms, tuple(f[3] for f in every)
        again = self._seen[forms] >= _TIMES
        new = (not again or sized not in self._sized) and self._compared < _MOST_COMPARED and forms not in self._told
        self._sized.add(sized)
        self._sizes.add(self._total)
        if self._compared >= _MOST_COMPARED and not self._seen[forms]:
            self._tell(Difference(unknown="it has more forms than are compared"), loss.dtype, placed)
        if not self._seen[forms]:
            self._left = max(self._left, _WINDOW)
        self._seen[forms] += 1
        if not new or form == _TRUSTED or tape is None or len(set(forms)) > 1 or not form:
            backward()
            if new and not again and set(forms) != {float(zlib.crc32(_TRUSTED.encode()))}:
                unlike = "ranks compute it in different ways" if all(forms) and len(set(forms)) > 1 else ""
                self._tell(Difference(unknown=why or unlike or "it cannot be followed"), loss.dtype, placed)
        else:
            self._compared += 1
            least = max(f[0] for f in placed.place.votes.gather([float(tape.fewest(loss))]))
            placed.least[:] = [max(*placed.least, int(least))]
            comparison = Comparison(placed.place.votes, tape, loss, placed.weight)
            tape.received.clear()
            backward()
            compared = comparison.difference([tape.received.get(i) for i in range(len(tape.outputs))])
            if again:
                compared = replace(compared, unknown="", doubt="")
            if self._tell(compared, loss.dtype, placed):
                self._told.add(forms)
        self._rest()

    def batch_over(self) -> None:
        """Record that a batch of the loader is over."""
        self._close()

    def by_samples(self, share: Share, *, learned: bool) -> None:
        """Say, once per batch, that the program may take another path with this rank's ``share`` of it than on one
        device. ``learned`` says whether the batch had a backward."""
        mine, placed = len(share.rows), self._placed()
        sized = self.sized or (self._tape is not None and self._tape.asked)
        if self._said_samples or placed is None or not sized or mine >= share.total or (learned and mine > 1):
            return
        self._said_samples = True
        say(placed.place, f"a batch of {share.total} samples {'is one a rank' if learned else 'had no backward'}, and "
            f"the program asks how many there are: what it decides by that (len(x) > 1, len(x) == batch_size) one "
            f"device decides by {share.total}, and this rank by its {mine}")  # fmt: skip

    def _close(self) -> None:
        """Stop recording. Tensors of the batch behave like any others from here on."""
        if self._tape is not None:
            self._tape.closed = True
            self._said_own = self._said_own or self._tape.taken
            self.sized = self.sized or self._tape.asked
            self._tape = None

    def _rest(self) -> None:
        """Drop the record if no further backward is checked."""
        if self._tape is not None and self._tape.taken and not self._said_own:
            self._said_own = True
            placed = self._placed()
            if placed is not None:
                say(placed.place, "a number that is taken out of a tensor (loss.item()) is of this rank's samples; "
                    "asa.reduce(loss) is of the whole batch, by which a loop that branches is to decide")  # fmt: skip
        if not self.watching:
            self._close()
            functions_followed(False)

    def _tell(self, found: Difference, dtype: torch.dtype, placed: SpreadModel | None) -> bool:
        """Warn of a difference; if it could not be determined, say so once. Returns whether there was anything to
        say."""
        lines = [] if found.unknown else told(found, dtype)
        why = found.unknown or ("" if lines else found.doubt)
        if why and why not in self._said and placed is not None:
            self._said.add(why)
            say(placed.place, f"whether the loss is a mean over samples was not checked: {why}")
        for line in lines:
            warnings.warn(line, stacklevel=6)
        return bool(lines or found.unknown)


def _stay() -> None:
    """Do nothing, because no other rank waits for this one."""


_SEES_ITS_OWN = (
    "which sees this rank's gradient before ranks have added theirs: one that is not linear (clamping, signs) gives "
    "other numbers than one device"
)


def _look_for_hooks(placed: SpreadModel) -> bool:
    """Warn of a hook on the gradient of a parameter. Returns whether there is one."""
    with torch._C.DisableTorchFunctionSubclass():  # a part of a parameter refuses what it does not know
        name = next((n for n, p in placed.named_parameters() if p._backward_hooks), None)
    if name is not None and placed.place.rank == 0:
        warnings.warn(f"{name} has a hook on its gradient, {_SEES_ITS_OWN}; change p.grad after backward", stacklevel=6)
    return name is not None


def tolerance(dtype: torch.dtype) -> float:
    """Relative distance up to which two gradients of type ``dtype`` count as equal."""
    return _TOLERANCES.get(dtype, 5e-2)


def told(found: Difference, dtype: torch.dtype) -> list[str]:
    """Sentences on what differs; empty if nothing does."""
    said = []
    differs = found.gradients > tolerance(dtype)
    if found.own is not None and not (differs and found.own.is_integer()):  # a count of samples is named below
        said.append(
            f"a number that differs between ranks ({found.own:.6g} on rank 0) goes into the loss or the inputs: one "
            "that was taken out of torch (.item()) is of a rank's own samples, and one that is drawn is a rank's own; "
            "asa.reduce makes it that of the batch"
        )
    if found.repeated or (found.stepped and differs):
        said.append(
            "a tensor with a row for each sample is made beside the batch, by the sample's place in it, and is the "
            "same on all ranks: one device has one for the whole batch; make it in the loader's collate_fn"
        )
    if found.inputs > tolerance(dtype):
        said.append(
            f"what the model is given differs by {found.inputs:.1%} from what one device would give it: it is made of "
            "other samples of the batch, or drawn, and each rank has its own; make it in the loader's collate_fn"
        )
    elif differs:
        sizes = (abs(found.loss_whole), abs(found.loss_parts), 1e-30)
        loss = abs(found.loss_whole - found.loss_parts) / max(sizes)
        far = f"{loss:.1%} apart" if loss == loss else "one of them is no number"
        said.append(
            f"the loss is not a mean over samples: over the whole batch it is {found.loss_whole:.6g}, the mean over "
            f"ranks is {found.loss_parts:.6g} ({far}), and gradients of the outputs differ by "
            f"{found.gradients:.1%} from those of one device; use asa.mean_over(loss_sum, count) for sums and ratios, "
            "asa.gather(outputs) for a loss that compares samples"
        )
    return said
