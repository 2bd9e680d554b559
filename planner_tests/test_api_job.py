"""``asa.Job``: a user's model, optimizer and loader under any plan, with checkpoints and resume."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import asa
from asa.cli.commands.explain import events
from asa.errors import NoCheckpointError, PreemptedError, UsageError, WorkersFailedError
from asa.ir.consistency import parse
from asa.ir.plan import Plan
from asa.launch import faults, run_ranks
from asa.report.text.story import story
from planner_tests import user_programs as user
from planner_tests.hand_plans import alternating, uniform
from planner_tests.nouns import cluster
from planner_tests.stage_plans import staged
from planner_tests.test_api_loop import in_float64, plan_of

loss_fn = nn.functional.cross_entropy


def reference(epochs: int = 2) -> dict[str, Tensor]:
    net = user.model()
    user.loop(net, user.optimizer(net), user.loader(shuffle=False), epochs)
    return net.state_dict()


def pipeline(**options: Any) -> Plan:
    return in_float64(staged(plan_of(uniform(1, 2)), [1, 1], microbatches=2, **options))


def run(rank: int, plans: list[Plan]) -> list[Any]:
    found = []
    for plan in plans:
        net = user.model()
        job = asa.Job(
            net, user.optimizer(net), user.loader(shuffle=False), loss_fn, plan, validation=user.loader(shuffle=False)
        )
        losses = [job.train_step()]  # the first batch of epoch 0; run goes on from there
        records = job.run(epochs=2)
        found.append((job.state_dict(), losses, [r.train_loss for r in records], records[-1].validation_loss, job.step))
        job.close()
    return found


def test_any_plan_trains_as_one_device_does() -> None:
    plans = [
        pipeline(), pipeline(schedule="gpipe"), in_float64(plan_of(alternating(2))),
        in_float64(replace(plan_of(uniform(2, 1), "zero1"), num_microbatches=2)),
    ]  # fmt: skip
    weights = reference()
    net = user.model()
    first = next(iter(user.loader(shuffle=False)))
    expected = float(loss_fn(net(first[0]), first[1]).detach())
    net.load_state_dict(weights)
    x, y, _ = (torch.cat(parts) for parts in zip(*user.loader(shuffle=False), strict=True))
    for ranks in zip(*run_ranks(2, run, plans, threads=1, timeout_s=120), strict=True):
        for state, losses, _, validation, steps in ranks:
            assert user.distance(state, weights) < 1e-11
            assert losses[0] == pytest.approx(expected, rel=1e-12)
            assert validation == pytest.approx(float(loss_fn(net(x), y).detach()), rel=1e-10)
            assert steps == 8


def interrupted(rank: int, plans: list[Plan], out: Path) -> dict[str, Tensor]:
    """An epoch and a half under one plan, the rest under another."""
    net = user.model()
    job = asa.Job(net, user.optimizer(net), user.loader(), loss_fn, plans[0], out=out)
    job.run(epochs=1)
    job.train_step()
    job.save()
    job.close()
    net = user.model()
    job = asa.Job(net, user.optimizer(net), user.loader(), loss_fn, plans[1], out=out, resume=True)
    assert (job.epoch, job.step) == (1, 5)
    job.run(epochs=2)
    return job.state_dict()


def straight(rank: int, plan: Plan) -> dict[str, Tensor]:
    net = user.model()
    job = asa.Job(net, user.optimizer(net), user.loader(), loss_fn, plan)
    job.run(epochs=2)
    return job.state_dict()


def made(rank: int, plan: Plan, replan: bool) -> None:
    net = user.model()
    asa.Job(net, user.optimizer(net), user.loader(), loss_fn, plan, replan=replan).close()


@pytest.mark.parametrize("replan", [True, False])
def test_a_plan_that_is_handed_in_stays_and_one_rank_says_so(replan: bool, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, made, in_float64(plan_of(uniform(2, 1))), replan, threads=1, timeout_s=120)
    said = [line for line in capfd.readouterr().err.splitlines() if "the plan stays" in line]
    expected = ["asa: the plan stays, whatever steps take (it was handed in; plan='auto' adapts)"]
    assert said == (expected if replan else [])


def first_class(output: Tensor, labels: Tensor) -> Tensor:
    return (output[:, 0] > output[:, 1]).double()


def scored(rank: int, plan: Plan, out: Path) -> list[float]:
    found = []
    for metric in (None, first_class):
        net = user.model()
        kept = out if metric is None else None
        job = asa.Job(
            net, user.optimizer(net), user.loader(shuffle=False), loss_fn, plan, metric=metric, out=kept,
            validation=user.loader(shuffle=False),
        )  # fmt: skip
        found.append(job.run(epochs=2)[-1].validation_accuracy)
        net = user.model()
        net.load_state_dict(job.state_dict())
        x, y, _ = (torch.cat(parts) for parts in zip(*user.loader(shuffle=False), strict=True))
        right = net(x).argmax(1) == y if metric is None else first_class(net(x), y)
        found.append(float(right.double().mean()))
        job.close()
    return found


def test_class_labels_have_an_accuracy_and_a_folder_has_the_log_and_the_result(tmp_path: Path) -> None:
    for number, plan in enumerate((pipeline(), in_float64(plan_of(alternating(2))))):
        out = tmp_path / str(number)
        for accuracy, expected, other, of_other in run_ranks(2, scored, plan, out, threads=1, timeout_s=120):
            assert accuracy == pytest.approx(expected, abs=1e-9)
            assert other == pytest.approx(of_other, abs=1e-9)
        result = json.loads((out / "result.json").read_text())
        assert (result["status"], [e["epoch"] for e in result["epochs"]]) == ("done", [0, 1])
        assert result["epochs"][-1]["validation_accuracy"] == pytest.approx(accuracy)
        told = story(events(out / "log.jsonl"))
        assert [h.kind for h in told.happenings][:: len(told.happenings) - 1] == ["start", "end"]
        assert (out / "plan.json").is_file()


def regressed(rank: int, plan: Plan, out: Path) -> None:
    net = user.model()
    halves = [(x, x.flatten(1)[:, :1]) for x, *_ in user.loader(shuffle=False)]
    job = asa.Job(
        net, user.optimizer(net), halves, lambda o, y: (o[:, :1] - y).square().mean(), plan, out=out, validation=halves
    )
    assert math.isnan(job.run(epochs=1)[0].validation_accuracy)
    job.close()
    job = asa.Job(net, user.optimizer(net), halves, lambda o, y: (o[:, :1] - y).square().mean(), plan, out=out,
                  resume=True, validation=halves, metric=lambda o, y: o.mean())  # fmt: skip
    with pytest.raises(UsageError, match="one figure for each is needed"):
        job.run(epochs=2)
    job.close()


def test_labels_that_are_no_classes_have_no_accuracy_and_a_wrong_metric_is_refused(tmp_path: Path) -> None:
    run_ranks(1, regressed, in_float64(plan_of(uniform(1, 1), width=1)), tmp_path, threads=1, timeout_s=120)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["exit_code"], result["epochs"][0]["validation_accuracy"]) == (2, None)
    assert result["epochs"][0]["validation_loss"] > 0, "the epoch before the resume is in the result"


def test_a_fault_asked_for_comes_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "exception:boom@rank=1,step=2,point=optimizer")
    with pytest.raises(WorkersFailedError, match="rank 1 of 2 failed with RuntimeError: boom"):
        run_ranks(2, straight, in_float64(plan_of(uniform(2, 1))), threads=1, timeout_s=120)


def test_resume_under_another_plan(tmp_path: Path) -> None:
    plans = [pipeline(), in_float64(plan_of(alternating(2)))]
    resumed = run_ranks(2, interrupted, plans, tmp_path / "run", threads=1, timeout_s=120)[0]
    whole = run_ranks(2, straight, plans[0], threads=1, timeout_s=120)[0]
    assert user.distance(resumed, whole) < 1e-11
    assert user.distance(whole, reference()) > 1e-6, "the order is shuffled, anew in every epoch"


@pytest.mark.parametrize(("batch", "drop_last"), [(8, False), (27, False), (14, True)])
def test_asked_to_stop_in_the_last_step_of_an_epoch(tmp_path: Path, batch: int, drop_last: bool) -> None:
    """What is saved there is the end of that epoch: the next one follows, and no sample is seen twice."""
    plan = replace(in_float64(plan_of(uniform(1, 1), width=1)), global_batch=batch)
    steps = 27 // batch if drop_last else -(-27 // batch)

    def job(out: Path, stop_at: int = 0, resume: bool = False) -> asa.Job:
        net = user.model()
        calls = []

        def loss(output: Tensor, labels: Tensor) -> Tensor:
            calls.append(1)
            made._executor.stop.requested = made._executor.stop.requested or len(calls) == stop_at
            return loss_fn(output, labels)

        batches = DataLoader(user.loader(shuffle=False).dataset, batch, drop_last=drop_last)
        made = asa.Job(net, user.optimizer(net), batches, loss, plan, out=out, resume=resume)
        return made

    whole = job(tmp_path / "whole")
    assert [r.epoch for r in whole.epochs(2)] == [0, 1]
    first = job(tmp_path / "run", steps)
    with pytest.raises(PreemptedError, match="saved to"):
        first.run(2)
    assert first.step == steps
    first.close()
    again = job(tmp_path / "run", resume=True)
    assert (again.epoch, again.step) == (1, steps)
    for _ in range(steps):
        again.train_step()
    again.run(2)  # nothing is left to do
    assert again.step == 2 * steps
    assert user.distance(again.state_dict(), whole.state_dict()) < 1e-12


class Counting(torch.optim.Optimizer):
    """Signs of averaged gradients, less and less; what it keeps are not only tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Fails where a part of its state was lost."""
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(step=0, scale=1.0, best=None, average=torch.zeros_like(p))
            state["step"] += 1
            state["scale"] *= 0.9
            assert state["best"] is None
            state["average"].lerp_(p.grad, 0.5)
            p.sub_(state["average"].sign(), alpha=0.01 * state["scale"] / state["step"])


def test_an_optimizer_may_keep_plain_numbers(tmp_path: Path) -> None:
    def job(out: Path, resume: bool = False) -> asa.Job:
        net = user.model()
        plan = in_float64(plan_of(uniform(1, 1), width=1))
        return asa.Job(net, Counting(net.parameters()), user.loader(), loss_fn, plan, out=out, resume=resume)

    whole, first = job(tmp_path / "whole"), job(tmp_path / "run")
    whole.run(2)
    first.run(1)
    state = first.optimizer.state_dict()
    assert state["state"][0].keys() == {"step", "scale", "best", "average"}
    assert (state["state"][0]["step"], state["state"][0]["best"]) == (4, None)
    first.optimizer.load_state_dict(state)
    first.close()
    again = job(tmp_path / "run", resume=True)
    again.run(2)
    assert user.distance(again.state_dict(), whole.state_dict()) < 1e-12
    again.optimizer.state[again.model.parameters()[0]]["odd"] = []
    assert any(entry.get("odd") == [] for entry in again.optimizer.state_dict()["state"].values())
    again.train_step()
    with pytest.raises(UsageError, match="keeps a list as 'odd'"):
        again.save()


def moving(rank: int, plans: list[Plan]) -> Any:
    net = user.model()
    job = asa.Job(net, user.optimizer(net, "adamw"), user.loader(shuffle=False), loss_fn, plans[0])
    job.run(epochs=1)
    for plan in plans[1:]:
        job._executor.migrate(plan)
        job.run(epochs=job.epoch + 1)
    return job.state_dict()


def test_a_job_moves_to_another_plan() -> None:
    plans = [in_float64(plan_of(uniform(2, 1), "zero1")), pipeline(), in_float64(plan_of(alternating(2)))]
    net = user.model()
    user.loop(net, user.optimizer(net, "adamw"), user.loader(shuffle=False), 3)
    state = run_ranks(2, moving, plans, threads=1, timeout_s=120)[0]
    assert user.distance(state, net.state_dict()) < 1e-11


def leaving_out(rank: int, placed: list[tuple[Plan, tuple[int, ...]]]) -> Any:
    """In the middle of an epoch, too: the first move is made behind its second step."""
    net = user.model()
    job = asa.Job(
        net, user.optimizer(net, "adamw"), user.loader(shuffle=False), loss_fn, placed[0][0], log_every=2,
        validation=user.loader(shuffle=False),
    )  # fmt: skip
    executor = job._executor
    left = placed[1:]

    def look(_measured: Any, _step: int) -> None:
        if left:
            executor.migrate(*left.pop(0))

    outcomes = []
    for epoch in range(4):
        before = len(left)
        outcomes.append(executor.run_epoch(epoch, look).validation_loss)
        while left and len(left) == before:  # too short an epoch to be looked at
            executor.migrate(*left.pop(0))
    return job.state_dict(), outcomes, job.plan.num_ranks


def test_a_job_leaves_a_process_out_and_takes_it_back() -> None:
    alone = in_float64(plan_of(uniform(1, 1), width=1))
    placed = [
        (in_float64(plan_of(uniform(2, 1))), (0, 1)), (alone, (1,)),
        (in_float64(plan_of(uniform(2, 1), "zero1")), (1, 0)), (alone, (0,)),
    ]  # fmt: skip
    net = user.model()
    user.loop(net, user.optimizer(net, "adamw"), user.loader(shuffle=False), 4)
    found = run_ranks(2, leaving_out, placed, threads=1, timeout_s=120)
    for state, outcomes, ranks in found:
        assert user.distance(state, net.state_dict()) < 1e-11
        assert outcomes == found[0][1]
        assert ranks == 1


def automatic(rank: int, out: Path) -> Any:
    net = user.model().float()
    job = asa.Job(
        net, user.optimizer(net), user.loader(), lambda o, y: loss_fn(o, y), cluster=cluster(), time_limit_s=0.3,
        cache=None, split=lambda batch: (batch[0].float(), batch[1]), example_input=torch.zeros(2, *user.SHAPE),
    )  # fmt: skip
    first = sum(job.train_step() for _ in range(4))  # an epoch
    for _ in range(16):
        job.train_step()
    last = sum(job.train_step() for _ in range(4))
    return job.plan.num_ranks, first, last, job.epoch


def test_an_automatic_plan(tmp_path: Path) -> None:
    for ranks, first, last, epoch in run_ranks(2, automatic, tmp_path, threads=1, timeout_s=120):
        assert ranks == 2
        assert last < first
        assert epoch == 5


def test_a_folder_that_does_not_fit_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = user.model()
    measured = Mock(side_effect=AssertionError)
    monkeypatch.setattr("asa.api.job.job.agreed_plan", measured)
    monkeypatch.setattr("asa.api.job.job.find_call", measured)
    job = partial(asa.Job, net, user.optimizer(net), user.loader(), loss_fn)
    (tmp_path / "checkpoints" / "step_00000004").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"up to step_00000004; resume=True continues it, or choose another out$"):
        job(out=tmp_path)
    with pytest.raises(NoCheckpointError, match=r"other/checkpoints; leave out resume=True to start anew$"):
        job(out=tmp_path / "other", resume=True)


def test_what_a_job_refuses() -> None:
    net = user.model()
    with pytest.raises(UsageError, match="resume needs out"):
        asa.Job(net, user.optimizer(net), user.loader(), loss_fn, resume=True)
    job = asa.Job(net, user.optimizer(net), user.loader(), loss_fn, in_float64(plan_of(uniform(1, 1), width=1)))
    with pytest.raises(UsageError, match="nothing can be saved"):
        job.save()


def _met(rank: int, names: list[str]) -> list[Any]:
    found = []
    for name in names:
        net = user.model()
        plan = replace(in_float64(plan_of(uniform(2, 1))), consistency=parse(name), strategy=name)
        job = asa.Job(net, torch.optim.SGD(net.parameters(), lr=0.1), user.loader(shuffle=False), loss_fn, plan)
        job.run(epochs=2)
        found.append(job.state_dict())
        job.close()
    return found


def test_meetings_of_every_step_weigh_workers_by_their_samples() -> None:
    """The last batch has 3 samples: 2 of one rank and 1 of the other."""
    net = user.model()
    user.loop(net, torch.optim.SGD(net.parameters(), lr=0.1), user.loader(shuffle=False), 2)
    names = ["local_sgd:period=1", "diloco:period=1:outer_rate=1:outer_momentum=0"]
    for name, state in zip(names, run_ranks(2, _met, names, threads=1, timeout_s=120)[0], strict=True):
        assert user.distance(state, net.state_dict()) < 1e-12, name
