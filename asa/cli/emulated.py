"""``--device emulated:PROFILE[?dilation=X]``: emulates the ranks of a fast device on the available cores."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asa.cli.choose import described, fits, origins
from asa.cli.console import Console
from asa.cli.verb import Arguments
from asa.errors import AsaError, UsageError
from asa.ir import codec
from asa.ir.bench import EMULATED
from asa.ir.cluster import Cluster, Device, Overlap
from asa.ir.plan import Plan
from asa.ir.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asa.executor.measuring.benchmark import Cell
    from asa.executor.measuring.emulation import EmulatedDevice

_FORM = re.compile(r"emulated:(?P<path>[^?]+)(?:\?dilation=(?P<dilation>[0-9.]+))?")
_REAL = ("auto", "cpu", "cuda")
METAVAR = "auto|cpu|cuda|emulated:PROFILE[?dilation=X]"


@dataclass(frozen=True, kw_only=True)
class EmulatedName:
    """A parsed ``emulated:`` option. ``dilation``: factor on the times of all computation."""

    path: Path
    dilation: float = 1.0

    @property
    def slower(self) -> str:
        """Description of the dilation; empty if it is 1."""
        return f", {self.dilation:g} times slower" if self.dilation != 1 else ""

    def description(self, profile: Profile) -> str:
        """Description of the emulated devices, stored with results."""
        return f"emulated {profile.device.name} from {self.path}{self.slower}; nothing is trained"

    def profile(self) -> Profile:
        """The profile, with dilation applied.

        Raises:
            InvalidInputError: the file cannot be used.
        """
        from asa.cost.machine.what_if import slower_profile

        plain = codec.load(Profile, self.path)
        return plain if self.dilation == 1 else slower_profile(plain, self.dilation)


def device(text: str) -> str | EmulatedName:
    """Parse a kind of device, or an emulated one.

    >>> device("cpu"), device("emulated:gpu.json?dilation=5").dilation
    ('cpu', 5.0)
    """
    if text in _REAL:
        return text
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is none of {', '.join(_REAL)}, emulated:PROFILE, emulated:PROFILE?dilation=X")
    try:
        dilation = float(match["dilation"] or 1)
    except ValueError:
        raise ValueError(f"a dilation of {match['dilation']!r} is no number") from None
    if not dilation > 0:
        raise ValueError(f"a dilation of {dilation:g} is not above 0")
    return EmulatedName(path=Path(match["path"]), dilation=dilation)


def bandwidth(of: Device, dilation: float) -> float:
    """Memory bandwidth in bytes/s of a device slowed down by ``dilation``."""
    return of.memory_bandwidth / dilation


def joined(profile: Profile, cluster: Cluster, of: Device | None = None, dilation: float = 1.0) -> Cluster:
    """A cluster of emulated devices with the links of ``cluster``, without contention or interference with messages.

    ``of``: the known properties of the device.
    """
    record = profile.device
    datasheet = of if of is not None and of.type == record.type else None
    emulated = Device(
        name=f"{EMULATED} {record.name}",
        type=record.type,
        memory_bytes=record.memory_bytes,
        memory_bandwidth=bandwidth(datasheet, dilation) if datasheet else 0.0,
    )
    return replace(cluster, device=emulated, contention=(), overlap=Overlap())


def pretended(name: EmulatedName, plan: Plan, console: Console) -> tuple[EmulatedDevice, Plan]:
    """The device for the executor, and ``plan`` with its prediction for that device.

    Raises:
        UsageError: the profile is of another model.
    """
    profile = name.profile()  # before the slow import of torch, so that errors appear at once
    if tuple(c.name for c in profile.graph.components) != tuple(c.name for c in plan.components):
        raise UsageError(
            f"{name.path} is a profile of {profile.model_spec} ({len(profile.graph.components)} components), the plan "
            f"is of {plan.model_spec} ({len(plan.components)}); name a profile of the plan's model"
        )

    from asa.cost.planned import price_plan
    from asa.executor.measuring.emulation import EmulatedDevice
    from asa.planner.answer.prediction import predict
    from asa.strategies import offered

    try:
        cluster = origins(plan, console)[1]
    except AsaError as error:
        console.say(f"asa: the prediction is the plan's own, not that of the emulated device: {error}")
        return EmulatedDevice(profile=profile), plan
    cluster = joined(profile, cluster, cluster.device, name.dilation)
    price = price_plan(plan, profile, cluster, offered())
    prediction = predict(
        price, profile, cluster, widths=[len(s.ranks) for s in plan.stages], global_batch=plan.global_batch
    )
    console.say(
        f"asa: emulated {profile.device.name}{name.slower}: {prediction.step_time_s:.3g} s per step expected; "
        "nothing is trained"
    )
    device = EmulatedDevice(profile=profile, memory_bandwidth=cluster.device.memory_bandwidth)
    return device, replace(plan, prediction=prediction)


def mark(result: dict[str, Any], description: str, out: Path) -> dict[str, Any]:
    """Add the field ``emulated`` to the document of a run, also in its folder: its losses and accuracies mean
    nothing."""
    marked = {**result, "emulated": description}
    codec.write(json.dumps(marked, indent=1, allow_nan=False) + "\n", out / "result.json")
    return marked


def stage(args: Arguments, name: EmulatedName, model: str, cluster: Cluster) -> tuple[Profile, Cluster, str]:
    """Inputs of ``asa bench`` with emulated devices: profile, measured links between them, and a sentence about it.

    Raises:
        UsageError: the profile is of another model, or of other inputs than requested.
    """
    profile = name.profile()
    if profile.model_spec != model:
        raise UsageError(f"{name.path} is a profile of {profile.model_spec}; name it with --models, asked for {model}")
    if not fits(profile, args, model):
        raise UsageError(
            f"{name.path} is a profile {described(profile)}; leave out --input, --classes and --precision, or profile "
            f"{model} with them"
        )
    return profile, joined(profile, cluster, None, name.dilation), name.description(profile)


def cells(profile: Profile, cluster: Cluster, plans: Sequence[Plan], console: Console, budget_s: float) -> list[Cell]:
    """Measure step times of every plan on emulated devices, one after the other."""
    import torch

    from asa.executor.measuring.benchmark import Cell
    from asa.executor.measuring.emulation import EmulatedDevice
    from asa.executor.running.emulated import EmulationOptions, measure_emulated
    from asa.strategies import offered
    from asa.tracing import trace
    from asa.zoo.inputs import example
    from asa.zoo.models import build

    shape = profile.graph.input_shape
    torch.set_num_threads(1)  # ranks are forked from here
    model = build(profile.model_spec, num_classes=profile.graph.num_classes, input_shape=shape)
    traced = trace(model, example(shape), name=profile.model_spec)
    device = EmulatedDevice(profile=profile, memory_bandwidth=cluster.device.memory_bandwidth)
    options = EmulationOptions(budget_s=budget_s / len(plans), most_steps=200)
    results: list[Cell] = []
    with console.progress(f"emulating {profile.model_spec}") as report:

        def on_plan(number: int, steps: list[float]) -> None:
            results.append(Cell(plans[number].strategy, steps=steps))
            report((number + 1) / len(plans), f"{number + 1} of {len(plans)} plans")

        measure_emulated(plans, traced, device, offered(), options, on_plan=on_plan)
    return results
