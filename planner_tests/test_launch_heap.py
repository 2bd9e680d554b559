"""Ranks keep what they free and take it back: a large block is faulted in once, and not at every step."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training

from asa.cli import heap
from asa.executor.running.run import train
from asa.executor.training import worker
from asa.launch import run_ranks
from asa.scheduler import adapt
from asa.strategies import offered

_BYTES = 64 << 20


def _faults(_rank: int) -> int:
    for _ in range(16):  # aligned blocks do not fit where one of their size was: a few are needed
        torch.empty(_BYTES, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(_BYTES, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is told so, nobody else's")
def test_a_rank_takes_a_large_block_from_what_it_freed():
    pages = 8 * _BYTES // resource.getpagesize()
    assert run_ranks(1, _faults)[0] < pages / 20


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the process would have been replaced by."""
    found: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _path, argv: found.append(argv))
    monkeypatch.setattr(heap, "_glibc", lambda: True)
    monkeypatch.setenv(heap.VARIABLE, "glibc.malloc.perturb=0")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "asa", "train", "plan.json"])
    return found


def test_a_command_that_trains_starts_once_more_and_only_once(started: list[list[str]]):
    heap.start_again(["train", "plan.json"])
    assert started == [[sys.executable, *sys.orig_argv[1:]]]
    assert os.environ[heap.VARIABLE] == f"glibc.malloc.perturb=0:{_ALL}"
    heap.start_again(["train", "plan.json"])
    assert len(started) == 1


def test_commands_that_hold_no_model_do_not(started: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    for words in ([], ["plan", "x.json"], ["--help"]):
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "asa", *words])
        heap.start_again(words)
    assert not started


def test_a_program_that_calls_with_words_of_its_own_does_not(started: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "mine.py"])
    heap.start_again(["train", "plan.json"])
    assert not started


_HELD = """
import sys
import torch
from asa.launch.heap import keep_freed_memory
from torch import nn
torch.set_num_threads(1)
keep_freed_memory()
model, x = nn.Sequential(nn.PReLU(), nn.MaxPool2d(2)), torch.randn(32, 64, 32, 32)
def held():
    return int(next(s for s in open("/proc/self/status") if s.startswith("VmHWM")).split()[1])
before = held()
for _ in range(12):
    model(x).sum().backward()
    for p in model.parameters():
        p.grad = None
print((held() - before) * 1024 / x.nbytes)
"""


@pytest.mark.skipif(not heap._glibc(), reason="a heap of glibc")
def test_steps_take_what_the_step_before_has_left():
    """What a step holds, in inputs of 8 MiB: 3.25 at most at any time, and three to four more in a heap of holes."""

    assert _printed(_HELD, _ALL) < min(8.0, 0.8 * _printed(_HELD, ""))


_FAULTS = """
import resource, threading
import torch
from asa.launch.heap import keep_freed_memory
threading.Thread(target=list).start()
keep_freed_memory()
def faults(blocks):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(blocks):
        torch.ones(25_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def measured():
    faults(3)
    print(faults(4))
thread = threading.Thread(target=measured)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not heap._glibc(), reason="a heap of glibc")
def test_a_thread_reuses_blocks_longer_than_a_heap_of_its_own():
    """Four blocks of 95 MiB have about 98,000 pages."""
    assert _printed(_FAULTS, _ALL) < 1000
    assert _printed(_FAULTS, "") > 50_000


_ALL = ":".join(f"{name}={value}" for name, value in heap.SETTINGS.items())


def _printed(program: str, settings: str) -> float:
    """The number that ``program`` prints, started with ``settings`` of glibc."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240,
        cwd=Path(__file__).parent.parent, env={**os.environ, heap.VARIABLE: settings},
    )  # fmt: skip
    return float(done.stdout)


def test_ranks_let_go_of_the_whole_model_before_they_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = worker.Worker.train

    def first(self: worker.Worker, *args: Any, **options: Any) -> bool:
        held = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        known = [o for o in gc.get_objects() if isinstance(o, torch.nn.Parameter) and not o.is_meta]
        others = [tuple(p.shape) for p in known if p.untyped_storage().data_ptr() not in held]
        (tmp_path / f"{dist.get_rank()}.json").write_text(json.dumps([len(known), others]))
        return usual(self, *args, **options)

    monkeypatch.setattr(worker.Worker, "train", first)
    names = training.COMPONENTS["cnn"]
    plan = training.plan(ranks=2, split=names[1:])
    train(plan, training.settings(tmp_path / "run", epochs=1), strategies=offered(), adapt=adapt)
    for rank in range(2):
        known, others = json.loads((tmp_path / f"{rank}.json").read_text())
        assert known > len(names)
        assert others == []
