"""Tensors of a batch with as many rows as it has samples, and no row for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from asa.api.job.executor import UserData
from asa.api.steps.batches import GlobalBatches
from asa.executor.model.votes import Votes


def _with_mask(batch: Any) -> Any:
    """The positions of a sample see those before them; there are as many as a microbatch has samples."""
    x, y = batch
    return (x, torch.ones(4, 4).tril()), y


def _user_data(loader: Any) -> UserData:
    batches = GlobalBatches(loader, Votes(), lambda total: list(range(total // 2)))
    return UserData(batches=batches, split=_with_mask, validation=None, loss_fn=F.cross_entropy)


def test_a_mask_of_as_many_positions_as_samples_is_not_cut() -> None:
    x, y = torch.randn(8, 4, 3), torch.zeros(8, dtype=torch.long)
    data = _user_data(DataLoader(TensorDataset(x, y), 8))
    inputs, labels = data.split((x[:4], y[:4]))
    rows, mask = data.rows(0, inputs, range(2), 4)
    assert (rows.shape, mask.shape) == ((2, 4, 3), (4, 4))
    assert data.rows(1, labels, range(2), 4).shape == (2,)


def test_where_batches_do_not_tell_a_mask_is_cut_with_a_warning() -> None:
    x, y = torch.randn(4, 4, 3), torch.zeros(4, dtype=torch.long)
    data = _user_data([(x, y)])
    with pytest.warns(
        UserWarning, match=r"batch\[1\] is of shape \[4, 4\] and is cut into rows, because the batch has 4"
    ):
        _, mask = data.rows(0, data.split((x, y))[0], range(2), 4)
    assert mask.shape == (2, 4)
    masked = _user_data([((x, torch.ones(4, 4)), y)])
    with pytest.warns(UserWarning, match=r"batch\[0\]\[1\] is of shape \[4, 4\]"):
        next(masked.batches.epoch())
