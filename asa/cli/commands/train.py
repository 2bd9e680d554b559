"""``asa train``: trains under a plan, and compares prediction and measurement after every epoch."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asa.cli import emulated, places, planned_here
from asa.cli import options as o
from asa.cli.commands.rehearse import OPTIONS as REHEARSAL
from asa.cli.commands.rehearse import rehearse
from asa.cli.console import Console, Report
from asa.cli.ending import left_to_ranks
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import AsaError, InvalidInputError, NoCheckpointError, UnavailableError, UsageError
from asa.executor.training.trackers import NAMES as TRACKERS
from asa.ir import codec
from asa.ir.graph import DEPENDS
from asa.ir.measurements import EpochRecord
from asa.ir.optimizers import check_optimizer, planned_as
from asa.ir.plan import Plan, wrong_number
from asa.ir.units import time_span
from asa.launch import signals
from asa.launch.devices import check_cuda, usable_cores
from asa.launch.environments import is_launched
from asa.profiler.paths import slug
from asa.strategies import offered
from asa.zoo import names, specs
from asa.zoo.preload import ModelPreload

if TYPE_CHECKING:
    from asa.executor.training.logs import Work
    from asa.executor.training.settings import TrainSettings

_NOTABLE = 0.05
"""Fraction of a step spent waiting for data from which on a run reports it."""


def run(args: Arguments, console: Console) -> None:
    """Find the plan, pass it to the executor with the loop over epochs, and print events.

    Raises:
        PreemptedError: SIGTERM; everything is saved.
    """
    signals.begun = False
    # Usually before the slow import of torch, so that errors appear at once.
    path, plan, out = plan_and_folder(args, console)
    if args.origin["gpus"] == "flag" and args.gpus != plan.gpus:  # a settings file applies to all commands and plans
        if not args.resume or args.rehearse is not None or args.no_replan or is_launched():
            raise UsageError(f"the plan is for {plan.gpus} devices, asked for {args.gpus}; plan again with --gpus")
        from asa.cli.replanning import regroup

        console.say(f"asa: planning again, for {args.gpus} devices in place of {plan.gpus}")
        plan = regroup(console, plan, args.gpus)
    if args.rehearse is not None:
        rehearse(args, console, plan)
        return
    if not is_launched() and args.device in ("cuda", "auto") and "cuda" in (args.device, plan.device_type):
        check_cuda(plan.num_processes, "train with --device cpu")
    if args.resume:
        recall(args, out, console)
    else:
        _check_launched(plan, out)
    known_classes = specs.CLASSES.get(args.data, 0)
    if known_classes and plan.sample_shape and not isinstance(args.device, emulated.EmulatedName):
        specs.check_classes(args.data, known_classes, plan.num_classes)
    traces = sorted((out / "trace").glob("*.json.gz")) if args.trace and console.first_rank else ()
    with left_to_ranks(is_launched()), places.keeping(console, *traces):
        _train(args, console, path, plan, out)


def _check_launched(plan: Plan, out: Path) -> None:
    """Check the number of ranks of a launcher before torch is imported and the ranks meet. Ranks on several machines
    are counted once they have met: another number there may continue a run that a machine has joined or left.

    Raises:
        UsageError: a new run on another number of ranks than planned.
    """
    started, here = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE")
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or (out / "agent").exists()
    known = is_launched() and started.isdecimal() and started == here and not again
    if known and int(started) != plan.num_processes:
        raise wrong_number(plan, int(started))


def _train(args: Arguments, console: Console, path: Path, plan: Plan, out: Path) -> None:
    pretended, description = None, ""
    if isinstance(args.device, emulated.EmulatedName):
        pretended, plan = emulated.pretended(args.device, plan, console)
        description = args.device.description(pretended.profile)

    with ModelPreload(
        plan.model_spec, num_classes=plan.num_classes, input_shape=plan.sample_shape, seed=args.seed
    ) as model:
        from asa.cli.replanning import adapting, regroup
        from asa.executor.running.run import train
        from asa.instruments.other_load import watching

    if args.compress is not None and args.compress != plan.compression:
        console.say(f"asa: gradients travel as {args.compress}, predictions are for {plan.compression}")
        plan = replace(plan, compression=args.compress)
    if args.optimizer is not None and planned_as(args.optimizer) != plan.optimizer:
        console.say(f"asa: trained with {args.optimizer}; memory and updates are predicted for {plan.optimizer}")
    for note in plan.notes if plan.num_processes * plan.num_microbatches > 1 else ():
        if note.endswith(DEPENDS):
            console.say(f"asa: {note}")
    words = planned_here.words(args, path, VERBS[0].options)
    settings = _settings(args, plan, out, pretended=pretended is not None)
    correct = not (pretended or plan.consistency)
    adapt, relieve = adapting(plan, console, replan=settings.replan, correct=correct, out=out)
    with watching() as others, console.progress(f"training {plan.model_spec}") as progress:
        result = train(
            plan,
            settings,
            strategies=offered(),
            adapt=adapt,
            relieve=relieve,
            regroup=partial(regroup, console) if settings.replan or (plan.consistency and not args.no_replan) else None,
            on_event=lambda event: print_event(
                event, console, progress, trained=not description, metric=settings.metric
            ),
            command=("train", *words),
            emulated=pretended,
            model=model,
            work=None if pretended else work_of(plan, console),
        )
    if description and "kind" in result:  # absent on a launcher's other ranks
        result = emulated.mark(result, description, out)
    if result.get("summary"):
        from asa.report.text.tables import folded
        from asa.report.text.training import aim, summary
        from asa.report.text.verdicts import others_work

        for line in [*summary(result["summary"]), *(aim(result["aim"], settings.metric) if "aim" in result else [])]:
            console.line(folded(line))
        # A launcher's ranks are not children of this process, and count as others.
        own = plan.device_type == "cpu" and not pretended and not is_launched()
        if own and (busy := others_work(others.cores, usable_cores(), plan.num_processes)):
            console.line(folded(f"{busy} meanwhile: a prediction is of a quiet machine"))
    console.document(result)
    written = (out / "result.json").is_file()
    console.say(f"asa: wrote {out}/result.json" if written else f"asa: {out}/result.json could not be written")
    if args.trace and console.first_rank:
        console.say(f"asa: {save_timelines(plan, out, console)}")


def _settings(args: Arguments, plan: Plan, out: Path, *, pretended: bool) -> TrainSettings:
    """The settings of a run in folder ``out``, most of which are options of the same name; ``pretended``: on emulated
    devices."""
    from asa.executor.training.settings import TrainSettings

    settings = {
        **{name: value for name, value in vars(args).items() if name in TrainSettings.__annotations__},
        "out": str(out),
        "device": "cpu" if pretended else args.device,
        # A new plan could change the discipline, which the user did not ask for.
        "replan": not (args.no_replan or pretended or plan.consistency),
        "trace_steps": args.trace or 0,
        "observe": not args.no_observe,
        "save_every_s": args.save_every,
        "timeout_s": args.timeout,
    }
    return TrainSettings(**settings)


def work_of(plan: Plan, console: Console) -> Work | None:
    """FLOPs of a sample and of a device, for MFU; None if the profile or the cluster of the plan is missing."""
    from asa.cli.choose import origins
    from asa.cli.comparison import flops_per_sample
    from asa.executor.training.logs import Work

    try:
        profile, cluster = origins(plan, console)
    except AsaError:
        return None
    count = plan.num_processes
    peak = cluster.ordered(plan.devices).peak_flops(plan.precision, count) / count
    return Work(flops_per_sample=flops_per_sample(profile), peak_flops_per_s=peak)


def save_timelines(plan: Plan, out: Path, console: Console) -> str:
    """Combine planned and measured timelines in one trace; returns a sentence with its path."""
    from asa.cli.choose import origins
    from asa.report import trace

    measured = sorted((out / "trace").glob("rank_*.json.gz"), key=lambda p: int(p.name[5:].split(".")[0]))
    if not measured:
        return "too few steps for a trace"
    try:
        from asa.simulator import simulate

        profile, cluster = origins(plan, console)
        planned = simulate(plan, profile, cluster, offered())
    except AsaError as error:
        return f"wrote {out}/trace/rank_*.json.gz; nothing planned to put beside: {error}"
    path = out / "trace" / "plan_and_run.json.gz"
    trace.save_together(planned, measured, path)
    return f"wrote {path}; open it in Perfetto: every rank as planned and as measured"


def print_event(
    event: dict[str, Any], console: Console, progress: Report, *, trained: bool = True, metric: str = "accuracy"
) -> None:
    """Print one event of a run for people: epoch lines to stdout, the rest to stderr. ``trained`` False: emulated.
    ``metric``: name of the figure of validation."""
    from asa.report.text.story import said
    from asa.report.text.tables import folded
    from asa.report.text.training import epoch_line
    from asa.report.units import ranks

    match event["event"]:
        case "start":
            console.say(f"asa: {event['model']} on {ranks(event['ranks'])}; {event['data'][0]}")
            if not is_launched():
                console.say(f"asa: the same under torchrun: {event['torchrun']}", verbatim=True)
        case "steps":
            waiting = f", {100 * event['data_wait_share']:.0f} % data" if event["data_wait_share"] >= _NOTABLE else ""
            progress(event["fraction"], f"loss {event['loss']:.3f}, {event['samples_per_s']:.0f} samples/s{waiting}")
        case "epoch":
            record = codec.build(
                EpochRecord, {k: event[k] for k in event if k not in ("event", "line")}, source="epoch"
            )
            console.line(epoch_line(record, trained=trained, metric=metric))
        case "note" | "lost" | "returned":
            console.say(f"asa: {said(event)}")
        case "finding" | "replan":
            console.line(folded(f"  {said(event)}"))
        case _:
            pass


def plan_and_folder(args: Arguments, console: Console) -> tuple[Path, Plan, Path]:
    """The plan with its file, and the run's folder: a new one, or with ``--resume`` the named or newest one.

    Raises:
        InvalidInputError: no plan, or one that cannot be used; no folder of data.
        NoCheckpointError: nothing to resume.
        UnavailableError: the folder cannot be written.
    """
    for what in names.AIMS:
        names.check_aim(what, getattr(args, what))
    specs.check_there(args.data)
    check_trackers((*args.track, *(("tensorboard",) if args.tensorboard else ())))
    if args.data_root and not args.download and not Path(args.data_root).exists():
        raise InvalidInputError(f"--data-root {args.data_root} does not exist")
    has_model = planned_here.names_a_model(args)
    if not args.resume:
        if args.out:
            places.check_writable(Path(args.out) / "plan.json", "--out")  # before minutes of profiling
            if not is_launched():  # a launcher's ranks may be a restart of that run
                places.check_free(Path(args.out))
                places.check_unused(Path(args.out))
                if (Path(args.out) / "log.jsonl").is_file():
                    console.say(f"asa: {args.out} has a run that ended before its first epoch; its log is continued")
        path, plan = planned_here.planned(args, console) if has_model else places.newest_plan(args.plan)
        out = Path(args.out) if args.out else places.new_folder(places.TRAINING, slug(plan.model_spec))
        places.check_writable(out / "plan.json", "--out")
        return path, plan, out
    runs = places.newest_runs()
    if not args.out and not runs:
        raise NoCheckpointError(f"no run in {places.TRAINING}/ to resume; name one with --out")
    out = Path(args.out) if args.out else runs[0]
    if not out.exists():
        raise NoCheckpointError(f"no run in {out} to resume: there is no such folder; leave out --resume to start anew")
    plan_file = out / "plan.json"
    if not is_launched():  # a launcher's first rank holds the lock while the others start
        places.check_free(out)
    if has_model:  # continue under a new plan or another discipline
        if args.rehearse is None and not any((out / "checkpoints").glob("step_*")):  # before minutes of profiling
            raise NoCheckpointError(f"no checkpoint in {out / 'checkpoints'}; leave out --resume to start anew")
        return *planned_here.planned(args, console), out
    if not args.plan and not os.path.lexists(plan_file):
        return plan_file, _plan_of_checkpoint(out, console), out
    try:
        path, plan = places.newest_plan(args.plan or str(plan_file))
    except InvalidInputError as error:
        if args.plan:
            raise
        remedy = "remove it, and that of the newest checkpoint is taken"
        raise InvalidInputError(f"{error}; {remedy}") from None
    return path, plan, out


def _plan_of_checkpoint(out: Path, console: Console) -> Plan:
    """The plan of the newest checkpoint in ``out``, whose own is lost.

    Raises:
        NoCheckpointError: there is none.
    """
    if any((out / "checkpoints").glob("step_*")):  # else torch is not imported
        from asa.executor.training.checkpoint import newest_manifest

        manifest = newest_manifest(out / "checkpoints")
        if manifest is not None:
            console.say(f"asa: {out} has no plan.json; the plan is that of its checkpoint of step {manifest.step}")
            return manifest.plan
    raise NoCheckpointError(
        f"no run in {out} to resume: it has no plan.json and no checkpoint; leave out --resume to start anew"
    )


_RECALLED = (
    "data", "data_root", "epochs", "steps_per_epoch", "lr", "optimizer", "seed", "loss", "metric", "schedule",
    "target_accuracy", "price",
)  # fmt: skip


def recall(args: Arguments, out: Path, console: Console) -> None:
    """Fill in settings that command line and environment leave open from the run in ``out``. They take precedence over
    a configuration file, which is for new runs."""
    from asa.executor.running.stored_settings import recalled

    earlier, notes = recalled(out)
    for note in notes:
        console.say(f"asa: {note}")
    typed = {name for name in _RECALLED if args.origin[name] == "flag" or args.origin[name].startswith("env ")}
    if "data" in typed:
        typed.add("data_root")
    changes = {n: earlier[n] for n in _RECALLED if n in earlier and n not in typed and earlier[n] != getattr(args, n)}
    lost = [n for n in ("epochs", "lr") if n not in earlier and n not in typed]
    if lost and (out / "checkpoints").is_dir():
        raise UsageError(
            f"what the run in {out} was given is lost: no settings.json, no checkpoint and no log tells; say "
            f"{' and '.join(f'--{n}' for n in lost)}"
        )
    if changes:
        args.replace(**changes)
        options = " ".join(f"--{n.replace('_', '-')} {v}" for n, v in changes.items() if v is not None)
        console.say(f"asa: as in the run before: {options}")


def saving(text: str) -> float | None:
    """Parse a time span, or ``never`` as None."""
    return None if text.strip() == "never" else time_span(text)


def trackers(text: str) -> tuple[str, ...]:
    """Parse names of trackers; duplicates are removed.

    Raises:
        UsageError: an unknown one.
    """
    chosen = o.names(text)
    for name in chosen:
        if name not in TRACKERS:
            raise UsageError(f"no tracker {name!r}; there are {', '.join(TRACKERS)}")
    return chosen


def check_trackers(chosen: tuple[str, ...]) -> None:
    """Check that trackers are installed, without importing them.

    Raises:
        UnavailableError: one is not.
    """
    for name in chosen:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise UnavailableError(
                f"--track {name} needs a package: pip install 'asa-parallel[{name}]', or leave out --track {name}"
            )


VERBS = (
    Verb(
        name="train",
        help="train under a plan, starting the workers or as one of torchrun's, and check it after every epoch",
        run=run,
        options=(
            o.option(
                o.PLAN,
                help="a plan file, or a model to plan for this machine (default: the newest plan in runs/plans)",
                metavar="PLAN|MODEL",
            ),
            o.DATA,
            o.number("epochs", help="passes over the data", default=1, metavar="E"),
            o.LEARNING_RATE,
            o.option(
                o.OPTIMIZER,
                help="sgd, adamw, adam, rmsprop or another of torch.optim, or package.module:factory (default: the "
                "plan's)",
                default=None,
                choices=(),
                parse=check_optimizer,
                metavar="NAME",
            ),
            o.SEED,
            o.switch("resume", help="continue the run in --out, or the newest run, with that run's settings"),
            Option(name="out", help="folder of the run (default: runs/train/MODEL-TIME)", metavar="DIR"),
            *REHEARSAL[1:2],
            *planned_here.OPTIONS,
            Option(
                name="loss",
                help="cross_entropy, mse, bce, or package.module:factory of a mean over samples",
                default="cross_entropy",
                metavar="NAME",
            ),
            Option(
                name="metric",
                help="figure for validation: accuracy, top5, or package.module:factory of one figure a sample",
                default="accuracy",
                metavar="NAME",
            ),
            Option(
                name="schedule",
                help="course of the learning rate: cosine, linear, constant, step, or package.module:factory",
                default="cosine",
                metavar="NAME",
            ),
            o.number("steps-per-epoch", help="end every epoch after N steps (default: all data)"),
            Option(
                name="target-accuracy",
                help="report epochs, time and cost to this figure of validation, as in 0.9",
                parse=o.share,
                metavar="A",
            ),
            o.option(o.PRICE, help=f"{o.PRICE.help}: report costs"),
            o.DATA_ROOT,
            o.switch(
                "download", help="download official files that are missing", needs=o.DATA_ROOT.needs, harmless=True
            ),
            Option(
                name="save-every",
                help="also save inside an epoch, after this much training: 90s, 10m, never (default: 10m)",
                parse=saving,
                default=600.0,
                metavar="T",
            ),
            o.switch("no-replan", help="keep the plan, even if devices become slow; end if a rank is lost"),
            o.switch(
                "no-observe", help="do not record, step by step, what each rank computes and for which rank it waits"
            ),
            o.number(
                "trace", help="record N steps as a timeline for Perfetto, next to the planned one, in the run's folder"
            ),
            o.switch("tensorboard", help="write TensorBoard logs"),
            Option(
                name="track",
                help="write curves on this machine for tensorboard, wandb (offline) or mlflow",
                parse=trackers,
                default=(),
                metavar="A,B",
            ),
            o.span(
                "timeout",
                help="time without a sign of life after which a rank counts as hung: 90s, 10m (default: 5m)",
                default=300.0,
            ),
            o.option(o.COMPRESS, help=f"{o.COMPRESS.help} (default: the plan's)"),
            o.option(
                o.DEVICE,
                help="where to run; auto: as planned; emulated: sleep for the times in a profile, X times as long, "
                "and train nothing",
                choices=(),
                parse=emulated.device,
                metavar=emulated.METAVAR,
            ),
            *REHEARSAL[:1],
            *REHEARSAL[2:],
            o.JSON,
        ),
        details="Everything goes to the run's folder: log.jsonl, checkpoints, plan.json, result.json. SIGTERM saves, "
        "then ends with exit code 75; before the first step there is nothing to save.",
    ),
)
