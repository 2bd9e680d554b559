"""Emulated devices: nothing is computed, and everything else happens as it would."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

from asa.cli.emulated import EmulatedName, device, joined
from asa.cost.machine.estimate import estimate
from asa.executor.measuring import emulation
from asa.executor.measuring.emulation import EmulatedDevice
from asa.executor.model.votes import Votes
from asa.executor.observing.random_inputs import random_inputs
from asa.executor.running.emulated import EmulationOptions, borrowed, emulated_worker, measure_emulated
from asa.executor.training.worker import LossCounter
from asa.ir.cluster import Device
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.launch import run_ranks
from asa.strategies import offered
from planner_tests import nouns
from planner_tests.hand_plans import alternating, hand_plan, model_of, traced, uniform
from planner_tests.small_models import INPUT, build
from planner_tests.stage_plans import staged
from planner_tests.test_strategy_contract import BATCH, CLASSES, Recorder, declared, graph_of

FAST = Device(name="fast", type="cuda", memory_bytes=1 << 34, peak_fp32_flops=1e13, memory_bandwidth=1e12)


def profile_of(name: str) -> Profile:
    known = model_of(name, even=True).model_fingerprint
    return estimate(graph_of(name), FAST, model_spec=name, model_fingerprint=known, global_batch=16)


def plan_of(name: str, width: int, choose: Any, **options: Any) -> Plan:
    return hand_plan(
        model_of(name, even=True), width, choose, input_shape=INPUT, num_classes=CLASSES[name], global_batch=BATCH,
        **options,
    )  # fmt: skip


def _third_step(rank: int, plan: Plan, name: str) -> tuple[dict[str, int], bool]:
    """What the third step sends, and whether weights are as they were."""
    model = traced(build(name, even=True), INPUT)
    worker = emulated_worker(
        plan, borrowed(model), EmulatedDevice(profile=profile_of(name)), offered(), rank, Votes(), 30.0
    )  # fmt: skip
    images, tally, recorder = random_inputs(plan, torch.device("cpu")), LossCounter(torch.device("cpu")), Recorder()
    for step in range(3):
        recorder.seen.clear()
        with recorder:
            worker.train(images, torch.arange(plan.global_batch), epoch=0, step=step, counter=tally)
    first = dict(build(name, even=True).named_parameters())
    same = all(torch.equal(p, first[n]) for c in model.components for n, p in c.named_parameters())
    return dict(recorder.seen), same


@pytest.mark.parametrize(
    ("name", "choose", "options"),
    [
        ("blocks", uniform(2, 1), {}),
        ("plain", uniform(2, 1), {"data_strategy": lambda _i: "zero3"}),
        ("vision_transformer", uniform(1, 2), {}),
        ("perceptron", alternating(2), {}),
    ],
    ids=["ddp", "zero3", "tensor", "mixed"],
)
def test_what_is_sent_is_what_the_plan_says(name: str, choose: Any, options: Any) -> None:
    plan = plan_of(name, 2, choose, **options)
    seen = run_ranks(2, _third_step, plan, name, threads=1, timeout_s=120)
    said: Counter[str] = Counter()
    for c in declared(plan, graph_of(name)):
        said[c.op] += round(c.bytes)
    for sent, untouched in seen:
        assert untouched, "nothing was trained"
        for op in {*said, *sent}:
            assert sent.get(op, 0) == said[op], op


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_step_takes_what_the_profile_says(checkpoint: bool) -> None:
    """Sleeps have no upper bound on a busy machine, but they have a lower one."""
    profile = profile_of("blocks")
    plan = plan_of("blocks", 2, uniform(2, 1))
    plan = staged(plan, [1, 1], microbatches=2, checkpoint=lambda _i: checkpoint)
    options = EmulationOptions(budget_s=0.1, most_steps=3, warm_up=1)
    model = traced(build("blocks", even=True), INPUT)
    (found,) = measure_emulated([plan], model, EmulatedDevice(profile=profile), offered(), options)
    work = [t for t in profile.timings if t.microbatch == 8 and t.tensor_degree == 1]
    again = sum(t.forward.median for t in work) if checkpoint else 0.0
    first = sum(t.forward.median + t.backward.median for t in work) + again
    assert found.n >= 2
    assert found.p10 > first, "at the least one microbatch goes all the way, and back"


def test_the_name_of_an_emulated_device() -> None:
    assert device("cuda") == "cuda"
    found = device("emulated:some/gpu.json?dilation=2.5")
    assert isinstance(found, EmulatedName)
    assert (str(found.path), found.dilation, found.slower) == ("some/gpu.json", 2.5, ", 2.5 times slower")
    assert EmulatedName(path=found.path).slower == ""
    for wrong in ("gpu", "emulated:", "emulated:x?dilation=0", "emulated:x?dilation=1.2.3", "emulated:x?speed=2"):
        with pytest.raises(ValueError, match=r"emulated|dilation"):
            device(wrong)


def test_emulated_devices_neither_share_nor_disturb() -> None:
    cluster = joined(nouns.profile(), nouns.cluster(), dilation=2.0)
    assert cluster.device.type == nouns.profile().device.type
    assert cluster.contention == ()
    assert cluster.overlap.saving == 1
    assert cluster.levels == nouns.cluster().levels


@pytest.mark.parametrize(("apart", "slept"), [(True, [1.0, 0.7, 1.0]), (False, [1.0, 1.0, 1.0])])
def test_the_host_of_a_device_apart_launches_ahead(
    apart: bool, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.3 s of work between two kernels are hidden; 0.2 s of waiting are not, and nothing before a step's first one."""
    now, worked, sleeps = [0.0], [0.0], list[float]()

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        now[0] += seconds

    def host(work: float, wait: float) -> None:
        worked[0] += work
        now[0] += work + wait

    monkeypatch.setattr(emulation.time, "sleep", sleep)
    monkeypatch.setattr(emulation.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(emulation, "_host_s", lambda: worked[0])
    clock = emulation.DeviceClock(asynchronous=apart)
    host(0.3, 0.2)
    clock.busy(1.0)
    host(0.3, 0.2)
    clock.busy(1.0)
    clock.start()
    host(0.3, 0.2)
    clock.busy(1.0)
    assert sleeps == pytest.approx(slept)


def test_the_work_of_a_host_is_told_from_its_waiting() -> None:
    before = emulation._host_s()
    time.sleep(0.05)
    idle = emulation._host_s()
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    busy = emulation._host_s() - idle
    if not before and not busy:
        pytest.skip("this system does not say for how long a thread has worked")
    assert busy > 0.03
