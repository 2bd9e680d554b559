"""What loops need: files of whole tensors, averages, sums over ranks, a check of the loss; and the losses of jobs."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.api.steps.batches import fingerprints
from asa.errors import InvalidInputError, UsageError
from asa.ir import codec
from asa.ir.plan import Plan
from asa.launch import run_ranks
from planner_tests.test_programs_inputs import far
from planner_tests.test_programs_losses import CLASSES, WEIGHTS, WIDTH, contrastive, loader, net, optimizer

STRATEGIES = ["ddp", "fsdp", "tensor"]
OPTIONS: dict[str, Any] = {
    "cache": None, "time_limit_s": 0.1, "cluster": "profiles/cluster.local-gloo-2.json",
    "example_input": torch.zeros(2, WIDTH, dtype=torch.float64),
}  # fmt: skip


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x[:, 0]), y[:, 0].clamp(0))


def averaged(model: Any, opt: Any, batches: Any) -> list[Tensor]:
    average = [p.detach().clone() for p in model.parameters()]
    for x, y in batches:
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()
        with torch.no_grad():
            for a, p in zip(average, model.parameters(), strict=True):
                a.lerp_(p, 0.1)
    return average


def saved(_rank: int, folder: Path) -> Any:
    found = []
    for strategy in STRATEGIES:
        model = net()
        placed, opt, batches = asa.parallelize(model, optimizer(model), loader(), strategies=(strategy,), **OPTIONS)
        average = averaged(placed, opt, batches)
        everything = {"model": placed, "optimizer": opt, "average": average}
        asa.save({**everything, "epoch": 3}, folder / f"{strategy}.pt")
        with torch.no_grad():
            for a in average:
                a.mul_(0)
        state = asa.load(folder / f"{strategy}.pt", everything)
        again = asa.save({"average": average}, folder / f"{strategy}.again.pt")
        assert again is None
        found.append((state["epoch"], placed.plan.strategy, placed.plan.summary()))
        placed.close()
    return found


def test_weights_averages_and_optimizers_are_saved_whole_under_every_plan(tmp_path: Path) -> None:
    model = net()
    opt = optimizer(model)
    average = averaged(model, opt, loader())
    for rank in run_ranks(2, saved, tmp_path, threads=1, timeout_s=120):
        assert [f[:2] for f in rank] == [(3, s) for s in STRATEGIES]
    for strategy in STRATEGIES:
        state = torch.load(tmp_path / f"{strategy}.pt", weights_only=True)
        assert far(state["model"], model.state_dict()) < 1e-12
        again = torch.load(tmp_path / f"{strategy}.again.pt", weights_only=True)
        for mine, theirs, reloaded in zip(average, state["average"], again["average"], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-12, atol=0)
            assert torch.equal(theirs, reloaded), "an average that was loaded is the one that was saved"
        momentum = state["optimizer"]["state"][0]["momentum_buffer"]
        assert torch.allclose(momentum, opt.state_dict()["state"][0]["momentum_buffer"], rtol=1e-10, atol=1e-15)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        asa.load(tmp_path / "none.pt")
    asa.save({"average": [torch.zeros(2)]}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="no 'epoch'"):
        asa.load(tmp_path / "a.pt", {"epoch": torch.zeros(1)})
    with pytest.raises(UsageError, match="shape"):
        asa.load(tmp_path / "a.pt", {"average": [torch.zeros(3)]})


def _small(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, width)
    opt = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    opt.step()
    return model, opt


def test_a_flipped_bit_in_a_tensor_is_told(tmp_path: Path) -> None:
    path, weight = tmp_path / "a.pt", torch.full((64,), 1.5)
    asa.save({"weight": weight}, path)
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 70] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)
    with pytest.raises(InvalidInputError, match=r"is damaged: the checksum of .*data/0"):
        asa.load(path)


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(computed)
    torch.save({"weight": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("a.pt", "old.pt"):
        assert torch.equal(asa.load(tmp_path / name)["weight"], torch.ones(3))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, kind in {"pipe": "a pipe", "zero": "a device", ".": "a directory"}.items():
        with pytest.raises(InvalidInputError, match=kind):
            asa.load(tmp_path / name)


def test_numbers_and_arrays_of_numpy_are_read_again(tmp_path: Path) -> None:
    drawn = np.random.RandomState(1).get_state()
    asa.save({"best": np.float64(0.5), "drawn": drawn, "flags": np.array([True])}, tmp_path / "a.pt")
    state = asa.load(tmp_path / "a.pt")
    assert state["best"] == 0.5
    assert np.array_equal(state["drawn"][1], drawn[1])
    with pytest.raises(UsageError, match="cannot be stored"):
        asa.save({"schedule": lambda i: i}, tmp_path / "a.pt")
    asa.save({"options": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    with pytest.raises(InvalidInputError, match=r"argparse\.Namespace.*weights_only=False"):
        asa.load(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("model", "opt", "words"),
    [
        (3, None, r"the file\['model'\] cannot be loaded into Linear"),
        (_small(5)[0].state_dict(), None, "size mismatch"),
        (None, [1], r"the file\['optimizer'\] cannot be loaded into Adam"),
        (None, {}, "KeyError"),
        (None, torch.optim.SGD(_small()[0].parameters(), 0.1).state_dict(), "another optimizer than Adam.*'betas'"),
        (None, _small(5)[1].state_dict(), r"another model: 'exp_avg' has the shape \[5, 3\]"),
    ],
)
def test_the_state_of_another_is_one_line(tmp_path: Path, model: Any, opt: Any, words: str) -> None:
    net, own = _small()
    state = {
        "model": net.state_dict() if model is None else model,
        "optimizer": own.state_dict() if opt is None else opt,
    }
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=words) as told:
        asa.load(tmp_path / "a.pt", {"model": net, "optimizer": own})
    assert "\n" not in str(told.value)


def loaded(rank: int, folder: Path) -> str:
    model = net()
    placed, *_ = asa.parallelize(model, optimizer(model), loader(), strategies=("ddp",), **OPTIONS)
    try:
        asa.load(folder / f"{rank}.pt", {"model": placed})
    except InvalidInputError as error:
        return str(error)
    finally:
        placed.close()
    return ""


@pytest.mark.parametrize(("other", "words"), [(1.0, "not the same file on all ranks"), (None, "No such file")])
def test_ranks_that_read_different_files_are_told(tmp_path: Path, other: float | None, words: str) -> None:
    for rank, factor in enumerate((2.0, other)):
        if factor is not None:
            state = {k: v * factor for k, v in net().state_dict().items()}
            torch.save({"model": state}, tmp_path / f"{rank}.pt")
    for told in run_ranks(2, loaded, tmp_path, threads=1, timeout_s=120):
        assert words in told


def looked_at(_rank: int) -> Any:
    model = net()
    placed, _, batches = asa.parallelize(model, optimizer(model), loader(), strategies=("ddp",), **OPTIONS)
    found = []
    for x, y in batches:  # the last has six samples
        found = [
            str(asa.check(partial(loss_of, placed, x, y))),
            str(asa.check(lambda x=x: contrastive(placed(x[:, 0])))),
            float(asa.reduce(loss_of(placed, x, y).detach())), int(asa.reduce(torch.tensor(len(x)), "sum")),
            asa.gather(y), placed.missing if hasattr(placed, "missing") else "none",
        ]  # fmt: skip
    placed.close()
    return found


def test_a_loss_is_checked_and_numbers_are_those_of_the_batch() -> None:
    x, y = list(loader())[-1]
    model = net()
    for exact, other, mean, count, labels, missing in run_ranks(2, looked_at, threads=1, timeout_s=120):
        assert "is that of one device" in exact
        assert "not a mean over samples" in other
        assert "%" in other
        assert mean == pytest.approx(float(loss_of(model, x, y).detach()), rel=1e-12)
        assert count == len(x)
        assert torch.equal(labels, y)
        assert missing == "none"


def weighed(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels[:, 0].clamp(0), weight=WEIGHTS)


def ignoring(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels[:, 0])


def summed(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels[:, 0], reduction="sum") / 30


def masked(output: Tensor, labels: Tensor) -> Tensor:
    kept = (labels[:, 0] >= 0).double()
    each = F.cross_entropy(output, labels[:, 0], reduction="none")
    return (each * kept).sum() / kept.sum()


def kept(labels: Tensor) -> Tensor:
    return (labels[:, 0] >= 0).sum()


JOBS: dict[str, tuple[Any, Any]] = {
    "class weights": (weighed, None), "ignored": (ignoring, None), "a sum": (summed, "sum"), "a mask": (masked, kept),
}  # fmt: skip


def first_token(batch: Any) -> Any:
    return batch[0][:, 0], batch[1]


def job(_rank: int, names: list[str], weights: bool, strategies: list[str], cache: Path) -> Any:
    found = []
    for name in names:
        for strategy in strategies:
            model = net()
            loss, weight = JOBS[name]
            made = asa.Job(
                model, optimizer(model), loader(), loss, strategies=(strategy,), replan=False, split=first_token,
                weight=weight if weights else None, **OPTIONS | {"cache": cache},
            )  # fmt: skip
            try:
                for batch in loader():
                    made.train_step(batch)
                found.append(made.state_dict())
            except UsageError as error:
                found.append(str(error))
            made.close()
    return found


def test_jobs_know_denominators_over_ranks_and_microbatches(tmp_path: Path) -> None:
    strategies = ["ddp", "gpipe"]
    for rank in run_ranks(2, job, list(JOBS), True, strategies, tmp_path, threads=1, timeout_s=120):
        for i, name in enumerate(JOBS):
            model = net()
            opt = optimizer(model)
            for x, y in loader():
                opt.zero_grad()
                JOBS[name][0](model(x[:, 0]), y).backward()
                opt.step()
            for state, strategy in zip(rank[2 * i : 2 * i + 2], strategies, strict=True):
                assert far(state, model.state_dict()) < 1e-11, (name, strategy)


def test_jobs_refuse_other_losses_before_the_first_step(tmp_path: Path) -> None:
    for rank in run_ranks(2, job, ["a sum", "a mask"], False, ["ddp"], tmp_path, threads=1, timeout_s=120):
        for said in rank:
            assert "not a mean over samples" in said
            assert "weight=" in said


def test_a_plan_in_one_line_and_in_a_file(tmp_path: Path) -> None:
    from planner_tests.hand_plans import hand_plan, uniform

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    plan = hand_plan(model, 2, uniform(2, 1), input_shape=(4,), num_classes=CLASSES)
    assert str(plan) == plan.summary()
    assert "\n" not in plan.summary()
    assert "2 ranks" in plan.summary()
    assert ">replicate x 2</td>" in plan._repr_html_()
    assert codec.load(Plan, plan.save(tmp_path / "mine" / "plan.json")) == plan


def test_a_checksum_of_one_element_out_of_a_column() -> None:
    column = torch.arange(12).view(6, 2)[:, 1][:1]
    assert fingerprints(column) == fingerprints(torch.ones(1, dtype=torch.int64))
