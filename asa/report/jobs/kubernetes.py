"""Manifest that runs a plan on Kubernetes: https://kubernetes.io/docs/concepts/workloads/controllers/job/."""

from __future__ import annotations

import json
import math

from asa.errors import UsageError
from asa.ir.units import GIB
from asa.report.jobs.job import ENVIRONMENT, GRACE_S, ORIGINS, PREEMPTED, Job, resume_lines, title, verdict_lines

_SHARED_GIB = 1
"""GiB in /dev/shm per rank; they count as the pod's memory."""
_PROCESS_GIB = 3
"""GiB of a process besides the plan's prediction: interpreter, libraries, a data set."""

_UNPACK = (f'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then mkdir -p {ORIGINS} && cp -L /plan/*.json {ORIGINS}/; fi',)
"""Shell commands that copy the plan's profile and cluster to where asa reads them when it plans again."""


def _indented(text: str, spaces: int) -> str:
    pad = " " * spaces
    return "\n".join(pad + line if line else "" for line in text.rstrip("\n").split("\n"))


def kubernetes(job: Job) -> str:
    """A manifest for ``kubectl apply``: the plan as a ConfigMap, a headless service, and an indexed Job (Kubernetes
    1.27 or later). An evicted pod is replaced and does not count as a failure.

    Raises:
        UsageError: no image was named.
    """
    if not job.image:
        raise UsageError("a pod needs an image with asa in it; name one with --image")
    name = job.name
    rendezvous = (
        f"--rdzv-backend c10d --rdzv-id {name} --rdzv-endpoint {name}-0.{name}:29400 "
        '--rdzv-conf is_host=$([ "$JOB_COMPLETION_INDEX" = 0 ] && echo true || echo false)'
    )
    lines = job.torchrun(rendezvous)
    lines[-1] += " $resume &"
    script = "\n".join(
        [
            ENVIRONMENT,
            *(_UNPACK if job.origins else []),
            *resume_lines(job),
            *lines,
            "child=$!",
            "trap 'kill -TERM $child' TERM",
            "wait $child || wait $child  # the first ends with the signal, the second with the ranks",
            *verdict_lines(job),
            'exit "$code"',
        ]
    )
    claim = job.volume or f"{name}-data"
    limits = f"nvidia.com/gpu: {job.per_node}" if job.gpu else f"cpu: {job.cores}"
    carried = "".join(f"  {name}.json: |\n{_indented(text, 4)}\n" for name, text in sorted(job.origins.items()))
    deadline = f"  activeDeadlineSeconds: {math.ceil(job.limit_s)}\n" if job.limit_s else ""
    return f"""\
# {title(job)}
# The run's folder lies on the volume of the claim {claim}, which all pods mount.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}-plan
data:
  plan.json: |
{_indented(job.plan_text, 4)}
{carried}---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {job.nodes}
  parallelism: {job.nodes}
  backoffLimit: {job.restarts * job.nodes}
{deadline}  podFailurePolicy:
    rules:
      - action: Ignore  # evicted: a new pod takes its place
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      - action: Ignore  # pre-empted, state saved
        onExitCodes:
          containerName: train
          operator: In
          values: [{PREEMPTED}]
        onPodConditions: []  # before 1.28 the schema wants the field
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {GRACE_S}
      containers:
        - name: train
          image: {json.dumps(job.image)}
          workingDir: /work
          command: ["/bin/bash", "-c"]
          args:
            - |
{_indented(script, 14)}
          resources:
            requests:
              cpu: {job.cores}
              memory: {_memory_gib(job)}Gi
            limits:
              {limits}
          volumeMounts:
            - name: plan
              mountPath: /plan
            - name: work
              mountPath: /work
            - name: memory
              mountPath: /dev/shm
      volumes:
        - name: plan
          configMap:
            name: {name}-plan
        - name: work
          persistentVolumeClaim:
            claimName: {json.dumps(claim)}
        - name: memory
          emptyDir:
            medium: Memory
            sizeLimit: {job.per_node * _SHARED_GIB}Gi
"""


def _memory_gib(job: Job) -> int:
    """GiB of host memory for all ranks of a pod; for CPU ranks, including the plan's predicted memory."""
    ranks = job.plan.prediction.memory_bytes_per_rank
    plan_bytes = 0 if job.gpu else max(ranks, default=0) * job.per_node
    return math.ceil(plan_bytes / GIB) + job.per_node * (_PROCESS_GIB + _SHARED_GIB)
