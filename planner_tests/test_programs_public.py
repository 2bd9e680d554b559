"""Loops that go on by an answer of all their samples, and whole parameters that a loss uses beside outputs.

More of them are in ``benchmarks/program_table/public.py``.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import asa
from asa.api.losses.program_text import becomes_a_shape, decides
from asa.launch import run_ranks
from planner_tests.programs import Program, State, assert_as_alone, classes, distance, heard_of, numbers

CE = F.cross_entropy


class Words(nn.Module):
    """Logits of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.table(tokens)).cumsum(1)))  # type: ignore[no-any-return]


def _decoded(net: Any, opt: Any, batches: Any) -> State:
    """Words are decoded until all of the batch have ended, with gradients."""
    for tokens, _ in batches:
        opt.zero_grad()
        seen, loss = tokens[:, :2], torch.zeros(()).double()
        while seen.size(1) < 9 and (seen != 0).all(1).any():
            out = net(seen)[:, -1]
            loss = loss + CE(out, (seen.sum(1) + 1) % 7)
            seen = torch.cat([seen, out.argmax(-1, keepdim=True)], 1)
        (loss + CE(net(seen)[:, 0], tokens[:, 1])).backward()
        opt.step()
    return dict(net.state_dict())


def _rolled_out(net: Any, opt: Any, batches: Any) -> State:
    """Words are decoded without gradients, in front of each update."""
    for tokens, _ in batches:
        seen, ended = tokens[:, :2], torch.zeros(len(tokens)).bool()
        with torch.no_grad():
            for _ in range(7):
                word = net(seen)[:, -1].argmax(-1)
                ended = ended | (word == 4)
                seen = torch.cat([seen, word[:, None]], 1)
                if ended.all().item():
                    break
        opt.zero_grad()
        CE(net(seen[:, :-1]).flatten(0, 1), seen[:, 1:].flatten()).backward()
        opt.step()
    return dict(net.state_dict())


def _answers_apart(program: Program) -> int:
    """How often two ranks, by their own halves of a batch, would have gone on and ended."""
    apart = []

    def looked(usual: Any) -> Any:
        def look(self: Tensor, *args: Any, **options: Any) -> Tensor:
            if self.dim() == 1 and len(self) == program.batch and not args:  # every rank has all of a smaller one
                first, second = self.chunk(2)
                apart.append(bool(usual(first)) != bool(usual(second)))
            return usual(self, *args, **options)  # type: ignore[no-any-return]

        return look

    with pytest.MonkeyPatch.context() as patch:
        for name in ("any", "all"):
            patch.setattr(Tensor, name, looked(getattr(Tensor, name)))
        program.alone()
    return sum(apart)


@pytest.mark.parametrize(("loop", "seed"), [(_decoded, 6), (_rolled_out, 2)])
def test_a_loop_goes_on_until_all_samples_of_all_ranks_have_ended(loop: Any, seed: int) -> None:
    program = Program(model=Words, x=classes(21 * 3, 7, seed).view(21, 3), y=classes(21, 3), loop=loop)
    assert _answers_apart(program) > 3, "a rank that asked no other would be noticed"
    assert_as_alone(program, ["ddp", "fsdp", "tensor", "mixed"])


def test_tests_that_ranks_answer_together_are_told_from_others(tmp_path: Any) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "for x in xs:\n    if x.all():\n        break\n    if x.any():\n        y = 1\n"
        "while (a\n       and x.all()):\n    pass\nif x.all():\n    y = 2\n"
    )
    assert [n for n in range(1, 11) if decides(str(script), n)] == [2, 6, 7]
    assert not decides("<stdin>", 1)
    script.write_text(
        "for x in xs:\n    if not x.any():\n        continue\n    loss(x).backward()\n"
        "def step(x):\n    if x.all():\n        return\n    if x.any():\n        loss(x).backward()\n"
        "def other(x):\n    if x.all():\n        return\n"
    )
    assert [n for n in range(1, 13) if decides(str(script), n)] == [2, 6, 8]
    script.write_text("while x.all():\n    pass\n")
    assert [n for n in range(1, 11) if decides(str(script), n)] == [1], "as it is when it runs again"


class Forecaster(nn.Module):
    """A recurrent layer whose state goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        out, state = self.rnn(x, state)
        return self.head(out[:, -1]), state


def _state_handed_on(net: Any, opt: Any, batches: Any) -> State:
    """The state of the first half of a sequence goes into the second, one backward for both."""
    for x, y in batches:
        opt.zero_grad()
        first, state = net(x[:, :2])
        second, _ = net(x[:, 2:], state)
        (CE(first, y) + CE(second, y)).backward()
        opt.step()
    return dict(net.state_dict())


def test_a_model_that_begins_to_run_whole_between_two_calls_of_a_backward_is_refused() -> None:
    """The gradients of the first call would be lost."""
    program = Program(model=Forecaster, x=numbers(24, 4, 2), y=classes(24, 3), loop=_state_handed_on)
    for said in program.spread(["ddp"])["ddp"]:
        assert isinstance(said, str)
        assert "outputs of its call before wait for their backward: say what it takes with example_input" in said


class Score(nn.Module):
    """A single number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 12), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.first(x)))  # type: ignore[no-any-return]


def _followed_by_target(net: Any, opt: Any, batches: Any) -> State:
    """A plain copy follows the weights, one of which has a single element."""
    target = Score().double()
    target.load_state_dict(net.state_dict())
    for x, y in batches:
        opt.zero_grad()
        F.mse_loss(net(x), target(x).detach() + y[:, None]).backward()
        opt.step()
        with torch.no_grad():
            for p, t in zip(net.parameters(), target.parameters(), strict=True):
                t.lerp_(p, 0.1)
    return dict(net.state_dict())


def test_a_copy_follows_a_sharded_parameter_of_one_element() -> None:
    assert_as_alone(Program(model=Score, x=numbers(24, 8), y=classes(24, 3), loop=_followed_by_target), ["fsdp"])


class KeptIterator(DataLoader[Any]):
    """Reads its workers' one endless iterator for all epochs, and changes batches."""

    def __init__(self, data: Any, batch: int) -> None:
        super().__init__(data, batch)
        object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            x, y = next(self.iterator)
            yield x * 0.5, y


class Endless:
    """Begins its sampler again and again."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from self.sampler


def _from_kept(net: Any, opt: Any, batches: Any) -> State:
    if type(batches) is DataLoader:  # on one device
        batches = KeptIterator(batches.dataset, 6)
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
    return dict(net.state_dict())


def _kept(_rank: int, program: Program) -> State:
    warnings.simplefilter("ignore")
    net, opt, batches = program.made()
    made = asa.parallelize(net, opt, KeptIterator(batches.dataset, 6), plan=program.plan("ddp"))
    return _from_kept(*made)


def test_a_loader_with_an_iteration_of_its_own_is_read_by_that() -> None:
    program = Program(model=Normed, x=numbers(21, 8), y=classes(21, 3), loop=_from_kept)
    for state in run_ranks(2, _kept, program, threads=1, timeout_s=120):
        assert distance(state, program.alone()) < 1e-11


class Players(nn.Module):
    """Generator and critic, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.gen, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, what: str = "critic") -> Tensor:
        return self.gen(x) if what == "gen" else self.critic(x)  # type: ignore[no-any-return]


def _in_turn(net: Any, opt: Any, batches: Any) -> State:
    """The generator has an optimizer that is made before the model is called by another name."""
    second = torch.optim.SGD(net.gen.parameters(), 0.1)
    for x, _ in batches:
        opt.zero_grad()
        second.zero_grad()
        (net(x, "critic").mean() - net(net(x, "gen").detach(), "critic").mean()).backward()
        opt.step()
        second.zero_grad()
        (-net(net(x, "gen"), "critic").mean()).backward()
        second.step()
    return dict(net.state_dict())


def _critic_only(net: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.critic.parameters(), 0.1)


def test_layers_that_components_lack_are_trained_by_an_optimizer_made_behind_the_call() -> None:
    program = Program(model=Players, x=numbers(24, 8), y=classes(24, 3), optimizer=_critic_only, loop=_in_turn)
    assert_as_alone(program, ["ddp", "fsdp", "mixed"])


def _with_momenta(net: Any, opt: Any, batches: Any) -> State:
    """The other optimizer made a step, and keeps momenta, before the model is called by another name."""
    second = torch.optim.SGD(net.gen.parameters(), 0.1, momentum=0.9)
    net.gen.weight.square().sum().backward()
    second.step()
    second.zero_grad()
    for x, _ in batches:
        (-net(net(x, "gen"), "critic").mean()).backward()
        second.step()
    return dict(net.state_dict())


def test_layers_that_components_lack_are_not_left_behind_in_silence() -> None:
    program = Program(model=Players, x=numbers(24, 8), y=classes(24, 3), optimizer=_critic_only, loop=_with_momenta)
    for said in program.spread(["ddp"])["ddp"]:
        assert isinstance(said, str)
        assert "that the program listed before the model was distributed" in said


class Batch:
    """Notes, each time that its size is asked for, whether it becomes a shape."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def __len__(self) -> int:
        self.found.append(becomes_a_shape(sys._getframe(1)))
        return 3


def test_a_size_that_becomes_a_shape_is_told_from_one_that_decides() -> None:
    x, out = Batch(), torch.zeros(6, 2)
    torch.zeros(len(x)), out.view(2 * len(x), 1, 2), out[: len(x)]
    assert x.found == [True] * 3
    count = len(x)
    torch.zeros(len(x) if len(x) > count else 1), range(len(x)), torch.ones(max(2, len(x)))
    assert x.found[3:] == [False] * 4


def _only_shapes(x: Batch) -> Any:
    count = len(x)
    return torch.zeros(count, 2), [torch.full((2 * count,), 1.0) for _ in range(2)]


def _decides(x: Batch) -> Any:
    count = len(x)
    return torch.zeros(count) / (2 if count > 2 else 1)


def _written_again(x: Batch) -> Any:
    count = len(x)
    count += 1
    return torch.zeros(count)


def _cuts(x: Batch) -> Any:
    count, kept = len(x), torch.zeros(9)
    return kept[:count]


def _returned(x: Batch) -> int:
    count = len(x)
    return 2 * count


def test_a_size_kept_by_a_variable_decides_nothing_if_it_only_becomes_shapes() -> None:
    x = Batch()
    for function in (_only_shapes, _decides, _written_again, _cuts, _returned):
        function(x)
    assert x.found == [True, False, False, False, False]


def _focal(net: Any, opt: Any, batches: Any) -> State:
    """Makes a tensor as long as the batch."""
    for x, y in batches:
        opt.zero_grad()
        (CE(net(x), y, reduction="none") * torch.ones(len(x)).double()).mean().backward()
        opt.step()
    return dict(net.state_dict())


def _skips_single(net: Any, opt: Any, batches: Any) -> State:
    """Leaves batches of one sample out."""
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        if len(x) > 1:
            opt.step()
    return dict(net.state_dict())


def test_shapes_by_the_number_of_samples_are_nothing_to_say() -> None:
    cases = [
        ((p := Program(model=Normed, x=numbers(20, 8), y=classes(20, 3), loop=loop)), p.plan("ddp"))
        for loop in (_focal, _skips_single)
    ]
    shaped, decided = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert not any("is one a rank" in line for line in shaped)
    assert any("is one a rank, and the program asks how many there are" in line for line in decided)


class Normed(nn.Module):
    """A norm between layers, whose weight is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.mix, self.head = (
            nn.Linear(8, 12),
            nn.LayerNorm(12),
            nn.Linear(12, 12),
            nn.Linear(12, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mix(self.norm(F.relu(self.first(x))))))  # type: ignore[no-any-return]


def _scaled(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        (CE(net(x) * net.norm.weight.abs().mean(), y) + 0.01 * net.head.bias.square().sum()).backward()
        opt.step()
    return dict(net.state_dict())


def test_a_whole_parameter_beside_outputs_has_the_gradient_of_all_samples() -> None:
    program = Program(model=Normed, x=numbers(21, 8), y=classes(21, 3), loop=_scaled)
    assert_as_alone(program, ["ddp", "tensor", "mixed"])
