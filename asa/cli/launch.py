"""``asa launch``: writes a job that runs a plan under a cluster's scheduler."""

from __future__ import annotations

import shlex
from pathlib import Path

from asa.cli import options as o
from asa.cli import places, train
from asa.cli.console import Console
from asa.cli.settings import arguments
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import AsaError
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan

SYSTEMS = ("slurm", "k8s", "ray")
_SUBMIT = {"slurm": "sbatch {}", "k8s": "kubectl apply -f {}", "ray": "ray job submit --working-dir . -- python {}"}

_IMAGE = "asa:latest"
"""Default container image, because a pod needs one."""


_MOST_CARRIED = 900_000
"""Largest number of bytes beside the plan, out of the 1 MiB of a ConfigMap."""


def run(args: Arguments, console: Console) -> None:
    """Assign the plan's ranks to machines, write the job, and print how to submit it."""
    from asa.report import jobs

    path, plan = places.newest_plan(args.plan)
    out = args.out or str(places.TRAINING / f"{places.slug(plan.model_spec)}-{codec.fingerprint(plan)[:6]}")
    apart = args.system == "ray"  # Ray runs in a copy of the working directory, where a run would be lost
    job = jobs.Job(
        plan=plan,
        plan_file="/plan/plan.json"
        if args.system == "k8s"
        else f"{places.PLANS}/{codec.fingerprint(plan)}.json"
        if apart
        else str(path),
        per_node=jobs.per_node(plan, _cluster(plan, args, console), args.gpus_per_node),
        out=str(Path(out).absolute()) if apart else out,
        arguments=args.train,
        limit_s=args.time,
        partition=args.partition,
        image=args.image or (_IMAGE if args.system == "k8s" else None),
        volume=args.volume,
        restarts=args.restarts,
        cpus=args.cpus,
        account=args.account,
        qos=args.qos,
        plan_text=codec.dumps(plan),
        origins=_origins(plan, args.system, console),
    )
    if args.system == "k8s":
        if not args.image:
            console.say(f"asa: pods run the image {_IMAGE}, which must have asa in it; name yours with --image")
        text = jobs.kubernetes(job)
    else:
        text = jobs.slurm(job) if args.system == "slurm" else jobs.ray(job)
    data = {
        "schema_version": codec.SCHEMA_VERSION,
        "kind": "job",
        "system": args.system,
        "plan": str(path),
        "plan_fingerprint": codec.fingerprint(plan),
        "nodes": job.nodes,
        "ranks_per_node": job.per_node,
        "out": job.out,
        "text": text,
    }
    _deliver(text, args.output, data, console, _SUBMIT[args.system])


def _origins(plan: Plan, system: str, console: Console) -> dict[str, str]:
    """Profile and cluster of the plan, to be sent with the job; empty, with a note, if they are missing or too
    large."""
    from asa.cli.choose import origins

    try:
        found = {codec.fingerprint(noun): codec.dumps(noun) for noun in origins(plan, console)}
    except AsaError as error:
        console.say(f"asa: the job will not plan again: {error}")
        return {}
    if system == "k8s" and sum(map(len, found.values())) > _MOST_CARRIED:
        console.say("asa: the job will not plan again: its profile is too large for a ConfigMap of 1 MiB")
        return {}
    return found


def _cluster(plan: Plan, args: Arguments, console: Console) -> Cluster | None:
    """The named cluster, or the one the plan was made for if it still exists."""
    from asa.cli.choose import named_cluster, origins

    if args.cluster:
        return named_cluster(args.cluster)
    try:
        return origins(plan, console)[1]
    except AsaError:
        return None


def _deliver(text: str, output: str | None, data: dict[str, object], console: Console, how: str) -> None:
    if output:
        places.check_writable(Path(output), "-o")
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(text, encoding="utf-8")
        console.say(f"asa: wrote {output}; start it with `{how.format(shlex.quote(output))}`")
    elif not console.as_json:
        for line in text.rstrip("\n").split("\n"):
            console.line(line)
    console.document(data)


def words(text: str) -> tuple[str, ...]:
    """Options for ``asa train``, split as in a shell.

    >>> words("--epochs 90 --data cifar100")
    ('--epochs', '90', '--data', 'cifar100')

    Raises:
        ValueError: they cannot be split, or set what the job sets.
        UsageError: ``asa train`` does not accept them.
    """
    found = tuple(shlex.split(text))
    for own in ("--out", "--resume", "--json"):
        if any(w.split("=")[0] == own for w in found):
            raise ValueError(f"{own} is the job's own; leave it out")
    taken = arguments(train.VERBS[0], ("PLAN", *found), {})  # before a job waits for its machines
    if taken.rehearse is not None:
        raise ValueError("--rehearse runs one rank by itself, a job trains; leave it out")
    return found


VERBS = (
    Verb(
        name="launch",
        help="a job script, manifest or driver that trains a plan on a cluster: Slurm, Kubernetes or Ray",
        run=run,
        options=(
            Option(
                name="system",
                help="slurm, k8s or ray",
                positional=True,
                required=True,
                choices=SYSTEMS,
                metavar="|".join(SYSTEMS),
            ),
            o.PLAN,
            Option(
                name="gpus-per-node",
                help="ranks on a machine (default: by the plan's cluster)",
                parse=o.count,
                metavar="N",
            ),
            o.option(
                o.CLUSTER, help="whose innermost links make a machine (default: the plan's)", unless="gpus_per_node"
            ),
            Option(
                name="time",
                help="the longest the job may take: 90m, 24h; Slurm: at least 5m",
                parse=o.budget,
                metavar="T",
            ),
            Option(name="partition", help="of the machines", metavar="NAME", needs="system=slurm"),
            Option(name="account", help="whom the job is charged to", metavar="NAME", needs="system=slurm"),
            Option(name="qos", help="class of service", metavar="NAME", needs="system=slurm"),
            Option(
                name="cpus",
                help="cores on each machine for all its ranks (default: 8 a GPU, Ray: 1; 1 a CPU rank)",
                parse=o.count,
                metavar="N",
            ),
            Option(
                name="image",
                help="container with asa in it (default for k8s: asa:latest; Slurm: through pyxis)",
                needs="system=slurm|k8s",
            ),
            Option(
                name="volume",
                help="claim of the volume that all pods mount (default: NAME-data)",
                metavar="C",
                needs="system=k8s",
            ),
            Option(
                name="restarts",
                help="times that all ranks start again after one failed",
                parse=o.natural,
                default=3,
                metavar="R",
            ),
            Option(
                name="train",
                help="further options of asa train, as in '--epochs 90 --data cifar100' (one word alone: "
                "--train=--download)",
                parse=words,
                default=(),
                metavar="WORDS",
            ),
            Option(name="out", help="folder of the run, the same on all machines", metavar="DIR"),
            o.OUTPUT,
            o.JSON,
        ),
        details="The job saves when it is asked to stop, queues or starts again and resumes. Plan and run must lie on "
        "a folder that all machines share.",
    ),
)
