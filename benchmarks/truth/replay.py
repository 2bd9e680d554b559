"""The law of iteration times on iterations it was not fitted to: more GPUs, another hidden size, unseen groups."""

from __future__ import annotations

import numpy as np

from asa.ir.cluster import Cluster
from benchmarks.truth.law import Law
from benchmarks.truth.vtrain import Iterations, Mask, Score, score

FOLDS = 5


def more_gpus(table: Iterations, cluster: Cluster, *, cells: bool = True) -> Score:
    """Fitted on at most half of the largest number of GPUs, predicted at the largest (here: up to 4, and 8)."""
    most = table.gpus.max()
    return _held_out(table, cluster, [(table.gpus <= most / 2, table.gpus == most)], cells)


def other_sizes(table: Iterations, cluster: Cluster, *, cells: bool = True) -> Score:
    """Each hidden size predicted by a fit on the others, all predictions scored together."""
    sizes = np.unique(table.hidden_size)
    return _held_out(table, cluster, [(table.hidden_size != h, table.hidden_size == h) for h in sizes], cells)


def unseen_groups(table: Iterations, cluster: Cluster, *, cells: bool = True) -> Score:
    """Each fifth of the groups predicted by a fit on the rest."""
    shuffled = np.random.default_rng(0).permutation(int(table.group.max()) + 1)
    held = [np.isin(table.group, shuffled[fold::FOLDS]) for fold in range(FOLDS)]
    return _held_out(table, cluster, [(~rows, rows) for rows in held], cells)


def _held_out(table: Iterations, cluster: Cluster, splits: list[tuple[Mask, Mask]], cells: bool) -> Score:
    predicted, among = np.full(len(table), np.nan), np.zeros(len(table), dtype=np.bool_)
    law = Law(table, cluster, cells=cells)
    for fitted, tested in splits:
        if not fitted.any() or not tested.any():
            continue
        predicted[tested] = law.seconds(law.fit(fitted))[tested]
        among |= tested
    return score(table, predicted, among)


def each_size(table: Iterations, cluster: Cluster) -> dict[int, Score]:
    """The parts of :func:`other_sizes` apart, by the hidden size predicted."""
    parts = {int(h): table.hidden_size == h for h in np.unique(table.hidden_size)}
    return {h: _held_out(table, cluster, [(~rows, rows)], cells=True) for h, rows in parts.items()}


def surprises(table: Iterations, cluster: Cluster, most: int = 2) -> list[str]:
    """The layers that :func:`other_sizes` misses by most, in words."""
    law = Law(table, cluster)
    error = np.zeros(len(table))
    for h in np.unique(table.hidden_size):
        tested = table.hidden_size == h
        error[tested] = (law.seconds(law.fit(~tested)) / table.seconds - 1)[tested]
    shapes, of = np.unique(np.stack((table.hidden_size, table.micro_batch, table.tensor)), axis=1, return_inverse=True)
    means = [float(error[of.ravel() == i].mean()) for i in range(shapes.shape[1])]
    worst = sorted(range(len(means)), key=lambda i: -abs(means[i]))[:most]
    return [
        f"hidden {shapes[0, i]:g}, microbatch {shapes[1, i]:g}, tensor {shapes[2, i]:g}: predicted {means[i]:+.0%}"
        for i in worst
    ]
