"""Training by every strategy, and what goes wrong meanwhile."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner_tests.standin.plans import on_gpu, pipeline, same_losses, small_plan, trained, with_state
from planner_tests.standin.registry import scenario

_MIB = 2**20


@scenario
def trains_data_parallel_with_a_timeline(folder: Path) -> None:
    same_losses(folder, small_plan(ranks=2), trace_steps=1, steps_per_epoch=5)
    events = [json.loads(text) for text in (folder / "gpu" / "log.jsonl").read_text().splitlines()]
    told = next(e for e in events if e["event"] == "steps")["gpu"]
    assert told["clock_mhz"] == 1410
    assert told["utilisation"] == 0.75
    (epoch,) = json.loads((folder / "gpu" / "result.json").read_text())["epochs"]
    assert 0 < epoch["measurements"]["energy_j"] < 2 * 110 * epoch["seconds"]
    assert epoch["measurements"]["utilisation"] == 0.75


@scenario
def trains_in_bf16_with_state_on_the_host(folder: Path) -> None:
    plan = small_plan(precision="bf16", optimizer="adamw")
    trained(folder, replace(on_gpu(plan), components=tuple(replace(c, offload=True) for c in plan.components)))


@scenario
def trains_in_fp16_with_loss_scaling(folder: Path) -> None:
    trained(folder, on_gpu(small_plan(ranks=2, precision="fp16", microbatches=2)))


@scenario
def trains_sharded(folder: Path) -> None:
    for strategy in ("zero1", "zero2", "zero3"):
        (folder / strategy).mkdir()
        same_losses(folder / strategy, with_state(small_plan(ranks=2), strategy))


@scenario
def trains_with_parameter_servers(folder: Path) -> None:
    """On a rank that is not the first, too, whose state is on a GPU: it keeps no snapshots to be started again from."""
    from asa.ir.consistency import parse

    result = trained(folder, on_gpu(replace(small_plan(ranks=2), consistency=parse("ps_async:servers=2"))))
    assert all(math.isfinite(epoch["train_loss"]) for epoch in result["epochs"])


@scenario
def trains_tensor_parallel(folder: Path) -> None:
    same_losses(folder, small_plan(ranks=2, split=("classifier", "features.2.conv")))


@scenario
def trains_a_pipeline(folder: Path) -> None:
    same_losses(folder, pipeline())


@scenario
def trains_on_data_that_stay_on_the_host(folder: Path) -> None:
    from asa.executor.running import member

    member._RESIDENT_BYTES = 0
    trained(folder, on_gpu(small_plan()))


@scenario
def runs_out_of_memory_and_plans_again(folder: Path) -> None:
    os.environ["STANDIN_MEMORY"] = str(64 * _MIB)
    heard = []

    def less(shortage: Any, attempt: int, gpus: int) -> Any:
        heard.append(shortage)
        return on_gpu(small_plan(batch=16))

    import torch

    from asa.executor.training import worker

    usual = worker.played

    def hungry(model: Any, samples: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        if not heard and step == 1 and len(samples) > 16:
            torch.empty(128 * _MIB, dtype=torch.uint8, device=model.device)
        return usual(model, samples, step, *args, **kwargs)

    worker.played = hungry
    trained(folder, on_gpu(small_plan(batch=32)), relieve=less)
    assert heard, "nobody was asked for another plan"
    assert heard[0].asked_bytes == 128 * _MIB, heard


@scenario
def loses_a_device(folder: Path) -> None:
    from asa.launch import faults

    os.environ["ASA_FAULT"] = "kill@rank=1,step=1,point=forward"
    faults.arm()
    trained(
        folder,
        on_gpu(small_plan(ranks=2)),
        steps_per_epoch=2,
        regroup=lambda plan, ranks: on_gpu(small_plan(ranks=ranks)),
    )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@scenario
def recomputes_what_draws_on_a_gpu(folder: Path) -> None:
    import torch
    from torch import nn

    from asa.sharding.layers.recompute import recompute
    from asa.sharding.randomness.samples import SampleContext
    from asa.tracing import trace

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            return self.last(hidden * torch.rand_like(hidden))

    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        model, x = Noisy().to("cuda"), torch.randn(8, 4, device="cuda")
        traced = trace(model, x, name="noisy")
        for component in traced.components if again else ():
            recompute(component, SampleContext(samples=torch.arange(8, device="cuda"), total=8))
        torch.manual_seed(1)
        value = x
        for component in traced.components:
            value = component(value)[0]
        value.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
