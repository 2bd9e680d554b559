"""Log and result of a job, as ``asa train`` writes them: ``asa explain RUN_DIR`` reads both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asa.api.rank_context import RankContext
from asa.errors import AsaError
from asa.executor.running import stored_settings
from asa.executor.running.prepare import start_event
from asa.executor.training.logs import RESULT, RunLog
from asa.executor.training.settings import TrainSettings
from asa.ir.plan import Plan


def begin(
    log: RunLog | None, plan: Plan, settings: TrainSettings, place: RankContext, step: int, epoch: int, resumed: bool
) -> None:
    """Write the plan and the first event of a run that has done ``step`` steps and is in ``epoch``, on rank 0.

    Raises:
        UnavailableError: they cannot be written.
    """
    assert log is not None  # it is on rank 0
    (log.folder / RESULT).unlink(missing_ok=True)
    if resumed:
        log.recall(epoch)
    stored_settings.keep(plan, log.folder / "plan.json")
    log(start_event(
        plan, settings, ranks=place.ranks, device=place.device.type, data=["a loader"],
        resumed_step=step if resumed else None, out=str(log.folder),
    ))  # fmt: skip


@contextmanager
def concluded(log: RunLog | None) -> Iterator[None]:
    """Context of a run's epochs, at whose end ``result.json`` is written. It is not if the caller stops asking for
    epochs, as nobody knows why."""
    try:
        yield
    except AsaError as error:
        if log is not None:
            log.finish(exit_code=error.exit_code, message=str(error), rank=getattr(error, "rank", None))
        raise
    except (Exception, KeyboardInterrupt) as error:
        if log is not None:
            code = 130 if isinstance(error, KeyboardInterrupt) else AsaError.exit_code
            log.finish(exit_code=code, message=f"{type(error).__name__}: {error}".rstrip(": "))
        raise
    if log is not None:
        log.finish(exit_code=0)
