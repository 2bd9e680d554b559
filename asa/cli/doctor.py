"""``asa doctor``: what this machine can do, and how to repair what it cannot."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from asa.cli import options as o
from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments, Verb
from asa.errors import UnavailableError
from asa.ir import codec

if TYPE_CHECKING:
    from asa.report.checks import Check


def run(_: Arguments, console: Console) -> int:
    """Look at everything; 5 if something needed is missing."""
    from asa.report.checks import render

    found = [_looked(look, console) for look in LOOKS]
    data = {
        "schema_version": codec.SCHEMA_VERSION,
        "kind": "doctor",
        "ok": all(c.ok for c in found if c.needed),
        "checks": [dataclasses.asdict(c) for c in found],
    }
    console.result(data, lambda: render(found))
    return 0 if data["ok"] else UnavailableError.exit_code


def _looked(look: Callable[[Console], Check], console: Console) -> Check:
    """One check; where it cannot even be made (there is no torch), that."""
    from asa.report.checks import Check

    try:
        return look(console)
    except (ImportError, RuntimeError, OSError) as error:
        why = f"cannot be told: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        return Check(name=look.__name__.strip("_"), ok=False, detail=why, needed=False, fix="repair torch first")


def _python(_: Console) -> Check:
    from asa.report.checks import Check

    version = ".".join(map(str, sys.version_info[:3]))
    return Check(name="python", ok=sys.version_info >= (3, 11), detail=version, fix="asa needs Python 3.11 or newer")


def _torch(_: Console) -> Check:
    from asa.report.checks import Check

    fix = "install the pair from one index: pip install torch torchvision"
    try:
        import torch
        import torchvision
    except (ImportError, RuntimeError, AttributeError) as error:
        return Check(name="torch", ok=False, detail=str(error).split("\n")[0], fix=fix)
    return Check(name="torch", ok=True, detail=f"{torch.__version__}, torchvision {torchvision.__version__}")


def _cores(_: Console) -> Check:
    from asa.launch import usable_cores
    from asa.report.checks import Check

    cores = usable_cores()
    return Check(
        name="cores",
        ok=cores > 1,
        detail=f"{cores} usable",
        needed=False,
        fix="CPU ranks will take turns on one core: right results, no speed",
    )


def _cuda(_: Console) -> Check:
    import torch

    from asa.report.checks import Check

    count = torch.cuda.device_count()
    named = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    fix = "training runs on CPU; for GPUs install a driver that torch " + str(torch.version.cuda) + " can use"
    return Check(name="cuda", ok=count > 0, detail=named or "no device", needed=False, fix=fix)


def _memory(_: Console) -> Check:
    import psutil

    from asa.profiler.machine import total_memory
    from asa.report.checks import Check
    from asa.report.units import size

    total, free = total_memory(), psutil.virtual_memory().available
    fix = "close other programs, or choose a smaller model and batch"
    return Check(name="memory", ok=free > 2**31, detail=f"{size(free)} free of {size(total)}", fix=fix)


def _ranks(_: Console) -> Check:
    from asa.errors import AsaError
    from asa.launch import run_ranks
    from asa.report.checks import Check

    try:
        sums = run_ranks(2, _meet, threads=1, timeout_s=20, limit_s=40)
    except AsaError as error:
        return Check(name="ranks", ok=False, detail=str(error), fix="is the loopback interface up? try `ip link`")
    return Check(name="ranks", ok=sums == [3.0, 3.0], detail="2 gloo ranks met and reduced a tensor")


def _meet(rank: int) -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return float(value)


def _solver(_: Console) -> Check:
    from importlib import metadata

    from asa.report.checks import Check

    fix = "pip install 'pulp>=3.3.1,<5' highspy"
    try:
        import pulp

        version = metadata.version("highspy")
    except (ImportError, metadata.PackageNotFoundError) as error:
        return Check(name="solver", ok=False, detail=str(error), fix=fix)
    works = pulp.HiGHS(msg=False).available()
    return Check(name="solver", ok=bool(works), detail=f"pulp {pulp.__version__}, highspy {version}", fix=fix)


def _profiles(console: Console) -> Check:
    from asa.report.checks import Check

    found = places.profiles(console)
    names = ", ".join(places.shown(path) for path, _ in found[:4])
    return Check(name="profiles", ok=bool(found), detail=names or "none", needed=False, fix="asa profile resnet50")


def _clusters(console: Console) -> Check:
    from asa.report.checks import Check

    found = places.clusters(console)
    names = ", ".join(c.name for _, c in found)
    return Check(name="clusters", ok=bool(found), detail=names or "none", needed=False, fix="asa cluster measure")


LOOKS: tuple[Callable[[Console], Check], ...] = (
    _python,
    _torch,
    _cores,
    _memory,
    _cuda,
    _ranks,
    _solver,
    _profiles,
    _clusters,
)

VERBS = (
    Verb(
        name="doctor",
        help="what this machine can do, and how to repair what it cannot",
        run=run,
        options=(o.JSON,),
        details="Exit code 5 if something asa cannot do without is missing.",
    ),
)
