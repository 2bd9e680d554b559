"""``asa explain``: reasons for a plan and against others, or the history of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asa.cli import options as o
from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import InvalidInputError, UsageError
from asa.ir import codec
from asa.reading import open_regular
from asa.strategies import offered

LOG = "log.jsonl"
_MOST_LOG = 2**30
"""Largest number of bytes of a log: years of a line every few seconds."""


def run(args: Arguments, console: Console) -> None:
    """Show the cost of every component of the plan; with --why-not, compare the plan with another one."""
    from asa.cli import choose
    from asa.planner.questions.explain import explain, why_not
    from asa.report.text import explain as report
    from asa.report.text.plan import headline, measured

    is_run = args.plan is not None and Path(args.plan).is_dir()
    places.check_report(args.report, Path(args.plan) if is_run else None)
    if is_run:
        _show_run(args, console)
        return
    path, plan = places.newest_plan(args.plan)
    profile, cluster = choose.origins(plan, console, args)
    if plan.consistency is not None:
        console.say(choose.discipline_note(plan))
    if said := choose.numbers_note(plan, profile, cluster):
        console.say(said)
    data = {"plan": str(path), "plan_fingerprint": codec.fingerprint(plan)}
    if plan.measured is not None:
        data["measured"] = codec.to_data(plan.measured)
    other = why_not(plan, profile, cluster, offered(), args.why_not, memory_bytes=args.memory) if args.why_not else None
    causes = explain(plan, profile, cluster, offered(), memory_bytes=args.memory)
    if other is not None:
        data |= {"kind": "difference", **codec.to_data(other)}
        console.result(data, lambda: [headline(plan), *report.versus(other)])
    else:
        data |= {"kind": "explanation", **codec.to_data(causes)}
        console.result(data, lambda: [headline(plan), *report.render(causes, verbose=args.verbose), *measured(plan)])
    if args.report:
        from asa.report.pages import plan as plan_page

        with places.keeping_page(console, args.report):
            page = plan_page.write(plan, Path(args.report), causes, other)
        console.say(f"asa: wrote {page}")


def _show_run(args: Arguments, console: Console) -> None:
    """Show the history of the run in a folder."""
    from asa.report.text.story import render, story

    for name in ("why_not", "profile", "cluster", "memory"):
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} asks of a plan, and {args.plan} is a run's folder; name its plan.json"
            )
    if not (Path(args.plan) / LOG).exists():
        raise InvalidInputError(f"{args.plan} has no {LOG}, so it is no run's folder; name one of {places.TRAINING}/")
    history = story(events(Path(args.plan) / LOG))
    if not history.happenings and not history.stretches:
        raise InvalidInputError(f"{Path(args.plan) / LOG} tells of no run")
    data = {"kind": "story", "run": str(args.plan), **codec.to_data(history)}
    console.result(data, lambda: render(history))
    if args.report:
        from asa.ir.plan import Plan
        from asa.report import trace
        from asa.report.pages import run as run_page

        run = Path(args.plan)
        begun = codec.load(Plan, run / "plan.json") if (run / "plan.json").is_file() else None
        traced = run / "trace" / "plan_and_run.json.gz"
        beside = trace.load(traced) if traced.is_file() else None
        name = run.resolve().name
        with places.keeping_page(console, args.report):
            page = run_page.write(history, events(run / LOG), Path(args.report), begun, name, beside)
        console.say(f"asa: wrote {page}")


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Events in a run's log, in order; broken and foreign lines are skipped.

    Raises:
        InvalidInputError: the file is missing, unreadable, too large, or not a regular file.
    """
    try:
        with open_regular(path) as stream:
            if (size := os.fstat(stream.fileno()).st_size) > _MOST_LOG:
                raise InvalidInputError(f"{path} holds {size} bytes, the most is {_MOST_LOG}")
            for text in stream:
                try:
                    event = json.loads(text.decode(errors="replace"))
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    yield event
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from None


VERBS = (
    Verb(
        name="explain",
        help="where the time of a plan goes and why not another strategy, or what happened in a run",
        run=run,
        options=(
            o.option(
                o.PLAN,
                help="a plan file, or the folder of a run (default: the newest plan in runs/plans)",
                metavar="PLAN|RUN",
            ),
            Option(
                name="why-not",
                help="compare with a strategy, as in ddp, or with one choice, as in 'classifier=zero3@2'",
                metavar="STRATEGY",
            ),
            o.PROFILE,
            o.option(o.CLUSTER, help="cluster that the plan was made for (default: found by fingerprint)"),
            o.MEMORY,
            o.REPORT,
            o.option(o.VERBOSE, help="show every component, and what its time consists of"),
            o.JSON,
        ),
    ),
)
