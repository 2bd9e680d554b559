"""asa: decides how to train a neural network on the devices you have, trains it that way, checks it was right."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from asa.api.job.job import Job
    from asa.api.loop.checks import check
    from asa.api.loop.parallelize import parallelize
    from asa.api.losses.across import gather, mean_over, reduce
    from asa.api.plans.planning import plan
    from asa.api.tensors.files import load, save
    from asa.errors import AsaError
    from asa.ir.cluster import Cluster
    from asa.ir.plan import Plan
    from asa.ir.profile import Profile

__all__ = [
    "AsaError",
    "Cluster",
    "Job",
    "Plan",
    "Profile",
    "__version__",
    "check",
    "gather",
    "load",
    "mean_over",
    "parallelize",
    "plan",
    "reduce",
    "save",
]

_HOME = {
    "AsaError": "asa.errors",
    "Cluster": "asa.ir.cluster",
    "Job": "asa.api.job.job",
    "Plan": "asa.ir.plan",
    "Profile": "asa.ir.profile",
    "check": "asa.api.loop.checks",
    "gather": "asa.api.losses.across",
    "load": "asa.api.tensors.files",
    "mean_over": "asa.api.losses.across",
    "parallelize": "asa.api.loop.parallelize",
    "plan": "asa.api.plans.planning",
    "reduce": "asa.api.losses.across",
    "save": "asa.api.tensors.files",
}
"""Module of each exported name. Imported at first use (PEP 562), so that ``import asa`` costs nothing."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'asa' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "asa").partition(".")[0] == "asa":
            raise
        from asa.errors import UnavailableError, lacking

        raise UnavailableError(lacking(str(error.name), f"asa.{name}")) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
