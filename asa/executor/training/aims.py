"""Loss, metric and learning rate schedule of a run: by name, or from the user's own function.

``package.module:factory`` is called, with ``num_classes`` if it takes that, and returns the function itself. So
``torch.nn:MultiMarginLoss`` is a loss. A loss must be a mean over samples, because only then do shards and microbatches
add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asa.errors import InvalidInputError, UsageError
from asa.executor.model.loss import Criterion, hits_of, logits_of
from asa.executor.training.optimizer import cosine
from asa.executor.training.settings import TrainSettings
from asa.zoo.foreign import accepted, at_home, factory, first_line

Score = Callable[[Any, Tensor], Tensor]
"""Function from a model's output and labels to one score per sample [N]; validation reports the mean."""
_PROBED, _PROBED_CLASSES = 4, 256
"""Most samples on which functions are tried: of maps and tokens, and of single classes, as many different ones as there
are, because a loss with weights of classes is a mean over samples of one class."""


def _one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    return F.one_hot(labels, logits.shape[1]).movedim(-1, 1).to(logits.dtype)


_ONE_EACH = "top5 needs one prediction per sample, and this model gives more; use --metric accuracy"


def _top5(output: Any, labels: Tensor) -> Tensor:
    logits = logits_of(output)
    if logits.dim() != 2:
        raise UsageError(_ONE_EACH)
    return (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).any(1).float()


LOSSES: Mapping[str, Criterion | None] = {
    "cross_entropy": None,
    "mse": lambda logits, labels: F.mse_loss(logits.softmax(1), _one_hot(logits, labels)),
    "bce": lambda logits, labels: F.binary_cross_entropy_with_logits(logits, _one_hot(logits, labels)),
}
"""Losses by name, on logits [N, K, ...] and labels int64 [N, ...]. None stands for the built-in loss."""
METRICS: Mapping[str, Score] = {"accuracy": hits_of, "top5": _top5}
SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "cosine": cosine,
    "linear": lambda progress: 1 - progress,
    "constant": lambda _: 1.0,
    "step": lambda progress: 0.1 ** min(2, int(3 * progress)),
}
"""Schedules by name. A schedule maps the fraction of the run after warm-up, 0 to 1, to the fraction of the peak
rate."""


@dataclass(frozen=True, kw_only=True)
class Aims:
    """The functions behind the names in a run's settings."""

    criterion: Criterion | None
    score: Score
    schedule: Callable[[float], float]

    @classmethod
    def of(cls, settings: TrainSettings, num_classes: int, device: torch.device | None = None) -> Aims:
        """The loss, metric and schedule of ``settings``. Modules among them are moved to ``device``.

        Raises:
            UsageError: an unknown name.
            InvalidInputError: a module that cannot be imported, or a factory that fails.
        """
        resolve = partial(_resolve, num_classes=num_classes, device=device)
        schedule = resolve("schedule", settings.schedule, SCHEDULES)
        return cls(
            criterion=resolve("loss", settings.loss, LOSSES),
            score=resolve("metric", settings.metric, METRICS),
            schedule=partial(_share, settings.schedule, schedule),
        )

    def try_out(self, settings: TrainSettings, labels: Tensor, num_classes: int) -> None:
        """Check the functions on ``labels`` (int64 [n, ...]) and random logits.

        Raises:
            UsageError: the metric is for one prediction per sample, and there are more, or nothing could miss it.
            InvalidInputError: one fails, the loss is not a mean over samples, the metric is not one number per sample,
                or the schedule returns no number.
        """
        if self.score is _top5 and labels.dim() > 1:
            raise UsageError(_ONE_EACH)
        if self.score is _top5 and num_classes <= 5:
            raise UsageError(f"top5 of {num_classes} classes is always 100 %; use --metric accuracy")
        labels = _probed(labels)
        maps = (len(labels), num_classes, *labels.shape[1:])
        logits = torch.randn(maps, generator=torch.Generator().manual_seed(0))
        if self.criterion is not None:
            criterion, spec = self.criterion, settings.loss
            if isinstance(criterion, nn.Module) and any(p.requires_grad for p in criterion.parameters()):
                raise InvalidInputError(
                    f"loss {spec!r} has parameters of its own, which the optimizer of the model would not update; make "
                    "them parameters of the model, or set requires_grad to False"
                )

            def loss(rows: slice) -> float:
                value = _tried("loss", spec, criterion, logits[rows].requires_grad_(), labels[rows])
                if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                    raise InvalidInputError(f"loss {spec!r} gives no single number with a gradient")
                number = float(value.detach())
                if not math.isfinite(number):
                    raise InvalidInputError(f"loss {spec!r} is {number} for ordinary outputs; it must be finite")
                return number

            parts = [loss(slice(i, i + 1)) for i in range(len(labels))]
            whole_loss, mean = loss(slice(None)), sum(parts) / len(parts)
            if not abs(whole_loss - mean) <= 1e-4 * max(1e-3, abs(mean)):
                raise InvalidInputError(
                    f"loss {spec!r} is not a mean over samples: {whole_loss:.6g} for {len(parts)} of them, {mean:.6g} "
                    "for each by itself on average, so microbatches and ranks would not add up; asa.Job takes any loss"
                )
        if self.score is not hits_of and self.score is not _top5:
            figures = _tried("metric", settings.metric, self.score, logits, labels)
            if not isinstance(figures, Tensor) or figures.shape != labels.shape[:1]:
                raise InvalidInputError(
                    f"metric {settings.metric!r} does not give one figure for each of the samples; validation reports "
                    "the mean of such figures"
                )
        for progress in (0.0, 0.5, 1.0):
            self.schedule(progress)


def _probed(labels: Tensor) -> Tensor:
    """Some of ``labels`` to try functions on; tokens [n, T] become [n * T]."""
    if labels.dim() == 1:
        classes = labels.unique()
        if len(classes) >= _PROBED:
            return classes[torch.linspace(0, len(classes) - 1, min(len(classes), _PROBED_CLASSES)).long()]
        return classes.repeat(_PROBED)[: max(_PROBED, len(classes))] if len(labels) >= _PROBED else labels
    rows = labels[torch.linspace(0, len(labels) - 1, min(len(labels), _PROBED)).long()]
    return rows.flatten() if rows.dim() == 2 else rows


def _share(spec: str, schedule: Callable[[float], Any], progress: float) -> float:
    """The share of the peak rate that ``schedule`` gives at ``progress``.

    Raises:
        InvalidInputError: it fails, or gives no number from 0 up.
    """
    value = _tried("schedule", spec, schedule, progress)
    try:
        share = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        share = math.nan
    if not 0 <= share < math.inf:
        raise InvalidInputError(
            f"schedule {spec!r} gives {value!r:.60} at {progress:g} of the run; it must give a share of the peak rate, "
            "from 0 up"
        )
    return share


_WANTED = {
    "loss": "a function of outputs and labels",
    "metric": "a function of outputs and labels, which gives one figure for each sample",
    "schedule": "a function of the progress of the run, 0 to 1",
}


def _resolve(
    what: str, spec: str, choices: Mapping[str, Any], *, num_classes: int, device: torch.device | None
) -> Any:  # fmt: skip
    if ":" not in spec:
        if spec not in choices:
            raise UsageError(f"no {what} is called {spec!r}; there are {', '.join(choices)} and package.module:factory")
        return choices[spec]
    with at_home():
        function = factory(spec, what)
        result = _tried(what, spec, function, **accepted(function, {"num_classes": num_classes}))
    if not callable(result):
        raise InvalidInputError(f"{what} {spec!r}: the factory returned a {type(result).__name__}, not {_WANTED[what]}")
    return result.to(device) if isinstance(result, nn.Module) and device is not None else result


def _tried(what: str, spec: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    try:
        return function(*args, **named)
    except (Exception, SystemExit) as error:
        raise InvalidInputError(f"{what} {spec!r} failed with {first_line(error)}") from None
