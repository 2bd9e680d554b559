"""Training on one device without asa, and training with asa's code: the two sides that ``asa verify`` compares.

The plain side is the model as written, with stock modules, a loop over microbatches and a stock optimizer. The other
side is :meth:`asa.executor.training.worker.Worker.train` under the plan, on a data set. Dropout is off on both sides,
because their masks cannot be equal. A separate check makes sure that dropout keeps the mean of its input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asa.executor.consistency import conduct_of
from asa.executor.measuring.tolerance import distance, loss_error, noise, relative_error
from asa.executor.model.loss import loss_of
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import full_state
from asa.executor.model.votes import Votes
from asa.executor.observing.random_inputs import random_images
from asa.executor.training.optimizer import build_optimizer
from asa.executor.training.precision import LossScale
from asa.executor.training.prefetch import Prefetcher
from asa.executor.training.settings import WEIGHT_DECAY
from asa.executor.training.worker import LossCounter, Worker
from asa.ir.layout import bounds
from asa.ir.plan import Plan
from asa.launch import alive
from asa.sharding.randomness.depth import drops_samples
from asa.sharding.randomness.samples import SampleAlphaDropout, SampleContext, SampleDropout
from asa.zoo.data import ImageSet
from asa.zoo.data.batches import augment

MOMENTUM = 0.9
_SEED = 11
_SIGMAS = 8.0
_DRAWS = 1 << 16


def images_for(plan: Plan, samples: int, steps: int) -> ImageSet:
    """Random pixels and labels: ``samples`` images for each of ``steps`` steps."""
    return random_images(plan, samples * steps, torch.Generator().manual_seed(_SEED), flips=True)


def order_of(images: ImageSet, samples: int) -> tuple[Tensor, ...]:
    """Global indices of every step, randomly permuted, so that no loop is right by chance."""
    draw = torch.Generator().manual_seed(_SEED + 1)
    return torch.randperm(len(images), generator=draw).split(samples)


class NothingDropped(TorchFunctionMode):
    """Context in which torch's dropout functions return their input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if func is F.rrelu:
            lower, upper = (
                kwargs.get(name, args[i] if len(args) > i else usual)
                for i, name, usual in ((1, "lower", 1 / 8), (2, "upper", 1 / 3))
            )
            return F.leaky_relu(args[0] if args else kwargs["input"], (lower + upper) / 2)
        return func(*args, **kwargs)


_DROPPING = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
     torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout}
)  # fmt: skip


def _silenced(model: nn.Module) -> nn.Module:
    """``model`` with all its dropout modules switched off or replaced by identities."""
    for path, child in list(model.named_modules()):
        if isinstance(child, nn.modules.dropout._DropoutNd):
            child.p = 0.0
        elif isinstance(child, nn.MultiheadAttention | nn.RNNBase):
            child.dropout = 0.0
        elif path and (type(child).__name__ == "StochasticDepth" or drops_samples(child) is not None):
            model.set_submodule(path, nn.Identity())
    return model


def plain_steps(
    plan: Plan, model: nn.Module, images: ImageSet, order: tuple[Tensor, ...], device: torch.device, *,
    microbatches: int, lr: float, turned: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """(losses, tensors): losses of every step, and weights and buffers after the last one, of ``model`` trained in
    float64 on one device.

    With ``turned``, the samples of every microbatch are reversed, which changes nothing in exact arithmetic.
    """
    model = convert(_silenced(model), torch.float64).to(device)
    if not model.training:
        model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = WEIGHT_DECAY[plan.optimizer]
    optimizer: torch.optim.Optimizer
    if plan.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, weight_decay=decay)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
    losses = []
    with NothingDropped():
        for indices in order:
            optimizer.zero_grad()
            total = 0.0
            for j in range(microbatches):
                first, last = bounds(len(indices), microbatches, j)
                rows = indices[first:last].flip(0) if turned else indices[first:last]
                x = torch.stack([_sample(images, int(i)) for i in rows]).to(device)
                loss = _loss(model(x), images.labels[rows].to(device)) * (len(rows) / len(indices))
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
                alive.beat()
            optimizer.step()
            losses.append(total)
    named = dict((*model.named_parameters(), *model.named_buffers()))
    return losses, {name: tensor.detach().cpu().clone() for name, tensor in named.items()}


def _sample(images: ImageSet, index: int) -> Tensor:
    """One training image as model input, float64 [C, H, W]: shifted and mirrored, then normalized."""
    pixels = images.images[index : index + 1]
    moved = augment(pixels, torch.tensor([index]), seed=_SEED, epoch=0, flips=images.flips)[0].double() / 255
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (images.mean, images.std))
    return (moved - mean) / std


def _loss(output: Any, labels: Tensor) -> Tensor:
    if isinstance(output, Tensor) and output.dim() == 2:
        return F.cross_entropy(output, labels)
    return loss_of(output, labels)


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert real tensors of ``model`` to ``dtype``, and complex ones to its complex counterpart (``to`` would drop
    imaginary parts); returns ``model``."""
    kinds = {False: dtype, True: dtype.to_complex()}

    def converted(t: Tensor) -> Tensor:
        return t.to(kinds[t.is_complex()]) if t.is_floating_point() or t.is_complex() else t

    return model._apply(converted)


def trained_steps(
    model: ParallelModel, images: ImageSet, order: tuple[Tensor, ...], votes: Votes, *, lr: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights like those of :func:`plain_steps`, from asa's training code under the plan (collective)."""
    model.context.silent = True
    optimizer = build_optimizer(model.plan.optimizer, model.updated, lr=lr, offloaded=model.offloaded)
    conduct = conduct_of(model, optimizer, votes)
    worker = Worker(
        model=model,
        optimizer=optimizer,
        conduct=conduct,
        scale=LossScale("fp32"),
        votes=votes,
        precision="fp32",
        seed=_SEED,
        prefetcher=Prefetcher(images, pin=False),
        dtype=torch.float64,
    )
    model.train()
    counter = LossCounter(model.device)
    losses = []
    with NothingDropped():
        for step, indices in enumerate(order):
            if step + 1 < len(order):
                worker.expect(lambda following=order[step + 1]: following)  # type: ignore[misc]
            worker.train(images, indices, epoch=0, step=step, counter=counter)
            sums = votes.gather(counter.take())
            losses.append(math.fsum(rank[0] for rank in sums) / max(1.0, math.fsum(rank[2] for rank in sums)))
    worker.synchronize()
    if conduct is not None:
        conduct.close()
    return losses, full_state(model)


def dropout_errors(model: ParallelModel) -> Iterator[tuple[str, float, float]]:
    """(what, error, allowed) for every kind of dropout in ``model``: the error of the mean of its output over one
    tensor, and the error allowed for the random spread of that mean."""
    kinds = set()
    for component in model.components:
        for module in component.modules():
            for dropout in (module, getattr(module.__dict__.get("forward"), "_dropout", None)):
                if isinstance(dropout, SampleDropout) and 0 < dropout.p < 1:
                    kinds.add((type(dropout), dropout.p, dropout.whole_from, dropout.scaled))
    for kind, p, whole_from, scaled in sorted(kinds, key=str):
        yield (f"mean of dropout p={p:g}", *_mean_error(kind, p, whole_from, scaled))


def _mean_error(kind: type[SampleDropout], p: float, whole_from: int | None, scaled: bool) -> tuple[float, float]:
    samples = 1 << 8 if whole_from != 1 else _DRAWS
    context = SampleContext(seed=_SEED, samples=torch.arange(samples), total=samples)
    dropout = kind(p, site="mean", context=context, whole_from=whole_from, scaled=scaled).train()
    shape = (samples, *((_DRAWS // samples,) if whole_from != 1 else ()))
    draw = torch.Generator().manual_seed(_SEED)
    ones = torch.ones(*shape, *((1,) if whole_from is not None else ()), dtype=torch.float64)
    x = torch.randn(ones.shape, dtype=torch.float64, generator=draw) if kind is SampleAlphaDropout else ones
    y = dropout(x)
    if kind is SampleAlphaDropout:  # keeps mean and variance of a standard normal input
        return abs(float(y.mean()) - float(x.mean())) + abs(float(y.var()) - 1), _SIGMAS * 4 / math.sqrt(_DRAWS)
    expected = 1.0 if scaled else 1 - p
    spread = math.sqrt(p / (1 - p)) if scaled else math.sqrt(p * (1 - p))
    return abs(float(y.mean()) - expected), _SIGMAS * spread / math.sqrt(_DRAWS)


@dataclass(frozen=True)
class Deviation:
    """Difference of two runs at the tensor ``name``, the one with the largest ratio of ``error`` to ``allowed``."""

    name: str
    error: float
    allowed: float


Run = tuple[list[float], dict[str, Tensor]]


def compared(
    trained: Run, plain: Run, turned: Run, *, floor_factor: float, tolerance: float, drift: float | None
) -> Deviation:  # fmt: skip
    """Difference between the training of a plan and the plain one. The noise of the plain one is its difference from
    the run with ``turned`` samples.

    If gradients are compressed, ``drift`` is the allowed relative difference of losses, and of all weights as one
    vector; it replaces the other limits.
    """
    losses = max(
        (
            Deviation("losses", loss_error(a, b), max(tolerance, floor_factor * noise(loss_error(c, b))))
            for a, b, c in zip(trained[0], plain[0], turned[0], strict=True)
        ),
        key=_share,
    )
    if drift is not None:
        common = {n: t for n, t in plain[1].items() if n in trained[1]}
        return max(
            Deviation("all weights", distance(trained[1], common), drift), replace(losses, allowed=drift), key=_share
        )
    tensors = [losses]
    for name, reference in plain[1].items():
        if not (reference.is_floating_point() or reference.is_complex()):
            continue
        floor = noise(relative_error(turned[1][name], reference))
        # Tensors that a trace does not use are not in the plan, and training does not change them.
        error = relative_error(trained[1][name], reference) if name in trained[1] else 0.0
        tensors.append(Deviation(name, error, max(tolerance, floor_factor * floor)))
    return max(tensors, key=_share)


def _share(deviation: Deviation) -> float:
    return math.inf if math.isnan(deviation.error) else deviation.error / deviation.allowed


def worst_dropout(model: ParallelModel, votes: Votes) -> Deviation:
    """The dropout, over all ranks, with the largest ratio of error to allowed error (collective)."""
    worst = max((Deviation(*entry) for entry in dropout_errors(model)), key=_share, default=Deviation("", 0.0, 1.0))
    shares = [rank[0] for rank in votes.gather([_share(worst)])]
    name, error, allowed = votes.tell([worst.name, worst.error, worst.allowed], source=shares.index(max(shares)))
    return Deviation(name, error, allowed)
