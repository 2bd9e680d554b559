"""The newest settings of a run, stored beside its plan and in every checkpoint. The log is for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asa.errors import AsaError, UnavailableError
from asa.executor.running.outdir import CHECKPOINTS
from asa.executor.training import checkpoint
from asa.executor.training.logs import last_settings
from asa.executor.training.settings import TrainSettings
from asa.ir import codec
from asa.ir.plan import Plan

SETTINGS = "settings.json"


def keep(record: TrainSettings | Plan, path: Path) -> None:
    """Write the settings or the plan of a run to ``path`` in its folder, from which a resumed run reads them.

    Raises:
        UnavailableError: they cannot be written.
    """
    try:
        codec.save(record, path)
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error.strerror or error}") from None


def recalled(out: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(settings, notes): the newest settings of the run in ``out``, by the names of :class:`TrainSettings`, and notes
    on damaged files.

    They come from ``settings.json``; otherwise from the newest checkpoint; for an older run without either, from its
    log and checkpoints. Unknown settings are missing.
    """
    notes: list[str] = []
    path = out / SETTINGS
    if path.exists() or path.is_symlink():
        try:
            return _values(codec.load(TrainSettings, path)), ()
        except AsaError as error:
            notes.append(f"passed over: {error}")
    manifest = checkpoint.newest_manifest(out / CHECKPOINTS)
    if manifest is not None and manifest.settings is not None:
        return _values(manifest.settings), tuple(notes)
    values: dict[str, Any] = {}
    if manifest is not None:
        values = {"data": manifest.data, "seed": manifest.seed, "optimizer": manifest.optimizer}
    logged = {name: value for name, value in last_settings(out).items() if name in TrainSettings.__annotations__}
    if logged:
        try:
            values = _values(codec.build(TrainSettings, logged, source="the log")) | values
        except AsaError as error:
            notes.append(f"passed over: {error}")
    return values, tuple(notes)


def _values(settings: TrainSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in TrainSettings.__annotations__}
