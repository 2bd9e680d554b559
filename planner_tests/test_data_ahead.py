"""Batches gathered ahead are the same batches; running out of memory is said in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import training

from asa.errors import WorkersFailedError
from asa.executor.running import exhausted, outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint, worker
from asa.executor.training.prefetch import Prefetcher
from asa.ir.shortage import asked, is_exhaustion
from asa.scheduler import adapt
from asa.strategies import offered
from asa.zoo.data import fetch, open_split


def test_what_was_expected_is_there_and_what_was_not_is_fetched_as_ever() -> None:
    images = open_split("digits", split="train", root=None)
    wanted, other = torch.tensor([5, 900, 17]), torch.tensor([1, 2])
    feed = Prefetcher(images, pin=False)
    feed.expect(wanted)
    assert feed.take(other) is None
    gathered = feed.take(wanted)
    assert gathered is not None
    assert torch.equal(gathered[0], images.images[wanted])
    assert feed.take(wanted) is None, "once"
    options: dict[str, Any] = {"train": True, "seed": 3, "epoch": 1, "device": "cpu"}
    for plain, ready in zip(
        fetch(images, wanted, **options), fetch(images, wanted, gathered=gathered, **options), strict=True
    ):
        assert torch.equal(plain, ready)
    feed.expect(wanted)
    feed.expect(other)
    assert feed.take(wanted) is not None, "this step's"
    feed.expect(wanted)
    feed.expect(wanted + 1)
    assert feed.take(other) is None, "forgotten"
    assert feed.take(wanted) is not None
    assert Prefetcher.of(images, torch.device("cpu")) is None


def test_a_run_fed_ahead_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def run(out: Path) -> dict[str, torch.Tensor]:
        train(training.plan(), training.settings(out, epochs=1), strategies=offered(), adapt=_told)
        return checkpoint.read(checkpoint.find(out / outdir.CHECKPOINTS).path, checkpoint.MODEL)

    def _told(executor: Any, epochs: range, announce: Any) -> Any:
        yield from adapt(executor, epochs, announce)
        for found in taken:
            announce({"event": "note", "message": f"taken {found}"})

    plain = run(tmp_path / "plain")
    usual = Prefetcher.take

    def take(self: Prefetcher, indices: torch.Tensor) -> Any:
        found = usual(self, indices)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Prefetcher, "of", staticmethod(lambda images, _device: Prefetcher(images, pin=False)))
    monkeypatch.setattr(Prefetcher, "take", take)
    fed = run(tmp_path / "fed")
    assert all(torch.equal(fed[n], plain[n]) for n in plain)
    log = (tmp_path / "fed" / "log.jsonl").read_text()
    assert (log.count("taken True"), log.count("taken False")) == (5, 1), "all but the first were there"


def test_running_out_of_memory_names_the_rank_the_promise_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = worker.played

    def hungry(model: Any, samples: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 4 and model.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return usual(model, samples, step, *args, **kwargs)

    monkeypatch.setattr(worker, "played", hungry)
    settings = training.settings(tmp_path, steps_per_epoch=3)
    with pytest.raises(WorkersFailedError, match=r"rank 1 ran out of memory in step 4: the plan promised 1024 GiB"):
        train(training.plan(ranks=2), settings, strategies=offered(), adapt=adapt)
    monkeypatch.setattr(worker, "played", usual)
    assert checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest.step == 3
    result = train(
        training.plan(ranks=2), dataclasses.replace(settings, resume=True), strategies=offered(), adapt=adapt
    )
    assert [e["epoch"] for e in result["epochs"]] == [0, 1]


def test_only_memory_is_called_memory() -> None:
    assert is_exhaustion(MemoryError())
    assert is_exhaustion(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"))
    assert is_exhaustion(OSError(12, "Cannot allocate memory"))
    assert is_exhaustion(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_exhaustion(RuntimeError("shapes differ"))
    assert not is_exhaustion(OSError(28, "No space left on device"))
    assert asked(RuntimeError("you tried to allocate 8388608 bytes. Error code 12")) == 2**23
    assert asked(RuntimeError("Tried to allocate 1.50 GiB.")) == 3 * 2**29
    assert asked(MemoryError()) == 0
    with (
        pytest.raises(RuntimeError, match="shapes differ"),
        exhausted.explained(exhausted.MemoryWatch(0, torch.device("cpu")), lambda: (training.plan(), 1)),
    ):
        raise RuntimeError("shapes differ")
