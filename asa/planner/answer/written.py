"""Makes the plan document of a candidate, and its notes: what a reader should know besides its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from asa.errors import AsaError
from asa.ir import codec
from asa.ir.plan import KEPT_OUT, Assignment, Baseline, Certificate, Plan, Stage
from asa.ir.profile import Profile
from asa.planner.answer.confidence import confidence
from asa.planner.answer.prediction import memory_max, predict
from asa.planner.pipeline.whole import StrategyRow
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space

_BUSY = 0.1
"""Share of a core that other processes had while a model was profiled, above which a plan says so."""
_DRAWN = 3_000
"""Most components of all finalists together whose errors are drawn; models with more have fewer finalists."""


def pins_allow(space: Space, candidate: Candidate | None) -> bool:
    """Whether ``candidate`` satisfies all pins; True for None."""
    return candidate is None or all(space.pinned(i, way) for i, way in enumerate(candidate.ways))


def plan_of(
    profile: Profile,
    prices: Prices,
    candidate: Candidate,
    strategy: str,
    certificate: Certificate,
    rows: list[StrategyRow],
    notes: tuple[str, ...],
    rivals: Sequence[Candidate],
) -> Plan:
    """The plan of ``candidate``, with its prediction, its certificate and ``rows``, the whole strategies, as baselines.

    ``rivals``: other candidates, against which its confidence is computed.

    Raises:
        AsaError: it does not fit, which is a bug of the planner.
    """
    space, request = prices.space, prices.space.request
    candidate = _named(space, candidate)
    price = prices.of(candidate)
    if not prices.fits(candidate):
        raise AsaError(
            f"the solver's plan needs {price.peak.total:.0f} bytes, more than it was given; please report this"
        )
    return Plan(
        model_spec=profile.model_spec,
        model_fingerprint=profile.model_fingerprint,
        profile_fingerprint=codec.fingerprint(profile),
        cluster=space.cluster.name,
        cluster_fingerprint=codec.fingerprint(space.cluster),
        input_shape=profile.graph.input_shape,
        num_classes=profile.graph.num_classes,
        strategy=strategy,
        gpus=request.gpus,
        global_batch=request.global_batch,
        precision=profile.precision,
        memory_format=profile.memory_format,
        compiled=profile.compiled,
        optimizer=request.optimizer,
        device_type=space.cluster.device.type,
        components=tuple(
            Assignment(
                name=c.name,
                stage=candidate.stage(i),
                data=w.data,
                tensor=w.tensor,
                checkpoint=w.checkpoint,
                offload=w.offload,
            )
            for i, (c, w) in enumerate(zip(profile.graph.components, candidate.ways, strict=True))
        ),
        stages=_stages(candidate),
        schedule=candidate.schedule,
        num_microbatches=candidate.num_microbatches,
        prediction=predict(
            price, space.profile, space.cluster, widths=candidate.widths, global_batch=request.global_batch
        ),
        certificate=certificate,
        baselines=tuple(
            Baseline(
                name=r.name,
                step_time_s=r.price.cost.total_s if r.price else None,
                memory_bytes_max=memory_max(r.price, space.cluster) if r.price else None,
                fits=r.fits and pins_allow(space, r.candidate),
                why_not=r.why_not or ("" if pins_allow(space, r.candidate) else KEPT_OUT),
                num_microbatches=r.candidate.num_microbatches if r.candidate else 1,
            )
            for r in rows
        ),
        origin="measured" if space.measured else "estimated",
        notes=notes,
        confidence=confidence(
            [(candidate, price), *((c, prices.of(c)) for c in rivals[: max(3, _DRAWN // len(space.profile.graph))])],
            space.profile,
            space.strategies,
            space.cluster.overlap,
        ),
        compression=request.compression,
        memory_bytes=request.memory_bytes,
    )


def _named(space: Space, candidate: Candidate) -> Candidate:
    """The candidate with its schedule renamed to ``layers`` where it is a pipeline with a single microbatch."""
    if candidate.num_microbatches == 1 < len(candidate.widths) and "layers" in space.strategies.schedules:
        return replace(candidate, schedule="layers")
    return candidate


def _stages(candidate: Candidate) -> tuple[Stage, ...]:
    """The stages with their ranks, numbered in order."""
    ends = list(accumulate(candidate.widths))
    weights = [candidate.ways[start].layout.weights or None for start in candidate.starts]
    return tuple(
        Stage(ranks=tuple(range(end - w, end)), weights=cut)
        for end, w, cut in zip(ends, candidate.widths, weights, strict=True)
    )


def circumstances(prices: Prices, candidate: Candidate) -> tuple[str, ...]:
    """The notes on ``candidate``, a sentence each."""
    space, request = prices.space, prices.space.request
    norms, notes = any(c.batch_norm for c in space.profile.graph.components), []
    if candidate.ranks < request.gpus and "asa" not in (request.strategies or ("asa",)):
        notes.append(f"{candidate.ranks} of {request.gpus} devices are used, as asked for")
    elif candidate.ranks == 1 < request.gpus:
        notes.append(f"one device is faster than {request.gpus} here: use one")
    elif candidate.ranks < request.gpus:
        busy = "; stages are priced with all of them busy" if len(candidate.widths) > 1 else ""
        notes.append(f"{candidate.ranks} of {request.gpus} devices are faster than all of them{busy}")
    if len(candidate.widths) > 1 and candidate.num_microbatches > 1 and norms:
        notes.append(f"BatchNorm normalises each of the {candidate.num_microbatches} microbatches by itself")
    elif len(candidate.widths) == 1 < candidate.num_microbatches:
        why = "as asked for" if request.microbatches else "because the fastest way to run one does not fit"
        why += "; BatchNorm normalises each by itself" * norms
        notes.append(f"{candidate.num_microbatches} microbatches, {why}")
    if request.compression != "none":
        notes.append(
            f"gradients travel as {request.compression}: training is not that of one device, `asa verify` says by how "
            "much"
        )
    notes += _unequal(space, candidate)
    away = sum(w.offload for w in candidate.ways)
    if away:
        notes.append(f"the optimizer state of {away} components is on the host, and so is their update")
    if space.profile.provenance.origin == "estimated":
        notes.append("times are estimated from FLOPs and bytes, not measured: good to tens of per cent")
    if why := space.profile.provenance.disturbed:
        notes.append(f"{why} while the model was profiled: times are treated as estimates")
    if (share := space.profile.provenance.others_share) > _BUSY:
        notes.append(f"other processes had {share:.0%} of a core during the profile: its times are less certain")
    if space.cluster.status != "measured":
        notes.append(f"the links of {space.cluster.name} are {space.cluster.status}, not measured here")
    return (*notes, *space.profile.graph.notes)


def _unequal(space: Space, candidate: Candidate) -> list[str]:
    """Notes on the use of unequal devices; none where all devices are equal."""
    cluster, cut = space.cluster, candidate.ways[0].layout
    if not cluster.unequal:
        return []
    every = [cluster.speed(r) for r in range(cluster.num_devices)]
    late = next((r for r in range(candidate.ranks, len(every)) if every[r] > min(every[: candidate.ranks])), None)
    notes = []
    if late is not None:
        notes.append(f"the first {candidate.ranks} devices are used, rank {late} is faster: list the fastest first")
    if len(candidate.widths) > 1 or len(set(every[: candidate.ranks])) == 1:
        return notes
    if not cut.weights:
        return [*notes, "unequal devices, all with as many samples"]
    shares, first = [], 0
    for weight, same in groupby(cut.weights):
        count, share = len(list(same)), f"{100 * weight / sum(cut.weights):.3g} %"
        shares.append(f"rank {first} {share}" if count == 1 else f"ranks {first} to {first + count - 1} {share} each")
        first += count
    return [*notes, f"unequal devices: of a batch {', '.join(shares)}"]
