"""From a model's name to its profile: everything measured, consistent with the graph, a file like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from asa.errors import UsageError
from asa.ir.codec import dumps, loads
from asa.ir.profile import Profile
from asa.launch import run_ranks
from asa.profiler.clock import scaled
from asa.profiler.measure import profile_model, profile_module, slowdown
from asa.profiler.paths import profile_path

WIDTH = 24


class Perceptron(nn.Module):
    """Three linear layers, the middle ones a block of their own; dropout between."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Dropout(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.norm(self.block(torch.relu(self.stem(x.flatten(1))))))


def _profile(**changes) -> Profile:
    model = changes.pop("model", None) or Perceptron()
    settings = {"global_batch": 4, "time_limit_s": 60.0, "device": torch.device("cpu"), **changes}
    return profile_module(model, torch.zeros(2, 6, 1, 1), spec="tests:perceptron", num_classes=3, **settings)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return _profile()


@pytest.fixture(scope="module")
def cnn() -> tuple[Profile, list[float]]:
    said: list[float] = []
    found = profile_model(
        "cnn",
        input_shape=(3, 16, 16),
        num_classes=10,
        global_batch=8,
        device="cpu",
        time_limit_s=60.0,
        max_tensor_degree=2,
        progress=lambda fraction, _: said.append(fraction),
    )
    return found, said


def test_the_speed_of_this_machine_is_that_of_a_profile_that_was_just_made(cnn):
    made, _ = cnn
    then = tuple(replace(w, whole=scaled(w.whole, 1e3)) for w in made.whole)
    now, slower = slowdown(made), slowdown(replace(made, whole=then))
    assert 0.01 < now < 100, "a busy machine"
    assert slower < now / 10
    assert slowdown(replace(made, whole=())) == 1


def test_a_profile_is_a_file(profile, tmp_path: Path):
    assert loads(Profile, dumps(profile), source="test") == profile
    assert profile_path(profile, tmp_path) == tmp_path / "tests-perceptron.cpu.fp32.json"


def test_its_provenance_says_what_when_and_with_what(profile):
    assert profile.provenance.origin == "measured"
    assert profile.provenance.torch_version == torch.__version__
    assert profile.provenance.created.endswith("+00:00")
    assert profile.device.type == "cpu"
    assert profile.device.threads == 1
    assert profile.model_fingerprint


def test_every_component_is_timed_whole_and_as_every_shard_it_has(profile):
    for c in profile.graph.components:
        degrees = {t.tensor_degree for t in profile.timings if t.component == c.name}
        most = c.split.max_degree if c.split else 1
        assert degrees == {d for d in (1, 2, 4, 8) if d <= most}
        assert {u.tensor_degree for u in profile.updates if u.component == c.name} == (
            degrees if c.parameter_bytes else set()
        )
    assert any(c.split for c in profile.graph.components)
    assert {t.microbatch for t in profile.timings if t.tensor_degree == 1} == {4, 2, 1}


def test_measured_activations_are_those_of_the_graph(cnn):
    """The allocator's record against the facts of the trace: the same to what alignment and the output add."""
    profile, _ = cnn
    for size in {t.microbatch for t in profile.timings}:
        measured = sum(t.saved_bytes for t in profile.timings if (t.microbatch, t.tensor_degree) == (size, 1))
        stated = sum(c.saved_bytes_per_sample for c in profile.graph.components) * size
        assert 0.8 * stated <= measured <= 1.2 * stated + 16384


def test_shards_keep_less_than_the_whole(cnn):
    profile, _ = cnn
    halves = [t for t in profile.timings if t.tensor_degree == 2 and t.microbatch == 8]
    assert halves
    for half in halves:
        (whole,) = (
            t for t in profile.timings if (t.component, t.microbatch, t.tensor_degree) == (half.component, 8, 1)
        )
        assert half.saved_bytes <= whole.saved_bytes


def test_a_named_model_is_built_and_progress_told(cnn):
    profile, said = cnn
    assert profile.model_spec == "cnn"
    assert profile.graph.input_shape == (3, 16, 16)
    assert profile.graph.num_classes == 10
    assert profile.whole
    assert said == sorted(said)
    assert said[-1] == 1.0
    assert profile.dispatch_floor_s > 0


def test_weights_and_randomness_are_left_as_they_were():
    model = Perceptron(norm=True)
    before = {n: p.clone() for n, p in model.named_parameters()}
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    profile = _profile(model=model, max_tensor_degree=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None
    assert profile.skipped[0] == "microbatch 1: batch normalisation cannot train on one value per channel"


def test_reduced_precision_is_measured_under_its_name():
    assert _profile(precision="bf16", max_tensor_degree=1).precision == "bf16"


@pytest.mark.parametrize("wrong", [{"global_batch": 0}, {"max_tensor_degree": 0}, {"time_limit_s": 0.0}])
def test_impossible_requests_are_refused(wrong):
    with pytest.raises(UsageError):
        _profile(**wrong)


def _backward_on_a_rank(rank: int) -> float:
    p = torch.ones(4, requires_grad=True)
    (p * (rank + 1)).sum().backward()
    return float(p.grad.sum())


def test_ranks_can_be_forked_after_a_profile_was_taken(profile):
    assert profile.timings
    assert run_ranks(2, _backward_on_a_rank, threads=1, limit_s=240) == [4.0, 8.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_profiled_by_its_own_clock():
    profile = profile_model(
        "resnet18", input_shape=(3, 32, 32), num_classes=10, global_batch=32, device="cuda", precision="bf16"
    )
    assert profile.device.type == "cuda"
    assert "the host took" in profile.provenance.note
    for w in profile.whole:
        assert 0.8 < w.components_s / w.whole.median < 1.25
