"""Checks that ranks do the same in a loop: equally many backwards and updates, equal hyperparameters and weights.

A branch that depends on a rank's own number (``if loss.isnan(): continue``, a learning rate computed from
``loss.item()``) makes ranks hang, combine gradients of different batches, or diverge silently. So ranks exchange counts
after every batch, in a separate process group. A rank that waits inside a forward or backward cannot take part; it
writes its position to the store, where the ranks that skipped this pass, or wait in another, read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from asa.api.rank_context import meet_by
from asa.errors import UsageError, WorkersFailedError, place_of_call
from asa.executor.model.parallel import ParallelModel
from asa.launch.worker import others_may_leave
from asa.sharding.collectives.reads import OF_PROGRAM, READ, kept_in_step
from asa.sharding.split.of_rank import operands

_LOOKS = 3
"""Number of batches of an epoch after which weights are compared, too, and of first updates before which ranks meet."""
_ELEMENTS = 64
"""Number of elements of each parameter that are compared."""
_COMPARED_SETTINGS = ("lr", "momentum", "betas", "weight_decay")
_TRUSTED = 3
"""Number of batches after which ranks stop exchanging the numbers of samples in their calls of the model, if all
samples so far came from the loader."""
_PATIENCE_S = 3.0
"""Seconds in a forward or backward before a rank writes its position to the store, and of waiting before it reads
others'."""
FORWARD, BACKWARD, UPDATE = "a call of the model", "a backward", "an update"
_FIGURES = 4
"""Largest number of figures in an exchange."""
_STOPPED, _END = "no pass any more", "the end of the batch"
OTHER_ROWS = "a call of the model with other samples than the loader's"
DECISION = "a test by which a loop goes on or makes a backward"
BEGINNING = "the beginning of an update"
_PASSES = (FORWARD, BACKWARD, UPDATE, OTHER_ROWS, DECISION, BEGINNING, _END)
"""What a training loop comes to. Ranks come alone to what is none of these by a condition on their number."""
REMEDY = (
    "a branch of the loop took another way on some ranks, by a number of a rank's own (its loss, its metric): decide "
    "by one of all ranks, asa.reduce(x); or some ranks called the model more often (until their samples have ended, "
    "if rank == 0): call it on all alike"
)

ALONE = "call it on every rank, outside of 'if rank == 0', and print or write on one what comes of it"
_KEPT = 200
"""Number of passes that a rank remembers, to say where ranks parted."""

_ALIKE = {
    "weights": "weights that all ranks hold alike are no longer the same: the loop changed them by numbers of a rank's "
    "own (its random numbers, its loss); draw them with one seed on all ranks, or use asa.reduce(x)",
    "parts": "the loop computed parameters, gradients or states that ranks hold in parts with numbers that differ "
    "between ranks (a loss, an answer, what was drawn or kept of a rank's samples): one device has one of all; make it "
    "one of all ranks, asa.reduce(x)",
    "written": "gradients that the loop wrote differ between ranks: they were made of numbers of a rank's own samples "
    "(its loss, its outputs), and one device has one of all; make them of asa.reduce(x)",
    "bent": "the loss bends a mean of a rank's own samples (its absolute value, a clamp, the larger of two), and ranks "
    "are on different sides of the bend: one device bends the mean of all samples; compute the loss of "
    "asa.gather(outputs) and asa.gather(labels)",
    "others": "parameters of an optimizer that was not handed to asa.parallelize are no longer the same on all ranks: "
    "each updates its own by its samples; hand the module and its optimizer to a call of asa.parallelize of their own",
}
"""Figures that have to be the same on all ranks, and what is printed if they are not."""


class _Figures(NamedTuple):
    """What a rank tells the others behind each batch: numbers of passes and updates, the optimizers' settings and first
    learning rate, sizes of what has to be :data:`_ALIKE`, and answers (0 or 1)."""

    shared: float
    updates: float
    settings: float
    rate: float
    weights: float
    asks: float
    derived: float
    edge: float
    others: float
    parts: float
    single: float
    written: float
    bent: float


class InStep:
    """Counts what this process has done in loops. There is one for all models of a program."""

    def __init__(self, timeout_s: float) -> None:
        self.world = dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.shared = self.updates = self.backwards = 0
        self._timeout_s = timeout_s
        within = timedelta(seconds=timeout_s)
        self._group: Any = dist.new_group(backend="gloo", timeout=within)
        self._sizes: Any = dist.new_group(backend="gloo", timeout=within)
        self._store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        self._pending: tuple[Any, list[Tensor]] | None = None
        self._since: float | None = None
        self._kind = ""
        self._passes: deque[tuple[str, str]] = deque(maxlen=_KEPT)
        """Kinds of the last passes, and where the program made them, for reads."""
        self._warned: set[str] = set()
        self._stopped = False
        self.derived = False
        """Whether an input of the model since the last batch was not a tensor of the loader."""
        self.single = self.singly = False
        """Whether the loop called the model once for each sample of this rank in the last batch; whether it does on any
        rank (equal on all). Ranks then need equal numbers of samples."""
        self.bent = 0
        """A number for the sides of bends on which losses were since the last batch; 0 without bends."""
        self._trusted = 0
        self._graded: list[tuple[nn.Parameter, Callable[[], Tensor | None], int]] = []
        self._written: list[Tensor] = []
        """Sizes of gradients that the loop wrote since they were compared last."""
        self._met = 0
        """Number of updates before which ranks met: where they have parted so far, none is made."""
        self._counted: WeakSet[Optimizer] = WeakSet()
        self._others: WeakSet[Optimizer] = WeakSet()
        """Optimizers that made steps, and are of no distributed model."""
        register_optimizer_step_post_hook(self._stepped)
        meet_by(self.world, self.meet)
        kept_in_step(self.together)
        threading.Thread(target=self._watch, daemon=True).start()

    def count(self, optimizers: Sequence[Optimizer]) -> None:
        """Count the updates of ``optimizers``."""
        for optimizer in optimizers:
            if optimizer not in self._counted:
                self._counted.add(optimizer)
                optimizer.register_step_pre_hook(self._updating)
                optimizer.register_step_post_hook(self._updated)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._counted:
            self._others.add(optimizer)

    def graded(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember the gradients of ``parameters``, which a backward made equal on all ranks."""
        self._graded = [(p, *_version(p)) for p in parameters]

    @torch.no_grad()
    def _updating(self, *_: Any) -> None:
        """Note gradients that were written since the backward."""
        if self._met < _LOOKS:
            self._met += 1
            self.meet(BEGINNING)
        now = [(p, *_version(p)) for p, *_ in self._graded]
        changed = [
            p.grad
            for (p, before, version), (_, _, later) in zip(self._graded, now, strict=True)
            if p.grad is not None and (before() is not p.grad or version != later)
        ]
        gradients = [g.reshape(-1)[:_ELEMENTS] for g in changed if g.layout is torch.strided]
        if gradients:
            self._written.append(torch.stack([g.norm() for g in gradients]).double().nan_to_num(0, 0, 0).sum())
            self._graded = now

    def _updated(self, *_: Any) -> None:
        self.updates += 1

    @contextlib.contextmanager
    def together(self, kind: str) -> Iterator[None]:
        """Context around a forward or backward (``kind``) in which ranks wait for one another. A read, or a collective
        of the program, within another pass is counted, and the position stays that of the other.

        Raises:
            UsageError: ranks parted. WorkersFailedError: another rank is gone.
        """
        self.shared += 1
        self.backwards += kind == BACKWARD
        place = "" if kind in _PASSES else place_of_call()
        self._passes.append((kind, place))
        if self._since is not None and (kind == READ or kind.startswith(OF_PROGRAM)):
            yield
            return
        self._kind, self._since = kind, time.monotonic()
        try:
            with others_may_leave():
                yield
        except WorkersFailedError as error:
            if error.rank is not None:
                raise
            alone = f"rank {self.rank} waited in {kind}{place} for all others; {ALONE}"
            raise WorkersFailedError(f"{error}; {REMEDY if kind in _PASSES else alone}") from error
        finally:
            self._since = None

    @property
    def exchanging(self) -> bool:
        """Whether ranks exchange the numbers of samples in their calls of the model; equal on all ranks."""
        return self._trusted < _TRUSTED

    def meet(self, what: str) -> None:
        """Wait until all ranks have come to ``what``, a call that a program easily makes on one rank only (collective).

        Raises:
            UsageError: another rank does something else. WorkersFailedError: a rank does not arrive in time.
        """
        self.figures(what, ())

    def figures(self, kind: str, figures: Sequence[float]) -> list[list[float]]:
        """The ``figures`` of every rank in an exchange of this ``kind`` (:data:`OTHER_ROWS`, about the samples in its
        call of the model, :data:`DECISION`, or what ranks :meth:`meet` at), by rank (collective).

        Raises:
            UsageError: another rank does something else. WorkersFailedError: a rank does not arrive in time.
        """
        wire = torch.zeros(1 + _FIGURES, dtype=torch.float64)
        wire[: 1 + len(figures)] = torch.tensor([number_of(kind), *figures], dtype=torch.float64)
        by_rank = [torch.empty_like(wire) for _ in range(self.ranks)]
        with self.together(kind):
            work: Any = dist.all_gather(by_rank, wire, group=self._sizes, async_op=True)
            self._wait(work)
            work.wait()
        if len({float(each[0]) for each in by_rank}) > 1:
            raise UsageError(self._apart(kind))
        return [each[1 : 1 + len(figures)].tolist() for each in by_rank]

    def _apart(self, kind: str) -> str:
        """A line on what every rank is in; this one is in ``kind``."""
        self._store.set(f"asa/in/{self.rank}", kind)
        kinds = [self._store.get(f"asa/in/{rank}").decode() for rank in range(self.ranks)]
        self.leave()
        return f"{', '.join(f'rank {rank} is in {each}' for rank, each in enumerate(kinds))}; {REMEDY}"

    def after_batch(
        self,
        model: ParallelModel,
        optimizers: Sequence[Optimizer],
        number: int,
        *,
        asks: bool,
        wait: bool,
        edge: bool,
    ) -> bool:
        """Exchange counts after batch ``number`` of an epoch, or where one begins or ends (``edge``; collective). They
        are checked at once with ``wait``, otherwise after the next batch. Returns whether ``asks`` is true for any rank
        in the checked exchange.

        Raises:
            UsageError: ranks made different calls. WorkersFailedError: a rank does not arrive in time.
        """
        settings = tuple(_plain(g.get(k)) for o in optimizers for g in o.param_groups for k in _COMPARED_SETTINGS)
        rates = [_plain(g.get("lr")) for o in optimizers for g in o.param_groups[:1]]
        weights = _size(model) if number < _LOOKS else 0.0
        figures = _Figures(
            shared=self.shared, updates=self.updates, settings=number_of(settings), rate=(rates[:1] or [0.0])[0],
            weights=weights, asks=asks, derived=self.derived, edge=edge, others=_size_of(self._others),
            parts=operands.figure(), single=self.single, written=sum(each.item() for each in self._written),
            bent=float(self.bent % (1 << 30)),
        )  # fmt: skip
        wire = torch.tensor(figures, dtype=torch.float64)
        self._written.clear()
        self.derived, self.bent = False, 0
        requested = self._check_pending()
        by_rank = [torch.empty_like(wire) for _ in range(self.ranks)]
        self._pending = dist.all_gather(by_rank, wire, group=self._group, async_op=True), by_rank
        if wait:
            requested = self._check_pending() or requested
        return requested

    def _check_pending(self) -> bool:
        if self._pending is None:
            return False
        work, by_rank = self._pending
        self._pending = None
        if not work.is_completed():
            self._wait(work)
        with others_may_leave():
            work.wait()
        every = [_Figures(*each.tolist()) for each in by_rank]
        if len({(f.shared, f.updates) for f in every}) > 1:
            counts = ", ".join(f"rank {r} {int(f.shared)} and {int(f.updates)}" for r, f in enumerate(every))
            alone = self._parted_behind(every)
            self.leave()
            raise UsageError(
                alone or f"ranks differ in how many passes they shared and updates they made: {counts}; {REMEDY}"
            )
        if len({f.edge for f in every}) > 1:
            at = ", ".join(
                f"rank {r} {'begins or ends an epoch' if f.edge else 'is within one'}" for r, f in enumerate(every)
            )
            self.leave()
            raise UsageError(f"ranks are at different places of their loops: {at}; {REMEDY}")
        if len({f.settings for f in every}) > 1:
            self._warn(
                f"hyperparameters of the optimizer differ between ranks (the first learning rate is "
                f"{', '.join(f'{f.rate:.6g}' for f in every)}): they were made of a number of a rank's own (its loss, "
                "its metric), and weights part; make them of one of all ranks, asa.reduce(x)"
            )
        for name, text in _ALIKE.items():
            values = [getattr(f, name) for f in every]
            if name == "bent":  # a rank whose samples do not count has none
                values = [v for v in values if v] or [0.0]
            scale = 1.0 if name in ("parts", "bent") else max(values)
            if max(values) - min(values) > 1e-6 * scale:
                self._warn(text)
        self.singly = self.singly or any(f.single for f in every)
        self._trusted = 0 if any(f.derived for f in every) else self._trusted + 1
        return any(f.asks for f in every)

    def _wait(self, work: Any) -> None:
        arrived = threading.Event()
        work.get_future().add_done_callback(lambda _: arrived.set())
        began = time.monotonic()
        while not arrived.wait(_PATIENCE_S):
            if conflict := self._conflict():
                self.leave(conflict)
                raise UsageError(conflict)
            if time.monotonic() - began > self._timeout_s:
                raise WorkersFailedError(f"a rank did not come to where the others are within {self._timeout_s:g} s")

    def leave(self, why: str = "") -> None:
        """Write to the store that this rank stops, and ``why`` if others are to say the same, so that a rank that waits
        for it in a pass ends, too."""
        self._stopped = True
        with contextlib.suppress(Exception):
            self._store.set(f"asa/pass/{self.rank}", json.dumps([0, _STOPPED, why]))

    def end(self, why: str) -> NoReturn:
        """End this process with an error that cannot be raised, because another of its threads would wait on."""
        self.leave(why)
        sys.stderr.write(f"asa: error: {why}\n")
        sys.stderr.flush()
        os._exit(UsageError.exit_code)

    def begin(self) -> None:
        """Reset the counts for another program (on all ranks)."""
        self._warned.clear()
        operands.figure()  # of what another program did last
        operands.written = 0
        self._met, self._trusted, self.derived, self.single, self.singly = 0, 0, False, False, False
        self._graded, self._written = [], []
        if self._stopped:
            self._stopped = False
            self._store.set(f"asa/pass/{self.rank}", json.dumps([0, "", []]))

    def _conflict(self) -> str:
        """Description of what another rank waits in, if this one cannot join it; empty if there is no such rank."""
        for rank in range(self.ranks):
            key = f"asa/pass/{rank}"
            if rank == self.rank or not self._store.check([key]):
                continue
            number, kind, passes = json.loads(self._store.get(key))
            if kind == _STOPPED:
                why = str(passes)
                return why or f"rank {rank} stopped with an error, and rank {self.rank} waits for it; {REMEDY}"
            if self._since is None:
                in_conflict, doing = number > self.shared, f"went on to the end of the batch with {self.shared}"
            else:
                # No rank leaves an exchange of figures before all have joined it, so a rank that is ahead was in
                # another pass.
                ahead = _meets(self._kind) and number > self.shared
                in_conflict = ahead or (number == self.shared and kind != self._kind)
                doing = f"is in {self._kind}"
            if in_conflict:
                return self._read_alone(rank, number, passes) or (
                    f"rank {rank} waits in {kind}, its {number}th pass, for rank {self.rank}, which {doing}; {REMEDY}"
                )
        return ""

    def _read_alone(self, rank: int, number: int, passes: list[list[str]]) -> str:
        """A line on where this rank and ``rank``, whose pass ``number`` is the last of ``passes``, parted, if one of
        them read values there that the other did not; otherwise empty."""
        first = max(number - len(passes), self.shared - len(self._passes))
        mine = list(self._passes)[len(self._passes) - (self.shared - first) :]
        theirs = passes[len(passes) - (number - first) :]
        for own, other in zip_longest(mine, theirs, fillvalue=(_END, "")):
            if own[0] != other[0]:
                pair = (self.rank, *own), (rank, *other)
                (reader, kind, place), (left, instead, _) = pair[::-1] if _usual(own[0]) else pair
                if _usual(kind):
                    return ""
                return f"rank {reader} alone came to {kind}{place}, where rank {left} came to {instead}: {ALONE}"
        return ""

    def _parted_behind(self, every: Sequence[_Figures]) -> str:
        """The line of :meth:`_read_alone` for all ranks, which are at the end of a batch (collective)."""
        exchange = f"asa/passes/{sum(f.shared for f in every):g}"
        self._store.set(f"{exchange}/{self.rank}", json.dumps([self.shared, list(self._passes)]))
        others = [r for r in range(self.ranks) if every[r].shared != every[self.rank].shared]
        found = (self._read_alone(r, *json.loads(self._store.get(f"{exchange}/{r}"))) for r in others)
        return next(filter(None, found), "")

    def _watch(self) -> None:
        """Run in a thread: write to the store if this rank is in one forward or backward for long. If another rank
        waits in a pass of another kind, neither can continue, and this process ends."""
        written = 0
        with contextlib.suppress(Exception):  # the store is gone, and so are its readers
            while True:
                time.sleep(min(1.0, _PATIENCE_S))
                since, position = self._position()
                if since is None or time.monotonic() - since < _PATIENCE_S:
                    continue
                if position[0] != written:
                    self._store.set(f"asa/pass/{self.rank}", json.dumps(position))
                    written = position[0]
                elif (
                    time.monotonic() - since > 2 * _PATIENCE_S
                    and (conflict := self._conflict())
                    and self._since == since
                ):
                    self.end(conflict)

    def _position(self) -> tuple[float | None, tuple[int, str, list[tuple[str, str]]]]:
        """Since when this rank is in a pass (None: it is in none), and the pass: its number, its kind, the last passes.
        None, too, if the loop went on while they were read: the number of one pass with the kind of the next would seem
        to the others to be another way."""
        since, position = self._since, (self.shared, self._kind, list(self._passes))
        return (since if self._since == since else None), position

    def _warn(self, text: str) -> None:
        kind = text[:20]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=5)


_current: list[InStep] = []


def in_step(timeout_s: float) -> InStep:
    """The counter of this process, created at the first call (collective then)."""
    if not _current or _current[0].world is not dist.group.WORLD:  # the program may have created another group
        _current[:] = [InStep(timeout_s)]
    _current[0].begin()
    return _current[0]


def number_of(settings: object) -> int:
    """A number for plain ``settings`` that is equal in all processes, unlike ``hash`` of None and of text."""
    return zlib.crc32(repr(settings).encode())


def _usual(kind: str) -> bool:
    """Whether a program comes to this ``kind`` of pass on all ranks, unless it takes another way on some."""
    return kind in _PASSES or kind.startswith(OF_PROGRAM)


def _meets(kind: str) -> bool:
    """Whether no rank leaves a pass of this ``kind`` before all have come."""
    return kind not in (FORWARD, BACKWARD, UPDATE, READ) and not kind.startswith(OF_PROGRAM)


def _version(p: nn.Parameter) -> tuple[Callable[[], Tensor | None], int]:
    """The gradient of ``p``, by a weak reference, because another may get its address; and the number of times that it
    was written."""
    gradient = p.grad
    return (_nothing, 0) if gradient is None else (ref(gradient), gradient._version)


def _nothing() -> None:
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return 0.0 if value is None else float(value)


@torch.no_grad()
def _size(model: ParallelModel) -> float:
    """Sum of magnitudes of some elements of each parameter that all ranks hold and that must be equal."""
    total = 0.0
    replicated = (c for c, layout in zip(model.components, model.layouts, strict=True) if layout.tensor == 1)
    parts = [
        p.detach().reshape(-1)[:_ELEMENTS].abs().sum(dtype=torch.float64)
        for component in replicated
        for p in component.parameters()
        if not isinstance(p, DTensor) and not p.is_complex()
    ]
    if parts:
        total = float(torch.stack(parts).sum())
    return total


@torch.no_grad()
def _size_of(optimizers: Iterable[Optimizer]) -> float:
    """Sum of magnitudes of some elements of each parameter that ``optimizers`` update, and that is whole."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    whole = [p for g in groups for p in g["params"] if type(p) in (Tensor, nn.Parameter) and not p.is_complex()]
    return float(sum(float(p.reshape(-1)[:_ELEMENTS].abs().sum(dtype=torch.float64)) for p in whole))
