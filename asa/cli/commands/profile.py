"""``asa profile``: measures a model on this machine."""

from __future__ import annotations

from pathlib import Path

from asa.cli import options as o
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.ir import codec


def run(args: Arguments, console: Console) -> None:
    """Measure the model, store and show its profile."""
    from asa.cli import places
    from asa.cli.choose import measured, note_similar_name
    from asa.report.text import profile as report

    places.check_writable(Path(args.output) if args.output else places.PROFILES / "profile.json", "-o")
    o.check_model(args, args.model)
    note_similar_name(args, console, args.model)
    if args.staleness:
        from asa.cli.commands import staleness

        staleness.check(args)
    profile, sentence = measured(
        args,
        console,
        args.model,
        args.device,
        limit_s=args.time_limit,
        max_degree=args.max_tensor_degree,
        output=Path(args.output) if args.output else None,
    )
    data = codec.document(profile)
    path = sentence.removesuffix(", measured now")
    if not args.staleness:
        console.result(data, lambda: report.render(profile, verbose=args.verbose))
        console.say(f"asa: wrote {path}")
        return
    from asa.report.text import staleness as curve_report

    curves, curves_path = staleness.measure(args, console, profile, Path(path.removeprefix("profile ")))
    data["staleness"] = codec.document(curves)
    console.result(data, lambda: [*report.render(profile, verbose=args.verbose), *curve_report.render(curves)])
    console.say(f"asa: wrote {path} and {curves_path}")


VERBS = (
    Verb(
        name="profile",
        help="measure forward, backward and update of every component of a model on this machine",
        run=run,
        options=(
            o.MODEL,
            o.INPUT,
            o.TOKENS,
            o.CLASSES,
            o.option(
                o.GLOBAL_BATCH,
                help="largest batch to measure, in samples; smaller ones are measured, too (default: 64, on a GPU 256)",
            ),
            o.DEVICE,
            o.PRECISION,
            o.MEMORY_FORMAT,
            o.COMPILE,
            o.number("max-tensor-degree", help="measure tensor parallelism up to this degree", default=8),
            o.span("time-limit", help="stop measuring after this time: 90s, 10m (default: 75s)", default=75.0),
            o.switch(
                "staleness",
                help="also measure, on one device, how late gradients and rare synchronisation slow down learning",
            ),
            o.option(
                o.DATA,
                help="data set for --staleness (default: digits)",
                default="digits",
                needs="staleness",
            ),
            o.option(o.DATA_ROOT, needs="staleness"),
            o.option(o.OPTIMIZER, help="optimizer for --staleness", needs="staleness"),
            o.option(o.LEARNING_RATE, needs="staleness"),
            o.option(
                o.STRATEGIES,
                help="disciplines whose curves --staleness measures first, as in local_sgd:period=8 (default: none)",
                needs="staleness",
            ),
            Option(
                name="workers",
                help="number of workers for --staleness",
                parse=o.several,
                default=4,
                metavar="N",
                needs="staleness",
            ),
            o.number("seeds", help="number of runs for each setting of --staleness", default=5, needs="staleness"),
            o.number(
                "steps",
                help="global batches of each run of --staleness: as many as the training will have",
                default=200,
                needs="staleness",
            ),
            o.span(
                "staleness-limit",
                help="start no run of --staleness after this time: 90s, 10m (default: 5m)",
                default=300.0,
                needs="staleness",
            ),
            o.option(
                o.OUTPUT,
                help="file to write (default: profiles/MODEL.DEVICE.PRECISION.json, or MODEL.CxHxW-K... if that has "
                "another input size or number of classes)",
            ),
            o.option(o.VERBOSE, help="show every component, microbatch and tensor degree, and what was skipped"),
            o.JSON,
        ),
        details="The profile goes to profiles/, where `asa plan` finds it.",
    ),
)
