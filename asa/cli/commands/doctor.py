"""``asa doctor``: checks what this machine can do, and says how to repair the rest."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from asa.cli import options as o
from asa.cli import places
from asa.cli.commands import system_checks
from asa.cli.console import Console
from asa.cli.verb import Arguments, Verb
from asa.errors import TRAINING, UnavailableError
from asa.launch import usable_cores
from asa.report.text.checks import Check, render

if TYPE_CHECKING:
    from asa.planner.stage.problem import Problem

_SHOWN = 4
"""Largest number of files named in one line."""


def run(_: Arguments, console: Console) -> int:
    """Run all checks; returns exit code 5 if something needed is missing."""
    results = [_looked(look, console) for look in LOOKS]
    data = {
        "kind": "doctor",
        "ok": all(c.ok for c in results if c.needed),
        "checks": [dataclasses.asdict(c) for c in results],
    }
    console.result(data, lambda: render(results))
    return 0 if data["ok"] else UnavailableError.exit_code


def _looked(look: Callable[[Console], Check], console: Console) -> Check:
    """Run one check; if it fails itself (for instance without torch), return that as its result."""
    try:
        return look(console)
    except ModuleNotFoundError as error:
        detail = f"not looked at: this needs {error.name}"
        return Check(name=look.__name__.strip("_"), ok=False, detail=detail, needed=False)
    except (ImportError, RuntimeError, OSError) as error:
        why = f"cannot be told: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        of_torch = "repair torch first" if isinstance(error, RuntimeError) else ""
        fix = f"pip install '{TRAINING}'" if isinstance(error, ImportError) else of_torch
        return Check(name=look.__name__.strip("_"), ok=False, detail=why, needed=False, fix=fix)


def _python(_: Console) -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(name="python", ok=sys.version_info >= (3, 11), detail=version, fix="asa needs Python 3.11 or newer")


def _torch(_: Console) -> Check:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        detail = "not installed: plan, explain, simulate, export and launch work; commands that run a model do not"
        return Check(name="torch", ok=False, detail=detail, needed=False, fix=f"pip install '{TRAINING}'")
    fix = "install the pair from one index: pip install torch torchvision"
    try:
        import torch
        import torchvision
    except (ImportError, RuntimeError, AttributeError) as error:
        return Check(name="torch", ok=False, detail=str(error).split("\n")[0], fix=fix)
    return Check(name="torch", ok=True, detail=f"{torch.__version__}, torchvision {torchvision.__version__}")


def _cores(_: Console) -> Check:
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

    from asa.instruments import nvml
    from asa.launch import cuda_devices

    count = cuda_devices()
    # NVML gives the names without starting CUDA, after which this process could not fork ranks that use it.
    named = ", ".join(nvml.names(count)) or (f"{count} devices" if count else "")
    lacks = f"a driver for CUDA {torch.version.cuda}" if torch.version.cuda else "a torch that is built for CUDA"
    fix = f"training runs on CPU; GPUs need {lacks}"
    return Check(name="cuda", ok=count > 0, detail=named or "no device", needed=False, fix=fix)


def _memory(_: Console) -> Check:
    import psutil

    from asa.report.units import size

    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    with suppress(ModuleNotFoundError):  # which has torch, and knows of control groups
        from asa.instruments.memory_limits import free_on_host
        from asa.profiler.machine import total_memory

        total = total_memory()
        free = min(free, known) if (known := free_on_host()) is not None else free
    fix = "close other programs, or choose a smaller model and batch"
    return Check(name="memory", ok=free > 2**31, detail=f"{size(free)} free of {size(total)}", fix=fix)


def _ranks(_: Console) -> Check:
    from asa.errors import AsaError
    from asa.launch import run_ranks

    try:
        sums = run_ranks(2, _meet, threads=1, timeout_s=20, limit_s=40)
    except AsaError as error:
        lacks = isinstance(error, UnavailableError)  # its message says what to do
        fix = "" if lacks else "is the loopback interface up? try `ip link`"
        return Check(name="ranks", ok=False, detail=str(error), fix=fix)
    return Check(name="ranks", ok=sums == [3.0, 3.0], detail="2 gloo ranks met and reduced a tensor")


def _meet(rank: int) -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return float(value)


def _solver(_: Console) -> Check:
    """Check the solver: solve a problem of two variables with the same calls as a plan."""
    from importlib import metadata

    from asa.errors import AsaError
    from asa.planner.stage import ilp

    fix = "pip install 'pulp>=3.3.1,<5' highspy; until then --solver dp works"
    try:
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("pulp", "highspy"))
        answer = ilp.solve(_two_variables(), time_limit_s=10.0)
    except (AsaError, metadata.PackageNotFoundError) as error:
        return Check(name="solver", ok=False, detail=str(error), fix=fix)
    except Exception as error:  # another version of the solver may raise anything
        return Check(name="solver", ok=False, detail=f"{versions}: {type(error).__name__}: {error}", fix=fix)
    ok = answer.choice == (1,) and answer.proved and abs(answer.value - 3.0) < 1e-6
    verdict = "solved 2 variables" if ok else f"wrong answer to 2 variables: {answer.choice}, {answer.value:g} for 3"
    return Check(name="solver", ok=ok, detail=f"{versions}: {verdict}", fix=fix)


def _two_variables() -> Problem:
    """A problem with one component that takes 4 ms in one way and 3 ms in another."""
    from asa.ir.layout import Layout
    from asa.ir.plan import DataDegree, TensorDegree
    from asa.planner.stage.problem import Config, Problem

    configs = tuple(
        Config(
            layout=0, data=DataDegree(strategy="replicate", degree=1), tensor=TensorDegree(strategy="none", degree=1),
            work=work, window=0.0, prompt=0.0, late=0.0, state=0.0, activations=0.0, gradients=0.0, transient=0.0,
        )
        for work in (4.0, 3.0)
    )  # fmt: skip
    return Problem(
        width=1, num_microbatches=1, names=("only",), layouts=(Layout(width=1, data=1, tensor=1),), configs=(configs,),
        edges=(), release=(0,), saving=0.0, sp=0.0, sc=0.0, capacity=1.0,
    )  # fmt: skip


def _profiles(console: Console) -> Check:
    files = [places.shown(path) for path, _ in places.profiles(console)]
    return Check(name="profiles", ok=bool(files), detail=_few(files), needed=False, fix="asa profile resnet50")


def _clusters(console: Console) -> Check:
    files = [places.shown(path) for path, _ in places.clusters(console)]
    return Check(name="clusters", ok=bool(files), detail=_few(files), needed=False, fix="asa cluster measure")


def _few(files: list[str]) -> str:
    """The first files by name, and the number of others."""
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(files[:_SHOWN]) + more or "none"


LOOKS: tuple[Callable[[Console], Check], ...] = (
    _python,
    _torch,
    _cores,
    _memory,
    _cuda,
    system_checks.gpu_modes,
    system_checks.topology,
    system_checks.shared_memory,
    system_checks.open_files,
    system_checks.threads,
    system_checks.disk,
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
