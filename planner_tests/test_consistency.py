"""Disciplines of consistency that promise what data parallelism does keep that promise; the others are told apart."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import training
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import asa
from asa.api.plans.planned import _widened
from asa.errors import UsageError, WorkersFailedError
from asa.executor.consistency import star
from asa.executor.consistency.diloco import OuterSteps
from asa.executor.consistency.federated import FederatedAverage, clients
from asa.executor.consistency.flat_parameters import FlatParameters, dequantised, quantised, slices
from asa.executor.consistency.local_sgd import LocalSteps
from asa.executor.consistency.parameter_servers import Served, _options
from asa.executor.consistency.quorum import AveragingRounds
from asa.executor.consistency.server import Server, lower_momentum
from asa.executor.measuring import equivalence
from asa.executor.measuring.equivalence import on_one_device
from asa.executor.measuring.model_copies import ModelCopies
from asa.executor.training.optimizer import build_optimizer, doubt_about
from asa.ir import codec
from asa.ir.consistency import NAMES, PARAMETERS, parse
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.strategies import offered
from asa.zoo.models import build

EXACT = (
    "ps_sync", "ps_sync:servers=2", "ps_bounded:window=0:max_age=0", "local_sgd:period=1",
    "diloco:period=1:outer_rate=1:outer_momentum=0",
)  # fmt: skip
OTHERS = ("local_sgd:period=3", "diloco:period=2:fragments=2:message=int8", "ps_async", "downpour:period=2")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A worker that a busy machine keeps from its core is not given up as silent."""
    monkeypatch.setattr("asa.executor.consistency.server._SILENT_S", 1e9)


def _ends(work: Callable[[], object]) -> bool:
    """Whether ``work`` comes to its end, though nobody is given up as silent."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def _until(condition: Callable[[], bool]) -> None:
    """Wait for other threads to come so far."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.001)


def under(text: str, ranks: int = 2, model: str = "logistic", **changes: object) -> Plan:
    return replace(training.plan(model, ranks=ranks, batch=24), consistency=parse(text), strategy=text, **changes)


def _weights(rank: int, plans: list[Plan]) -> list[dict[str, torch.Tensor]]:
    def make() -> torch.nn.Module:
        return build("logistic", num_classes=10, input_shape=(1, 8, 8), seed=0)

    found = [
        equivalence._run(
            p, ModelCopies(p, make), offered(), rank, torch.device("cpu"), samples=16, dtype=torch.float64, steps=4
        ).weights
        for p in plans
    ]
    return found if rank == 0 else []


def test_disciplines_that_promise_data_parallelism_keep_it_and_the_others_do_not():
    plain = training.plan("logistic", ranks=2, batch=24)  # of which steps have fewer, as an epoch's last one may
    names = [*EXACT, *OTHERS]
    ddp, *found = run_ranks(2, _weights, [plain, *map(under, names)], threads=1, timeout_s=120)[0]
    by = dict(zip(names, found, strict=True))
    for name in EXACT:
        assert parse(name).exact("sgd")
        for key, weights in by[name].items():
            torch.testing.assert_close(weights, ddp[key], rtol=1e-12, atol=1e-14, msg=f"{name}: {key}")
    for name in OTHERS:
        assert not parse(name).exact("sgd")
        assert any((w - ddp[k]).abs().max() > 1e-6 for k, w in by[name].items()), name
    assert all(torch.equal(w, by["ps_sync"][k]) for k, w in by["ps_bounded:window=0:max_age=0"].items())


def test_a_round_has_as_many_steps_as_the_rate_of_its_first_one_says_and_the_fewest_while_the_rate_rises():
    worker = object.__new__(LocalSteps)
    worker.discipline = parse("local_sgd:growth=0.2")
    worker.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    periods = []
    for rate in (0.001, 0.05, 0.1, 0.1, 0.05, 0.02):
        worker.optimizer.param_groups[0]["lr"] = rate
        periods.append(worker.round_steps(1))
    assert periods == [4, 4, 4, 4, 16, 100]
    worker.optimizer.param_groups[0]["lr"] = 0.001
    assert worker.round_steps(2) == 100, "the rates of later steps change nothing"


def test_a_window_of_none_is_a_window_that_makes_nobody_wait():
    unlimited = parse("ps_bounded:window=none")
    assert (unlimited.window, unlimited.max_age) == (None, None)
    assert parse(str(unlimited)) == unlimited


def _local_sgd_of_torch(rank: int, plan: Plan) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights after four steps of ``plan`` by asa, and by torch's own optimizer of local SGD."""
    found, samples, steps = _weights(rank, [plan]), 16, 4
    assert plan.consistency is not None
    model = build("logistic", num_classes=10, input_shape=(1, 8, 8), seed=0).double()
    inner = build_optimizer(plan.optimizer, list(model.parameters()), lr=equivalence.LEARNING_RATE[plan.optimizer])
    period = plan.consistency.period  # torch's first average is after the step behind the warm-up
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=period, warmup_steps=period - 1))
    for step in range(steps):
        x, y = equivalence._batch(plan, samples, step, torch.float64)
        optimizer.zero_grad()
        F.cross_entropy(model(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
        optimizer.step()
    return (found[0] if rank == 0 else {}), dict(model.state_dict())


def test_local_sgd_trains_as_the_optimizer_that_torch_has_for_it():
    ours, of_torch = run_ranks(2, _local_sgd_of_torch, under("local_sgd:period=2"), threads=1, timeout_s=120)[0]
    assert set(ours) == set(of_torch)
    for name, weights in of_torch.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-12, atol=1e-14, msg=name)


def _overlapped(rank: int, plan: Plan) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights after four steps of ``plan``, whose period is 3, by asa and by hand: both workers' changes of three steps
    are averaged during ``overlap`` steps, and those of the steps since at the end."""
    found, samples, workers = _weights(rank, [plan]), 16, 2
    d = plan.consistency
    assert d is not None
    models = [build("logistic", num_classes=10, input_shape=(1, 8, 8), seed=0).double() for _ in range(workers)]
    rate = equivalence.LEARNING_RATE[plan.optimizer]
    inner = [build_optimizer(plan.optimizer, list(m.parameters()), lr=rate) for m in models]
    outer = torch.nn.Parameter(parameters_to_vector(models[0].parameters()).detach().clone())
    outer_steps = torch.optim.SGD([outer], lr=d.outer_rate, momentum=d.outer_momentum, nesterov=d.outer_momentum > 0)
    sent = [outer.detach().clone()] * workers

    def send() -> None:
        sent[:] = [parameters_to_vector(m.parameters()).detach().clone() for m in models]

    def receive() -> None:
        outer.grad = torch.stack([outer.detach() - s for s in sent]).mean(0)
        outer_steps.step()
        for model, then in zip(models, sent, strict=True):
            now = parameters_to_vector(model.parameters()).detach()
            vector_to_parameters(outer.detach() + (now - then), model.parameters())

    for step in range(4):
        x, y = equivalence._batch(plan, samples, step, torch.float64)
        for worker, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            F.cross_entropy(model(x.chunk(workers)[worker]), y.chunk(workers)[worker]).backward()
            optimizer.step()
        if step == 2:
            send()
        if step == 2 + d.overlap:
            receive()
    send()
    receive()
    return (found[0] if rank == 0 else {}), dict(models[0].state_dict())


@pytest.mark.parametrize(
    "text", ["diloco:period=3:overlap=1", "diloco:period=3:overlap=1:outer_momentum=0", "diloco:period=3"]
)
def test_steps_that_overlap_with_an_average_are_added_to_its_result(text):
    ours, by_hand = run_ranks(2, _overlapped, under(text), threads=1, timeout_s=120)[0]
    assert set(ours) == set(by_hand)
    for name, weights in by_hand.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-12, atol=1e-14, msg=name)


def _served(text: str, workers: int = 3, *, momentum: float = 0.0, batch: int = 12) -> Server:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1, momentum=momentum)
    return Server(parse(text), torch.zeros(4), 0, [(0, 4)], optimizer, range(workers), batch)


@pytest.mark.parametrize("window", [0, 1, 3])
def test_no_gradient_is_older_than_the_window(window):
    server, steps, workers = _served(f"ps_bounded:window={window}:max_age=none"), 40, 3

    def work(worker: int) -> None:
        pauses = random.Random(worker)
        for _ in range(steps):
            time.sleep(pauses.random() * (0.004 if worker == 0 else 0.001))
            server.push(worker, torch.ones(4), 4, [0.1])
        server.finish(worker)

    threads = [threading.Thread(target=work, args=(w,)) for w in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    counts = server.counts
    assert counts.applied == 4 * steps * workers
    assert max(counts.ages) <= window
    assert window or counts.most_ahead == 0
    assert sum(counts.ages.values()) == steps * workers


def test_a_push_moves_weights_by_its_share_and_less_the_older_it_is():
    server = _served("ps_bounded:window=9:max_age=3")
    server.pull(0)
    for _ in range(2):  # two workers push a global batch and a third of it
        server.push(1, torch.ones(4), 4, [0.3])
        server.push(2, torch.ones(4), 4, [0.3])
    before = server.pull(1)
    torch.testing.assert_close(before, torch.full((4,), -0.4))  # four times a third of 0.3
    after = server.push(0, torch.ones(4), 4, [0.3])
    assert server.counts.ages == {0: 4, 1: 1}
    torch.testing.assert_close(after - before, torch.full((4,), -0.05))


def test_a_gradient_older_than_the_limit_is_rejected_and_counted():
    server = _served("ps_bounded:window=9:max_age=0")
    server.pull(0)
    for _ in range(2):
        server.push(1, torch.ones(4), 4, [0.3])
        server.push(2, torch.ones(4), 4, [0.3])
    before = server.pull(1)
    assert torch.equal(server.push(0, torch.ones(4), 4, [0.3]), before)
    assert (server.counts.rejected, server.counts.applied) == (4, 16)


def test_a_lost_worker_is_not_waited_for():
    server = _served("ps_sync", workers=2)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(server.push(0, torch.ones(4), 6, [0.1])))
    thread.start()
    thread.join(0.2)
    assert not found
    server.remove(1)
    thread.join(60)
    assert found


def test_a_worker_that_is_through_with_an_epoch_is_not_waited_for():
    server = _served("ps_bounded:window=1", workers=2, batch=4)
    server.finish(1)
    assert _ends(lambda: [server.push(0, torch.ones(4), 4, [0.1]) for _ in range(4)])
    assert server.counts.ages == {0: 4}


def test_a_worker_that_waits_for_all_others_holds_up_none_of_them():
    server = _served("ps_bounded:window=1", workers=2, batch=4)
    server.pull(1)
    server.pause(1)
    assert _ends(lambda: [server.push(0, torch.ones(4), 4, [0.1]) for _ in range(4)])
    server.pull(1)  # after the meeting
    server.finish(0)
    server.push(1, torch.ones(4), 4, [0.1])
    assert server.counts.ages == {0: 5}


def test_a_quorum_meets_without_the_others_and_takes_in_who_is_late():
    rounds = AveragingRounds(parse("diloco:quorum=1:grace_s=0:outer_rate=1:outer_momentum=0"), torch.zeros(2), [0, 1])
    assert torch.equal(rounds.contribute(0, torch.ones(2)), -torch.ones(2))
    assert rounds.absences == 1
    assert torch.equal(rounds.contribute(1, torch.full((2,), 3.0)), torch.full((2,), -4.0))
    rounds.contribute_last(0, torch.zeros(2))
    rounds.contribute_last(1, torch.full((2,), 2.0))
    rounds.restart([0, 1])
    assert torch.equal(rounds.weights.detach(), torch.full((2,), -5.0))
    rounds.remove(1)
    assert torch.equal(rounds.contribute(0, torch.ones(2)), torch.full((2,), -6.0))


def test_a_mean_over_a_quorum_is_weighted_by_samples():
    rounds = AveragingRounds(parse("local_sgd:quorum=2:grace_s=0"), torch.zeros(1), [0, 1])
    rounds.contribute_last(0, torch.ones(1), 3)
    assert torch.equal(rounds.contribute(1, torch.full((1,), 5.0), 1), torch.tensor([-2.0]))


def test_no_rank_is_late_as_long_as_the_first_one_is_not_there_either(monkeypatch):
    for name in ("_LATE_TO_MEET_S", "_LATE_S", "_LATE_STEPS"):
        monkeypatch.setattr(star, name, 0.0)
    ranks, found = star.Coordinator(3), list[object]()
    ranks.begin(0, 0, 8)
    ranks.ticket(1, 0, 4, False)
    threads = [threading.Thread(target=lambda r=r: found.append(ranks.swap(r, b"a")), daemon=True) for r in (2, 1, 0)]
    threads[0].start()
    _until(lambda: 2 in ranks._messages.get(0, {}))
    threads[0].join(0.6)  # it looks for late ranks every quarter of a second
    assert ranks.live == {0, 1, 2}
    threads[1].start()
    _until(lambda: 1 in ranks._messages.get(0, {}))  # from here on only the first one is missing
    threads[2].start()
    for thread in threads:
        thread.join(60)
    assert found == [[b"a"] * 3] * 3


def test_a_rank_that_hangs_between_two_meetings_is_left_out_and_said(monkeypatch):
    ranks = star.Coordinator(2)
    found: list[object] = []
    threads = [threading.Thread(target=lambda r=r: found.append(ranks.swap(r, b"a"))) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[b"a", b"a"]] * 2
    monkeypatch.setattr(star, "_LATE_TO_MEET_S", 0.05)
    monkeypatch.setattr(star, "_LATE_STEPS", 0.0)
    assert ranks.swap(0, b"b") == [b"b", None]
    assert [rank for rank, _ in ranks.lost_since()] == [1]
    assert ranks.lost_since() == []
    assert ranks.swap(1, b"b") is None


def test_servers_hold_slices_of_one_size_with_their_part_of_every_group():
    assert [b - a for a, b in slices(10, 3)] == [3, 3, 4]
    heads, tails = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([{"params": [heads]}, {"params": [tails], "weight_decay": 0.5}], lr=1.0, momentum=0.9)
    flat = torch.arange(4.0)
    server = Server(parse("ps_sync"), flat, 2, [(0, 3), (3, 7)], optimizer, [0], 1)
    assert server.parts == [(0, 1), (1, 4)]
    found = server.push(0, torch.ones(4), 1, [1.0, 0.1])
    torch.testing.assert_close(found, torch.tensor([-1.0, 1 - 0.15, 2 - 0.2, 3 - 0.25]))


def test_int8_messages_are_within_half_a_scale():
    moved = torch.randn(50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 50)
    numbers, scales = quantised(moved, [10, 0, 40])
    assert numbers.dtype == torch.int8
    again = dequantised(numbers, scales, [10, 0, 40])
    assert (again - moved)[:10].abs().max() <= scales[0] / 2 * 1.001
    assert (again - moved)[10:].abs().max() <= scales[2] / 2 * 1.001


def test_asynchrony_brings_momentum_and_a_window_of_zero_does_not():
    assert _served("ps_async", momentum=0.9).optimizer.param_groups[0]["momentum"] == pytest.approx(0.9 - 2 / 3)
    assert _served("ps_sync", momentum=0.9).optimizer.param_groups[0]["momentum"] == 0.9
    assert _served("ps_bounded:window=0:max_age=0", momentum=0.9).optimizer.param_groups[0]["momentum"] == 0.9
    assert _served("ps_async:momentum=0.5", momentum=0.9).optimizer.param_groups[0]["momentum"] == 0.5


def test_a_rate_makes_up_for_less_momentum_but_never_above_the_peak_of_its_schedule():
    raised = lower_momentum({"momentum": 0.9, "lr": 0.01, "initial_lr": 0.1}, parse("ps_async"), 10)
    assert [raised.of(rate) for rate in (0.1, 0.05, 0.001, 0.3)] == pytest.approx([0.1, 0.1, 0.01, 0.3])
    assert lower_momentum({"lr": 0.1}, parse("ps_async"), 10).of(0.05) == 0.05
    assert lower_momentum({"momentum": 0.9, "lr": 0.1}, parse("ps_sync"), 10).of(0.05) == 0.05


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ps_bounded:window=-1", "window is -1; it must be at least 0"),
        ("ps_sync:servers=0", "servers is 0; it must be at least 1"),
        ("local_sgd:period=0", "period is 0; it must be at least 1"),
        ("diloco:period=1000000000000", "period is 1000000000000; it must be at most 1000000"),
        ("local_sgd:growth=nan", "growth is nan"),
        ("local_sgd:servers=1", "it has period, growth"),
        ("diloco:outer_momentum=1", "it must be below 1"),
        ("ps_bounded:window=0:momentum=0.5", "no gradient is late"),
        ("diloco:message=fp8", "message is one of fp32, int8"),
        ("diloco:period=10:fragments=3", "a multiple of the fragments"),
        ("diloco:period=10:fragments=2:overlap=5", "overlap is 5; it must be less than the 5 steps from one average"),
        ("diloco:period=10:overlap=-1", "overlap is -1; it must be at least 0"),
        ("diloco:period=10:overlap=2:quorum=2", "overlap is 2; leave out quorum"),
        ("fedavg:overlap=1", "is not a parameter of fedavg"),
        ("ps_async:window=3", "not a parameter of ps_async"),
        ("ps_async:servers", "'servers' is not a parameter of ps_async with a value"),
        ("fedavg:fraction=2", "at most 1"),
        ("fedavg:fraction=0.5:quorum=2", "leave out fraction and spread, or quorum"),
        ("diloco:period=ten", "period is a whole number, not 'ten'"),
        ("diloco:period=4:period=8", "twice"),
    ],
)
def test_figures_that_make_no_sense_are_refused_in_one_line(text, said):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_servers_than_ranks_are_refused_with_the_most_there_can_be():
    with pytest.raises(UsageError, match="ask for servers=4 or more ranks"):
        parse("ps_sync:servers=5").workers(4)
    with pytest.raises(UsageError, match="ask for servers=3 or more ranks"):
        parse("ps_sync:servers=4:placement=own").workers(4)
    with pytest.raises(UsageError, match="the number of ranks is 1; ask for placement=beside or more ranks"):
        parse("ps_async:placement=own").workers(1)
    assert parse("ps_sync:servers=1:placement=own").server_ranks(4) == (3,)
    assert parse("ps_sync:servers=2").server_ranks(4) == (0, 1)


def test_a_fraction_that_is_no_whole_number_of_clients_is_said():
    said = {}
    for text in ("fedavg", "fedavg:fraction=0.5", "fedavg:fraction=0.1"):
        axis = SimpleNamespace(size=2, index=0, group=None)
        model = SimpleNamespace(components=[], grouped=SimpleNamespace(axis=axis))
        said[text] = FederatedAverage(parse(text), model, SimpleNamespace(param_groups=[])).notes()
    assert said.pop("fedavg:fraction=0.1") == [
        "fedavg: 1 of 2 clients take part in each round; a fraction of 0.1 is no whole number of them"
    ]
    assert not any(said.values())


@pytest.mark.parametrize("text", ["ps_sync:placement=own", "local_sgd:groups=2"])
def test_a_job_leaves_a_plan_as_it_is_whose_servers_or_groups_take_all_ranks(text):
    plan = under(text, 1, gpus=2)
    assert plan.num_processes == 2
    assert _widened(plan, 2) is plan


@pytest.mark.parametrize("name", NAMES)
def test_a_discipline_is_written_as_it_is_read(name):
    assert str(parse(name)) == name
    for key, value in PARAMETERS[name].items():
        if isinstance(value, int | float) and key != "fragments" and key != "spread" and key != "fraction":
            text = f"{name}:{key}={value + 1 if isinstance(value, int) else value / 2}"
            if parse(text) != parse(name):
                assert str(parse(text)) == text
    plan = under(name)
    assert codec.loads(Plan, codec.dumps(plan), source="a test") == plan
    assert on_one_device(plan).consistency is None


def test_the_quadratic_rule_lengthens_periods_as_the_rate_falls():
    periods = [parse("local_sgd:period=2:growth=0.1").period_at(rate) for rate in (1.0, 0.05, 0.025, 0.01)]
    assert periods == [2, 4, 16, 100]


def test_a_worker_of_half_the_speed_holds_up_synchronous_steps_and_no_bounded_ones():
    """While it computes, three others take nearly four steps each where they may, and else wait in their first."""

    def pushed(server: Server, workers: list[int]) -> Callable[[], None]:
        return lambda: [server.push(w, torch.ones(4), 3, [0.1]) for w in workers]  # type: ignore[return-value]

    bounded = _served("ps_bounded:window=3", workers=4)
    assert _ends(pushed(bounded, [1, 2, 3] * 3 + [1, 2]))
    assert bounded.counts.applied == 3 * 11
    together = _served("ps_sync", workers=4)
    threads = [threading.Thread(target=pushed(together, [w]), daemon=True) for w in (1, 2, 3)]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert all(thread.is_alive() for thread in threads)
    assert _ends(pushed(together, [0]))
    for thread in threads:
        thread.join(60)
    assert together.counts.applied == 4 * 3


def test_frozen_weights_stay_where_they_are_and_any_memory_format_is_put_back():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)
    net[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.2}], lr=0.1)
    flat = FlatParameters(optimizer)
    assert [b - a for a, b in flat.groups] == [3 * 4 * 9, 4 * 2 + 2]
    frozen, wanted = net[0].bias.clone(), torch.arange(float(flat.total))
    for start, stop in slices(flat.total, 3):
        flat.put(wanted[start:stop], start)
    assert torch.equal(flat.weights(), wanted)
    assert torch.equal(net[0].bias, frozen)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_what_a_server_cannot_follow_is_refused_in_one_line():
    words = torch.nn.Embedding(5, 2, sparse=True)
    words(torch.tensor([1])).sum().backward()
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(
        UsageError, match="has sparse gradients, but servers update all their weights; use sparse=False"
    ):
        FlatParameters(optimizer).gradients()
    worker = object.__new__(Served)
    worker.discipline, worker.optimizer, worker._flat = parse("ps_sync"), optimizer, FlatParameters(optimizer)
    worker._options = _options(optimizer)
    optimizer.param_groups[0] |= {"lr": 0.05, "momentum": 0.5}
    with pytest.raises(UsageError, match="momentum of the optimizer changed during training: servers under ps_sync"):
        worker.step(4)
    optimizer.register_step_pre_hook(lambda *_: None)
    model = SimpleNamespace(idle=False, processes=(0, 1))
    with pytest.raises(UsageError, match="1 hooks around its step, which ps_sync makes at servers"):
        Served(parse("ps_sync"), model, optimizer, SimpleNamespace(rank=0))


def test_an_optimizer_that_needs_whole_parameters_cannot_live_at_a_server():
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adafactor(net.parameters())
    for text, refused in (("ps_sync", True), ("downpour", True), ("hogwild", False), ("local_sgd", False)):
        model = SimpleNamespace(whole_plan=SimpleNamespace(consistency=parse(text)), plan=training.plan("cnn", ranks=1))
        model.components = model.tensor_axes = model.layouts = ()
        if refused:
            with pytest.raises(UsageError, match=f"all elements of a parameter together, and servers under {text}"):
                doubt_about(optimizer, "torch.optim:Adafactor", model)
        else:
            assert doubt_about(optimizer, "torch.optim:Adafactor", model) == ""
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)
    made = (torch.utils.data.DataLoader(data, 8), torch.nn.functional.cross_entropy)

    def job(optimizer: torch.optim.Optimizer, **options: object) -> asa.Job:
        return asa.Job(net, optimizer, *made, cache=None, time_limit_s=0.1, **options)

    def fresh() -> torch.optim.Optimizer:
        nonlocal net
        net = torch.nn.Linear(4, 3)
        return torch.optim.Adafactor(net.parameters())

    with pytest.raises(UsageError, match="Adafactor uses all elements of a parameter together"):
        job(fresh(), strategies=("ps_sync",))
    assert next(iter(job(fresh(), strategies=("local_sgd",)).run(1))).epoch == 0
    net = torch.nn.Linear(4, 3)
    served = job(torch.optim.SGD(net.parameters(), lr=0.1), strategies=("ps_sync",)).plan
    with pytest.raises(UsageError, match="Adafactor is not known to update element by element, and servers under ps_s"):
        job(fresh(), plan=served)


def test_a_norm_that_each_worker_clips_by_is_said(capsys):
    net = torch.nn.Linear(4, 3)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)
    made = (torch.utils.data.DataLoader(data, 8), torch.nn.functional.cross_entropy)
    for strategy, said in (("local_sgd", True), ("single", False)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        asa.Job(net, optimizer, *made, strategies=(strategy,), max_norm=1.0, cache=None, time_limit_s=0.1).close()
        assert ("max_norm clips gradients of each worker's own batch" in capsys.readouterr().err) == said


def test_workers_that_normalise_on_their_own_say_when_running_statistics_are_averaged():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for kind, name, when in (
        (LocalSteps, "local_sgd", "together with the weights"),
        (FederatedAverage, "fedavg", "together with the weights"),
        (OuterSteps, "diloco", "at the end of every epoch"),
    ):
        for workers in (1, 2):
            axis = SimpleNamespace(size=workers)
            model = SimpleNamespace(components=[net], grouped=SimpleNamespace(axis=axis))
            said = kind(parse(name), model, optimizer).notes()
            assert [text.endswith(f"averaged over workers {when}") for text in said] == [True] * (workers - 1)


def test_a_rank_that_others_need_and_is_gone_is_named_with_what_to_do(monkeypatch):
    votes = star.StarVotes.__new__(star.StarVotes)
    votes.rank, votes.entered = 1, True
    monkeypatch.setattr(star.StarVotes, "swap", lambda self, message: [None, message])
    for ask in (lambda: votes.tell(3), lambda: votes.broadcast(torch.ones(2))):
        with pytest.raises(WorkersFailedError, match=r"rank 0 is gone.*; start all ranks again and resume") as caught:
            ask()
        assert (caught.value.rank, caught.value.lost) == (0, True)


def test_too_few_samples_for_all_clients_say_how_many_ranks_they_are_enough_for():
    with pytest.raises(UsageError, match="3 samples are too few for 4 clients; train on at most 3 ranks"):
        clients([0, 1, 2], 4, spread=1.0, seed=0)
