"""What every job has in common: the shape of the run on machines, how torchrun is started, resuming, the verdict.

All jobs start ``asa train`` through torchrun with one agent a node and one rank a device, on a shared folder: it
holds plan and run. A run that was pre-empted has saved its state and written exit code 75 to ``result.json`` (torchrun
itself hides the codes of its workers), and goes on from there when the job comes back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from asa.errors import UsageError
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan

PREEMPTED = 75
GRACE_S = 120
"""Between the request to stop and the end. torchrun itself gives its workers 30 s of it."""
_USUAL_PER_NODE = 8
_CORES_PER_GPU = 8
_BETWEEN_MACHINES = re.compile("ethernet|infiniband|roce|efa", re.IGNORECASE)


def per_node(plan: Plan, cluster: Cluster | None, asked: int | None) -> int:
    """Ranks on each machine: as asked, else by the innermost links of the cluster, else up to eight.

    Raises:
        UsageError: they do not come out even; torchrun starts as many on every machine.
    """
    ranks = plan.num_processes
    if asked is not None:
        most = asked
    elif cluster is None:
        most = _USUAL_PER_NODE
    elif len(cluster.levels) == 1 and _BETWEEN_MACHINES.search(cluster.levels[0].name):
        most = 1
    else:
        most = cluster.levels[0].devices
    if ranks <= most:
        return ranks
    if ranks % most:
        even = max(n for n in range(1, most + 1) if ranks % n == 0)
        raise UsageError(
            f"{ranks} ranks do not fill machines of {most} evenly; --gpus-per-node {even} takes "
            f"{ranks // even} machines"
        )
    return most


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run as a scheduler sees it. ``out`` and ``plan_file`` are seen by all machines under these names.

    ``limit_s``: the longest it may take. ``arguments``: further words of ``asa train``. ``restarts``: how often
    torchrun starts all ranks again after one failed. ``image`` and ``volume``: the container, and what is mounted in it
    at the working directory. ``cpus``: cores on each machine for all its ranks. ``account`` and ``qos``: whom Slurm
    charges, and in which class of service. ``plan_text``, ``origins``: the plan, and the profile and the cluster it was
    made from by their fingerprints, as JSON, where they have to travel with the job.
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
        """On each machine: as asked, else one a CPU rank, and enough for the loaders and threads of a GPU's."""
        return self.cpus or self.per_node * (_CORES_PER_GPU if self.gpu else 1)

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.plan.num_processes // self.per_node

    @property
    def gpu(self) -> bool:
        """Whether ranks need a GPU each."""
        return self.plan.device_type == "cuda"

    @property
    def name(self) -> str:
        """What the scheduler calls it: a DNS label, as Kubernetes wants."""
        return ("asa-" + re.sub(r"[^a-z0-9]+", "-", self.plan.model_spec.lower()).strip("-"))[:50].strip("-")

    def torchrun(self, rendezvous: str) -> list[str]:
        """torchrun up to the arguments of ``asa train`` but for ``--resume``."""
        shape = f"torchrun --nnodes {self.nodes} --nproc-per-node {self.per_node} --max-restarts {self.restarts}"
        words = ["-m", "asa", "train", self.plan_file, "--out", self.out, *self.arguments]
        return [f"{shape} \\", f"    {rendezvous} \\", f"    {shlex.join(words)}"]


ORIGINS = "runs/plans/origins"
"""Below the working directory: profiles and clusters that plans were made from, each by its fingerprint."""

ENVIRONMENT = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # restarts must not meet in the store of the last attempt"


def resume_lines(job: Job) -> list[str]:
    """Shell lines: ``$resume`` where there is something to resume; no stale result."""
    out = shlex.quote(job.out)
    return [
        f"mkdir -p {out} && rm -f {out}/result.json",
        "resume=",
        f'if compgen -G {out}"/checkpoints/step_*" >/dev/null; then resume=--resume; fi',
    ]


def verdict_lines(job: Job) -> list[str]:
    """Shell lines: ``$code`` is what the run says, or 6 where it could not say anything. They run outside of any
    container, where there may be no Python."""
    result = f"{shlex.quote(job.out)}/result.json"
    return [
        f"code=$(sed -n 's/.*\"exit_code\": *\\([0-9][0-9]*\\).*/\\1/p' {result} 2>/dev/null | head -n 1)",
        "code=${code:-6}",
    ]


def title(job: Job) -> str:
    """What the job is, in one line."""
    kind, machines = "GPUs" if job.gpu else "cores", "machine" if job.nodes == 1 else "machines"
    return (
        f"{job.plan.model_spec}, strategy {job.plan.strategy}: {job.nodes} {machines} of {job.per_node} {kind}, "
        f"{job.plan.num_processes} ranks, global batch {job.plan.global_batch}"
    )
