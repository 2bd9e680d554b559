"""What workers that train on their own for a while do to clipping, optimizer states, buffers and schedules, exactly."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.api.job.schedules import Schedules
from asa.errors import UsageError
from asa.executor.consistency.quorum import AveragingRounds
from asa.ir.consistency import parse
from asa.launch import run_ranks

WORKERS, EPOCHS = 2, 3


class Net(nn.Module):
    """It has a scalar, and a buffer that is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) * self.scale + torch.exp(self.mask)
        return y


def _made(name: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net().double()
    if name == "adamw":
        return net, torch.optim.AdamW(net.parameters(), lr=0.02)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, maximize=name == "most")


def _batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, dtype=torch.float64, generator=draw), torch.arange(n) % 3) for n in sizes]


def _by_hand(text: str, name: str, sizes: list[int], max_norm: float | None) -> tuple[dict[str, Tensor], list[float]]:
    """Weights, and the parts of the first worker's optimizer state, after ``EPOCHS``."""
    discipline, parties = parse(text), [_made(name) for _ in range(WORKERS)]
    chosen, number = math.ceil(discipline.fraction * WORKERS), 0
    for _ in range(EPOCHS):
        trained, since, steps = [0] * WORKERS, [0] * WORKERS, 0
        for at, (x, y) in enumerate(_batches(sizes), 1):
            clients = random.Random(f"clients 0 {number}").sample(range(WORKERS), chosen)
            for r in clients if chosen < WORKERS else range(WORKERS):
                net, optimizer = parties[r]
                rows = slice(len(x) * r // WORKERS, len(x) * (r + 1) // WORKERS)
                optimizer.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows]).backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), max_norm)
                optimizer.step()
                since[r] += rows.stop - rows.start
                trained[r] += rows.stop - rows.start
            steps += 1
            if steps == discipline.period or at == len(sizes):
                with torch.no_grad():
                    for same in zip(*(net.parameters() for net, _ in parties), strict=True):
                        mean = sum(p * n for p, n in zip(same, since, strict=True)) / sum(since)
                        for p in same:
                            p.copy_(mean)
                since, steps, number = [0] * WORKERS, 0, number + 1
        most = trained.index(max(trained))
        for same in zip(*(net.parameters() for net, _ in parties), strict=True):
            states = [o.state[p] for (_, o), p in zip(parties, same, strict=True)]
            for key in states[most]:
                parts = [s[key] * n / sum(trained) for s, n in zip(states, trained, strict=True) if n]
                united = states[most][key] if key == "step" else sum(parts)
                for state in states:
                    state[key] = united.clone()
    net, optimizer = parties[0]
    return dict(net.state_dict()), [float(v.sum()) for s in optimizer.state.values() for v in s.values()]


def _jobs(rank: int, cases: list[tuple[Any, ...]]) -> list[tuple[dict[str, Tensor], list[float]]]:
    found = []
    for text, name, sizes, max_norm in cases:
        net, optimizer = _made(name)
        job = asa.Job(
            net, optimizer, _batches(sizes), F.cross_entropy, strategies=(text,), max_norm=max_norm, cache=None,
            replan=False, observe=False, time_limit_s=0.1,
        )  # fmt: skip
        job.run(EPOCHS)
        state = [float(v.sum()) for s in job.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        found.append((job.state_dict(), state))
        job.close()
    return found


def test_clipping_states_and_buffers_of_workers_on_their_own_are_as_by_hand():
    """The last batch divides into 4 and 3 samples; with half of the clients, one of two is idle for whole epochs."""
    cases = [
        ("local_sgd:period=2", "sgd", [12, 12, 7], 0.05),
        ("local_sgd:period=2", "adamw", [12, 12, 7], None),
        ("fedavg:period=2:fraction=0.5", "adamw", [12, 12, 7], None),
        ("fedavg:period=2:fraction=0.5", "sgd", [12, 12], None),
    ]
    for ranks in zip(*run_ranks(WORKERS, _jobs, cases, threads=1, timeout_s=120), cases, strict=True):
        weights, state = _by_hand(*ranks[-1])
        for found, of_optimizer in ranks[:-1]:
            for key, value in weights.items():
                torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-13, msg=f"{ranks[-1]}: {key}")
            assert of_optimizer == pytest.approx(state, rel=1e-9), ranks[-1]


def _downpour(name: str, sizes: list[int]) -> dict[str, Tensor]:
    """Weights of one worker that pushes the mean gradient of every two steps, and of what is left at an epoch's end."""
    (net, _), (served, optimizer) = _made(name), _made(name)
    group = optimizer.param_groups[0]
    for _ in range(EPOCHS):
        since: list[tuple[int, list[Tensor]]] = []
        for at, (x, y) in enumerate(_batches(sizes), 1):
            gradients = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
            since.append((len(x), list(gradients)))
            samples, usual = sum(n for n, _ in since), group["lr"]
            with torch.no_grad():
                if len(since) < 2 and at < len(sizes):
                    for p, g in zip(net.parameters(), gradients, strict=True):
                        p.add_(g, alpha=(1 if group["maximize"] else -1) * usual * len(x) / sizes[0])
                    continue
                for p, *each in zip(served.parameters(), *(g for _, g in since), strict=True):
                    p.grad = sum(g * n / samples for g, (n, _) in zip(each, since, strict=True))
                group["lr"] = usual * samples / sizes[0]
                optimizer.step()
                group["lr"], since = usual, []
                for p, q in zip(net.parameters(), served.parameters(), strict=True):
                    p.copy_(q)
    return dict(served.state_dict())


def test_one_worker_of_downpour_begins_every_epoch_with_a_whole_period_and_may_maximise():
    cases = [("downpour:period=2", name, [12, 12, 7], None) for name in ("adamw", "most")]
    (ranks,) = run_ranks(1, _jobs, cases, threads=1, timeout_s=120)
    for (found, _), (_, name, sizes, _) in zip(ranks, cases, strict=True):
        for key, value in _downpour(name, sizes).items():
            torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-13, msg=f"{name}: {key}")


def test_a_round_in_which_nobody_trained_moves_no_outer_weights():
    rounds = AveragingRounds(parse("diloco:quorum=1:grace_s=0"), torch.zeros(2), [0])
    after = rounds.contribute(0, torch.ones(2), 8)
    rounds.contribute_last(0, torch.zeros(2), 0)
    rounds.restart([0])
    assert torch.equal(rounds.weights.detach(), after)


def test_a_schedule_of_steps_that_another_takes_is_not_warned_of():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedules = Schedules(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules.stepped()  # servers have made the step


def _frozen_and_not(rank: int) -> list[Any]:
    """What each of some disciplines says to weights that are trained later, and a sum of weights that were frozen
    within a period."""
    said: list[Any] = []
    for text in ("local_sgd:period=4", "diloco:period=2", "fedavg:period=2", "hogwild", "ps_sync"):
        net, optimizer = _made("adamw")
        net.scale.requires_grad_(False)
        job = asa.Job(
            net, optimizer, _batches([12] * 3), F.cross_entropy, strategies=(text,), cache=None, observe=False,
            time_limit_s=0.1,
        )  # fmt: skip
        job.train_step()
        for p in job.model.parameters():
            p.requires_grad_(text != "local_sgd:period=4" or not p.dim())
        try:
            job.train_step()
            job.state_dict()
            said.append([float(p.detach().sum()) for p in job.model.parameters()])
        except UsageError as error:
            said.append(str(error))
        job.close()
    return said


def test_weights_that_are_frozen_are_averaged_still_and_trained_later_are_or_are_refused():
    (averaged, *refused), (of_other, *_) = run_ranks(WORKERS, _frozen_and_not, threads=1, timeout_s=120)
    assert averaged == of_other
    for line in refused:
        assert "1 parameters (the first of shape []) are trained since a later step" in line


def _hogwild(rank: int, out: str) -> list[dict[str, Any]]:
    groups = []
    for text in ("hogwild:momentum=0.25", "single"):
        net, optimizer = _made("sgd")
        job = asa.Job(
            net, optimizer, _batches([12]), F.cross_entropy, strategies=(text,), out=out, resume=text == "single",
            cache=None, observe=False, time_limit_s=0.1,
        )  # fmt: skip
        job.run(1)
        groups.append({k: job.optimizer.param_groups[0][k] for k in ("lr", "momentum")})
        job.close()
    return groups


def test_the_lower_momentum_of_hogwild_ends_with_it(tmp_path):
    found = run_ranks(1, _hogwild, str(tmp_path / "run"), threads=1, timeout_s=120)[0]
    assert found == [{"lr": 0.1, "momentum": 0.9}] * 2
