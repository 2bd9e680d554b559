"""Is training under a plan numerically the same as on one device? Measured so that the answer means something.

In fp32 two orders of the same additions drift apart within a few steps (a permuted batch alone moves ResNet-50 by
tens of per cent), so weights are compared in float64: five steps at an ordinary learning rate under the plan and on
one device, from the same weights, samples and dropout masks, with BatchNorm over the same groups of samples. A
tensor passes if ``||delta|| <= max(1e-6, 10 * floor) * ||w||``, where the floor is one device against itself with
samples permuted inside the batch. First-step gradients are compared in fp32 too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.executor.loss import loss_of
from asa.executor.materialize import ParallelModel, materialize
from asa.executor.optimizer import build_optimizer
from asa.executor.state import full_gradients, full_state
from asa.interfaces.strategy import Strategies
from asa.ir.codec import fingerprint
from asa.ir.equivalence import Equivalence, TensorError
from asa.ir.layout import bounds
from asa.ir.plan import DataDegree, Plan, Stage, TensorDegree
from asa.launch import run_ranks

WEIGHT_TOLERANCE = 1e-6
FLOOR_FACTOR = 10.0
GRADIENT_TOLERANCE_FP32 = 1e-4
LEARNING_RATE = {"sgd": 0.05, "adamw": 1e-3}
STEPS = 5

ModelFactory = Callable[[], nn.Module]


@dataclass
class Trace:
    """What a run of a few steps left behind: losses, first gradients, last weights; full tensors, on the CPU."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def alone(plan: Plan) -> Plan:
    """The same training on one device: same microbatches, every component whole."""
    whole = tuple(
        replace(
            c, stage=0, data=DataDegree(strategy="replicate", degree=1), tensor=TensorDegree(strategy="none", degree=1)
        )
        for c in plan.components
    )
    return replace(plan, components=whole, stages=(Stage(ranks=(0,)),), schedule="none")


def default_samples(plan: Plan) -> int:
    """A batch large enough for BatchNorm on every rank and small enough for a laptop."""
    return min(plan.global_batch, max(8, 4 * plan.num_ranks * plan.num_microbatches))


def _batch(plan: Plan, samples: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn((samples, *plan.input_shape), generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(plan.num_classes, (samples,), generator=generator)


def _run(
    plan: Plan, build: ModelFactory, strategies: Strategies, rank: int, device: torch.device, *,
    samples: int, dtype: torch.dtype, steps: int, permute: bool = False,
) -> Trace:  # fmt: skip
    """Train ``steps`` steps; ``permute`` reverses the samples inside every microbatch."""
    example = torch.zeros((2, *plan.input_shape), dtype=torch.float32)
    model = materialize(
        plan, build(), example, rank=rank, strategies=strategies, device=device, batch_norm="exact",
        prepare=lambda traced: [c.to(dtype) for c in traced.components] and None,
    )  # fmt: skip
    optimizer = build_optimizer(plan.optimizer, model.parameters(), lr=LEARNING_RATE[plan.optimizer])
    model.train()
    trace = Trace()
    for step in range(steps):
        x, y = _batch(plan, samples, step, dtype)
        optimizer.zero_grad(set_to_none=True)
        trace.losses.append(_step(model, plan, x, y, step, permute))
        if step == 0:
            trace.gradients = full_gradients(model)
        optimizer.step()
    trace.weights = full_state(model)
    model.close()
    return trace


def _step(model: ParallelModel, plan: Plan, x: Tensor, y: Tensor, step: int, permute: bool) -> float:
    """Forward and backward of every microbatch; the mean loss over the whole batch."""
    total, count = 0.0, plan.num_microbatches
    for j in range(count):
        start, stop = bounds(len(x), count, j)
        rows = torch.arange(start, stop)
        if permute:
            rows = rows.flip(0)
        read, kept = (slice(*r) for r in (model.input_rows(len(rows)), model.output_rows(len(rows))))
        labels = y[rows[kept]].to(model.device)

        def backward(rows: Tensor = rows, read: slice = read, labels: Tensor = labels) -> float:
            output = model(x[rows[read]].to(model.device), rows, step)
            loss = loss_of(output, labels) * model.loss_scale(len(rows)) * (len(rows) / len(x))
            loss.backward()
            return float(loss.detach()) / model.layouts[-1].data

        if j + 1 < count:
            with model.no_sync():
                total += backward()
        else:
            total += backward()
    share = torch.tensor([total if model.counts_rows() else 0.0], dtype=torch.float64)
    if plan.num_ranks > 1:
        dist.all_reduce(share)
    return float(share)


def _error(value: Tensor, reference: Tensor) -> float:
    delta = float(torch.linalg.vector_norm(value.double() - reference.double()))
    norm = float(torch.linalg.vector_norm(reference.double()))
    return 0.0 if delta == 0 else delta / norm if norm > 0 else float("inf")


@dataclass(frozen=True)
class _Outcome:
    plan64: Trace
    plan32: Trace
    one64: Trace
    one32: Trace
    permuted64: Trace
    permuted32: Trace


def _measure(
    rank: int, plan: Plan, build: ModelFactory, strategies: Strategies, device: str, samples: int
) -> _Outcome | None:
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)

    def run(p: Plan, dtype: torch.dtype, steps: int, permute: bool = False) -> Trace:
        return _run(p, build, strategies, rank, place, samples=samples, dtype=dtype, steps=steps, permute=permute)

    plan64, plan32 = run(plan, torch.float64, STEPS), run(plan, torch.float32, 1)
    if rank:
        return None
    one = alone(plan)
    return _Outcome(
        plan64, plan32, run(one, torch.float64, STEPS), run(one, torch.float32, 1),
        run(one, torch.float64, STEPS, permute=True), run(one, torch.float32, 1, permute=True),
    )  # fmt: skip


def judge(outcome: _Outcome, plan: Plan, samples: int) -> Equivalence:
    """Compare the runs, tensor by tensor."""
    tensors = []
    for name, reference in outcome.one64.weights.items():
        if not reference.is_floating_point():
            continue
        error, floor = (_error(t.weights[name], reference) for t in (outcome.plan64, outcome.permuted64))
        allowed = max(WEIGHT_TOLERANCE, FLOOR_FACTOR * floor)
        tensors.append(TensorError(name=name, error=error, floor=floor, allowed=allowed))
    worst = max(tensors, key=lambda t: t.error / t.allowed)
    losses = zip(outcome.plan64.losses, outcome.one64.losses, outcome.permuted64.losses, strict=True)
    loss_excess = [
        (abs(a - b) / abs(b), max(WEIGHT_TOLERANCE, FLOOR_FACTOR * abs(c - b) / abs(b))) for a, b, c in losses
    ]
    gradients = [
        (_error(outcome.plan32.gradients[n], g), max(GRADIENT_TOLERANCE_FP32,
         FLOOR_FACTOR * _error(outcome.permuted32.gradients[n], g)), n)
        for n, g in outcome.one32.gradients.items()
    ]  # fmt: skip
    gradient_error, gradient_allowed, worst_gradient = max(gradients, key=lambda g: g[0] / g[1])
    fine = (
        all(t.error <= t.allowed for t in tensors)
        and all(e <= a for e, a in loss_excess)
        and all(e <= a for e, a, _ in gradients)
    )
    return Equivalence(
        equivalent=fine, max_rel_error=worst.error, noise_floor=max(t.floor for t in tensors),
        worst_tensor=worst.name, allowed=worst.allowed, loss_error=max(e for e, _ in loss_excess),
        gradient_error_fp32=gradient_error, worst_gradient=worst_gradient, gradient_allowed_fp32=gradient_allowed,
        dtype="float64", learning_rate=LEARNING_RATE[plan.optimizer], steps=STEPS, samples=samples,
        ranks=plan.num_ranks, batch_norm="exact", plan_fingerprint=fingerprint(plan), tensors=tuple(tensors),
    )  # fmt: skip


def verify(
    plan: Plan, build: ModelFactory, strategies: Strategies, *, device: str = "cpu", samples: int | None = None,
    timeout_s: float = 600.0,
) -> Equivalence:  # fmt: skip
    """Train under ``plan`` on its ranks and on one device, and compare.

    ``build`` makes the model, with equal weights at every call; ``samples`` is the batch (default:
    :func:`default_samples`).

    Raises:
        WorkersFailedError: a rank died. UsageError: the plan cannot be run here.
    """
    count = samples or default_samples(plan)
    backend = "nccl" if device == "cuda" else "gloo"
    results = run_ranks(
        plan.num_ranks,
        _measure,
        plan,
        build,
        strategies,
        device,
        count,
        backend=backend,
        threads=1,
        timeout_s=timeout_s,
    )
    outcome = results[0]
    assert outcome is not None
    return judge(outcome, plan, count)
