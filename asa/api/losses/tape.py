"""Records a program's operations from a batch and a model's outputs to its loss, and repeats them with the whole batch.

A loss that is not a mean over samples (a sum, a ratio of sums, one that compares samples) differs between each rank's
part and the whole batch. A program does not declare which kind its loss is, so it is tested.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from asa.api.losses.program_text import becomes_a_shape, cut_by, decides, index_read
from asa.api.patching import replace_once
from asa.api.tensors.numbers import refuse_by_shards, run_plain
from asa.errors import AsaError, UsageError, place_of, place_of_call
from asa.sharding.split.of_rank import in_parts, mark_of_rank, writes
from asa.tracing.tracer import reason_of
from asa.tracing.whole import tensors_of

MOST_BYTES = 1 << 28
"""Largest number of bytes of a whole batch's outputs and labels that are gathered on every rank, and of the results on
a tape."""
_MOST_OPERATIONS = 4096
_WINDOWS, _MOST_FEWEST = 4, 8
"""Number of positions in a batch at which small sets of samples are tried, and the largest size of such a set."""


@dataclass
class Readings:
    """Whether a number of a rank's own samples was read out as a Python value, and whether a loop wrote one into what
    ranks hold alike; ``say`` and ``say_written`` (with its name) are called at the first."""

    say: Callable[[], None]
    name: Callable[[Tensor], str] = lambda _: ""
    """The name of the model's parameter, gradient or buffer in whose memory a tensor is; empty if it is in none."""
    say_written: Callable[[str], None] = lambda _: None
    decide: Callable[[bool, bool], bool] = lambda value, _: value
    """What all ranks come to, from this rank's answer, and whether all or any of the samples are meant."""
    said: bool = False
    written: bool = False
    deciding: bool = False
    """Whether the program has asked for an answer of all samples."""

    def note(self) -> None:
        """A number is read out."""
        if not self.said:
            self.said = True
            self.say()

    def write(self, target: Any) -> None:
        """Numbers of this rank's samples are written into ``target``, which from then on is followed, too."""
        if self.written:
            return
        if name := self.name(target):
            self.written = True
            self.say_written(name)
        elif type(target) is Tensor and not target.requires_grad and target.layout is torch.strided:
            target.__class__ = Watched
            target.tape = Tape(0, closed=True, readings=self)  # type: ignore[attr-defined]


@dataclass
class Tape:
    """Operations, in order, on tensors that come from a batch or from ``outputs``.

    ``rows`` is the number of this rank's samples; ``total`` is that of all ranks, if known. ``leave`` is called where
    this rank stops.
    """

    rows: int
    total: int = 0
    leave: Callable[[], None] = lambda: None
    outputs: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    """Values of the outputs when they left the model."""
    received: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of the outputs, by number."""
    versions: list[int] = field(default_factory=list)
    """Version counters of the leaves when they were first seen."""
    changed: list[int] = field(default_factory=list)
    """Version counters of the outputs when they left the model."""
    operations: list[tuple[Callable[..., Any], Any, Any, Any]] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    of_batch: set[int] = field(default_factory=set)
    """Positions of leaves that come from the loader, or are outputs without gradients: rank by rank they are the whole
    batch's."""
    places: dict[int, str] = field(default_factory=dict)
    """By the positions of other leaves, where in the program they came in."""
    model_inputs: list[Tensor] = field(default_factory=list)
    """Tensors made from the batch and passed to the model."""
    positions: dict[int, int] = field(default_factory=dict)
    tensors: list[Any] = field(default_factory=list)
    """Tensors by position: outputs, leaves and results."""
    single_samples: set[int] = field(default_factory=set)
    """Positions of single samples that were taken from a batch, one after the other."""
    picked: dict[int, list[int]] = field(default_factory=dict)
    """Positions of single samples by that of the tensor they were taken from."""
    bytes: int = 0
    problem: str = ""
    """Why the record is incomplete; empty if it is complete."""
    closed: bool = False
    """Whether its batch is over. Later uses of its tensors belong to another record."""
    readings: Readings | None = None
    """Whether numbers of this rank's samples were read out as Python values."""
    array_read: bool = False
    """Whether all numbers of a tensor were."""
    size_read: bool = False
    """Whether the program read sizes of a tensor on the tape."""
    size_used: bool = False
    """Whether it did something else with one than to make a shape of it."""
    cuts_kept: bool = False
    """Whether it cut a tensor from beside the batch by one."""
    chained: bool = False
    """Whether a call of the model takes outputs of another call, with gradients."""
    hooked: bool = False
    """Whether a gradient hook was added to a tensor on the tape."""

    def follow(self, output: Tensor) -> Tensor:
        """``output`` as a tensor whose operations are recorded from now on."""
        watched = output.as_subclass(Watched)
        watched.tape = self
        self._add(watched)
        number = len(self.outputs)
        self.outputs.append(watched)
        self.values.append(output.detach().clone())
        self.changed.append(watched._version)

        def received(gradient: Tensor) -> None:
            plain, earlier = gradient.detach().as_subclass(Tensor), self.received.get(number)
            self.received[number] = plain.clone() if earlier is None else earlier + plain

        with torch._C.DisableTorchFunctionSubclass():
            watched.register_hook(received)
        return watched

    def begin(self, batch: Any) -> Any:
        """``batch`` with tensors whose operations are recorded from now on."""

        def watched(leaf: Any) -> Any:
            if isinstance(leaf, Watched):  # a loop wrote into its data set
                leaf = leaf.as_subclass(Tensor)
            if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.requires_grad:
                return leaf
            wrapped = leaf.as_subclass(Watched)
            wrapped.tape = self
            self._leaf(wrapped)
            return wrapped

        wrapped = pytree.tree_map(watched, batch)
        self.of_batch.update(map(self.index_of, self.leaves))
        return wrapped

    def see(self, output: Tensor) -> Tensor:
        """``output``, which has no gradients, as a tensor whose operations are recorded from now on."""
        seen = output.as_subclass(Watched)
        seen.tape = self
        self._leaf(seen)
        if is_batched(seen, self.rows):
            self.of_batch.add(self.index_of(seen))
        self.bytes += output.nbytes
        return seen

    def handed(self, inputs: Any) -> Any:
        """``inputs`` of a model as plain tensors. Those that come from the batch are recorded."""

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, Watched):
                return leaf
            if getattr(leaf, "tape", None) is self and id(leaf) in self.positions:
                self.model_inputs.append(leaf)
                self.chained = self.chained or leaf.requires_grad
            return leaf.as_subclass(Tensor)

        return pytree.tree_map(plain, inputs)

    def form(self, loss: Tensor) -> str:
        """The operations from which ``loss`` is computed, as text without numbers and sizes; empty if they are not
        known."""
        if self.why_not(loss):
            return ""
        return repr([getattr(o[0], "__name__", str(o[0])) for o in self.needed([loss])[0]])

    def why_not(self, loss: Tensor) -> str:
        """Why the operations from which ``loss`` is computed are not known; empty if they are."""
        if not self.problem and id(loss) not in self.positions:
            return "part of it is computed where it cannot be followed"
        if not self.problem and self.single_samples and self.needed([loss])[1] & self.single_samples:
            return "it is computed sample by sample"
        return self.problem

    def needed(self, tensors: Iterable[Tensor]) -> tuple[list[tuple[Callable[..., Any], Any, Any, Any]], set[int]]:
        """(operations, positions): the operations from which ``tensors`` are computed, in order, and the positions of
        all their inputs."""
        indices = {self.positions[id(t)] for t in tensors if id(t) in self.positions}
        operations = []
        for operation in reversed(self.operations):
            if any(p.index in indices for p in pytree.tree_leaves(operation[3]) if isinstance(p, TapeRef)):
                operations.append(operation)
                indices |= {p.index for p in pytree.tree_leaves(operation[1:3]) if isinstance(p, TapeRef)}
        return operations[::-1], indices

    def _add(self, tensor: Tensor) -> int:
        self.positions[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def note(self, function: Callable[..., Any], args: Any, options: Any, result: Any) -> Any:
        """Record one operation."""
        spec = pytree.tree_map(self._reference, (args, options))
        inputs = tensors_of((args, options))
        if not torch.is_grad_enabled() and any(leaf.requires_grad for leaf in inputs):
            function = torch.no_grad()(function)

        def watched(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            input_tensor = next((g for g in inputs if g is leaf), None)
            if input_tensor is None and not isinstance(leaf, Watched) and type(leaf) not in (Tensor, nn.Parameter):
                self.problem = f"part of it is a {type(leaf).__name__}, which cannot be followed"
                return leaf
            if input_tensor is None:
                input_tensor = leaf.as_subclass(Watched)
                input_tensor.tape = self  # type: ignore[attr-defined]
                self.bytes += leaf.nbytes if leaf.layout is torch.strided else 0
            return input_tensor

        wrapped = pytree.tree_map(watched, result)
        refs = pytree.tree_map(
            lambda leaf: (
                TapeRef(self.positions[id(leaf)] if id(leaf) in self.positions else self._add(leaf))
                if isinstance(leaf, Tensor)
                else None
            ),
            wrapped,
        )
        self.operations.append((function, *spec, refs))
        if self.bytes > MOST_BYTES or len(self.operations) > _MOST_OPERATIONS:
            self.forget("more is computed from the batch than can be recorded")
        return wrapped

    def forget(self, why: str) -> None:
        """Drop everything, and stop recording, because of ``why``."""
        self.problem = why
        for entries in (
            self.operations, self.leaves, self.versions, self.outputs, self.values, self.changed, self.model_inputs,
            self.tensors, self.positions, self.places, self.received, self.single_samples, self.picked,
        ):  # fmt: skip
            entries.clear()  # type: ignore[attr-defined]

    def _leaf(self, leaf: Tensor) -> None:
        self.leaves.append(leaf)
        self.versions.append(leaf._version)
        self._add(leaf)

    def _reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.positions:
            if isinstance(leaf, Watched) and not leaf.tape.problem and (not leaf.tape.closed or leaf.requires_grad):
                self.problem = "part of it is computed where it cannot be followed"
            self.places[len(self.tensors)] = place_of_call()
            self._leaf(leaf)
        return TapeRef(self.positions[id(leaf)])

    def named(self, position: int) -> str:
        """Words for a leaf from beside the batch."""
        return f"a tensor {list(self.tensors[position].shape)} beside the batch{self.places.get(position, '')}"

    def replay(
        self, values: dict[int, Tensor], number: Callable[[Any], Any], *, strict: bool = False
    ) -> dict[int, Tensor]:
        """Values at all positions if those of outputs and leaves are ``values``; ``number`` maps whole numbers.

        Operations that fail are left out, with everything computed from them, unless ``strict``. Those that draw leave
        the generators as they were.
        """
        devices = {t.device.index or 0 for t in values.values() if t.is_cuda}
        with torch.random.fork_rng(sorted(devices)):
            return self._replay(values, number, strict=strict)

    def _replay(self, values: dict[int, Tensor], number: Callable[[Any], Any], *, strict: bool) -> dict[int, Tensor]:
        replayed = dict(values)
        for function, args, options, refs in self.operations:
            mapped = number if counts_samples(function) else _as_given
            try:
                new_args, new_options = pytree.tree_map(
                    lambda leaf, mapped=mapped: _substituted(leaf, replayed, mapped), (args, options)
                )
                result = function(*new_args, **new_options)
            except Exception:  # numbers that fit no shape
                if strict:
                    raise
                continue
            flattened = pytree.tree_leaves(refs), pytree.tree_leaves(result)
            if len(flattened[0]) != len(flattened[1]):  # another number of pieces than before
                if strict:
                    raise UsageError("a batch is split into another number of pieces")
                continue
            for ref, value in zip(*flattened, strict=True):
                if isinstance(ref, TapeRef):
                    replayed[ref.index] = value
        return replayed

    def with_rows(self, rows: slice | Tensor) -> dict[int, Tensor]:
        """Values of outputs and leaves with other ``rows`` than the recorded ones, for :meth:`replay`."""
        values = {}
        for tensor, value in (*zip(self.outputs, self.values, strict=True), *((t, t) for t in self.leaves)):
            plain = value.detach().as_subclass(Tensor)
            if value is tensor and plain.shape == (self.rows, self.rows):  # torch.eye(len(x))
                plain = plain[rows][:, rows]
            elif is_batched(plain, self.rows):
                plain = plain.reshape(self.rows, -1, *plain.shape[1:])[rows].flatten(0, 1)
            values[self.index_of(tensor)] = plain.clone()
        return values

    def fewest(self, loss: Tensor) -> int:
        """Smallest number of this rank's samples from which ``loss`` can be computed again and is a number; 1 if
        unknown."""
        index = self.index_of(loss)
        finite = bool(loss.detach().as_subclass(Tensor).isfinite().all())

        def works(count: int) -> bool:
            for first in range(min(self.rows - count + 1, _WINDOWS)):
                for number in number_mappings(self, count):
                    try:
                        values = self.with_rows(slice(first, first + count))
                        recomputed = self.replay(values, number, strict=True).get(index)
                    except Exception:  # a program's own code may raise anything on few samples
                        continue
                    if recomputed is not None and (not finite or bool(recomputed.isfinite().all())):
                        return True
            return False

        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return next((count for count in range(1, 1 + min(self.rows, _MOST_FEWEST)) if works(count)), 1)

    def too_few(self, func: Any, args: Any, options: Any) -> bool:
        """Whether ``func``, which has failed, would succeed with as many samples as the whole batch has."""
        if self.problem or not 0 < self.rows < self.total:
            return False
        rows = torch.arange(self.total) % self.rows

        def more(leaf: Any, replayed: dict[int, Tensor], number: Callable[[Any], Any]) -> Any:
            if isinstance(leaf, Tensor):
                if id(leaf) in self.positions:
                    return replayed[self.positions[id(leaf)]]
                return leaf.as_subclass(Tensor)[rows] if leaf.shape[:1] == (self.rows,) else leaf
            return _substituted(leaf, replayed, number)

        def runs(number: Callable[[Any], Any]) -> bool:
            try:
                replayed = self.replay(self.with_rows(rows), number)
                new_args, new_options = pytree.tree_map(lambda leaf: more(leaf, replayed, number), (args, options))
                func(*new_args, **new_options)
            except Exception:  # whatever a program's own code raises
                return False
            return True

        return any(map(runs, number_mappings(self, self.total)))

    def index_of(self, tensor: Tensor) -> int:
        """Index of ``tensor`` on the tape."""
        return self.positions[id(tensor)]

    def computes_with_rows(self) -> bool:
        """Whether the program computes with this rank's number of samples: an operation has the number, a multiple of
        it or its inverse as an argument, or a tensor that is not part of the batch has as many rows."""

        def is_count(leaf: Any) -> bool:
            if isinstance(leaf, slice):
                return any(type(n) is int and n == self.rows for n in (leaf.start, leaf.stop))
            return (type(leaf) is int and leaf > 0 and leaf % self.rows == 0) or leaf == 1 / self.rows

        beside = (t for t in self.leaves if self.index_of(t) not in self.of_batch)
        if self.rows and any(is_batched(t, self.rows) for t in beside):
            return True
        return any(
            is_count(leaf)
            for function, args, options, _ in self.operations
            if getattr(function, "__name__", "") in (*_SHAPING, *ARITHMETIC) and counts_samples(function)
            for leaf in pytree.tree_leaves((args, options))
            if type(leaf) in (int, float, slice)
        )

    def over_samples(self, tensor: Tensor) -> str:
        """``all`` or ``any``, if ``tensor`` is the answer of this method over a whole tensor, or is how many of a mask
        are true compared with 0; otherwise empty."""
        name, args = self._made_by(self.positions.get(id(tensor), -1))
        if name in ("all", "any"):
            return name if len(args) == 1 else ""
        if len(args) != 2 or args[1] != 0 or not isinstance(args[0], TapeRef):
            return ""
        counted = self._made_by(args[0].index)
        mask = self.tensors[counted[1][0].index] if counted[0] == "sum" and len(counted[1]) == 1 else None
        of_mask = mask is not None and mask.dtype is torch.bool
        return {"gt": "any", "ne": "any", "eq": "all"}.get(name.strip("_"), "") if of_mask else ""

    def _made_by(self, index: int) -> tuple[str, Any]:
        """The name of the function of which the tensor at position ``index`` is the result, and its arguments; empty
        with options."""
        found = (o for o in reversed(self.operations) if isinstance(o[3], TapeRef) and o[3].index == index)
        function, args, options, _ = next(found, ("", (), {}, None))
        return ("", ()) if options else (getattr(function, "__name__", ""), args)

    def of_all_ranks(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was computed from what ``asa.reduce`` or ``asa.gather`` returned."""
        return any(hasattr(operation[0], "across") for operation in self.needed([tensor])[0])


def is_batched(tensor: Tensor, rows: int) -> bool:
    """Whether ``tensor`` has ``rows`` rows, or a multiple of them."""
    return bool(tensor.dim()) and rows > 0 and tensor.shape[0] > 0 and tensor.shape[0] % rows == 0


def counts_samples(function: Any) -> bool:
    """Whether a number that ``function`` is given may be a number of samples, and no power or dimension."""
    return getattr(function, "__name__", "") not in _NO_COUNTS


def _as_given(number: Any) -> Any:
    return number


def number_mappings(tape: Tape, total: int) -> list[Callable[[Any], Any]]:
    """Functions that map a number in a program to its value with ``total`` samples instead of this rank's.

    The first keeps the number. The second replaces this rank's number of samples, or its inverse, by the total. The
    others replace a multiple of this rank's number by the same multiple of ``total``: the third for lengths of recorded
    tensors, the fourth for their numbers of elements.
    """
    rows = tape.rows
    tensors = [t for t in tape.tensors if isinstance(t, Tensor) and t.dim()]
    sizes, numbers = {int(t.shape[0]) for t in tensors}, {t.numel() for t in tensors}
    return [
        _as_given,
        lambda n: total if n == rows else 1 / total if type(n) is float and n == 1 / rows else n,
        lambda n: n // rows * total if type(n) is int and n in sizes and n % rows == 0 else n,
        lambda n: n // rows * total if type(n) is int and n in numbers and n % rows == 0 else n,
    ]


def _substituted(leaf: Any, values: dict[int, Tensor], number: Callable[[Any], Any]) -> Any:
    """An argument of an operation, with tensors from ``values`` and with numbers mapped by ``number``."""
    if isinstance(leaf, TapeRef):
        return values[leaf.index]
    if isinstance(leaf, slice):
        first, last = (number(n) if type(n) is int else n for n in (leaf.start, leaf.stop))
        return slice(first, last, leaf.step)
    if isinstance(leaf, range):
        return range(number(leaf.start), number(leaf.stop), leaf.step)
    return number(leaf) if type(leaf) in (int, float) else leaf


@dataclass(frozen=True)
class TapeRef:
    """Reference to a tensor on a tape."""

    index: int


ARITHMETIC = {f"{before}{name}{after}" for name in ("mul", "add", "sub", "div", "truediv", "floordiv", "pow", "mod")
               for before, after in (("", ""), ("__", "__"), ("__r", "__"), ("__i", "__"), ("", "_"))}  # fmt: skip
"""Names of arithmetic operations and methods."""
_NO_COUNTS = {
    "pow", "pow_", "__pow__", "__rpow__", "__ipow__", "float_power", "norm", "vector_norm", "matrix_norm", "cdist",
    "pairwise_distance", "normalize", "sum", "mean", "std", "var", "prod", "amax", "amin", "max", "min", "argmax",
    "argmin", "logsumexp", "softmax", "log_softmax", "cumsum", "unsqueeze", "squeeze", "transpose", "permute",
    "flatten", "cat", "stack", "cosine_similarity",
}  # fmt: skip
"""Names of operations whose numbers are powers and dimensions, and never numbers of samples."""
_SHAPING = ("view", "reshape", "expand", "repeat", "new_zeros", "new_ones", "new_full", "new_empty", "__getitem__")
"""Names of operations whose whole numbers may be numbers of samples."""


def _reading_frame() -> Any:
    """Where a program reads a size; None if it is torch's code or that of this package."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("torch._tensor", "torch.overrides"):
        frame = frame.f_back
    own = frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "asa")
    return frame if own else None


def _of_other_dimension(func: Any, args: Any, options: dict[str, Any], frame: Any, rows: int) -> bool:
    """Whether a size is read of a dimension that is not the first, and is not the number of samples (``x.size(1)``,
    ``x.shape[-1]``)."""
    read: Any = None
    if func is Tensor.size:
        read = args[1] if len(args) > 1 else options.get("dim")
    elif func not in (Tensor.__len__, Tensor.numel):
        read = index_read(frame)
    shape = tuple(as_plain(args[0]).shape)
    return type(read) is int and -len(shape) < read < len(shape) and read != 0 and shape[read] != rows


_GRAD: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_SIZES: Any = (Tensor.__len__, Tensor.size, Tensor.numel, Tensor.shape.__get__)  # type: ignore[attr-defined]


Number = TypeVar("Number", float, complex)
_torch_has_warned = False
"""Whether torch has warned that a tensor with a gradient is read as a number."""


class Watched(Tensor):
    """A tensor whose operations are recorded."""

    tape: Tape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        tapes = [t.tape for t in watched_in((args, options)) if not t.tape.closed]
        tape = min(tapes, key=lambda t: bool(t.problem), default=None)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # what it returns may not leave it
            for each in tapes:
                each.problem = each.problem or "torch.func computes from the batch"
            return func(*pytree.tree_map(as_plain, args), **pytree.tree_map(as_plain, options))
        if func is torch.autograd.grad:
            refuse_by_shards(args, options)
        changes = bool(args) and writes(getattr(func, "__name__", ""))
        try:
            # Functions that are written in Python count plain tensors among the types.
            if not all(issubclass(t, Watched) or t is Tensor for t in types) and not (
                changes and isinstance(args[0], Watched)
            ):
                result = func(*pytree.tree_map(as_plain, args), **pytree.tree_map(as_plain, options))
            else:
                result = run_plain(func, args, options)
        except AsaError:
            raise
        except Exception as error:  # torch may raise anything on few samples
            if tape is None or not tape.too_few(func, args, options):
                raise
            tape.leave()
            raise UsageError(
                f"{getattr(func, '__name__', func)} fails on the {tape.rows} samples that this rank has of a batch of "
                f"{tape.total} ({reason_of(error)}{place_of(error)}), but not on as many as one device has: use larger "
                "batches, drop_last=True, or asa.gather(outputs)"
            ) from error
        if changes and not isinstance(args[0], Watched):
            _written(args, options)
        elif in_parts(result):
            readings = _own(args, options)
            return result if readings is None else mark_of_rank(result, readings.write)
        for each in tapes:
            each.hooked = each.hooked or func is Tensor.register_hook
            if func in _SIZES and not each.size_used and (frame := _reading_frame()) is not None:
                if _of_other_dimension(func, args, options, frame, each.rows):
                    continue
                each.size_read, each.size_used = True, not becomes_a_shape(frame)
                cut = cut_by(frame)
                own = isinstance(cut, Watched) and not cut.tape.closed
                each.cuts_kept = each.cuts_kept or (isinstance(cut, Tensor) and not own)
        if tape is None:
            return _kept(result, args, options)
        if tape.problem:  # what all ranks decide by is known nevertheless
            masks = tape.readings is not None and tape.readings.deciding and _is_mask(result)
            return tape.note(func, args, options, result) if masks else _unwatched(result, args, options)
        if func is Tensor.register_hook:
            tape.problem = "a hook changes gradients before they reach the model"
        splits_samples = _sample_by_sample(func, args, tape.rows, result)
        if func is torch.autograd.grad or (func == _GRAD and isinstance(result, Tensor)):
            tape.problem = "gradients of the model's inputs are those of a rank's mean, not of the batch's"
        if not tensors_of(result):
            return result
        if func == _DATA:
            func = Tensor.detach
        if getattr(func, "__name__", "") == "__get__" and not _is_computed(result, args):
            return result
        recorded = tape.note(func, args, options, result)
        if splits_samples:
            places = [tape.positions[id(leaf)] for leaf in pytree.tree_leaves(recorded) if id(leaf) in tape.positions]
            all_picked = tape.picked.setdefault(tape.positions.get(id(args[0]), -1), [])
            all_picked += places
            if len(all_picked) >= max(2, tape.rows // 2) or tape.rows == 1:  # a loop over samples, and not a first one
                tape.single_samples.update(all_picked)
        return recorded

    def _read_out(self, *, all_values: bool = False) -> Tensor:
        tape = getattr(self, "tape", None)
        if tape is not None:
            tape.array_read = tape.array_read or all_values
            if tape.readings is not None and not tape.readings.said and not tape.of_all_ranks(self):
                tape.readings.note()
        return self.as_subclass(Tensor)

    def _scalar(self, kind: Callable[[Tensor], Number]) -> Number:
        """The value as a Python number. A warning of torch, which gives it once in a process, names the line of the
        program, as without asa."""
        global _torch_has_warned
        value = self._read_out()
        if _torch_has_warned or not value.requires_grad:
            return kind(value)
        _torch_has_warned = True
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            number = kind(value)
        for each in said:
            warnings.warn(each.message, stacklevel=3)
        return number

    def _decided(self, frame: Any) -> bool | None:
        """The answer of all ranks, if a loop goes on or a backward is made by that of this tensor; otherwise None."""
        tape = getattr(self, "tape", None)
        over = "" if tape is None or tape.closed or tape.readings is None or self.dim() else tape.over_samples(self)
        if not over or not decides(frame.f_code.co_filename, frame.f_lineno):
            return None
        return tape.readings.decide(bool(self.as_subclass(Tensor)), over == "all")  # type: ignore[union-attr]

    def item(self) -> Any:
        """The value as a Python number. Operations on it are not recorded."""
        decided = self._decided(sys._getframe(1))
        return self._read_out().item() if decided is None else decided

    def tolist(self) -> Any:
        """The values as Python numbers."""
        return self._read_out(all_values=bool(self.dim())).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array."""
        return self._read_out(all_values=True).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self._read_out(all_values=True).numpy()
        return array if dtype is None and not copy else array.astype(dtype or array.dtype, copy=bool(copy))

    def __float__(self) -> float:
        return self._scalar(float)

    def __int__(self) -> int:
        return int(self._read_out())

    def __index__(self) -> int:
        return self._read_out().__index__()

    def __complex__(self) -> complex:
        return self._scalar(complex)

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
            return bool(self.as_subclass(Tensor))
        decided = self._decided(frame)
        return bool(self._read_out()) if decided is None else decided

    def __format__(self, spec: str) -> str:
        return format(self._read_out(), spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return self.as_subclass(Tensor).__repr__(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.as_subclass(Tensor).__deepcopy__(memo) if self.requires_grad else self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """State for copies and files, which contain a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._read_out(all_values=True).__reduce_ex__(protocol)


def _kept(result: Any, args: Any, options: Any) -> Any:
    """``result`` of tensors of former batches: a total or a list that a loop reads out at the end of an epoch. It stays
    of this rank's samples until that is said."""
    readings = _own(args, options)
    return _unwatched(result, args, options) if readings is None else of_this_rank(result, readings)


def _own(args: Any, options: Any) -> Readings | None:
    """The readings of numbers of this rank's samples among the arguments; None if there are no such numbers, or all
    warnings about them were given."""
    found = ((t, t.tape.readings) for t in watched_in((args, options)))
    return next(
        (r for t, r in found if r is not None and not (r.said and r.written) and not t.tape.of_all_ranks(t)), None
    )


def of_this_rank(values: Any, readings: Readings) -> Any:
    """``values`` with their tensors known as made of this rank's samples. The batch's own tensors are not kept."""
    light = Tape(0, closed=True, readings=readings)

    def kept(leaf: Any) -> Any:
        if type(leaf) is not Tensor or leaf.requires_grad:
            return leaf
        former = leaf.as_subclass(Watched)
        former.tape = light
        return former

    return pytree.tree_map(kept, values)


def _written(args: Any, options: Any) -> None:
    """Tell of numbers of this rank's samples that are written into the first of ``args``."""
    if (readings := _own(args[1:], options)) is not None:
        with torch._C.DisableTorchFunctionSubclass():
            for target in args[0] if isinstance(args[0], list | tuple) else (args[0],):
                if isinstance(target, Tensor) and not readings.written:
                    readings.write(target)


def _unwatched(result: Any, args: Any, options: Any) -> Any:
    """``result`` with plain tensors, except those that were passed in."""
    inputs = {id(leaf) for leaf in pytree.tree_leaves((args, options))}

    def plain(leaf: Any) -> Any:
        return leaf if id(leaf) in inputs else as_plain(leaf)

    return pytree.tree_map(plain, result)


_SPLITTING = ("unbind", "__iter__", "split", "chunk", "tensor_split", "vsplit", "unsafe_chunk", "unsafe_split")


def _sample_by_sample(func: Any, args: Any, rows: int, result: Any) -> bool:
    """Whether an operation splits a batch into samples, so that later operations exist once for each of this rank's
    samples."""
    name = getattr(func, "__name__", "")
    if name in _SPLITTING:
        per_sample = isinstance(result, tuple | list) and rows > 1 and len(result) == rows
        return per_sample and (result[0].dim() < args[0].dim() or len(result[0]) < len(args[0]))
    if name != "__getitem__" or not args[0].dim() or len(args[0]) != rows:
        return False
    key = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    return type(key) is int or (isinstance(key, slice) and rows > 1 and len(result) == 1)


def _is_mask(result: Any) -> bool:
    return isinstance(result, Tensor) and not result.requires_grad and (result.dtype is torch.bool or not result.dim())


def as_plain(leaf: Any) -> Any:
    """``leaf``, without a recording of its operations if it is a tensor."""
    return leaf.as_subclass(Tensor) if isinstance(leaf, Watched) else leaf


def _is_computed(result: Any, args: Any) -> bool:
    """Whether an attribute is part of the computation (``x.T``), and not information about it (``x.grad``)."""
    return isinstance(result, Tensor) and result.requires_grad == args[0].requires_grad


def watched_in(values: Any) -> Iterator[Watched]:
    """The tensors in ``values`` whose operations are recorded."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Watched) and hasattr(leaf, "tape"):
            yield leaf


def _skip_in_compile() -> None:
    """Make ``torch.compile``, where a program uses it, skip functions that get recorded tensors."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    wrapper: Any = getattr(module, "CatchErrorsWrapper", None)
    if wrapper is not None:
        replace_once(wrapper, "__call__", _skipping)


def _skipping(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, frame: Any, *rest: Any) -> Any:
        if next(watched_in(list(frame.f_locals.values())), None) is None:
            return original(self, frame, *rest)
        kinds: Any = sys.modules["torch._dynamo.types"]
        once = kinds.FrameExecStrategy(kinds.FrameAction.SKIP, kinds.FrameAction.SKIP)
        why = "a tensor in it is written down"
        return kinds.ConvertFrameReturn(frame_exec_strategy=once, apply_to_code=False, skip_reason=why)

    return run


def functions_followed(on: bool) -> None:
    """Record each call of a program's own autograd function as one operation, or stop doing so."""
    _skip_in_compile()
    base: Any = torch.autograd.Function
    original = base.__dict__["apply"]
    if hasattr(original, "asa"):
        if not on:
            base.apply = original.asa
        return
    if not on:
        return

    def apply(cls: Any, *args: Any, **options: Any) -> Any:
        run = original.__get__(None, cls)
        tape = next((t.tape for t in watched_in((args, options))), None)
        if tape is None:
            return run(*args, **options)
        result = run_plain(run, args, options)
        return result if tape.problem else tape.note(run, args, options, result)

    wrapped: Any = classmethod(apply)
    wrapped.asa = original
    base.apply = wrapped
