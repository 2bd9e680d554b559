"""The statistical price: a queue of gradients, workers that seldom meet, and what is read from their curves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asa.cli.commands.staleness import task_of
from asa.errors import InvalidInputError, UsageError
from asa.executor.consistency.server import Server
from asa.executor.training.optimizer import learning_rate
from asa.executor.training.settings import TrainSettings
from asa.ir import codec
from asa.ir.consistency import parse
from asa.ir.staleness import (
    PLAIN,
    Curve,
    Setting,
    Staleness,
    Target,
    TrainingRun,
    parse_target,
    settings_of,
    usual_settings,
)
from asa.profiler.staleness import Task, measured, share_momenta, trained
from asa.report.text import staleness as report
from asa.report.text.tables import plain as text
from asa.zoo.data import fetch
from asa.zoo.data.split import open_split


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def task(optimizer="sgd", *, momentum: float = 0.9, lr: float = 0.05) -> Task:
    draws = torch.Generator().manual_seed(7)
    x = torch.randn(160, 6, generator=draws)
    y = (x @ torch.randn(6, 3, generator=draws)).argmax(1)
    return Task(
        build=built, train=lambda p: (x[p % 120], y[p % 120]), count=120, test=(x[120:], y[120:]),
        loss=nn.functional.cross_entropy, hits=lambda output, labels: (output.argmax(1) == labels).float(),
        optimizer=optimizer, lr=lr,
        momentum=momentum if optimizer == "sgd" else 0.0, weight_decay=1e-3, global_batch=24,
    )  # fmt: skip


def by_hand(t: Task, seed: int, steps: int) -> nn.Module:
    """Plain training, as anybody would write it."""
    model = t.build(seed)
    optimizer = t.optimizer_for(list(model.parameters()))
    for _, rows in zip(range(steps), t.batches(seed), strict=False):
        optimizer.zero_grad()
        inputs, labels = t.train(rows)
        t.loss(model(inputs), labels).backward()
        optimizer.step()
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_without_delay_the_queue_is_plain_training_to_the_last_bit(optimizer):
    t = task(optimizer)
    _, model = trained(t, PLAIN, seed=3, steps=12, every=4)
    assert same(model, by_hand(t, 3, 12))
    _, late = trained(t, Setting(delay=1), seed=3, steps=12, every=4)
    assert not same(late, model)


def scheduled(warmup: float, steps: int) -> Callable[[float, float], float]:
    return lambda progress, step: learning_rate(progress, 1.0, warmup=warmup, step=step)


def test_the_schedule_is_that_of_training_over_the_length_of_a_run():
    steps = 12
    args = SimpleNamespace(device="cpu", data="digits", data_root=None, model="logistic", optimizer="sgd", lr=None,
                           global_batch=64, steps=steps)  # fmt: skip
    of_train = task_of(args, SimpleNamespace(graph=SimpleNamespace(input_shape=(1, 8, 8), num_classes=10))).schedule
    rates = [of_train(i / steps, 1 / steps) for i in range(steps)]
    warmup = TrainSettings(out="").warm_up(steps)
    assert rates == [learning_rate(i / steps, 1.0, warmup=warmup, step=1 / steps) for i in range(steps)]
    assert rates[0] < 1 == max(rates)
    assert rates[-1] < 0.1
    t = replace(task(), schedule=of_train)
    model = t.build(3)
    optimizer = t.optimizer_for(list(model.parameters()))
    for rate, rows in zip(rates, t.batches(3), strict=False):
        optimizer.param_groups[0]["lr"] = t.lr * rate
        for p, gradient in zip(model.parameters(), t.gradients(model, rows), strict=True):
            p.grad = gradient
        optimizer.step()
    assert same(trained(t, PLAIN, seed=3, steps=steps, every=4)[1], model)
    averaged = trained(t, Setting(workers=1, period=1), seed=3, steps=steps, every=4)[1]
    for a, b in zip(averaged.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_shares_of_batches_train_as_at_a_server():
    """Two workers whose gradients are never late, under the schedule of training and the server's lower momentum."""
    steps, workers, discipline = 10, 2, parse("ps_async")
    t = replace(task(), build=_without_norm, weight_decay=0.0, schedule=scheduled(0.3, steps))
    lower = discipline.momentum_at(t.momentum, workers)
    model, copy = t.build(0), t.build(0)
    weights = torch.nn.utils.parameters_to_vector(copy.parameters()).detach()
    optimizer = torch.optim.SGD(copy.parameters(), lr=t.lr, momentum=t.momentum)
    server = Server(discipline, weights, 0, [(0, len(weights))], optimizer, range(workers), t.global_batch)
    for i, rows in zip(range(steps), t.batches(0), strict=False):
        for worker, share in enumerate(rows.tensor_split(workers)):
            torch.nn.utils.vector_to_parameters(server.pull(worker), copy.parameters())
            gradient = torch.cat([g.reshape(-1) for g in t.gradients(copy, share)])
            at = (i + worker / workers) / steps
            server.push(worker, gradient, len(share), [t.lr * t.schedule(at, 1 / workers / steps)])
    model = trained(t, Setting(workers=workers, momentum=lower), seed=0, steps=steps, every=5)[1]
    found = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(found, server.pull(0), rtol=1e-4, atol=1e-6)


def test_a_delayed_gradient_is_the_one_of_so_many_updates_ago():
    """One weight w and the loss w^2 / 2, whose gradient is the weight itself: w' = w - lr * (w two updates ago)."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w.expand(len(x), 1)

    rows = torch.zeros(8, 1, dtype=torch.float64)
    t = Task(
        build=lambda _seed: One(), train=lambda p: (rows[p % 8], rows[p % 8, 0]), count=8, test=(rows, rows[:, 0]),
        loss=lambda output, _labels: (output**2).mean() / 2, hits=lambda output, labels: labels,
        optimizer="sgd", lr=0.25, momentum=0.0, weight_decay=0.0, global_batch=4,
    )  # fmt: skip
    _, model = trained(t, Setting(delay=2), seed=0, steps=5, every=1)
    history = [1.0, 1.0, 1.0]  # at the weights there were when the queue was filled
    for _ in range(5):
        history.append(history[-1] - 0.25 * history[-3])
    assert model.w.item() == history[-1]
    _, weighted = trained(t, Setting(delay=2, weighted=True), seed=0, steps=1, every=1)
    assert weighted.w.item() == 1 - 0.25 / 3
    _, summed = trained(t, Setting(workers=2, pushed=3), seed=0, steps=3, every=1)
    assert summed.w.item() == (1 - 0.25 * 3 / 2) ** 2
    _, late = trained(t, Setting(workers=2, pushed=3, delay=1), seed=0, steps=3, every=1)
    assert late.w.item() == 1 - 2 * 0.25 * 3 / 2


def test_workers_that_meet_after_every_batch_take_the_mean_gradient_where_nothing_is_remembered():
    t = replace(task(momentum=0.0), build=_without_norm)
    _, plain = trained(t, PLAIN, seed=1, steps=6, every=3)
    _, met = trained(t, Setting(workers=4, period=1), seed=1, steps=6, every=3)
    for a, b in zip(plain.parameters(), met.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    _, outer = trained(t, Setting(workers=4, period=3, outer_rate=0.7, outer_momentum=0.9), seed=1, steps=6, every=3)
    assert not same(outer, met)


def test_samples_are_those_of_asa_train():
    """Shifted at random, differently in every pass and for every seed; the test data stay as they are."""
    args = SimpleNamespace(device="cpu", data="digits", data_root=None, model="logistic", optimizer="sgd", lr=None,
                           global_batch=64, steps=20)  # fmt: skip
    t = task_of(args, SimpleNamespace(graph=SimpleNamespace(input_shape=(1, 8, 8), num_classes=10)))
    images = open_split("digits", split="train", root=None, input_shape=(1, 8, 8))
    seen = []
    for seed in (0, 1):
        passes = list(itertools.islice(t.batches(seed), 2 * (t.count // 64)))
        for rows in (passes[0], passes[-1]):
            inputs, labels = t.train(rows)
            assert torch.equal(labels, images.labels[rows % t.count].long())
            number = int(rows[0]) // t.count
            wanted, _ = fetch(images, rows % t.count, train=True, seed=0, epoch=number, device="cpu")
            assert torch.equal(inputs, wanted)
            seen.append(number)
    assert len(set(seen)) == 4


def _without_norm(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def test_workers_also_meet_at_the_end_of_a_pass():
    """As in `asa train`; then their momenta are the same, too."""
    t = task()  # 5 batches a pass
    _, never = trained(t, Setting(workers=2, period=1000), seed=1, steps=4, every=2)
    assert same(never, t.build(1))
    _, once = trained(t, Setting(workers=2, period=1000), seed=1, steps=5, every=5)
    _, same_period = trained(t, Setting(workers=2, period=5), seed=1, steps=5, every=5)
    assert same(once, same_period)
    assert not same(once, t.build(1))
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=0.1, momentum=0.9) for w in weights]
    for i, (w, o) in enumerate(zip(weights, optimizers, strict=True)):
        (w * (2 * i + 1)).sum().backward()
        o.step()
    share_momenta(optimizers)
    for w, o in zip(weights, optimizers, strict=True):
        assert torch.equal(o.state[w]["momentum_buffer"], torch.full((3,), 2.0))


def test_running_statistics_are_averaged():
    _, model = trained(task(), Setting(workers=2, period=2), seed=0, steps=4, every=2)
    assert torch.isfinite(model[1].running_mean).all()
    assert float(model[1].num_batches_tracked) == 4


def test_curves_take_every_seed_in_turn_and_say_what_there_was_no_time_for():
    t = task()
    curves, skipped = measured(t, (PLAIN, Setting(delay=1)), seeds=2, steps=4, every=2, time_limit_s=60)
    assert [[r.seed for r in c.runs] for c in curves] == [[0, 1], [0, 1]]
    assert not skipped
    curves, skipped = measured(t, (PLAIN, Setting(delay=1)), seeds=2, steps=4, every=2, time_limit_s=0)
    assert [c.setting for c in curves] == [PLAIN]
    assert skipped == ("3 of 4 runs: no time left",)


def test_a_run_that_diverges_ends_with_the_look_before():
    run, _ = trained(task(lr=1e30), PLAIN, seed=0, steps=4, every=1)
    assert run.diverged
    assert len(run.losses) < 4


def run(seed: int, *accuracies: float) -> TrainingRun:
    return TrainingRun(seed=seed, losses=tuple(1 - a for a in accuracies), accuracies=accuracies)


def curve(setting: Setting, *runs: tuple[float, ...]) -> Curve:
    return Curve(setting=setting, runs=tuple(run(i, *r) for i, r in enumerate(runs)))


def staleness(*curves: Curve, **changes) -> Staleness:
    made = Staleness(
        model_spec="cnn", model_fingerprint="0123456789abcdef", input_shape=(1, 8, 8), num_classes=10, data="digits",
        optimizer="sgd", learning_rate=0.1, momentum=0.9, weight_decay=5e-4, global_batch=64, workers=4, steps=30,
        every=10, curves=curves, created="2025-01-02T03:04:05+00:00", asa_version="0", torch_version="2",
        device="Test CPU",
    )  # fmt: skip
    return replace(made, **changes)


NINE = Target(what="accuracy", value=0.9)
TOLD = staleness(
    curve(PLAIN, (0.9, 0.95, 0.95), (0.5, 0.9, 0.95)),
    curve(Setting(workers=4, delay=0), (0.9, 0.95, 0.95), (0.9, 0.9, 0.95)),
    curve(Setting(workers=4, delay=4), (0.5, 0.95, 0.95), (0.5, 0.6, 0.95)),
    curve(Setting(workers=4, delay=8), (0.5, 0.6, 0.7), (0.5, 0.6, 0.9)),
    curve(Setting(workers=4, delay=4, weighted=True), (0.5, 0.6, 0.95), (0.5, 0.6, 0.95)),
    curve(Setting(workers=4, period=2), (0.1, 0.2, 0.3), (0.1, 0.2, 0.3)),
)


def test_steps_to_a_target_have_a_median_and_a_range():
    found = TOLD.steps_to(NINE, PLAIN)
    assert (found.median, found.low, found.high, found.reached, found.seeds) == (15, 10, 20, 2, 2)
    assert TOLD.steps_to(Target(what="loss", value=0.1), PLAIN) == found
    assert TOLD.steps_to(NINE, Setting(workers=2)) is None


def test_between_two_ages_steps_are_between_and_beyond_them_unknown():
    medians = [TOLD.at_age(NINE, a).median for a in (0, 0.25, 1)]
    assert medians == [10, 10 + 0.25 * 15, 25]
    assert TOLD.at_age(NINE, 3) is None
    assert TOLD.at_age(NINE, 1, weighted=True).median == 30
    assert TOLD.at_age(NINE, 0, weighted=True).median == 10
    assert TOLD.at_period(NINE, 3) is None
    assert TOLD.at_period(NINE, 2, outer_rate=0.7, outer_momentum=0.9) is None


def test_what_some_seeds_never_reached_has_no_highest_and_what_none_reached_no_median():
    some = TOLD.at_age(NINE, 2)
    assert (some.median, some.low, some.high, some.reached) == (None, 30, None, 1)
    none = TOLD.at_period(NINE, 2)
    assert (none.median, none.low, none.high, none.reached) == (None, None, None, 0)


def test_seeds_that_never_reach_a_target_make_the_middle_later():
    """A mean of those that reach it would call a setting fast of which two of five runs never do."""

    def reaching(setting: Setting, looks: tuple[int | None, ...]) -> Curve:
        runs = [[0.95 if look is not None and i >= look else 0.5 for i in range(10)] for look in looks]
        return Curve(
            setting=setting,
            runs=tuple(TrainingRun(seed=s, losses=(0.5,) * 10, accuracies=tuple(a)) for s, a in enumerate(runs)),
        )

    rare = Setting(workers=4, period=4)
    both = (reaching(PLAIN, (3, 3, 3, 3, 4)), reaching(rare, (0, 0, 5, None, None)))
    known = replace(TOLD, steps=10 * TOLD.every, curves=both)
    plain, seldom = known.steps_to(NINE, PLAIN), known.steps_to(NINE, rare)
    assert plain.median == 4 * TOLD.every
    assert seldom.median == 6 * TOLD.every
    assert (seldom.low, seldom.high, seldom.reached, seldom.seeds) == (TOLD.every, None, 3, 5)


def test_curves_are_a_document_that_refuses_what_makes_no_sense(tmp_path):
    path = tmp_path / "cnn.cpu.fp32.sgd.staleness.json"
    codec.save(TOLD, path)
    assert codec.load(Staleness, path) == TOLD
    data = json.loads(path.read_text())
    for where, value in (
        (("curves", 0, "runs", 0, "accuracies", 0), 1.5),
        (("curves", 0, "runs", 0, "losses", 0), float("nan")),
        (("curves", 0, "setting", "delay"), -1),
        (("workers",), 0),
        (("steps",), 10**9),
        (("learning_rate",), "0.1"),
        (("curves", 0, "runs", 0, "seed"), None),
    ):
        broken = json.loads(json.dumps(data))
        broken.pop("fingerprint")
        at = broken
        for key in where[:-1]:
            at = at[key]
        at[where[-1]] = value
        path.write_text(json.dumps(broken))
        with pytest.raises(InvalidInputError):
            codec.load(Staleness, path)
    twice = {**data, "curves": [data["curves"][0], data["curves"][0]]}
    path.write_text(json.dumps(twice))
    with pytest.raises(InvalidInputError, match="twice"):
        codec.load(Staleness, path)


def test_usual_settings():
    assert len(set(usual_settings(4))) == len(usual_settings(4))
    late = [s.momentum for s in usual_settings(4, 0.9) if s.delay and s.workers > 1]
    assert late == pytest.approx([0.15] * len(late))
    with pytest.raises(UsageError, match="at least 2"):
        usual_settings(1)
    with pytest.raises(ValueError, match="pushed"):
        Setting(workers=2, period=4, pushed=2)


def test_a_discipline_is_read_from_the_curves_that_are_measured_for_it():
    """Also one with other parameters than usual; one that is measured nowhere is refused in a line."""
    names = ("ps_async:momentum=0.5", "ps_bounded", "hogwild", "downpour:period=2", "local_sgd:period=7",
             "diloco:period=9:outer_momentum=0.5")  # fmt: skip
    for d in map(parse, names):
        assert set(settings_of(d, 2, 0.9)) <= set(usual_settings(2, 0.9, [d]))
        curves = tuple(_reached_at(s, 10 + s.delay) for s in settings_of(d, 2, 0.9))
        known = replace(TOLD, every=1, workers=2, momentum=0.9, curves=curves)
        steps, _ = known.under(d, 2, NINE, 0.0)
        assert (steps.low, steps.high) == (10, 10)
        unknown, why = replace(known, curves=(_reached_at(PLAIN, 1),)).under(d, 2, NINE, 0.5)
        assert unknown is None
        assert why.endswith(f"`asa profile {TOLD.model_spec} --staleness --workers 2 --strategies {d}`")
        assert "are of 2 workers" in known.under(d, 3, NINE, 0.0)[1]
    for name in ("fedavg:spread=1.0", "pipedream", "local_sgd:growth=0.2", "diloco:message=int8"):
        with pytest.raises(UsageError, match=f"what {name} does to convergence is not measured"):
            settings_of(parse(name), 2, 0.9)
        assert TOLD.under(parse(name), 4, NINE, 0.0) == (None, "what it does to convergence was not measured")


def _reached_at(setting: Setting, step: int) -> Curve:
    reached = tuple(0.95 if s >= step else 0.1 for s in range(1, 31))
    return Curve(setting=setting, runs=(TrainingRun(seed=0, losses=reached, accuracies=reached),))


def test_targets():
    for wrong in ("accuracy", "accuracy=2", "loss=-1", "speed=3", "loss=nan", "accuracy=1e999"):
        with pytest.raises(ValueError, match=r"target|accuracy is"):
            parse_target(wrong)


def test_the_table_says_what_no_run_reached():
    said = text(report.render(TOLD))
    assert "over 30" in said
    assert "not in 30" in said
