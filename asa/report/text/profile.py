"""Text of a profile."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from asa.ir.profile import Profile, Timing
from asa.report.text.cluster import drifted
from asa.report.text.tables import fitted, folded, line, table
from asa.report.units import flops, percent, seconds, size

_ROWS, _BAR = 8, 12
"""Number of components shown without ``-v``, and of characters of a bar for a whole step."""


def render(profile: Profile, *, verbose: bool = False) -> list[RenderableType]:
    """The model, the time of a step, the check of the sum, and the components that take longest.

    ``verbose``: every component, the whole model over microbatches and degrees, and all remarks.
    """
    if verbose:
        return [
            _components(profile), line(""), _scan(profile), line(""), *_check(profile), *_roofline(profile),
            *_remarks(profile),
        ]  # fmt: skip
    lines = [line(headline(profile), "bold"), *standing(profile), *_roofline(profile), line(""), _longest(profile)]
    hidden = len(profile.graph.components) - _ROWS
    more = f"{hidden} more components, " if hidden > 0 else ""
    return [*lines, line(f"-v shows: {more}FLOPs, tensor degrees, what was skipped", "dim"), *_warnings(profile)]


def headline(profile: Profile) -> str:
    """Model, device and origin, in one line."""
    shape = "x".join(map(str, profile.graph.input_shape))
    device = profile.device
    return (
        f"{profile.model_spec} on {device.name} ({device.type}, {profile.precision}), input {shape}, "
        f"{profile.provenance.origin}"
    )


def standing(profile: Profile) -> list[RenderableType]:
    """Lines on the model, a step of it, the best microbatch, and the check of the sum."""
    parts = profile.graph.components
    sums = whole_sums(profile)
    largest = max(sums, default=None)
    lines: list[RenderableType] = [
        line(
            f"Model    {len(parts)} component{'s' * (len(parts) > 1)}, "
            f"{size(sum(c.parameter_bytes for c in parts))} of parameters, "
            f"{flops(sum(c.flops_per_sample for c in parts))} forward a sample"
        )
    ]
    if largest is not None:
        best = min(sums, key=lambda m: sums[m] / m)
        update = sum(u.step.median for u in profile.updates if u.tensor_degree == 1)
        lines.append(
            line(
                f"Step     {seconds(sums[largest])} forward and backward of {largest} samples, {seconds(update)} update"
            )
        )
        lines.append(line(f"Best     {seconds(sums[best] / best)} a sample, at {best} samples at once"))
    checked = [w for w in profile.whole if w.whole.median]
    if checked:
        last = max(checked, key=lambda w: w.microbatch)
        lines.append(
            line(
                f"Check    components add up to {seconds(last.components_s)}, the whole model took "
                f"{seconds(last.whole.median)} ({percent(last.components_s / last.whole.median - 1, signed=True)})"
            )
        )
    return lines


def whole_sums(profile: Profile) -> dict[int, float]:
    """Seconds of forward and backward of all unsplit components, by microbatch, if all were timed."""
    at = _by_key(profile)
    names = [c.name for c in profile.graph.components]
    sums = {}
    for m in sorted({t.microbatch for t in profile.timings if t.tensor_degree == 1}):
        timed = [at[n, m, 1] for n in names if (n, m, 1) in at]
        if len(timed) == len(names):
            sums[m] = sum(t.forward.median + t.backward.median for t in timed)
    return sums


def _longest(profile: Profile) -> RenderableType:
    """Table of the components that take longest at the largest microbatch, in 80 columns."""
    at = _by_key(profile)
    largest = max(t.microbatch for t in profile.timings if t.tensor_degree == 1)
    timings = {c.name: at[c.name, largest, 1] for c in profile.graph.components if (c.name, largest, 1) in at}
    cost = {name: t.forward.median + t.backward.median for name, t in timings.items()}
    total = sum(cost.values()) or 1.0
    result = table("", ("longest components", "forward", "backward", "saved", "splits to"))
    result.add_column("share", justify="left", no_wrap=True, overflow="crop")
    result.title = None
    split = {c.name: c.split.max_degree if c.split else None for c in profile.graph.components}
    for name in sorted(cost, key=lambda n: -cost[n])[:_ROWS]:
        t, part = timings[name], cost[name] / total
        result.add_row(
            fitted(name), seconds(t.forward.median), seconds(t.backward.median), size(t.saved_bytes),
            str(split[name] or "whole"), f"{100 * part:3.0f} % {'#' * round(_BAR * part)}",
        )  # fmt: skip
    return result


def _by_key(profile: Profile) -> dict[tuple[str, int, int], Timing]:
    return {(t.component, t.microbatch, t.tensor_degree): t for t in profile.timings}


def _components(profile: Profile) -> RenderableType:
    at, timed = _by_key(profile), {t.microbatch for t in profile.timings if t.tensor_degree == 1}
    largest = max(timed)
    device = profile.device
    result = table(
        f"{profile.model_spec} on {device.name} ({device.type}, {profile.precision}), "
        f"input {'x'.join(map(str, profile.graph.input_shape))}, microbatch {largest}",
        ("component", "kind", "parameters", "FLOP/sample", "forward", "backward", "update", "saved", "splits to"),
        left=2,
    )
    update = {u.component: u.step.median for u in profile.updates if u.tensor_degree == 1}
    for c in profile.graph.components:
        t = at.get((c.name, largest, 1))
        result.add_row(
            c.name,
            c.kind,
            size(c.parameter_bytes),
            flops(c.flops_per_sample),
            seconds(t.forward.median if t else None),
            seconds(t.backward.median if t else None),
            seconds(update.get(c.name)),
            size(t.saved_bytes if t else None),
            str(c.split.max_degree) if c.split else "whole",
        )
    return result


def _scan(profile: Profile) -> RenderableType:
    at = _by_key(profile)
    degrees = sorted({t.tensor_degree for t in profile.timings})
    result = table(
        "Forward + backward of all components",
        ("microbatch", *("whole weights" if t == 1 else f"1/{t} of what splits" for t in degrees), "per sample"),
        left=0,
    )
    names = [c.name for c in profile.graph.components]
    for microbatch in sorted({t.microbatch for t in profile.timings}):
        sums: list[float | None] = []
        for degree in degrees:
            # A component that does not split that far runs whole: its time at the largest degree it reaches.
            times = [
                next(
                    (at[n, microbatch, d] for d in reversed(degrees) if d <= degree and (n, microbatch, d) in at), None
                )
                for n in names
            ]
            split = any((n, microbatch, degree) in at for n in names)
            sums.append(sum(t.forward.median + t.backward.median for t in times if t) if split and all(times) else None)
        result.add_row(
            str(microbatch),
            *(seconds(s) for s in sums),
            seconds(sums[0] / microbatch if sums and sums[0] is not None else None),
        )
    return result


def _check(profile: Profile) -> Sequence[RenderableType]:
    as_one = "" if profile.compiled == "none" else ", compiled as one,"
    return [
        line(
            f"check at microbatch {w.microbatch}: components add up to {seconds(w.components_s)}, the whole "
            f"model{as_one} took {seconds(w.whole.median)} "
            f"({percent(w.components_s / w.whole.median - 1, signed=True)})"
        )
        for w in profile.whole
        if w.whole.median
    ]


def _roofline(profile: Profile) -> list[RenderableType]:
    """Lines on the device's peak rates, the fraction that the step reaches, and a lower bound of its time: for each
    component the larger of its arithmetic and its memory traffic at these rates."""
    ceilings = profile.ceilings
    if ceilings is None:
        return []
    batch, floor, work = max(t.microbatch for t in profile.timings if t.tensor_degree == 1), 0.0, 0.0
    for c in profile.graph.components:
        arithmetic = 3 * batch * c.flops_per_sample  # backward: twice forward
        # Weights are read twice and their gradients written; outputs written and read, and their gradients so.
        moved = 3 * c.parameter_bytes + 4 * batch * c.output_bytes_per_sample
        floor += max(arithmetic / ceilings.flops_per_s, moved / ceilings.bytes_per_s)
        work += arithmetic
    mfu = percent(work / profile.step_s / ceilings.flops_per_s if profile.step_s else 0.0)
    return [
        line(
            f"Ceilings {flops(ceilings.flops_per_s)}/s and {size(ceilings.bytes_per_s)}/s; roofline floor "
            f"{seconds(floor)} of {seconds(profile.step_s)};\n         MFU {mfu} of the measured peak"
        ),
        *([line(f"computed {profile.execution}")] if profile.execution else []),
        *([line(f"compiling took {seconds(profile.compile_s)}, once a run")] if profile.compile_s else []),
    ]


def _remarks(profile: Profile) -> list[RenderableType]:
    lines: list[RenderableType] = [line(f"dispatch floor {seconds(profile.dispatch_floor_s)} a component")]
    lines += [line(f"skipped, {why}: {'; '.join(parts)}") for why, parts in _by_reason(profile.skipped).items()]
    lines += _warnings(profile)
    if profile.provenance.note:
        lines.append(line(profile.provenance.note))
    return lines + [line(f"note: {n}") for n in profile.graph.notes]


def _warnings(profile: Profile) -> list[RenderableType]:
    """Warnings about times that are less reliable than measured ones."""
    lines: list[RenderableType] = []
    if profile.drift is not None:
        lines.append(line(folded(drifted(profile.drift))))
    if profile.provenance.origin == "estimated":
        lines.append(line("Estimated from FLOPs and data-sheet peaks, not measured: uncalibrated.", "yellow"))
    if why := profile.provenance.disturbed:
        lines.append(line(f"{why} meanwhile: plans take these times for estimates; profile again", "yellow"))
    return lines


def _by_reason(skipped: Sequence[str]) -> dict[str, list[str]]:
    """Skipped measurements, grouped by the reason after the last colon of each entry.

    >>> _by_reason(["degree 2: no time", "degree 4: no time", "microbatch 1"])
    {'no time': ['degree 2', 'degree 4'], 'unmeasured': ['microbatch 1']}
    """
    groups: dict[str, list[str]] = {}
    for entry in skipped:
        item, colon, why = entry.rpartition(": ")
        groups.setdefault(why if colon else "unmeasured", []).append(item if colon else entry)
    return groups
