"""Loops in which ranks take different ways: each learns of it at once, and loops in which they do not hear nothing."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import warnings
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.api.steps import in_step
from asa.errors import AsaError, UsageError
from asa.launch import run_ranks
from planner_tests.programs import Program, State, classes, numbers


def _skipped(at: int, what: str) -> Any:
    """A loop in which rank 0 leaves ``what`` out with one batch of three."""

    def loop(net: Any, opt: Any, batches: Any) -> State:
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            left_out = i == at and torch.distributed.get_rank() == 0
            if not left_out or what != "backward":
                F.cross_entropy(net(x), y).backward()
            if not left_out or what != "step":
                opt.step()
        return {}

    return loop


def _by_its_loss(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        for group in opt.param_groups:
            group["lr"] = 0.1 * float(loss)
        opt.step()
    return {}


def _drawn(net: Any, opt: Any, batches: Any) -> State:
    torch.manual_seed(torch.distributed.get_rank())
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
    return {}


def _usual(net: Any, opt: Any, batches: Any) -> State:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    for _ in range(3):
        for i, (x, y) in enumerate(batches):
            loss = F.cross_entropy(net(x), y)
            (loss / 2).backward()
            if i % 2:
                opt.step()
                opt.zero_grad()
        for x, _ in batches:
            with torch.no_grad():
                net(x)
            break
        schedule.step(float(asa.reduce(loss.detach())))
    return {}


def _program(loop: Any) -> Program:
    return Program(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)), x=numbers(18, 5), y=classes(18, 3),
        loop=loop,
    )  # fmt: skip


def _heard(_rank: int, loops: list[Any], plan: Any) -> list[list[str]]:
    found = []
    for loop in loops:
        program = _program(loop)
        with warnings.catch_warnings(record=True) as heard, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            patch.setattr(in_step, "_PATIENCE_S", 0.3)
            program.loop(*asa.parallelize(*program.made(), plan=plan))
        found.append([str(w.message) for w in heard])
    return found


@pytest.mark.parametrize(("plan", "at", "what"), [("ddp", 2, "backward"), ("fsdp", 0, "backward"), ("ddp", 1, "step")])
def test_a_rank_that_leaves_something_out_is_told_at_once(plan: str, at: int, what: str) -> None:
    program = _program(_skipped(at, what))
    with pytest.raises(UsageError, match="a branch of the loop took another way"):
        run_ranks(2, _heard, [program.loop], program.plan(plan), threads=1, timeout_s=120)


def _skipping_under_exact_norms(_rank: int, plan: Any) -> None:
    """Rank 0 leaves out one backward, behind a forward in which norms see the samples of all ranks."""
    program = _normed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_step, "_PATIENCE_S", 0.3)
        net, opt, batches = asa.parallelize(*program.made(), plan=plan, batch_norm="exact")
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            if i == 1 and torch.distributed.get_rank() == 0:
                continue
            loss.backward()
            opt.step()


def _normed() -> Program:
    return Program(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)), x=numbers(36, 5),
        y=classes(36, 3), loop=_usual,
    )  # fmt: skip


def test_a_rank_that_skips_a_batch_under_exact_norms_is_told_at_once() -> None:
    with pytest.raises(UsageError, match="a branch of the loop took another way"):
        run_ranks(2, _skipping_under_exact_norms, _normed().plan("ddp"), threads=1, timeout_s=120)


def _called_again(rows: int) -> Any:
    """A loop in which rank 0 calls the model once more, with the first ``rows`` samples, before one backward."""

    def loop(net: Any, opt: Any, batches: Any) -> State:
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            if i == 1 and torch.distributed.get_rank() == 0:
                net(x[:rows])
            loss.backward()
            opt.step()
        return {}

    return loop


def test_a_rank_that_calls_the_model_more_often_is_told_at_once() -> None:
    program = _program(_called_again(1))
    with pytest.raises(UsageError, match=r"waits in a (backward|call of the model).*took another way"):
        run_ranks(2, _heard, [program.loop], program.plan("ddp"), threads=1, timeout_s=120)


def test_ranks_that_wait_in_different_passes_end_with_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    program = _program(_called_again(3))
    with pytest.raises(AsaError) as ended:
        run_ranks(2, _heard, [program.loop], program.plan("tensor"), threads=1, timeout_s=120)
    assert "took another way" in str(ended.value) + capfd.readouterr().err


def _reads(read: Any) -> Any:
    """A loop in which rank 0 calls ``read`` before one of three forwards."""

    def loop(net: Any, opt: Any, batches: Any) -> State:
        for i, (x, y) in enumerate(batches):
            if i == 1 and torch.distributed.get_rank() == 0:
                read(net, opt)
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
        return {}

    return loop


@pytest.mark.parametrize(
    ("plan", "what", "read"),
    [
        ("tensor", "a read of values", lambda net, _: net[0].weight.norm()),
        ("tensor", "model.state_dict()", lambda net, _: net.state_dict()),
        ("fsdp", "a read of values", lambda net, _: print(net[0].weight.detach().mean().sqrt())),
        ("fsdp", "a read of values", lambda net, _: nn.utils.clip_grad_norm_(net[0].parameters(), 1.0)),
        ("zero1", "optimizer.state_dict()", lambda _, opt: opt.state_dict()),
    ],
)
def test_what_one_rank_alone_reads_of_parts_is_said(
    plan: str, what: str, read: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    program = _program(_reads(read))
    with pytest.raises(AsaError) as ended:
        run_ranks(2, _heard, [program.loop], program.plan(plan), threads=1, timeout_s=120)
    said = str(ended.value) + capfd.readouterr().err
    assert f"rank 0 alone came to {what}" in said
    assert "(test_programs_in_step.py:" in said
    assert "call it on every rank, outside of 'if rank == 0'" in said


def _meets(read: Any, collective: Any) -> Any:
    """A loop in which rank 0 calls ``read`` before one of three forwards, and then ``collective`` as the other does."""

    def loop(net: Any, opt: Any, batches: Any) -> State:
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            if i == 1 and torch.distributed.get_rank() == 0:
                read(net)
            collective()
            opt.step()
        return {}

    return loop


@pytest.mark.parametrize(
    ("plan", "read", "collective"),
    [
        ("tensor", lambda net: net[0].weight.norm(), lambda: torch.distributed.barrier()),
        (
            "fsdp",
            lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
            lambda: torch.distributed.all_reduce(torch.ones(2, dtype=torch.float64)),
        ),
    ],
)
def test_a_read_that_meets_a_collective_of_the_program_is_said(
    plan: str, read: Any, collective: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    program = _program(_meets(read, collective))
    with pytest.raises(AsaError) as ended:
        run_ranks(2, _heard, [program.loop], program.plan(plan), threads=1, timeout_s=120)
    said = str(ended.value) + capfd.readouterr().err
    assert "rank 0 alone came to a read of values that ranks hold in parts (test_programs_in_step.py:" in said
    assert "rank 1 came to torch.distributed." in said


def test_ranks_that_part_are_warned_of_and_others_hear_nothing() -> None:
    loops = [_by_its_loss, _drawn, _usual]
    for by_loss, drawn, usual in run_ranks(2, _heard, loops, _program(_usual).plan("zero1"), threads=1, timeout_s=120):
        assert any("hyperparameters of the optimizer differ" in line for line in by_loss)
        assert any("weights that all ranks hold alike" in line for line in drawn)
        assert not usual


def test_settings_have_one_number_in_processes_that_share_no_memory() -> None:
    """Ranks that a launcher starts do not share the address of None, of which ``hash`` is made before Python 3.12."""
    code = "from asa.api.steps.in_step import number_of; print(number_of((0.1, None, (0.9, None), 'sgd')))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"{in_step.number_of((0.1, None, (0.9, None), 'sgd'))}\n"


def _read_by_a_thread(_rank: int) -> None:
    net = nn.Linear(4, 2)
    model, opt, batches = asa.parallelize(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(24, 4)), 4),
        strategies=("ddp",), cache=None, time_limit_s=0.1, cluster="profiles/cluster.local-gloo-2.json",
    )  # fmt: skip
    ahead: queue.Queue[Any] = queue.Queue(1)

    def read() -> None:
        for batch in batches:
            ahead.put(batch)
        ahead.put(None)

    threading.Thread(target=read).start()
    while (batch := ahead.get()) is not None:
        opt.zero_grad()
        model(*batch).sum().backward()
        opt.step()


def test_a_loader_that_another_thread_reads_ends_the_program_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AsaError) as ended:
        run_ranks(2, _read_by_a_thread, threads=1, timeout_s=120, limit_s=240)
    assert "read by one thread and the model called by another" in str(ended.value) + capfd.readouterr().err


def test_a_position_is_of_one_pass_though_the_loop_goes_on_while_it_is_read() -> None:
    class Waits(in_step.InStep):
        """In a call of the model, its fourth pass."""

        def __init__(self) -> None:
            self.shared, self._since, self._passes = 4, 1.0, deque([(in_step.FORWARD, "")])  # type: ignore[assignment]

        _kind = in_step.FORWARD  # type: ignore[assignment]

    class GoesOn(Waits):
        @property
        def _kind(self) -> str:  # type: ignore[override]
            """That of the backward, which begins now."""
            self.shared, self._since = 5, 2.0
            return in_step.BACKWARD

    assert Waits()._position() == (1.0, (4, in_step.FORWARD, [(in_step.FORWARD, "")]))
    assert GoesOn()._position()[0] is None
