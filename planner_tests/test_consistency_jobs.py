"""``asa.Job`` under disciplines that continue without lost ranks: a rank that is killed or late enters again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import training
from started import Program, rank_of, together
from test_consistency_runs import of, under

from asa.executor.consistency.star import Coordinator
from asa.executor.running.run import train
from asa.launch import faults
from asa.scheduler import adapt
from asa.strategies import offered

RANKS, LIMIT_S = 3, 300.0
PROGRAM = """
import os, sys, torch, asa
from asa.executor.consistency import server, star
from torch import nn
from asa.errors import PreemptedError
from torch.utils.data import DataLoader, TensorDataset

star._LATE_S = star._LATE_TO_MEET_S = server._SILENT_S = 1e9  # a busy machine makes nobody late: one is killed
out, discipline, indexed, cache = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
images = torch.randn(96, 8)
data = TensorDataset(images, images[:, :4].argmax(dim=1))
loader = DataLoader(data, 24, shuffle=indexed == "yes")
if indexed == "no":
    loader = [batch for batch in loader]
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
job = asa.Job(
    net, optimizer, loader, nn.functional.cross_entropy, strategies=(discipline,), out=out, cache=cache, timeout_s=240,
    scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), time_limit_s=1,
    on_event=lambda e: e["event"] in ("lost", "returned") and print(e["event"], e["rank"], flush=True),
)
try:
    for record in job.epochs(100_000):
        print("epoch", record.epoch, f"{record.learning_rate:.12g}", record.train_loss, flush=True)
except PreemptedError:
    print("saved", flush=True)
"""


def waited(condition: Callable[[], bool], running: list[Program]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, "nothing came"
        assert running[0].poll() is None, running[0].err.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("discipline", "indexed"),
    [("hogwild", "yes"), ("diloco:period=2:quorum=2", "no")],
)  # fmt: skip
def test_a_killed_process_of_a_job_that_is_started_again_enters_at_the_next_epoch(tmp_path, discipline, indexed):
    program, once = tmp_path / "program.py", tmp_path / "once"
    program.write_text(PROGRAM)
    faulty = f"kill@rank=2,point=backward,once={once};hang:0.05@point=backward"  # who takes which step is chance
    around = {**os.environ, **together(RANKS), faults.VARIABLE: faulty}
    argv = (str(tmp_path / "run"), discipline, indexed, str(tmp_path / "cache"))

    def said(by: Program) -> list[list[str]]:
        text = by.out.read_text()
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    running = [rank_of(program, rank, *argv, env=around) for rank in range(RANKS)]
    try:
        waited(lambda: ["lost", "2"] in said(running[0]), running)
        assert running[2].wait() == -signal.SIGKILL
        running[2] = rank_of(program, 2, *argv, env=around, name="again")
        waited(lambda: len([line for line in said(running[2]) if line[0] == "epoch"]) >= 2, running)
        running[0].signal(signal.SIGTERM)
        assert [rank.wait(timeout=240) for rank in running] == [0, 0, 0], running[2].err.read_text()
    finally:
        for rank in running:
            rank.signal(signal.SIGKILL)
            rank.wait()
    assert ["returned", "2"] in said(running[0])
    ours = {line[1]: line[2:] for line in said(running[0]) if line[0] == "epoch"}
    again = {line[1]: line[2:] for line in said(running[2]) if line[0] == "epoch"}
    assert len(again) >= 2
    assert all(ours[epoch] == found for epoch, found in again.items()), "rates and losses, as on rank 0"
    assert all(said(rank)[-1] == ["saved"] for rank in running)
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_a_rank_that_was_only_late_enters_again_in_its_own_process(tmp_path, monkeypatch):
    """It is late until the others have noticed, and they rest in every step until it is back."""
    usual_suffer, usual_lose = faults._suffer, Coordinator._lose
    noticed, back, once = (tmp_path / name for name in ("noticed", "back", "once"))
    lost_before: list[int] = []

    def suffer(fault: faults.Fault) -> None:
        if fault.kind != "hang":
            usual_suffer(fault)
        elif fault.once is None:
            time.sleep(0.1 if back.exists() or not noticed.exists() else 1.0)
        else:
            while not noticed.exists():
                time.sleep(0.01)

    def lose(self: Coordinator, rank: int, reason: str) -> None:
        late = reason != "is gone"
        if not late or (rank == 2 and not lost_before):  # a busy machine may make others late, and that one again
            lost_before.extend([rank] * late)
            usual_lose(self, rank, reason)

    def on_event(event: dict[str, Any]) -> None:
        events.append(event)
        for kind, file in (("lost", noticed), ("returned", back)):
            if event["event"] == kind:
                file.touch()

    monkeypatch.setattr("asa.launch.returns.MOST_STARTS", 0)  # it is not started again
    monkeypatch.setattr("asa.executor.consistency.star._LATE_STEPS", 0.5)
    monkeypatch.setattr("asa.executor.consistency.star._LATE_S", 0.5)
    monkeypatch.setattr("asa.executor.consistency.server._SILENT_S", 0.5)
    monkeypatch.setattr(Coordinator, "_lose", lose)
    monkeypatch.setattr(faults, "_suffer", suffer)
    monkeypatch.setenv(faults.VARIABLE, f"hang@rank=2,point=backward,once={once};hang@point=backward")
    settings = training.settings(tmp_path / "run", steps_per_epoch=10, observe=False, epochs=6)
    events: list[dict[str, Any]] = []
    result = train(under("ps_bounded", 3), settings, strategies=offered(), adapt=adapt, on_event=on_event)
    assert result["exit_code"] == 0
    assert [event["rank"] for event in of(events, "lost")] == [2]
    assert [event["rank"] for event in of(events, "returned")] == [2]
    assert of(events, "consistency")[-1]["live"] == [0, 1, 2]


def test_ranks_that_wait_are_admitted_at_the_start_of_an_epoch() -> None:
    import torch

    ranks = Coordinator(3)
    ranks.disconnect(2)
    assert ranks.enter(2) is None
    assert ranks.waiting
    ranks.admit(5, 70, torch.ones(1))
    assert not ranks.waiting
    assert ranks.live == {0, 1, 2}
    assert ranks.returned_since() == [2]
    entry = ranks.enter(2)  # it had to ask again
    assert entry is not None
    assert (entry.epoch, entry.step) == (5, 70)
    assert ranks.returned_since() == []
    ranks.disconnect(2)
    assert ranks.enter(2) is None
    ranks.disconnect(2)
    assert not ranks.waiting


def test_a_rank_that_enters_is_not_waited_for_in_a_round_that_is_over() -> None:
    import torch

    ranks, received = Coordinator(3), list[Any]()
    ranks.disconnect(2)
    assert ranks.enter(2) is None
    slow = threading.Thread(target=lambda: received.append(ranks.swap(1, b"one")), daemon=True)
    slow.start()
    while 1 not in ranks._messages.get(0, {}):
        time.sleep(0.001)
    with ranks._changed:  # rank 1 does not wake before rank 2 has entered
        assert ranks.swap(0, b"zero") == [b"zero", b"one", None]
        ranks.admit(1, 10, torch.ones(1))
    slow.join(timeout=60)
    assert received == [[b"zero", b"one", None]]
