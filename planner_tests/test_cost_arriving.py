"""What is there while a batch is made ready is in the price of memory."""

from __future__ import annotations

import nouns
import pytest
import torch
from test_zoo_batches import make

from asa.cost.memory.peak import made_ready
from asa.instruments.allocations import peak, record
from asa.planner import Request, plan
from asa.profiler.measure import profile_model
from asa.strategies import offered
from asa.zoo.data import fetch
from asa.zoo.models import build

CPU = torch.device("cpu")
SHAPE = (3, 160, 160)


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


def test_a_model_of_one_layer_is_promised_what_a_plain_loop_takes() -> None:
    """Its peak is while samples are prepared, when no gradients are held."""
    profile = profile_model(
        "logistic", input_shape=SHAPE, num_classes=10, global_batch=64, device="cpu", precision="fp32",
        time_limit_s=60.0, max_tensor_degree=1,
    )  # fmt: skip
    request = Request(gpus=1, global_batch=64, strategies=("single",), optimizer="sgd")
    promised = plan(profile, nouns.cluster(), offered(), request)[0].prediction.memory_bytes_per_rank[0]

    images, model = make(128, SHAPE), build("logistic", num_classes=10, input_shape=SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(first: int) -> None:
        optimizer.zero_grad()
        x, y = fetch(images, torch.arange(first, first + 64), train=True, seed=0, epoch=0, device="cpu")
        torch.nn.functional.cross_entropy(model(x), y % 10).backward()
        optimizer.step()

    step(0)
    optimizer.zero_grad()
    lasting = 2 * sum(p.numel() * p.element_size() for p in model.parameters())  # weights and momentum
    events, _ = record(lambda: step(64), CPU)
    assert lasting + peak(events) <= promised <= 1.06 * (lasting + peak(events))
