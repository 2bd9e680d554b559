"""What several files of programs share: a small model, samples with classes, and one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.program_table import Made, epochs, made, normal, pairs, program

CE, MSE, BCE = F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits
KIND = "repository"


def small_net(out: int = 3) -> nn.Module:
    """Three linear layers, from 8 features to ``out``."""
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out))


class Named(nn.Module):
    """Layers with names."""

    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))))  # type: ignore[no-any-return]


def classified(net: Any = small_net, count: int = 21, batch: int = 6, **options: Any) -> Made:
    """A model, its optimizer and a loader over ``count`` samples of three classes."""
    return made(net(), normal(count, 8), torch.randint(3, (count,)), batch=batch, **options)


def add_program(name: str, loop: Any, make: Any = classified, job_loss: Any = None, **options: Any) -> None:
    """Add a program of a public repository to the table."""
    program(KIND, name, make, loop, job_loss, **options)


def by_loss(name: str, loss: Any, make: Any = classified, **options: Any) -> None:
    """A program of the usual loop, with ``loss(net, batch)``."""
    add_program(name, epochs(loss), make, **options)


def by_outputs(name: str, loss: Any, make: Any = classified, **options: Any) -> None:
    """A program of the usual loop whose loss is one of outputs and labels; it can be a Job."""
    add_program(name, epochs(pairs(loss)), make, loss, **options)


def one_step(net: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    """Train on one batch; returns its loss."""
    opt.zero_grad()
    loss = CE(net(x), y)
    loss.backward()
    opt.step()
    return loss
