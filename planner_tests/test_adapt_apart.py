"""A search for another plan goes on beside training: ranks train on meanwhile, and its steps say nothing of them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import nouns
import pytest
from tables import some
from test_adapt_laws import BEGINS, PROFILE, WINDOW, _back, _first, _kinds, _lines, _model, _silent, _slowness, _world

from asa.cli.replanning import solve_again
from asa.errors import InfeasibleError, UnavailableError
from asa.interfaces.executor import Placement
from asa.ir.cluster import Cluster
from asa.ir.measurements import Measurements
from asa.scheduler import Loop, Model, Policy, adapt, background
from asa.scheduler.background import BackgroundSearch
from asa.scheduler.model import Answer, Question, Solve, same
from asa.strategies import offered
from benchmarks.simulated_world import World

_TAKES = 4
"""Looks that a search lasts."""


class _Beside:
    """A search that is over after so many looks."""

    def __init__(self, answer: Answer | Exception, log: list[_Beside]) -> None:
        self.answer, self.looks, self.stopped = answer, 0, False
        log.append(self)

    @property
    def goes_on(self) -> bool:
        return self.looks < _TAKES and not self.stopped

    def result(self) -> Answer | None:
        self.looks += 1
        if self.goes_on:
            return None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def stop(self) -> None:
        self.stopped = True


class _Taken(World):
    """While a search goes on, rank 0 seems to take three times as long, and others have its core."""

    searches: list[_Beside]

    def _measured(self, steps: int) -> Measurements:
        found = super()._measured(steps)
        if not any(s.goes_on for s in self.searches):
            return found
        first, *rest = found.per_rank
        first = dataclasses.replace(first, own_s=3 * found.step_time.median, mean_own_s=None, stolen_share=0.7)
        step = dataclasses.replace(
            found.step_time, **dict.fromkeys(("median", "p10", "p90"), 4 * found.step_time.median)
        )
        return dataclasses.replace(found, per_rank=(first, *rest), step_time=step, mean_step_s=None)


def _beside(
    error: Exception | None = None, *, by: float = 4.0, **options: Any
) -> tuple[_Taken, list[_Beside], list[dict[str, Any]], Model]:
    plain, searches, events = _model(2), list[_Beside](), list[dict[str, Any]]()

    def background(question: Question) -> _Beside:
        return _Beside(error or plain.answer(question), searches)

    world = _world(2, _slowness(2, rank=1, by=by), kind=_Taken, **options)
    world.searches = searches
    return world, searches, events, dataclasses.replace(plain, background=background)


def test_ranks_train_on_while_another_plan_is_looked_for_and_what_that_takes_is_not_blamed_on_them() -> None:
    world, searches, events, model = _beside()
    list(adapt(world, range(8), events.append, model=model, policy=Policy(rebuild_s=0.2)))
    assert all(s.looks == _TAKES for s in searches)
    assert not any("rank 0" in line for line in _lines(events))
    assert _kinds(events) == ["switch", "outcome", "switch", "outcome"]
    (step, _, target), _ = world.moves
    assert BEGINS + _TAKES * WINDOW <= step <= BEGINS + (_TAKES + 3) * WINDOW
    assert target.processes == (0,)
    assert _back(world)


@pytest.mark.parametrize(("mild", "window"), some(product([4, 6, 8], [1, 2]), [(4, 1), (6, 2), (8, 1)]))
def test_a_change_is_judged_by_steps_that_were_as_disturbed_as_those_after_it(mild: int, window: int) -> None:
    """A rank is a little slow for ``mild`` steps, then much, and is named at once: the next steps are of the search."""
    world, _, events, model = _beside(by=3.0, window=window)
    machine, slight = world._machine, model.corrected(_slowness(2, rank=1, by=1.3), range(2))
    world._machine = lambda step: slight if BEGINS - mild <= step < BEGINS else machine(step)
    list(adapt(world, range(8), events.append, model=model, policy=Policy(rebuild_s=0.2)))
    assert [e for e in events if e.get("kind") == "rollback"] == []
    assert world.moves[0][0] <= BEGINS + 3 * WINDOW
    for outcome in (e for e in events if e.get("kind") == "outcome"):
        assert outcome["measured_gain"] == pytest.approx(outcome["predicted_gain"], abs=0.02)
    assert len(world.moves) == 2
    assert _back(world)


def test_a_search_beside_training_that_breaks_keeps_the_plan() -> None:
    world, searches, events, model = _beside(UnavailableError("the search broke (exit status -9)"))
    list(adapt(world, range(3), events.append, model=model, policy=Policy(rebuild_s=0.2)))
    assert searches
    assert world.moves == []
    assert "no other plan: the search broke (exit status -9)" in [e["why"] for e in events if e["event"] == "replan"]


@pytest.mark.parametrize(("window", "ends"), [(WINDOW, 130), (2, 75)])
def test_a_disturbance_that_ends_while_a_plan_is_looked_for_changes_nothing(window: int, ends: int) -> None:
    world, searches, events, model = _beside(window=window, ends=ends)
    list(adapt(world, range(8), events.append, model=model, policy=Policy(rebuild_s=0.0)))
    assert searches
    assert world.moves == []
    assert [line for line in _lines(events) if "no longer" in line], "it is over"


def test_an_answer_that_cannot_be_read_keeps_the_plan() -> None:
    world, searches, events, model = _beside(ValueError("a fault"))
    list(adapt(world, range(3), events.append, model=model, policy=Policy(rebuild_s=0.2)))
    assert (len(searches) > 0, world.moves) == (True, [])
    broke = "no other plan: the search broke with ValueError: a fault"
    assert broke in [e["why"] for e in events if e["event"] == "replan"]


def test_a_search_that_was_stopped_is_made_again_if_the_run_goes_on() -> None:
    world, searches, events, model = _beside()
    loop = Loop(world, events.append, model, Policy(rebuild_s=0.2))
    epochs = iter(range(8))
    while not searches:
        epoch = next(epochs)
        list(loop.run(range(epoch, epoch + 1)))
    assert [s.stopped for s in searches] == [True], "it was not over when the epoch was"
    list(loop.run(range(next(epochs), 8)))
    assert _kinds(events)[0] == "switch"


def test_a_run_that_ends_ends_its_search() -> None:
    world, searches, events, model = _beside()
    epochs = adapt(world, range(8), events.append, model=model, policy=Policy(rebuild_s=0.2))
    while not searches:
        next(epochs)
    epochs.close()  # type: ignore[attr-defined]
    assert [s.stopped for s in searches] == [True]


def _searching(cluster: Cluster, solve: Solve = solve_again) -> Model:
    return Model(profile=PROFILE, cluster=cluster, strategies=offered(), solve=solve)


def _asked(cluster: Cluster) -> tuple[BackgroundSearch, Question]:
    now, truth = Placement(plan=_first(2), processes=(0, 1)), _slowness(2, rank=1, by=4.0)
    question = Question(
        current=now, known=(), measured=_silent(_world(2, truth)), slowness=truth, deviations=((0.01, 0.02), (0.05,)),
        draws=5, seed=3,
    )  # fmt: skip
    return BackgroundSearch(_searching(cluster), question), question


def _answer(search: BackgroundSearch) -> Answer:
    while (found := search.result()) is None:
        time.sleep(0.02)
    return found


def test_another_process_finds_what_this_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither is out of time, as a busy machine may have it."""
    usual, patient = background._program, f"import {background.__name__} as b\nb.SOLVE_S = 60.0\nmain()"
    monkeypatch.setattr(background, "SOLVE_S", 60.0)
    monkeypatch.setattr(background, "_program", lambda cores: usual(cores).removesuffix("main()") + patient)
    search, question = _asked(nouns.cluster(2))
    here, there = _searching(nouns.cluster(2)).answer(question), _answer(search)
    for answer in (here, there):  # the current plan and those found, each once
        assert [sum(same(p, q) for q in answer.placements) for p in (question.current, *answer.found)] == [1] * 3
    assert all(same(a, b) for a, b in zip(here.placements, there.placements, strict=True))
    assert there.draws == here.draws
    assert len(set(there.draws)) == 5


def test_the_process_that_searches_needs_no_torch() -> None:
    code = (
        "import sys\nimport asa.cli.replanning, asa.api.plans.requests\n"
        "import asa.scheduler.background, asa.scheduler.memory\n"
        "from asa.strategies import offered\noffered()\nassert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


_NOTES_PRIORITY = """
import os, sys
class Noting:
    def find_spec(name, *_):
        if name == "numpy":
            with open({path!r}, "w") as file:
                file.write(str(os.nice(0)))
sys.meta_path.insert(0, Noting)
"""


def test_a_search_gives_way_to_ranks_before_it_loads_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, file = background._program, tmp_path / "priority"
    noting = _NOTES_PRIORITY.format(path=str(file))
    monkeypatch.setattr(background, "_program", lambda cores: f"{noting}\n{usual(cores)}")
    _answer(_asked(nouns.cluster(2))[0])
    assert int(file.read_text()) > os.nice(0)


def test_a_search_that_goes_on_has_no_answer_and_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_program", lambda _: "import time\ntime.sleep(600)")
    search, _ = _asked(nouns.cluster(2))
    assert search.result() is None
    search.stop()
    assert search._process.returncode is not None


def test_what_comes_to_grief_there_is_said_here() -> None:
    cluster = nouns.cluster(2)
    small = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes=1 << 10))
    search, _ = _asked(small)
    with pytest.raises(InfeasibleError):
        _answer(search)
    killed, _ = _asked(cluster)
    killed._process.kill()
    with pytest.raises(UnavailableError, match="the search broke"):
        _answer(killed)
