"""``asa profile``: measure a model on this machine."""

from __future__ import annotations

from pathlib import Path

from asa.cli import options as o
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.ir import codec


def run(args: Arguments, console: Console) -> None:
    """Measure, save, show."""
    from asa.cli import places
    from asa.cli.choose import measured
    from asa.report import profile as report
    from asa.zoo.names import check

    places.check_writable(Path(args.output) if args.output else places.PROFILES / "profile.json", "-o")
    check(args.model)
    made, said = measured(
        args,
        console,
        args.model,
        args.device,
        limit_s=args.time_limit,
        max_degree=args.max_tensor_degree,
        output=Path(args.output) if args.output else None,
    )
    console.result(codec.document(made), lambda: report.render(made))
    console.say(f"asa: wrote {said.removesuffix(', measured now')}")


VERBS = (
    Verb(
        name="profile",
        help="time forward, backward and update of every component of a model on this machine",
        run=run,
        options=(
            o.MODEL,
            o.INPUT,
            o.TOKENS,
            o.CLASSES,
            o.option(o.GLOBAL_BATCH, help="largest batch to measure; smaller ones in powers of two (default: 64)"),
            o.DEVICE,
            o.PRECISION,
            Option(
                name="max-tensor-degree",
                help="measure shards of up to 1/N of a component's weights",
                parse=o.count,
                default=8,
                metavar="N",
            ),
            Option(
                name="time-limit",
                help="stop measuring after T (default: 75s)",
                parse=o.budget,
                default=75.0,
                metavar="T",
            ),
            o.option(
                o.OUTPUT,
                help="file to write (default: profiles/MODEL.DEVICE.PRECISION.json, or, where that is of another "
                "input, MODEL.CxHxW-K... beside it)",
            ),
            o.JSON,
        ),
        details="The profile goes to profiles/, where `asa plan` finds it.",
    ),
)
