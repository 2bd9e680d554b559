"""Files that are no files, or hold what nobody wrote: whatever ``asa`` reads, it ends soon, in one line, with 3 or 7,
or goes on where the file is not needed, and never with an internal error."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nouns
import pytest
import torch
import training
from refusals import user_folder
from safetensors.torch import load_file, save_file

from asa import reading
from asa.cli import entry
from asa.errors import AsaError, InvalidInputError, UnavailableError, UsageError
from asa.executor.running import outdir, stored_settings
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.executor.training.logs import RunLog
from asa.ir import codec
from asa.scheduler import adapt
from asa.strategies import offered
from asa.zoo.data import open_split
from planner_tests.test_planner_fuzz import VALUES

LIMIT_S = 240


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A reader that waits for ever fails its test."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done in {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _full(path: Path) -> None:
    path.symlink_to("/dev/full")


def _itself(path: Path) -> None:
    path.symlink_to(path.name)


def _random(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(5000))


def _sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": _device,
    "full": _full,
    "folder": Path.mkdir,
    "loop": _itself,
    "nowhere": lambda path: path.symlink_to("nowhere"),
    "empty": lambda path: path.write_bytes(b""),
    "random": _random,
    "null": lambda path: path.write_text("null"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "sparse": _sparse,
}


def _in_place_of(path: Path, kind: str) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = user_folder(tmp_path, monkeypatch)
    codec.save(nouns.plan(), folder / "plan.json")
    return folder


def _said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = entry.run(list(argv))
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "internal error" not in err
    return code, err.strip().splitlines()[-1] if err.strip() else ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("file", "argv"),
    [
        ("plan.json", ("explain", "plan.json")),
        ("plan.json", ("train", "plan.json")),
        ("plan.json", ("verify", "plan.json")),
        ("profiles/tiny.json", ("plan", "profiles/tiny.json")),
        ("profiles/cluster.box.json", ("plan", "--cluster", "profiles/cluster.box.json")),
        ("sealed/seals.jsonl", ("bench", "--check-sealed", "--sealed", "sealed")),
    ],
)
def test_a_file_that_is_named_must_be_one(
    place: Path, capsys: pytest.CaptureFixture[str], kind: str, file: str, argv: tuple[str, ...]
) -> None:
    (place / file).parent.mkdir(exist_ok=True)
    _in_place_of(place / file, kind)
    code, line = _said(capsys, *argv)
    assert code == 3, line
    assert Path(file).parts[0] in line


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "empty"])
@pytest.mark.parametrize("file", ["asa.toml", "pyproject.toml"])
def test_a_configuration_must_be_a_file(place: Path, capsys: pytest.CaptureFixture[str], kind: str, file: str) -> None:
    _in_place_of(place / file, kind)
    code, line = _said(capsys, "cluster", "list")
    assert code == 3, line
    assert file in line


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("gpus = true", "$.gpus"),
        ("gpus = 2.5", "$.gpus"),
        ("gpus = [2]", "$.gpus"),
        ("gpus = 1979-05-27", "$.gpus"),
        ("out = 3", "$.out"),
        ("[train]\nout = ''", "$.train.out"),
        ('[train]\nout = "a\\u0000b"', "$.train.out"),
        ("[train]\nepochs = false", "$.train.epochs"),
        ("[train]\ndata = 5", "$.train.data"),
        ("[train]\ndata_root = ['a', 'b']", "$.train.data-root"),
        ("[train]\nlr = {a = 1}", "$.train.lr"),
        ("[train]\nresume = 7", "$.train.resume"),
        ("[train]\nresume = 'perhaps'", "$.train.resume"),
    ],
)
def test_values_of_another_type_in_a_configuration(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, where: str
) -> None:
    (place / "asa.toml").write_text(text)
    code, line = _said(capsys, "train", "plan.json")
    assert code == 3, line
    assert line.endswith(f"(at {where})")


def test_a_number_of_thousands_of_digits_in_a_configuration(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "asa.toml").write_text("gpus = " + "9" * 5000)
    code, line = _said(capsys, "cluster", "list")
    assert code == 3
    assert "asa.toml" in line


@pytest.mark.parametrize("flag", ["--out", "--data-root", "--data"])
def test_an_empty_text_is_no_value(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    assert _said(capsys, "train", "plan.json", flag, "")[0] == 2
    monkeypatch.setenv(f"ASA_{flag[2:].upper().replace('-', '_')}", "")
    assert _said(capsys, "train", "plan.json")[0] == 2
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"input_shape": [1, 3, 32, 32]}, "$.input_shape"),
        ({"input_shape": [3, 32]}, "$.input_shape"),
        ({"input_shape": [3, 10**6, 10**6]}, "$.input_shape"),
        ({"global_batch": 10**12}, "$.global_batch"),
        ({"num_classes": 10**12}, "$.num_classes"),
        ({"memory_scale": 0.0}, "$.memory_scale"),
        ({"memory_bytes": -1}, "$.memory_scale"),
        ({"prediction": {"memory_bytes_per_rank": [1, 2, 3]}}, "$.prediction.memory_bytes_per_rank"),
        ({"prediction": {"compute_s": 1e300}}, "$.prediction.compute_s"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "verify"])
def test_a_plan_of_impossible_numbers_is_refused_with_the_place(
    place: Path, capsys: pytest.CaptureFixture[str], verb: str, change: dict[str, Any], where: str
) -> None:
    data = codec.document(nouns.plan())
    del data["fingerprint"]
    for name, value in change.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) else value
    (place / "plan.json").write_text(json.dumps(data))
    code, line = _said(capsys, verb, "plan.json")
    assert code == 3, line
    assert line.endswith(f"(at {where})")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch, in a folder with its plan."""
    folder = tmp_path_factory.mktemp("finished")
    settings = training.settings(folder / "run", epochs=1, steps_per_epoch=2)
    train(training.plan(), settings, strategies=offered(), adapt=adapt)
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to spoil."""
    user_folder(tmp_path, monkeypatch)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


RESUME = ("train", "--resume", "--out", "run", "--no-replan")
REFUSED = {
    "plan.json": (3, 7),
    "lock": (3, 5),
    "log.jsonl": (3, 5),
    f"{outdir.CHECKPOINTS}/step_00000002/manifest.json": (7,),
    f"{outdir.CHECKPOINTS}/step_00000002/model.safetensors": (7,),
    f"{outdir.CHECKPOINTS}/step_00000002/optimizer.safetensors": (7,),
    outdir.CHECKPOINTS: (7,),
    "settings.json": (0, 5),
    "memory.json": (0,),
    f"{outdir.CHECKPOINTS}/latest": (0,),
}
"""Exit codes of ``--resume`` where something else is in place of a file of a run."""


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "random"])
@pytest.mark.parametrize("file", REFUSED)
def test_what_is_in_a_runs_folder_must_be_what_was_written(
    run: Path, capsys: pytest.CaptureFixture[str], kind: str, file: str
) -> None:
    if kind == "folder" and file == outdir.CHECKPOINTS:
        pytest.skip("that is what it is")
    _in_place_of(run / file, kind)
    code, line = _said(capsys, *RESUME)
    goes_on = (file, kind) in {("log.jsonl", "random"), ("lock", "random")}
    assert code in ((0,) if goes_on else REFUSED[file]), line


@pytest.mark.parametrize("text", ["", "\x00\xff", '{"event": "start", "settings": {"epochs": "many", "lr": [1]}}'])
def test_a_run_without_its_log_goes_on_with_what_it_was_given(
    run: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (run / "log.jsonl").write_text(text)
    for also in ((), ("settings.json",)):
        for name in also:
            (run / name).unlink()
        given_before, notes = stored_settings.recalled(run)
        assert (given_before["epochs"], given_before["lr"], given_before["data"]) == (1, 0.05, "digits")
        assert not notes
        code, _ = _said(capsys, *RESUME)
        assert code == 0
    data = json.loads((run / outdir.CHECKPOINTS / "step_00000002" / "manifest.json").read_text())
    assert data["settings"]["epochs"] == 1


def test_epochs_whose_log_is_lost_are_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "log.jsonl").unlink()
    assert entry.run([*RESUME, "--epochs", "2"]) == 0
    assert "the log tells of 0 of the 1 epochs before" in capsys.readouterr().err


def test_a_run_without_its_plan_goes_on_with_that_of_its_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = (run / "plan.json").read_bytes()
    (run / "plan.json").unlink()
    assert entry.run(RESUME) == 0
    assert "has no plan.json; the plan is that of its checkpoint of step 2" in capsys.readouterr().err
    assert (run / "plan.json").read_bytes() == plan
    (run / "plan.json").write_bytes(plan[:100])
    code, line = _said(capsys, *RESUME)
    assert code == 3
    assert line.endswith("remove it, and that of the newest checkpoint is taken")
    (run / "plan.json").unlink()
    shutil.rmtree(run / outdir.CHECKPOINTS)
    code, line = _said(capsys, *RESUME)
    assert code == 7
    assert "no plan.json and no checkpoint" in line


def test_other_samples_than_before_are_said_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = run / outdir.CHECKPOINTS / "step_00000002"
    digest = open_split("digits", split="train", root=None, input_shape=(1, 8, 8)).sampled_digest()
    assert codec.load(checkpoint.Manifest, step / "manifest.json").samples == digest
    assert entry.run(RESUME) == 0
    assert "other samples" not in capsys.readouterr().err
    _resigned(step, lambda data: data.update(samples="0" * 32))
    assert entry.run(RESUME) == 0
    assert "has other samples than at step 2" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_not_said_to_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / ".result.json.tmp").mkdir()
    assert _said(capsys, *RESUME) == (0, "asa: run/result.json could not be written")


def test_a_folder_whose_name_no_file_of_a_run_could_hold_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = _said(capsys, "train", "plan.json", "--data", "digits", "--out", os.fsdecode(b"run\xff"))
    assert code == 2
    assert "is not UTF-8" in line
    assert not list(place.glob("run*"))


def test_a_log_that_cannot_be_written_names_the_checkpoint_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = RunLog(tmp_path)
    log({"event": "checkpoint", "step": 5, "path": "run/checkpoints/step_00000005"})
    monkeypatch.setattr("asa.executor.training.logs.open_regular", full)
    with pytest.raises(UnavailableError, match=r"No space left on device; --resume continues from .*step_00000005"):
        log({"event": "note", "message": "more"})


def test_a_line_of_the_log_that_lacks_its_end_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "note", "mess')
    for message in ("first", "second"):
        RunLog(tmp_path)({"event": "note", "message": message})
    _, *lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["first", "second"]


def _resigned(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest by hand, as somebody who wants it to be believed."""
    path = step / checkpoint.MANIFEST
    data = json.loads(path.read_text())
    for stored in data["files"]:
        content = (step / stored["name"]).read_bytes()
        stored.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    change(data)
    del data["fingerprint"]
    path.write_text(json.dumps(data))


def test_a_run_of_an_older_version_is_still_resumed_and_asks_for_what_nobody_knows(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = run / outdir.CHECKPOINTS / "step_00000002"
    _resigned(step, lambda data: [data.pop("settings"), data.pop("moments")])
    (run / "settings.json").unlink()
    assert stored_settings.recalled(run)[0]["lr"] == 0.05, "from the log"
    assert _said(capsys, *RESUME)[0] == 0
    (run / "settings.json").unlink()
    (run / "log.jsonl").write_text('{"event": "start", "settings": {"epochs": "many", "lr": [1]}}\n')
    code, line = _said(capsys, *RESUME)
    assert code == 2
    assert "say --epochs and --lr" in line
    assert _said(capsys, *RESUME, "--epochs", "1", "--lr", "0.05")[0] == 0


Tensors = dict[str, torch.Tensor]


def _cut(t: Tensors) -> None:
    name = next(n for n in t if "conv" in n and "weight" in n)
    t[name] = t[name][:1].clone()


def _scalar(t: Tensors) -> None:
    t[next(iter(t))] = torch.tensor(1.0)


def _foreign(t: Tensors) -> None:
    t["somebody.else/momentum_buffer"] = torch.zeros(3)


def _typed(t: Tensors) -> None:
    name = next(n for n, v in t.items() if v.is_floating_point())
    t[name] = t[name].to(torch.int32)


def _turned(t: Tensors) -> None:
    name = next(n for n in t if n.startswith("classifier") and "weight" in n)
    t[name] = t[name].t().contiguous()


@pytest.mark.parametrize("file", [checkpoint.MODEL, checkpoint.OPTIMIZER])
@pytest.mark.parametrize(
    "change", [_cut, _scalar, _foreign, _typed, _turned, lambda t: t.pop(next(iter(t))), dict.clear],
    ids=["cut", "scalar", "foreign", "typed", "turned", "one-less", "none"],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_that_are_not_the_models_are_never_copied(
    run: Path, capsys: pytest.CaptureFixture[str], file: str, change: Callable[[Tensors], object], ranks: int
) -> None:
    if ranks == 2 and change not in (_cut, _foreign):
        pytest.skip("one rank says it")
    step = run / outdir.CHECKPOINTS / "step_00000002"
    tensors = load_file(step / file)
    change(tensors)
    save_file(tensors, step / file)
    _resigned(step, lambda _: None)
    codec.save(training.plan(ranks=ranks), run.parent / "plan.json")
    code, line = _said(capsys, "train", "plan.json", *RESUME[1:])
    assert code == 3, line


@pytest.mark.parametrize("file", [checkpoint.MODEL, checkpoint.OPTIMIZER])
def test_a_signed_file_without_tensors_is_no_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    step = run / outdir.CHECKPOINTS / "step_00000002"
    (step / file).write_bytes(b"\x00" * 100)
    _resigned(step, lambda _: None)
    code, line = _said(capsys, *RESUME)
    assert code == 7
    assert "no readable tensors" in line


@pytest.mark.parametrize(
    ("name", "value"),
    [("position", -5), ("position", 10**15), ("step", -1), ("seed", -1), ("num_samples", 0), ("loss_scale", 0.0),
     ("settings", {"out": "x", "epochs": -1}), ("settings", {"out": 3}), ("moments", -1), ("moments", 1)],
)  # fmt: skip
def test_impossible_numbers_in_a_manifest(
    run: Path, capsys: pytest.CaptureFixture[str], name: str, value: object
) -> None:
    _resigned(run / outdir.CHECKPOINTS / "step_00000002", lambda data: data.update({name: value}))
    code, line = _said(capsys, *RESUME)
    assert code in (3, 7), line


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _leaves(inner, (*path, key))


def test_any_value_anywhere_in_what_a_run_left_is_taken_or_refused_with_its_place(run: Path) -> None:
    """Every leaf of every document of a run, replaced by each of many values, one at a time, drawn by a fixed seed."""
    draw = random.Random(1)
    step = run / outdir.CHECKPOINTS / "step_00000002"
    for path, cls in (
        (step / "manifest.json", checkpoint.Manifest),
        (run / "settings.json", stored_settings.TrainSettings),
    ):
        whole = json.loads(path.read_text())
        del whole["fingerprint"]
        for leaf in list(_leaves(whole))[1:]:
            for value in draw.sample(VALUES, 4):
                data = json.loads(json.dumps(whole))
                inside = data
                for key in leaf[:-1]:
                    inside = inside[key]
                inside[leaf[-1]] = value
                with contextlib.suppress(InvalidInputError):
                    codec.loads(cls, json.dumps(data), source="it")


def test_any_value_anywhere_in_a_log_is_passed_over(run: Path) -> None:
    draw = random.Random(2)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    torn = []
    for event in lines:
        for leaf in list(_leaves(event))[1:]:
            data = json.loads(json.dumps(event))
            inside = data
            for key in leaf[:-1]:
                inside = inside[key]
            inside[leaf[-1]] = draw.choice(VALUES)
            torn.append(json.dumps(data))
    (run / "log.jsonl").write_text("\n".join(torn))
    log = RunLog(run)
    log.recall(10)
    log.finish(exit_code=0)
    (run / "settings.json").unlink()
    assert stored_settings.recalled(run)[0]["epochs"] == 1


def test_a_regular_file_is_read_and_nothing_else(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.write_bytes(b"12345")
    assert reading.read_bytes(whole, most=5) == b"12345"
    with pytest.raises(InvalidInputError, match="holds 5 bytes, the most is 4"):
        reading.read_bytes(whole, most=4)
    link = tmp_path / "link"
    link.symlink_to(whole)
    assert reading.read_text(link) == "12345", "a link to a file is a file"
    os.mkfifo(tmp_path / "pipe")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT):
        with pytest.raises(InvalidInputError, match="a pipe, not a regular file"):
            reading.open_regular(tmp_path / "pipe", flags)
    proc = Path("/proc/self/status")
    assert not proc.exists() or reading.read_text(proc), "of size 0 until it is read"
    assert issubclass(UsageError, AsaError)
