"""Data: loaders, samplers and collate functions of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

from benchmarks.program_table import Made, epochs, made, normal, pairs, program

CE = F.cross_entropy


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))


def _rows(count: int = 20) -> TensorDataset:
    return TensorDataset(normal(count, 8), torch.randint(3, (count,)))


def _over(batches: Any, net: nn.Module | None = None) -> Made:
    return (*made(net or _net(), torch.zeros(1))[:2], batches)


class _Noisy(Dataset[Any]):
    """Adds noise to every sample it gives."""

    def __init__(self) -> None:
        self.rows = _rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.rows[i]
        return x + 0.3 * torch.randn_like(x), y


class _Keyed(_Noisy):
    """Noise by sample, whoever loads it."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.rows[i]
        return x + torch.randn(8, generator=torch.Generator().manual_seed(i), dtype=x.dtype), y


class _Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = _rows()

    def __iter__(self) -> Iterator[Any]:
        return iter([self.rows[i] for i in range(len(self.rows))])


class _Lengths(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = [(normal(3 + i * 7 % 5, 8), torch.randint(3, ())) for i in range(20)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


def _padded(rows: list[Any]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True), torch.stack([r[1] for r in rows])


def _packed(rows: list[Any]) -> tuple[Any, Tensor]:
    return nn.utils.rnn.pack_sequence([r[0] for r in rows], enforce_sorted=False), torch.stack([r[1] for r in rows])


def _mixing(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Mixup in collate."""
    x, y = (torch.stack(part) for part in zip(*rows, strict=True))
    share, order = torch.rand((), dtype=x.dtype), torch.randperm(len(x))
    labels = F.one_hot(y, 3).to(x.dtype)
    return share * x + (1 - share) * x[order], share * labels + (1 - share) * labels[order]


def _jittered(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Noise drawn by numpy in collate."""
    import numpy

    x, y = (torch.stack(part) for part in zip(*rows, strict=True))
    return x + torch.from_numpy(numpy.random.randn(*x.shape)), y


class _Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)).amax(1))


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Tensor:
        return self.head(self.rnn(x)[1][0])


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.net(x)
        return {"logits": out} if labels is None else {"loss": CE(out, labels), "logits": out}


def _dictionary(rows: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.stack([r[0] for r in rows]), "labels": torch.stack([r[1] for r in rows])}


def _pick(sampler: Any, **options: Any) -> Any:
    rows = _rows()
    return DataLoader(rows, 6, sampler=sampler(rows), **options)


def _every(count: int) -> list[list[int]]:
    return [[0, 3, 5], [1, 2, 4, 6, 7], [8, 9], list(range(10, count))]


usual = epochs(pairs(CE))
program("data", "shuffled", lambda: _over(DataLoader(_rows(), 6, shuffle=True)), usual)
program("data", "shuffled, a generator", lambda: _over(DataLoader(_rows(), 6, shuffle=True,
        generator=torch.Generator().manual_seed(7))), usual, CE)  # fmt: skip
program("data", "last batch of one", lambda: _over(DataLoader(_rows(19), 6)), usual, CE)
program("data", "weighted sampler", lambda: _over(_pick(lambda _: WeightedRandomSampler(
        torch.linspace(0.1, 1, 20).tolist(), 20))), usual)  # fmt: skip
program("data", "sampler with replacement", lambda: _over(_pick(lambda r: RandomSampler(r, True, 17))), usual)
program("data", "batch sampler of odd sizes", lambda: _over(DataLoader(_rows(), batch_sampler=_every(20))), usual)
program("data", "persistent workers", lambda: _over(DataLoader(_rows(), 6, shuffle=True, num_workers=1,
        persistent_workers=True)), usual)  # fmt: skip
program("data", "batches made by the data set", lambda: _over(DataLoader([(normal(4, 8), torch.randint(3, (4,)))
        for _ in range(4)], batch_size=None)), usual)  # type: ignore[arg-type]  # fmt: skip
program("data", "stream", lambda: _over(DataLoader(_Stream(), 6)), usual)
program("data", "a list of batches", lambda: _over([(normal(5, 8), torch.randint(3, (5,))) for _ in range(4)]), usual)
program("data", "noise in the data set", lambda: _over(DataLoader(_Noisy(), 6)), usual)
program("data", "noise in the data set, a worker", lambda: _over(DataLoader(_Noisy(), 6, num_workers=1)), usual)
program("data", "noise by sample", lambda: _over(DataLoader(_Keyed(), 6)), usual)
program("data", "padded to the longest", lambda: _over(DataLoader(_Lengths(), 6, collate_fn=_padded), _Pooled()), usual)
program("data", "packed sequences", lambda: _over(DataLoader(_Lengths(), 6, collate_fn=_packed), _Packed()), usual)
program("data", "mixup in collate", lambda: _over(DataLoader(_rows(), 6, collate_fn=_mixing)), usual)
program("data", "mixup in collate, a worker", lambda: _over(DataLoader(_rows(), 6, shuffle=True, num_workers=1,
        collate_fn=_mixing)), usual)  # fmt: skip
program("data", "numpy's noise in collate", lambda: _over(DataLoader(_rows(), 6, collate_fn=_jittered)), usual)
program("data", "dictionaries", lambda: _over(DataLoader(_rows(), 6, collate_fn=_dictionary), _Named()),
        epochs(lambda net, b: net(**b)["loss"]))  # fmt: skip
program("data", "dictionaries, loss outside", lambda: _over(DataLoader(_rows(), 6, collate_fn=_dictionary), _Named()),
        epochs(lambda net, b: CE(net(b["x"])["logits"], b["labels"])))  # fmt: skip
program("data", "batch of one", lambda: _over(DataLoader(_rows(5), 1)), usual)
