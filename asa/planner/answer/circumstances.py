"""Notes on a plan: what a reader should know besides its numbers."""

from __future__ import annotations

from itertools import groupby

from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space


def circumstances(prices: Prices, candidate: Candidate) -> tuple[str, ...]:
    """The notes on ``candidate``, a sentence each."""
    space, request = prices.space, prices.space.request
    notes = []
    if candidate.ranks == 1 < request.gpus:
        notes.append(f"one device is faster than {request.gpus} here: use one")
    elif candidate.ranks < request.gpus:
        notes.append(f"{candidate.ranks} of {request.gpus} devices are faster than all of them")
    if candidate.num_microbatches > 1 and len(candidate.widths) > 1:
        if _normalises(space):
            notes.append(f"BatchNorm normalises each of the {candidate.num_microbatches} microbatches by itself")
    elif candidate.num_microbatches > 1:
        notes.append(
            f"{candidate.num_microbatches} microbatches, because one does not fit"
            + ("; BatchNorm normalises each by itself" if _normalises(space) else "")
        )
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


def _normalises(space: Space) -> bool:
    return any(c.batch_norm for c in space.profile.graph.components)
