"""Measured iterations of GPT training on up to eight A100: the table, and how well times predicted for it do.

Columns: number of GPUs, global batch and microbatch, hidden size, attention heads, layers, sequence length, tensor,
data and pipeline degree, milliseconds of one iteration (VIA-Research/vTrain, ``data/ground_truth_single.csv``, MIT). A
*group* is what a planner chooses among: equal model, GPUs and global batch.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asa.errors import InvalidInputError
from asa.reading import read_text
from benchmarks.truth.downsets import Floats, Indices

Mask = NDArray[np.bool_]

COUNTS = (
    "gpus", "global_batch", "micro_batch", "hidden_size", "attention_heads", "layers", "sequence_length", "tensor",
    "data", "pipeline",
)  # fmt: skip
_COLUMNS = (*COUNTS, "iteration_ms")
_GROUP = ("gpus", "global_batch", "hidden_size", "attention_heads", "layers", "sequence_length")

LEAST_IN_A_GROUP = 3
"""A rank correlation of two says nothing."""


@dataclass(frozen=True)
class Iterations:
    """The table by columns; ``seconds`` of one iteration; ``group`` numbers the groups in sorted order."""

    gpus: Floats
    global_batch: Floats
    micro_batch: Floats
    hidden_size: Floats
    attention_heads: Floats
    layers: Floats
    sequence_length: Floats
    tensor: Floats
    data: Floats
    pipeline: Floats
    seconds: Floats
    group: Indices

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def microbatches(self) -> Floats:
        """Per replica and iteration."""
        return self.global_batch / (self.micro_batch * self.data)


@dataclass(frozen=True)
class Score:
    """How well predictions choose: over ``groups`` the mean rank correlation (Spearman), mean and worst regret of the
    plan predicted fastest; over ``rows`` the mean absolute relative error. Fractions of one."""

    rank: float
    regret: float
    worst_regret: float
    error: float
    groups: int
    rows: int


def load(path: Path) -> Iterations:
    """The table in the file at ``path``.

    Raises:
        InvalidInputError: it cannot be read or is no such table; names the line.
    """
    return parse(read_text(path), source=str(path))


def parse(text: str, *, source: str) -> Iterations:
    """The table in ``text``; ``source`` names it in messages.

    Raises:
        InvalidInputError: as :func:`load`.
    """
    lines = list(csv.reader(text.splitlines()))
    if not lines or tuple(lines[0]) != _COLUMNS:
        raise InvalidInputError(f"{source}: the columns are not {', '.join(_COLUMNS)}", where="line 1")
    rows = [_row(cells, source, number) for number, cells in enumerate(lines[1:], 2) if cells]
    if not rows:
        raise InvalidInputError(f"{source} has no rows", where="line 2")
    table = np.asarray(rows, dtype=np.float64)
    keys = table[:, [_COLUMNS.index(name) for name in _GROUP]]
    group = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
    columns = {name: table[:, i] for i, name in enumerate(COUNTS)}
    return Iterations(**columns, seconds=table[:, -1] / 1e3, group=group.astype(np.int64))


def _row(cells: list[str], source: str, number: int) -> list[float]:
    where = f"line {number}"
    if len(cells) != len(_COLUMNS):
        raise InvalidInputError(
            f"{source}: {len(cells)} cells for {len(_COLUMNS)} columns; the file may be cut short", where=where
        )
    values = []
    for name, cell in zip(_COLUMNS, cells, strict=True):
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value <= 0 or (name in COUNTS and value != int(value)):
            kind = "a whole number from 1" if name in COUNTS else "a time above 0"
            raise InvalidInputError(f"{source}: {name} is {cell!r}, not {kind}", where=where)
        values.append(value)
    row = dict(zip(_COLUMNS, values, strict=True))
    if row["gpus"] != row["tensor"] * row["data"] * row["pipeline"]:
        raise InvalidInputError(f"{source}: tensor x data x pipeline is not {row['gpus']:g} GPUs", where=where)
    if row["global_batch"] % (row["micro_batch"] * row["data"]) or row["layers"] % row["pipeline"]:
        raise InvalidInputError(f"{source}: batch or layers do not divide", where=where)
    return values


def score(table: Iterations, predicted: Floats, among: Mask) -> Score:
    """Predicted against measured seconds in the rows ``among``."""
    ranks, regrets = [], []
    for group in np.unique(table.group[among]):
        rows = np.flatnonzero(among & (table.group == group))
        if len(rows) < LEAST_IN_A_GROUP:
            continue
        measured = table.seconds[rows]
        ranks.append(spearman(predicted[rows], measured))
        regrets.append(float(measured[predicted[rows].argmin()] / measured.min() - 1))
    if not ranks:
        raise InvalidInputError(f"no group has {LEAST_IN_A_GROUP} rows to compare")
    error = np.abs(predicted[among] / table.seconds[among] - 1).mean()
    return Score(
        float(np.mean(ranks)), float(np.mean(regrets)), max(regrets), float(error), len(ranks), int(among.sum())
    )


def spearman(a: Floats, b: Floats) -> float:
    """Rank correlation, equal values sharing their mean rank; 0 where either is constant.

    >>> round(spearman(np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 4.0])), 3)
    0.5
    """
    ranks = [_ranks(values) for values in (a, b)]
    x, y = (r - r.mean() for r in ranks)
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 0 else 0.0


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: Floats = (last - (counts - 1) / 2)[inverse.ravel()]
    return means
