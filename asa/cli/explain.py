"""``asa explain``: why this plan, and why not another."""

from __future__ import annotations

from asa.cli import options as o
from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.ir import codec


def run(args: Arguments, console: Console) -> None:
    """Price the plan again, component by component; with --why-not, beside another one."""
    from asa.cli.choose import origins
    from asa.planner.answer.explain import explain, why_not
    from asa.report import explain as report
    from asa.report.plan import headline, measured
    from asa.strategies import offered

    path, plan = places.newest_plan(args.plan)
    profile, cluster = origins(plan, console, args)
    data = {"schema_version": codec.SCHEMA_VERSION, "plan": str(path), "plan_fingerprint": codec.fingerprint(plan)}
    if plan.measured is not None:
        data["measured"] = codec.to_data(plan.measured)
    if args.why_not:
        other = why_not(plan, profile, cluster, offered(), args.why_not, memory_bytes=args.memory)
        data |= {"kind": "difference", **codec.to_data(other)}
        console.result(data, lambda: [headline(plan), *report.versus(other)])
    else:
        found = explain(plan, profile, cluster, offered(), memory_bytes=args.memory)
        data |= {"kind": "explanation", **codec.to_data(found)}
        console.result(data, lambda: [headline(plan), *report.render(found), *measured(plan)])


VERBS = (
    Verb(
        name="explain",
        help="what each component costs in a plan, its next best choice, and why not another strategy",
        run=run,
        options=(
            o.PLAN,
            Option(
                name="why-not",
                help="a whole strategy (ddp), or COMPONENT=STRATEGY[@DEGREE] to force one choice",
                metavar="STRATEGY",
            ),
            o.PROFILE,
            o.option(o.CLUSTER, help="the cluster it was made for (default: found by its fingerprint)"),
            o.MEMORY,
            o.JSON,
        ),
    ),
)
