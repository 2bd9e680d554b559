"""Ways of computing a component: what is measured is what is planned and run, and numbers stay what they were."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import nouns
import pytest
import torch
import training
from forked import asa

from asa.cli.choose import fastest
from asa.errors import UnavailableError
from asa.executor.running.run import train
from asa.instruments import execution
from asa.ir import codec
from asa.ir.plan import Plan
from asa.ir.profile import Profile, Stat
from asa.profiler.ceilings import measure_ceilings
from asa.profiler.paths import profile_path
from asa.scheduler import adapt
from asa.strategies import offered


def loss(out: Path, **changes: Any) -> float:
    made = replace(training.plan(ranks=1), **changes)
    settings = training.settings(out, epochs=1, steps_per_epoch=2, lr=0.01, warmup=0.0)
    return train(made, settings, strategies=offered(), adapt=adapt)["epochs"][0]["train_loss"]


def test_a_plan_trains_to_the_same_loss_in_channels_last(tmp_path: Path) -> None:
    assert loss(tmp_path / "b", memory_format="channels_last") == pytest.approx(loss(tmp_path / "a"), rel=1e-5)


def test_components_are_compiled_as_asked_and_in_place() -> None:
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(3, 4)
    expected = module(x)
    compiled: list[object] = []
    module.compile = lambda **options: compiled.append(options)  # type: ignore[method-assign]
    execution.apply([module], "none")
    assert not compiled
    execution.apply([module], "graphs")
    assert compiled == [{"dynamic": False, "mode": "reduce-overhead"}]
    assert torch.equal(module(x), expected)


def test_steps_are_announced_only_while_components_run_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, what runs after a model that was compiled so is not taken for one."""
    announced: list[bool] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: announced.append(True))
    module = torch.nn.Linear(2, 2)
    module.compile = lambda **_: None  # type: ignore[method-assign]
    execution.apply([module], "graphs")
    assert execution.begin_step()
    del module
    gc.collect()
    assert not execution.begin_step()
    assert announced == [True]


def test_a_model_compiled_as_one_runs_so_on_one_device_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, usual = tmp_path / "told", torch.compile

    def traced_only(*args: Any, **options: Any) -> Any:
        with told.open("a") as file:  # by a rank, which is a process of its own
            file.write("compiled\n")
        return usual(*args, backend="eager", dynamic=False)

    plain = loss(tmp_path / "plain")
    monkeypatch.setattr(torch, "compile", traced_only)
    assert loss(tmp_path / "whole", compiled="whole") == pytest.approx(plain, rel=1e-5)
    assert told.read_text().splitlines() == ["compiled"]


def test_a_model_compiled_as_one_is_planned_for_one_device_alone(tmp_path: Path) -> None:
    whole = replace(nouns.profile(), compiled="whole")
    assert whole.step_s == whole.whole[0].whole.median
    codec.save(whole, tmp_path / "p.json")
    asa("plan", "p.json", "--gpus", "1", "-o", "plan.json", cwd=tmp_path)
    assert codec.load(Plan, tmp_path / "plan.json").compiled == "whole"
    said = asa("plan", "p.json", "--gpus", "2", cwd=tmp_path, code=2).stderr
    assert "compiled as one runs on one device, asked for 2" in said


class Shared(torch.nn.Module):
    """Components share one ``forward``, as these do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_every_one_of_many_components_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config, reset
    from torch._dynamo.utils import counters

    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: plain(self, backend="eager", dynamic=False))
    monkeypatch.setattr(config, "recompile_limit", 8)
    monkeypatch.setattr(config, "accumulated_recompile_limit", 256)
    reset()
    counters.clear()
    components = [Shared(width) for width in range(1, 13)]
    execution.apply(components, "components")
    for component in components:
        component(torch.ones(2, component.inner.in_features))
    assert counters["stats"]["unique_graphs"] == 12
    reset()


def test_images_alone_change_their_order() -> None:
    images, tokens = torch.randn(2, 3, 4, 4), torch.randn(2, 5, 3)
    assert execution.laid_out(images, "channels_last").is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(execution.laid_out(images, "channels_last"), images)
    assert execution.laid_out(tokens, "channels_last") is tokens
    assert execution.laid_out(images, "contiguous") is images


def test_graphs_without_a_gpu_are_refused() -> None:
    with pytest.raises(UnavailableError, match="CUDA graphs need a CUDA device"):
        execution.require(torch.device("cpu"), "graphs")


def faster(profile: Profile, by: float, **changes: Any) -> Profile:
    def sped(stat: Stat) -> Stat:
        return Stat(median=stat.median / by, p10=stat.p10 / by, p90=stat.p90 / by, n=stat.n)

    timings = tuple(replace(t, forward=sped(t.forward), backward=sped(t.backward)) for t in profile.timings)
    return replace(profile, timings=timings, **changes)


def test_of_ways_to_compute_the_one_measured_fastest_is_planned_from() -> None:
    plain, here = nouns.profile(), Path("p.json")
    compiled, slow = faster(plain, 2, compiled="components"), faster(plain, 0.5, memory_format="channels_last")
    found = fastest(plain, [(here, plain), (here, compiled), (here, slow)])
    assert found is not None
    assert found[1] is compiled
    assert fastest(compiled, [(here, plain), (here, compiled)]) is None
    other = faster(plain, 9, precision="bf16")
    assert fastest(plain, [(here, plain), (here, other)]) is None, "what is learnt would change"
    doubted = faster(plain, 9, compiled="graphs", provenance=replace(plain.provenance, disturbed="heat"))
    assert fastest(plain, [(here, plain), (here, doubted)]) is None
    assert len({profile_path(p) for p in (plain, compiled, slow)}) == 3


def test_ceilings_are_what_large_work_reaches() -> None:
    found = measure_ceilings(torch.device("cpu"), "fp32", slice_s=0.02)
    assert found is not None
    assert min(found.flops_per_s, found.bytes_per_s) > 1e6
