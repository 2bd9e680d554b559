"""What a program does with a model's outputs up to its loss, written down once and done again with the whole batch.

A loss that is no mean over samples (a sum, a ratio of sums, one that compares samples) is another on each rank's part
than on the whole. Nothing in a program says which it is; so the first time it is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from asa.executor.model.votes import Votes

MOST_BYTES = 1 << 28
"""Most bytes of outputs and labels of a whole batch that are brought together on every rank."""


@dataclass
class Tape:
    """Operations on tensors that come of ``outputs``, in order. ``rows``: samples of this rank.

    ``finished`` is called with the tape and the loss when the loss is differentiated, around its backward.
    """

    rows: int
    finished: Callable[[Tape, Tensor, Callable[[], None]], None]
    outputs: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    """What the outputs were when they left the model."""
    received: dict[int, Tensor] = field(default_factory=dict)
    """By number of the output: its gradient."""
    versions: list[int] = field(default_factory=list)
    """Versions of the leaves, as they were first seen."""
    changed: list[int] = field(default_factory=list)
    """Versions of the outputs, when they left the model."""
    operations: list[tuple[Callable[..., Any], Any, Any, Any]] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    """By place: what was seen there. Places number outputs, leaves and results."""
    strange: str = ""
    """Why it does not say everything."""

    def follow(self, output: Tensor) -> Tensor:
        """``output`` as what is written down from now on."""
        watched = output.as_subclass(Watched)
        watched.tape = self
        self._place(watched)
        number = len(self.outputs)
        self.outputs.append(watched)
        self.values.append(output.detach().clone())
        self.changed.append(watched._version)

        def received(gradient: Tensor) -> None:
            plain, known = gradient.detach().as_subclass(Tensor), self.received.get(number)
            self.received[number] = plain.clone() if known is None else known + plain

        with torch._C.DisableTorchFunctionSubclass():
            watched.register_hook(received)
        return watched

    def _place(self, tensor: Tensor) -> int:
        self.places[id(tensor)] = len(self.kept)
        self.kept.append(tensor)
        return len(self.kept) - 1

    def note(self, function: Callable[..., Any], args: Any, options: Any, result: Any) -> Any:
        """Write down one operation."""
        spec = pytree.tree_map(self._named, (args, options))
        given = [leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, Tensor)]

        def watched(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            same = next((g for g in given if g is leaf), None)
            if same is None:
                same = leaf.as_subclass(Watched)
                same.tape = self  # type: ignore[attr-defined]
            return same

        found = pytree.tree_map(watched, result)
        places = pytree.tree_map(
            lambda leaf: (
                Place(self.places[id(leaf)] if id(leaf) in self.places else self._place(leaf))
                if isinstance(leaf, Tensor)
                else None
            ),
            found,
        )
        self.operations.append((function, *spec, places))
        return found

    def _named(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.places:
            if isinstance(leaf, Watched):
                self.strange = "part of it is computed where it cannot be followed"
            self.leaves.append(leaf)
            self.versions.append(leaf._version)
            self._place(leaf)
        return Place(self.places[id(leaf)])

    def again(self, values: dict[int, Tensor], loss: Tensor, number: Callable[[int], int]) -> Tensor:
        """The loss with ``values`` at the places of outputs and leaves; whole numbers become those of ``number``."""
        found = dict(values)

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return found[leaf.index]
            return number(leaf) if type(leaf) is int else leaf

        for function, args, options, places in self.operations:
            new_args, new_options = pytree.tree_map(given, (args, options))
            result = function(*new_args, **new_options)
            for place, value in zip(pytree.tree_leaves(places), pytree.tree_leaves(result), strict=True):
                if isinstance(place, Place):
                    found[place.index] = value
        return found[self.places[id(loss)]]

    def place_of(self, tensor: Tensor) -> int:
        """Where ``tensor`` is."""
        return self.places[id(tensor)]


@dataclass(frozen=True)
class Place:
    """A tensor on a tape."""

    index: int


class Watched(Tensor):
    """A tensor whose operations are written down."""

    tape: Tape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        tape = next((t.tape for t in _watched((args, options))), None)
        if func is Tensor.backward and tape is not None and isinstance(args[0], Watched):
            loss = args[0]
            tape.finished(tape, loss, lambda: _plainly(func, args, options))
            return None
        result = _plainly(func, args, options)
        if tape is None or not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            return result
        if func in (Tensor.detach, torch.detach):  # what a program keeps is a tensor like any other
            return result.as_subclass(Tensor)
        if getattr(func, "__name__", "") == "__get__" and not _shown(result, args):
            return result
        return tape.note(func, args, options, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and files hold a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _shown(result: Any, args: Any) -> bool:
    """Whether an attribute is part of the computation (``x.T``), not a note about it (``x.grad``)."""
    return isinstance(result, Tensor) and result.requires_grad == args[0].requires_grad


def _plainly(func: Any, args: Any, options: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **options)


def _watched(values: Any) -> Iterator[Watched]:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Watched) and hasattr(leaf, "tape"):
            yield leaf


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How a loss on the parts differs from that on the whole. ``loss_parts`` is the mean over the samples of what ranks
    have, ``loss_whole`` that of the whole batch, ``gradients`` the largest relative distance of an output's gradient.
    ``unknown``: why it could not be told."""

    loss_parts: float = 0.0
    loss_whole: float = 0.0
    gradients: float = 0.0
    unknown: str = ""


class Comparison:
    """A tape on every rank, done again with the whole batch (collective, in the same order everywhere)."""

    def __init__(self, votes: Votes, tape: Tape, loss: Tensor, weight: float) -> None:
        self._votes, self._tape, self._loss, self._weight = votes, tape, loss, weight
        self._seen: dict[int, Tensor] = {}
        self._wholes: list[dict[int, Tensor]] = []
        self.unknown = self._prepare()

    def _prepare(self) -> str:
        tape, votes = self._tape, self._votes
        device = self._loss.device
        reason = tape.strange
        if not reason and tape.places.get(id(self._loss)) is None:
            reason = "part of it is computed where it cannot be followed"
        if any(leaf._version != v for leaf, v in zip(tape.leaves, tape.versions, strict=True)):
            reason = "what it is computed from is changed in place"
        if any(o._version != v for o, v in zip(tape.outputs, tape.changed, strict=True)):
            reason = "an output of the model is changed in place"
        leaves = [*tape.values, *tape.leaves]
        places = [tape.place_of(t) for t in (*tape.outputs, *tape.leaves)]
        batched = [_cut(t, tape.rows) for t in leaves]
        size = sum(t.nbytes for t, b in zip(leaves, batched, strict=True) if b) * votes.num_ranks
        if not reason and size > MOST_BYTES:
            reason = f"its whole batch has {size / 2**20:.0f} MiB of outputs"
        if not reason and any(not _cut(t, tape.rows) for t in tape.values):
            reason = "an output of the model has no row for each sample"
        found = votes.gather([float(bool(reason)), float(len(tape.operations)), float(len(leaves)), float(tape.rows)])
        if any(f[0] for f in found):
            return reason or "another rank could not follow it"
        if len({tuple(f[1:3]) for f in found}) > 1:
            return "ranks compute it in different ways"
        rows = [int(f[3]) for f in found]
        fixed: dict[int, Tensor] = {}
        alike: dict[int, Tensor] = {}
        summed: dict[int, Tensor] = {}
        wholes: dict[int, Tensor] = {}
        for number, (tensor, cut) in enumerate(zip(leaves, batched, strict=True)):
            at = places[number]
            plain = tensor.detach().as_subclass(Tensor)
            if votes.everyone(cut):
                parts = gathered(votes, plain.cpu())
                wholes[at] = torch.cat(parts).to(device)
                if number >= len(tape.outputs) and all(
                    p.shape == parts[0].shape and torch.equal(p, parts[0]) for p in parts
                ):
                    alike[at] = plain
            else:
                fixed[at] = plain
                if votes.everyone(not tensor.dim()):
                    every = [v[0] for v in votes.gather([float(plain)])]
                    if len(set(every)) > 1:  # a count of this rank's samples, it may be
                        summed[at] = torch.full_like(plain, sum(every))
        base = fixed | wholes
        readings = (base, base | summed, base | alike, base | alike | summed)
        self._wholes = [r for i, r in enumerate(readings) if (summed or not i % 2) and (alike or i < 2)]
        self._rows = rows
        return ""

    def grown(self) -> list[Callable[[int], int]]:
        """What whole numbers in a program may mean: themselves, this rank's samples, or so many times those."""
        mine, total = self._tape.rows, sum(self._rows)
        sizes = {int(t.shape[0]) for t in self._tape.kept if isinstance(t, Tensor) and t.dim()}
        return [
            lambda n: n,
            lambda n: total if n == mine else n,
            lambda n: n // mine * total if n in sizes and n % mine == 0 else n,
        ]

    def whole(self) -> list[tuple[float, list[Tensor]]]:
        """The loss of the whole batch, and the gradients of this rank's rows of the outputs, by every reading of the
        program that runs."""
        tape = self._tape
        first = sum(self._rows[: self._votes.rank])
        found = []
        for values in self._wholes:
            for number in self.grown():
                held = {k: v.clone() for k, v in values.items()}
                outputs = []
                for o in tape.outputs:
                    at = tape.place_of(o)
                    entry = held[at].requires_grad_(o.is_floating_point())
                    outputs.append(entry)
                    held[at] = entry.clone()
                try:
                    with torch.enable_grad():
                        loss = tape.again(held, self._loss, number)
                        gradients = torch.autograd.grad(loss.sum(), outputs, allow_unused=True)
                except Exception:  # numbers that fit no shape
                    continue
                rows = []
                for entry, g in zip(outputs, gradients, strict=True):
                    per = len(entry) // sum(self._rows)
                    whole = torch.zeros_like(entry) if g is None else g
                    rows.append(whole[first * per : (first + tape.rows) * per])
                found.append((float(loss.detach().sum()), rows))
        return found

    def difference(self, received: list[Tensor | None]) -> Difference:
        """``received``: the gradients that the outputs had in the loop's own backward, before they were weighed."""
        if self.unknown:
            return Difference(unknown=self.unknown)
        votes, ranks = self._votes, self._votes.num_ranks
        share = self._weight / ranks
        best: Difference | None = None
        parts = sum(p[0] for p in votes.gather([float(self._loss.detach().sum()) * share]))
        readings = self.whole()
        count = int(min(v[0] for v in votes.gather([float(len(readings))])))
        if not count:
            return Difference(unknown="it cannot be done again with a whole batch")
        for value, rows in readings[:count]:
            off = size = 0.0
            for got, want in zip(received, rows, strict=True):
                mine = torch.zeros_like(want) if got is None else got.detach().to(want) * share
                off += float((mine.double() - want.double()).square().sum())
                size += float(want.double().square().sum())
            sums = votes.gather([off, size])
            total, scale = sum(s[0] for s in sums), sum(s[1] for s in sums)
            relative = (total / scale) ** 0.5 if scale > 0 else float(total > 0)
            found = Difference(loss_parts=parts, loss_whole=value, gradients=relative)
            if best is None or relative < best.gradients:
                best = found
        assert best is not None
        return best


def _cut(tensor: Tensor, rows: int) -> bool:
    """Whether ``tensor`` has so many rows, or some for each."""
    return bool(tensor.dim()) and rows > 0 and tensor.shape[0] > 0 and tensor.shape[0] % rows == 0


def gathered(votes: Votes, part: Tensor) -> list[Tensor]:
    """Every rank's ``part`` (on the host, of one dtype and as many dimensions everywhere), by rank."""
    if votes.num_ranks == 1:
        return [part]
    shapes = [tuple(int(n) for n in s) for s in votes.gather([float(n) for n in part.shape])]
    found = []
    for rank, shape in enumerate(shapes):
        tensor = part.contiguous().clone() if rank == votes.rank else torch.empty(shape, dtype=part.dtype)
        wire = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
        dist.broadcast(wire, rank, group=votes.group)
        found.append(tensor)
    return found
