"""``asa bench --study``: a grid of cells, run block by block, stored as it grows, and merged into one table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import asa
from asa.cli import bench_setup, choose, places
from asa.cli import options as o
from asa.cli.commands import study_grid
from asa.cli.commands.study_grid import PIPELINES, SAMPLES, Block, Definition
from asa.cli.console import Console
from asa.cli.emulated import EmulatedName
from asa.cli.ending import Terminated
from asa.cli.verb import Arguments
from asa.errors import AsaError, InvalidInputError, UsageError
from asa.ir import codec, units
from asa.ir.bench import BenchResult
from asa.ir.consistency import is_discipline
from asa.ir.study import State, Study, StudyCell, StudyRow, always_alone
from asa.ir.units import MOST_DEVICES
from asa.profiler.paths import slug
from asa.zoo import specs

if TYPE_CHECKING:
    from asa.cli.commands.study_runners import Results, Site
    from asa.ir.cluster import Cluster
    from asa.ir.profile import Profile

FILE = "study.json"
_OVERSUBSCRIBED = 4
"""Number of ranks that are measured on CPUs even with fewer cores, to show memory, losses and waiting."""
_LEAST_S = 3.0
"""Least number of seconds for measuring a block."""
_START_S, _TRACE_S, _PLAN_S = 8.0, 40.0, 2.0
"""Approximate seconds for starting ranks, for tracing a model for an estimate, and for a plan."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One call of the command: the study, its folder, and its rows so far. ``device`` and ``name`` are kind and name of
    this machine's devices."""

    args: Arguments
    console: Console
    study: Definition
    folder: Path
    device: bench_setup.DeviceType
    name: str
    rows: dict[StudyCell, StudyRow] = field(default_factory=dict)


def run(args: Arguments, console: Console) -> None:
    """List the open work, or do it, and write the table."""
    if isinstance(args.device, EmulatedName):
        raise UsageError("a study measures real devices; leave out --device emulated:... (`asa bench` takes it)")
    device, max_ranks = _local_devices(args)
    cluster = choose.named_cluster(args.cluster) if args.cluster else None
    most = 0 if cluster is not None and _is_other_machine(cluster, device) else max_ranks
    study = study_grid.define(args, most=most, cluster_gpus=None if cluster is None else cluster.num_devices)
    folder = Path(args.out) if args.out else places.COMPARISONS / f"study-{study.name}"
    places.check_writable(folder / FILE, "--out")
    _check(args, study)
    stored = _stored_study(folder)
    if stored is None:
        places.check_no_results(folder, "--out")
    elif stored.name != study.name:
        raise UsageError(
            f"{folder} contains the study {stored.name!r}; choose another --out for {study.name!r}, or move it away"
        )
    rows = {row.cell: row for row in stored.rows} if stored else {}
    this = _Run(
        args=args, console=console, study=study, folder=folder, device=device, name=_device_name(device), rows=rows
    )
    work = [(block, _open_strategies(this, block)) for block in study.blocks]
    if args.dry_run:
        _show_work(this, work)
        return
    began = time.monotonic()
    # Predictions have this time also if measuring took all of the budget.
    reserved_s = _predicting_s(work) + _TRACE_S * sum(bool(s) and b.mode == "predicted" for b, s in work)
    for number, (block, open_strategies) in enumerate(work):
        if not open_strategies:
            continue
        block_began = time.monotonic()
        remaining = args.budget - (block_began - began)
        share_s = _budget_share(remaining, work[number:])
        if remaining <= 0 and (block.mode == "measured" or reserved_s <= 0):
            _store_rows(this, block, open_strategies, None, "the budget is used up")
            continue
        console.say(f"asa: {block.title}: {', '.join(open_strategies)} ({number + 1} of {len(work)})")
        try:
            _block(this, block.with_strategies(open_strategies), share_s)
        except (KeyboardInterrupt, Terminated):
            done = sum(row.result is not None and not row.ended_early for row in rows.values())
            if done:
                said = "1 cell has results" if done == 1 else f"{done} cells have results"
                console.say(f"asa: {said} in {folder / FILE}; the same command runs the others")
            raise
        _write(this)
        if block.mode == "predicted":
            reserved_s -= time.monotonic() - block_began
    written = _write(this)
    from asa.report.pages import study as study_page
    from asa.report.text import study as report

    paths = study_page.write(written, folder)
    console.result(codec.document(written), lambda: report.render(written))
    console.say(f"asa: wrote {folder / FILE}, {', '.join(p.name for p in paths)}")


def _check(args: Arguments, study: Definition) -> None:
    """Check all names and files of a study, before minutes of measuring.

    Raises:
        UsageError: no such model or strategy, too many devices, or microbatches that no batch is cut into.
        InvalidInputError, UnavailableError: files of the data are missing, or the package that reads them.
    """
    from asa.planner.space import baselines
    from asa.strategies import offered

    largest = max((b.gpus for b in study.blocks), default=1)
    if largest > MOST_DEVICES:
        raise UsageError(f"--gpus: {largest} devices are more than any cluster has; the most is {MOST_DEVICES}")
    for block in study.blocks:
        o.check_model(args, block.model)
        specs.check_there(block.data)
        microbatches = block.microbatches or 1
        if args.microbatches and (microbatches & (microbatches - 1) or microbatches > block.global_batch):
            raise UsageError(
                f"a batch of {block.global_batch} is not cut into {microbatches} microbatches; take a power of two up "
                "to it"
            )
        # Strategies that cannot run somewhere are refused cell by cell; those that do not exist are a mistake.
        plain = [s.removesuffix("+replan") for s in block.strategies if s not in PIPELINES and not is_discipline(s)]
        baselines.check(tuple(plain), offered(), largest)


def _budget_share(remaining_s: float, work: Sequence[tuple[Block, Sequence[str]]]) -> float:
    """Seconds for the first block of the open ``work``: predictions get what they need, and measured blocks share the
    rest."""
    measured = sum(1 for block, open_strategies in work if open_strategies and block.mode == "measured")
    return max(_LEAST_S, remaining_s - _predicting_s(work)) / max(1, measured)


def _predicting_s(work: Sequence[tuple[Block, Sequence[str]]]) -> float:
    """Approximate seconds of planning for the predictions among the open ``work``."""
    return sum(_PLAN_S * len(open_strategies) for block, open_strategies in work if block.mode == "predicted")


def _local_devices(args: Arguments) -> tuple[bench_setup.DeviceType, int]:
    """Kind of device, and largest number of ranks to measure."""
    from asa.launch import cuda_devices, usable_cores

    device_args = Arguments({**vars(args), "gpus": None}, args.origin)
    device, count = bench_setup.device_of(device_args)
    max_ranks = cuda_devices() if device == "cuda" else max(_OVERSUBSCRIBED, usable_cores(), count)
    return device, max_ranks


def _device_name(device: bench_setup.DeviceType) -> str:
    """Name of this machine's devices."""
    return choose.local_device(device).name


def _is_other_machine(cluster: Cluster, device: bench_setup.DeviceType) -> bool:
    """Whether ``cluster`` has other devices than this machine, so that all cells are predicted for it."""
    named = cluster.device
    return named.type != device or (device == "cuda" and named.name != _device_name(device))


def _stored_study(folder: Path) -> Study | None:
    """The stored study, which is continued; None if there is none.

    Raises:
        InvalidInputError: it cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return codec.load(Study, path)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}; move it away to begin anew, or name another folder with --out") from None


def _cells(this: _Run, block: Block, strategy: str) -> list[StudyCell]:
    args, devices = this.args, this.name if block.mode == "measured" else block.cluster or ""
    return [
        block.cell(
            strategy, e, shape=_shape(block, args), optimizer=args.optimizer, devices=devices, classes=args.classes,
            memory_bytes=args.memory,
        )
        for e in block.epochs
    ]  # fmt: skip


def _open_strategies(this: _Run, block: Block) -> tuple[str, ...]:
    """Strategies of a block with a cell that has no result yet, or too few epochs; refused cells are tried again."""
    done = {c for c, row in this.rows.items() if row.state in ("measured", "predicted") and not row.ended_early}
    return tuple(s for s in block.strategies if not done.issuperset(_cells(this, block, s)))


def _shape(block: Block, args: Arguments) -> tuple[int, ...]:
    return _sample_shape(block.model, block.data, args.data_root, block.input_shape or None, args.classes)


@lru_cache(maxsize=64)
def _sample_shape(
    model: str, data: str, root: str | None, asked: tuple[int, ...] | None, classes: int | None
) -> tuple[int, ...]:  # fmt: skip
    """Shape of a sample: as asked for, or that of a row if the data are a table of numbers, or the model's own."""
    from asa.zoo.data.own import TableError
    from asa.zoo.models import default_input

    shape = default_input(model, asked, classes)[0]
    if asked is None and specs.is_own(data):
        try:
            bench_setup.images(data, root, shape)
        except TableError as error:
            return error.shape
        except AsaError:
            pass  # the block is refused with it
    return shape


def _block(this: _Run, block: Block, budget_s: float) -> None:
    """Run or predict the cells of a block, and store each result at once."""
    from asa.cli.commands import study_runners

    args, console = this.args, this.console
    block_args = _block_arguments(args, block)
    try:
        if block.mode == "predicted":
            results = study_runners.predict(block, block_args, console)
            _store_rows(this, block, block.strategies, results, "")
            return
        train, _ = bench_setup.images(block.data, args.data_root, _shape(block, args))
        bench_setup.adopt_classes(block_args, console, block.model, train)
        bench_setup.check_data(
            block_args, train, block_args.classes or train.num_classes, block.global_batch
        )  # before a profile
        site = _site(this, block, block_args, budget_s)
        train, _ = site.images()
        bench_setup.check_data(block_args, train, site.profile.graph.num_classes, block.global_batch)

        told = 0

        def on_results(results: Results) -> None:
            nonlocal told
            _store_rows(this, block, tuple(results), results, "", train.source, len(train), train.num_classes,
                        notes=tuple(site.notes[told:]))  # fmt: skip
            told = len(site.notes)  # what is said of one strategy is not said of the next
            _write(this)

        study_runners.run(site, on_results)
    except AsaError as error:
        _store_rows(this, block, block.strategies, None, str(error), refused=True)


def _site(this: _Run, block: Block, args: Arguments, budget_s: float) -> Site:
    """Links and profile of a block with the arguments ``args``, measured if necessary; the rest of its budget is for
    measuring."""
    from asa.cli.commands.study_runners import Site

    console, device = this.console, this.device
    began = time.monotonic()
    cluster = bench_setup.local_cluster(args, console, device, max(2, block.gpus) if device == "cpu" else block.gpus)
    limit = min(choose.PROFILE_LIMIT_S, max(_LEAST_S, 0.5 * budget_s))
    profile, origin = choose.local_profile(args, console, block.model, device, block.gpus, limit_s=limit)
    console.say(f"asa: {block.model}: {origin}")
    remaining_s = max(_LEAST_S, budget_s - (time.monotonic() - began) - _START_S)
    folder_name = slug(f"{block.model}.{block.data}.{block.gpus}.{block.global_batch}.{block.seed}")
    return Site(block=block, args=args, console=console, device=device, profile=profile, cluster=cluster,
                folder=this.folder / "blocks" / folder_name, budget_s=remaining_s)  # fmt: skip


def _block_arguments(args: Arguments, block: Block) -> Arguments:
    """The command's values, with lists replaced by the values of the block."""
    values = {
        **vars(args), "models": (block.model,), "data": block.data, "gpus": block.gpus, "seed": block.seed,
        "global_batch": block.global_batch, "precision": block.precision, "strategies": block.strategies,
    }  # fmt: skip
    shape = _shape(block, args)
    if not args.tokens and (block.input_shape or (specs.is_own(block.data) and len(shape) == 3)):
        values["input"] = shape
    origin = {**args.origin, "precision": "flag"}
    for name in ("origin", "words"):
        values.pop(name, None)
    return Arguments(values, origin, args.words)


def _store_rows(
    this: _Run, block: Block, strategies: Sequence[str], results: Results | None, why: str, source: str = "",
    samples: int | None = None, classes: int | None = None, *, refused: bool = False, notes: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Store a row for every strategy and number of epochs: results, or why there are none."""
    from asa.launch import usable_cores

    is_oversubscribed = block.mode == "measured" and block.gpus > usable_cores()
    if is_oversubscribed:
        notes = (*notes, f"{block.gpus} ranks on {usable_cores()} cores: times are no finding")
    for strategy in strategies:
        outcome = why if results is None else results[strategy]
        result, missing = (None, outcome) if isinstance(outcome, str) else (outcome, why)
        for cell in _cells(this, block, strategy):
            state: State = "refused" if refused else "open"
            reason = missing
            if result is not None:
                ran = result.step_time_s is not None
                is_predicted = block.mode == "predicted" and result.predicted_step_time_s is not None
                state = "measured" if ran else "predicted" if is_predicted else "refused"
                reason = "" if state != "refused" else result.why_not
            stored = this.rows.get(cell)
            if stored is not None and stored.result is not None and _trained(stored.result) > _trained(result):
                continue  # a run that the budget ended is better than none, and than one that it ended earlier
            shortened = None if result is None or state == "refused" else _until(result, cell.epochs)
            this.rows[cell] = StudyRow(
                cell=cell, state=state, result=shortened, why=reason, data_source=source, created=codec.now(),
                samples_per_epoch=samples or SAMPLES.get(block.data), num_classes=classes,
                oversubscribed=is_oversubscribed, asa_version=asa.__version__,
                notes=notes if state == "measured" else (),
            )  # fmt: skip


def _trained(result: BenchResult | None) -> float:
    """Epochs that a run trained; -1 without a run."""
    return -1.0 if result is None else result.accuracy[-1].epoch if result.accuracy else 0.0


def _until(result: BenchResult, epochs: int) -> BenchResult:
    """Results of a run up to ``epochs`` epochs."""
    if not result.accuracy or result.accuracy[-1].epoch <= epochs:
        return result
    return replace(result, accuracy=tuple(a for a in result.accuracy if a.epoch <= epochs) or result.accuracy[:1])


def _write(this: _Run) -> Study:
    """Write the current study to its folder, and return it. Its rows are in the order of the study, then those of other
    grids; results that another process has stored in the meantime are kept."""
    study, args, rows = this.study, this.args, this.rows
    stored = _stored_study(this.folder)
    for row in stored.rows if stored else ():
        if row.cell not in rows or (row.result is not None and rows[row.cell].result is None):
            rows[row.cell] = row
    cells = [cell for b in study.blocks for s in b.strategies for cell in _cells(this, b, s)]
    written = Study(
        name=study.name, title=study.title, created=codec.now(), published=study.published,
        rows=tuple(rows[cell] for cell in dict.fromkeys((*cells, *rows)) if cell in rows),
        differs=study.differs, target=args.target_accuracy, price=args.price,
    )  # fmt: skip
    codec.save(written, this.folder / FILE)
    return written


def _show_work(this: _Run, work: list[tuple[Block, tuple[str, ...]]]) -> None:
    """Show the open work and its estimated duration. What was refused before is expected to be refused again."""
    from asa.report.text import study as report

    study, folder, budget_s, items = this.study, this.folder, this.args.budget, []
    profiled: set[tuple[str, int]] = set()
    for block, open_strategies in work:
        refused = {c.strategy for s in open_strategies for c in _cells(this, block, s)
                   if c in this.rows and this.rows[c].state == "refused"}  # fmt: skip
        possible = tuple(s for s in open_strategies if s not in refused)
        seconds, basis = 0.0, "refused before, and tried again" if open_strategies else "done"
        if possible:
            seconds, basis = _estimate(this, block, possible, profiled)
        items.append(
            report.Planned(
                title=block.title, mode=block.mode, strategies=open_strategies or block.strategies,
                epochs=max(block.epochs), seconds=seconds, basis=basis,
            )
        )  # fmt: skip
    data = report.planned_document(study.name, folder, items, budget_s)
    this.console.result(data, lambda: report.planned(study.name, study.title, items, budget_s, folder))


def _estimate(
    this: _Run, block: Block, open_strategies: tuple[str, ...], profiled: set[tuple[str, int]]
) -> tuple[float, str]:
    """Estimated seconds of the open cells of a block, and the basis of the estimate."""
    from asa.cli.estimates import traced_before

    args = this.args
    block_args = _block_arguments(args, block)
    key = (block.model, block.global_batch)
    if block.mode == "predicted" and block.cluster is None:
        return 0.0, "refused: more ranks than this machine measures; name a cluster with --cluster"
    if block.mode == "predicted":
        traced = traced_before(block.model, block_args) or key in profiled
        profiled.add(key)
        basis = "planned" if traced else "traced, then planned"
        return _PLAN_S * len(open_strategies) + (0.0 if traced else _TRACE_S), basis
    try:
        samples = _num_samples(block.data, args.data_root, _shape(block, args))
    except AsaError as error:
        return 0.0, f"refused: {error}"
    stored_profile = choose.stored_local_profile(block_args, this.console, block.model, this.device, block.gpus)
    alone = sum(block.trains_separately or always_alone(s) for s in open_strategies)
    taking_turns = len(open_strategies) - alone
    starts_s = _START_S * (alone + bool(taking_turns))
    if stored_profile is None:
        first = 0.0 if key in profiled else choose.PROFILE_LIMIT_S
        profiled.add(key)
        share = args.budget / 2
        return first + _START_S + starts_s + min(share, 60.0 * max(block.epochs)), "profiled first, so a guess"
    step = single_device_step_s(stored_profile[0], block.global_batch)
    runs = float(alone)
    if taking_turns:  # on one rank all of them are the single device; one is compared with itself
        runs += (1 if block.gpus == 1 else taking_turns) + 1 + 3 / max(block.epochs)
    training = runs * max(block.epochs) * (samples // block.global_batch) * step
    passes = "1 epoch" if max(block.epochs) == 1 else f"{max(block.epochs)} epochs"
    return training + starts_s, f"{passes} of steps of {units.seconds(step)}"


@lru_cache(maxsize=8)
def _num_samples(data: str, root: str | None, shape: tuple[int, ...]) -> int:
    """Number of training samples that a measured block reads; made-up images are fewer than the official ones."""
    return len(bench_setup.images(data, root, shape)[0])


def single_device_step_s(profile: Profile, batch: int) -> float:
    """Approximate seconds of a step on one device: forward and backward of every component at the batch."""
    largest = max(t.microbatch for t in profile.timings)
    total_s = sum(
        t.forward.median + t.backward.median
        for t in profile.timings
        if t.tensor_degree == 1 and t.microbatch == largest
    )
    return total_s * batch / largest
