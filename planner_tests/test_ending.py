"""Commands that are asked to end: the exit code a shell gives, one document, no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from asa.cli import entry, options, verbs
from asa.cli.console import Console
from asa.cli.ending import left_to_ranks, terminable
from asa.cli.verb import Arguments, Verb
from asa.errors import PreemptedError
from asa.launch import faults, signals

Put = Callable[[Callable[[Console], None]], None]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Makes a function what ``asa probe`` does."""

    def put(body: Callable[[Console], None]) -> None:
        def run(_: Arguments, console: Console) -> None:
            body(console)

        made = Verb(name="probe", help="a test", run=run, options=(options.JSON,))
        monkeypatch.setitem(verbs.VERBS, "probe", ("nowhere", "a test"))
        monkeypatch.setitem(sys.modules, "nowhere", SimpleNamespace(VERBS=(made,)))

    return put


def _asked(number: int = signal.SIGTERM) -> None:
    # The main thread itself: beside this test the process may have threads that do not hold the signal back.
    signal.pthread_kill(threading.get_ident(), number)


def _end_this(_: object = None, number: int = signal.SIGTERM) -> None:
    _asked(number)
    time.sleep(10)


ENDING = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])


@ENDING
def test_a_request_to_end_is_a_document_and_the_code_of_a_shell(probe, capsys, number):
    probe(lambda _: _end_this(number=number))
    assert entry.run(["probe", "--json"]) == 143
    said, why = capsys.readouterr(), f"terminated by {signal.Signals(number).name}"
    assert json.loads(said.out) == {"schema_version": 1, "kind": "error", "exit_code": 143, "error": why}
    assert said.err == f"asa: {why}\n"
    assert signal.getsignal(number) == signal.SIG_DFL


@ENDING
def test_training_that_is_asked_to_end_before_it_has_begun_says_that_nothing_is_lost(probe, monkeypatch, number):
    probe(lambda _: None)
    monkeypatch.setattr(signals, "begun", False)
    monkeypatch.setitem(verbs.VERBS, "train", verbs.VERBS["probe"])
    monkeypatch.setattr(entry, "dispatch", lambda *_: _end_this(number=number))
    assert entry.run(["train", "plan.json"]) == 75
    assert entry.run(["train", "--rehearse", "x"]) == 143
    monkeypatch.setattr(signals, "begun", True)
    assert entry.run(["train", "plan.json"]) == 143


@ENDING
def test_ranks_end_with_the_command_that_waits_for_them(probe, capsys, number):
    from asa.launch import run_ranks, tell

    pids: list[int] = []

    def rank(_: int) -> None:
        tell(os.getpid())
        time.sleep(60)

    def hear(_: int, pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            _asked(number)

    probe(lambda _: run_ranks(2, rank, threads=1, on_message=hear))
    assert entry.run(["probe", "--json"]) == 143
    assert json.loads(capsys.readouterr().out)["exit_code"] == 143
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_processes_forked_by_a_command_end_as_ever(probe):
    ended: list[int] = []

    def forks(_: Console) -> None:
        pid = os.fork()
        if not pid:
            try:
                _end_this()
            finally:
                os._exit(7)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    probe(forks)
    assert entry.run(["probe"]) == 0
    assert ended == [-signal.SIGTERM]


def test_a_command_whose_ranks_save_leaves_the_signal_to_them_and_prints_one_document(probe, capsys):
    handlers: list[object] = []

    def waits(console: Console) -> None:
        with left_to_ranks(launched=True):
            handlers.append(signal.getsignal(signal.SIGTERM))
            _asked()
            console.document({"schema_version": 1, "kind": "result"})

    probe(waits)
    assert entry.run(["probe", "--json"]) == 143
    assert json.loads(capsys.readouterr().out)["kind"] == "result"
    assert handlers == [signal.SIG_DFL]


def test_a_signal_that_is_ignored_stays_so(probe):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        probe(lambda _: _asked())
        assert entry.run(["probe"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


_HANGS = """
import os, time
def factory():
    open("reading", "w").close()
    time.sleep(600)
"""


def _stopped_early(folder: Path, *words: str, fault: str, sign: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of ``asa train`` that gets SIGTERM once the file ``sign`` is there."""
    environment = {**os.environ, "ASA_FAULT": fault, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "asa", "train", "logistic", "--gpus", "2", "--strategies", "ddp", "--out", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, "--json", *words], cwd=folder, env=environment, text=True, **pipes)
    try:
        while not (folder / sign).exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=480)
    finally:
        process.kill()
    return process.returncode, output, errors


_EARLY = """
import os, signal, sys
from asa import cli
from asa.cli import heap
sys.argv = sys.orig_argv = ["asa", "{command}", "--json"]
def start_again(*_):
    os.kill(os.getpid(), {number})
    for number in signal.sigpending() - {{{number}}}:
        sys.exit(f"{{number}} is held back")
heap.start_again = start_again
cli.main()
"""


@ENDING
@pytest.mark.parametrize(("command", "code"), [("plan", 143), ("train", 75)])
def test_a_request_to_end_a_command_that_has_just_started_is_a_document(number, command, code):
    source = _EARLY.format(number=int(number), command=command)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["exit_code"]) == (code, code), done.stderr


@pytest.mark.parametrize(
    ("words", "fault", "sign"),
    [
        (("--data", "digits"), "hang@point=rendezvous,rank=1,once=met", "met"),  # the ranks are starting
        (("--data", "slow:factory"), "", "reading"),  # before there are ranks
    ],
)
def test_a_run_that_has_trained_nothing_ends_without_saving(tmp_path: Path, words, fault, sign):
    (tmp_path / "slow.py").write_text(_HANGS)
    code, output, errors = _stopped_early(tmp_path, *words, fault=fault, sign=sign)
    assert code == 75, errors
    assert json.loads(output)["exit_code"] == 75
    assert errors.splitlines()[-1].startswith("asa: stopped on request before the first step")
    assert not list((tmp_path / "run").glob("checkpoints/*"))  # ranks saved nothing
    events = (
        [json.loads(line)["event"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
        if (tmp_path / "run" / "log.jsonl").exists()
        else []
    )
    assert not {"steps", "epoch", "checkpoint"} & set(events)
    assert not _processes_in(tmp_path)


def _processes_in(folder: Path) -> list[str]:
    """Command lines of the processes that run in ``folder``."""
    found = []
    for entry_ in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry_ / "cwd").resolve() == folder.resolve():
                found.append((entry_ / "cmdline").read_text())
    return found


def test_a_request_that_comes_while_ranks_are_started_again_ends_the_run(tmp_path, monkeypatch):
    training = pytest.importorskip("training")
    from asa.executor.running.run import train
    from asa.scheduler import adapt
    from asa.strategies import offered

    notes: list[str] = []

    def hear(event):
        notes.append(event.get("message", ""))
        if "are started again" in notes[-1]:
            _asked()

    monkeypatch.setenv(faults.VARIABLE, "kill@rank=1,step=8,point=backward")
    monkeypatch.setattr(signals, "begun", False)
    with (
        terminable(lambda *_: None),
        pytest.raises(PreemptedError, match=r"stopped on request, but rank 1 of 2 .* checkpoint is of step 6;"),
        left_to_ranks(launched=False),
    ):
        train(
            training.plan(ranks=2), training.settings(tmp_path), strategies=offered(), adapt=adapt, on_event=hear,
            regroup=lambda plan, _: plan,
        )  # fmt: skip
    assert sum("are started again" in note for note in notes) == 1
    assert json.loads((tmp_path / "result.json").read_text())["exit_code"] == 75


def test_a_request_that_comes_just_before_ranks_start_reaches_them(monkeypatch):
    from asa.launch import run_ranks
    from asa.launch.signals import take_sigterm

    def rank(_: int) -> bool:
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        take_sigterm()
        until = time.monotonic() + 60
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
        return bool(heard)

    monkeypatch.setattr(signals, "missed", True)
    assert run_ranks(2, rank, threads=1, forward_sigterm=True) == [True, True]
    assert not signals.missed


_INTERRUPTED = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from asa import cli
from asa.cli import entry
def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    return 0
if {at_end}:
    entry.run = lambda _: 0
    atexit.register(interrupt)
else:
    entry.run = interrupt
sys.argv = ["asa", "cluster"]
cli.main()
"""


@pytest.mark.parametrize(("at_end", "code", "said"), [(False, 130, "asa: interrupted\n"), (True, -signal.SIGINT, "")])
def test_an_interrupt_where_a_command_begins_or_ends_prints_no_traceback(at_end, code, said):
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED.format(at_end=at_end)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, said)


_PROBE = """
import signal, sys
from types import SimpleNamespace
signal.signal(signal.SIGINT, signal.default_int_handler)
from asa import cli
from asa.cli import options, verbs
from asa.cli.verb import Verb
def run(_, console):
    import swallows
    console.text("not ended")
probe = Verb(name="probe", help="a test", run=run, options=(options.JSON,))
verbs.VERBS["probe"] = ("nowhere", "a test")
sys.modules["nowhere"] = SimpleNamespace(VERBS=(probe,))
sys.argv = ["asa", "probe", "--json"]
cli.main()
"""
_SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.{sign})
    for _ in range(1000):
        pass
except BaseException:
    pass
"""
"""A module that, like some of C++, goes on where an exception is raised in its import."""


@pytest.mark.parametrize(
    ("sign", "code", "line"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated by SIGTERM")]
)
def test_a_signal_during_an_import_is_not_lost(tmp_path: Path, sign: str, code: int, line: str) -> None:
    (tmp_path / "swallows.py").write_text(_SWALLOWS.format(sign=sign))
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, f"asa: {line}\n")
    assert json.loads(done.stdout)["exit_code"] == code
