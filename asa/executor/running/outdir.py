"""Directory of a run, checked before anything starts. It must be writable, and belongs to one run at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from asa.errors import InvalidInputError, NoCheckpointError, UnavailableError, UsageError
from asa.executor.training import checkpoint
from asa.ir.units import GIB, MIB
from asa.reading import open_regular

LOCK = "lock"
CHECKPOINTS = "checkpoints"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, as Lustre and NFS may be mounted."""
_log = logging.getLogger("asa")
AGENT = "agent"
"""Name of a file that identifies the launcher's agent that last started the run's rank 0."""


@contextlib.contextmanager
def owned(folder: Path, *, resume: bool) -> Iterator[Path]:
    """Context that creates ``folder`` if it does not exist, and holds its lock. Removes the leftovers of a killed run.

    The lock is the operating system's. It ends with the process that holds it, however that ends, and with the ranks
    that it forked.

    Raises:
        UnavailableError: the folder cannot be created or written.
        UsageError: another run is using it, or (without ``resume``) it contains a run already.
    """
    place = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder)
        if not resume and os.path.lexists(folder / CHECKPOINTS):
            place = folder / CHECKPOINTS
            _probe(place)
        place = folder
        stream = open_regular(folder / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UnavailableError(f"cannot write to {place}: {error.strerror or error}; choose another --out") from None
    with stream:
        _lock(stream, folder)
        checkpoint.sweep(folder / CHECKPOINTS)
        check_unused(folder, resume=resume)
        try:
            yield folder
        finally:
            checkpoint.sweep(folder / CHECKPOINTS)
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()


def check_run(folder: Path, *, resume: bool) -> None:
    """Check that there is a run in ``folder`` if one is to be continued, and none otherwise.

    Raises:
        NoCheckpointError: there is none. UsageError: there is one.
    """
    if resume and not any((folder / CHECKPOINTS).glob("step_*")):
        raise NoCheckpointError(f"no checkpoint in {folder / CHECKPOINTS}; leave out --resume to start anew")
    check_unused(folder, resume=resume)


def check_unused(folder: Path, *, resume: bool) -> None:
    """Check that the run in ``folder``, if there is one, is to be continued.

    Raises:
        UsageError: it is not.
    """
    saved = sorted(p.name for p in (folder / CHECKPOINTS).glob("step_*") if "." not in p.name)
    if saved and not resume:
        raise UsageError(f"{folder} contains a run, up to {saved[-1]}; --resume continues it, or choose another --out")


def _probe(folder: Path) -> None:
    """Raise OSError if no file can be written to ``folder``."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"\0" * 4096)


def _lock(stream: IO[bytes], folder: Path) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(folder / LOCK).st_ino != os.fstat(stream.fileno()).st_ino:
            raise FileNotFoundError  # its last owner has just removed it, and another process may hold the new one
    except (BlockingIOError, FileNotFoundError):
        stream.seek(0)
        owner = stream.read(20).decode(errors="replace").strip() or "unknown"
        raise UsageError(f"{folder} is in use by another run (process {owner}); choose another --out") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("the file system of %s has no locks: see to it that no other run uses it", folder)
    stream.truncate(0)
    stream.write(f"{os.getpid()}\n".encode())
    stream.flush()


def begin(folder: Path, agent: str | None) -> None:
    """Record which agent of a launcher (:func:`asa.launch.torchrun.agent`) has started the run in ``folder``."""
    with contextlib.suppress(OSError):  # a restart is then taken for a new run, and refused
        (folder / AGENT).unlink(missing_ok=True)
        if agent is not None:
            (folder / AGENT).write_text(agent)


def begun_by(folder: Path) -> str | None:
    """The agent that :func:`begin` recorded; None if there is no readable record."""
    try:
        with open_regular(folder / AGENT, os.O_RDONLY) as stream:
            return stream.read(256).decode(errors="replace") or None
    except (OSError, InvalidInputError):
        return None


def check_space(folder: Path, checkpoint_bytes: int, keep: int) -> None:
    """Check that the disk has room for a run's checkpoints: those kept, and one being written. Those that the run has
    already, if it continues, have their room.

    Raises:
        UnavailableError: it has not.
    """
    needed = (keep + 1) * checkpoint_bytes
    free = shutil.disk_usage(folder).free + min(_held_bytes(folder), keep * checkpoint_bytes)
    if free < needed:
        unit, name = (GIB, "GiB") if needed >= GIB else (MIB, "MiB")
        raise UnavailableError(
            f"{folder} has {free / unit:.2f} {name} free, {keep + 1} checkpoints need {needed / unit:.2f} {name}; "
            "make room or choose another --out"
        )


def _held_bytes(folder: Path) -> int:
    """Bytes of the checkpoints in the folder of a run."""
    held = 0
    for file in (folder / CHECKPOINTS).glob("step_*/*"):
        with contextlib.suppress(OSError):
            held += file.stat().st_size
    return held
