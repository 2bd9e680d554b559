"""Ranks of a running job that are killed and started again: they enter it, and the others never stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from test_consistency_runs import of, under

from asa.errors import WorkersFailedError
from asa.executor.consistency import star
from asa.executor.consistency.channels import CONNECT_S
from asa.executor.consistency.server import Server
from asa.executor.consistency.star import AT_NEED, Coordinator
from asa.executor.running.run import train
from asa.executor.training.snapshots import RowSnapshots, SnapshotFile, files
from asa.ir.consistency import parse
from asa.launch import faults
from asa.scheduler import adapt
from asa.strategies import offered


@pytest.fixture
def away(tmp_path, monkeypatch) -> Path:
    """A file that tells ranks, while it is there, that one of them is away: they rest ten times as long then in every
    step, so that a run goes on until that is back, however busy the machine is. Nobody else is late."""
    usual, file = faults._suffer, tmp_path / "away"

    def suffer(fault: faults.Fault) -> None:
        if fault.kind == "hang":
            time.sleep(1.0 if file.exists() else 0.1)
        else:
            usual(fault)

    monkeypatch.setenv(faults.VARIABLE, "hang@point=backward")
    monkeypatch.setattr(faults, "_suffer", suffer)
    for name in ("star._LATE_S", "star._LATE_TO_MEET_S", "server._SILENT_S"):
        monkeypatch.setattr(f"asa.executor.consistency.{name}", 1e9)
    return file


def note(away: Path, event: dict[str, Any]) -> None:
    """Keep the file by what is said of ranks."""
    if event["event"] == "lost":
        away.touch()
    elif event["event"] == "returned":
        away.unlink(missing_ok=True)


def run_and_kill(
    text: str, ranks: int, victim: int, out: Path, away: Path, times: int = 1, **changes: Any
) -> list[dict[str, Any]]:
    """Events of a run in which ``victim`` gets SIGKILL while samples are handed out, in the first ``times`` epochs."""
    events: list[dict[str, Any]] = []
    killed: set[int] = set()

    def on_event(event: dict[str, Any]) -> None:
        events.append(event)
        note(away, event)
        if event["event"] != "note" or "samples handed out" not in event["message"] or len(killed) >= times:
            return
        epoch = int(event["message"].split(":")[0].split()[1])
        if epoch not in killed:
            killed.add(epoch)
            (process,) = [p for p in multiprocessing.active_children() if p.name == f"asa-rank-{victim}"]
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    settings = training.settings(out, **({"steps_per_epoch": 22, "observe": False} | changes))
    result = train(under(text, ranks), settings, strategies=offered(), adapt=adapt, on_event=on_event)
    assert result["exit_code"] == 0
    assert not any("ranks are started again" in e["message"] for e in of(events, "note"))
    return events


@pytest.mark.parametrize(
    "text",
    [
        "ps_bounded",
        "downpour:period=2",
        "diloco:period=2:quorum=2",
        "local_sgd:quorum=1",
        "hogwild",
    ],
)  # fmt: skip
def test_a_killed_worker_comes_back_and_gets_a_share_again(tmp_path, text, away):
    ranks = 3
    events = run_and_kill(text, ranks, 2, tmp_path / "run", away)
    assert [e["rank"] for e in of(events, "lost")] == [e["rank"] for e in of(events, "returned")] == [2]
    counted = of(events, "consistency")
    assert counted[-1]["live"] == list(range(ranks))
    assert counted[-1]["steps_per_worker"][2] > 0
    assert counted[-1]["samples_lost"] <= 2 * 20  # what it had when it was killed
    assert [e["epoch"] for e in of(events, "epoch")] == [0, 1]
    if "servers" in counted[-1]:
        if text == "ps_bounded":  # the others have no bound
            assert max(map(int, counted[-1]["servers"][0]["ages"])) <= 3
        done = sum(counted[-1]["servers"][0][k] for k in ("samples_applied", "samples_rejected"))
        handed_out = sum(c["samples_handed_out"] for c in counted)
        given = 2  # steps: the killed worker's last one and the one it had asked for ahead
        assert handed_out - 20 * (parse(text).period - 1 + given) <= done <= handed_out


@pytest.mark.parametrize(("text", "victim"), [("ps_bounded:placement=own", 2), ("ps_async:servers=2", 1)])
def test_a_killed_server_alone_is_started_again_from_its_last_snapshot(tmp_path, monkeypatch, text, victim, away):
    # After one that took long, as on a busy machine, the next is the later.
    monkeypatch.setattr(SnapshotFile, "set_interval", lambda *_: None)
    events = run_and_kill(text, 3, victim, tmp_path / "run", away, times=2)
    lost, returned = of(events, "lost"), of(events, "returned")
    assert [e["rank"] for e in lost] == [e["rank"] for e in returned] == [victim] * 2, lost
    back = [e["message"] for e in returned]
    assert all("a server, is back with its last snapshot; the gradients of" in message for message in back)
    last = of(events, "consistency")[-1]
    assert last["live"] == [0, 1, 2]
    servers = {s.get("samples_gone") for s in last["servers"]}
    assert servers - {None}, last
    assert max(servers - {None}) <= 4 * 60  # a few updates, not the epoch
    assert of(events, "epoch")[-1]["validation_accuracy"] > 0.5


def test_a_server_says_how_much_was_lost_with_its_process_and_takes_no_push_twice():
    def server() -> Server:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1, momentum=0.9)
        return Server(parse("ps_async:momentum=0.5"), torch.zeros(4), 0, [(0, 4)], optimizer, range(2), 8)

    class Seldom(RowSnapshots):
        def due(self, step: int) -> bool:
            return step == 3

    (file,) = files(1)
    first = server()
    first.keep_snapshots(Seldom(file, "0" * 16))
    for serial in range(1, 6):  # the snapshot is of the second of them
        first.push(0, torch.ones(4), 4, [0.1], serial=serial)
    seen = first.age
    assert seen == (20, 0)
    kept = RowSnapshots(file, "0" * 16).read()
    assert kept is not None
    second = server()
    second.restore(kept)
    assert second.age == (8, 1)
    second.count_lost_samples(*seen)
    second.count_lost_samples(*second.age)
    assert second.counters()["samples_gone"] == 12
    before = second.pull(1)
    assert torch.equal(second.push(0, torch.ones(4), 4, [0.1], serial=2), before)  # it is in the snapshot
    again = second.push(0, torch.ones(4), 4, [0.1], serial=6)
    alone = server()
    for _ in range(3):
        wanted = alone.push(0, torch.ones(4), 4, [0.1])
    torch.testing.assert_close(again, wanted)  # momentum came back, too
    assert RowSnapshots(file, "1" * 16).read() is None
    os.close(file)


def test_ranks_enter_while_samples_are_handed_out_and_not_at_the_end():
    ranks = Coordinator(3)
    assert ranks.enter(2) is None
    ranks.begin(4, 100, 200, step=7, statistics=torch.ones(2))
    ranks.disconnect(2)
    assert ranks.live == {0, 1}
    entry = ranks.enter(2)
    assert entry is not None
    assert (entry.epoch, entry.position, entry.step, entry.statistics.tolist()) == (4, 100, 7, [1, 1])
    assert ranks.ticket(2, 4, 60, False) == (100, 60)
    assert ranks.ticket(0, 4, 60, False) == (160, 40)
    assert ranks.ticket(0, 4, 60, False)[1] == 0
    ranks.disconnect(2)
    assert ranks.enter(2) is None  # the others are about to meet
    ranks.end()
    with pytest.raises(WorkersFailedError, match="the run is over"):
        ranks.enter(2)


def test_all_samples_count_as_lost_that_a_lost_rank_has_not_trained_on():
    ranks = Coordinator(2)
    ranks.begin(0, 0, 200)
    for ahead in (False, True, True):
        ranks.ticket(1, 0, 30, False, ahead)
    ranks.disconnect(1)
    assert ranks.lost_samples == 60  # it had come back for a third ticket, so the first one is trained on
    ranks.begin(0, 90, 200)
    for ahead in (True, False):
        ranks.ticket(0, 0, 30, False, ahead)
    ranks.disconnect(0)
    assert ranks.lost_samples == 90


@pytest.mark.parametrize("fast_is_lost", [False, True])
def test_a_slow_rank_leaves_the_last_samples_to_ranks_that_are_sooner(monkeypatch, fast_is_lost):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(star, "time", clock)
    ranks = Coordinator(2)
    ranks.begin(0, 0, 70)
    for i, (now, rank) in enumerate([(0.0, 1), (0.0, 0), (1.0, 1), (2.0, 1), (2.0, 0)]):
        clock.now = now
        assert ranks.ticket(rank, 0, 10, False) == (10 * i, 10)
    assert ranks.ticket(0, 0, 10, False, True) == (50, AT_NEED)
    clock.now = 3.0
    assert ranks.ticket(1, 0, 10, False) == (50, 10)
    slow: list[tuple[int, int]] = []
    clock.now = 3.5
    thread = threading.Thread(target=lambda: slow.append(ranks.ticket(0, 0, 10, False)))
    thread.start()
    thread.join(timeout=0.2)
    assert not slow
    clock.now = 4.0
    if fast_is_lost:
        ranks.disconnect(1)
    else:
        assert ranks.ticket(1, 0, 10, False) == (60, 10)
    thread.join(timeout=60)
    assert slow == [(60, 10) if fast_is_lost else (70, 0)]


def test_no_worker_is_late_while_it_may_still_be_connecting_to_a_server_that_came_back(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(star, "time", clock)
    ranks = Coordinator(3)
    ranks.begin(0, 0, 40)
    for rank in (0, 1):
        ranks.ticket(rank, 0, 10, False)
    ranks.disconnect(2)
    clock.now = 5.0
    assert ranks.enter(2) is not None
    clock.now = 6.0
    threads = [threading.Thread(target=ranks.swap, args=(rank, b""), daemon=True) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60
    while set(ranks._messages.get(0, {})) != {0, 2}:
        assert time.monotonic() < until, "they never came"
        time.sleep(0.001)
    clock.now = 6.0 + star._LATE_S + 1
    threads[0].join(0.6)  # it looks for late ranks every quarter of a second
    assert ranks.live == {0, 1, 2}
    clock.now += CONNECT_S
    for thread in threads:
        thread.join(60)
    assert ranks.live == {0, 2}


def test_a_rank_that_is_killed_again_and_again_is_left_out_in_the_end(tmp_path, monkeypatch, away):
    monkeypatch.setattr("asa.launch.returns.MOST_STARTS", 1)
    monkeypatch.setenv(faults.VARIABLE, "kill@rank=1,point=data;hang@point=backward")
    settings = training.settings(tmp_path / "run", steps_per_epoch=10, observe=False, epochs=1)
    events: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "lost":  # it comes back once, and the other rests until it is lost again
            if len(of(events, "lost")) == 1:
                away.touch()
            else:
                away.unlink(missing_ok=True)

    result = train(under("ps_async", 2), settings, strategies=offered(), adapt=adapt, on_event=on_event)
    assert result["exit_code"] == 0
    assert [e["rank"] for e in of(events, "returned")] == [1]
    assert of(events, "consistency")[-1]["live"] == [0]
