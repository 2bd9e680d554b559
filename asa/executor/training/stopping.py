"""Graceful stop: SIGTERM, or SIGHUP from a closed terminal, is recorded, and the ranks agree on the step at which they
stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from asa.executor.model.votes import Votes
from asa.launch.signals import leave_terminal, take_sigterm

_IMPATIENT_S = 1.0
"""Seconds within which several signals count as one. When a process group is ended, each member gets a signal, and its
parent passes on another."""


VOTE_EVERY_S = 1.0
"""Approximate time in seconds until a request to stop is noticed."""

PATIENCE_S = 10.0
"""Seconds for which validation may continue after a request to stop. Schedulers usually kill after 30 s."""


class Patience:
    """Handles a request to stop during validation. When ``stop_requested`` returns True, the ranks save at once,
    continue, and give up if validation takes too long.

    ``save`` is collective, and so is :meth:`exhausted`, which is called once per batch.
    """

    def __init__(self, votes: Votes, stop_requested: Callable[[], bool], save: Callable[[], object]) -> None:
        self._votes, self._stop_requested, self._save = votes, stop_requested, save
        self._batches, self._until_vote, self._since = 0, 1, time.monotonic()
        self._saved: float | None = None

    def exhausted(self) -> bool:
        """Whether to give up the validation; equal on all ranks."""
        self._batches += 1
        if self._batches < self._until_vote:
            return False
        now = time.monotonic()
        waited = 0.0 if self._saved is None else now - self._saved
        votes = self._votes.gather([float(self._stop_requested()), (now - self._since) / self._batches, waited])
        self._batches, self._since = 0, now
        self._until_vote = max(1, int(VOTE_EVERY_S / max(1e-6, *(rank[1] for rank in votes))))
        if self._saved is None and any(rank[0] for rank in votes):
            self._save()
            self._saved = time.monotonic()
        return any(rank[2] > PATIENCE_S for rank in votes)


class StopRequest:
    """Records whether this rank was asked to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds since the request; 0 without one."""
        return time.monotonic() - self._since if self.requested else 0.0

    def _note(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            leave_terminal()
        if self.requested and now > self._since + _IMPATIENT_S:
            os._exit(128 + number)  # second request: exit at once without saving
        if not self.requested:
            self.requested, self._since = True, now

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Context in which SIGTERM is recorded, and SIGHUP unless the program handles or ignores it. Outside the main
        thread Python allows no handlers, and signals are not noticed."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {signal.SIGTERM: signal.signal(signal.SIGTERM, self._note)}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._note)
        take_sigterm()  # a signal that came while this rank was starting counts
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
