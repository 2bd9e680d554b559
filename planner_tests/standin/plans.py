"""Plans of the zoo's small network for the stand-in's GPUs, and training by them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any


def settings(out: Path, **changes: Any) -> Any:
    from planner_tests import training

    return training.settings(out, **({"epochs": 1, "steps_per_epoch": 2, "timeout_s": 60.0} | changes))


def trained(out: Path, plan: Any, **changes: Any) -> dict[str, Any]:
    from asa.executor.running.run import train
    from asa.scheduler import adapt
    from asa.strategies import offered

    hooks = {k: changes.pop(k) for k in ("relieve", "regroup") if k in changes}
    result = train(plan, settings(out, **changes), strategies=offered(), adapt=adapt, **hooks)
    assert result["exit_code"] == 0, result
    return result


def small_plan(**changes: Any) -> Any:
    from planner_tests import training

    training.fingerprint_of = _fingerprint_of
    return training.plan(**({"batch": 16} | changes))


def _traced(model: str) -> str:
    import torch

    from asa.tracing import trace
    from asa.zoo.models import build

    built = build(model, num_classes=10, input_shape=(1, 8, 8))
    return trace(built, torch.zeros(2, 1, 8, 8), name=model).model_fingerprint


@cache
def _fingerprint_of(model: str) -> str:
    """What tracing the model gives, from a process of its own: autograd's threads for the devices survive no fork."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(here, _traced(model).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(there, 100).decode()


def on_gpu(plan: Any) -> Any:
    return replace(plan, device_type="cuda")


def pipeline(schedule: str = "1f1b") -> Any:
    from asa.ir.plan import DataDegree, Stage

    plan = small_plan(ranks=2, microbatches=2)
    alone = DataDegree(strategy="replicate", degree=1)
    components = tuple(replace(c, stage=int(i >= 2), data=alone) for i, c in enumerate(plan.components))
    return replace(plan, components=components, stages=(Stage(ranks=(0,)), Stage(ranks=(1,))), schedule=schedule)


def with_state(plan: Any, strategy: str) -> Any:
    """``plan`` with its components' state kept by the ranks together."""
    from asa.ir.plan import DataDegree

    return replace(
        plan,
        components=tuple(replace(c, data=DataDegree(strategy=strategy, degree=c.data.degree)) for c in plan.components),
    )


def same_losses(folder: Path, plan: Any, close: float = 1e-4, **changes: Any) -> None:
    """``plan`` trained on GPUs and on cores: every epoch's loss."""
    gpu = trained(folder / "gpu", on_gpu(plan), **changes)
    cpu = trained(folder / "cpu", plan, **changes)
    for ours, theirs in zip(gpu["epochs"], cpu["epochs"], strict=True):
        assert abs(ours["train_loss"] - theirs["train_loss"]) <= close, (ours, theirs)


def seal(folder: Path, card: str = "Stand-In GPU") -> None:
    """A prediction of the stand-in's own two GPUs, written down before."""
    from asa.ir.sealed import FIRST, Claim
    from benchmarks.make_sealed import sealed

    claim = Claim(
        machine="stand-in-2", device_name=card, num_devices=2, num_nodes=1, strategy="ddp",
        plan=on_gpu(small_plan(ranks=2)), place=1, among=1,
    )  # fmt: skip
    folder.mkdir()
    line = sealed(claim, revision=1, written="2025-01-01T00:00:00+00:00", asa_version="0", previous=FIRST)
    (folder / "stand-in-2.jsonl").write_text(line)
