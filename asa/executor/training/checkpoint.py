"""Checkpoints that are complete or absent, and that any plan can read.

A checkpoint is a directory ``step_N`` of safetensors files and a ``manifest.json`` with the SHA-256 of each. The
manifest contains a fingerprint of itself. The directory is written under a temporary name, flushed to the disk, and
made visible by one rename. After that ``latest`` names it, for people and scripts, if that file can be written. A
reader trusts only content: it takes the newest directory in which every file matches. Nothing is pickled.

Tensors are full and have the names of the plain model; ``optimizer.safetensors`` contains ``<parameter>/<state>``. The
position in the data is counted in global samples, so that it means the same on any number of ranks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from asa.errors import InvalidInputError, NoCheckpointError, UnavailableError
from asa.executor.training.settings import TrainSettings
from asa.ir import codec
from asa.ir.codec import later, noun
from asa.ir.plan import Plan
from asa.launch import faults
from asa.reading import checksum, read_text

MANIFEST = "manifest.json"
LATEST = "latest"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
DISCIPLINE = "consistency.safetensors"
"""Name of the file with further state of a consistency discipline. Other plans ignore it."""

_PAIRS = "complex128"
"""Key of a file's metadata for the names of complex tensors that are stored as pairs of float64, because safetensors
has no such type."""
_NAME = re.compile(r"step_(\d+)")


@noun
class StoredFile:
    """One file of a checkpoint: name, size in bytes, SHA-256 in hex."""

    name: str
    bytes: int
    sha256: str


@noun
class Manifest:
    """Description of a checkpoint.

    All randomness of a run is a function of ``seed``, epoch, step and sample, so the seed is the whole state of the
    generators.

    Attributes:
        position: number of global samples used since the start of the run, full epochs included.
        step: optimizer steps since the start of the run.
        loss_scale: loss scale of fp16; 1 otherwise.
        settings: settings of ``asa train``; None in older files.
        moments: number of tensors in the optimizer's state; None in older files.
        samples: hash of the samples (:meth:`asa.zoo.data.ImageSet.sampled_digest`); None in older files, and if a
            loader gives them.
    """

    run: str
    created: str
    step: int
    position: int
    seed: int
    data: str
    num_samples: int
    global_batch: int
    optimizer: str
    loss_scale: float
    model_spec: str
    model_fingerprint: str
    plan: Plan
    plan_fingerprint: str
    files: tuple[StoredFile, ...]
    settings: TrainSettings | None = later()
    moments: int | None = later()
    samples: str | None = later()

    def __post_init__(self) -> None:
        least = {"step": 0, "position": 0, "seed": 0, "num_samples": 1, "global_batch": 1, "moments": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise InvalidInputError(f"{name} is {value}, it must be at least {bound}", where=f"$.{name}")
        if self.position // self.num_samples > self.step:
            message = f"{self.position} samples, of {self.num_samples} an epoch, after {self.step} steps"
            raise InvalidInputError(message, where="$.position")
        if not self.loss_scale > 0:
            raise InvalidInputError(f"loss_scale is {self.loss_scale}, it must be above 0", where="$.loss_scale")


Store = Callable[[], tuple[StoredFile, ...]]
"""Function that writes the large files of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class CheckedCheckpoint:
    """A checkpoint of which every byte was checked. ``notes`` are newer checkpoints that were skipped, with the
    reason."""

    path: Path
    manifest: Manifest
    notes: tuple[str, ...]


def write(
    folder: Path,
    manifest: Manifest,
    tensors: Mapping[str, Mapping[str, Tensor]],
    *,
    commit: Callable[[], None],
    store: Callable[[Store], tuple[StoredFile, ...]] = lambda write_files: write_files(),
    keep: int = 2,
) -> Path:
    """Add a checkpoint to ``folder`` and remove all but the ``keep`` newest.

    Args:
        manifest: its ``files`` are filled in here.
        tensors: file name to named tensors, on the CPU.
        commit: called when everything is on the disk and nothing is visible yet; an exception abandons it.
        store: calls its argument, which writes the large files and may take long, and returns its result.

    Raises:
        UnavailableError: the disk is full or cannot be written. What was there before is untouched.
    """
    final = folder / f"step_{manifest.step:08d}"
    temporary = folder / f"{final.name}.tmp-{manifest.run}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        files = store(lambda: tuple(_store(temporary / name, named) for name, named in tensors.items()))
        faults.reached("checkpoint.files")
        moments = len(tensors[OPTIMIZER]) if OPTIMIZER in tensors else None
        text = codec.dumps(replace(manifest, files=files, moments=moments))
        _write_text(temporary / MANIFEST, text)
        _flush(temporary)
        faults.reached("checkpoint.manifest")
        commit()
        faults.reached("checkpoint.commit")
        if final.exists():  # a directory cannot replace another atomically, so rename the older one first
            os.rename(final, folder / f"{final.name}.old-{manifest.run}")
        os.rename(temporary, final)
        faults.reached("checkpoint.renamed")
        _flush(folder)
    except (OSError, SafetensorError) as error:
        sweep(folder)
        reason = getattr(error, "strerror", None) or str(error)
        kept = _steps(folder)[:1]
        rest = f"{kept[0].name} is intact" if kept else "no earlier step was saved"
        raise UnavailableError(f"cannot save step {manifest.step} to {folder}: {reason}; {rest}") from error
    except BaseException:
        sweep(folder)
        raise
    _point_to(final)
    for old in _steps(folder)[keep:]:
        _remove(old)
    sweep(folder)
    faults.reached("checkpoint.done")
    return final


def find(folder: Path) -> CheckedCheckpoint:
    """The newest complete checkpoint in ``folder``.

    Raises:
        NoCheckpointError: there is none; says what is wrong with the newest one.
    """
    notes: list[str] = []
    for path in _steps(folder):
        try:
            manifest = check(path)
        except InvalidInputError as error:
            notes.append(f"skipped checkpoint {path.name}: {error}")
        else:
            return CheckedCheckpoint(path=path, manifest=manifest, notes=tuple(notes))
    if notes:
        raise NoCheckpointError(f"none of {len(notes)} checkpoints in {folder} is whole; {notes[0]}")
    raise NoCheckpointError(f"no checkpoint in {folder}; leave out --resume to start anew")


def newest_manifest(folder: Path) -> Manifest | None:
    """The newest readable manifest in ``folder``; other files are not checked. None if there is none."""
    for path in _steps(folder):
        with contextlib.suppress(InvalidInputError):
            return codec.load(Manifest, path / MANIFEST)
    return None


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint in ``folder`` whose files have their sizes; -1 if there is none. Their contents are
    not checked."""
    for path in _steps(folder):
        with contextlib.suppress(InvalidInputError, OSError):
            manifest = codec.load(Manifest, path / MANIFEST)
            if all((path / stored.name).stat().st_size == stored.bytes for stored in manifest.files):
                return manifest.step
    return -1


def names_latest(path: Path) -> bool:
    """Whether ``latest`` names the checkpoint at ``path``."""
    try:
        return read_text(path.parent / LATEST, most=1024).strip() == path.name
    except InvalidInputError:
        return False


def check(path: Path) -> Manifest:
    """Compare every file of the checkpoint at ``path`` with its manifest, and return the manifest.

    Raises:
        InvalidInputError: a file is missing, changed or not listed.
    """
    try:
        return _checked(path)
    except OSError as error:  # a failing disk, or no permission
        raise InvalidInputError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None


def _checked(path: Path) -> Manifest:
    manifest = codec.load(Manifest, path / MANIFEST)
    if path.name != f"step_{manifest.step:08d}":
        raise InvalidInputError(f"{path.name} holds a manifest of step {manifest.step}")
    present = {p.name for p in path.iterdir()} - {MANIFEST}
    for extra in sorted(present - {f.name for f in manifest.files}):
        raise InvalidInputError(f"{extra} is not in the manifest")
    for stored in manifest.files:
        file = path / stored.name
        if stored.name not in present or file.is_symlink() or not file.is_file():
            raise InvalidInputError(f"{stored.name} is missing")
        if file.stat().st_size != stored.bytes:
            raise InvalidInputError(f"{stored.name} has {file.stat().st_size} bytes, not {stored.bytes}")
        if checksum(file) != stored.sha256:
            raise InvalidInputError(f"{stored.name} does not match its SHA-256")
    for name in (MODEL, OPTIMIZER):
        if name not in present:
            raise InvalidInputError(f"{name} is missing")
        with _tensors_in(path / name):
            pass
    return manifest


def read(path: Path, name: str) -> dict[str, Tensor]:
    """Tensors in one file of a checked checkpoint, by name.

    Raises:
        InvalidInputError: it is not a file of tensors.
    """
    with _tensors_in(path / name) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is no dict)
        pairs = json.loads((file.metadata() or {}).get(_PAIRS, "[]"))
    return tensors | {key: torch.view_as_complex(tensors[key]) for key in pairs}


@contextlib.contextmanager
def _tensors_in(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InvalidInputError(f"{path.name} contains no readable tensors: {error}") from None


def sweep(folder: Path) -> None:
    """Remove what an interrupted writer left in ``folder``. Only the owner of the run's lock may call this."""
    for path in _entries(folder):
        if not (match := re.fullmatch(r"(step_\d+)\.(tmp|old)-(.+)", path.name)):
            continue
        final = path.with_name(match[1])
        if match[2] == "old" and match[3] != "removed" and not final.exists():
            with contextlib.suppress(OSError):
                os.rename(path, final)  # the writer was killed between the two renames
        else:
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # a leftover is harmless: no reader takes it for a checkpoint
        (folder / f".{LATEST}.tmp").unlink(missing_ok=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _steps(folder: Path) -> list[Path]:
    """Directories with the name of a checkpoint, newest first, whatever they contain."""
    numbered = [(int(m[1]), p) for p in _entries(folder) if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(numbered, reverse=True)]


def _remove(path: Path) -> None:
    """Rename ``path`` before deleting it, because a half-deleted checkpoint must not look like a half-written one."""
    aside = path.with_name(f"{path.name}.old-removed")
    with contextlib.suppress(OSError):
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)


def _store(path: Path, named: Mapping[str, Tensor]) -> StoredFile:
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in named.items():
        value = tensor.detach().contiguous()
        start = value.untyped_storage().data_ptr()
        # Tensors that share memory (a buffer that is a view of another) are stored as separate copies.
        separate[name] = value.clone() if start in storages else value
        storages.add(start)
    pairs = [name for name, value in separate.items() if value.dtype == torch.complex128]
    separate |= {name: torch.view_as_real(separate[name]) for name in pairs}
    save_file(separate, path, **({"metadata": {_PAIRS: json.dumps(pairs)}} if pairs else {}))
    _flush(path)
    return StoredFile(name=path.name, bytes=path.stat().st_size, sha256=checksum(path))


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems flush no folders
            raise
    finally:
        os.close(handle)


def _point_to(newest: Path) -> None:
    """Write the name of ``newest`` to ``latest``. Failures are ignored: the checkpoint is already committed by its
    rename."""
    folder = newest.parent
    with contextlib.suppress(OSError):
        _write_text(folder / f".{LATEST}.tmp", newest.name + "\n")
        os.replace(folder / f".{LATEST}.tmp", folder / LATEST)
        _flush(folder)
