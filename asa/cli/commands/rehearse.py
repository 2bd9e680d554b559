"""``asa train --rehearse``: runs one rank of a plan for many devices on one device, and compares it with its
prediction."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from asa.cli import options as o
from asa.cli.choose import origins
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option
from asa.errors import UnavailableError, UsageError
from asa.ir import codec
from asa.ir.cluster import Cluster, Overlap
from asa.ir.plan import Plan
from asa.ir.profile import Profile, Stat
from asa.ir.rehearsal import Rehearsal, RehearsedComponent, Spans
from asa.launch import cuda_devices
from asa.strategies import offered

if TYPE_CHECKING:
    from asa.cost.planned import StagePrice

OPTIONS = (
    Option(
        name="rehearse",
        help="run only this rank of the plan, alone on one device, for its compute time and memory",
        parse=o.natural,
        metavar="RANK",
        heeds=("plan", "gpus", "rehearsal_steps", "device", "seed", "json"),
        harmless=True,
    ),
    o.option(
        o.GPUS,
        help="number of devices to plan a MODEL for; a plan must be for this number, or is "
        "planned again with --resume (default: all here)",
    ),
    o.number("rehearsal-steps", help="steps to run with --rehearse (default: 10)", default=10, needs="rehearse"),
)


def rehearse(args: Arguments, console: Console, plan: Plan) -> None:
    """Run the rank, predict its step for a rank that works alone, and show both.

    Raises:
        UsageError: the plan has no such rank, or the device is an emulated one.
        InvalidInputError: the profile or the cluster of the plan no longer exists.
    """
    if not isinstance(args.device, str):
        raise UsageError("--rehearse computes for real, an emulated device sleeps; choose --device auto, cpu or cuda")
    if args.rehearse >= plan.num_ranks:
        idle = f" on {plan.num_ranks} of its {plan.gpus} devices" if plan.num_ranks < plan.gpus else ""
        raise UsageError(f"the plan has ranks 0 to {plan.num_ranks - 1}{idle}, asked for rank {args.rehearse}")
    profile, cluster = origins(plan, console)
    spans, device = _run(args, console, plan)
    rehearsal = compare(plan, profile, cluster, spans, device)
    from asa.report.text import rehearsal as report

    console.result(codec.document(rehearsal), lambda: report.render(rehearsal))


def _run(args: Arguments, console: Console, plan: Plan) -> tuple[Spans, str]:
    kind = plan.device_type if args.device == "auto" else args.device
    if kind == "cuda" and not cuda_devices():
        raise UnavailableError("the plan is for CUDA devices and there is none here; choose --device cpu")
    import torch

    from asa.executor.measuring.rehearsal import rehearse as run
    from asa.zoo.models import build

    device = torch.device(kind)
    if device.type == "cpu":
        torch.set_num_threads(1)  # one core per rank, as components were profiled
    model = build(plan.model_spec, num_classes=plan.num_classes, input_shape=plan.sample_shape, seed=args.seed)
    with console.progress(f"rehearsing rank {args.rehearse} of {plan.num_ranks}") as report:
        spans = run(
            plan,
            model,
            rank=args.rehearse,
            strategies=offered(),
            device=device,
            steps=args.rehearsal_steps,
            seed=args.seed,
            say=report,
        )
    return spans, device.type


def without_contention(profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Profile and cluster for a rank that works alone: no contention, no interference, no spread."""

    def steady(s: Stat) -> Stat:
        return Stat(median=s.median, p10=s.median, p90=s.median, n=s.n)

    calm = dataclasses.replace(
        profile,
        timings=tuple(
            dataclasses.replace(t, forward=steady(t.forward), backward=steady(t.backward)) for t in profile.timings
        ),
        whole=tuple(dataclasses.replace(w, whole=steady(w.whole)) for w in profile.whole),
    )
    return calm, dataclasses.replace(cluster, contention=(), overlap=Overlap())


def compare(plan: Plan, profile: Profile, cluster: Cluster, spans: Spans, device: str) -> Rehearsal:
    """The measurement, compared with the predicted cost of the rank's stage without other ranks."""
    from asa.cost.planned import price_plan
    from asa.report.text.tables import short

    stage_index = next(i for i, s in enumerate(plan.stages) if spans.rank in s.ranks)
    stage = price_plan(plan, *without_contention(profile, cluster), offered()).stages[stage_index]
    assignments = [c for c in plan.components if c.stage == stage_index]
    m = plan.num_microbatches
    rows = tuple(
        RehearsedComponent(
            name=measured.name,
            assignment=short(assignment),
            forward_s=measured.forward_s,
            backward_s=measured.backward_s,
            saved_bytes=measured.saved_bytes,
            predicted_forward_s=m * cost.forward_s,
            predicted_backward_s=m * cost.backward_s + cost.bucket_s,
            predicted_saved_bytes=round(cost.footprint.activations),
        )
        for measured, assignment, cost in zip(spans.components, assignments, stage.components, strict=True)
    )
    return Rehearsal(
        model=plan.model_spec,
        plan_fingerprint=codec.fingerprint(plan),
        rank=spans.rank,
        num_ranks=plan.num_ranks,
        stage=stage_index,
        device=device,
        steps=spans.steps,
        samples=plan.global_batch,
        num_microbatches=m,
        step_s=spans.step_s,
        compute_s=spans.compute_s,
        update_s=spans.update_s,
        predicted_compute_s=sum(c.compute_s for c in stage.components) + _updates(stage),
        predicted_update_s=_updates(stage),
        plan_compute_s=plan.prediction.compute_s,
        plan_step_time_s=plan.prediction.step_time_s,
        priced_communication_s=plan.prediction.exposed_communication_s,
        peak_memory_bytes=spans.peak_memory_bytes,
        predicted_memory_bytes=plan.prediction.memory_bytes_per_rank[spans.rank],
        components=rows,
        notes=_notes(plan, profile, cluster, device),
    )


def _updates(stage: StagePrice) -> float:
    return sum(c.update_s for c in stage.components)


def _notes(plan: Plan, profile: Profile, cluster: Cluster, device: str) -> tuple[str, ...]:
    from asa.cost.machine.estimate import measured_on

    notes: list[str] = []
    if plan.device_type != device:
        notes.append(f"the plan's times are of {cluster.device.name}, rehearsed on {device}: they do not compare")
    measured = profile.device.type == plan.device_type and measured_on(profile, cluster)
    if profile.provenance.origin == "estimated" or not measured:
        notes.append("the plan's times are estimated, not measured")
    return tuple(notes)
