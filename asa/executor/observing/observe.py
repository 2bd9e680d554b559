"""Observed steps of a run: some for its memory, a few for the trace. Their times are not used as measurements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from asa.errors import UnavailableError
from asa.executor.model.votes import Votes
from asa.executor.observing.footprint import peak_recorded, recorded_steps
from asa.executor.observing.timeline import Recorder
from asa.executor.training.epoch_timer import WARM_UP_STEPS
from asa.executor.training.worker import Worker

_MEMORY_STEP = WARM_UP_STEPS - 1
"""The last step before measurements begin. By then optimizer state and DDP's own buckets exist. Memory is measured in
this step, or in the next one with a whole batch."""


def trace_path(folder: Path, rank: int) -> Path:
    """Path of a rank's trace under the folder of its run."""
    return folder / "trace" / f"rank_{rank}.json.gz"


class Observer:
    """Decides, equally on every rank, how each step under a plan is observed.

    ``peak_bytes`` is this rank's peak of active memory on a CPU, after it was measured. ``trace_steps`` steps of the
    first plan are recorded and written under ``folder``.
    """

    def __init__(self, votes: Votes, folder: Path, trace_steps: int) -> None:
        self.peak_bytes: int | None = None
        self._votes, self._folder, self._remaining = votes, folder, trace_steps
        self._recording: tuple[Recorder, ExitStack] | None = None
        self._memory: tuple[int, Callable[[], int], ExitStack] | None = None

    def forget(self) -> None:
        """Measure memory anew, because another plan takes effect."""
        self._end_memory()
        self.peak_bytes = None

    def run(self, worker: Worker, number: int, step: Callable[[], object], *, full: bool) -> bool:
        """Run ``step``, number ``number`` under the plan. ``full``: on a whole batch, and not on the rest of an epoch.
        Returns whether observation has slowed it down."""
        if full and number >= _MEMORY_STEP and self.peak_bytes is None and worker.model.device.type == "cpu":
            self._record_memory(worker, step)
            return True
        if not self._remaining or number < WARM_UP_STEPS:
            step()
            return False
        if self._recording is None:
            self._votes.gather([0.0])  # ranks begin together, so that their times can be compared
            stack, recorder = ExitStack(), Recorder(worker)
            stack.enter_context(recorder.recording())
            self._recording = recorder, stack
        with self._recording[0].step():
            step()
        self._remaining -= 1
        if not self._remaining:
            self.finish()
        return True

    def _record_memory(self, worker: Worker, step: Callable[[], object]) -> None:
        """Run ``step`` as one of those over which memory is recorded. After the last one, ``peak_bytes`` is known."""
        if self._memory is None:
            stack = ExitStack()
            self._memory = recorded_steps(worker), stack.enter_context(peak_recorded(worker)), stack
        remaining, read, stack = self._memory
        try:
            step()
        except BaseException:
            self._end_memory()
            raise
        self._memory = remaining - 1, read, stack
        if remaining == 1:
            self._end_memory()
            self.peak_bytes = read()

    def _end_memory(self) -> None:
        if self._memory is not None:
            self._memory[-1].close()
            self._memory = None

    def finish(self) -> None:
        """Write the recorded steps. All ranks call it, at the latest when the steps of an epoch are over. Memory is
        recorded anew in the next epoch if this one had too few steps.

        Raises:
            UnavailableError: the trace cannot be written.
        """
        self._end_memory()
        if self._recording is None:
            return
        recorder, stack = self._recording
        self._recording, self._remaining = None, 0
        stack.close()
        error: Exception | None = None
        path = trace_path(self._folder, self._votes.rank)
        try:
            recorder.save(path, self._votes.rank)
        except OSError as caught:
            error = UnavailableError(f"cannot write the trace {path}: {caught.strerror or caught}")
        self._votes.agree(error)
