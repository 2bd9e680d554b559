"""``asa plan``: makes a plan from a profile."""

from __future__ import annotations

import importlib.util
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asa.cli import options as o
from asa.cli import places
from asa.cli.commands.system_checks import driver
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import TRAINING, UsageError
from asa.ir import codec
from asa.ir.staleness import parse_target
from asa.strategies import offered

if TYPE_CHECKING:
    from rich.console import RenderableType

    from asa.ir.cluster import Cluster
    from asa.ir.plan import Plan
    from asa.ir.profile import Profile
    from asa.ir.staleness import Staleness
    from asa.planner import Pin, Request
    from asa.planner.answer.consistency import Consistency
    from asa.planner.questions.frontier import Frontier


def run(args: Arguments, console: Console) -> None:
    """Find profile and cluster, make the plan, store and show it."""
    from rich.text import Text

    from asa.planner import step_shares
    from asa.report.text import plan as report

    path = Path(args.output) if args.output else None
    places.check_writable(path or places.PLANS / "plan.json", "-o")
    places.check_report(args.report)
    profile, cluster = _profile_and_cluster(args, console)
    request = _request(args, profile, cluster)
    plans = _plans(args, console, profile, cluster, request)
    compared = _compared(args, console, profile, cluster, request, plans[0])
    if compared[0] is not None and args.consistency == "any" and not args.verify:
        from asa.cli.commands import consistency

        found, table = consistency.chosen(compared[0], console, profile, cluster, request)
        plans, compared = found or plans, (table, compared[1])
    answer = plans[0]
    path = path or places.plan_path(answer)
    places.save_plan(answer, path, console)
    try:
        places.keep_origins(profile, cluster)
    except OSError as error:  # the plan itself may be written elsewhere, with -o
        why = f"{error.filename}: {error.strerror}"
        console.say(f"asa: profile and cluster are not kept beside the plan ({why}); do not change their files")
    data = codec.document(answer)
    if len(plans) > 1:
        data["alternatives"] = [codec.document(p) for p in plans[1:]]
    more = [Text(), report.several(plans)] if len(plans) > 1 else []
    studies = _studies(args, console, profile, cluster, request, answer, compared)
    data |= studies.data
    shares = step_shares(answer, profile, cluster, offered())
    console.result(data, lambda: [*report.render(answer, verbose=args.verbose, shares=shares), *more, *studies.shown])
    console.say(f"asa: wrote {path}")
    if args.report:
        _write_page(args, console, profile, cluster, answer, studies)
    if not codec.is_special(path):  # what went to a device cannot be read again
        console.say(f"asa: next: {' | '.join(_next(cluster, answer, args))}")


def _profile_and_cluster(args: Arguments, console: Console) -> tuple[Profile, Cluster]:
    """The costs to plan with: those of a run, or those that the arguments name, or those of this machine.

    Raises:
        AsaError: there are none, or the request does not suit them.
    """
    from asa.cli import choose
    from asa.cli.commands import verify_plans
    from asa.planner import Request, check_request

    named = choose.named_cluster(args.cluster, args.gpus) if args.cluster else None
    cluster = named and choose.wide_enough(named, args.gpus, console)
    pins = _pins(args)

    def admit(chosen: Cluster) -> None:
        """Check the request before the model is examined, which takes longer."""
        draft = Request(
            gpus=args.gpus or chosen.num_devices, global_batch=args.global_batch or 1, strategies=args.strategies,
            pins=pins, offload=args.offload,
        )  # fmt: skip
        check_request(chosen, offered(), draft)
        if args.verify:
            verify_plans.check(chosen, draft.gpus, console)

    if cluster:
        admit(cluster)
    if args.from_run:
        from asa.cli.commands import from_run

        profile, cluster = from_run.origins(args, console)
    else:
        profile, sentence = choose.profile(args, console, args.model, cluster, admit)
        unnamed = args.model is None and sentence.endswith("(shipped)")
        console.say(f"asa: {sentence}{'; no MODEL was named, and none was profiled here' if unnamed else ''}")
        if said := choose.torch_version_note(profile):
            console.say(f"asa: {said}")
    if cluster is None:
        cluster = choose.default_cluster(console, profile.device, args.gpus)
        if said := choose.processor_note(profile):
            console.say(f"asa: {said}")
        count = args.gpus or cluster.num_devices
        if cluster.device.name != profile.device.name and count > 1:
            measure = f"`asa cluster measure --gpus {count}`"
            console.say(f"asa: links as of {cluster.name}, of {cluster.device.name}; {measure} measures those here")
    if said := choose.guessed_updates_note(profile, cluster):
        console.say(f"asa: {said}")
    if lacking := cluster.without(profile.precision, args.gpus or cluster.num_devices):
        raise UsageError(
            f"cluster {cluster.name} has {lacking}, which does not compute in {profile.precision}; take --precision "
            "fp16 or fp32, or fewer --gpus"
        )
    return profile, cluster


def _pins(args: Arguments) -> tuple[Pin, ...]:
    from asa.planner import parse_pin

    return tuple(parse_pin(text) for text in args.pin)


def _request(args: Arguments, profile: Profile, cluster: Cluster) -> Request:
    """The planner's request.

    Raises:
        UsageError: a model that is compiled as one for several devices.
    """
    from asa.planner import Request, usual_limit

    gpus = args.gpus or cluster.num_devices
    profile.check_runs_on(gpus)
    return Request(
        gpus=gpus,
        global_batch=args.global_batch or profile.global_batch,
        memory_bytes=args.memory,
        microbatches=args.microbatches,
        strategies=args.strategies,
        pins=_pins(args),
        solver=args.solver,
        optimizer=args.optimizer,
        time_limit_s=args.time_limit or usual_limit(gpus),
        top_k=args.top,
        prefer_simple=args.top == 1,
        offload=args.offload,
        compression=args.compress,
    )


def _plans(args: Arguments, console: Console, profile: Profile, cluster: Cluster, request: Request) -> list[Plan]:
    """The answer, and the best other plans if asked for; with ``--verify`` after measuring the finalists."""
    from asa.cli.commands import verify_plans
    from asa.planner import plan

    if not args.verify:
        with console.waiting(f"planning {profile.model_spec}"):
            return plan(profile, cluster, offered(), request)
    if not args.cluster:
        verify_plans.check(cluster, request.gpus, console)
    budget_s = args.budget or verify_plans.BUDGET_S
    return verify_plans.verify(profile, cluster, request, args.verify, budget_s, console)


@dataclass(kw_only=True)
class _Studies:
    """Answers to questions beyond the plan: fields of the JSON document, what is shown, and what the page draws."""

    data: dict[str, Any] = field(default_factory=dict)
    shown: list[RenderableType] = field(default_factory=list)
    curve: Frontier | None = None
    consistency: tuple[Consistency | None, Staleness | None] = (None, None)


def _compared(
    args: Arguments, console: Console, profile: Profile, cluster: Cluster, request: Request, answer: Plan
) -> tuple[Consistency | None, Staleness | None]:
    """The comparison of disciplines of consistency with ``answer``, and its curves, as far as asked for."""
    if args.consistency != "any" and args.target is None:
        return None, None
    from asa.cli.commands import consistency

    return consistency.compared(args, console, profile, cluster, request, answer)


def _studies(
    args: Arguments, console: Console, profile: Profile, cluster: Cluster, request: Request, answer: Plan,
    compared: tuple[Consistency | None, Staleness | None],
) -> _Studies:  # fmt: skip
    """The frontiers, as far as asked for, and what was ``compared``."""
    from asa.report.text import frontier as curves

    studies = _Studies(consistency=compared)
    if args.frontier or args.price:
        console.say("asa: the curve takes several more searches, each about as long as the first")
        with console.waiting(f"planning {profile.model_spec} for the curve"):
            studies.curve = _frontier(args, profile, cluster, request, answer)
        studies.data["frontier"] = codec.to_data(studies.curve)
        studies.shown += curves.render(studies.curve, epochs=args.epochs)
        if args.epochs:
            studies.data["epochs"] = args.epochs
    if compared[0] is not None:
        from asa.cli.commands import consistency

        studies.data["consistency"] = codec.to_data(compared[0])
        studies.shown += consistency.report.render(compared[0])
    return studies


def _write_page(
    args: Arguments, console: Console, profile: Profile, cluster: Cluster, answer: Plan, studies: _Studies
) -> None:
    """Write the HTML page that ``--report`` asks for."""
    from asa.planner.questions.explain import explain
    from asa.report.figures import staleness as staleness_figures
    from asa.report.pages import plan as plan_page

    explanation = explain(answer, profile, cluster, offered(), memory_bytes=args.memory)
    figures = staleness_figures.charts(*studies.consistency)
    with places.keeping_page(console, args.report):
        page = plan_page.write(answer, Path(args.report), explanation, curves=studies.curve, more=figures)
    console.say(f"asa: wrote {page}")


def _next(cluster: Cluster, plan: Plan, args: Arguments) -> list[str]:
    """Commands that are useful after ``plan`` for ``cluster``, on this machine and with this installation. They name a
    plan that is not where commands look for the newest one."""
    file = "" if args.output is None else f" {shlex.quote(args.output)}"
    rival = _rival(plan)
    first = [f"asa explain{file}" + (f" --why-not {rival}" if rival else "")]
    if cluster.device.type == "cuda" and not driver():
        return [*first, f"asa simulate{file}", f"asa launch slurm{file}"]
    if importlib.util.find_spec("torch") is None:
        return [*first, f"asa simulate{file}", f"pip install '{TRAINING}', then asa train{file}"]
    again = [] if args.verify else [shlex.join(("asa", "plan", *args.words, "--verify", "3"))]
    return [f"asa train{file}", *first, *again]


def _rival(plan: Plan) -> str | None:
    """The whole strategy to compare ``plan`` with: plain data parallelism, or the next best if that is the plan; None
    if nothing else is possible."""
    own = (plan.prediction.step_time_s, max(plan.prediction.memory_bytes_per_rank))
    others = [b for b in plan.baselines if b.fits and b.step_time_s and (b.step_time_s, b.memory_bytes_max) != own]
    names = [b.name for b in sorted(others, key=lambda b: b.step_time_s or 0.0)]
    if not names and plan.gpus == 1:
        return None
    return "ddp" if "ddp" in names or not names else names[0]


def _frontier(args: Arguments, profile: Profile, cluster: Cluster, request: Request, answer: Plan) -> Frontier:
    """The requested curves of step time against memory and cost."""
    from asa.planner.questions import frontier as f

    memory = f.against_memory(profile, cluster, offered(), request, answer=answer) if args.frontier else ()
    cost: tuple[f.CostPoint, ...] = ()
    if args.price:
        samples = args.epoch_samples or f.CIFAR_SAMPLES
        cost = f.against_cost(
            profile, cluster, offered(), request, price=args.price, epoch_samples=samples, answer=answer
        )
    return f.Frontier(memory=memory, cost=cost)


VERBS = (
    Verb(
        name="plan",
        help="choose, per component, how it is spread over the devices, with proof of how good the choice is",
        run=run,
        options=(
            Option(
                name="model",
                help="a profile file, or a model to profile or estimate first (default: the newest profile)",
                positional=True,
                metavar="PROFILE|MODEL",
            ),
            o.option(o.GPUS, help="number of devices; on CPUs, of processes (default: all of the cluster)"),
            o.CLUSTER,
            o.option(o.GLOBAL_BATCH, help="samples per optimizer step, over all devices (default: the profile's)"),
            o.MEMORY,
            o.STRATEGIES,
            o.PIN,
            o.OPTIMIZER,
            o.option(o.OUTPUT, help="plan file to write (default: runs/plans/MODEL.CLUSTER.GPUS.json)"),
            o.REPORT,
            o.option(o.VERBOSE, help="show every strategy, the terms of the step and the course of the search"),
            Option(
                name="verify",
                help="measure the K most promising plans on this machine, always with DDP, and take the fastest",
                parse=o.several,
                metavar="K",
            ),
            o.span("budget", help="time for --verify: 90s, 10m (default: 60s)", needs="verify"),
            o.number("top", help="show the K plans of least predicted time", default=1, metavar="K"),
            Option(name="frontier", help="show the best step time for each amount of memory per device", switch=True),
            o.option(o.PRICE, help=f"{o.PRICE.help}: show time and cost of an epoch"),
            o.number(
                "epoch-samples", help="samples of one epoch, for --price (default: 50000, as in CIFAR)", needs="price"
            ),
            o.number(
                "epochs", help="epochs of a run, for --price: show its time and cost, too", metavar="E", needs="price"
            ),
            o.MICROBATCHES,
            Option(
                name="offload",
                help="keep optimizer state in the memory of the host; auto: only if DDP does not fit without",
                choices=("auto", "always", "never"),
                default="auto",
            ),
            o.option(o.COMPRESS, default="none"),
            o.option(
                o.INPUT,
                help="size of one image, for a model that is profiled first (default: the model's own)",
                unless="from_run",
            ),
            o.option(
                o.TOKENS,
                help="tokens of one sequence, for a model that is profiled first (default: the model's own)",
                unless="from_run",
            ),
            o.option(
                o.CLASSES,
                help="number of classes, for a model that is profiled first (default: 100)",
                unless="from_run",
            ),
            o.option(o.PRECISION, help="arithmetic, for a model that is profiled first", unless="from_run"),
            o.option(
                o.MEMORY_FORMAT,
                default=None,
                help="only profiles with this order of image data (default: the fastest measured)",
                unless="from_run",
            ),
            o.option(
                o.COMPILE,
                default=None,
                help="only profiles with this use of torch.compile (default: the fastest)",
                unless="from_run",
            ),
            Option(
                name="from-run",
                help="use the times of devices and links that the run in DIR has measured, for as many devices",
                metavar="DIR",
            ),
            Option(
                name="consistency",
                help="any: also compare methods in which workers do not wait for each other at every step; with "
                "--target, plan the one that surely reaches it first",
                choices=("synchronous", "any"),
                default="synchronous",
            ),
            Option(
                name="target",
                help="accuracy=0.9 or loss=0.5: show the time to it; needs `asa profile MODEL --staleness`",
                parse=parse_target,
                metavar="WHAT=VALUE",
            ),
            o.SOLVER,
            o.span(
                "time-limit",
                help="most processor time for the search; up to four times as long on a busy machine (default: 2s; "
                "6s above 64 devices)",
            ),
            o.JSON,
        ),
        details="The plan goes to runs/plans/, where `asa train` finds it.",
    ),
)
