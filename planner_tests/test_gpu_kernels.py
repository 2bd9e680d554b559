"""On one GPU: kernels beside the CPU's, events beside the wall's clock, the allocator's numbers, what NVML says."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from asa.executor.model.loss import loss_of
from asa.instruments import execution, nvml
from asa.ir.shortage import asked, is_exhaustion
from asa.profiler.ceilings import measure_ceilings
from asa.profiler.clock import clock_of
from asa.profiler.machine import device_record, free_memory, require_precision
from planner_tests.small_models import INPUT, MODELS, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIB = 1 << 20


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss and gradients of a step, on the CPU."""
    loss = loss_of(model(x), y)
    loss.backward()
    found = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach().cpu()}


def still(model: nn.Module) -> nn.Module:
    """In training mode, but without random numbers."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


@pytest.mark.parametrize("name", sorted(MODELS))
def test_kernels_compute_what_the_cpu_does(name: str) -> None:
    x, y = torch.randn((8, *INPUT), dtype=torch.float64), torch.arange(8)
    theirs = gradients(still(build(name)).double(), x, y)
    ours = gradients(still(build(name)).double().to(gpu()), x.to(gpu()), y.to(gpu()))
    assert ours.keys() == theirs.keys()
    for n, value in theirs.items():
        torch.testing.assert_close(ours[n], value, rtol=1e-7, atol=1e-9, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["plain", "vision_transformer"])
def test_half_precision_is_near_the_whole_one(name: str, precision: Any) -> None:
    from asa.tracing.autocast import autocast

    require_precision(gpu(), precision)
    x, y = torch.randn((8, *INPUT), device=gpu()), torch.arange(8, device=gpu())
    model = still(build(name)).to(gpu())
    whole = loss_of(model(x), y)
    with autocast(precision, gpu()):
        output = model(x)
        half = loss_of(output, y)
    assert output.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert half.item() == pytest.approx(whole.item(), rel=0.05)


def test_tf32_is_taken_and_given_back() -> None:
    require_precision(gpu(), "tf32")
    a = torch.randn(512, 512, device=gpu())
    exact = a.double() @ a.double()
    errors = {}
    for precision in ("fp32", "tf32", "fp32"):
        execution.configure_kernels(gpu(), precision)
        errors.setdefault(precision, []).append(float((a @ a - exact).abs().max()))
    assert errors["tf32"][0] > 10 * errors["fp32"][0], "products took no TF32"
    assert errors["fp32"][0] == errors["fp32"][1], "TF32 stayed"


def test_channels_last_gives_the_same() -> None:
    x = torch.randn((8, *INPUT), device=gpu())
    model = still(build("blocks")).to(gpu())
    usual = model(x)
    other = model(execution.laid_out(x, "channels_last"))
    torch.testing.assert_close(other, usual, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compiled", ["components", "graphs"])
def test_compiled_components_train_the_same(compiled: Any) -> None:
    execution.require(gpu(), compiled)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(gpu())
    made = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(gpu())
    made.load_state_dict(plain.state_dict())
    execution.apply([made], compiled)
    losses: dict[str, list[float]] = {"plain": [], "made": []}
    for step in range(6):
        x, y = torch.randn(16, 32, device=gpu()), torch.arange(16, device=gpu()) % 8
        for name, model in (("plain", plain), ("made", made)):
            loss = loss_of(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None, step
                    p -= 0.1 * p.grad
                    p.grad = None
            losses[name].append(loss.item())
    assert losses["made"] == pytest.approx(losses["plain"], rel=1e-3)


def test_events_say_what_the_walls_clock_says() -> None:
    """Of work that is long enough, and waited for on both sides."""
    device, clock, side = gpu(), clock_of(gpu()), 256
    while True:
        a = torch.randn(side, side, device=device)
        a @ a
        torch.cuda.synchronize()
        began = time.perf_counter()
        start = clock.mark()
        for _ in range(8):
            a @ a
        marks = [start, clock.mark()]
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
        if wall > 0.02:
            break
        side *= 2
    assert clock.seconds(marks)[0] == pytest.approx(wall, rel=0.1, abs=1e-3)


def test_ceilings_are_below_the_data_sheets() -> None:
    """No card does more than 4 PFLOP/s or copies more than 20 TB/s: more would be work that was not waited for."""
    for precision in ("fp32", "fp16"):
        found = measure_ceilings(gpu(), precision)  # type: ignore[arg-type]
        assert found is not None
        assert 0 < found.flops_per_s < 4e15
        assert 0 < found.bytes_per_s < 2e13


def test_the_allocators_numbers_are_those_of_tensors() -> None:
    device = gpu()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    gone = torch.empty(8 * MIB, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_allocated(device) - before == kept.nbytes + gone.nbytes
    del gone
    assert torch.cuda.memory_allocated(device) - before == kept.nbytes
    assert torch.cuda.max_memory_allocated(device) - before == 12 * MIB
    assert torch.cuda.memory_reserved(device) >= torch.cuda.memory_allocated(device)
    assert 0 < free_memory(device) <= device_record(device).memory_bytes


def test_too_much_is_refused_and_says_how_much_was_asked() -> None:
    device = gpu()
    much = 2 * device_record(device).memory_bytes
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(much, dtype=torch.uint8, device=device)
    assert is_exhaustion(caught.value)
    assert asked(caught.value) == pytest.approx(much, rel=0.01)
    assert float(torch.ones(8, device=device).sum()) == 8, "and the device goes on"


def test_nvml_knows_the_card_that_torch_computes_on() -> None:
    card = nvml.card_of(gpu())
    assert card is not None, "NVML does not know this device"
    meter = nvml.Meter(card)
    seen = nvml.Watched([card.read()])
    a = torch.randn(1024, 1024, device=gpu())
    ends = time.perf_counter() + 0.3
    while time.perf_counter() < ends:
        a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
        seen.readings.append(card.read())
    for reading in seen.readings:
        if reading.clock_mhz is not None and reading.most_mhz is not None:
            assert 0 < reading.clock_mhz <= reading.most_mhz
        assert reading.utilisation is None or 0 <= reading.utilisation <= 1
    joules = meter.joules()
    assert joules is None or joules > 0
    assert nvml.names(1) in ([], [torch.cuda.get_device_name(gpu())]) or "MIG" in nvml.names(1)[0]
