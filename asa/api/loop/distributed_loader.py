"""A rank's share of a loader: the samples of every global batch that a distributed model works on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch.optim import swa_utils

from asa.api.generators import generators_now
from asa.api.losses.across import exchanges
from asa.api.messages import say
from asa.api.model.distributed_model import DistributedModel
from asa.api.patching import replace_once
from asa.api.steps.batches import GlobalBatches, Share, moved


class DistributedLoader:
    """This rank's samples of every global batch, on its device. Attributes that it does not have are the loader's
    own."""

    def __init__(self, batches: GlobalBatches, model: DistributedModel) -> None:
        self._batches, self._model = batches, model
        self._warned_drawing = self._warned_evaluation = self._warned_repeated = self._warned_unlearned = False
        self._unlearned: int | None = None
        """Number of exchanges of the program's own before a pass in training without a backward; None if the last pass
        was none."""
        _loaders.add(self)
        replace_once(swa_utils, "update_bn", _over_whole_batches)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Context in which every rank gets whole batches."""
        said, self._batches.whole, self._warned_repeated = self._warned_repeated, True, True
        try:
            yield
        finally:
            self._batches.whole, self._warned_repeated = False, said

    def __iter__(self) -> Iterator[Any]:
        device, trial = self._model.rank_context.device, self._model.trial
        looks = 2  # batches behind which the generators are looked at
        self._model.unchanged()
        self._model.batch_ended(0, last=True, indexed=self._batches.indexed)
        if trial is not None:
            trial.epoch_began()
        self._model.__dict__["reader"] = threading.get_ident()
        self._say_of_unlearned()
        learned, asked = self._model.backwards, exchanges()
        looks_on = trial is not None and self._model.training and not self._batches.whole
        try:
            shares = enumerate(self._batches.epoch())
            self._loaded(None)
            while (loaded := self._loaded(shares)) is not None:
                number, share = loaded
                self._model.alike_in_shape(self._batches, share.batch)
                self._model.__dict__["share"] = share
                batch = moved(share.batch, device)
                self._say_of_repeated(share)
                if trial is None or not self._model.training:
                    if trial is not None and not self._warned_evaluation:
                        self._warned_evaluation = True
                        say(self._model.rank_context, "the loader yields this rank's samples in evaluation, too: add "
                            "up over ranks by asa.reduce(x, 'sum'), or evaluate on a loader of your own")  # fmt: skip
                    if trial is not None:
                        trial.batch_over()
                    yield batch
                    self._model.batch_ended(number, last=False, indexed=self._batches.settled)
                    continue
                before = generators_now() if looks and not self._warned_drawing else None
                backwards = self._model.backwards
                self._model.yields(batch)
                yield trial.begin(batch, share)
                trial.by_samples(share, learned=self._model.backwards > backwards)
                looks = max(0, looks - 1)
                self._model.batch_ended(number, last=False, indexed=self._batches.settled)
                if before is not None and generators_now() != before and not self._warned_drawing:
                    self._warned_drawing = True
                    say(self._model.rank_context, "the loop draws random numbers between two batches: each rank draws "
                        "its own for its samples, and one process others; what the loader's collate_fn draws is drawn "
                        "for the whole batch")  # fmt: skip
            self._model.batch_ended(0, last=True, indexed=self._batches.indexed)
            self._batches.pass_ended()
            self._model.epoch_ended()
            self._unlearned = asked if looks_on and self._model.backwards == learned else None
        finally:
            self._model.__dict__.update(share=None, reader=None)

    def _say_of_unlearned(self) -> None:
        """Say once, when another pass begins, that the one before was without a backward, and nothing was exchanged."""
        if self._unlearned is not None and exchanges() == self._unlearned and not self._warned_unlearned:
            self._warned_unlearned = True
            say(self._model.rank_context, "a pass over the loader was without a backward: what the loop makes of it "
                "(a mean, statistics of norms) is of this rank's samples; asa.reduce(x, 'sum') adds up over ranks, and "
                "a loader of your own is read whole by every rank")  # fmt: skip
        self._unlearned = None

    def _say_of_repeated(self, share: Share) -> None:
        """Say once that several ranks compute a sample."""
        fewest, ranks, counter = self._model.least[0], self._model.rank_context.ranks, self._model.in_step
        if ranks == 1 or self._warned_repeated:
            return
        if 0 < share.total < ranks and not self._model.training:
            self._warned_repeated = True
            say(self._model.rank_context, f"a batch of {share.total} samples is fewer than {ranks} ranks, and some "
                "compute a copy that does not count: numbers that a loop adds up count it, asa.reduce(x, 'sum') of "
                "each batch does not")  # fmt: skip
        elif len(share.rows) == share.total > 1:
            self._warned_repeated = True
            why = f"a rank's share of it would be fewer than {fewest}, which the model or the loss needs"
            if counter is not None and counter.singly and share.total >= fewest * ranks:
                why = "the loop calls the model for each sample, and ranks would have unlike numbers of them"
            say(self._model.rank_context, f"a batch of {share.total} samples is computed by every rank, and counts "
                f"once: {why}; numbers that a loop adds up count it on every rank, asa.reduce(x, 'sum') does "
                "not")  # fmt: skip

    def _loaded(self, shares: Iterator[tuple[int, Share]] | None) -> tuple[int, Share] | None:
        """The next of ``shares`` and its number, with the wait for it measured; None after the last, and where an epoch
        begins."""
        watch, began = self._model.watch, time.perf_counter()
        share = None if shares is None else next(shares, None)
        if watch is not None:
            watch.loaded(time.perf_counter() - began)
            if share is None:
                watch.odd()
        return share

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self._batches.set_attribute(name, value)


_loaders: WeakSet[DistributedLoader] = WeakSet()


def _over_whole_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.optim.swa_utils.update_bn``, with batches as on one device, because statistics of a rank's samples are
    others; the loader may be wrapped."""

    @wraps(original)
    def update_bn(*args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            for loader in _loaders:
                stack.enter_context(loader._whole())
            return original(*args, **options)

    return update_bn
