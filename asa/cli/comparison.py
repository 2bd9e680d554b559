"""Parts of ``asa bench``: plans of all strategies, stored before anything is measured, and their results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asa.cli import choose, emulated
from asa.cli.bench_setup import STRATEGIES, DeviceType
from asa.cli.console import Console
from asa.cli.emulated import EmulatedName
from asa.cli.ending import Terminated
from asa.cli.verb import Arguments
from asa.errors import InfeasibleError, WorkersFailedError
from asa.ir import bench as nouns
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.intervals import FEWEST, median_interval
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.units import GIB
from asa.profiler.paths import slug

if TYPE_CHECKING:
    from asa.executor.measuring.benchmark import Cell
    from asa.zoo.data import ImageSet

SCALES = (1, 2, 4, 8)
_REFERENCES = ("asa", "ddp")
"""Strategies that all others are compared with in pairs: the first one that ran."""
FILLED = 0.9
"""Fraction of free memory that the plans of a comparison may be predicted to take together."""


@dataclass
class ModelBench:
    """Strategies for one model: the plan of each, or why there is none, and the measured cells.

    ``emulated``: description of what replaces the devices, if they are emulated; ``ended``: why there are fewer rounds
    than planned, or none.
    """

    model: str
    profile: Profile
    cluster: Cluster
    emulated: str | None = None
    ended: str = ""
    plans: dict[str, Plan] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)
    sealed: list[nouns.SealedPlan] = field(default_factory=list)
    scaling: list[nouns.ScalingPoint] = field(default_factory=list)
    cells: dict[str, Cell] = field(default_factory=dict)
    comparisons: list[nouns.Comparison] = field(default_factory=list)

    def distinct(self) -> list[Plan]:
        """Plans that differ in what they run, with the predicted fastest first, which is also compared with itself."""
        plans: dict[object, Plan] = {}
        for plan in self.plans.values():
            plans.setdefault(plan.conduct, plan)
        return sorted(plans.values(), key=lambda p: p.prediction.step_time_s)


def prepare(args: Arguments, console: Console, model: str, cluster: Cluster, gpus: int, folder: Path) -> ModelBench:
    """Profile the model if necessary, plan every strategy, and store the plans."""
    if isinstance(args.device, EmulatedName):
        profile, cluster, origin = emulated.stage(args, args.device, model, cluster)
    else:
        profile, origin = choose.local_profile(args, console, model, cluster.device.type, gpus)
    console.say(f"asa: {model}: {origin}")
    contest = ModelBench(model=model, profile=profile, cluster=cluster)
    if isinstance(args.device, EmulatedName):
        contest.emulated = origin
    for strategy in args.strategies or STRATEGIES:
        try:
            plan = _plan(args, contest, gpus, strategy)[0]
        except InfeasibleError as error:
            contest.why_not[strategy] = str(error)
            continue
        contest.plans[strategy] = plan
        codec.save(plan, folder / "plans" / f"{slug(model)}.{slug(strategy)}.json")
        contest.sealed.append(
            nouns.SealedPlan(
                model=model,
                strategy=strategy,
                plan_fingerprint=codec.fingerprint(plan),
                profile_fingerprint=plan.profile_fingerprint,
                profile_created=profile.provenance.created,
                cluster=cluster.name,
                cluster_fingerprint=plan.cluster_fingerprint,
                written=codec.now(),
            )
        )
    contest.scaling = _scaling(args, contest, gpus)
    return contest


def side_by_side(contest: ModelBench, free: int, *, shared: bool) -> list[Plan]:
    """Choose the distinct plans that together fit in ``free`` bytes, as taking turns requires; move the others to
    ``why_not``. asa's choice and plain data parallelism have priority, then the predicted fastest; at least one stays.

    ``shared``: all ranks use the same memory, as on CPUs, rather than that of their own device.
    """
    distinct = contest.distinct()
    named = {contest.plans[s].conduct for s in ("asa", "ddp") if s in contest.plans}
    chosen: list[Plan] = []
    used_bytes = 0
    for plan in sorted(distinct, key=lambda p: p.conduct not in named):
        rank_bytes = plan.prediction.memory_bytes_per_rank
        needed_bytes = used_bytes + (sum(rank_bytes) if shared else max(rank_bytes))
        if chosen and needed_bytes > FILLED * free:
            for strategy in [s for s, p in contest.plans.items() if p.conduct == plan.conduct]:
                del contest.plans[strategy]
                contest.why_not[strategy] = (
                    f"not run: with those that take turns with it {needed_bytes / GIB:.1f} GiB would be held, "
                    f"{free / GIB:.1f} are free; compare fewer at once with --strategies"
                )
        else:
            chosen.append(plan)
            used_bytes = needed_bytes
    return [p for p in distinct if p in chosen]


def leave_out_rare(contest: ModelBench, rate: float) -> None:
    """Move plans to ``why_not`` whose workers exchange too rarely, at learning rate ``rate``, to do so in every turn: a
    median over turns would leave their messages out."""
    from asa.executor.measuring.benchmark import MOST_TURN_STEPS

    for strategy, plan in list(contest.plans.items()):
        period = 1 if plan.consistency is None else plan.consistency.period_at(rate)
        if period > MOST_TURN_STEPS:
            del contest.plans[strategy]
            contest.why_not[strategy] = (
                f"not run: its workers exchange every {period} steps, and strategies take turns of at most "
                f"{MOST_TURN_STEPS}; ask for a period of {MOST_TURN_STEPS} or less, or use --study grid, where it has "
                "a run of its own"
            )


def measure(
    contest: ModelBench,
    args: Arguments,
    console: Console,
    device: DeviceType,
    budget_s: float,
    data: Callable[[], tuple[ImageSet, ImageSet]],
    epochs: int | None = None,
) -> None:
    """Run the distinct plans against each other, for ``epochs`` epochs or until the budget is used, and fill in
    ``cells`` and ``comparisons``.

    Raises:
        KeyboardInterrupt, Terminated, WorkersFailedError: it ended early; ``cells`` has the rounds that were finished.
    """
    from asa.executor.measuring.benchmark import BenchOptions, compare, turn_steps
    from asa.executor.measuring.benchmark import measure as run
    from asa.executor.training.settings import LEARNING_RATE
    from asa.instruments.other_load import watching
    from asa.profiler.machine import choose_device, free_memory
    from asa.strategies import offered
    from asa.zoo.models import build

    leave_out_rare(contest, args.lr or LEARNING_RATE[args.optimizer])
    plans = contest.distinct()
    if not plans:
        return
    if isinstance(args.device, EmulatedName):
        cells = emulated.cells(contest.profile, contest.cluster, plans, console, budget_s)
        _assign(contest, plans, cells)
        return
    plans = side_by_side(contest, free_memory(choose_device(device)), shared=device == "cpu")
    graph = contest.profile.graph
    factory = partial(
        build, contest.model, num_classes=graph.num_classes, input_shape=graph.input_shape, seed=args.seed
    )
    options = BenchOptions(
        device=device, budget_s=budget_s, epochs=epochs, seed=args.seed, lr=args.lr,
        steps_per_turn=turn_steps(plans),
    )  # fmt: skip
    latest: dict[str, Any] = {}
    with watching() as others, console.progress(f"measuring {contest.model}") as report:

        def on_message(_rank: int, message: dict[str, Any]) -> None:
            latest.update(message)
            report(message["round"] / message["rounds"], f"round {message['round']} of {message['rounds']}")

        interruption: BaseException | None = None
        try:
            cells = run(plans, factory, offered(), data, options, on_message=on_message)
        except (KeyboardInterrupt, Terminated, WorkersFailedError) as error:
            if not latest:
                raise
            interruption, cells = error, latest["cells"]
            contest.ended = f"ended after round {latest['round']} of {latest['rounds']}"
    _assign(contest, plans, cells)
    others_cores = None if device == "cuda" else others.cores
    contest.comparisons = [compare(contest.model, cells[0], cells[0], others_cores=others_cores)]
    reference = next(s for s in (*_REFERENCES, *contest.cells) if s in contest.cells)
    # A cell has the name of the first strategy that ran its plan; here it is compared as the reference.
    left = contest.cells[reference]
    contest.comparisons += [
        replace(compare(contest.model, left, c, others_cores=others_cores), left=reference)
        for c in cells
        if c is not left
    ]
    if interruption is not None:
        raise interruption


def _assign(contest: ModelBench, plans: Sequence[Plan], cells: Sequence[Cell]) -> None:
    """Set the cell of every strategy from those of the distinct ``plans``."""
    by_conduct = {p.conduct: cell for p, cell in zip(plans, cells, strict=True)}
    contest.cells = {strategy: by_conduct[p.conduct] for strategy, p in contest.plans.items()}


def results(args: Arguments, contest: ModelBench) -> list[nouns.BenchResult]:
    """One result per strategy; those that could not run come last."""
    batch = args.global_batch or contest.profile.global_batch
    return [_result(contest, s, batch) for s in (*contest.plans, *contest.why_not)]


def scaling(contest: ModelBench) -> list[nouns.ScalingPoint]:
    """Predictions for 1, 2, 4, 8 ranks, with the measurement at one of them."""
    measured = {
        (s, contest.plans[s].num_ranks if s == "single" else contest.plans[s].gpus): cell.step_time.median
        for s, cell in contest.cells.items()
    }
    return [replace(p, measured_s=measured.get((p.strategy, p.ranks))) for p in contest.scaling]


def notes(contest: ModelBench) -> list[str]:
    """Remarks for the reader: emulated devices, strategies with the same plan, notes of plans."""
    from asa.report.text.plan import notes as plan_notes

    first: dict[object, str] = {}
    lines = [f"{contest.model}: {text}" for text in (contest.emulated, contest.ended) if text]
    for strategy, plan in contest.plans.items():
        original = first.setdefault(plan.conduct, strategy)
        if original != strategy:
            lines.append(f"{contest.model}: {strategy} and {original} are the same plan here, which was measured once")
    if "asa" in contest.plans:
        lines += [f"{contest.model}: {note}" for note in plan_notes(contest.plans["asa"])]
    return lines


def unlike(args: Arguments, contests: Sequence[ModelBench]) -> list[str]:
    """A remark if models ran at other batches, inputs or precisions than the first, which the settings are of."""
    conditions = {
        c.model: f"batch {args.global_batch or c.profile.global_batch} of "
        f"{'x'.join(map(str, c.profile.graph.input_shape))}, {c.profile.precision}"
        for c in contests
    }
    if len(set(conditions.values())) < 2:
        return []
    return [f"models ran under different conditions: {'; '.join(f'{m}: {text}' for m, text in conditions.items())}"]


def settings(args: Arguments, contests: Sequence[ModelBench], gpus: int, train: ImageSet) -> nouns.BenchSettings:
    """The settings of the benchmark, including defaults."""
    from asa.executor.measuring.benchmark import turn_steps
    from asa.executor.training.settings import LEARNING_RATE

    first = contests[0].profile
    return nouns.BenchSettings(
        models=tuple(c.model for c in contests),
        strategies=args.strategies or STRATEGIES,
        gpus=gpus,
        global_batch=args.global_batch or first.global_batch,
        input_shape=first.graph.input_shape,
        num_classes=min(first.graph.num_classes, train.num_classes),
        precision=first.precision,
        optimizer=args.optimizer,
        learning_rate=args.lr or LEARNING_RATE[args.optimizer],
        data=args.data,
        data_source=train.source,
        samples_per_epoch=len(train),
        steps_per_turn=max(turn_steps(c.distinct()) for c in contests),
        seed=args.seed,
        budget_s=args.budget,
        price=args.price,
    )


def _plan(args: Arguments, contest: ModelBench, gpus: int, strategy: str) -> Sequence[Plan]:
    from asa.planner import Request, plan
    from asa.strategies import offered

    request = Request(
        gpus=gpus,
        global_batch=args.global_batch or contest.profile.global_batch,
        memory_bytes=args.memory,
        strategies=(strategy,),
        optimizer=args.optimizer,
    )
    return plan(contest.profile, contest.cluster, offered(), request)


def _scaling(args: Arguments, contest: ModelBench, gpus: int) -> list[nouns.ScalingPoint]:
    points = []
    for ranks in sorted({*SCALES, gpus}):
        if ranks > contest.cluster.num_devices or not contest.profile.runs_on(ranks):
            break
        try:
            best = _plan(args, contest, ranks, "asa")[0]
        except InfeasibleError:
            continue
        times = {b.name: b.step_time_s for b in best.baselines if b.fits} | {"asa": best.prediction.step_time_s}
        for strategy in contest.plans:
            # On one rank every strategy is the single device.
            time = times.get("single" if ranks == 1 else strategy)
            if time is not None and (strategy != "single" or ranks == 1):
                points.append(
                    nouns.ScalingPoint(
                        model=contest.model, strategy=strategy, ranks=ranks, predicted_s=time, measured_s=None
                    )
                )
    return points


def _result(contest: ModelBench, strategy: str, global_batch: int) -> nouns.BenchResult:
    if strategy not in contest.cells:
        return unmeasured(contest.model, strategy, global_batch, contest.why_not.get(strategy) or contest.ended)
    plan, cell = contest.plans[strategy], contest.cells[strategy]
    p, peaks = plan.prediction, cell.peak_memory_bytes
    # Of fewer differences the extremes are no interval of 95 %.
    low, high = median_interval(cell.communication) if len(cell.communication) >= FEWEST else (None, None)
    wait = statistics.median(cell.data_wait) if cell.data_wait else 0.0
    step_s = cell.step_time.median + wait
    rate = flops_per_sample(contest.profile) * plan.global_batch / step_s
    peak = contest.cluster.ordered(plan.devices).peak_flops(plan.precision, plan.num_processes)
    return nouns.BenchResult(
        model=contest.model,
        strategy=strategy,
        ranks=plan.num_processes,
        global_batch=plan.global_batch,
        step_time_s=cell.step_time,
        predicted_step_time_s=p.step_time_s,
        predicted_low_s=p.step_time_low_s,
        predicted_high_s=p.step_time_high_s,
        samples_per_s=plan.global_batch / step_s,
        communication_s=cell.communication_s,
        communication_low_s=low,
        communication_high_s=high,
        predicted_communication_s=p.exposed_communication_s,
        peak_memory_bytes=max(peaks) if peaks else None,
        predicted_memory_bytes=max(p.memory_bytes_per_rank),
        peak_memory_bytes_per_rank=peaks,
        plan_fingerprint=codec.fingerprint(plan),
        components=plan.components,
        accuracy=tuple(cell.accuracy),
        data_wait_s=wait,
        samples_per_epoch=cell.samples_per_epoch,
        flops_per_s=rate,
        mfu=rate / peak if peak else None,
        predicted_bubble_s=p.bubble_s if len(plan.stages) > 1 else None,
        state_memory_bytes=max(cell.state_memory_bytes) if cell.state_memory_bytes else None,
        reserved_memory_bytes=max(cell.reserved_memory_bytes) if cell.reserved_memory_bytes else None,
        schedule=plan.schedule if len(plan.stages) > 1 else None,
        num_microbatches=plan.num_microbatches if plan.num_microbatches > 1 or len(plan.stages) > 1 else None,
        **_usage(cell),
    )


def unmeasured(model: str, strategy: str, global_batch: int, why: str) -> nouns.BenchResult:
    """Result of a strategy that was not run, with the reason."""
    return nouns.BenchResult(
        model=model, strategy=strategy, ranks=0, global_batch=global_batch, step_time_s=None,
        predicted_step_time_s=None, why_not=why,
    )  # fmt: skip


FORWARD_AND_BACKWARD = 3
"""FLOPs of a training step over those of forward: backward computes gradients of inputs and of weights."""


def flops_per_sample(profile: Profile) -> float:
    """FLOPs of a sample's forward and backward, without recomputation."""
    return FORWARD_AND_BACKWARD * sum(c.flops_per_sample for c in profile.graph.components)


def _usage(cell: Cell) -> dict[str, Any]:
    """Use of the devices: mean fraction of time computing, energy of all per step, slowest clock and its reasons."""
    from asa.instruments.nvml import reasons

    busy = [u.busy for u in cell.usage if u.busy is not None]
    energy = [u.energy_j for u in cell.usage if u.energy_j is not None]
    clocks = [u.clock_mhz for u in cell.usage if u.clock_mhz is not None]
    bits = 0
    for u in cell.usage:
        bits |= u.throttled
    return {
        "utilisation": statistics.mean(busy) if busy else None,
        "energy_j": sum(energy) / cell.usage_steps if energy and cell.usage_steps else None,
        "clock_mhz": min(clocks, default=None),
        "throttled": reasons(bits),
    }
