"""Times of optimizer steps, component by component, and of the smallest operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from asa.ir.plan import OptimizerName
from asa.ir.profile import Stat, UpdateTiming
from asa.profiler.clock import Clock, Repeats, quiet, scaled, solo_clock_of, time_repeatedly

OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adamw")

_DISPATCHES = 200


def build_optimizer(name: OptimizerName, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """An optimizer like that of a real run, with momentum and weight decay, which take time, and a learning rate of
    zero.

    The arithmetic is that of a real step, but weights do not change.
    """
    tensors = list(parameters)
    # As in training, the fused kernel, which allocates nothing, if torch has it.
    fused = bool(tensors) and all(p.is_floating_point() for p in tensors)
    if name == "sgd":
        return torch.optim.SGD(tensors, lr=0.0, momentum=0.9, weight_decay=5e-4, fused=fused)
    return torch.optim.AdamW(tensors, lr=0.0, weight_decay=0.05, fused=fused)


def measure_updates(
    shards: Mapping[int, Mapping[str, nn.Module]],
    device: torch.device,
    *,
    slice_s: float,
    fused: bool | None = None,
) -> list[UpdateTiming]:
    """Step time of every component with parameters, under every optimizer, in about ``slice_s`` seconds.

    Components take their steps in turn, so that parameters are as far from the cache as in training.

    Args:
        shards: components by name, as held at each tensor degree; degree 1 holds all of them.
        fused: whether one optimizer over a whole model computes several components in one kernel launch (None: true on
            GPUs). The times at degree 1 are then scaled so that they add up to that one step, and those of the other
            degrees by the same factor.
    """
    fused = device.type != "cpu" if fused is None else fused
    clock = solo_clock_of(device)
    trained = {
        degree: {n: p for n, c in shards[degree].items() if (p := [q for q in c.parameters() if q.requires_grad])}
        for degree in sorted(shards)
    }
    timings: list[UpdateTiming] = []
    slices = len(OPTIMIZERS) * (len(trained) + fused)
    for name in OPTIMIZERS:
        factor = 1.0
        for degree, components in trained.items():  # degree 1 comes first
            stats = _sweep(name, components, clock, slice_s / slices)
            if fused and degree == 1 and stats:
                together = {"": list(dict.fromkeys(p for ps in components.values() for p in ps))}
                whole_s = _sweep(name, together, clock, slice_s / slices)[""].median
                factor = whole_s / max(sum(s.median for s in stats.values()), 1e-12)
            timings += [
                UpdateTiming(component=n, tensor_degree=degree, optimizer=name, step=scaled(s, factor))
                for n, s in stats.items()
            ]
    return timings


def _sweep(
    name: OptimizerName, components: Mapping[str, Sequence[Tensor]], clock: Clock, slice_s: float
) -> dict[str, Stat]:
    """Step every component in turn, repeatedly; gradients and optimizer state are dropped afterwards."""
    if not components:
        return {}
    optimizers = {n: build_optimizer(name, ps) for n, ps in components.items()}
    for parameters in components.values():
        for p in parameters:
            p.grad = torch.full_like(p, 1e-3)
    samples: dict[str, list[float]] = {n: [] for n in optimizers}
    try:
        for optimizer in optimizers.values():
            optimizer.step()
        repeats = Repeats(slice_s=slice_s, most=20)
        with quiet():
            while repeats.goes_on([[sum(s) for s in zip(*samples.values(), strict=True)]]):
                clock.synchronize()
                marks = [clock.mark()]
                for optimizer in optimizers.values():
                    optimizer.step()
                    marks.append(clock.mark())
                for n, seconds in zip(optimizers, clock.seconds(marks), strict=True):
                    samples[n].append(seconds)
    finally:
        for parameters in components.values():
            for p in parameters:
                p.grad = None
    return {n: Stat.of(s) for n, s in samples.items()}


def measure_dispatch(device: torch.device, *, slice_s: float = 0.2) -> float:
    """Seconds of an operation on a single element: the time that the host needs for every launch, forward or
    backward."""
    tiny = torch.zeros(1, device=device)

    def work() -> None:
        for _ in range(_DISPATCHES):
            tiny.add_(1.0)

    return time_repeatedly(work, solo_clock_of(device), slice_s=slice_s, warmups=2).median / _DISPATCHES
