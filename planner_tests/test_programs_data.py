"""Loaders of every kind: the batches of one device on two ranks, or a refusal in a line before anything is trained."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import asa
from asa.errors import WorkersFailedError
from asa.launch import run_ranks
from planner_tests.test_programs_inputs import far, optimizer

N, WIDTH, CLASSES = 18, 5, 3


class Mean(nn.Module):
    """The mean over a series' steps, padding included: another number for another padding."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(F.gelu(self.a(x)).mean(1)))


class Series(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        g = torch.Generator().manual_seed(i)
        return torch.randn(2 + i * 7 % 6, WIDTH, generator=g, dtype=torch.float64), i % CLASSES


def padded(rows: list[Any]) -> Any:
    return pad_sequence([r[0] for r in rows], batch_first=True), torch.tensor([r[1] for r in rows])


def named(rows: list[Any]) -> Any:
    """Padded, with names, a pair of numbers, and a table of as many rows as a batch has samples."""
    x, y = padded(rows)
    return {"x": x, "y": y, "names": [f"{len(r[0])}.png" for r in rows], "size": (6, 4), "table": torch.eye(6)}


def mixed(rows: list[Any]) -> Any:
    x, y = padded([(r[0][:2], r[1]) for r in rows])
    return 0.7 * x + 0.3 * x.roll(1, 0), y


def mixed_in_pairs(rows: list[Any]) -> Any:
    """Takes an even number of samples only, as libraries that mix images do, with a share that is drawn."""
    assert len(rows) % 2 == 0
    x, y = padded([(r[0][:2], r[1]) for r in rows])
    return torch.lerp(x, x.flip(0), random.Random(len(rows)).random()), y


def even(samples: int = N) -> TensorDataset:
    x = torch.stack([Series()[i][0][:2] for i in range(samples)])
    return TensorDataset(x, torch.arange(samples) % CLASSES)


class Shuffled(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(even())


class Shared(IterableDataset[Any]):
    """Shares by rank itself, as streaming data sets do."""

    def __iter__(self) -> Iterator[Any]:
        import torch.distributed as dist

        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return (even()[i] for i in range(rank, N, ranks))


class Whole(Dataset[Any]):
    """Yields batches: for ``batch_size=None``."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> Any:
        x, y = even().tensors
        return x[i * 3 : i * 3 + 3], y[i * 3 : i * 3 + 3]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Any] = {
    "padded to the longest": lambda: DataLoader(Series(), 6, collate_fn=padded),
    "padded, names and a table beside": lambda: DataLoader(Series(), 6, collate_fn=named),
    "mixed in collate": lambda: DataLoader(Series(), 6, shuffle=True, generator=seeded(), collate_fn=mixed),
    "mixed in pairs": lambda: DataLoader(Series(), 6, collate_fn=mixed_in_pairs),
    "workers that stay": lambda: DataLoader(
        even(), 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "workers": lambda: DataLoader(even(), 4, shuffle=True, generator=seeded(), num_workers=1),
    "batches from the data set": lambda: DataLoader(Whole(), batch_size=None, shuffle=True, generator=seeded()),
    "a stream": lambda: DataLoader(Shuffled(), 4),
    "a list": lambda: list(DataLoader(even(), 4)),
}


def train(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    for _ in range(2):
        for batch in batches:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            assert not isinstance(batch, dict) or named_alike(batch)
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
    return net.state_dict()


def named_alike(batch: dict[str, Any]) -> bool:
    """Whether names are those of the samples that are there, and the others as they were made."""
    lengths = [int(n.removesuffix(".png")) for n in batch["names"]]
    right = [bool(x[:n].ne(0).all() and not x[n:].any()) for x, n in zip(batch["x"], lengths, strict=True)]
    return all(right) and batch["size"] == (6, 4) and torch.equal(batch["table"], torch.eye(6))


def placed(name: str, strategy: str, net: nn.Module, cache: Path | None) -> Any:
    return asa.parallelize(
        net, optimizer(net), (LOADERS | ODD)[name](), strategies=(strategy,), cache=cache, time_limit_s=0.1,
        cluster="profiles/cluster.local-gloo-2.json", example_input=torch.zeros(2, 2, WIDTH, dtype=torch.float64),
    )  # fmt: skip


def spread(rank: int, cases: list[tuple[str, str]], norm: bool = False, cache: Path | None = None) -> Any:
    found = []
    for name, strategy in cases:
        random.seed(rank)
        net = Mean(norm)
        made = placed(name, strategy, net, cache)
        found.append(train(*made))
        made[0].close()
    return found


class Half(Dataset[Any]):
    """This rank's share of the samples, as libraries cut tables by rank."""

    def __len__(self) -> int:
        return N // 2

    def __getitem__(self, i: int) -> Any:
        import torch.distributed as dist

        return even()[2 * i + (dist.get_rank() if dist.is_initialized() else 0)]


ODD: dict[str, Any] = {
    "a table's half": lambda: DataLoader(Half(), 6),
    "shared by rank": lambda: DataLoader(Shared(), 3),
    "a last batch of three": lambda: DataLoader(even(11), 8),
}


def test_the_batches_of_one_device(tmp_path: Path) -> None:
    cases = [(name, "ddp") for name in LOADERS] + [("padded to the longest", "tensor"), ("mixed in collate", "tensor")]
    for rank in run_ranks(2, spread, cases, False, tmp_path, threads=1, timeout_s=120):
        for (name, strategy), state in zip(cases, rank, strict=True):
            net = Mean()
            reference = train(net, optimizer(net), LOADERS[name]())
            assert far(state, reference) < 1e-11, (name, strategy)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shared by rank", "shares or shuffles them by rank itself"),
        ("a table's half", "own share would be shared once"),
    ],
)
def test_data_that_is_shared_by_rank_is_refused(name: str, words: str) -> None:
    with pytest.raises((asa.AsaError, WorkersFailedError), match=words):
        run_ranks(2, spread, [(name, "ddp")], threads=1, timeout_s=120)


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_batch_norm_on_a_batch_that_leaves_a_rank_one_sample() -> None:
    """Every rank computes such a batch: no rank stops while the other waits, and ranks stay alike."""
    first, second = run_ranks(2, spread, [("a last batch of three", "ddp")], True, threads=1, timeout_s=120)
    assert all(torch.allclose(t, second[0][n], rtol=1e-12, atol=0) for n, t in first[0].items())
