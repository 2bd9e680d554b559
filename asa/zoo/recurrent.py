"""Recurrent classifiers that read an image row by row, with a state over all time steps of a sample."""

from __future__ import annotations

from math import prod

from torch import Tensor, nn

_WIDTH = 128


class RowReader(nn.Module):
    """A linear embedding of every row, two recurrent layers over the rows, and a classifier on the last state."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU], features: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(features, _WIDTH)
        self.layers = nn.ModuleList(cell(_WIDTH, _WIDTH, batch_first=True) for _ in range(2))
        self.classifier = nn.Linear(_WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for images [N, C, H, W]: H time steps of C * W features."""
        x = self.embedding(x.movedim(2, 1).flatten(2))
        for layer in self.layers:
            x, _ = layer(x)
        return self.classifier(x[:, -1])  # type: ignore[no-any-return]


def lstm(*, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A model with two LSTM layers of width 128 over the rows of an image."""
    return RowReader(nn.LSTM, prod(input_shape) // input_shape[1], num_classes)


def gru(*, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A model with two GRU layers of width 128 over the rows of an image."""
    return RowReader(nn.GRU, prod(input_shape) // input_shape[1], num_classes)
