"""Programs written to find what a spread one gets wrong: the numbers of one process, a refusal, or a line."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.api.calls import Call
from asa.api.job.loss import JobLoss
from asa.api.model.coupling import coupled
from asa.api.steps import in_step
from asa.errors import AsaError, UsageError
from asa.launch import run_ranks
from planner_tests.programs import Program, State, assert_as_alone, classes, cross_entropy, epochs, heard_of, numbers

X, Y = numbers(21, 8), classes(21, 4)


def _loop(loss: Any) -> Any:
    return lambda net, opt, batches: epochs(net, opt, batches, loss)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))


def _program(loop: Any, model: Any = _net, count: int = 21, batch: int = 6, **options: Any) -> Program:
    return Program(model=model, x=X[:count], y=Y[:count], batch=batch, loop=loop, options=options)


def _penalised(net: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def _normed(frozen: bool) -> Any:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 4))
        net[1].train(not frozen)
        return net

    return build


def test_a_gradient_penalty_through_a_frozen_norm_of_all_ranks() -> None:
    """Ranks do not meet in it, so gradients of uneven shares are weighed behind the second derivative."""
    assert_as_alone(_program(_loop(_penalised), _normed(True), batch=5, batch_norm="exact"), ["ddp"])


def test_a_gradient_penalty_through_a_norm_of_all_ranks_is_refused() -> None:
    program = _program(_loop(_penalised), _normed(False), batch_norm="exact")
    for answer in program.spread(["ddp"])["ddp"]:
        assert "does not cross a BatchNorm over all ranks" in str(answer)


def _some(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Some ranks have none of the samples that count."""
    keep = y > 1
    return F.cross_entropy(net(x)[keep], y[keep]) if keep.any() else net(x).sum() * 0


def test_a_loss_of_some_samples_of_which_a_rank_may_have_none() -> None:
    y = torch.tensor([2, 3, 0, 2, 0, 3, 0, 1, 0, 2, 3, 2, 2, 2, 3, 1, 0, 1, 0, 2, 1])
    program = Program(model=_net, x=X, y=y, loop=_loop(_some))
    assert_as_alone(program, ["ddp", "tensor"])


def _clipped_values(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
        opt.step()
    return dict(net.state_dict())


def test_values_are_clipped_where_some_are_whole_and_some_are_shards() -> None:
    assert_as_alone(_program(_clipped_values), ["fsdp", "tensor", "mixed-sharded"])


def _drawn_anew(net: Any, opt: Any, batches: Any) -> State:
    epochs(net, opt, batches, cross_entropy)
    torch.manual_seed(3)
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    return epochs(net, opt, batches, cross_entropy)


def test_shards_are_drawn_as_the_whole_would_be() -> None:
    assert_as_alone(_program(_drawn_anew), ["ddp", "fsdp"])


def _contrastive(net: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(net(x), dim=1)
    apart = z @ z.T - 1e9 * torch.eye(len(z), dtype=z.dtype)
    same = (y[:, None] == y[None]).to(z.dtype) - torch.eye(len(z), dtype=z.dtype)
    return -(apart.log_softmax(1) * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


def _attacked(net: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(net(x), y), x)
    return F.cross_entropy(net((x + 0.5 * slope).detach()), y)


def _full_ones_only(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        if x.size(0) != 6:
            continue
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        opt.step()
    return {}


def _more_than_one(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        (cross_entropy(net, x, y) * (2 if len(x) > 1 else 1)).backward()
        opt.step()
    return {}


def _by_its_loss(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        loss = cross_entropy(net, x, y)
        loss.backward()
        opt.param_groups[0]["lr"] = 0.1 * float(loss)
        opt.step()
    return {}


def _infinite(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Of one sample there is no deviation."""
    return F.cross_entropy(net(x), y) + net(x).std(0).sum()


class _Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def _centred() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), _Centred(), nn.GELU(), nn.Linear(12, 4))


SAID: dict[str, tuple[Program, str, str]] = {
    "a square made beside the batch": (_program(_loop(_contrastive)), "ddp", "not a mean over samples"),
    "a gradient of inputs": (_program(_loop(_attacked)), "ddp", "those of a rank's mean, not of the batch's"),
    "short batches left out": (_program(_full_ones_only), "ddp", "had no backward, and the program asks"),
    "one sample a rank": (_program(_more_than_one, batch=2), "ddp", "is one a rank, and the program asks"),
    "a rate by the loss": (_program(_by_its_loss), "ddp", "hyperparameters of the optimizer differ"),
    "a rate by the loss, again": (_program(_by_its_loss), "ddp", "hyperparameters of the optimizer differ"),
    "no number on the ranks": (_program(_loop(_infinite), batch=2, count=6), "ddp", "not a mean over samples"),
    "fewer samples than ranks": (_program(_loop(cross_entropy), _centred, 7), "tensor", "counts some of them twice"),
}


def test_what_differs_is_named() -> None:
    cases = [(program, program.plan(name)) for program, name, _ in SAID.values()]
    lines = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]  # rank 0 speaks for all
    for (name, (_, _, words)), heard in zip(SAID.items(), lines, strict=True):
        assert any(words in line for line in heard), (name, heard)


def _in_halves(net: Any, opt: Any, batches: Any) -> State:
    """Calls the model twice where there are two samples: of three, rank 0 has two."""
    for x, y in batches:
        opt.zero_grad()
        if len(y) == 2:
            cross_entropy(net, x[:1], y[:1]).backward()
            x, y = x[1:], y[1:]
        cross_entropy(net, x, y).backward()
        opt.step()
    return {}


def _halving(_rank: int, plan: Any) -> None:
    warnings.simplefilter("ignore")
    program = _program(_in_halves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_step, "_PATIENCE_S", 0.3)
        program.loop(*asa.parallelize(*program.made(), plan=plan))


def test_a_rank_that_calls_the_model_with_pieces_while_another_does_not_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(AsaError) as ended:
        run_ranks(2, _halving, _program(_in_halves).plan("tensor"), threads=1, timeout_s=120)
    assert "with other samples than the loader's" in str(ended.value) + capfd.readouterr().err


def _left(rank: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_step, "_PATIENCE_S", 0.2)
        pace = in_step.in_step(20.0)
        if rank == 0:
            pace.leave()
            torch.distributed.barrier()
            in_step.in_step(20.0)  # another program begins
            torch.distributed.barrier()
            return ""
        with pytest.raises(UsageError) as stopped:
            pace.figures(in_step.OTHER_ROWS, [3.0])
        torch.distributed.barrier()
        torch.distributed.barrier()
        return f"{stopped.value}|{pace._conflict()}"


def test_a_rank_that_waits_for_one_that_stopped_with_an_error_stops_too() -> None:
    said, afterwards = run_ranks(2, _left, threads=1, timeout_s=120)[1].split("|")
    assert said.startswith("rank 0 stopped with an error, and rank 1 waits for it")
    assert afterwards == ""


class _Totals(nn.Module):
    """Gives one number, or leaves it in an attribute."""

    def __init__(self, total: Any, *, inside: bool) -> None:
        super().__init__()
        self.layer, self._total, self._inside = nn.Linear(8, 4), total, inside

    def forward(self, x: Tensor) -> Any:
        z = self.layer(x)
        self.cost = self._total(z)
        return z if self._inside else self.cost


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("total", "apart"),
    [
        (lambda z: z.std(0).sum(), True),
        (lambda z: z.square().sum(), True),
        (lambda z: z.square().mean(), False),
        (lambda z: F.cross_entropy(z, torch.arange(len(z)) % 4, ignore_index=1), False),  # weighed by its targets
    ],
)
def test_a_number_of_the_model_that_is_no_mean_over_samples(total: Any, apart: bool, inside: bool) -> None:
    net = _Totals(total, inside=inside).double()
    assert bool(coupled(net, Call((X[:6],)))) is apart
    assert "cost" not in vars(net)


class _OfOne:
    """Votes of one rank."""

    num_ranks, rank, live = 1, 0, range(1)

    @staticmethod
    def gather(values: list[float]) -> list[list[float]]:
        return [values]

    @staticmethod
    def tell(value: Any, **_: Any) -> Any:
        return value

    @staticmethod
    def broadcast(*_: Any, **__: Any) -> None: ...


def test_a_loss_of_a_job_that_agrees_by_chance_in_the_first_step_is_compared_again() -> None:
    """A mask of which both halves of the first batch have as much."""
    place: Any = type("Place", (), {"votes": _OfOne, "rank": 0})
    loss = JobLoss(lambda z, m: (z.square() * m).sum() / m.sum(), None, place)
    masks = [torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])]
    said = []
    for mask in masks:
        z = X[:4, 0].clone()
        loss.begin()
        loss.rows = 2
        halves = [loss(z[r].requires_grad_(), mask[r].double(), True) for r in (slice(0, 2), slice(2, 4))]
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            loss.checked(float(sum(h.detach() for h in halves)) / 2, True, torch.float64)
        said.append([str(w.message) for w in heard])
    assert not said[0]
    assert "not a mean over samples" in said[1][0]


def _refused(_rank: int, fsdp: Any) -> list[str]:
    warnings.simplefilter("ignore")
    net, _, batches = asa.parallelize(*_program(lambda *_: {}).made(), plan=fsdp)
    x, y = next(iter(batches))
    with pytest.raises(UsageError) as transformed:
        torch.func.grad(lambda a: net(a).sum())(x)
    loss = cross_entropy(net, x, y) + 0.01 * sum(p.abs().sum() for p in net.parameters())
    with pytest.raises(UsageError) as beside:
        loss.backward()
    return [str(transformed.value), str(beside.value)]


def test_what_sharded_parameters_do_not_know_is_refused_in_a_line() -> None:
    func, penalty = run_ranks(2, _refused, _program(lambda *_: {}).plan("fsdp"), threads=1, timeout_s=120)[0]
    assert func.startswith("torch.func transforms")
    assert "use p.full_tensor() there" in penalty
