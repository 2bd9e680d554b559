"""``asa bench``: one training under every strategy, measured side by side."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asa.cli import emulated, ending, places
from asa.cli import options as o
from asa.cli.commands import study_grid
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import UnavailableError, UsageError, WorkersFailedError, lacking
from asa.ir import codec

if TYPE_CHECKING:
    from asa.cli.bench_setup import DeviceType

STUDY = (
    "models", "strategies", "gpus", "global_batch", "budget", "device", "precision", "input", "tokens", "classes",
    "cluster", "memory", "optimizer", "lr", "data", "data_root", "seed", "epochs", "dry_run", "target_accuracy",
    "price", "microbatches", "study", "out", "json", "verbose",
)  # fmt: skip
"""Options that have an effect on a study: all but those of sealed predictions."""


def run(args: Arguments, console: Console) -> None:
    """Make and store all plans, measure them, show results and figures."""
    if args.study:
        from asa.cli.commands import study

        study.run(args, console)
        return
    take_single_values(args)
    if not (args.given("models") or args.check_sealed) and (known := places.own_profiles(console)):
        path, profile = known[0]
        args.replace(models=(profile.model_spec,))
        console.say(f"asa: --models: {profile.model_spec}, that of the newest profile {path}")
    if args.check_sealed:
        from asa.cli.commands import sealed

        sealed.run(args, console)
        return
    folder = Path(args.out) if args.out else places.new_folder(places.COMPARISONS, "bench")
    places.check_writable(folder / "bench.json", "--out")
    places.check_no_results(folder, "--out")
    for model in args.models:
        o.check_model(args, model)
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError(lacking("torch"))
    from asa.cli import bench_setup

    device, gpus = bench_setup.device_of(args)
    bench_setup.check(args, console, device, gpus)
    with places.taken(folder):
        _compare(args, console, folder, device, gpus)


def _compare(args: Arguments, console: Console, folder: Path, device: DeviceType, gpus: int) -> None:
    from functools import partial

    from asa.cli import bench_setup
    from asa.cli import comparison as c
    from asa.errors import InfeasibleError
    from asa.ir.bench import Bench
    from asa.report.pages import bench as page
    from asa.report.text import bench_screen as report

    created = codec.now()
    cluster = bench_setup.local_cluster(args, console, device, gpus)
    contests = [c.prepare(args, console, model, cluster, gpus, folder) for model in args.models]
    if not any(contest.plans for contest in contests):
        raise InfeasibleError(f"{contests[0].model}: {next(iter(contests[0].why_not.values()))}")
    for contest in contests:
        shape = contest.profile.graph.input_shape
        batch, classes = args.global_batch or contest.profile.global_batch, contest.profile.graph.num_classes
        bench_setup.check_data(args, bench_setup.images(args.data, args.data_root, shape)[0], classes, batch)
    started = codec.now()
    interruption: BaseException | None = None
    for contest in contests:
        graph = contest.profile.graph
        data = partial(bench_setup.images, args.data, args.data_root, graph.input_shape)
        if interruption is not None:
            contest.ended = "the comparison ended before its turn"
            continue
        try:
            c.measure(contest, args, console, device, args.budget / len(contests), data)
        except (KeyboardInterrupt, ending.Terminated, WorkersFailedError) as error:
            interruption = error
            contest.ended = contest.ended or "the comparison ended before its first round"
            console.say(f"asa: {contest.model}: {contest.ended}")
    if interruption is not None and not any(contest.cells for contest in contests):
        raise interruption
    machine = bench_setup.machine(device, gpus)
    if isinstance(args.device, emulated.EmulatedName):
        machine = replace(machine, device_name=contests[0].cluster.device.name)
    bench = Bench(
        created=created,
        started=started,
        environment=machine,
        settings=c.settings(args, contests, gpus, data()[0]),
        sealed=tuple(s for contest in contests for s in contest.sealed),
        results=tuple(r for contest in contests for r in c.results(args, contest)),
        scaling=tuple(p for contest in contests for p in c.scaling(contest)),
        comparisons=tuple(x for contest in contests for x in contest.comparisons),
        notes=(*c.unlike(args, contests), *(n for contest in contests for n in c.notes(contest))),
    )
    try:
        paths = page.write(bench, folder)
    finally:  # also if the disk is full: what was measured is told
        console.result(codec.document(bench), lambda: report.render(bench, verbose=args.verbose))
    console.say(f"asa: wrote {paths[0]} and {len(paths) - 1} files beside it")
    if interruption is not None:
        raise interruption


_LISTS = ("gpus", "global_batch", "data", "seed")


def take_single_values(args: Arguments) -> None:
    """Replace every option that takes a list for studies by its only value.

    Raises:
        UsageError: an option has several values.
    """
    for name in _LISTS:
        value = getattr(args, name)
        if isinstance(value, tuple):
            if len(value) > 1:
                shown = name.replace("_", "-")
                raise UsageError(
                    f"--{shown} {','.join(map(str, value))}: several make a grid; add --study grid, or name one"
                )
            args.replace(**{name: value[0]})


VERBS = (
    Verb(
        name="bench",
        help="measure the same training under several strategies, side by side",
        run=run,
        options=(
            Option(
                name="models",
                help="models to train (default: that of the newest profile, otherwise resnet50)",
                parse=o.names,
                default=("resnet50",),
                metavar="A,B",
            ),
            o.option(o.STRATEGIES, help="strategies to compare (default: single,ddp,tensor,hybrid,asa)"),
            o.option(
                o.GPUS,
                help="number of ranks (default: all GPUs, or all cores); several with --study",
                parse=o.counts,
                metavar="N,N",
            ),
            o.option(
                o.GLOBAL_BATCH,
                help="samples per optimizer step, over all ranks (default: the profile's); several with --study",
                parse=o.counts,
                metavar="B,B",
            ),
            o.span("budget", help="time for measuring: 90s, 10m (default: 5m)", default=300.0),
            Option(
                name="study",
                help="run a published comparison, or with grid all combinations of the other options; can be resumed",
                choices=study_grid.known(),
                metavar="NAME",
                heeds=STUDY,
            ),
            Option(
                name="epochs",
                help="with --study: epochs to train; several: results after each (default: the study's)",
                parse=o.counts,
                metavar="E,E",
                needs="study",
            ),
            o.switch("dry-run", help="with --study: show what would run, and about how long it takes", needs="study"),
            Option(
                name="target-accuracy",
                help="with --study: report epochs, time and cost to this accuracy, as in 0.9",
                parse=o.share,
                metavar="A",
                needs="study",
            ),
            o.option(o.PRICE, help=f"{o.PRICE.help}: report costs of an epoch, and with --study of a run"),
            o.option(o.MICROBATCHES, help=f"with --study: {o.MICROBATCHES.help}", needs="study"),
            o.option(
                o.DEVICE,
                help="where to run; auto: CUDA if there is a GPU; emulated: sleep for the times in a profile, X times "
                "as long",
                choices=(),
                parse=emulated.device,
                metavar=emulated.METAVAR,
            ),
            o.PRECISION,
            o.INPUT,
            o.TOKENS,
            o.CLASSES,
            o.CLUSTER,
            o.MEMORY,
            o.OPTIMIZER,
            o.LEARNING_RATE,
            o.option(o.DATA, help=f"{o.DATA.help}; several with --study", parse=o.several_data, default=("cifar100",)),
            o.option(o.DATA_ROOT, needs=""),
            o.option(o.SEED, help=f"{o.SEED.help}; several with --study", parse=o.seeds, default=(0,), metavar="S,S"),
            o.switch(
                "check-sealed",
                help="measure what was predicted before for machines like this one, and score the predictions",
                heeds=("models", "gpus", "budget", "device", "seed", "sealed", "json"),
            ),
            Option(
                name="sealed",
                help="folder of those predictions, for --check-sealed (default: benchmarks/sealed)",
                metavar="DIR",
                needs="check_sealed",
            ),
            Option(
                name="out",
                help="folder for results (default: runs/bench/bench-TIME or runs/bench/study-NAME)",
                metavar="DIR",
            ),
            o.option(o.VERBOSE, help="show spreads, communication, every pair and all versions"),
            o.JSON,
        ),
        details="Missing profiles and plans are made first. Plans are written and hashed before anything is measured.",
    ),
)
