"""Runners for the strategies of a study: side by side, as a complete training run, or as a prediction."""

from __future__ import annotations

import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from asa.cli import bench_setup, choose, estimates, places
from asa.cli import comparison as c
from asa.cli.commands.study_grid import LIKE_SINGLE, PIPELINES, Block
from asa.cli.console import Console
from asa.cli.ending import Terminated
from asa.cli.verb import Arguments
from asa.errors import AsaError, InfeasibleError, PreemptedError, UsageError, WorkersFailedError
from asa.ir import codec, units
from asa.ir.bench import AccuracyPoint, BenchResult
from asa.ir.cluster import Cluster
from asa.ir.consistency import DisciplineName
from asa.ir.measurements import EpochRecord, Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile, Stat
from asa.profiler.paths import slug

if TYPE_CHECKING:
    from asa.zoo.data import ImageSet

ALONE = "where a strategy trained alone, times to an accuracy include validation, and state memory is not measured"
"""The note of a block in which strategies trained alone: the same for all, so that a table shows it once."""

REPLANNED = "asa+replan"
"""The plan of ``asa`` in a run that may change its plan."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A block with everything that a runner needs.

    ``args`` are the command's with the block's values; ``budget_s`` is for measuring; ``folder`` is the block's own.
    Runners add remarks on the block to ``notes``, and to ``stopped`` what ended a runner after its first results, which
    is raised once these are stored.
    """

    block: Block
    args: Arguments
    console: Console
    device: bench_setup.DeviceType
    profile: Profile
    cluster: Cluster
    folder: Path
    budget_s: float
    notes: list[str] = field(default_factory=list)
    stopped: list[BaseException] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.profile.graph.input_shape

    def images(self) -> tuple[ImageSet, ImageSet]:
        """Training and validation samples in the model's shape."""
        return bench_setup.images(self.block.data, self.args.data_root, self.shape)


Results = dict[str, "BenchResult | str"]
"""Results by strategy: with ``why_not`` if it cannot run, and only a sentence if there was too little time for it."""
Runner = Callable[[Site, Sequence[str]], Results]
"""Function that runs some strategies of a block."""


def side_by_side(site: Site, strategies: Sequence[str]) -> Results:
    """Run strategies in turns on the same ranks, samples and seed, for all the epochs of the block."""
    block = site.block
    contest = c.ModelBench(model=block.model, profile=site.profile, cluster=site.cluster)
    refused: dict[str, str] = {}
    for strategy in strategies:
        try:
            contest.plans[strategy] = plan_of(site, strategy)
        except (UsageError, InfeasibleError) as error:
            refused[strategy] = str(error).partition("; one of ")[0]  # the same on any number of ranks
            continue
        codec.save(contest.plans[strategy], site.folder / "plans" / f"{slug(strategy)}.json")
    try:
        c.measure(contest, site.args, site.console, site.device, site.budget_s, site.images, max(block.epochs))
    except (KeyboardInterrupt, Terminated, WorkersFailedError) as error:
        if not contest.cells:
            raise
        site.notes.append(f"{block.title}: {contest.ended}{f': {error}' if str(error) else ''}")
        if not isinstance(error, WorkersFailedError):
            site.stopped.append(error)
    results: Results = {r.strategy: r for r in c.results(site.args, contest)}
    site.notes.extend(verdicts(site, contest))
    return results | {s: c.unmeasured(block.model, s, block.global_batch, why) for s, why in refused.items()}


def verdicts(site: Site, contest: c.ModelBench) -> list[str]:
    """Sentences on the paired comparisons of ``asa``, or else of ``ddp``, with the others, and on the ratio that noise
    alone reaches."""
    from asa.launch import usable_cores
    from asa.report.text.verdicts import busy_note, comparison

    noise = next((x for x in contest.comparisons if x.left == x.right), None)
    others_cores = noise.others_cores if noise is not None else None
    note = busy_note(others_cores, usable_cores(), site.block.gpus) if site.device == "cpu" else ""
    sentences = [comparison(x, noise, disturbed=bool(note)) for x in contest.comparisons]
    return [f"{site.block.title}: {text}" for text in (*sentences, *([note] if note else []))]


def train_each(site: Site, strategies: Sequence[str]) -> Results:
    """Run a complete training for each strategy: ``asa`` with replanning, disciplines whose workers do not wait for one
    another and so cannot take turns, and whatever is compared with these."""
    return {strategy: _train_one(site, strategy) for strategy in strategies}


def _train_one(site: Site, strategy: str) -> BenchResult | str:
    try:
        plan = plan_of(site, strategy.removesuffix("+replan"))
        steps = max(site.block.epochs) * -(-len(site.images()[0]) // site.block.global_batch)
        estimated_s = steps * plan.prediction.step_time_s
        if estimated_s > site.budget_s:
            return (
                f"its training takes about {units.seconds(estimated_s)} and {units.seconds(site.budget_s)} of --budget "
                "are left for it; "
                "give the same command with more"
            )
        return _run(site, strategy, plan)
    except PreemptedError:
        raise Terminated from None
    except AsaError as error:
        from asa.executor.training.settings import LEARNING_RATE

        rate = site.args.lr or LEARNING_RATE[site.args.optimizer]
        why = str(error).replace("learning rate with --lr", f"learning rate of {rate:g} with --lr")
        return c.unmeasured(site.block.model, strategy, site.block.global_batch, why)


def _run(site: Site, strategy: str, plan: Plan) -> BenchResult:
    """Train under ``plan`` for all the epochs of the block, in a folder of its own."""
    from asa.cli.replanning import adapting, regroup
    from asa.executor.running.outdir import CHECKPOINTS, owned
    from asa.executor.running.run import train
    from asa.executor.training.logs import LOG
    from asa.executor.training.settings import TrainSettings
    from asa.instruments.other_load import watching
    from asa.launch import usable_cores
    from asa.report.text.verdicts import busy_note
    from asa.strategies import offered

    replan = strategy == REPLANNED
    places.keep_origins(site.profile, site.cluster)
    folder = site.folder / slug(strategy)
    with owned(folder, resume=True):  # what an ended study has left: a cell is one run from its start to its end
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        (folder / LOG).unlink(missing_ok=True)
    settings = TrainSettings(
        out=str(folder), data=site.block.data, data_root=site.args.data_root, epochs=max(site.block.epochs),
        lr=site.args.lr, seed=site.block.seed, device=site.device, replan=replan,
    )  # fmt: skip
    adapt, relieve = adapting(plan, site.console, replan=replan, correct=False, out=folder)
    records: list[EpochRecord] = []
    changes, servers = 0, list[dict[str, Any]]()

    def on_event(event: dict[str, Any]) -> None:
        nonlocal changes, servers
        if event["event"] == "epoch":
            fields = {k: v for k, v in event.items() if k not in ("event", "line")}
            records.append(codec.build(EpochRecord, fields, source="epoch"))
            told(len(records))
        servers = event.get("servers", servers) if event["event"] == "consistency" else servers
        changes += event["event"] == "replan" and event["kind"] not in ("keep", "wait", "outcome")

    with watching() as others, site.console.progress(f"training {site.block.model}") as report:

        def told(done: int) -> None:
            epochs = settings.epochs
            report(done / epochs, f"{strategy}, epoch {min(done + 1, epochs)} of {epochs}")

        told(0)
        try:
            train(plan, settings, strategies=offered(), adapt=adapt, relieve=relieve,
                  regroup=partial(regroup, site.console) if replan else None, on_event=on_event)  # fmt: skip
        except (KeyboardInterrupt, PreemptedError) as error:
            if not records:
                raise
            site.stopped.append(error if isinstance(error, KeyboardInterrupt) else Terminated())
    if replan:
        site.notes.append(f"{site.block.title}: {strategy} changed its plan {changes} times")
    site.notes.append(ALONE)
    if site.device == "cpu" and (note := busy_note(others.cores, usable_cores(), plan.num_processes)):
        site.notes.append(f"{site.block.title}: {strategy}: {note}")
    return _result(site, strategy, plan, records, servers)


def _result(
    site: Site, strategy: str, plan: Plan, records: Sequence[EpochRecord], servers: Sequence[dict[str, Any]]
) -> BenchResult:
    """The result of a complete training that began under ``plan``, from its epochs and the counters of its servers."""
    last = records[-1].measurements
    points = [
        AccuracyPoint(
            epoch=r.epoch + 1.0, seconds=elapsed_s, train_loss=r.train_loss,
            validation_loss=r.validation_loss, validation_accuracy=r.validation_accuracy or 0.0,
        )
        for r, elapsed_s in zip(records, accumulate(r.seconds for r in records), strict=True)
    ]  # fmt: skip
    rate = c.flops_per_sample(site.profile) * last.global_batch
    peak = site.cluster.ordered(plan.devices).peak_flops(plan.precision, last.num_ranks)
    per_epoch = -(-len(site.images()[0]) // last.global_batch)
    timed = records[-1:] if strategy == REPLANNED else records[1:] or records
    steps = Stat.of([_mean_step_s(r.measurements) for r in timed])
    waiting_too = statistics.median(_mean_step_s(r.measurements) + r.measurements.data_wait_s for r in timed)
    return BenchResult(
        model=site.block.model, strategy=strategy, ranks=last.num_ranks, global_batch=last.global_batch,
        step_time_s=steps, predicted_step_time_s=last.predicted_step_time_s,
        samples_per_s=last.global_batch / waiting_too, data_wait_s=last.data_wait_s,
        communication_s=last.communication_s,
        peak_memory_bytes=max(last.peak_memory_bytes) if last.peak_memory_bytes else None,
        predicted_memory_bytes=max(last.predicted_memory_bytes), plan_fingerprint=last.plan_fingerprint,
        components=plan.components, accuracy=tuple(points),
        flops_per_s=rate / waiting_too, mfu=rate / waiting_too / peak if peak else None,
        utilisation=last.utilisation, energy_j=None if last.energy_j is None else last.energy_j / per_epoch,
        ages=_ages(servers), **_pipelined(plan),
    )  # fmt: skip


def _pipelined(plan: Plan) -> dict[str, Any]:
    """The schedule and the number of microbatches in a result, if ``plan`` is a pipeline."""
    return {"schedule": plan.schedule, "num_microbatches": plan.num_microbatches} if len(plan.stages) > 1 else {}


def _ages(servers: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """How many gradients were applied at each age, at all ``servers`` together, from their counters."""
    counts: Counter[int] = Counter()
    for server in servers:
        counts.update({int(age): count for age, count in server["ages"].items()})
    return tuple(counts[age] for age in range(max(counts, default=-1) + 1))


def _mean_step_s(measured: Measurements) -> float:
    """Mean seconds of an epoch per global batch, known for workers that wait for one another and for those that do not.
    The wait for data is apart, except for workers that do not wait for one another."""
    return measured.step_time.median if measured.mean_step_s is None else measured.mean_step_s


DISCIPLINES: tuple[str, ...] = get_args(DisciplineName)
"""Strategies whose data-parallel workers do not take every step together."""

RUNNERS: dict[str, Runner] = {REPLANNED: train_each, **dict.fromkeys(DISCIPLINES, train_each)}
"""Runners by name of the strategy; every other strategy takes turns with the rest of its block."""


def run(site: Site, on_results: Callable[[Results], None]) -> None:
    """Run all strategies of a block, and call ``on_results`` with results as soon as they exist: of all that take turns
    together, and of each that runs alone. Strategies that cannot run are passed with the reason. Those that run alone
    follow one another while the block's budget lasts, so that the same command, given again, measures at least one more
    if its budget is long enough for one.

    Raises:
        KeyboardInterrupt, Terminated: Ctrl-C or SIGTERM came while ranks ran; no other cell is begun.
    """
    from asa.launch import signals

    results: Results
    runners = (
        RUNNERS if not site.block.trains_separately else dict.fromkeys(site.block.strategies, train_each) | RUNNERS
    )
    in_turns = [s for s in site.block.strategies if s not in runners]
    ends = time.monotonic() + site.budget_s
    groups = [(side_by_side, in_turns)] if in_turns else []
    for runner, strategies in (*groups, *((runners[s], [s]) for s in site.block.strategies if s in runners)):
        share = len(strategies) / len(site.block.strategies)
        budget_s = site.budget_s * share if runner is side_by_side else max(0.0, ends - time.monotonic())
        signals.asked = False  # an earlier command of this process may have been asked to stop
        try:
            results = runner(replace(site, budget_s=budget_s), strategies)
        except AsaError as error:
            block = site.block
            results = {s: c.unmeasured(block.model, s, block.global_batch, str(error)) for s in strategies}
        on_results(results)
        if site.stopped:
            raise site.stopped[0]
        if signals.asked:
            raise Terminated


def predict(block: Block, args: Arguments, console: Console) -> Results:
    """Predicted results of every strategy of a block on the devices of its cluster.

    Raises:
        UsageError: no such cluster or model. InvalidInputError: the model fails, or the devices are unknown.
    """
    if block.cluster is None:
        raise UsageError(f"{block.gpus} ranks are more than this machine measures; name a cluster with --cluster")
    cluster = choose.wide_enough(choose.named_cluster(block.cluster, block.gpus), block.gpus, console)
    if cluster.num_devices < block.gpus:
        raise UsageError(f"cluster {cluster.name} has {cluster.num_devices} devices, asked for {block.gpus}")
    profile, _ = _profile_for(block, args, console, cluster)
    site = Site(block=block, args=args, console=console, device=cluster.device.type, profile=profile, cluster=cluster,
                folder=Path(), budget_s=0.0)  # fmt: skip
    results: Results = {}
    for strategy in block.strategies:
        try:
            results[strategy] = predicted_result(site, strategy)
        except AsaError as error:
            results[strategy] = c.unmeasured(block.model, strategy, block.global_batch, str(error))
    return results


def predicted_result(site: Site, strategy: str) -> BenchResult:
    """The prediction of one strategy, as a result without a measurement."""
    plan = plan_of(site, strategy.partition("+replan")[0])
    p = plan.prediction
    computing = p.compute_s / p.step_time_s if p.step_time_s else None
    rate = c.flops_per_sample(site.profile) * p.samples_per_s
    peak = site.cluster.ordered(plan.devices).peak_flops(plan.precision, plan.num_processes)
    return BenchResult(
        model=site.block.model, strategy=strategy, ranks=plan.num_processes, global_batch=plan.global_batch,
        step_time_s=None, why_not="predicted", predicted_step_time_s=p.step_time_s, predicted_low_s=p.step_time_low_s,
        predicted_high_s=p.step_time_high_s, predicted_communication_s=p.exposed_communication_s,
        predicted_memory_bytes=max(p.memory_bytes_per_rank), predicted_bubble_s=p.bubble_s, flops_per_s=rate,
        mfu=rate / peak if peak else None, plan_fingerprint=codec.fingerprint(plan),
        utilisation=computing, state_memory_bytes=_state_bytes(site, plan),
        components=plan.components, **_pipelined(plan),
    )  # fmt: skip


def _state_bytes(site: Site, plan: Plan) -> int | None:
    """Predicted weights, gradients and optimizer state of the rank that holds most; None under a discipline."""
    from asa.cost.planned import price_plan
    from asa.strategies import offered

    if plan.consistency is not None:
        return None
    held = (
        sum(c.footprint.state + c.footprint.gradients for c in stage.components)
        for stage in price_plan(plan, site.profile, site.cluster, offered()).stages
    )
    return round(max(held))


def plan_of(site: Site, strategy: str) -> Plan:
    """The plan of one whole strategy for a block.

    Raises:
        UsageError: there is no such strategy, or it cannot run. InfeasibleError: it does not fit, or cannot be built.
    """
    from asa.planner import Request, plan
    from asa.planner.space import baselines
    from asa.strategies import offered

    if site.block.gpus == 1 and strategy in LIKE_SINGLE:
        strategy = "single"  # on one device all of them are the same
    if strategy not in DISCIPLINES:
        baselines.check((strategy,), offered(), site.block.gpus)
    request = Request(
        gpus=site.block.gpus,
        global_batch=site.block.global_batch,
        memory_bytes=site.args.memory,
        strategies=(strategy,),
        optimizer=site.args.optimizer,
        microbatches=site.block.microbatches if strategy in PIPELINES else None,
    )
    return plan(site.profile, site.cluster, offered(), request)[0]


def _profile_for(block: Block, args: Arguments, console: Console, cluster: Cluster) -> tuple[Profile, str]:
    """A measured profile for the cluster's devices, or the structure of the model with estimated times."""
    for path, p in places.profiles(console):
        same_device = p.device.name == cluster.device.name and p.precision == block.precision
        if same_device and p.runs_on(block.gpus) and choose.fits(p, args, block.model):
            return p, f"profile {places.shown(path)}"
    return estimates.estimated(args, block.model, cluster)
