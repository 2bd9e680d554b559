"""Results of ``asa bench``: one training under every strategy, measured side by side."""

from __future__ import annotations

from typing import Literal

from asa.errors import InvalidInputError
from asa.ir import units
from asa.ir.codec import later, noun
from asa.ir.notebook import shown
from asa.ir.plan import Assignment, OptimizerName
from asa.ir.profile import Precision, Stat


@noun
class AccuracyPoint:
    """Validation results after ``epoch`` epochs (fractional inside an epoch) and ``seconds`` of training. A loss that
    is not finite is None."""

    epoch: float
    seconds: float
    train_loss: float | None
    validation_loss: float | None
    validation_accuracy: float


@noun
class BenchResult:
    """Result of one cell: one model under one strategy on ``ranks`` ranks. Times are in seconds.

    Attributes:
        step_time_s: the measured step time over all rounds; None if the cell could not run.
        why_not: why the cell could not run; empty if it ran.
        communication_s: exposed communication per step; None if it was not measured.
        communication_low_s, communication_high_s: 95 % interval of it; with fewer than six pairs, minimum and maximum.
        peak_memory_bytes: peak of active memory on the rank with the highest peak. ``predicted_memory_bytes`` is
            counted in the same way.
        plan_fingerprint: fingerprint of the plan that ran; ``components`` are its assignments.
        samples_per_s: throughput, including the wait for input.
        data_wait_s: median wait for input per step.
        utilisation: fraction of time, 0 to 1, in which the devices computed while this plan ran alone. On GPUs it is
            read from NVML; on CPUs it is processor time over wall time and threads of a rank; for a prediction it is
            the part of the step that computes.
        flops_per_s: FLOP/s of all ranks, counted from the model's structure, with backward as twice forward.
        mfu: ``flops_per_s`` over the peak of all devices.
        predicted_bubble_s: the part of the predicted step in which stages wait for each other.
        state_memory_bytes: weights, gradients and optimizer state of the rank that holds most; predicted if none ran.
        reserved_memory_bytes: memory that this rank's CUDA allocator reserved.
        energy_j: joules per step of all devices.
        clock_mhz: clock of the slowest device.
        throttled: reasons why clocks were reduced.
        ages: ``ages[n]`` gradients were applied at servers when n whole global batches of other workers' gradients had
            been applied since their worker fetched the weights; empty without servers.
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
    ages: tuple[int, ...] = later(())

    def __post_init__(self) -> None:
        if self.step_time_s is None and not self.why_not:
            raise InvalidInputError(f"{self.strategy} of {self.model} has neither a time nor a reason for none")

    @property
    def mean_age(self) -> float | None:
        """Mean of :attr:`ages`; None without servers."""
        return sum(n * count for n, count in enumerate(self.ages)) / sum(self.ages) if any(self.ages) else None


@noun
class ScalingPoint:
    """Step time of one strategy on ``ranks`` ranks; ``measured_s`` only if that many ranks have run."""

    model: str
    strategy: str
    ranks: int
    predicted_s: float | None
    measured_s: float | None


@noun
class Comparison:
    """Comparison of two strategies in paired, interleaved rounds.

    Attributes:
        ratio: median of time(left) / time(right) over the pairs.
        low, high: 95 % interval of it; with fewer than six pairs, the smallest and the largest ratio, which cover less.
        others_cores: mean number of cores that other processes used meanwhile, beyond those that the ranks left idle;
            None if it was not measured.

    If ``left == right``, it is the A/A test: how far a ratio gets from 1 by noise alone.
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
    """Record of a plan that was stored before the first measurement, with the profile and the cluster that it was made
    from."""

    model: str
    strategy: str
    plan_fingerprint: str
    profile_fingerprint: str
    profile_created: str
    cluster: str
    cluster_fingerprint: str
    written: str


EMULATED = "emulated"
"""First word of the names of devices that processes stand in for, by sleeping for the times in a profile."""


@noun
class BenchEnvironment:
    """The machine of a benchmark, and the versions of its software."""

    device_type: Literal["cpu", "cuda"]
    device_name: str
    num_devices: int
    cpu_cores: int
    backend: Literal["gloo", "nccl"]
    python_version: str
    torch_version: str
    asa_version: str

    @property
    def emulated(self) -> bool:
        """Whether its devices are emulated, so that only links were measured and nothing was trained."""
        return self.device_name.startswith(f"{EMULATED} ")


@noun
class BenchSettings:
    """Settings of a benchmark. ``data_source`` says which images were read, ``num_classes`` how many classes they have,
    at most those of the model. ``steps_per_turn`` is the number of steps that one strategy runs before the next one's
    turn. ``price`` is that of one device for an hour, in any currency."""

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
    price: float | None = later()


@noun
class Bench:
    """A complete benchmark. ``started`` is the time of its first measured step; every plan was stored before that."""

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
        """HTML for notebooks: the summary, and a table of all cells."""
        rows = [
            (
                r.model,
                r.strategy,
                r.ranks,
                1e3 * r.step_time_s.median if r.step_time_s else None,
                1e3 * r.predicted_step_time_s if r.predicted_step_time_s else None,
                r.samples_per_s,
                r.peak_memory_bytes / 2**20 if r.peak_memory_bytes else None,
                r.why_not,
            )
            for r in self.results
        ]
        columns = ("model", "strategy", "ranks", "step, ms", "predicted, ms", "samples/s", "peak, MiB", "why not")
        return shown(self.summary(), columns, rows)

    def summary(self) -> str:
        """One line: for every model, the strategy with the lowest median step time."""
        said = []
        for model in self.settings.models:
            timed = [(r.step_time_s.median, r.strategy) for r in self.of(model) if r.step_time_s is not None]
            best = min(timed, default=None)
            lowest = best and f"{best[1]} has the lowest median, {units.seconds(best[0])} a step, of {len(timed)}"
            said.append(f"{model}: {lowest or 'nothing measured'}")
        ranks = f"{self.settings.gpus} rank{'s' * (self.settings.gpus > 1)}"
        return (
            f"bench on {ranks} of {self.environment.device_name}, batch {self.settings.global_batch}; {'; '.join(said)}"
        )

    def of(self, model: str) -> tuple[BenchResult, ...]:
        """Cells of one model, in the order in which they were requested."""
        return tuple(r for r in self.results if r.model == model)
