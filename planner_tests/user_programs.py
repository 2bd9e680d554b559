"""A program of a user's own, in small: a model without randomness, a data set, and its loop on one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SHAPE, CLASSES, SAMPLES, BATCH = (3, 8, 8), 7, 27, 8


def model() -> nn.Module:
    """Convolutions and linear layers of odd widths, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3, padding=1), nn.MaxPool2d(2)),
            nn.Flatten(1), nn.Sequential(nn.Linear(80, 22), nn.GELU(), nn.Linear(22, 9)), nn.LayerNorm(9),
            nn.Linear(9, CLASSES),
        ).double()  # fmt: skip


def loader(*, shuffle: bool = True, samples: int = SAMPLES, batch: int = BATCH) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of 8 out of 27 samples: the last has 3."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(samples, *SHAPE, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(CLASSES, (samples,), generator=generator), torch.arange(samples))
    return DataLoader(data, batch, shuffle=shuffle, generator=torch.Generator().manual_seed(3))


def optimizer(net: nn.Module, name: str = "sgd") -> torch.optim.Optimizer:
    """Two groups: biases without weight decay."""
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.01)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def loop(net: nn.Module, opt: torch.optim.Optimizer, batches: object, epochs: int = 2) -> list[Tensor]:
    """What a user's own program does; the numbers of the samples it saw, batch by batch."""
    seen = []
    for _ in range(epochs):
        for x, y, number in batches:  # type: ignore[attr-defined]
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            seen.append(number)
    return seen


def distance(state: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Largest relative distance of two states."""
    assert state.keys() == reference.keys()
    return max(float((state[n].double() - reference[n]).norm() / reference[n].norm()) for n in reference)
