"""Comparison of a loss computed on the parts of a batch with the same loss on the whole batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from asa.api.tape import MOST_BYTES, Tape
from asa.executor.model.votes import Votes

_ROUNDING = 1e-10
"""Difference by which an interpretation must be closer than a preferred one."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between a loss on the parts and on the whole. ``loss_parts``: mean over ranks, weighted by samples;
    ``loss_whole``: of the whole batch; ``gradients``: largest relative distance of an output's gradient; ``inputs``:
    the same for the model's inputs. ``own``: a number in the program that differs between ranks. ``repeated``: whether
    a tensor with rows that does not come from the batch is the same on every rank. ``unknown``: why the difference
    could not be determined."""

    loss_parts: float = 0.0
    loss_whole: float = 0.0
    gradients: float = 0.0
    inputs: float = 0.0
    own: float | None = None
    repeated: bool = False
    unknown: str = ""


class Comparison:
    """Repeats each rank's tape with the whole batch (collective, in the same order on all ranks)."""

    def __init__(self, votes: Votes, tape: Tape, loss: Tensor, weight: float) -> None:
        self._votes, self._tape, self._loss, self._weight = votes, tape, loss, weight
        self._seen: dict[int, Tensor] = {}
        self._wholes: list[tuple[dict[int, Tensor], bool, bool]] = []
        self._repeated = False
        self._apart_by: float | None = None
        """Value on rank 0 of a tensor without rows that differs between ranks."""
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
        self._floats = [n for o in tape.operations for n in pytree.tree_leaves(o[1:3]) if type(n) is float]
        written = float(zlib.crc32(repr(self._floats).encode()))
        found = votes.gather([float(bool(reason)), float(len(leaves)), float(tape.rows), written])
        if any(f[0] for f in found):
            return reason or "another rank could not follow it"
        if len({f[1] for f in found}) > 1:
            return "ranks compute it in different ways"
        self._own = self._own_number() if len({f[3] for f in found}) > 1 else None
        rows = [int(f[2]) for f in found]
        fixed: dict[int, Tensor] = {}
        alike: dict[int, Tensor] = {}
        summed: dict[int, Tensor] = {}
        wholes: dict[int, Tensor] = {}
        others = False
        made = len(tape.outputs) + tape.read
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
                    if number >= made and not self._repeated and bool((plain != plain[:1]).any()):
                        count = len(plain) // tape.rows * sum(int(f[2]) for f in found)
                        if torch.equal(plain, torch.arange(len(plain), device=plain.device, dtype=plain.dtype)):
                            wholes[at] = torch.arange(count, device=plain.device, dtype=plain.dtype)
                        else:
                            self._repeated = True
            else:
                fixed[at] = plain
                known = plain.double().reshape(-1) if type(plain) is Tensor and plain.layout is torch.strided else None
                every = [v[0] for v in votes.gather([0.0 if known is None else float(known.abs().sum())])]
                from_loader = len(tape.outputs) <= number < made and bool(tensor.dim())
                if (
                    len(set(every)) > 1 and known is not None and not from_loader
                ):  # a count of this rank's samples, it may be
                    self._apart_by = every[0]
                    others = others or bool(tensor.dim())
                    if not tensor.dim():
                        summed[at] = torch.full_like(plain, sum(v[0] for v in votes.gather([float(plain)])))
        base = fixed | wholes
        readings = ((base | alike | summed, False), (base | summed, False), (base | alike, True), (base, True))
        self._wholes = [
            (r, others or (own and bool(summed)), self._repeated and bool(i % 2))
            for i, (r, own) in enumerate(readings)
            if (summed or i > 1) and (alike or i % 2)
        ]
        self._rows = rows
        return ""

    def _own_number(self) -> float | None:
        """The first number in the program that differs between ranks (collective); None if there is none."""
        every = self._votes.exchange([repr(n) for n in self._floats])
        apart = (i for i, each in enumerate(zip(*every, strict=False)) if len(set(each)) > 1)
        at = next(apart, None)
        return None if at is None else float(every[0][at])

    def grown(self) -> list[Callable[[int], int]]:
        """Possible meanings of whole numbers in a program: themselves, this rank's samples, or multiples of them."""
        mine, total = self._tape.rows, sum(self._rows)
        tensors = [t for t in self._tape.kept if isinstance(t, Tensor) and t.dim()]
        sizes, numbers = {int(t.shape[0]) for t in tensors}, {t.numel() for t in tensors}
        return [
            lambda n: n,
            lambda n: total if n == mine else n,
            lambda n: n // mine * total if n in sizes and n % mine == 0 else n,
            lambda n: n // mine * total if n in numbers and n % mine == 0 else n,
        ]

    def whole(self) -> list[tuple[float, list[Tensor], list[tuple[Tensor, Tensor]], bool, bool]]:
        """For every interpretation of the program that runs: the loss of the whole batch, the gradients of this rank's
        rows of the outputs, pairs of its rows of the model's inputs and their actual values, and whether it assumes
        that tensors which differ between ranks are as on this rank."""
        tape = self._tape
        first, total = sum(self._rows[: self._votes.rank]), sum(self._rows)
        at = tape.place_of(self._loss)
        own = {id(t) for t in tape.leaves}
        given = [t for t in tape.given if id(t) not in own and _cut(t, tape.rows)]
        found = []

        def mine(whole: Tensor) -> Tensor:
            per = len(whole) // total
            return whole[first * per : (first + tape.rows) * per]

        for values, own_ones, repeated in self._wholes:
            for number in self.grown():
                held = {k: v.clone() for k, v in values.items()}
                outputs = []
                for o in tape.outputs:
                    place = tape.place_of(o)
                    entry = held[place].requires_grad_(o.is_floating_point())
                    outputs.append(entry)
                    held[place] = entry.clone()
                try:
                    with torch.enable_grad():
                        done = tape.again(held, number)
                        gradients = torch.autograd.grad(done[at].sum(), outputs, allow_unused=True)
                except Exception:  # numbers that fit no shape
                    continue
                pairs = []
                if any(tape.place_of(t) not in done for t in given):  # something on the way cannot be done again
                    continue
                for t in given:
                    there = done.get(tape.place_of(t))
                    if there is not None and there.dim() and len(there) * tape.rows == len(t) * total:
                        pairs.append((mine(there.detach()), t.detach().as_subclass(Tensor)))
                rows = [mine(torch.zeros_like(e) if g is None else g) for e, g in zip(outputs, gradients, strict=True)]
                found.append((float(done[at].detach().sum()), rows, pairs, own_ones, repeated))
        return found

    def difference(self, received: list[Tensor | None]) -> Difference:
        """The difference. ``received``: gradients that the outputs had in the loop's own backward, before weighting."""
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
        for value, rows, pairs, own_ones, repeated in readings[:count]:
            gradients = [
                (torch.zeros_like(want) if got is None else got.detach().to(want) * share, want)
                for got, want in zip(received, rows, strict=True)
            ]
            found = Difference(
                loss_parts=parts, loss_whole=value, gradients=self._apart(gradients),
                inputs=self._apart([(t, want) for want, t in pairs]),
                own=self._apart_by if own_ones and self._own is None else self._own,
                repeated=repeated,
            )  # fmt: skip
            if best is None or max(found.gradients, found.inputs) < max(best.gradients, best.inputs) - _ROUNDING:
                best = found
        assert best is not None
        return best

    def _apart(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """Relative distance of all ranks' tensors from the desired ones (collective)."""
        off = size = 0.0
        for mine, want in pairs:
            if mine.shape != want.shape:
                off = size = 1.0
                continue
            kind = torch.complex128 if want.is_complex() else torch.float64
            off += float((mine.to(kind) - want.to(kind)).abs().square().sum())
            size += float(want.to(kind).abs().square().sum())
        sums = self._votes.gather([off, size])
        total, scale = sum(s[0] for s in sums), sum(s[1] for s in sums)
        return (total / scale) ** 0.5 if scale > 0 else float(total > 0)


def _cut(tensor: Tensor, rows: int) -> bool:
    """Whether ``tensor`` has ``rows`` rows, or a multiple of them."""
    return bool(tensor.dim()) and rows > 0 and tensor.shape[0] > 0 and tensor.shape[0] % rows == 0


def gathered(votes: Votes, part: Tensor) -> list[Tensor]:
    """Every rank's ``part`` (on the host, with equal dtype and number of dimensions), by rank."""
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
