"""Script that runs a plan under Slurm. Options: https://slurm.schedmd.com/sbatch.html."""

from __future__ import annotations

import shlex

from asa.errors import UsageError
from asa.report.jobs.job import ENVIRONMENT, GRACE_S, PREEMPTED, Job, resume_lines, title, verdict_lines

_EARLIER_S = 60
"""Seconds by which Slurm may send its signal too early, https://slurm.schedmd.com/sbatch.html#OPT_signal."""
_LEAST_S = 2 * GRACE_S + _EARLIER_S
"""Least seconds of a job, which trains for at least as long as it may need to save. A shorter one would be stopped at
its start, save, and queue itself again for ever."""


def _clock(seconds: float) -> str:
    minutes = -(-int(seconds) // 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def slurm(job: Job) -> str:
    """A script for ``sbatch``. It requests a signal before its time limit, saves, and queues itself again.

    Raises:
        UsageError: the time limit is too short to do anything before the signal.
    """
    if job.limit_s is not None and job.limit_s < _LEAST_S:
        raise UsageError(
            f"a job of {job.limit_s:g} s would be told to stop {GRACE_S} s before its end, or up to {_EARLIER_S} s "
            f"earlier, which leaves no time to train; try --time {-(-_LEAST_S // 60)}m or more"
        )
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.per_node}"] if job.gpu else []),
        f"--cpus-per-task={job.cores}",
        *([f"--time={_clock(job.limit_s)}"] if job.limit_s else []),
        *([f"--partition={job.partition}"] if job.partition else []),
        *([f"--account={job.account}"] if job.account else []),
        *([f"--qos={job.qos}"] if job.qos else []),
        "--requeue",
        f"--signal=TERM@{GRACE_S}",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    container = ""
    if job.image:
        image = shlex.quote(job.image)
        container = f' --container-image={image} --container-mounts="$PWD" --container-workdir="$PWD"'
    rendezvous = (
        '--rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" '
        '--rdzv-conf is_host=$([ "$SLURM_NODEID" = 0 ] && echo true || echo false)'
    )
    command = "exec " + "\n".join(job.torchrun(rendezvous)) + " $resume"
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {d}" for d in directives),
            f"# {title(job)}",
            f"# SIGTERM reaches the ranks {GRACE_S} s before the end: all stop at one step and save; it queues again.",
            ENVIRONMENT,
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 20000))",
            *resume_lines(job),
            "export head port resume",
            # Since Slurm 22.05 srun does not take over what the job asked for. Each machine is told whether it is the
            # host: torchrun would guess it from names, which may mean other interfaces than the nodes' names in Slurm.
            f"srun --kill-on-bad-exit=0 --cpus-per-task={job.cores}{container} bash -c {shlex.quote(command)}",
            *verdict_lines(job),
            f'if [ "$code" = {PREEMPTED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$code"',
            "",
        ]
    )
