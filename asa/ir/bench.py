"""One training under every strategy, measured side by side: what ``asa bench`` writes."""

from __future__ import annotations

from typing import Literal

from asa.errors import InvalidInputError
from asa.ir.codec import later, noun
from asa.ir.notebook import shown
from asa.ir.plan import Assignment, OptimizerName
from asa.ir.profile import Precision, Stat


@noun
class AccuracyPoint:
    """Validation after ``epoch`` epochs (a fraction inside one), ``seconds`` of training into the run."""

    epoch: float
    seconds: float
    train_loss: float
    validation_loss: float
    validation_accuracy: float


@noun
class BenchResult:
    """One cell: one model under one strategy on ``ranks`` ranks.

    A cell that could not be run is still here, with ``why_not`` saying why and no ``step_time_s``.
    ``step_time_s`` is the measured step over all rounds; ``communication_s`` the exposed part of it, None where
    it was not tracked. Memory is the active peak of the rank that holds most, by the same count on both sides.
    ``components`` is the assignment that ran, ``plan_fingerprint`` the plan it came from. ``communication_low_s`` and
    ``communication_high_s`` bound the exposed part with 95 %; below six pairs they are the least and the largest.

    ``samples_per_s`` is of steps with their ``data_wait_s``, the median wait for input. ``utilisation``, 0 to 1: the
    share of time in which the devices computed while this alone ran, by NVML, on CPUs the ranks' processor time over
    the wall's; of a prediction, the share of the step that computes. ``flops_per_s`` of all ranks, from the model's
    structure (backward: twice forward); ``mfu`` is that over the devices' peak. ``predicted_bubble_s``: the part of
    the predicted step in which stages wait for each other. ``state_memory_bytes``: weights, gradients and optimizer
    state of the fullest rank; ``reserved_memory_bytes``: what its allocator took from the device (CUDA). ``energy_j``
    of all devices a step; ``clock_mhz`` the slowest device's, ``throttled`` why clocks were held down.
    """

    model: str
    strategy: str
    ranks: int
    global_batch: int
    step_time_s: Stat | None
    predicted_step_time_s: float | None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    samples_per_s: float | None = None
    communication_s: float | None = None
    communication_low_s: float | None = None
    communication_high_s: float | None = None
    predicted_communication_s: float | None = None
    peak_memory_bytes: int | None = None
    predicted_memory_bytes: int | None = None
    peak_memory_bytes_per_rank: tuple[int, ...] | None = None
    plan_fingerprint: str | None = None
    components: tuple[Assignment, ...] = ()
    accuracy: tuple[AccuracyPoint, ...] = ()
    why_not: str = ""
    data_wait_s: float | None = later()
    samples_per_epoch: int | None = later()
    utilisation: float | None = later()
    flops_per_s: float | None = later()
    mfu: float | None = later()
    predicted_bubble_s: float | None = later()
    state_memory_bytes: int | None = later()
    reserved_memory_bytes: int | None = later()
    energy_j: float | None = later()
    clock_mhz: float | None = later()
    throttled: tuple[str, ...] = later(())
    schedule: str | None = later()
    num_microbatches: int | None = later()

    @property
    def whole_step_s(self) -> float | None:
        """Seconds from one step to the next, waiting for input included."""
        return None if self.step_time_s is None else self.step_time_s.median + (self.data_wait_s or 0.0)

    def __post_init__(self) -> None:
        if self.step_time_s is None and not self.why_not:
            raise InvalidInputError(f"{self.strategy} of {self.model} has neither a time nor a reason for none")


@noun
class ScalingPoint:
    """Step time of one strategy on ``ranks`` ranks; ``measured_s`` where that many ranks were really run."""

    model: str
    strategy: str
    ranks: int
    predicted_s: float | None
    measured_s: float | None


@noun
class Comparison:
    """Paired, interleaved rounds of two strategies: median of time(left) / time(right) and its 95 % interval.

    With ``left == right`` it is the A/A comparison: how far from 1 a ratio gets by noise alone. Below six pairs
    ``low`` and ``high`` are the least and the largest ratio, which cover less. ``others_cores``: cores that other
    processes kept busy meanwhile, beyond those that the ranks left idle; None where nobody looked.
    """

    model: str
    left: str
    right: str
    pairs: int
    ratio: float
    low: float
    high: float
    others_cores: float | None = None


@noun
class SealedPlan:
    """A plan as it stood before the first measurement, and the profile and cluster it was made from."""

    model: str
    strategy: str
    plan_fingerprint: str
    profile_fingerprint: str
    profile_created: str
    cluster: str
    cluster_fingerprint: str
    written: str


@noun
class BenchEnvironment:
    """The machine and the versions."""

    device_type: Literal["cpu", "cuda"]
    device_name: str
    num_devices: int
    cpu_cores: int
    backend: Literal["gloo", "nccl"]
    python_version: str
    torch_version: str
    asa_version: str


@noun
class BenchSettings:
    """What was asked for. ``data_source`` says which images were really read; ``steps_per_turn`` how many steps a
    strategy takes before the next has its turn."""

    models: tuple[str, ...]
    strategies: tuple[str, ...]
    gpus: int
    global_batch: int
    input_shape: tuple[int, ...]
    num_classes: int
    precision: Precision
    optimizer: OptimizerName
    learning_rate: float
    data: str
    data_source: str
    samples_per_epoch: int
    steps_per_turn: int
    seed: int
    budget_s: float


@noun
class Bench:
    """A whole comparison. ``started`` is when the first step was measured, after every plan was sealed."""

    created: str
    started: str
    environment: BenchEnvironment
    settings: BenchSettings
    sealed: tuple[SealedPlan, ...]
    results: tuple[BenchResult, ...]
    scaling: tuple[ScalingPoint, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        """What a notebook shows: the summary, and every cell."""
        rows = [
            (
                r.model,
                r.strategy,
                r.ranks,
                f"{1e3 * r.step_time_s.median:.4g}" if r.step_time_s else "-",
                f"{1e3 * r.predicted_step_time_s:.4g}" if r.predicted_step_time_s else "-",
                f"{r.samples_per_s:.4g}" if r.samples_per_s else "-",
                f"{r.peak_memory_bytes / 2**20:.4g}" if r.peak_memory_bytes else "-",
                r.why_not,
            )
            for r in self.results
        ]
        columns = ("model", "strategy", "ranks", "step, ms", "predicted, ms", "samples/s", "peak, MiB", "why not")
        return shown(self.summary(), columns, rows)

    def summary(self) -> str:
        """The strategy of the lowest median step of every model, in one line."""
        said = []
        for model in self.settings.models:
            timed = [(r.step_time_s.median, r.strategy) for r in self.of(model) if r.step_time_s is not None]
            best = min(timed, default=None)
            lowest = best and f"{best[1]} has the lowest median, {1e3 * best[0]:.3g} ms a step, of {len(timed)}"
            said.append(f"{model}: {lowest or 'nothing measured'}")
        ranks = f"{self.settings.gpus} rank{'s' * (self.settings.gpus > 1)}"
        return (
            f"bench on {ranks} of {self.environment.device_name}, batch {self.settings.global_batch}; {'; '.join(said)}"
        )

    def of(self, model: str) -> tuple[BenchResult, ...]:
        """The cells of one model, in the order they were asked for."""
        return tuple(r for r in self.results if r.model == model)
