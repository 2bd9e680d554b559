"""Common parts of all jobs: layout on machines, start of torchrun, resuming, exit code.

All jobs start ``asa train`` through torchrun with one agent per node and one rank per device, on a shared folder that
holds plan and run. A preempted run has saved its state and written exit code 75 to ``result.json`` (torchrun itself
hides the codes of its workers), and continues from there when the job is restarted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from asa.errors import UsageError
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.report.units import ranks

PREEMPTED = 75
GRACE_S = 120
"""Seconds between the request to stop and the end. Torchrun itself gives its workers 30 s of it."""
_USUAL_PER_NODE = 8
_CORES_PER_GPU = 8
_BETWEEN_MACHINES = re.compile("ethernet|infiniband|roce|efa", re.IGNORECASE)


def per_node(plan: Plan, cluster: Cluster | None, requested: int | None) -> int:
    """Number of ranks on each machine: as requested, else from the innermost links of the cluster, else up to eight.

    Raises:
        UsageError: ranks do not divide evenly; torchrun starts equally many on every machine.
    """
    count = plan.num_processes
    if requested is not None:
        most = requested
    elif cluster is None:
        most = _USUAL_PER_NODE
    elif len(cluster.levels) == 1 and _BETWEEN_MACHINES.search(cluster.levels[0].name):
        most = 1
    else:
        most = cluster.host
    if count <= most:
        return count
    if count % most:
        even = max(n for n in range(1, most + 1) if count % n == 0)
        raise UsageError(
            f"{ranks(count)} do not fill machines of {most} evenly; --gpus-per-node {even} takes "
            f"{count // even} machines"
        )
    return most


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run for a scheduler. All machines must see ``out`` and ``plan_file`` under these names.

    ``limit_s``: longest run time. ``arguments``: further arguments of ``asa train``. ``restarts``: how often torchrun
    restarts all ranks after a failure. ``image`` and ``volume``: the container, and the volume mounted at its working
    directory. ``cpus``: cores on each machine for all its ranks. ``account`` and ``qos``: Slurm's account and quality
    of service. ``plan_text``, ``origins``: the plan, and the profile and cluster it was made from by their
    fingerprints, as JSON, if they must be sent with the job.
    """

    plan: Plan
    plan_file: str
    per_node: int
    out: str
    arguments: tuple[str, ...] = ()
    limit_s: float | None = None
    partition: str | None = None
    image: str | None = None
    volume: str | None = None
    restarts: int = 3
    cpus: int | None = None
    account: str | None = None
    qos: str | None = None
    plan_text: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def cores(self) -> int:
        """Number of cores on each machine: as requested, else one per CPU rank, or enough for a GPU's data loaders and
        threads."""
        return self.cpus or self.per_node * (_CORES_PER_GPU if self.gpu else 1)

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.plan.num_processes // self.per_node

    @property
    def gpu(self) -> bool:
        """Whether each rank needs a GPU."""
        return self.plan.device_type == "cuda"

    @property
    def name(self) -> str:
        """Name for the scheduler: a DNS label, as Kubernetes requires."""
        return ("asa-" + re.sub(r"[^a-z0-9]+", "-", self.plan.model_spec.lower()).strip("-"))[:50].strip("-")

    def torchrun(self, rendezvous: str) -> list[str]:
        """Command line of torchrun up to the arguments of ``asa train``, without ``--resume``."""
        shape = f"torchrun --nnodes {self.nodes} --nproc-per-node {self.per_node} --max-restarts {self.restarts}"
        words = ["-m", "asa", "train", self.plan_file, "--out", self.out, *self.arguments]
        return [f"{shape} \\", f"    {rendezvous} \\", f"    {shlex.join(words)}"]


ORIGINS = "runs/plans/origins"
"""Folder below the working directory with the profiles and clusters of plans, by fingerprint."""

ENVIRONMENT = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # restarts must not meet in the store of the last attempt"


def resume_lines(job: Job) -> list[str]:
    """Shell lines that set ``$resume`` if there is a checkpoint, and remove an old result."""
    out = shlex.quote(job.out)
    return [
        f"mkdir -p {out} && rm -f {out}/result.json",
        "resume=",
        f'if compgen -G {out}"/checkpoints/step_*" >/dev/null; then resume=--resume; fi',
    ]


def verdict_lines(job: Job) -> list[str]:
    """Shell lines that set ``$code`` to the run's exit code, or to 6 if there is none. They run outside of any
    container, where there may be no Python."""
    result = f"{shlex.quote(job.out)}/result.json"
    return [
        f"code=$(sed -n 's/.*\"exit_code\": *\\([0-9][0-9]*\\).*/\\1/p' {result} 2>/dev/null | head -n 1)",
        "code=${code:-6}",
    ]


def title(job: Job) -> str:
    """Description of the job in one line."""
    kind = ("GPU" if job.gpu else "core") + "s" * (job.per_node > 1)
    machines = "machine" if job.nodes == 1 else "machines"
    return (
        f"{job.plan.model_spec}, strategy {job.plan.strategy}: {job.nodes} {machines} of {job.per_node} {kind}, "
        f"{ranks(job.plan.num_processes)}, global batch {job.plan.global_batch}"
    )
