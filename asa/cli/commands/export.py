"""``asa export``: exports trained weights or a plan for other tools."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from asa.cli import options as o
from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import AsaError, NoCheckpointError, UsageError
from asa.ir import codec
from asa.ir.plan import Plan
from asa.profiler.paths import slug

TARGETS = ("safetensors", "torch", "accelerate", "fabric", "deepspeed", "torchtitan", "megatron")


def run(args: Arguments, console: Console) -> None:
    """Export weights of a run, or a configuration snippet for the plan."""
    data = _weights(args, console) if args.to == "safetensors" else _snippet(args, console)
    console.document({"kind": "export", "to": args.to, **data})


def _weights(args: Arguments, console: Console) -> dict[str, Any]:
    folder = _run_of(args)
    output = Path(args.output) if args.output else folder / "weights.safetensors"
    places.check_writable(output, "-o")  # before torch is imported

    from asa.executor.running.export import export_weights
    from asa.executor.training.checkpoint import newest_manifest

    newest = newest_manifest(folder / "checkpoints")
    if not args.output and newest is not None:  # without one, nothing is exported
        output = output.with_stem(slug(newest.model_spec))
    with places.keeping(console, output):
        exported = export_weights(folder, output, step=args.step)
    for note in exported.notes:
        console.say(f"asa: {note}")
    console.say(f"asa: wrote {output}: {exported.model_spec} after step {exported.step}, {exported.tensors} tensors")
    return {"run": str(folder), "file": str(output), **codec.to_data(exported)}


def _run_of(args: Arguments) -> Path:
    """Folder of the named run, otherwise of the newest with a checkpoint; of the named plan, if one is named.

    Raises:
        NoCheckpointError: there is none.
    """
    if args.run:
        if not Path(args.run).is_dir():
            raise NoCheckpointError(f"no run in {args.run}: there is no such folder")
        return Path(args.run)
    fingerprint = None if args.plan is None else codec.fingerprint(places.newest_plan(args.plan)[1])
    for folder in places.newest_runs():
        if not any((folder / "checkpoints").glob("step_*")):
            continue  # no checkpoint: emulated devices, or ended too early
        if fingerprint in (None, codec.fingerprint(codec.load(Plan, folder / "plan.json"))):
            return folder
    of = "" if fingerprint is None else f" of plan {args.plan}"
    raise NoCheckpointError(
        f"no run{of} with a checkpoint in {places.TRAINING}/ to export; `asa train` makes one, --run names one"
    )


def _snippet(args: Arguments, console: Console) -> dict[str, Any]:
    from asa.report.snippets import TOOLS
    from asa.report.snippets.uniform_choice import choose

    path, plan = places.newest_plan(args.plan)
    tool = TOOLS[args.to]
    choice = choose(plan, tool.able, args.to, recompute=tool.recompute, grids=tool.grids)
    shown = choice.as_run(plan)
    choice = replace(choice, per_node=_per_node(plan, shown, console))
    text = tool.write(shown, choice)
    if args.output:
        places.check_writable(Path(args.output), "-o")
        with places.keeping(console, Path(args.output)):
            codec.write(text, Path(args.output))
        console.say(f"asa: wrote {args.output}")
    elif not console.as_json:
        console.text(text)
    for note in choice.notes:
        console.say(f"asa: {note}")
    return {
        "plan": str(path),
        "plan_fingerprint": codec.fingerprint(plan),
        "strategy": choice.name,
        "exact": choice.exact,
        "not_expressed": list(choice.notes),
        "text": text,
    }


def _per_node(plan: Plan, shown: Plan, console: Console) -> int | None:
    """Ranks of ``shown`` on each machine of the cluster of ``plan``; None if they do not fill machines evenly."""
    from asa.cli.choose import origins
    from asa.report.jobs import per_node

    cluster = None
    with suppress(AsaError):
        cluster = origins(plan, console)[1]
    with suppress(UsageError):
        return per_node(shown, cluster, None)
    return None


VERBS = (
    Verb(
        name="export",
        help="write trained weights for plain PyTorch, or a plan for another tool",
        run=run,
        options=(
            o.option(o.PLAN, unless="run"),
            Option(
                name="to",
                help="safetensors: trained weights; the others: the plan for that tool",
                choices=TARGETS,
                default="safetensors",
            ),
            Option(
                name="run",
                help="folder of the run (default: the newest run, of PLAN if given)",
                metavar="DIR",
                needs="to=safetensors",
            ),
            o.number("step", help="take the checkpoint after step N (default: the newest)", needs="to=safetensors"),
            o.option(o.OUTPUT, help="file to write (default: weights into the run's folder, a plan to the screen)"),
            o.JSON,
        ),
        details="The weights load into the plain model with load_state_dict(strict=True). In the program for another "
        "tool, lines that begin with NOT EXPRESSED say what that tool cannot do.",
    ),
)
