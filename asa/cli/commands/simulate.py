"""``asa simulate``: shows the timeline of a plan without running it."""

from __future__ import annotations

from pathlib import Path

from asa.cli import options as o
from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import UsageError
from asa.ir import codec
from asa.strategies import offered


def run(args: Arguments, console: Console) -> None:
    """Simulate one step, show it, and write the trace."""
    from asa.cli import choose
    from asa.report.text import timeline as report
    from asa.simulator import save_trace, simulate

    if args.trace:
        if not args.trace.endswith((".json", ".json.gz")):
            raise UsageError(f"--trace {args.trace}: Perfetto reads names that end in .json or .json.gz")
        places.check_writable(Path(args.trace), "--trace")
    path, plan = places.newest_plan(args.plan)
    profile, cluster = choose.origins(plan, console, args)
    timeline = simulate(plan, profile, cluster, offered())
    if plan.consistency is not None:
        console.say(choose.discipline_note(plan))
    if said := choose.numbers_note(plan, profile, cluster):
        console.say(said)
    data = {
        "kind": "timeline",
        "plan": str(path),
        "plan_fingerprint": codec.fingerprint(plan),
        "predicted_step_time_s": plan.prediction.step_time_s,
        **codec.to_data(timeline),
    }
    if args.trace:
        with places.keeping(console, Path(args.trace)):
            save_trace(timeline, Path(args.trace))
    console.result(data, lambda: report.render(timeline))
    if args.trace:
        console.say(f"asa: wrote {args.trace}; open it in Perfetto or chrome://tracing")


VERBS = (
    Verb(
        name="simulate",
        help="the timeline of one predicted step",
        run=run,
        options=(
            o.PLAN,
            Option(name="trace", help="trace file to write for Perfetto, .json or .json.gz", metavar="FILE"),
            o.PROFILE,
            o.option(o.CLUSTER, help="cluster that the plan was made for (default: found by fingerprint)"),
            o.JSON,
        ),
    ),
)
