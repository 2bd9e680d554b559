"""``asa bench --check-sealed``: compares stored predictions with measurements on this machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from asa.cli import bench_setup
from asa.cli.console import Console
from asa.cli.verb import Arguments
from asa.errors import AsaError, InvalidInputError, UsageError
from asa.ir import codec
from asa.ir.chips import same_gpu
from asa.ir.sealed import CheckedCell, Seal, SealedCheck, newest, read
from asa.strategies import offered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asa.ir.bench import BenchEnvironment

FOLDER = Path("benchmarks/sealed")
"""Folder in the working directory: a clone has it, the package has not."""


def run(args: Arguments, console: Console) -> None:
    """Read predictions, select those for this machine, measure and score them. Wrong predictions lower the score but
    are no error, nor is a machine without predictions."""
    from asa.report.text import sealed as report

    if not isinstance(args.device, str):
        raise UsageError("--check-sealed measures, an emulated device sleeps; choose --device auto, cpu or cuda")
    claimed = newest(every(Path(args.sealed) if args.sealed else FOLDER))
    if args.given("models"):
        claimed = of_models(claimed, args.models)
    device, count = bench_setup.device_of(args)
    machine = bench_setup.machine(device, count)
    matching = [s for s in claimed if matches(s, machine)]
    contests = [list(g) for _, g in groupby(sorted(matching, key=_order), key=_order)]
    cells: list[CheckedCell] = []
    for number, group in enumerate(contests, 1):
        claim = group[0].claim
        console.say(f"asa: {number} of {len(contests)}: {claim.plan.model_spec}, batch {claim.plan.global_batch}")
        cells += measured(args, group, args.budget / len(contests))
    check = SealedCheck(
        created=codec.now(),
        environment=machine,
        sealed=len(claimed),
        machines=tuple(dict.fromkeys(s.claim.machine for s in claimed)),
        cells=tuple(cells),
    )
    data = {**codec.document(check), "scores": report.scores(check)}
    console.result(data, lambda: report.render(check))


def of_models(seals: Sequence[Seal], models: Sequence[str]) -> list[Seal]:
    """The seals of ``models``.

    Raises:
        UsageError: a model has none.
    """
    names = dict.fromkeys(map(_model, seals))
    for model in models:
        if model not in names:
            raise UsageError(f"no sealed prediction is of --models {model}; they are of {', '.join(names)}")
    return [s for s in seals if _model(s) in models]


def every(folder: Path) -> list[Seal]:
    """All seals of a folder, with every hash checked.

    Raises:
        InvalidInputError: there are none, or one was changed.
    """
    seals = [seal for path in sorted(folder.glob("*.jsonl")) for seal in read(path)]
    if not seals:
        raise InvalidInputError(f"no sealed predictions in {folder}/; name their folder with --sealed")
    return seals


def matches(seal: Seal, machine: BenchEnvironment) -> bool:
    """Whether a prediction is for such a machine: one node with as many of the same devices."""
    claim = seal.claim
    if claim.num_nodes != 1 or claim.num_devices != machine.num_devices:
        return False
    if claim.plan.device_type != machine.device_type:
        return False
    if machine.device_type == "cpu":
        return claim.device_name == machine.device_name
    return same_gpu(claim.device_name, machine.device_name)


def measured(args: Arguments, group: Sequence[Seal], budget_s: float) -> list[CheckedCell]:
    """Measure the cells of one model and batch against each other; a failed cell has no time."""
    from asa.executor.measuring.benchmark import BenchOptions, measure
    from asa.zoo.models import build

    plan = group[0].claim.plan
    shape = plan.sample_shape
    factory = partial(build, plan.model_spec, num_classes=plan.num_classes, input_shape=shape, seed=args.seed)
    data = partial(bench_setup.stand_in, shape, plan.num_classes)
    options = BenchOptions(device=plan.device_type, budget_s=budget_s, seed=args.seed)
    plans = {s.claim.plan.conduct: s.claim.plan for s in group}
    try:
        cells = measure(list(plans.values()), factory, offered(), data, options)
    except AsaError as error:
        if len(group) == 1:
            return [replace(_unmeasured(group[0]), why_not=str(error))]
        # One failure ends the whole group, so measure each cell by itself.
        return [c for s in group for c in measured(args, [s], budget_s / len(group))]
    by_conduct = dict(zip(plans, cells, strict=True))
    return [
        replace(
            _unmeasured(s),
            measured=cell.step_time,
            peak_memory_bytes=max(cell.peak_memory_bytes) if cell.peak_memory_bytes else None,
        )
        for s in group
        for cell in (by_conduct[s.claim.plan.conduct],)
    ]


def _unmeasured(seal: Seal) -> CheckedCell:
    """The cell of a prediction, without a measurement."""
    claim, p = seal.claim, seal.claim.plan
    return CheckedCell(
        machine=claim.machine, model=p.model_spec, strategy=claim.strategy, input_shape=p.input_shape,
        ranks=p.num_ranks, global_batch=p.global_batch, origin=p.origin, sealed=seal.written, sha256=seal.sha256,
        predicted_s=p.prediction.step_time_s, low_s=p.prediction.step_time_low_s,
        high_s=p.prediction.step_time_high_s, predicted_memory_bytes=max(p.prediction.memory_bytes_per_rank),
        predicted_place=claim.place, measured=None, peak_memory_bytes=None,
    )  # fmt: skip


def _model(seal: Seal) -> str:
    return seal.claim.plan.model_spec


def _order(seal: Seal) -> tuple[str, ...]:
    return tuple(map(str, seal.claim.contest))
