"""Settings of a run apart from its plan: data, optimization, and output."""

from __future__ import annotations

from typing import Literal

from asa.errors import UsageError
from asa.ir.codec import later, noun
from asa.ir.optimizers import check_optimizer
from asa.ir.plan import OptimizerName
from asa.zoo import specs

LEARNING_RATE: dict[OptimizerName, float] = {"sgd": 0.1, "adamw": 1e-3}
WEIGHT_DECAY: dict[OptimizerName, float] = {"sgd": 5e-4, "adamw": 0.05}


@noun
class TrainSettings:
    """Settings of one run. ``None`` means the optimizer's usual value, or what the plan says.

    Attributes:
        out: the run's directory.
        data: name of a data set (:mod:`asa.zoo.specs`), or ``loader`` if batches are the user's own.
        warmup: fraction of the run over which the learning rate rises (None: see :meth:`warm_up`).
        optimizer: a name of :mod:`asa.ir.optimizers`, or ``package.module:factory``.
        steps_per_epoch: number of steps after which an epoch ends early.
        log_every: largest number of steps between two lines of the log. Ranks also agree there whether to stop.
        timeout_s: seconds for which a rank waits for the others in any collective.
        replan: whether the plan may change between epochs.
        keep: number of checkpoints that are kept.
        save_every_s: seconds of training after which a checkpoint is also written inside an epoch; None: never.
        trace_steps: number of steps recorded for a timeline, once the run is warm.
        observe: whether every rank records its computation and its waiting for others
            (:mod:`asa.sharding.collectives.waits`).
        target_accuracy: validation figure, 0 to 1, to which time and cost are reported.
        price: price of one device for an hour, in any currency; costs are reported.
        tensorboard, track: trackers that get the run's curves (:mod:`asa.executor.training.trackers`).
    """

    out: str
    data: str = "cifar100"
    data_root: str | None = None
    download: bool = False
    epochs: int = 1
    steps_per_epoch: int | None = None
    lr: float | None = None
    optimizer: str | None = None
    momentum: float = 0.9
    weight_decay: float | None = None
    label_smoothing: float = 0.0
    warmup: float | None = None
    seed: int = 0
    batch_norm: Literal["local", "exact"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    resume: bool = False
    replan: bool = True
    tensorboard: bool = False
    log_every: int = 50
    keep: int = 2
    trace_steps: int = 0
    observe: bool = True
    save_every_s: float | None = None
    timeout_s: float = 300.0
    loss: str = later("cross_entropy")
    metric: str = later("accuracy")
    schedule: str = later("cosine")
    track: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = later(())
    target_accuracy: float | None = later(None)
    price: float | None = later(None)

    def __post_init__(self) -> None:
        if self.data != "loader":
            try:
                specs.check_form(self.data)
            except ValueError as error:
                raise UsageError(str(error)) from None
            for name, text in {"out": self.out, "data": self.data, "data_root": self.data_root or ""}.items():
                if text != text.encode(errors="replace").decode():
                    raise UsageError(f"{name} {text!a} is not UTF-8, as the files of a run are; rename it")
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        counts = {"epochs": self.epochs, "steps_per_epoch": self.steps_per_epoch, "log_every": self.log_every}
        for name, value in {**counts, "keep": self.keep, "threads": self.threads}.items():
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
        for name, rate in {"lr": self.lr, "timeout_s": self.timeout_s, "save_every_s": self.save_every_s}.items():
            if rate is not None and not 0 < rate < float("inf"):
                raise UsageError(f"{name} is {rate}; it must be above 0")
        if self.trace_steps < 0:
            raise UsageError(f"trace_steps is {self.trace_steps}; it must be at least 0")
        if not 0 <= (self.warmup or 0) < 1 or not 0 <= self.label_smoothing < 1 or not 0 <= self.momentum < 1:
            raise UsageError("warmup, label_smoothing and momentum must be at least 0 and below 1")

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the requested trackers, each once."""
        return tuple(dict.fromkeys((*self.track, *(("tensorboard",) if self.tensorboard else ()))))

    def peak_learning_rate(self, optimizer: OptimizerName) -> float:
        """The learning rate at the end of warm-up."""
        return LEARNING_RATE[optimizer] if self.lr is None else self.lr

    def warm_up(self, total_steps: int) -> float:
        """Fraction of a run of ``total_steps`` used for warm-up: 5 %, or 100 steps if that is more, but at most 30
        %."""
        if self.warmup is not None:
            return self.warmup
        return min(0.3, max(0.05, 100 / total_steps))
