"""``asa bench``: the same training under every strategy, measured side by side."""

from __future__ import annotations

from pathlib import Path

from asa.cli import emulated, places
from asa.cli import options as o
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.ir import codec


def run(args: Arguments, console: Console) -> None:
    """Plan everything, write it down, measure, show, draw."""
    from functools import partial

    if args.check_sealed:
        from asa.cli import sealed

        sealed.run(args, console)
        return
    from asa.cli import bench_setup
    from asa.cli import comparison as c
    from asa.errors import InfeasibleError
    from asa.ir.bench import Bench
    from asa.report import bench as report
    from asa.report import page
    from asa.zoo import names

    created = c.now()
    folder = Path(args.out) if args.out else places.new_folder(places.COMPARISONS, "bench")
    for model in args.models:
        names.check(model)
    device, gpus = bench_setup.device_of(args)
    bench_setup.check(args, folder, gpus)
    cluster = bench_setup.cluster_here(args, console, device, gpus)
    contests = [c.prepare(args, console, model, cluster, gpus, folder) for model in args.models]
    if not any(contest.plans for contest in contests):
        raise InfeasibleError(f"{contests[0].model}: {next(iter(contests[0].why_not.values()))}")
    for contest in contests:
        shape = contest.profile.graph.input_shape
        batch, classes = args.global_batch or contest.profile.global_batch, contest.profile.graph.num_classes
        bench_setup.check_data(args, bench_setup.images(args.data, args.data_root, shape)[0], classes, batch)
    started = c.now()
    for contest in contests:
        graph = contest.profile.graph
        data = partial(bench_setup.images, args.data, args.data_root, graph.input_shape)
        c.measure(contest, args, console, device, args.budget / len(contests), data)
    made = Bench(
        created=created,
        started=started,
        environment=bench_setup.environment(device, cluster, gpus),
        settings=c.settings(args, contests, gpus, data()[0]),
        sealed=tuple(s for contest in contests for s in contest.sealed),
        results=tuple(r for contest in contests for r in c.results(args, contest)),
        scaling=tuple(p for contest in contests for p in c.scaling(contest)),
        comparisons=tuple(x for contest in contests for x in contest.comparisons),
        notes=tuple(n for contest in contests for n in c.notes(contest)),
    )
    paths = page.write(made, folder)
    console.result(codec.document(made), lambda: report.render(made))
    console.say(f"asa: wrote {paths[0]} and {len(paths) - 1} files beside it")


VERBS = (
    Verb(
        name="bench",
        help="the same training under every strategy on the same ranks, data and seed, taking turns",
        run=run,
        options=(
            Option(
                name="models",
                help="models to compare on (default: resnet50)",
                parse=o.names,
                default=("resnet50",),
                metavar="A,B",
            ),
            o.option(o.STRATEGIES, help="strategies to compare (default: single,ddp,tensor,hybrid,asa)"),
            o.option(o.GPUS, help="ranks (default: all CUDA devices, or the cores)"),
            o.option(o.GLOBAL_BATCH, help="samples per optimizer step, over all ranks (default: the profile's)"),
            Option(name="budget", help="time for measuring (default: 5m)", parse=o.budget, default=300.0, metavar="T"),
            o.option(
                o.DEVICE,
                help="where to run; auto takes CUDA if there is one; an emulated one sleeps as long as its profile "
                "says (X times as long)",
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
            o.DATA,
            o.DATA_ROOT,
            o.SEED,
            Option(
                name="check-sealed",
                help="instead: measure what was foretold of machines like this one before anybody measured it",
                switch=True,
                default=False,
                heeds=("models", "gpus", "budget", "device", "seed", "sealed", "json"),
            ),
            Option(
                name="sealed",
                help="folder of sealed predictions, for --check-sealed (default: benchmarks/sealed)",
                metavar="DIR",
                needs="check_sealed",
            ),
            Option(name="out", help="folder to write to (default: runs/bench/bench-TIME)", metavar="DIR"),
            o.JSON,
        ),
        details="Profiles and plans what it needs first; plans are written and hashed before anything is measured.",
    ),
)
