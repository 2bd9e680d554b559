"""A checkpoint is whole or absent, whatever happens while it is written or to it afterwards."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training

from asa.errors import InvalidInputError, NoCheckpointError, UnavailableError, UsageError
from asa.executor.running import outdir
from asa.executor.training import checkpoint
from asa.executor.training.checkpoint import Manifest
from asa.ir.codec import fingerprint
from asa.launch.forking import fork_beside_threads


def _manifest(step: int, run: str = "abc") -> Manifest:
    plan = training.plan()
    return Manifest(
        run=run,
        created="2025-01-01T00:00:00+00:00",
        step=step,
        position=64 * step,
        seed=0,
        data="digits",
        num_samples=1437,
        global_batch=64,
        optimizer="sgd",
        loss_scale=1.0,
        model_spec=plan.model_spec,
        model_fingerprint=plan.model_fingerprint,
        plan=plan,
        plan_fingerprint=fingerprint(plan),
        files=(),
    )


def _tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    weights = {
        "a.weight": torch.randn(7, 5, generator=generator),
        "a.strided": torch.randn(6, 4, generator=generator).t(),
        "a.count": torch.tensor(step),
        "a.empty": torch.empty(0, 3),
    }
    weights["a.part"] = weights["a.weight"][:2]  # a buffer may be a view of another
    return {
        checkpoint.MODEL: weights,
        checkpoint.OPTIMIZER: {"a.weight/momentum_buffer": torch.randn(7, 5, generator=generator)},
    }


def _write(folder: Path, step: int, *, keep: int = 2, commit: Callable[[], None] = lambda: None) -> Path:
    return checkpoint.write(folder, _manifest(step), _tensors(step), commit=commit, keep=keep)


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_is_written_is_read_back_bit_for_bit_and_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        _write(tmp_path, step)
    assert _names(tmp_path) == ["latest", "step_00000010", "step_00000015"]
    assert (tmp_path / "latest").read_text() == "step_00000015\n"
    found = checkpoint.find(tmp_path)
    assert (found.manifest.step, found.manifest.position, found.notes) == (15, 960, ())
    assert found.manifest.plan == training.plan()
    for name, named in _tensors(15).items():
        loaded = checkpoint.read(found.path, name)
        assert loaded.keys() == named.keys()
        for key, value in named.items():
            assert loaded[key].dtype == value.dtype
            assert torch.equal(loaded[key], value)


def test_complex_numbers_of_two_float64_are_read_back(tmp_path: Path) -> None:
    """The files have no such type."""
    named = {"a": torch.randn(3, 2, dtype=torch.complex128), "b": torch.tensor(1j, dtype=torch.complex128)}
    tensors = {checkpoint.MODEL: named | {"c": torch.ones(2)}, checkpoint.OPTIMIZER: {}}
    path = checkpoint.write(tmp_path, _manifest(5), tensors, commit=lambda: None)
    loaded = checkpoint.read(path, checkpoint.MODEL)
    assert all(loaded[n].dtype == t.dtype and torch.equal(loaded[n], t) for n, t in tensors[checkpoint.MODEL].items())


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def _other_step(path: Path) -> None:
    shutil.copy(path.parent.parent / "step_00000005" / path.name, path)


def _edit(path: Path) -> None:
    data = json.loads(path.read_text())
    data["position"] += 64
    path.write_text(json.dumps(data))


def _newer(path: Path) -> None:
    data = json.loads(path.read_text())
    del data["fingerprint"]
    path.write_text(json.dumps(data | {"schema_version": 99}))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (checkpoint.MANIFEST, _newer, "schema_version"),
        (checkpoint.MODEL, _flip, "does not match its SHA-256"),
        (checkpoint.MODEL, _truncate, "bytes, not"),
        (checkpoint.MODEL, Path.unlink, "is missing"),
        (checkpoint.OPTIMIZER, _flip, "does not match its SHA-256"),
        (checkpoint.OPTIMIZER, _other_step, "does not match its SHA-256"),
        (checkpoint.MANIFEST, _flip, "skipped checkpoint"),
        (checkpoint.MANIFEST, _truncate, "skipped checkpoint"),
        (checkpoint.MANIFEST, Path.unlink, "cannot read"),
        (checkpoint.MANIFEST, _edit, "fingerprint"),
        (checkpoint.MANIFEST, _other_step, "manifest of step 5"),
        ("extra.pt", lambda p: p.write_bytes(b"pickle"), "not in the manifest"),
    ],
)
def test_damage_of_any_kind_falls_back_to_the_one_before(
    tmp_path: Path, name: str, damage: Callable[[Path], object], words: str
) -> None:
    _write(tmp_path, 5)
    newest = _write(tmp_path, 10)
    damage(newest / name)
    found = checkpoint.find(tmp_path)
    assert found.manifest.step == 5
    assert len(found.notes) == 1
    assert "step_00000010" in found.notes[0]
    assert words in found.notes[0]


def test_a_file_that_cannot_be_read_falls_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, 5)
    newest, sum_of = _write(tmp_path, 10), checkpoint.checksum

    def failing(path: Path) -> str:
        if path.parent == newest:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return sum_of(path)

    monkeypatch.setattr(checkpoint, "checksum", failing)
    found = checkpoint.find(tmp_path)
    assert found.manifest.step == 5
    assert "cannot be read: Input/output error" in found.notes[0]


def test_nothing_valid_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="no checkpoint in"):
        checkpoint.find(tmp_path / "nowhere")
    _flip(_write(tmp_path, 5) / checkpoint.MODEL)
    with pytest.raises(NoCheckpointError, match=r"none of 1 checkpoints .* is whole; .*SHA-256"):
        checkpoint.find(tmp_path)
    assert NoCheckpointError.exit_code == 7


def test_a_symbolic_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    newest = _write(tmp_path, 5)
    os.rename(newest / checkpoint.MODEL, tmp_path / "elsewhere")
    (newest / checkpoint.MODEL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInputError, match="is missing"):
        checkpoint.check(newest)


def test_the_same_step_again_replaces_the_older_one(tmp_path: Path) -> None:
    _flip(_write(tmp_path, 5) / checkpoint.MODEL)
    _write(tmp_path, 5)
    assert checkpoint.find(tmp_path).manifest.step == 5
    assert _names(tmp_path) == ["latest", "step_00000005"]


def test_a_vote_against_it_leaves_no_trace(tmp_path: Path) -> None:
    _write(tmp_path, 5)

    def no() -> None:
        raise UsageError("rank 1 disagrees")

    with pytest.raises(UsageError, match="rank 1 disagrees"):
        _write(tmp_path, 10, commit=no)
    assert _names(tmp_path) == ["latest", "step_00000005"]


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.save_file

    def full(named: dict[str, torch.Tensor], path: Path) -> None:
        real(named, path)
        if path.name == checkpoint.OPTIMIZER:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for earlier, said in (([], "no earlier step was saved"), ([5], "step_00000005 is intact")):
        monkeypatch.setattr(checkpoint, "save_file", real)
        for step in earlier:
            _write(tmp_path, step)
        monkeypatch.setattr(checkpoint, "save_file", full)
        with pytest.raises(UnavailableError, match=rf"cannot save step 10 .*: No space left on device; {said}"):
            _write(tmp_path, 10)
    assert _names(tmp_path) == ["latest", "step_00000005"]
    assert checkpoint.find(tmp_path).manifest.step == 5


def test_a_kill_at_any_point_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """Kill the writer before its n-th system call of note, for every n it makes, while it replaces a step and removes
    an older one."""
    survived: set[tuple[int, int]] = set()
    for victim in range(1, 100):
        folder = tmp_path / str(victim)
        first = _write(folder, 5)
        second = _write(folder, 10)
        _flip(second / checkpoint.MODEL)  # it will be written again
        assert first.exists()
        process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(folder, victim))
        with fork_beside_threads():
            process.start()
        process.join(120)
        found = checkpoint.find(folder).manifest.step
        swept = folder.parent / f"{victim}-swept"
        shutil.copytree(folder, swept)
        checkpoint.sweep(swept)
        assert not [n for n in _names(swept) if not n.startswith("step_") and n != "latest"]
        assert not [n for n in _names(swept) if ".tmp" in n or ".old" in n]
        assert checkpoint.find(swept).manifest.step >= found
        survived.add((process.exitcode or 0, found))
        if process.exitcode == 0:
            break
    assert survived == {(-signal.SIGKILL, 5), (-signal.SIGKILL, 10), (0, 10)}


def _write_and_die(folder: Path, victim: int) -> None:
    count = 0

    def counted(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(module, name, call)

    for module, name in (
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "open"),
        (shutil, "rmtree"),
        (checkpoint, "save_file"),
        (Path, "mkdir"),
    ):
        counted(module, name)
    _write(folder, 10, keep=1)
    os._exit(0)


def test_a_run_owns_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with outdir.owned(folder, resume=False) as out:
        assert out == folder
        with (
            pytest.raises(UsageError, match=rf"in use by another run \(process {os.getpid()}\)"),
            outdir.owned(folder, resume=True),
        ):
            pass
        (out / outdir.CHECKPOINTS / "step_00000005.tmp-dead").mkdir(parents=True)
    assert _names(folder) == [outdir.CHECKPOINTS]
    assert _names(folder / outdir.CHECKPOINTS) == []


def test_a_directory_with_a_run_in_it_is_not_written_over(tmp_path: Path) -> None:
    _write(tmp_path / outdir.CHECKPOINTS, 5)
    with (
        pytest.raises(UsageError, match="contains a run, up to step_00000005; --resume continues it"),
        outdir.owned(tmp_path, resume=False),
    ):
        pass
    with outdir.owned(tmp_path, resume=True):
        pass


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    def die() -> None:
        with outdir.owned(tmp_path, resume=False):
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=die)
    with fork_beside_threads():
        process.start()
    process.join(120)
    assert (tmp_path / outdir.LOCK).exists()
    with outdir.owned(tmp_path, resume=False):
        pass


@pytest.mark.parametrize("where", ["file", "/proc/asa"])
def test_a_directory_that_cannot_be_written_is_known_before_training(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UnavailableError, match="cannot write to"), outdir.owned(tmp_path / where, resume=False):
        pass


def test_a_disk_too_small_is_known_before_training(tmp_path: Path) -> None:
    outdir.check_space(tmp_path, 1024, keep=2)
    with pytest.raises(UnavailableError, match="GiB free, 3 checkpoints need"):
        outdir.check_space(tmp_path, 1 << 60, keep=2)


def test_the_checkpoints_that_a_run_has_are_room_for_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        folder = tmp_path / outdir.CHECKPOINTS / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / checkpoint.MODEL).write_bytes(bytes(1000))
    monkeypatch.setattr(outdir.shutil, "disk_usage", lambda _: SimpleNamespace(free=1500))
    outdir.check_space(tmp_path, 1000, keep=2)  # 2 are there and 1 more is written
    with pytest.raises(UnavailableError, match="3 checkpoints need"):
        outdir.check_space(tmp_path, 1600, keep=2)


def test_a_file_system_without_locks_or_flushes_of_folders_holds_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fsync = os.fsync

    def without_folders(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "fsync", without_folders)
    monkeypatch.setattr("fcntl.flock", without_locks)
    with outdir.owned(tmp_path, resume=False) as out:
        _write(out / outdir.CHECKPOINTS, 5)
    assert "has no locks" in caplog.text
    assert checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest.step == 5


def test_a_place_for_checkpoints_that_is_no_folder_is_known_before_training(tmp_path: Path) -> None:
    (tmp_path / outdir.CHECKPOINTS).write_text("in the way")
    with (
        pytest.raises(UnavailableError, match=f"cannot write to .*{outdir.CHECKPOINTS}: "),
        outdir.owned(tmp_path, resume=False),
    ):
        pass
    assert _names(tmp_path) == [outdir.CHECKPOINTS]


def test_the_newest_step_is_that_of_files_that_are_there(tmp_path: Path) -> None:
    for step in (5, 10):
        _write(tmp_path, step)
    assert checkpoint.newest_step(tmp_path) == 10
    _truncate(tmp_path / "step_00000010" / checkpoint.MODEL)
    assert checkpoint.newest_step(tmp_path) == 5
    (tmp_path / "step_00000005" / checkpoint.OPTIMIZER).unlink()
    assert checkpoint.newest_step(tmp_path) == -1
