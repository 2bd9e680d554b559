"""What is there while a batch is made ready is in the price of memory."""

from __future__ import annotations

import pytest
import torch
from test_zoo_batches import make

from asa.cost.memory.peak import made_ready
from asa.instruments.allocations import peak, record
from asa.zoo.data import fetch

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(1, 96, 96), (3, 96, 96)])
@pytest.mark.parametrize("train", [True, False])
def test_no_more_is_there_than_is_priced_and_not_much_less(shape: tuple[int, int, int], train: bool) -> None:
    images, count = make(64, shape), 64
    options = {"train": train, "seed": 1, "epoch": 2, "device": "cpu"}
    fetch(images, torch.arange(2), **options)  # type: ignore[arg-type]
    events, _ = record(lambda: fetch(images, torch.arange(count), **options), CPU)  # type: ignore[arg-type]
    ready = 4 * count * shape[0] * shape[1] * shape[2]
    priced = ready * (1 + made_ready(shape))
    assert peak(events) <= 1.02 * priced  # indices and random words beside it
    if train:
        assert peak(events) >= 0.9 * priced


def test_the_same_numbers_come_of_it_as_by_the_formula() -> None:
    images = make(40)
    x, _ = fetch(images, torch.arange(40), train=False, seed=0, epoch=0, device="cpu")
    mean, std = (torch.tensor(v)[:, None, None] for v in (images.mean, images.std))
    assert torch.equal(x, (images.images.float().div(255) - mean) / std)
