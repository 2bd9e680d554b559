"""Comparison of a loss computed on the parts of a batch with the same loss on the whole batch."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from asa.api.losses.tape import ARITHMETIC, MOST_BYTES, Tape, counts_samples, is_batched, number_mappings
from asa.executor.model.votes import Votes

_READ_OUT = "it is computed with tensors that are made of what was taken out of torch (numpy(), tolist())"
_DISTINCT = 1e-3
"""Least relative difference of two interpretations that are told apart."""
_EITHER = 3
"""Largest number of tensors from beside the batch of which each is tried with this rank's rows and with those of all.
"""
_ROUNDING = 1e-10
"""Difference by which an interpretation must be closer than a preferred one."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between a loss on the parts of a batch and on the whole batch.

    ``loss_parts``: mean of the ranks' losses, weighted by samples; ``loss_whole``: loss of the whole batch.
    ``gradients``, ``inputs``: largest relative distance of an output's gradient, and of an input of the model.
    ``differing_number``: a number in the program that differs between ranks; ``differing_tensor``: which tensor beside
    the batch does.
    ``repeated``: whether a tensor with one row per sample, not from the batch, is the same on every rank; ``stepped``:
    whether such a tensor was interpreted as continued from rank to rank.
    ``doubt``: why a difference may have been missed. ``unknown``: why nothing could be compared."""

    loss_parts: float = 0.0
    loss_whole: float = 0.0
    gradients: float = 0.0
    inputs: float = 0.0
    differing_number: float | None = None
    differing_tensor: str = ""
    repeated: bool = False
    stepped: bool = False
    doubt: str = ""
    unknown: str = ""


@dataclass
class _Tensors:
    """Tensors that a loss is computed from, by their positions on the tape.

    ``base``: of the whole batch, or this rank's own if it has no row for each sample. ``alike``: this rank's own, if
    all ranks have the same; ``unlike``: if they have not, and its length may be that of something else than samples.
    ``summed``: sums over ranks of numbers that differ between them.
    ``differ``: whether ranks differ in one that the loss needs; ``distinct``: whether samples do in an output;
    ``others_differ``: whether ranks differ in one without rows that is no number."""

    base: dict[int, Tensor] = field(default_factory=dict)
    alike: dict[int, Tensor] = field(default_factory=dict)
    unlike: dict[int, Tensor] = field(default_factory=dict)
    summed: dict[int, Tensor] = field(default_factory=dict)
    differ: bool = False
    distinct: bool = False
    others_differ: bool = False


class Comparison:
    """Repeats each rank's tape with the whole batch (collective, in the same order on all ranks)."""

    def __init__(self, votes: Votes, tape: Tape, loss: Tensor, weight: float) -> None:
        self._votes, self._tape, self._loss, self._weight = votes, tape, loss, weight
        self._interpretations: list[tuple[dict[int, Tensor], bool, bool]] = []
        self._stepped = self._counts = False
        self._repeated: set[int] = set()
        """Positions of tensors from beside the batch, of unlike rows, that are the same on all ranks."""
        self._doubt = ""
        self._differing_value: float | None = None
        """Value on rank 0 of a tensor without rows that differs between ranks."""
        self._differing_tensor = ""
        """Which tensor from beside the batch differs between ranks."""
        self._same = False
        """Whether all ranks have the same samples, and none of the loader's: a batch that the loop drew itself."""
        self._rows: list[int] = []
        """Number of samples of each rank that count."""
        self._read_out = False
        """Whether a rank's program has taken numbers of the batch out of torch, of which it may have made tensors."""
        self.unknown = self._prepare()

    def _prepare(self) -> str:
        """Agree with all ranks on what is compared, and find the interpretations of the tensors beside the batch
        (collective); returns why nothing can be compared, or an empty text."""
        tape, votes = self._tape, self._votes
        leaves = [*tape.values, *tape.leaves]
        batched = [is_batched(t, tape.rows) and not isinstance(t, nn.Parameter) for t in leaves]
        reason = self._obstacle(leaves, batched)
        # An output without rows that is the same on all ranks (a temperature) is the same for the whole batch.
        others = [t.detach().double().abs().sum() for t in tape.values if not is_batched(t, tape.rows)]
        size_of_others = float(torch.stack(others).sum()) if others and not reason else 0.0
        if len({f[0] for f in votes.gather([size_of_others])}) > 1:
            reason = (
                reason
                or "an output of the model has no row for each sample: one over pairs of samples has each rank's own"
            )
        figures = [float(tape.rows), float(tape.rows if self._weight else 0), float(tape.array_read)]
        by_rank = votes.gather([float(bool(reason)), float(len(leaves)), *figures])
        if any(f[0] for f in by_rank):
            return reason or "another rank could not follow it"
        if len({f[1] for f in by_rank}) > 1:
            return "ranks compute it in different ways"
        self._rows, self._read_out = [int(f[3]) for f in by_rank], any(f[4] for f in by_rank)
        self._differing_number = self._find_differing_number([f[2] for f in by_rank])
        self._for_loss = tape.needed([self._loss])[1]
        found = _Tensors(differ=bool(self._for_loss & tape.of_batch))
        positions = [tape.index_of(t) for t in (*tape.outputs, *tape.leaves)]
        for number, (at, tensor, split) in enumerate(zip(positions, leaves, batched, strict=True)):
            output, plain = number < len(tape.outputs), tensor.detach().as_subclass(Tensor)
            beside = not output and at not in tape.of_batch
            square = beside and split and tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
            if votes.everyone(square) and self._add_square(found, at, plain):
                continue
            if not votes.everyone(split):
                self._add_without_rows(found, at, plain, from_loader=at in tape.of_batch and bool(tensor.dim()))
            elif not self._add_rows(found, at, plain, output=output, beside=beside):
                return "something beside the batch has other sizes on other ranks"
        self._interpretations = self._interpreted(found)
        self._same = votes.everyone(found.distinct and not found.differ and self._differing_number is None)
        return ""

    def _obstacle(self, leaves: list[Tensor], batched: list[bool]) -> str:
        """Why this rank cannot repeat the program with the whole batch; empty if it can."""
        tape = self._tape
        if any(o._version != v for o, v in zip(tape.outputs, tape.changed, strict=True)):
            return "an output of the model is changed in place"
        used = tape.needed([self._loss, *tape.model_inputs])[1]
        if any(
            leaf._version != v and tape.index_of(leaf) in used
            for leaf, v in zip(tape.leaves, tape.versions, strict=True)
        ):
            return "what it is computed from is changed in place"
        if reason := tape.why_not(self._loss):
            return reason
        size = sum(t.nbytes for t, b in zip(leaves, batched, strict=True) if b) * self._votes.num_ranks
        return f"its whole batch has {size / 2**20:.0f} MiB of outputs" if size > MOST_BYTES else ""

    def _add_square(self, found: _Tensors, at: int, plain: Tensor) -> bool:
        """Add ``plain``, a square matrix from beside the batch, extended to the whole batch (collective); returns False
        if it cannot be extended."""
        parts = gathered(self._votes, plain.cpu())
        square = _extended_by_views(parts, sum(self._rows), len(plain) // self._tape.rows)
        if square is None:
            return False
        found.base[at] = square.to(self._loss.device)
        if all(torch.equal(p, parts[0]) for p in parts):  # or a table of as many classes
            found.alike[at] = plain
        else:
            found.differ = True
        return True

    def _add_rows(self, found: _Tensors, at: int, plain: Tensor, *, output: bool, beside: bool) -> bool:
        """Add a tensor with a row for each sample, put together from all ranks (collective); returns False if it has
        other sizes on other ranks. ``output``: of the model; ``beside``: neither that nor of the batch."""
        rows, device = self._rows, self._loss.device
        parts = gathered(self._votes, plain.cpu() if self._weight else plain.cpu()[:0])
        if len({p.shape[1:] for p in parts}) > 1:
            return False
        found.base[at] = torch.cat(parts).to(device)
        parts = [p for p, count in zip(parts, rows, strict=True) if count]
        equal = all(p.shape == parts[0].shape and torch.equal(p, parts[0]) for p in parts)
        if at in self._for_loss:
            found.differ = found.differ or not equal or len(parts) == 1
            found.distinct = found.distinct or (output and bool((plain != plain[:1]).any()))
        if not output and equal:
            found.alike[at] = plain
        elif beside and min(rows) > 1 and len({p.shape for p in parts}) == 1:
            # Its length may be that of something else than samples (features, classes).
            found.unlike[at] = plain
            if not self._differing_tensor or len(plain) != self._tape.rows:
                self._differing_tensor = self._tape.named(at)
        if beside and len(parts) > 1:
            numbered = _numbers_of_views(parts, [count for count in rows if count])
            if numbered is None:
                numbered = self._by_index(at, parts, len(found.base[at]))
            if numbered is not None:
                found.base[at] = numbered.to(device)
        return True

    def _add_without_rows(self, found: _Tensors, at: int, plain: Tensor, *, from_loader: bool) -> None:
        """Add a tensor without a row for each sample, as this rank has it; a number that differs between ranks also as
        their sum (collective)."""
        votes = self._votes
        found.base[at] = plain
        flat = plain.double().reshape(-1) if type(plain) is Tensor and plain.layout is torch.strided else None
        every = [v[0] for v in votes.gather([0.0 if flat is None else float(flat.abs().sum())])]
        if len(set(every)) == 1 or flat is None or from_loader:
            return  # what the loader made may be this rank's number of samples
        found.differ = found.differ or at in self._for_loss
        if plain.dim():
            found.others_differ = True
            self._differing_tensor = self._differing_tensor or self._tape.named(at)
        else:
            self._differing_value = every[0]
            found.summed[at] = torch.full_like(plain, sum(v[0] for v in votes.gather([float(plain)])))

    def _interpreted(self, found: _Tensors) -> list[tuple[dict[int, Tensor], bool, bool]]:
        """Interpretations of the tensors from beside the batch, the preferred ones first: the tensors, whether what
        differs between ranks is as on this rank, and whether a tensor with the same rows on all ranks is repeated."""
        base, alike, summed = found.base, found.alike, found.summed
        readings = ((base | alike | summed, False), (base | summed, False), (base | alike, True), (base, True))
        interpretations = [
            (r, found.others_differ or (assumes_local and bool(summed)), bool(self._repeated) and bool(i % 2))
            for i, (r, assumes_local) in enumerate(readings)
            if (summed or i > 1) and (alike or i % 2)
        ]
        either = alike | found.unlike
        each = chain.from_iterable(combinations(either, n) for n in range(len(either), 0, -1))
        for own in each if len(either) <= _EITHER else dict.fromkeys((tuple(either), tuple(found.unlike))):
            if own and {*own} != {*alike}:
                local = found.others_differ or bool(summed) or not found.unlike.keys().isdisjoint(own)
                kept = base | {k: either[k] for k in own}
                interpretations.append((kept, local, not self._repeated.issubset(own)))
        return interpretations

    def _by_index(self, at: int, parts: list[Tensor], count: int) -> Tensor | None:
        """The whole tensor [count, ...] of ``parts``, one per rank, that were not made from the batch, if their values
        depend on a sample's index in equal steps; otherwise None. Also records other findings about the tensor, which
        is ``at`` this position."""
        read_out, longest = self._read_out, max(parts, key=len)
        fewest = min(map(len, parts))
        if not all(p.shape[1:] == longest.shape[1:] and torch.equal(p, longest[: len(p)]) for p in parts):
            self._doubt = self._doubt or (_READ_OUT if read_out else "")
            return None
        if len(longest) == 1:
            self._doubt = self._doubt or (
                "a tensor that is made beside the batch has one row on every rank, and may go by the sample's place"
            )
            return None
        if not bool((longest != longest[:1]).any()):
            return None
        if read_out and not bool((longest[:fewest] != longest[:1]).any()):
            self._doubt = self._doubt or _READ_OUT
            return None
        steps = longest[1:] - longest[:-1] if longest.dtype is not torch.bool else longest
        step, enough = steps.flatten()[:1], longest.dim() == 1 or len(longest) > 2 or not longest.is_floating_point()
        if enough and len(step) and longest.dtype is not torch.bool and bool((steps == step).all()):
            self._stepped = self._stepped or bool((longest[0] != 0).any()) or bool(step != 1)
            numbers = torch.arange(count, dtype=longest.dtype).view(-1, *(1,) * (longest.dim() - 1))
            return longest[:1] + step * numbers
        self._repeated.add(at)
        return None

    def _find_differing_number(self, rows: list[float]) -> float | None:
        """The first number in the program that differs between ranks (collective); None if there is none. ``rows``:
        samples of each rank. If these differ, whole numbers and their reciprocals may differ, too."""
        kinds = (float, int) if len(set(rows)) == 1 else (float,)
        every = [
            (function, n)
            for function, args, options, _ in self._tape.needed([self._loss, *self._tape.model_inputs])[0]
            for n in pytree.tree_leaves((args, options))
            if type(n) is float or (type(n) is int and getattr(function, "__name__", "") in ARITHMETIC)
        ]
        self._counts = any(type(n) is int and n == self._tape.rows and counts_samples(f) for f, n in every)
        numbers = [n for _, n in every if type(n) in kinds]
        if len({v[0] for v in self._votes.gather([float(zlib.crc32(repr(numbers).encode()))])}) == 1:
            return None
        by_rank = self._votes.exchange([repr(n) for n in numbers])
        parts = [repr(1 / r) for r in rows]
        differing = (i for i, n in enumerate(zip(*by_rank, strict=False)) if len(set(n)) > 1 and list(n) != parts)
        at = next(differing, None)
        return None if at is None else float(by_rank[0][at])

    def _whole_batch_results(self) -> list[tuple[float, list[Tensor], list[tuple[Tensor, Tensor]], bool, bool, int]]:
        """Results of every interpretation of the program that runs: the loss of the whole batch; the gradients of this
        rank's rows of the outputs; pairs of its rows of the model's inputs and their actual values; whether
        it assumes that tensors which differ between ranks are as on this rank."""
        tape = self._tape
        first, total = sum(self._rows[: self._votes.rank]), sum(self._rows)
        at = tape.index_of(self._loss)
        leaf_ids = {id(t) for t in tape.leaves}
        inputs = [t for t in tape.model_inputs if id(t) not in leaf_ids and is_batched(t, tape.rows)]
        have_rows = [is_batched(v, tape.rows) for v in tape.values]
        results = []

        counted = self._rows[self._votes.rank]

        def local_rows(tensor: Tensor) -> Tensor:
            per = len(tensor) // total
            return tensor[first * per : (first + counted) * per]

        for values, assumes_local, repeated in self._interpretations:
            for reading, number in enumerate(number_mappings(tape, sum(self._rows))):
                tensors = {k: v.clone() for k, v in values.items()}
                outputs = []
                for o in tape.outputs:
                    index = tape.index_of(o)
                    entry = tensors[index].requires_grad_(o.is_floating_point())
                    outputs.append(entry)
                    tensors[index] = entry.clone()
                try:
                    with torch.enable_grad():
                        replayed = tape.replay(tensors, number)
                        output_gradients: tuple[Any, ...] = torch.autograd.grad(
                            replayed[at].sum(), outputs, allow_unused=True
                        )
                except Exception:  # numbers that do not fit the shapes
                    continue
                pairs = []
                if any(
                    tape.index_of(t) not in replayed for t in inputs
                ):  # an operation in between could not be repeated
                    continue
                for t in inputs:
                    replayed_input = replayed.get(tape.index_of(t))
                    if (
                        replayed_input is not None
                        and replayed_input.dim()
                        and len(replayed_input) * tape.rows == len(t) * total
                    ):
                        plain = t.detach().as_subclass(Tensor)
                        pairs.append((local_rows(replayed_input.detach()), plain if counted else plain[:0]))
                rows = [  # an output that goes into another call has a gradient that the tape does not see
                    local_rows(torch.zeros_like(e) if g is None else g)
                    if batched and (g is not None or not tape.chained)
                    else e.new_zeros(0)
                    for e, g, batched in zip(outputs, output_gradients, have_rows, strict=True)
                ]
                results.append((float(replayed[at].detach().sum()), rows, pairs, assumes_local, repeated, reading))
        return results

    def difference(self, received: list[Tensor | None]) -> Difference:
        """The difference between parts and whole. ``received``: gradients of the outputs in the loop's own backward,
        before weighting."""
        if self.unknown:
            return Difference(unknown=self.unknown)
        if self._same:
            return Difference()
        votes, ranks = self._votes, self._votes.num_ranks
        share = self._weight / ranks
        best: Difference | None = None
        parts = sum(p[0] for p in votes.gather([float(self._loss.detach().sum()) * share]))
        readings = self._whole_batch_results()
        count = int(min(v[0] for v in votes.gather([float(len(readings))])))
        if not count:
            which = f", and {self._differing_tensor} differs between ranks" if self._differing_tensor else ""
            return Difference(unknown=f"it cannot be done again with a whole batch{which}")
        by_grown: dict[int, float] = {}
        chosen = 0
        for value, rows, pairs, assumes_local, repeated, reading in readings[:count]:
            gradients = [
                (
                    torch.zeros_like(expected)
                    if actual is None or not share or not expected.numel()
                    else actual.detach().to(expected) * share,
                    expected,
                )
                for actual, expected in zip(received, rows, strict=True)
            ]
            number, named = self._differing_number, ""
            if number is None and assumes_local:
                named = self._differing_tensor
                number = None if named else self._differing_value
            candidate = Difference(
                loss_parts=parts, loss_whole=value, gradients=self._relative_distance(gradients),
                inputs=self._relative_distance([(t, expected) for expected, t in pairs]),
                differing_number=number, differing_tensor=named, repeated=repeated,
            )  # fmt: skip
            by_grown[reading] = min(candidate.gradients, by_grown.get(reading, candidate.gradients))
            if (
                best is None
                or max(candidate.gradients, candidate.inputs) < max(best.gradients, best.inputs) - _ROUNDING
            ):
                best, chosen = candidate, reading
        assert best is not None
        if best.loss_parts != best.loss_parts and best.loss_whole != best.loss_whole:
            return Difference(unknown="it is no number")
        kept = chosen == 1 and 0 not in by_grown and self._keeps_count()
        if kept or (self._counts and chosen == 0 and by_grown.get(1, 0.0) > best.gradients + _DISTINCT):
            self._doubt = self._doubt or (
                f"it is computed with the number {self._tape.rows}, which is also that of this rank's samples, of "
                "which one device has more"
            )
        if max(self._rows) == 1 and chosen and by_grown.get(0, 0.0) > best.gradients + _DISTINCT:
            self._doubt = self._doubt or (
                "every rank has one sample, and a number 1 that it is computed with may be that of samples or not"
            )
        return replace(best, stepped=self._stepped, doubt=self._doubt)

    def _keeps_count(self) -> bool:
        """Whether the program computes with the number of this rank's samples, but asks for no size: one of its own, as
        in ``x.split(2)``, of which one device has more pieces."""
        tape = self._tape
        operations = tape.needed([self._loss, *tape.model_inputs])[0]
        numbers = (n for f, *given, _ in operations if counts_samples(f) for n in pytree.tree_leaves(given))
        return not tape.size_read and any(type(n) is int and n == tape.rows for n in numbers)

    def _relative_distance(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """Relative distance of all ranks' tensors from the desired ones (collective)."""
        off = size = nans = 0.0
        for actual, expected in pairs:
            if actual.shape != expected.shape:
                off = size = 1.0
                continue
            kind = torch.complex128 if expected.is_complex() else torch.float64
            gap = (
                (actual.to(kind) - expected.to(kind)).abs().square().masked_fill(actual.isnan() & expected.isnan(), 0.0)
            )
            nans += float(gap.isnan().any())
            off += float(gap.nan_to_num(nan=0.0).sum())
            size += float(expected.to(kind).abs().square().nan_to_num(nan=0.0).sum())
        sums = self._votes.gather([off, size, nans])
        total, scale = sum(s[0] for s in sums), sum(s[1] for s in sums)
        if any(s[2] for s in sums):  # NaN on one side only
            return 1.0
        return (total / scale) ** 0.5 if scale > 0 else float(total > 0)


def _extended(parts: list[Tensor], count: int) -> Tensor | None:
    """The matrix [count, count] that extends the square matrices ``parts`` of all ranks, if these are constant along
    diagonals (``torch.eye``, ``tril``); the outermost diagonals are repeated. Otherwise, or for a single row, None."""
    longest = max(parts, key=len)
    size = len(longest)
    if size < 2 or not all(torch.equal(p, longest[: len(p), : len(p)]) for p in parts):
        return None
    if not torch.equal(longest[1:, 1:], longest[:-1, :-1]):
        return None
    by_distance = torch.cat([longest[:, 0].flip(0), longest[0, 1:]])  # from the lower left to the upper right
    at = torch.arange(count)
    return by_distance[(at[None] - at[:, None]).clamp(1 - size, size - 1) + size - 1]


def _extended_by_views(parts: list[Tensor], count: int, views: int) -> Tensor | None:
    """The matrix [views * count, views * count] that extends ``parts``, of ``views`` x ``views`` blocks, each as
    :func:`_extended` does. There is a block for each pair of views of the batch (``torch.eye(2 * len(x))``)."""
    if any(len(p) % views for p in parts):
        return None
    rows = []
    for i in range(views):
        blocks = [
            _extended([p.tensor_split(views, 0)[i].tensor_split(views, 1)[j] for p in parts], count)
            for j in range(views)
        ]
        if any(b is None for b in blocks):
            return None
        rows.append(torch.cat(blocks, 1))  # type: ignore[arg-type]
    return torch.cat(rows)


def _numbers_of_views(parts: list[Tensor], rows: list[int]) -> Tensor | None:
    """The whole vector of ``parts``, one for each rank with ``rows`` samples, if they number the rows of several views
    of the batch, view by view in any order (``cat([arange(n, 2 * n), arange(n)])``); otherwise None."""
    views, total, whole = len(parts[0]) // rows[0], sum(rows), None
    for part, count in zip(parts, rows, strict=True):
        if part.dim() != 1 or part.is_floating_point() or part.dtype is torch.bool or len(part) != views * count:
            return None
        firsts = part[::count] if count > 1 and views > 1 else part[:0]
        numbers = (firsts[:, None] + torch.arange(count)).flatten()
        if not len(firsts) or bool((firsts % count).any()) or not torch.equal(part, numbers.to(part)):
            return None
        order = firsts // count
        if whole is not None and not torch.equal(order, whole):
            return None
        whole = order
    return None if whole is None else (whole[:, None] * total + torch.arange(total)).flatten().to(parts[0].dtype)


def gathered(votes: Votes, part: Tensor) -> list[Tensor]:
    """Every rank's ``part`` (on the host, with equal dtype and number of dimensions), by rank."""
    if votes.num_ranks == 1:
        return [part]
    shapes = [tuple(int(n) for n in s) for s in votes.gather([float(n) for n in part.shape])]
    tensors = []
    for rank, shape in enumerate(shapes):
        tensor = part.contiguous().clone() if rank == votes.rank else torch.empty(shape, dtype=part.dtype)
        votes.broadcast(tensor, source=rank)
        tensors.append(tensor)
    return tensors
