"""The order of samples: rank 0 draws batches of indices from the program's sampler, and all ranks get them."""

from __future__ import annotations

import random
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from asa.api.generators import take_torch_generator
from asa.errors import UsageError
from asa.executor.consistency.star import StarVotes
from asa.executor.model.votes import Votes

_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers whose order is settled when an epoch begins."""
_MOST_AT_ONCE = 1 << 22
"""Largest number of samples in an epoch whose order is drawn and sent when it begins."""
_SCALARS = (bool, int, float, str)
_COMPARED_ENTRIES = 4096
"""Number of entries of a list or dictionary of a sampler by which ranks compare them."""
_OTHERS = (type, Dataset, DataLoader, Sampler, torch.nn.Module)
"""What is not looked into."""
_DEPTH = 2
"""How far objects that a sampler holds are looked into."""


class Orders:
    """Draws the batches of indices of ``loader``, a ``DataLoader`` over an indexed dataset, on rank 0.

    ``seeding`` is the state of the generator before the last epoch. ``ahead``: how many batches one device draws before
    the loop gets the first.
    """

    def __init__(self, loader: DataLoader[Any], votes: Votes) -> None:
        self.loader, self.votes = loader, votes
        self.seeding = torch.get_rng_state()
        self.ahead = loader.num_workers * (loader.prefetch_factor or 1)
        self._epochs = 0
        self._warned = False
        self._told = self._tellable()

    @property
    def one_by_one(self) -> bool:
        """Whether batches are drawn one at a time, because a sampler of the program's own may go by what the loop does
        in the middle of an epoch, or never end, or because there are very many."""
        sampler = self.loader.batch_sampler
        if type(sampler) is not BatchSampler or type(sampler.sampler) not in _AT_ONCE:
            return True
        return len(sampler.sampler) > _MOST_AT_ONCE  # type: ignore[arg-type]

    def epoch(self, seed: int | None, votes: Votes) -> Iterator[list[Any]]:
        """Rank 0's batches of indices, on every rank; collective where it begins and, if they are drawn
        :attr:`one_by_one`, at each. With a ``seed`` the order depends on it, instead of on torch's generator.
        ``votes``: those of the ranks that take part in this epoch.

        Raises:
            UsageError: with a ``seed``, a sampler that has no length.
        """
        self.votes = votes
        if self.votes.num_ranks == 1:
            yield from self._draw(seed)
            return
        if seed is None:
            self._compare()
        alike = seed is None and self._generators_alike()
        if seed is None and self.one_by_one:
            drawn: Iterator[list[Any]] | None = self.votes.once(lambda: iter(self._draw(seed)))
            if alike:
                take_torch_generator(self.votes)
            while True:
                before = torch.get_rng_state()
                one = self.votes.once(lambda: next(drawn, None) if drawn is not None else None)
                keys, moved = self.votes.tell([one, not torch.equal(before, torch.get_rng_state())])
                if alike and moved:
                    take_torch_generator(self.votes)
                self._told = self._tellable()
                if keys is None:
                    return
                yield [_key(k) for k in keys]
                self._compare()
        every = self.votes.once(lambda: list(self._draw(seed)))
        if alike:  # so that the generators stay equal on all ranks
            take_torch_generator(self.votes)
        self._told = self._tellable()
        yield from self._sent(every)

    def _sent(self, batches: list[list[Any]] | None) -> list[list[Any]]:
        if not self.votes.tell(batches is not None and all(type(k) is int for one in batches for k in one)):
            received: list[list[Any]] = self.votes.tell(batches)  # JSON keeps only some types of keys
            return [[_key(k) for k in one] for one in received]
        sizes = self.votes.tell(None if batches is None else [len(one) for one in batches])
        flat = torch.tensor([k for one in batches or [] for k in one], dtype=torch.int64)
        if batches is None:
            flat = torch.empty(sum(sizes), dtype=torch.int64)
        self.votes.broadcast(flat)
        return [part.tolist() for part in flat.split(sizes)] if sizes else []

    def _generators_alike(self) -> bool:
        checksum = float(zlib.crc32(torch.get_rng_state().numpy().tobytes()))
        return len({each[0] for each in self.votes.gather([checksum])}) == 1

    def _draw(self, seed: int | None) -> Iterable[list[Any]]:
        sampler: Any = self.loader.batch_sampler
        if seed is None:
            # A DataLoader first draws a seed for its workers (once if they are persistent); so the same is done here.
            self._epochs += 1
            drawing = self.loader.generator or torch.default_generator
            self.seeding = drawing.get_state()
            if self._epochs == 1 or not (self.loader.num_workers and self.loader.persistent_workers):
                torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            return (list(one) for one in sampler)
        try:
            len(sampler)
        except (TypeError, NotImplementedError) as error:
            raise UsageError(
                f"the loader's sampler ({type(getattr(sampler, 'sampler', sampler)).__name__}) has no length, and may "
                "never end: a job trains epochs; give it __len__, or train in a loop of your own"
            ) from error
        generators = {getattr(s, "generator", None) for s in (sampler, getattr(sampler, "sampler", None))}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for generator in generators:
                if isinstance(generator, torch.Generator):  # other samplers may have a numpy or Python generator
                    generator.manual_seed(seed)
            return [list(one) for one in sampler]

    def _tellable(self) -> dict[str, int]:
        """A checksum of everything in the samplers that a loop may set, by name."""
        found: dict[str, int] = {}
        if self.votes.num_ranks > 1:
            for name, sampler in samplers(self.loader).items():
                _checksums(sampler, name, found, _DEPTH)
        return found

    def _compare(self) -> None:
        """Warn, once, if the loop changed the samplers in another way on other ranks since they were last drawn from
        (collective): rank 0 draws the order, by what its own samples made of them."""
        if self.votes.num_ranks == 1 or self._warned or isinstance(self.votes, StarVotes):
            return
        now = self._tellable()
        changed = sorted((k, v) for k, v in now.items() if self._told.get(k) != v)
        if len({f[0] for f in self.votes.gather([float(zlib.crc32(repr(changed).encode()))])}) == 1:
            return
        self._warned = True
        name = next(iter(self.votes.tell([k for k, _ in changed], source=0)), "") or next((k for k, _ in changed), "")
        warnings.warn(
            f"the loader's {name or 'sampler'} is no longer the same on all ranks: the loop changed it by numbers of "
            "each rank's own samples, and rank 0 draws the order by its own; change it by asa.gather(x), on all ranks "
            "alike",
            stacklevel=4,
        )


def samplers(loader: Any) -> dict[str, Any]:
    """The samplers of a loader, by name."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    named = {"sampler": getattr(loader, "sampler", None), "batch_sampler": batch_sampler}
    if isinstance(inner := getattr(batch_sampler, "sampler", None), Sampler):
        named["sampler"] = inner
    return {name: s for name, s in named.items() if s is not None}


def sharing_by_rank(loader: Any, rank: int, ranks: int) -> str:
    """The class of a sampler of ``loader`` that draws the share of one rank: it is torch's, or has this rank's number
    and the number of ranks among its attributes. Empty if there is none."""
    for sampler in samplers(loader).values():
        numbers = {key: value for key, value in getattr(sampler, "__dict__", {}).items() if type(value) is int}
        of_rank = any("rank" in key and value == rank for key, value in numbers.items())
        if isinstance(sampler, DistributedSampler) or (ranks > 1 and of_rank and ranks in numbers.values()):
            return type(sampler).__name__
    return ""


def _checksums(holder: Any, name: str, found: dict[str, int], depth: int) -> None:
    """Put checksums of the attributes of ``holder`` into ``found``."""
    for key, value in list(getattr(holder, "__dict__", {}).items()):
        path = f"{name}.{key}"
        if isinstance(value, Tensor):
            plain = value.detach().as_subclass(Tensor)
            found[path] = zlib.crc32(repr(plain.shape).encode() + plain.cpu().contiguous().numpy().tobytes())
        elif hasattr(value, "tobytes") and hasattr(value, "dtype") and value.dtype != object:
            found[path] = zlib.crc32(value.tobytes())
        elif isinstance(value, _SCALARS):
            found[path] = zlib.crc32(repr(value).encode())
        elif isinstance(value, list | tuple | deque | dict):
            entries = value.items() if isinstance(value, dict) else value
            some = islice(entries, 0, None, max(1, len(value) // _COMPARED_ENTRIES))
            found[path] = zlib.crc32(repr([len(value), *map(_of_entry, some)]).encode())
        elif depth > 1 and not isinstance(value, _OTHERS):
            _checksums(value, path, found, depth - 1)


def _of_entry(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return tuple(map(_of_entry, entry))
    if isinstance(entry, Tensor) and entry.numel() == 1:
        return float(entry)
    return entry if isinstance(entry, _SCALARS) else None


def own_state(holder: Any) -> list[tuple[Any, ...]]:
    """What reading ``holder``, a loader, sampler or data set, may change: its numbers and its generators."""
    numpy = sys.modules.get("numpy")
    kept: list[tuple[Any, ...]] = []
    for key, value in list(getattr(holder, "__dict__", {}).items()):
        if isinstance(value, _SCALARS) or value is None:
            kept.append((holder.__dict__.__setitem__, key, value))
        elif isinstance(value, torch.Generator):
            kept.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            kept.append((value.setstate, value.getstate()))
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            kept.append((value.set_state, value.get_state()))
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            kept.append((setattr, value.bit_generator, "state", value.bit_generator.state))
    return kept


def put_back(state: Iterable[tuple[Any, ...]]) -> None:
    """Undo what was done to what :func:`own_state` returned."""
    for call, *args in state:
        call(*args)


def _key(told: Any) -> Any:
    """A key of the data set as the sampler gave it: JSON makes lists of tuples."""
    return tuple(map(_key, told)) if isinstance(told, list) else told
