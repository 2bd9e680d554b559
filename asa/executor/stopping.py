"""A polite end: SIGTERM is noted here, and the ranks agree on the step at which they stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

_IMPATIENT_S = 1.0
"""Signals closer together are one: whoever ends a process group signals each member, and its parent passes it on."""


class StopRequest:
    """Whether this rank was asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0

    def _note(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.asked and now > self._since + _IMPATIENT_S:
            os._exit(128 + number)  # asked twice: no saving, no goodbye
        if not self.asked:
            self.asked, self._since = True, now

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Note SIGTERM within; outside the main thread, where Python allows no handlers, nothing is heard."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)
