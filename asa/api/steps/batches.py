"""The user's loader on every rank: all ranks have one order of samples, and each loads its own rows of every batch."""

from __future__ import annotations

import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from asa.api.generators import as_on_rank_0, generators_now
from asa.api.steps.orders import Orders, own_state, put_back, samplers, sharing_by_rank
from asa.errors import UsageError
from asa.executor.consistency.star import StarVotes
from asa.executor.model.votes import Votes
from asa.tracing.preserve import foreign_random
from asa.tracing.records import understood
from asa.tracing.tracer import reason_of
from asa.tracing.whole import tensors_of

_COMPARED_ELEMENTS = 4096
"""Number of elements of each tensor by which batches are compared."""
_COMPARED_SAMPLES = 8
"""Number of samples by which ranks compare their data sets at the beginning of an epoch."""
_READ_BATCHES = 4096
"""Number of batches of a sampler that are looked at for the size of the largest."""
_SIZES = ((2, 3), (2, 4))
"""Sizes of the two batches by which a ``collate_fn`` is tried; the second if it takes only even ones (mixed pairs)."""

Rows = Callable[[int], list[int]]
"""Function from the number of samples in a batch to the rows that this rank loads."""


Place = tuple[int, ...]
"""Numbers of the children on the way to a part of a batch."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's share of one global batch: ``rows`` of ``total``, and the batch made of them (None without rows).

    ``first``: number of samples of the epoch before this batch.
    """

    total: int
    rows: list[int]
    first: int
    batch: Any


def samples_in(batch: Any) -> int:
    """Number of samples in a batch: the length of its first tensor.

    Raises:
        UsageError: it has none, or lists with tensors for each sample.
    """
    rows = _rows_in(batch)
    if not rows:
        raise UsageError(f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension")
    items = list(batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ())
    lists = [len(i) for i in items if type(i) in (list, tuple) and len(i) > 1 and all(map(_rows_in, i))]
    others = [len(i) for i in items if isinstance(i, Tensor) and i.dim()]
    unlike = rows[0] not in others if others else any(n != rows[0] for n in rows)
    if unlike and any(n != rows[0] and (n in others or lists.count(n) > 1) for n in lists):
        raise UsageError(
            "the loader yields a list with tensors for each sample, and ranks share a batch without indices by the "
            "rows of its tensors: pad them to one tensor, or hand in a DataLoader over a data set with indices and "
            "your collate_fn"
        )
    return rows[0]


def _rows_in(batch: Any) -> list[int]:
    """Numbers of rows of the tensors in ``batch``."""
    return [t.shape[0] for t in tensors_of(batch) if t.dim()]


def rows_made(batch: Any, samples: int) -> int:
    """Number of rows of a batch that a ``collate_fn`` made of some ``samples``: as many if a tensor has that many rows,
    or fewer, if all tensors have the same number of rows.

    Raises:
        UsageError: neither.
    """
    found = set(_rows_in(batch))
    if samples in found:
        return samples
    if len(found) == 1 and 0 < (rows := found.pop()) < samples:
        return rows
    shown = ", ".join(map(str, sorted(found))) or "none"
    raise UsageError(
        f"the collate_fn made {shown} rows of a batch of {samples} samples, and ranks share a batch by its rows: have "
        "it give a row for each sample, or for each that it keeps, in every tensor; or hand in the batches themselves "
        "(a generator or a list of them)"
    )


def rows_of(
    batch: Any, rows: Sequence[int], total: int | None = None, per_sample: frozenset[Place] | None = None
) -> Any:
    """The given rows of every tensor and array in ``batch`` that has one row per sample, and of every list inside it
    that has one entry per sample. ``total``: number of samples, if known; otherwise :func:`samples_in` determines it.
    ``per_sample``: where these are, if known (:func:`places_per_sample`).

    Raises:
        UsageError: no tensor has ``total`` rows.
    """
    indices = list(rows)
    if total is None:
        total = samples_in(batch)
    elif not any(t.shape[:1] == (total,) for t in tensors_of(batch)):
        raise UsageError(f"labels of type {type(batch).__name__} have no tensor with a row for each of {total} samples")
    consecutive = indices == list(range(indices[0], indices[0] + len(indices))) if indices else False
    found: list[Place] = []

    def selected(node: Any, place: Place) -> Any:
        if _has_rows(node, total, place) and (per_sample is None or place in per_sample):
            found.append(place)
            if isinstance(node, list | tuple):
                return type(node)(node[i] for i in indices)
            if isinstance(node, Tensor) and node.layout is not torch.strided:
                return _sparse_rows(node, indices)
            return node[indices[0] : indices[0] + len(indices)] if consecutive else node[indices]
        children, structure = _children(node)
        if structure is None:
            return node
        parts = [selected(child, (*place, i)) for i, child in enumerate(children)]
        return pytree.tree_unflatten(parts, structure)

    result = selected(batch, ())
    if per_sample is not None and len(found) < len(per_sample):  # a batch of another form
        return rows_of(batch, rows, total)
    return result


def warn_of_squares(batch: Any, total: int) -> None:
    """Warn of a tensor [total, total] behind another with ``total`` rows: a mask of as many positions as the batch has
    samples looks as if it had a row for each sample."""
    leaves = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0] if isinstance(leaf, Tensor)]
    for path, leaf in [each for each in leaves if each[1].shape[:1] == (total,)][1:]:
        if leaf.shape == (total, total):
            warnings.warn(
                f"batch{pytree.keystr(path)} is of shape {list(leaf.shape)} and is cut into rows, because the batch "
                f"has {total} samples: if it has no row for each (a mask of positions), make it in the model's "
                f"forward, or hand in batches of another size than {total}",
                stacklevel=3,
            )


def check_flattened(batch: Any, total: int) -> None:
    """Check that no tensor has a row for each element of the first two dimensions of another, which has ``total`` rows:
    it would not be shared with it.

    Raises:
        UsageError: one has.
    """
    leaves = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0] if isinstance(leaf, Tensor)]
    for path, leaf in leaves:
        for other, flat in leaves if leaf.dim() > 1 and len(leaf) == total and leaf.shape[1] > 1 else ():
            if flat.dim() and len(flat) == total * leaf.shape[1] and flat.layout is leaf.layout is torch.strided:
                raise UsageError(
                    f"batch{pytree.keystr(path)} is of shape {list(leaf.shape)} and batch{pytree.keystr(other)} has "
                    f"{len(flat)} rows, one for each of {total} x {leaf.shape[1]}, and ranks share a batch by the rows "
                    f"of its tensors, of which the first has {total}: yield both with the samples first, and flatten "
                    "in the loop"
                )


def _sparse_rows(tensor: Tensor, indices: list[int]) -> Tensor:
    try:
        return tensor.index_select(0, torch.tensor(indices, dtype=torch.int64, device=tensor.device))
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"the loader's batches have tensors of layout {tensor.layout}, whose rows ranks cannot share: have "
            "collate_fn make dense ones, or sparse ones by to_sparse()"
        ) from error


def places_per_sample(small: Any, large: Any, sizes: tuple[int, int], place: Place = ()) -> frozenset[Place] | None:
    """Where two batches of ``sizes`` samples have one row, or one entry of a list without tensors, per sample; None if
    they differ elsewhere, too."""
    if _has_rows(small, sizes[0], place) and _has_rows(large, sizes[1], place):
        return frozenset([place])
    (children, structure), (others, _) = _children(small), _children(large)
    if type(small) is not type(large) or len(children) != len(others):
        return None
    if structure is None:
        return frozenset() if not isinstance(small, Tensor) or small.shape == large.shape else None
    found: frozenset[Place] = frozenset()
    for i, (one, other) in enumerate(zip(children, others, strict=True)):
        more = places_per_sample(one, other, sizes, (*place, i))
        if more is None:
            return None
        found |= more
    return found


def _has_rows(node: Any, samples: int, place: Place) -> bool:
    """Whether ``node`` is a tensor, an array or, within a batch, a list without tensors, of so many rows."""
    if type(node) in (list, tuple):
        return bool(place) and len(node) == samples and not tensors_of(node)
    return hasattr(node, "dtype") and getattr(node, "shape", ())[:1] == (samples,)


def _children(node: Any) -> tuple[list[Any], Any]:
    """What ``node`` consists of, and its structure (None: it is a leaf)."""
    children, structure = pytree.tree_flatten(node, is_leaf=lambda part: part is not node)
    return ([], None) if len(children) == 1 and children[0] is node else (children, structure)


def _flat(batch: Any) -> Any:
    """``batch``, if ranks can share its rows.

    Raises:
        UsageError: there is a nested tensor in it.
    """
    if any(t.is_nested for t in tensors_of(batch)):
        raise UsageError(
            "the loader's batches have nested tensors, whose rows ranks cannot share: pad the samples to one length in "
            "collate_fn, or hand the model their values and lengths"
        )
    return batch


def cloned(batch: Any) -> Any:
    """``batch`` with a copy of every tensor."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def moved(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor on ``device``."""
    return pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def fingerprints(batch: Any) -> tuple[float, float]:
    """Two checksums of a batch: over tensors of all types, and over those of whole numbers; 0 if there are none.
    Batches that are bitwise equal have equal checksums."""
    everything = integers = 0
    for leaf in tensors_of(batch):
        if leaf.numel() and leaf.layout is torch.strided:
            part = leaf.detach().reshape(-1)[:_COMPARED_ELEMENTS].contiguous().cpu()
            part = part.as_strided(part.shape, (1,))  # a single element is contiguous with any stride
            number = 1 + zlib.crc32(part.view(torch.uint8).numpy().tobytes())
            everything += number
            if not leaf.is_floating_point() and leaf.dtype is not torch.uint8:
                integers += number
    return float(everything), float(integers)


def _checksums(sample: Any) -> tuple[float, float, float]:
    """Three checksums of a sample: of tensors and numbers, of whole numbers, of texts; 0 if there are none."""
    everything, integers = fingerprints(sample)
    leaves = pytree.tree_leaves(sample)
    whole, real, text = (
        zlib.crc32(repr(found).encode()) if (found := [v for v in leaves if isinstance(v, kind)]) else 0
        for kind in (int, float, str)
    )
    return everything + whole + real, integers + whole, float(text)


@contextmanager
def restored_afterwards(loader: Any) -> Iterator[None]:
    """Context in which a loader can be read without lasting effect: generators and workers are restored afterwards."""
    dataset = getattr(loader, "dataset", None)
    states = [kept for holder in (*samplers(loader).values(), dataset) for kept in own_state(holder)]
    if isinstance(generator := getattr(loader, "generator", None), torch.Generator):
        states.append((generator.set_state, generator.get_state()))
    try:
        with torch.random.fork_rng(devices=[]), foreign_random():
            yield
    finally:
        put_back(states)
        if isinstance(loader, DataLoader) and loader.persistent_workers:
            loader._iterator = None


def reads_in(thread: threading.Thread) -> str:
    """The name of what runs in ``thread``, if it is not of torch or the standard library; otherwise empty."""
    kind: Any = type(thread)
    what = getattr(thread, "_target", None) if kind is threading.Thread else kind
    top = (getattr(what, "__module__", None) or "").partition(".")[0]
    ours = top in ("", "torch", "tqdm") or (top in sys.stdlib_module_names and top != "__main__")
    return "" if ours else str(getattr(what, "__qualname__", top))


class _PresetBatches:
    """A batch sampler whose batches are set before each epoch, and may become more in it."""

    def __init__(self) -> None:
        self.next: Callable[[], list[Any] | None] = lambda: None

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.next, None)  # an epoch that begins within another one sets others


class GlobalBatches:
    """A loader of global batches that all ranks iterate together.

    For a ``DataLoader`` over an indexed dataset, rank 0 draws the order and sends it to the others; each rank then
    loads only its own rows, with the loader's workers and ``collate_fn``. A ``collate_fn`` of the program's own makes
    the whole batch on every rank, as on one device (padding, mixing), if its result can be cut into rows.

    Any other iterable of batches, and a loader whose class has an ``__iter__`` of its own, is read by every rank, which
    keeps its own rows: it must yield the same on all ranks.
    """

    def __init__(self, loader: Any, votes: Votes, rows: Rows) -> None:
        self.loader, self.votes, self._share_rows = loader, votes, rows
        self.whole = False
        """Whether every rank has all rows."""
        self.indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        self.indexed = self.indexed and loader.batch_sampler is not None
        self._own_reading = isinstance(loader, DataLoader) and type(loader).__iter__ is not DataLoader.__iter__
        """Whether the loader's class has an ``__iter__`` of its own: it may end a pass, or change batches."""
        if sampler := sharing_by_rank(loader, votes.rank, votes.num_ranks):
            raise UsageError(
                f"the loader has a {sampler}, which draws the samples of one rank: hand in the loader of one "
                "device, with the global batch; asa gives each rank its share"
            )
        self.indexed = self.indexed and not self._own_reading
        self._unread: list[Any] = []
        self._begun: Iterator[Any] | None = None
        self._passes = 0
        self._keys: Sequence[Any] = ()
        self._warned_of_samples = False
        self.custom_collate = self._collates_whole = self._draws = False
        self._per_sample: frozenset[Place] | None = None
        if self.indexed:
            self._preset = _PresetBatches()
            self._orders = Orders(loader, votes)
            self._local_loader = _with_sampler(loader, self._preset, votes.rank)
            self.custom_collate = loader.collate_fn is not default_collate
            if votes.num_ranks > 1:
                cuts = self._cuts_into_rows()
                self._collates_whole = votes.everyone(cuts) and self.custom_collate
                self._draws = votes.anyone(self._draws)

    def _rows(self, total: int) -> list[int]:
        return list(range(total)) if self.whole else self._share_rows(total)

    @property
    def settled(self) -> bool:
        """Whether the order of an epoch is known when it begins; otherwise ranks exchange something at each batch."""
        return self.indexed and not self._orders.one_by_one

    @property
    def collates_locally(self) -> bool:
        """Whether each rank collates its own samples only, so that the shapes of batches may differ between ranks."""
        return self.custom_collate and not self._collates_whole

    @property
    def draws_locally(self) -> bool:
        """Whether the data set or the ``collate_fn`` draws random numbers, different on each rank."""
        return self._draws and not self._collates_whole

    def example(self, samples: int = 2) -> Any:
        """A batch of a few samples, taken if possible without advancing samplers or generators."""
        if self.indexed:
            dataset, collate = self.loader.dataset, self.loader.collate_fn
            samples = 1 if self.loader.batch_size == 1 else samples  # they may have unlike shapes
            with restored_afterwards(self.loader):
                keys: list[Any] = list(range(min(samples, len(dataset)))) if hasattr(dataset, "__len__") else []
                if not keys:
                    raise UsageError("the loader's dataset is empty")
                return _flat(understood(collate([dataset[k] for k in self._known(keys)])))
        batch = _flat(self._first())
        return cloned(rows_of(batch, range(min(samples, samples_in(batch)))))  # a model may change its inputs

    def _known(self, keys: list[Any]) -> list[Any]:
        """``keys``, or, if the data set has no sample of the first (a sampler gives it numbers and sizes, or names), as
        many of those that the sampler gives first. Call it where the loader is restored afterwards."""
        usual = type(self.loader.batch_sampler) is BatchSampler
        if usual and type(self.loader.batch_sampler.sampler) in (SequentialSampler, RandomSampler):
            return keys
        try:
            self.loader.dataset[keys[0]]
        except Exception:  # whatever a data set raises
            with suppress(Exception):
                first = next(iter(self.loader.batch_sampler))
                return [first[i % len(first)] for i in range(len(keys))]
        return keys

    def places(self, of: Callable[[Any], Any]) -> frozenset[Place] | None:
        """Where ``of(batch)`` has one row for each sample; None if two batches of other sizes do not tell."""
        if not self.indexed or self.loader.batch_size == 1:
            return None
        for sizes in _SIZES:
            with suppress(Exception):  # any error of the data set, the collate_fn or the function
                return places_per_sample(of(self.example(sizes[0])), of(self.example(sizes[1])), sizes) or None
        return None

    def _cuts_into_rows(self) -> bool:
        """Whether a whole batch can be collated as on one device and then cut into rows: every tensor, and every list
        without tensors, has one row per sample, or the same shape for any number of samples. Also records which have,
        and whether random numbers are drawn."""
        tried = _SIZES if self.custom_collate else _SIZES[:1]
        return next((cuts for sizes in tried if (cuts := self._cuts_batches_of(sizes)) is not None), False)

    def _cuts_batches_of(self, sizes: tuple[int, int]) -> bool | None:
        """The answer of :meth:`_cuts_into_rows` by two batches of ``sizes`` samples; None if they cannot be made."""
        made: list[Any] = []
        try:
            with restored_afterwards(self.loader):
                before = generators_now()
                for samples in sizes if self.custom_collate else sizes[:1]:
                    batch = understood(
                        self.loader.collate_fn([self.loader.dataset[k] for k in self._known(list(range(samples)))])
                    )
                    self._draws = self._draws or generators_now() != before
                    self._draws = self._draws or not self._reads_alike()
                    made.append(batch)
        except Exception:  # any error of the data set or the collate_fn
            return None
        if self.custom_collate:
            self._per_sample = places_per_sample(made[0], made[1], sizes)
            return self._per_sample is not None and sizes[0] in _rows_in(made[0])
        return True

    def _reads_alike(self) -> bool:
        """Whether the first sample is the same when read again."""
        one, two = (pytree.tree_leaves(self.loader.dataset[k]) for k in self._known([0]) * 2)
        pairs = zip(one, two, strict=True)
        return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor) and a.shape == b.shape)

    def _first(self) -> Any:
        """The first batch; it is kept for the epoch if the loader can be iterated only once (a generator)."""
        if self._unread:
            return self._unread[0]
        with restored_afterwards(self.loader):
            return self._first_of_iterator()

    def _first_of_iterator(self) -> Any:
        state, running = own_state(self.loader), set(threading.enumerate())
        batches = iter(self.loader)
        for batch in map(understood, batches):
            if reader := next((name for t in threading.enumerate() if t not in running and (name := reads_in(t))), ""):
                raise UsageError(
                    f"the loader reads in a thread of its own ({reader}), which draws random numbers at any time, "
                    "and beside which a model cannot be traced: hand in the loader without it; workers of a DataLoader "
                    "(num_workers, prefetch_factor) read ahead, too"
                )
            if batches is self.loader:
                self._unread.append(batch)
            elif self._own_reading:  # it may not begin anew
                self._unread.append(batch)
                self._begun = batches
            else:
                put_back(state)
            return batch
        raise UsageError("the loader yields no batch")

    @property
    def batch_size(self) -> int:
        """Number of samples in a full global batch."""
        size = getattr(self.loader, "batch_size", None)
        if isinstance(size, int):
            return size
        if self.indexed:
            size = getattr(self.loader.batch_sampler, "batch_size", None)
            if isinstance(size, int):
                return size
            with restored_afterwards(self.loader):  # a sampler may draw, and may never end
                return max(map(len, islice(self.loader.batch_sampler, _READ_BATCHES)))
        return samples_in(self._first())

    @property
    def epoch_samples(self) -> int | None:
        """Number of samples in an epoch (a sampler may draw more or fewer than there are), if the loader knows it."""
        if not self.indexed or self.loader.batch_size is None:
            return None
        try:
            return len(self.loader.sampler)
        except (TypeError, NotImplementedError):
            return None

    def __len__(self) -> int:
        return len(self.loader)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the program's loader (``loader.mixing = False``), and of the one that reads for it."""
        setattr(self.loader, name, value)
        if self.indexed and name != "generator" and name in vars(self._local_loader):
            setattr(self._local_loader, name, value)

    def epoch(self, *, order_seed: int | None = None, skip: int = 0) -> Iterator[Share]:
        """The batches of an epoch; collective at its start. ``order_seed``: the order depends on it, instead of on the
        state of torch's generator; the first ``skip`` batches are left out."""
        if not self.indexed:
            first = 0
            ahead, self._unread = self._unread, []
            rest, self._begun = self.loader if self._begun is None else self._begun, None
            for i, batch in enumerate(map(understood, chain(ahead, rest))):
                total = samples_in(batch)
                self._check_alike(total, batch)
                if i >= skip:
                    rows = self._rows(total)
                    if len(rows) < total:
                        check_flattened(batch, total)
                    if self.votes.rank == 0 and len(rows) < total:
                        warn_of_squares(batch, total)
                    yield Share(total=total, rows=rows, first=first, batch=rows_of(batch, rows))
                first += total
            self._check_alike(None)
            return
        order, batches, starts = self._orders.epoch(order_seed, self.votes), list[list[Any]](), [0]
        lazily = order_seed is None and self._orders.one_by_one

        def draw(most: int | None) -> None:
            for one in islice(order, most):
                batches.append(one)
                starts.append(starts[-1] + len(one))

        draw(self._orders.ahead if lazily else None)
        self._keys = [one[0] for one in batches if one]
        if lazily and hasattr(self.loader.dataset, "__len__"):
            self._keys = range(len(self.loader.dataset))
        self.compare_samples()
        self._passes += 1
        if self._collates_whole and self._draws and self.loader.num_workers and order_seed is None:
            # Workers with equal seeds draw the same numbers on all ranks, and the same as on one device.
            state = self._orders.seeding if self.votes.rank == 0 else torch.empty_like(torch.get_rng_state())
            self.votes.broadcast(state)
            self._local_loader.generator.set_state(state)
        together, decided = self._collates_whole, dict[int, list[int]]()

        def rows_of_batch(number: int) -> list[int]:
            """Rows of batch ``number``, computed when the batch is read, because the rows needed may change in an
            epoch."""
            if number not in decided:
                decided[number] = self._rows(len(batches[number]))
            return decided[number]

        coming = skip

        def picked() -> list[Any] | None:
            nonlocal coming
            while coming < len(batches):
                number, coming = coming, coming + 1
                if rows := rows_of_batch(number):
                    return batches[number] if together else [batches[number][r] for r in rows]
            return None

        self._preset.next = picked
        loaded = iter(self._local_loader)
        for number in count(skip):
            draw(1 if lazily else 0)
            if number >= len(batches):
                break
            one, rows, first = batches[number], rows_of_batch(number), starts[number]
            # A rank without rows loads nothing, because a batch of no samples cannot be collated.
            if together and self._draws and not self.loader.num_workers:
                as_on_rank_0(self.votes)
            batch = self._read(loaded, one, rows) if rows else None
            total = len(one)
            if together and rows:
                if (made := rows_made(batch, total)) != total:  # the collate_fn left samples out, or joined some
                    total, rows = made, self._rows(made)
                batch = rows_of(batch, rows, total, self._per_sample)
            yield Share(total=total, rows=rows, first=first, batch=batch)

    def pass_ended(self) -> None:
        """Compare samples behind the first pass, which may be the only one (collective)."""
        if self.indexed and self._passes == 1:
            self.compare_samples()

    def compare_samples(self) -> None:
        """Check that samples are the same on all ranks (collective). Behind the first pass, warn once if they are not:
        a loop that changes its data set knows this rank's samples only.

        Raises:
            UsageError: they differ before the first pass.
        """
        if self.votes.num_ranks == 1 or self._draws or self._warned_of_samples:
            return
        if isinstance(self.votes, StarVotes):  # a rank that comes back has made other passes
            return
        dataset = self.loader.dataset
        figures = [0.0, 0.0, 0.0]
        if isinstance(dataset, TensorDataset):
            figures[:2] = fingerprints(dataset.tensors)
        # Whatever a data set raises, it raises again when the sample's turn comes.
        with suppress(Exception), restored_afterwards(self.loader):
            for key in self._keys[:: max(1, len(self._keys) // _COMPARED_SAMPLES)]:
                figures = [a + b for a, b in zip(figures, _checksums(dataset[key]), strict=True)]
        of_all = self.votes.gather(figures)
        others, numbers = ({each[i] for each in of_all} for i in (0, 1))
        if not self._passes and len(others) > 1 and (len(numbers) > 1 or numbers == {0.0}):
            raise UsageError(
                "the data sets of the ranks have different samples: a rank's own share would be shared once more; hand "
                "in the data set of one device, made with the same seed on every rank"
            )
        if self._passes and len({tuple(each) for each in of_all}) > 1:
            self._warned_of_samples = True
            warnings.warn(
                "the data set is no longer the same on all ranks: the loop changed it by answers to this rank's "
                "samples, and other ranks read others next; change it by asa.gather(x), on all ranks alike",
                stacklevel=4,
            )

    def _read(self, loaded: Iterator[Any], one: list[Any], rows: list[int]) -> Any:
        """The next batch of ``loaded``, with ``rows`` of the samples ``one``.

        Raises:
            UsageError: the ``collate_fn`` fails for these rows, but not for the whole batch.
        """
        try:
            return next(loaded)
        except (UsageError, StopIteration):
            raise
        except Exception as error:  # whatever a data set or a collate_fn raises
            try:
                if self._collates_whole or len(rows) == len(one):
                    raise error
                with restored_afterwards(self.loader):
                    self.loader.collate_fn([self.loader.dataset[k] for k in one])
            except Exception:
                raise error from None
            raise UsageError(
                f"the loader's collate_fn makes no batch of the {len(rows)} samples that this rank has of a batch of "
                f"{len(one)} ({reason_of(error)}): have it take any number of samples, or use drop_last=True"
            ) from error

    def _check_alike(self, total: int | None, batch: Any = None) -> None:
        """Check that every rank has the same batch of ``total`` samples next (None: no more). Otherwise ranks would
        hang, or combine different samples.

        Raises:
            UsageError: they do not.
        """
        if self.votes.num_ranks == 1:
            return
        figures = (-1.0, 0.0, 0.0) if total is None else (float(total), *fingerprints(batch))
        of_all = self.votes.gather(figures)
        by_rank = [of_all[rank] for rank in self.votes.live]
        counts = [int(each[0]) for each in by_rank]
        if len(set(counts)) > 1:
            counts_text = ", ".join(f"{n} samples" if n >= 0 else "none" for n in counts)
            raise UsageError(
                f"the loaders of the ranks differ: the next batch has, by rank, {counts_text}; a loader without "
                "indices is read by every rank and must yield the same on all"
            )
        others, numbers = ({each[i] for each in by_rank} for i in (1, 2))
        # With random augmentation, ranks have the same labels but different pixels; so whole numbers decide.
        if len(others) > 1 and (len(numbers) > 1 or numbers == {0.0}):
            raise UsageError(
                "the loaders of the ranks yield different samples: one that shares or shuffles them by rank itself "
                "would have its shares shared once more; hand in the loader of one device, with the global batch, and "
                "the same seed on every rank"
            )


def _with_sampler(loader: DataLoader[Any], sampler: Any, rank: int) -> DataLoader[Any]:
    """A copy of the loader with another sampler; its workers' random numbers are the rank's own."""
    busy = loader.num_workers > 0
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if busy else None,
        generator=torch.Generator().manual_seed(rank),
        prefetch_factor=loader.prefetch_factor if busy else None,
        persistent_workers=loader.persistent_workers,
    )
