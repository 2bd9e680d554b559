"""Driver that runs a plan on Ray: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html."""

from __future__ import annotations

from asa.report.jobs.job import ORIGINS, PREEMPTED, Job, title


def ray(job: Job) -> str:
    """A driver for ``ray job submit -- python FILE``: one actor per machine runs torchrun there. It restarts a
    preempted run, and ends with the run's own exit code.

    Plan, profile and cluster are in the driver; each machine writes them into its own working directory, a copy of the
    submitted one. ``job.out`` is a folder that all machines must share, which is tested first.
    """
    cores = job.cpus or job.per_node  # Ray would wait silently for more cores than a machine has
    resources = f'{{"CPU": {cores}, "GPU": {job.per_node}}}' if job.gpu else f'{{"CPU": {cores}}}'
    words = ["-m", "asa", "train", job.plan_file, "--out", job.out, *job.arguments]
    carried = {job.plan_file: job.plan_text} | {f"{ORIGINS}/{name}.json": text for name, text in job.origins.items()}
    limit = "None" if job.limit_s is None else repr(float(job.limit_s))
    return f'''\
"""{title(job)}.

ray job submit --working-dir . -- python FILE        # {job.out} is on a folder that all machines share
"""

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, PER_NODE, RESTARTS, LIMIT_S = {job.nodes}, {job.per_node}, {job.restarts}, {limit}
OUT = Path({job.out!r})
WORDS = {words!r}
PREEMPTED = {PREEMPTED}
FILES = {carried!r}


@ray.remote
class Machine:
    def address(self):
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def prepare(self, mark):
        for name, text in FILES.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        return None if (OUT / mark).exists() else socket.gethostname()

    def run(self, endpoint, attempt, resume, is_host):
        command = ["torchrun", "--nnodes", str(NODES), "--nproc-per-node", str(PER_NODE)]
        command += ["--max-restarts", str(RESTARTS), "--rdzv-backend", "c10d"]
        # Told, since torchrun would guess it from the host's name, which may mean the loopback interface.
        command += ["--rdzv-conf", f"is_host={{str(is_host).lower()}}"]
        command += ["--rdzv-id", f"{job.name}-{{attempt}}", "--rdzv-endpoint", endpoint, *WORDS]
        environment = dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        child = subprocess.Popen(command + ["--resume"] * resume, env=environment)
        try:
            return child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGTERM)  # the ranks save and end
            return child.wait()


def exit_code():
    try:
        return json.loads((OUT / "result.json").read_text())["exit_code"]
    except (OSError, ValueError, KeyError):
        return 6


def attempt(number):
    resume = any(OUT.glob("checkpoints/step_*"))
    (OUT / "result.json").unlink(missing_ok=True)
    group = placement_group([{resources}] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    try:
        machines = [
            Machine.options(
                num_cpus={cores},{f" num_gpus={job.per_node}," if job.gpu else ""}
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i in range(NODES)
        ]
        mark = OUT / f".shared-{{uuid.uuid4().hex}}"
        mark.touch()
        blind = [name for name in ray.get([m.prepare.remote(mark.name) for m in machines]) if name]
        mark.unlink()
        if blind:
            print(f"{{OUT}} is not shared: {{', '.join(blind)}} does not see it; write the job again with --out on a "
                  "folder that all machines share", file=sys.stderr)
            return 5
        host, port = ray.get(machines[0].address.remote())
        ray.get([m.run.remote(f"{{host}}:{{port}}", number, resume, m is machines[0]) for m in machines])
    except ray.exceptions.RayError as error:
        print(f"a machine was lost: {{error}}", file=sys.stderr)
    finally:
        ray.util.remove_placement_group(group)
    return exit_code()


if __name__ == "__main__":
    ray.init()
    OUT.mkdir(parents=True, exist_ok=True)
    for number in range(1 + RESTARTS):
        code = attempt(number)
        if code not in (6, PREEMPTED) or (LIMIT_S is not None and code == PREEMPTED):
            break
    sys.exit(code)
'''
