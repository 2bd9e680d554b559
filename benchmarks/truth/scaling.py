"""Published throughput at 1 to n GPUs, and data parallelism as the project itself predicts it from a model's structure.

Nothing is calibrated to the published rows: times come from :mod:`asa.cost.machine.estimate`, links from the presets.
An estimate states no spread, and a synchronous step waits for its slowest rank; so a step is given the spread that
those in the project's own profiles have.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.errors import InvalidInputError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.graph import LayerGraph
from asa.ir.profile import Precision, Profile, Stat, WholeStep
from asa.reading import read_text

Arithmetic = Literal["fp32", "tf32", "fp16"]

TF32 = 0.5
"""TF32 runs at this part of the half-precision peak (NVIDIA A100 data sheet: 156 and 312 TFLOP/s)."""


SPREAD = 0.01
"""Relative standard deviation of a whole step on one rank: 0.7 to 2.2 % in the profiles shipped with asa."""


@dataclass(frozen=True)
class Published:
    """Samples/s by number of GPUs, as published for one model on one machine."""

    source: str
    gpu: str
    model: str
    precision: str
    batch: int | None
    rates: Mapping[int, float]

    def efficiency(self, gpus: int) -> float:
        """Of ``gpus`` over as many times one."""
        return self.rates[gpus] / (gpus * self.rates[1])


def read_nvlink(path: Path) -> list[Published]:
    """``scaling.csv``: a row a number of GPUs; rows of one run are joined, others than image models are left out.

    Raises:
        InvalidInputError: it cannot be read or a row is broken; names the line.
    """
    found: dict[tuple[str, ...], Published] = {}
    for where, row in _rows(path, ("source", "gpu", "model", "precision", "bs_per_gpu", "n", "throughput")):
        if not row["n"].isdecimal():
            continue  # other ways of training than data parallelism
        rate = _number(path, row["throughput"], where)
        batch = None if not row["bs_per_gpu"] else int(_number(path, row["bs_per_gpu"], where))
        key = (row["source"], row["gpu"], row["model"], row["precision"], row["bs_per_gpu"])
        before = found[key].rates if key in found else {}
        found[key] = Published(*key[:4], batch, {**before, int(row["n"]): rate})
    return list(found.values())


def read_pcie(path: Path) -> list[Published]:
    """``scaling_pcie.csv``: a row a model and batch, columns n1 to n8, empty where nothing was published.

    Raises:
        InvalidInputError: as :func:`read_nvlink`.
    """
    found = []
    for where, row in _rows(path, ("gpu", "model", "bs", "n1", "n2", "n4", "n8")):
        rates = {int(k[1:]): _number(path, row[k], where) for k in ("n1", "n2", "n4", "n8") if row[k]}
        batch = int(_number(path, row["bs"], where))
        found.append(Published(path.name, row["gpu"], row["model"], "fp16", batch, rates))
    return found


def _rows(path: Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    kept = [(n, line) for n, line in enumerate(read_text(path).splitlines(), 1) if line and not line.startswith("#")]
    header = next(csv.reader([kept[0][1]])) if kept else []
    if not set(columns) <= set(header):
        where = f"line {kept[0][0]}" if kept else "line 1"
        raise InvalidInputError(f"{path}: needs the columns {', '.join(columns)}", where=where)
    found = []
    for number, line in kept[1:]:
        cells = next(csv.reader([line]))
        if len(cells) != len(header):
            raise InvalidInputError(f"{path}: {len(cells)} cells for {len(header)} columns", where=f"line {number}")
        found.append((f"line {number}", dict(zip(header, cells, strict=True))))
    return found


def _number(path: Path, text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise InvalidInputError(f"{path}: {text!r} is not a number above 0", where=where)
    return value


@dataclass(frozen=True)
class Predictor:
    """Data parallelism of a model's structure on a preset, ``strategies`` being those the project offers."""

    strategies: Strategies
    spread: float = SPREAD

    def rate(self, graph: LayerGraph, preset: str, arithmetic: Arithmetic, batch: int, gpus: int) -> float:
        """Predicted samples/s of plain data parallelism at ``batch`` samples per GPU."""
        from asa.planner import Request, plan

        cluster = _at(presets.load(preset), arithmetic)
        precision: Precision = "fp16" if arithmetic == "fp16" else "fp32"
        profile = estimate(
            graph,
            cluster.device,
            model_spec=graph.model,
            model_fingerprint="0" * 16,
            precision=precision,
            global_batch=batch,
            max_degree=1,
            activation_scale=0.5 if arithmetic == "fp16" else 1.0,
        )
        profile = replace(profile, whole=(_whole(profile, self.spread),))
        request = Request(
            gpus=gpus, global_batch=batch * gpus, strategies=("ddp" if gpus > 1 else "single",), prefer_simple=False,
            memory_bytes=_PLENTY,
        )  # fmt: skip
        return plan(profile, cluster, self.strategies, request)[0].prediction.samples_per_s


def _whole(profile: Profile, spread: float) -> WholeStep:
    """A step of the largest microbatch, as long as its components, with that relative standard deviation."""
    samples = max(t.microbatch for t in profile.timings)
    parts = [t for t in profile.timings if (t.microbatch, t.tensor_degree) == (samples, 1)]
    total = sum(t.forward.median + t.backward.median for t in parts)
    off = _P90 * spread * total
    return WholeStep(
        microbatch=samples,
        whole=Stat(median=total, p10=total - off, p90=total + off, n=_OBSERVATIONS),
        components_s=total,
    )


_OBSERVATIONS = 20
"""Enough for the spread to be taken at its word."""

_P90 = 1.2816
"""Standard deviations from the median of a normal distribution to its 90th percentile."""

_PLENTY = 2**42
"""Throughput is asked for, not whether it fits: the published runs did."""


def _at(cluster: Cluster, arithmetic: Arithmetic) -> Cluster:
    device = cluster.device
    if arithmetic == "tf32":
        device = replace(device, peak_fp32_flops=TF32 * device.peak_bf16_flops)
    return replace(cluster, device=device)
