"""Mistakes that would have ranks wait for one another: one line at once, or after seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import asa
from asa.api.model import model_interface
from asa.errors import UsageError, WorkersFailedError
from asa.executor.model.votes import Votes
from asa.launch import run_ranks
from planner_tests import user_programs as user
from planner_tests.test_api_loop import CASES, in_float64, plan_of


def one_rank_saves(rank: int, plan: Any, what: str) -> str:
    """What rank 0 hears, which saves on its own; the other is there until it has."""
    model_interface.MEETING_S = 0.5
    net = user.model()
    model, opt, batches = asa.parallelize(net, user.optimizer(net), user.loader(), plan=plan)
    user.loop(model, opt, batches, epochs=1)
    said = ""
    if rank == 0:
        try:
            (model if what == "model" else opt).state_dict()
            said = "saved"
        except WorkersFailedError as error:
            said = str(error)
    dist.barrier()
    return said


@pytest.mark.parametrize(("plan", "what"), [("tensor", "model"), ("zero3", "model"), ("zero1", "optimizer")])
def test_what_all_ranks_must_call_says_who_did_not_come(plan: str, what: str) -> None:
    said = run_ranks(2, one_rank_saves, in_float64(plan_of(*CASES[plan])), what, threads=1, timeout_s=120)[0]
    assert said.startswith(f"every rank must call {what}.state_dict()")
    assert "rank 1 did not come within 0.5 s" in said


def test_one_rank_may_save_what_is_whole() -> None:
    said = run_ranks(2, one_rank_saves, in_float64(plan_of(*CASES["ddp"])), "model", threads=1, timeout_s=120)
    assert said == ["saved", ""]


def late(rank: int) -> str:
    votes, said = Votes(120.0), ""
    dist.barrier()
    if rank < 2:
        try:
            votes.meet("this", within_s=2.0)
            said = "met"
        except WorkersFailedError as error:
            said = f"{error.rank} {error}"
    dist.barrier()
    return said


def test_the_missing_rank_is_named() -> None:
    first, second, _ = run_ranks(3, late, threads=1, timeout_s=120)
    assert first.startswith("2 every rank must call this, and rank 2 did not come within 2 s")
    assert second.startswith("0 every rank must call this, and rank 0, or another that rank 0 names")


def spread_before(_rank: int) -> list[str]:
    found = []
    for path in ("", "inside"):
        net = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        model: nn.Module = nn.Sequential() if path else net
        if path:
            model.add_module(path, net)
        with pytest.raises(UsageError) as refused:
            asa.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.zeros(4, 3), torch.zeros(4))])
        found.append(str(refused.value))
    dist.barrier()
    return found


def test_a_model_that_is_spread_already() -> None:
    whole, part = run_ranks(2, spread_before, threads=1, timeout_s=120)[0]
    assert whole == "the model is in DistributedDataParallel: pass what is inside (model.module); asa distributes it"
    assert part == "inside is in DistributedDataParallel: pass what is inside (inside.module); asa distributes it"


def test_a_process_without_a_launcher_hears_so(tmp_path: Path) -> None:
    net = user.model()
    with pytest.warns(UserWarning, match=r"1 process: nothing is spread; start several with torchrun"):
        asa.parallelize(net, user.optimizer(net), user.loader())
