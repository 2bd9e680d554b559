"""Checkpoints that were written on a GPU and are read on the CPU, and the other way round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training

from asa.executor.running import outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.scheduler import adapt
from asa.strategies import offered

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FLAT = {"warmup": 0.0, "schedule": "constant"}
"""The same learning rate at a step, however long the run is."""


def _ran(out: Path, device: str, *, epochs: int, resume: bool) -> dict[str, Any]:
    plan = replace(training.plan(batch=16), device_type=device)
    settings = training.settings(out, epochs=epochs, steps_per_epoch=2, resume=resume, timeout_s=120.0, **FLAT)
    result = train(plan, settings, strategies=offered(), adapt=adapt)
    assert result["exit_code"] == 0, result
    return result


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_goes_on_on_the_other_kind_of_device(tmp_path: Path, first: str, then: str) -> None:
    _ran(tmp_path / "whole", then, epochs=2, resume=False)
    _ran(tmp_path / "parts", first, epochs=1, resume=False)
    _ran(tmp_path / "parts", then, epochs=2, resume=True)
    ours, theirs = (
        checkpoint.read(checkpoint.find(tmp_path / where / outdir.CHECKPOINTS).path, checkpoint.MODEL)
        for where in ("parts", "whole")
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
