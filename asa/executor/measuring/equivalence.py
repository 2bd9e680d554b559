"""Checks that training under a plan is numerically the same as on one device.

Weights are compared in float64, because in fp32 two orders of the same additions diverge within a few steps (a permuted
batch alone changes ResNet-50 by tens of per cent). Five steps at an ordinary learning rate are run under the plan and
on one device, from the same weights, samples and dropout masks, with BatchNorm over the same groups of samples. A
tensor passes if ``||delta|| <= max(1e-6, 10 * floor) * ||w||``. The floor is the relative difference between one device
and itself with samples permuted inside the batch.

Gradients of the first step are also compared in fp32. Their floor includes the difference between fp32 and float64 on
one device. Rounding can decide on which side of a ReLU's corner a tiny activation falls, and can so change the gradient
of a small channel. A real error shows on every batch, so gradients are compared on up to three batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.errors import UsageError
from asa.executor.consistency import conduct_of
from asa.executor.consistency.conduct import Conduct
from asa.executor.measuring import plain_training
from asa.executor.measuring.model_copies import ModelCopies
from asa.executor.measuring.tolerance import DRIFT, compressed, distance, loss_error, noise, norm, relative_error
from asa.executor.model.materialize import materialize
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.reasons import reasons
from asa.executor.model.state import full_gradients, full_state
from asa.executor.model.step import microbatches_of, played
from asa.executor.model.votes import Votes
from asa.executor.training.optimizer import build_optimizer
from asa.instruments.devices import device_of_rank
from asa.interfaces.strategy import Strategies
from asa.ir.codec import fingerprint
from asa.ir.consistency import CHANGES
from asa.ir.equivalence import Equivalence, TensorError
from asa.ir.layout import bounds
from asa.ir.plan import ONE_COPY, UNSPLIT, Plan, Stage
from asa.launch import run_ranks
from asa.tracing import TracedModel
from asa.zoo.inputs import example, of_tokens, random

WEIGHT_TOLERANCE = 1e-6
FLOOR_FACTOR = 10.0
GRADIENT_TOLERANCE_FP32 = 1e-4
_SMALL_GRADIENT = 1e-3
_FURTHER_BATCHES = 2
LEARNING_RATE = {"sgd": 0.01, "adamw": 1e-3}
STEPS = 5

ModelFactory = Callable[[], nn.Module | TracedModel]


@dataclass
class Trace:
    """Results of a run as full tensors on the CPU: losses, and first gradients (fp32) or last weights (float64)."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def on_one_device(plan: Plan, samples: int | None = None) -> Plan:
    """The plan of the same training on one device: the same microbatches, with every component whole.

    ``samples`` is the number of samples of the batch, if it may be too small for all of the plan's microbatches.
    """
    components = tuple(
        replace(c, stage=0, data=ONE_COPY, tensor=UNSPLIT, checkpoint=False, offload=False) for c in plan.components
    )
    microbatches = plan.num_microbatches if samples is None else microbatches_of(plan, samples)
    return replace(
        plan, components=components, stages=(Stage(ranks=(0,)),), schedule="none", compression="none",
        num_microbatches=microbatches, consistency=None,
    )  # fmt: skip


def default_samples(plan: Plan) -> int:
    """Default number of samples for the comparison, small enough for a laptop. A microbatch has at least 32 samples if
    the plan's batch allows it, because BatchNorm over a few values would amplify rounding and hide errors."""
    return min(plan.global_batch, max(4 * plan.num_ranks, 32) * plan.num_microbatches)


def _batch(plan: Plan, samples: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = random(plan.input_shape, samples, plan.num_classes, generator, dtype)
    of = plan.input_shape if of_tokens(plan.input_shape) else ()
    return x, torch.randint(plan.num_classes, (samples, *of), generator=generator)


def _convert(traced: TracedModel, dtype: torch.dtype) -> None:
    for component in traced.components:
        plain_training.convert(component, dtype)


def _run(
    plan: Plan, copies: ModelCopies, strategies: Strategies, rank: int, device: torch.device, *,
    samples: int, dtype: torch.dtype, steps: int, permute: bool = False, first: int = 0,
) -> Trace:  # fmt: skip
    """Train ``steps`` steps, beginning with step ``first``; ``permute`` reverses the samples inside every
    microbatch."""
    model = materialize(
        plan, copies.traced(), example(plan.input_shape), rank=rank, strategies=strategies, device=device,
        batch_norm="exact", prepare=lambda traced: _convert(traced, dtype), runs_discipline=True,
    )  # fmt: skip
    optimizer = build_optimizer(
        plan.optimizer, model.updated, lr=LEARNING_RATE[plan.optimizer], offloaded=model.offloaded
    )  # fmt: skip
    conduct = conduct_of(model, optimizer, Votes()) if plan.consistency is not None else None
    model.train()
    trace = Trace()
    for step in range(first, first + steps):
        x, y = _batch(plan, samples, step, dtype)
        model.zero_grad()
        trace.losses.append(_step(model, x, y, step, permute, conduct))
        # In float64 only the gradients of one device are needed, as the reference for the rounding of fp32.
        if step == first and (dtype == torch.float32 or (plan.num_ranks == 1 and not permute)):
            trace.gradients = full_gradients(model) if conduct is None else conduct.gradients()
        if conduct is not None:
            conduct.step(samples)
        else:
            optimizer.step()
            model.share_updates()
    if conduct is not None:
        conduct.synchronize()
        conduct.close()
    if dtype == torch.float64:
        model.average_buffers()  # as in a checkpoint
        trace.weights = full_state(model)
    model.close()
    del model, optimizer
    gc.collect()  # traced modules are reference cycles; free this run's memory before the next one
    return trace if rank == 0 else Trace()


def _step(
    model: ParallelModel, x: Tensor, y: Tensor, step: int, permute: bool, conduct: Conduct | None = None
) -> float:
    """Forward and backward of every microbatch; returns the mean loss over the whole batch."""
    samples = torch.arange(len(x))
    if permute:
        parts = [bounds(len(x), model.plan.num_microbatches, j) for j in range(model.plan.num_microbatches)]
        samples = torch.cat([samples[a:b].flip(0) for a, b in parts])
    batch, samples = len(samples), samples if conduct is None else conduct.share(samples)
    x, y = x[samples].to(model.device), y[samples].to(model.device)
    play = played if conduct is None else conduct.played
    loss = play(model, samples, step, lambda rows: x[rows], lambda rows: y[rows]).loss
    share = loss.double().cpu().view(1) * float(model.counts_rows()) * len(samples) / batch
    if model.whole_plan.num_processes > 1:
        dist.all_reduce(share)
    return float(share)


@dataclass(frozen=True)
class OneDevice:
    """Runs on one device: unchanged, and with samples permuted inside every microbatch."""

    one64: Trace
    one32: Trace
    permuted64: Trace
    permuted32: Trace


def one_device(
    rank: int, plan: Plan, copies: ModelCopies, strategies: Strategies, device: str, samples: int
) -> OneDevice:
    """The reference for ``plan``: its training on the one device of ``rank``. It is the same for all plans with equal
    :func:`on_one_device`."""
    local_device = device_of_rank(device, rank)
    one = on_one_device(plan, samples)

    def run(dtype: torch.dtype, steps: int, permute: bool = False) -> Trace:
        return _run(
            one, copies, strategies, 0, local_device, samples=samples, dtype=dtype, steps=steps, permute=permute
        )

    return OneDevice(
        run(torch.float64, STEPS),
        run(torch.float32, 1),
        run(torch.float64, STEPS, permute=True),
        run(torch.float32, 1, permute=True),
    )


def _measure(
    rank: int, plan: Plan, build: ModelFactory, strategies: Strategies, device: str, samples: int,
    reference: OneDevice | None, trained: bool,
) -> Equivalence | None:  # fmt: skip
    local_device, copies = device_of_rank(device, rank), ModelCopies(plan, build)

    def run(dtype: torch.dtype, steps: int) -> Trace:
        return _run(plan, copies, strategies, rank, local_device, samples=samples, dtype=dtype, steps=steps)

    plan64, plan32 = run(torch.float64, STEPS), run(torch.float32, 1)
    training = _training(rank, plan, copies, strategies, local_device, samples) if trained else None
    if rank:
        return None
    one = reference or one_device(rank, plan, copies, strategies, device, samples)
    return judge(plan, samples, plan64, plan32, one, training)


def _training(
    rank: int, plan: Plan, copies: ModelCopies, strategies: Strategies, device: torch.device, samples: int
) -> plain_training.Deviation | None:
    """Error of the training code compared with a plain loop. None if inputs are not images, and on all ranks but 0."""
    if len(plan.input_shape) != 3:
        return None
    images = plain_training.images_for(plan, samples, STEPS)
    order, rate = plain_training.order_of(images, samples), LEARNING_RATE[plan.optimizer]
    model = materialize(
        plan, copies.traced(), example(plan.input_shape), rank=rank, strategies=strategies, device=device,
        batch_norm="exact", prepare=lambda traced: _convert(traced, torch.float64), runs_discipline=True,
    )  # fmt: skip
    votes = Votes()
    trained = plain_training.trained_steps(model, images, order, votes, lr=rate)
    dropout = plain_training.worst_dropout(model, votes)
    model.close()
    del model
    gc.collect()
    if rank:
        return None
    plain = partial(
        plain_training.plain_steps, plan, images=images, order=order, device=device,
        microbatches=microbatches_of(plan, samples), lr=rate,
    )  # fmt: skip
    deviation = plain_training.compared(
        trained, plain(copies.module()), plain(copies.module(), turned=True), floor_factor=FLOOR_FACTOR,
        tolerance=WEIGHT_TOLERANCE, drift=None if plan.compression == "none" else DRIFT,
    )  # fmt: skip
    return max((deviation, dropout), key=lambda a: a.error / a.allowed)


def judge(
    plan: Plan, samples: int, plan64: Trace, plan32: Trace, one: OneDevice,
    training: plain_training.Deviation | None = None,
) -> Equivalence:  # fmt: skip
    """Compare the runs tensor by tensor, and return the verdict."""
    tensors = []
    for name, reference in one.one64.weights.items():
        if not (reference.is_floating_point() or reference.is_complex()):
            continue
        error, floor = (relative_error(t.weights[name], reference) for t in (plan64, one.permuted64))
        floor = noise(floor)
        allowed = max(WEIGHT_TOLERANCE, FLOOR_FACTOR * floor)
        tensors.append(TensorError(name=name, error=error, floor=floor, allowed=allowed))
    worst = max(tensors, key=lambda t: t.error / t.allowed)
    losses = zip(plan64.losses, one.one64.losses, one.permuted64.losses, strict=True)
    of_loss, loss_allowed = max(
        ((loss_error(a, b), max(WEIGHT_TOLERANCE, FLOOR_FACTOR * noise(loss_error(c, b)))) for a, b, c in losses),
        key=lambda loss: loss[0] / loss[1],
    )
    error, allowed, name = _worst_gradient(plan32, one.one32, one.one64, one.permuted32)
    fine = all(t.error <= t.allowed for t in tensors) and of_loss <= loss_allowed and error <= allowed
    fine = fine and (training is None or training.error <= training.allowed)
    discipline = plan.consistency
    promised = discipline is None or discipline.exact(plan.optimizer)
    changes: tuple[str, ...] = ()
    if discipline is not None and not promised:
        changes = (f"{discipline} changes training: {CHANGES[discipline.name]}",)
    verdict = Equivalence(
        equivalent=fine and promised, max_rel_error=worst.error, noise_floor=max(t.floor for t in tensors),
        worst_tensor=worst.name, allowed=worst.allowed, loss_error=of_loss, loss_allowed=loss_allowed,
        gradient_error_fp32=error, worst_gradient=name, gradient_allowed_fp32=allowed,
        dtype="float64", learning_rate=LEARNING_RATE[plan.optimizer], steps=STEPS, samples=samples,
        ranks=plan.num_processes, batch_norm="exact", plan_fingerprint=fingerprint(plan), tensors=tuple(tensors),
        training_error=None if training is None else training.error,
        training_allowed=None if training is None else training.allowed,
        training_tensor="" if training is None else training.name,
        discipline="" if promised else str(discipline), reasons=changes,
    )  # fmt: skip
    if plan.compression == "none":
        return verdict
    gradients = one.one32.gradients
    rounding = max(noise(distance(t.gradients, gradients)) for t in (one.permuted32, one.one64))
    return compressed(
        verdict, plan.compression, weights=distance(plan64.weights, one.one64.weights),
        gradients=distance(plan32.gradients, gradients), rounding=FLOOR_FACTOR * rounding,
    )  # fmt: skip


def _worst_gradient(plan32: Trace, one32: Trace, one64: Trace, permuted32: Trace) -> tuple[float, float, str]:
    """(error, allowed, name) of the first-step gradient with the largest ratio of error to allowed error."""
    # Some gradients are zero up to rounding (a bias before BatchNorm); their errors are relative to the norm of all.
    least = _SMALL_GRADIENT * sum(norm(g) ** 2 for g in one32.gradients.values()) ** 0.5
    errors = []
    for name, reference in one32.gradients.items():
        error, shuffled = (relative_error(t.gradients[name], reference, least) for t in (plan32, permuted32))
        # Shards of a convolution may use another algorithm with other rounding, which a permutation does not show.
        floor = max(noise(shuffled), noise(relative_error(one64.gradients[name], reference, least)))
        errors.append((error, max(GRADIENT_TOLERANCE_FP32, FLOOR_FACTOR * floor), name))
    return max(errors, key=lambda g: g[0] / g[1])


def first_gradients(
    rank: int, plan: Plan, build: ModelFactory, strategies: Strategies, device: str, samples: int, first: int
) -> tuple[float, float, str]:
    """On one rank: (error, allowed, name) of the worst fp32 gradient of step ``first``; zeros on all ranks but 0."""
    target, copies = device_of_rank(device, rank), ModelCopies(plan, build)

    def run(p: Plan, dtype: torch.dtype, permute: bool = False) -> Trace:
        return _run(
            p, copies, strategies, rank, target, samples=samples, dtype=dtype, steps=1, permute=permute, first=first
        )

    spread, one = run(plan, torch.float32), on_one_device(plan, samples)
    if rank:
        return 0.0, 0.0, ""
    return _worst_gradient(
        spread, run(one, torch.float32), run(one, torch.float64), run(one, torch.float32, permute=True)
    )


def confirmed(verdict: Equivalence, gradients: Callable[[int], tuple[float, float, str]]) -> Equivalence:
    """``verdict``; if only fp32 gradients differ, the verdict with the gradients of another batch on which they agree.

    ``gradients`` is :func:`first_gradients` of a given step. Two further batches are tried.
    """
    rest = all(t.error <= t.allowed for t in verdict.tensors) and verdict.loss_error <= verdict.loss_allowed
    rest = rest and (verdict.training_error or 0.0) <= (verdict.training_allowed or 0.0)
    if verdict.equivalent or verdict.compression != "none" or verdict.discipline or not rest:
        return verdict
    for further in range(1, 1 + _FURTHER_BATCHES):
        error, allowed, name = gradients(further * STEPS)
        if error <= allowed:
            return replace(
                verdict, equivalent=True, gradient_error_fp32=error, worst_gradient=name,
                gradient_allowed_fp32=allowed, gradient_batches=1 + further,
            )  # fmt: skip
    return replace(verdict, gradient_batches=1 + _FURTHER_BATCHES)


def verify(
    plan: Plan, build: ModelFactory, strategies: Strategies, *, device: str = "cpu", samples: int | None = None,
    timeout_s: float = 600.0, silence_s: float = 60.0, reference: OneDevice | None = None, trained: bool = True,
) -> Equivalence:  # fmt: skip
    """Train under ``plan`` on its ranks and on one device, and compare. Also compare the training code with a plain
    loop.

    Arguments:
        build: makes the model, with equal weights at every call.
        samples: number of samples of the batch; :func:`default_samples` if None.
        silence_s: seconds without any activity of a rank after which ranks count as hung.
        reference: an earlier result of :func:`one_device` for an equal training.
        trained: whether the training code is compared.

    Raises:
        WorkersFailedError: a rank died or hung.
        UsageError: the plan cannot be run here.
    """
    count = samples or default_samples(plan)
    least = plan.num_microbatches * max(2, *(layout.least for layout in plan.layouts()))
    if samples is not None and samples < least:
        raise UsageError(
            f"asked to compare on {samples} samples, {plan.num_microbatches} microbatches on {plan.num_ranks} ranks "
            f"need {least}; raise --samples, or leave it out"
        )
    start = partial(
        run_ranks,
        plan.num_processes,
        backend="nccl" if device == "cuda" else "gloo",
        threads=1,
        timeout_s=timeout_s,
        silence_s=silence_s,
    )
    verdict = start(_measure, plan, build, strategies, device, count, reference, trained)[0]
    assert verdict is not None
    outcome = confirmed(verdict, lambda first: start(first_gradients, plan, build, strategies, device, count, first)[0])
    # If the noise floor exceeds the tolerance, even one device differs from itself; find the reasons on one rank.
    if (
        outcome.compression != "none"
        or outcome.discipline
        or (outcome.equivalent and outcome.noise_floor <= WEIGHT_TOLERANCE)
    ):
        return outcome
    reasons_of_model = run_ranks(1, reasons, build, plan.input_shape, plan.num_classes, threads=1, timeout_s=timeout_s)
    return replace(outcome, reasons=reasons_of_model[0])
