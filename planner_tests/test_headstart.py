"""A model made beside the imports is the one that ranks would make, and only the ranks keep it."""

from __future__ import annotations

import gc
import pickle
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import training

from asa.executor.running import member, outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.ir.plan import Plan
from asa.scheduler import adapt
from asa.strategies import offered
from asa.zoo.models import build
from asa.zoo.preload import ModelPreload


def _ahead(spec: str, seed: int = 3) -> ModelPreload:
    with ModelPreload(spec, num_classes=10, input_shape=(1, 8, 8), seed=seed) as made:
        pass
    return made


def _generators() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_it_is_the_model_of_that_seed_and_nothing_else_moves() -> None:
    before, threads = _generators(), torch.get_num_threads()
    made = _ahead("cnn").take()
    assert made is not None
    assert made.training
    own = build("cnn", num_classes=10, input_shape=(1, 8, 8), seed=3).state_dict()
    assert made.state_dict().keys() == own.keys()
    assert all(torch.equal(t, own[n]) for n, t in made.state_dict().items())
    assert _generators() == before
    assert torch.get_num_threads() == threads
    assert gc.isenabled()


def test_what_was_planned_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr("asa.zoo.models.refusal", lambda model, shape: tried.append(model) or "")
    with ModelPreload("squeezenet1_1", num_classes=10, input_shape=(3, 32, 32), seed=3) as ahead:
        pass
    made = ahead.take()
    assert made is not None
    assert not tried
    own = build("squeezenet1_1", num_classes=10, input_shape=(3, 32, 32), seed=3).state_dict()
    assert len(tried) == 1
    assert all(torch.equal(t, own[n]) for n, t in made.state_dict().items())


def test_it_is_given_once_and_never_sent() -> None:
    made = _ahead("cnn")
    assert pickle.loads(pickle.dumps(made)).take() is None
    assert made.take() is not None
    assert made.take() is None


@pytest.mark.parametrize("spec", ["no_such_model", "package_of.others:factory"])
def test_what_cannot_be_made_here_is_left_to_the_ranks(spec: str) -> None:
    assert _ahead(spec).take() is None


def _trained(out: Path, plan: Plan, model: ModelPreload | None) -> dict[str, torch.Tensor]:
    train(plan, training.settings(out, epochs=1, seed=3), strategies=offered(), adapt=adapt, model=model)
    found = checkpoint.find(out / outdir.CHECKPOINTS)
    return checkpoint.read(found.path, checkpoint.MODEL)


def test_ranks_train_it_and_the_launcher_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = training.plan(ranks=2)
    wanted = _trained(tmp_path / "own", plan, None)
    made = _ahead("cnn")
    held = made.take()
    assert held is not None
    made._model = held
    left = weakref.ref(held)
    del held

    def none_is_made(*_: object, **__: object) -> None:
        raise AssertionError("a rank made a model of its own")

    monkeypatch.setattr(member, "build", none_is_made)
    found = _trained(tmp_path / "given", plan, made)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(t, wanted[n]) for n, t in found.items())
    assert left() is None


_COMPILER_LATER = """
import os, sys, torch
from asa.zoo.preload import compiler_later

def without():
    with compiler_later():
        import torchvision
    early = "torch._dynamo" in sys.modules
    answers = [sys.modules["torchvision.ops.roi_align"].is_compile_supported(x) for x in ("cpu", "meta")]
    from torch._dynamo.utils import is_compile_supported as real
    assert not early and answers == [real(x) for x in ("cpu", "meta")]

def at_once():
    with compiler_later():
        stand_in = sys.modules["torch._dynamo.utils"]
        from torch._dynamo.utils import counters
        import torchvision
    real = sys.modules["torch._dynamo.utils"]
    assert real is not stand_in and real.counters is counters and torch._dynamo.utils is real

for check in (without, at_once):  # each in a process that has imported torch and no more
    child = os.fork()
    if not child:
        check()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, check.__name__
"""


def test_torchvision_comes_without_the_compiler_and_who_wants_it_gets_it_at_once() -> None:
    found = subprocess.run([sys.executable, "-c", _COMPILER_LATER], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_a_model_that_cannot_be_built_is_left_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def build(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", told.append)
    monkeypatch.setattr("asa.zoo.models.build", build)
    assert _ahead("cnn").take() is None
    assert not told
