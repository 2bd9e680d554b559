"""Models of any inputs: several, by name, in lists, with their loss inside. Two ranks give the numbers of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

import asa
from asa.launch import run_ranks

N, WIDTH, CLASSES = 22, 6, 3


class Rows(Dataset[Any]):
    """Samples of a dictionary, a tuple or a series each; the last batch of 4 has 2."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        g = torch.Generator().manual_seed(i)
        x, t, y = torch.randn(WIDTH, generator=g, dtype=torch.float64), torch.tensor(i % 5), torch.tensor(i % CLASSES)
        if self.kind == "names":
            return {"x": x, "mask": torch.arange(WIDTH) <= i % WIDTH, "labels": y}
        if self.kind == "series":
            return torch.randn(2 + i % 4, WIDTH, generator=g, dtype=torch.float64), y
        return x, t, y


class Timed(nn.Module):
    """Two inputs, as in diffusion."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.time, self.a, self.b = nn.Embedding(5, 8), nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)) + self.time(t))


class Named(nn.Module):
    """By name, the loss inside; methods and attributes beside ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.config = {"width": WIDTH}
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = x if mask is None else x * mask
        logits = self.b(F.gelu(self.a(x)))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def predict(self, x: Tensor) -> Tensor:
        return self(x)["logits"].argmax(1)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self(**batch)["loss"]


class Optional(Named):
    """The second input is not needed, as in nanoGPT: a guess takes it for a model of one."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.b(F.gelu(self.a(x)))
        return logits, None if targets is None else F.cross_entropy(logits, targets)


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rnn, self.b = nn.GRU(WIDTH, 8, batch_first=True), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: PackedSequence) -> Tensor:
        return self.b(self.rnn(x)[1][0])


class Listed(nn.Module):
    """A list of samples of different sizes, as in detection; targets in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, series: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        logits = torch.stack([self.b(F.gelu(self.a(s)).mean(0)) for s in series])
        if targets is None:
            return logits
        return {"loss_class": F.cross_entropy(logits, torch.stack([t["y"] for t in targets]))}


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag, self.b = nn.EmbeddingBag(9, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.b(self.bag(indices, offsets))


def packed(rows: list[Any]) -> Any:
    return pack_sequence([r[0] for r in rows], enforce_sorted=False), torch.stack([r[1] for r in rows])


def listed(rows: list[Any]) -> Any:
    return [r[0] for r in rows], [{"y": r[1]} for r in rows]


def bags(rows: list[Any]) -> Any:
    sizes = torch.tensor([0, *(1 + int(r[1]) for r in rows)])
    indices = torch.cat([(torch.arange(1 + int(r[1])) * 3 + int(r[2])) % 9 for r in rows])
    return indices, sizes.cumsum(0)[:-1], torch.stack([r[2] for r in rows])


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[Any, Any], Tensor]]


def loader(kind: str, collate: Any = None) -> Callable[[], Any]:
    return lambda: DataLoader(
        Rows(kind), 4, shuffle=True, generator=torch.Generator().manual_seed(2), collate_fn=collate
    )


CASES: dict[str, Case] = {
    "two inputs": (Timed, loader("pair"), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2])),
    "by name": (Named, loader("names"), lambda m, b: m(**b)["loss"]),
    "optional": (Optional, loader("plain"), lambda m, b: m(b[0], b[2])[1]),
    "a method": (Named, loader("names"), lambda m, b: m.training_step(b)),
    "packed": (Series, loader("series", packed), lambda m, b: F.cross_entropy(m(b[0]), b[1])),
    "lists": (Listed, loader("series", listed), lambda m, b: sum(m(*b).values())),
    "bags": (Bags, loader("plain", bags), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2])),
    "prepared": (Timed, loader("plain"), lambda m, b: F.cross_entropy(m(b[0].flip(1), b[1] * 0 + 2), b[2])),
}


def train(net: Any, opt: Any, batches: Any, loss: Callable[[Any, Any], Tensor]) -> dict[str, Tensor]:
    for _ in range(2):
        for batch in batches:
            opt.zero_grad()
            loss(net, batch).backward()
            opt.step()
    return net.state_dict()


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def plain(name: str) -> dict[str, Tensor]:
    make, batches, loss = CASES[name]
    net = make()
    return train(net, optimizer(net), batches(), loss)


def spread(_rank: int, cases: list[tuple[str, str]]) -> list[tuple[dict[str, Tensor], str]]:
    found = []
    for name, strategy in cases:
        make, batches, loss = CASES[name]
        net = make()
        placed = asa.parallelize(net, optimizer(net), batches(), strategies=(strategy,), cache=None, time_limit_s=0.1,
                                 cluster="profiles/cluster.local-gloo-2.json")  # fmt: skip
        found.append((train(*placed, loss), placed[0].plan.strategy))
        placed[0].close()
    return found


def far(state: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    assert state.keys() == reference.keys()
    return max(float((state[n] - reference[n]).norm() / reference[n].norm()) for n in reference)


def test_two_ranks_give_the_numbers_of_one() -> None:
    # What a sharded module is called with: tensors, names, packed series, lists.
    sharded = ("two inputs", "by name", "packed", "lists")
    cases = [*((name, "ddp") for name in CASES), *((name, "fsdp") for name in sharded)]
    reference = {name: plain(name) for name in CASES}
    for rank in run_ranks(2, spread, cases, threads=1, timeout_s=120):
        for (name, strategy), (state, ran) in zip(cases, rank, strict=True):
            assert far(state, reference[name]) < 1e-11, (name, strategy)
            assert ran == strategy
