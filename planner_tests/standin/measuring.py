"""Verification, rehearsal, profiles and probes, called from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner_tests.standin.plans import on_gpu, pipeline, small_plan, with_state
from planner_tests.standin.registry import scenario


@scenario
def verifies(folder: Path) -> None:
    from asa.executor.measuring.equivalence import verify
    from asa.strategies import offered
    from asa.zoo.models import build

    for plan in (with_state(small_plan(ranks=2), "zero3"), pipeline(), small_plan(ranks=2, split=("classifier",))):
        found = verify(
            on_gpu(plan), lambda: build("cnn", num_classes=10, input_shape=(1, 8, 8)), offered(), device="cuda"
        )
        assert found.equivalent, found


@scenario
def rehearses_a_rank_of_eight(folder: Path) -> None:
    import torch

    from asa.executor.measuring.rehearsal import rehearse
    from asa.strategies import offered
    from asa.zoo.models import build

    for plan in (
        small_plan(ranks=8, batch=32),
        with_state(small_plan(ranks=8, batch=32), "zero3"),
        small_plan(ranks=8, batch=32, split=("classifier",)),
    ):
        model = build("cnn", num_classes=10, input_shape=(1, 8, 8))
        found = rehearse(on_gpu(plan), model, rank=3, strategies=offered(), device=torch.device("cuda"), steps=2)
        assert found.components


@scenario
def names_what_draws_by_itself(folder: Path) -> None:
    """Noise of a model's own comes from the device's generator, and is seen there."""
    import torch

    from asa.profiler.measure import profile_module

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), _Noise(), torch.nn.Linear(8, 4))
    found = profile_module(
        model,
        torch.randn(2, 8),
        spec="noisy",
        num_classes=4,
        global_batch=8,
        device=torch.device("cuda", 0),
        time_limit_s=1.0,
    )
    assert any("random numbers" in note for note in found.graph.notes), found.graph.notes


@scenario
def shows_what_processes_can_do(folder: Path) -> None:
    from asa.launch import run_ranks

    run_ranks(2, _probed, backend="nccl", threads=1, timeout_s=60)


class _Noise:
    """Made when torch is there."""

    def __new__(cls) -> Any:
        import torch

        class Noise(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return x + torch.randn_like(x)

        return Noise()


def _probed(rank: int) -> None:
    import torch

    from asa.executor.model.votes import Votes
    from asa.executor.training.probe import probe

    found = probe(Votes(60.0), torch.device("cuda", rank))
    assert len(found.compute_s) == 2
    assert found.links


@scenario
def takes_tf32_and_gives_it_back(folder: Path) -> None:
    import torch

    from asa.instruments import execution

    usual = torch.get_float32_matmul_precision()
    for precision, expected in (("fp32", usual), ("tf32", "high"), ("tf32", "high"), ("fp32", usual)):
        execution.configure_kernels(torch.device("cuda"), precision)  # type: ignore[arg-type]
        assert torch.get_float32_matmul_precision() == expected
    assert torch.backends.cudnn.benchmark


@scenario
def measures_unequal_devices(folder: Path) -> None:
    import os

    from asa.profiler.interconnect import measure_cluster

    os.environ |= {"STANDIN_NAME": "NVIDIA A100-SXM4-80GB|NVIDIA H100 80GB HBM3", "STANDIN_NVLINK": "4"}
    found = measure_cluster(2, backend="nccl", time_limit_s=1.0)
    assert [d.name for d in found.devices or ()] == os.environ["STANDIN_NAME"].split("|"), found.devices
    assert "pairs of GPUs: 1 over NVLink (4 links each)" in found.source, found.source
    assert found.status == "measured"
    os.environ |= {"STANDIN_REASONS": "0x20"}
    found = measure_cluster(2, backend="nccl", time_limit_s=1.0)
    assert found.status == "estimated"
    assert "not to be trusted: rank 0: the GPU's clocks were held back by heat" in found.source, found.source


@scenario
def profiles_what_the_device_cannot_hold(folder: Path) -> None:
    """A microbatch does not fit after all: it is named, the others are measured."""
    import torch

    from asa.profiler import components, measure

    usual = components.measure_memory

    def more_than_there_is(chain: Any, x: Any) -> Any:
        if len(x) == 8:
            torch.empty(1 << 40, dtype=torch.uint8, device=x.device)
        return usual(chain, x)

    components.measure_memory = more_than_there_is
    # Nothing is left out for its time, whatever else this machine does.
    components.Forecast.seconds = lambda self, size: 0.0
    found = measure.profile_model(
        "cnn",
        input_shape=(1, 8, 8),
        num_classes=10,
        global_batch=16,
        device="cuda",
        time_limit_s=120.0,
        max_tensor_degree=1,
    )
    assert "microbatch 8: the device has not enough memory for it" in found.skipped, found.skipped
    assert {t.microbatch for t in found.timings} >= {4, 16}
    assert 8 not in {t.microbatch for t in found.timings}
