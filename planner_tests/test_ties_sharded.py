"""Weights that several components share, held in shards: programs leave what one process leaves."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.api.tensors.retired import retire_in_job
from asa.errors import UsageError
from planner_tests.programs import Program, State, assert_as_alone, classes, sgd

WORDS = 13
PLANS = ["zero1", "zero2", "fsdp"]


class Gpt(nn.Module):
    """Words and places, two blocks, and a head with the weight of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Decoder(Gpt):
    """The head has a bias, and is no layer: its weight is read where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.bias = nn.Identity(), nn.Parameter(torch.zeros(WORDS))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(super().forward(tokens), self.words.weight, self.bias)


class Biased(Gpt):
    """The head is a layer with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, WORDS)
        self.head.weight = self.words.weight


class Thrice(Gpt):
    """One weight in three components, two of them layers behind others with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.guess, self.again = nn.Linear(8, WORDS), nn.Linear(WORDS, 8)
        self.guess.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = self.blocks[1](self.again(self.guess(self.blocks[0](x)).tanh()))
        return self.head(self.norm(self.blocks[2](x)))


class Frozen(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.words.weight.requires_grad_(False)


class Adapted(Frozen):
    """The shared weight rests, and matrices of low rank beside the head learn."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        return self.head(x) + self.up(self.down(x))


class Cut(Gpt):
    """Nothing of the embedding's own use is learnt, only what its weight does in the head."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).detach()
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Swapped(Gpt):
    """The head, which forward reads last, comes first in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.alias = self.words, self.head.weight
        del self.words

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Beside(nn.Linear):
    """A layer that reads values, so that it is called as it is, with another one inside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(8, 8)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.inner(x) if float(x.detach().abs().max()) > 0 else 0)


class Inside(Gpt):
    """Two layers that share the one inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = Beside(nn.Linear(8, 8))
        self.up = Beside(self.down.inner)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.down(self.words(tokens))
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(self.up(x)))


def _loss(net: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten())


def _usual(net: Any, opt: Any, batches: Any) -> State:
    for tokens, labels in batches:
        opt.zero_grad()
        _loss(net, tokens, labels).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
    return dict(net.state_dict())


def _accumulated(net: Any, opt: Any, batches: Any) -> State:
    for k, (tokens, labels) in enumerate(batches):
        (_loss(net, tokens, labels) / 2).backward()
        if k % 2:
            opt.step()
            opt.zero_grad()
    return dict(net.state_dict())


def _evaluated(net: Any, opt: Any, batches: Any) -> State:
    """Outputs in between, and weights from outside after them."""
    seen = []
    for k, (tokens, labels) in enumerate(batches):
        net.eval()
        with torch.no_grad():
            seen.append(asa.reduce(_loss(net, tokens, labels)))
        if k == 1:
            net.load_state_dict({n: v * 0.5 if v.dim() > 1 else v for n, v in net.state_dict().items()})
            with torch.no_grad():
                seen.append(asa.reduce(_loss(net, tokens, labels)))
        net.train()
        opt.zero_grad()
        _loss(net, tokens, labels).backward()
        opt.step()
    return {**net.state_dict(), "seen": torch.stack(seen)}


def _twice(net: Any, opt: Any, batches: Any) -> State:
    """Two losses of one output, one backward after the other."""
    for tokens, labels in batches:
        opt.zero_grad()
        logits = net(tokens).flatten(0, 1)
        F.cross_entropy(logits, labels.flatten()).backward(retain_graph=True)
        (0.01 * logits.square().mean()).backward()
        opt.step()
    return dict(net.state_dict())


def _averaged(net: Any, opt: Any, batches: Any) -> State:
    average = torch.optim.swa_utils.AveragedModel(net)
    for tokens, labels in batches:
        opt.zero_grad()
        _loss(net, tokens, labels).backward()
        opt.step()
        average.update_parameters(net)
    return dict(average.module.state_dict())


def _copied(net: Any, opt: Any, batches: Any) -> State:
    """A copy that learns on its own."""
    for tokens, labels in batches:
        opt.zero_grad()
        _loss(net, tokens, labels).backward()
        opt.step()
    copied = copy.deepcopy(net)
    tokens, labels = classes(24, WORDS, 3).view(4, 6), classes(24, WORDS, 4).view(4, 6)
    _loss(copied, tokens, labels).backward()
    sgd(copied).step()
    return dict(copied.state_dict())


def _program(model: Any, loop: Any, optimizer: Any = sgd) -> Program:
    x, y = classes(24 * 5, WORDS).view(24, 5), classes(24 * 5, WORDS, 2).view(24, 5)
    return Program(model=model, x=x, y=y, loop=loop, optimizer=optimizer)


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=0.01)


@pytest.mark.parametrize("model", [Gpt, Decoder, Biased, Thrice, Frozen, Adapted, Cut])
def test_a_shared_weight_in_shards_learns_from_all_its_uses(model: Any) -> None:
    program = _program(model, _usual, _adamw if model is Adapted else sgd)
    assert sum(bool(c.ties) for c in program.traced.components) == (3 if model is Thrice else 2)
    states = [s for of_ranks in assert_as_alone(program, PLANS).values() for s in of_ranks]
    if model is Biased:  # every name of a shared weight is in the state
        assert all(torch.equal(s["words.weight"], s["head.weight"]) for s in states if not isinstance(s, str))


def test_a_layer_inside_of_two_that_share_it_is_held_once() -> None:
    assert_as_alone(_program(Inside, _usual), ["ddp", *PLANS])


def _other_names_loaded(net: Any, opt: Any, batches: Any) -> State:
    """The names of one weight have other values, as in the state of a model that does not share it."""
    state = net.state_dict()
    net.load_state_dict({name: value * 0.5 if name == "head.weight" else value for name, value in state.items()})
    return _usual(net, opt, batches)


def test_of_the_names_of_a_shared_weight_the_last_is_loaded() -> None:
    assert_as_alone(_program(Biased, _other_names_loaded), ["ddp", "fsdp"])


@pytest.mark.parametrize("loop", [_accumulated, _evaluated, _twice, _averaged, _copied])
def test_loops_of_a_user_around_a_shared_weight(loop: Any) -> None:
    assert_as_alone(_program(Gpt, loop, _adamw), ["zero1", "fsdp"])


def _named(net: Any, opt: Any, batches: Any) -> State:
    """What a loop finds by the names of parameters, in their order."""
    found = [net.named_parameters(), net.named_parameters(remove_duplicate=False), net.head.named_parameters()]
    listed = [",".join(name for name, _ in some) for some in found]
    state = _usual(net, opt, batches)
    norms = [float(p.detach().norm()) for p in (net.alias, *dict(net.named_parameters()).values())]
    checksums = [float(zlib.crc32(names.encode())) for names in listed]
    return {**state, "seen": torch.tensor([*norms, *checksums], dtype=torch.float64)}


def test_a_shared_weight_has_the_names_and_the_place_that_it_has_in_the_model() -> None:
    assert_as_alone(_program(Swapped, _named), ["ddp", *PLANS])


def test_a_shared_weight_that_a_rank_trains_under_its_second_name_is_refused_under_its_first() -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 3), "words": nn.Embedding(3, 2)})
    model["head"].weight = model["words"].weight
    retire_in_job(model, [nn.ModuleDict({"words": nn.Embedding(3, 2)})])
    with pytest.raises(UsageError, match="train others in its place"), torch.no_grad():
        model["head"].weight.zero_()
