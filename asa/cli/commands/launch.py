"""``asa launch``: writes a job that runs a plan under a cluster's scheduler."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from asa.cli import options as o
from asa.cli import places
from asa.cli.commands import train
from asa.cli.console import Console
from asa.cli.settings import arguments
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import AsaError
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.profiler.paths import slug

SYSTEMS = ("slurm", "k8s", "ray")
_SUBMIT = {"slurm": "sbatch {}", "k8s": "kubectl apply -f {}", "ray": "ray job submit --working-dir . -- python {}"}

_IMAGE = "asa:latest"
"""Default container image, because a pod needs one."""


_MOST_CARRIED = 900_000
"""Largest number of bytes beside the plan, out of the 1 MiB of a ConfigMap."""
_SCREEN = 100
"""Lines of a job above which a file is proposed."""


def run(args: Arguments, console: Console) -> None:
    """Assign the plan's ranks to machines, write the job, and print how to submit it."""
    from asa.report import jobs

    path, plan = places.newest_plan(args.plan)
    out = args.out or str(places.TRAINING / f"{slug(plan.model_spec)}-{codec.fingerprint(plan)[:6]}")
    cluster = _cluster(plan, args, console)
    if cluster is not None and cluster.unequal:
        console.say(_of_devices(plan, cluster))
    in_copy = args.system == "ray"  # Ray runs in a copy of the working directory, where a run would be lost
    job = jobs.Job(
        plan=plan,
        plan_file="/plan/plan.json"
        if args.system == "k8s"
        else f"{places.PLANS}/{codec.fingerprint(plan)}.json"
        if in_copy
        else str(path),
        per_node=jobs.per_node(plan, cluster, args.gpus_per_node),
        out=str(Path(out).absolute()) if in_copy else out,
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
        texts = {codec.fingerprint(noun): codec.dumps(noun) for noun in origins(plan, console)}
    except AsaError as error:
        console.say(f"asa: the job will not plan again: {error}")
        return {}
    if system == "k8s" and sum(map(len, texts.values())) > _MOST_CARRIED:
        console.say("asa: the job will not plan again: its profile is too large for a ConfigMap of 1 MiB")
        return {}
    return texts


def _cluster(plan: Plan, args: Arguments, console: Console) -> Cluster | None:
    """The named cluster, or the one the plan was made for if it still exists."""
    from asa.cli.choose import named_cluster, origins

    if args.cluster:
        return named_cluster(args.cluster)
    try:
        return origins(plan, console)[1]
    except AsaError:
        return None


def _of_devices(plan: Plan, cluster: Cluster) -> str:
    """A line on the devices that the ranks of ``plan`` must have, which a job starts in the order of machines."""
    from asa.report.text.cluster import unequal

    order = plan.devices if plan.devices is not None and len(plan.devices) == cluster.num_devices else None
    where = "; ".join(f"{ranks} on {name}" for (name, _, _), ranks in unequal(cluster.ordered(order)).items())
    return (
        f"asa: the plan is for unequal devices, ranks {where}: machines must come in this order, and the devices of "
        "one in that of CUDA_VISIBLE_DEVICES; the job does not see to it"
    )


def _deliver(text: str, output: str | None, data: dict[str, object], console: Console, how: str) -> None:
    if output:
        places.check_writable(Path(output), "-o")
        with places.keeping(console, Path(output)):
            codec.write(text, Path(output))
        console.say(f"asa: wrote {output}; start it with `{how.format(shlex.quote(output))}`")
    elif not console.as_json:
        console.text(text)
        if text.count("\n") > _SCREEN:
            console.say(f"asa: {text.count(chr(10))} lines; -o FILE writes them to a file")
    console.document(data)


def claim(text: str) -> str:
    """Parse the name of a volume claim, by the rules of Kubernetes.

    >>> claim("team-a.data")
    'team-a.data'
    """
    if len(text) > 253 or not all(re.fullmatch("[a-z0-9]([a-z0-9-]*[a-z0-9])?", part) for part in text.split(".")):
        raise ValueError(f"{text!r} is no name of a claim: up to 253 lower-case letters, digits, '-' and '.'")
    return text


def words(text: str) -> tuple[str, ...]:
    """Options for ``asa train``, split as in a shell.

    >>> words("--epochs 90 --data cifar100")
    ('--epochs', '90', '--data', 'cifar100')

    Raises:
        ValueError: they cannot be split, or set what the job sets.
        UsageError: ``asa train`` does not accept them.
    """
    chosen = tuple(shlex.split(text))
    for reserved in ("--out", "--resume", "--json"):
        if any(w.split("=")[0] == reserved for w in chosen):
            raise ValueError(f"{reserved} is the job's own; leave it out")
    parsed = arguments(train.VERBS[0], ("PLAN", *chosen), {})  # before a job waits for its machines
    if parsed.rehearse is not None:
        raise ValueError("--rehearse runs one rank by itself, a job trains; leave it out")
    return chosen


VERBS = (
    Verb(
        name="launch",
        help="write a job for Slurm, Kubernetes or Ray that trains a plan",
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
            o.number("gpus-per-node", help="ranks on each machine (default: from the plan's cluster)"),
            o.option(
                o.CLUSTER,
                help="cluster that says how many devices a machine has (default: the plan's)",
                unless="gpus_per_node",
            ),
            o.span("time", help="time limit of the job, as in 90m or 24h; Slurm: at least 5m (default: none)"),
            Option(
                name="partition",
                help="partition (default: the site's)",
                parse=o.word,
                metavar="NAME",
                needs="system=slurm",
            ),
            Option(
                name="account",
                help="account to charge (default: yours)",
                parse=o.word,
                metavar="NAME",
                needs="system=slurm",
            ),
            Option(
                name="qos",
                help="quality of service (default: the site's)",
                parse=o.word,
                metavar="NAME",
                needs="system=slurm",
            ),
            o.number(
                "cpus", help="cores on each machine for all its ranks (default: 8 a GPU, with Ray 1; 1 a CPU rank)"
            ),
            Option(
                name="image",
                help="container image with asa; Slurm: through pyxis (default for k8s: asa:latest)",
                parse=o.word,
                needs="system=slurm|k8s",
            ),
            Option(
                name="volume",
                help="volume claim that all pods mount (default: NAME-data)",
                parse=claim,
                metavar="C",
                needs="system=k8s",
            ),
            Option(
                name="restarts",
                help="how often all ranks start again after a failure",
                parse=o.natural,
                default=3,
                metavar="R",
            ),
            Option(
                name="train",
                help="more options for `asa train`, as in '--epochs 90 --data cifar100', or --train=--download",
                parse=words,
                default=(),
                metavar="WORDS",
            ),
            Option(
                name="out",
                help="folder of the run, shared by all machines (default: runs/train/MODEL-ID)",
                metavar="DIR",
            ),
            o.option(o.OUTPUT, help="file to write (default: the screen)"),
            o.JSON,
        ),
        details="If the job is stopped, it saves, starts again and resumes. All machines must share the folders of "
        "plan and run.",
    ),
)
