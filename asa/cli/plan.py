"""``asa plan``: makes a plan from a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asa.cli import options as o
from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.ir import codec

if TYPE_CHECKING:
    from asa.ir.cluster import Cluster
    from asa.ir.plan import Plan
    from asa.ir.profile import Profile
    from asa.planner import Request
    from asa.planner.questions.frontier import Frontier


def run(args: Arguments, console: Console) -> None:
    """Find profile and cluster, make the plan, store and show it."""
    from rich.text import Text

    from asa.cli import choose, verify_plans
    from asa.planner import Request, check_request, parse_pin, plan, step_shares, usual_limit
    from asa.report import frontier as curves
    from asa.report import plan as report
    from asa.strategies import offered

    path = Path(args.output) if args.output else None
    places.check_writable(path or places.PLANS / "plan.json", "-o")
    if args.report:
        places.check_writable(Path(args.report) / "report.html", "--report")
    named = choose.named_cluster(args.cluster, args.gpus) if args.cluster else None
    cluster = named and choose.wide_enough(named, args.gpus, console)
    pins = tuple(parse_pin(text) for text in args.pin)

    def admit(chosen: Cluster) -> None:
        """Check the request before the model is examined, which takes longer."""
        asked = Request(
            gpus=args.gpus or chosen.num_devices, global_batch=args.global_batch or 1, strategies=args.strategies,
            pins=pins, offload=args.offload,
        )  # fmt: skip
        check_request(chosen, offered(), asked)
        if args.verify:
            verify_plans.check(chosen, asked.gpus, console)

    if cluster:
        admit(cluster)
    if args.from_run:
        from asa.cli import from_run

        profile, cluster = from_run.origins(args, console)
    else:
        profile, said = choose.profile(args, console, args.model, cluster, admit)
        console.say(f"asa: {said}")
    device = profile.device
    cluster = cluster or choose.default_cluster(console, device, args.gpus)
    gpus = args.gpus or cluster.num_devices
    request = Request(
        gpus=gpus,
        global_batch=args.global_batch or profile.global_batch,
        memory_bytes=args.memory,
        microbatches=args.microbatches,
        strategies=args.strategies,
        pins=pins,
        solver=args.solver,
        optimizer=args.optimizer,
        time_limit_s=args.time_limit or usual_limit(gpus),
        top_k=args.top,
        prefer_simple=args.top == 1,
        offload=args.offload,
        compression=args.compress,
    )
    if args.verify:
        if not args.cluster:
            verify_plans.check(cluster, gpus, console)
        plans = verify_plans.verify(
            profile, cluster, request, args.verify, args.budget or verify_plans.BUDGET_S, console
        )
    else:
        plans = plan(profile, cluster, offered(), request)
    path = path or places.plan_path(plans[0])
    codec.save(plans[0], path)
    places.keep_origins(profile, cluster)
    data = codec.document(plans[0])
    if len(plans) > 1:
        data["alternatives"] = [codec.document(p) for p in plans[1:]]
    more = [Text(), report.several(plans)] if len(plans) > 1 else []
    found = None
    if args.frontier or args.price:
        found = _frontier(args, profile, cluster, request, plans[0])
        data["frontier"] = codec.to_data(found)
        more += curves.render(found)
    if args.consistency == "any" or args.target is not None:
        from asa.cli import consistency

        compared = consistency.compared(args, console, profile, cluster, request, plans[0])
        data["consistency"] = codec.to_data(compared)
        more += consistency.report.render(compared)
    shares = step_shares(plans[0], profile, cluster, offered())
    console.result(data, lambda: [*report.render(plans[0], verbose=args.verbose, shares=shares), *more])
    console.say(f"asa: wrote {path}")
    if args.report:
        from asa.planner.questions.explain import explain
        from asa.report import plan_page

        taken = explain(plans[0], profile, cluster, offered(), memory_bytes=args.memory)
        page = plan_page.write(plans[0], Path(args.report), taken, curves=found)
        console.say(f"asa: wrote {page}")
    console.say("asa: next: asa train | asa explain --why-not ddp | asa plan --verify 3")


def _frontier(args: Arguments, profile: Profile, cluster: Cluster, request: Request, answer: Plan) -> Frontier:
    """The requested curves of step time against memory and cost."""
    from asa.planner.questions import frontier as f
    from asa.strategies import offered

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
            Option(
                name="from-run",
                help="plan with devices, links and times as the run in DIR has corrected them, for as many devices",
                metavar="DIR",
            ),
            o.option(o.GPUS, help="devices to plan for (default: those of the cluster)"),
            o.CLUSTER,
            o.option(o.GLOBAL_BATCH, help="samples per optimizer step, over all devices (default: the profile's)"),
            Option(
                name="microbatches",
                help="of a step, a power of two (default: as many as are fastest)",
                parse=o.count,
                metavar="N",
            ),
            o.MEMORY,
            o.STRATEGIES,
            o.PIN,
            o.SOLVER,
            o.OPTIMIZER,
            Option(
                name="offload",
                help="optimizer state on the host: auto where plain data parallelism does not fit, always or never",
                choices=("auto", "always", "never"),
                default="auto",
            ),
            o.option(o.COMPRESS, default="none"),
            Option(
                name="verify",
                help="run the K likeliest plans, plain data parallelism among them, against each other on this machine "
                "and take the fastest",
                parse=o.several,
                metavar="K",
            ),
            Option(name="budget", help="time for --verify (default: 60s)", parse=o.budget, metavar="T", needs="verify"),
            Option(
                name="top", help="show the K best plans, by predicted time alone", parse=o.count, default=1, metavar="K"
            ),
            Option(name="frontier", help="also the curve of step time against memory per device", switch=True),
            Option(
                name="price",
                help="of one device for an hour, in any currency (2.49, 2.49/gpu-h): also time and cost of an epoch on "
                "fewer devices",
                parse=o.price,
                metavar="P",
            ),
            Option(
                name="epoch-samples",
                help="samples of an epoch, for --price (default: 50000, those of CIFAR)",
                parse=o.count,
                metavar="N",
                needs="price",
            ),
            Option(
                name="consistency",
                help="any: also what it takes and gains when workers need not take every step together",
                choices=("synchronous", "any"),
                default="synchronous",
            ),
            Option(
                name="target",
                help="accuracy=0.9 or loss=0.5: also the time to it, where `asa profile MODEL --staleness` was run",
                parse=o.target,
                metavar="WHAT=VALUE",
            ),
            Option(
                name="time-limit",
                help="longest search, in seconds of a processor (default: 2s, 6s for more than 64 devices); on a busy "
                "machine up to four times as long on the wall",
                parse=o.budget,
                metavar="T",
            ),
            o.option(o.PRECISION, help="of a profile that is measured or estimated first"),
            o.option(
                o.MEMORY_FORMAT,
                default=None,
                help="as profiled (default: whatever was measured fastest)",
            ),
            o.option(o.COMPILE, default=None, help="as profiled (default: whatever was measured fastest)"),
            o.option(o.INPUT, help="of a model that is profiled first"),
            o.option(o.TOKENS, help="of a sequence, for a model that is profiled or estimated first"),
            o.option(o.CLASSES, help="of a model that is profiled first"),
            o.option(o.OUTPUT, help="file to write (default: runs/plans/MODEL.CLUSTER.GPUS.json)"),
            o.REPORT,
            o.option(
                o.VERBOSE, help="every strategy with its refusal, what the step is made of, and how the search went"
            ),
            o.JSON,
        ),
        details="The plan goes to runs/plans/, where `asa train` finds it.",
    ),
)
