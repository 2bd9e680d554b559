"""Job scripts that start a plan under a cluster's scheduler: Slurm, Kubernetes, Ray."""

from __future__ import annotations

from asa.report.jobs.job import Job, per_node
from asa.report.jobs.kubernetes import kubernetes
from asa.report.jobs.ray import ray
from asa.report.jobs.slurm import slurm

__all__ = ["Job", "kubernetes", "per_node", "ray", "slurm"]
