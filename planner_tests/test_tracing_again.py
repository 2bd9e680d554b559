"""Masks, positions and rotations that a model computes once and hands to all its blocks do not keep it in one piece."""

from __future__ import annotations

import copy
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from tracing_checks import assert_bitwise

from asa.tracing import TracedModel, trace
from asa.zoo.foreign import Logits

WIDTH, TOKENS = 8, 6


class Rotation(nn.Module):
    """Cosine and sine of positions, in the type and on the device of what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speeds", torch.linspace(1, 0.1, WIDTH), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.speeds
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Block(nn.Module):
    """Attention that takes its mask and rotation by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        cos, sin = rotation
        q, k, v = self.all(self.norm(x)).chunk(3, dim=-1)
        scores = (q * cos + q * sin) @ (k * cos).transpose(1, 2)
        return x + self.out(scores.masked_fill(~mask, -1e9).softmax(-1) @ v), None


class Model(nn.Module):
    """Three blocks that share a mask of every sample's own, of positions or, with ``padding``, of what is read."""

    def __init__(self, padding: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.padding = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3), padding
        self.rotation = Rotation()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        mask = (positions[:, :, None] >= positions[:, None]).expand(x.shape[0], -1, -1)
        if self.padding:
            mask = mask & (x[:, None, :, 0] > 0)
        y = self.first(x)
        rotation = self.rotation(y, positions)
        for block in self.blocks:
            y = block(y, mask=mask, rotation=rotation)[0]
        return self.last(y)


def test_what_follows_from_shapes_is_computed_again_behind_each_cut() -> None:
    torch.manual_seed(0)
    model = Model()
    traced = trace(model, torch.randn(2, TOKENS, 4), name="own")
    assert len(traced.components) == 5
    assert (traced.notes, traced.uncut) == ((), frozenset())
    assert_bitwise(model, traced, torch.randn(5, TOKENS, 4))


def test_a_mask_of_what_was_read_keeps_its_blocks_together() -> None:
    torch.manual_seed(0)
    model = Model(padding=True)
    traced = trace(model, torch.randn(2, TOKENS, 4), name="own")
    assert len(traced.components) < 5
    assert "blocks.0 to blocks.2 form one component: more than one tensor passes between them" in traced.note
    assert_bitwise(model, traced, torch.randn(5, TOKENS, 4))


def test_a_trace_without_values_is_cut_in_the_same_places() -> None:
    with torch.device("meta"):
        model = Model()
        traced = trace(model, torch.empty(2, TOKENS, 4), name="own")
    assert len(traced.components) == 5


class Distances(nn.Module):
    """What every token is from every position: a table of a size that no machine has, if it is computed."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + (x[:, :, None, 0] - positions[:, None]).softmax(-1).sum(-1, keepdim=True)


class Counting(nn.Module):
    """A rotation that keeps a count of its calls: a copy of it would count anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        self.calls += 1
        return positions[..., None].float() * self.calls


class Shared(nn.Module):
    """Two layers that share what ``between`` makes of what they read."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.between = between
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = self.between(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers:
            x = layer(x) + made
        return x


def test_what_reads_values_is_told_without_computing_them() -> None:
    with torch.device("meta"):
        model = Shared(Distances())
        traced = trace(model, torch.empty(2, 1 << 20, WIDTH), name="own")
    assert len(traced.components) == 1


def test_what_writes_into_its_own_state_is_not_computed_again() -> None:
    traced = trace(Shared(Counting()), torch.randn(2, TOKENS, WIDTH), name="own")
    assert len(traced.components) == 1


class Packing(nn.Module):
    """Two layers, with a mask where the positions that ``kind`` names show several sequences in one."""

    def __init__(self, kind: str, masks: Any) -> None:
        super().__init__()
        self.kind, self.masks = kind, masks
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        if self.kind == "read":
            positions = positions + (x[..., 0] > 100)
        packed = self.masks.find_packed_sequence_indices(positions % 3 if self.kind == "packed" else positions)
        for layer in self.layers:
            x = layer(x)
        return x if packed is None else x * packed[..., None]


@pytest.mark.parametrize(("kind", "count"), [("in a row", 2), ("packed", 1), ("read", 1)])
def test_whether_sequences_are_packed_is_looked_up(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers does: where nothing is packed, a mask is made of symbolic positions alone."""
    masks = types.ModuleType("transformers.masking_utils")

    def find(positions: Any) -> Any:
        packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        return packed if isinstance(positions, fx.Proxy) or packed.any() else None

    masks.find_packed_sequence_indices = find  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, masks.__name__, masks)
    torch.manual_seed(0)
    model, x = Packing(kind, masks), torch.randn(3, TOKENS, WIDTH)
    traced = trace(model, x[:2], name="packing")
    assert len(traced.components) == count
    assert_bitwise(model, traced, x)
    assert masks.find_packed_sequence_indices is find


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "tie_word_embeddings": False},
    "llama": {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16,
        "intermediate_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_causal_models_of_transformers_are_cut_at_every_block(kind: str) -> None:
    """Trained in two stages, cut between the blocks, in two microbatches, they come to one process's weights."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=32, use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0,
        eos_token_id=1, **CONFIGURATIONS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    alone = Logits(transformers.AutoModelForCausalLM.from_config(config), "input_ids").train()
    cut = copy.deepcopy(alone)
    traced = trace(cut, torch.randint(0, 32, (2, 8)), name=kind)
    assert len(traced.components) == 4
    assert not traced.notes
    batches = torch.randint(0, 32, (3, 2, 4, 8))
    _train(alone, batches)
    _train_in_stages(cut, traced, batches)
    for (name, one), other in zip(alone.named_parameters(), cut.parameters(), strict=True):
        assert torch.equal(one, other), name


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _train(model: nn.Module, batches: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        for part in batch:
            _loss(model(part), part).backward()
        optimizer.step()


def _train_in_stages(model: nn.Module, traced: TracedModel, batches: Tensor) -> None:
    """Two halves that hand each other one tensor and its gradient, all forwards first."""
    first, second = (
        nn.Sequential(*(_Main(c) for c in half)) for half in (traced.components[:2], traced.components[2:])
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        handed = [first(part) for part in batch]
        received = [h.detach().requires_grad_() for h in handed]
        for sent, here, part in zip(handed, received, batch, strict=True):
            _loss(second(here), part).backward()
            sent.backward(here.grad)
        optimizer.step()


class _Main(nn.Module):
    def __init__(self, component: nn.Module) -> None:
        super().__init__()
        self.component = component.train()

    def forward(self, x: Tensor) -> Tensor:
        main: Tensor = self.component(x)[0]
        return main
