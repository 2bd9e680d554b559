"""Networks of many kinds, each with the loss that is usual for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.program_table import Made, epochs, made, normal, pairs, program


class SegNet(nn.Module):
    """Pooling with indices, undone on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        h, where = self.pool(F.relu(self.down(x)))
        return self.up(self.unpool(h, where))


class UNet(nn.Module):
    """One level of a U-Net, GroupNorm."""

    def __init__(self, channels: int = 3, out: int = 2) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(channels, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.b = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.c = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.d = nn.Conv2d(16, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.n(self.a(x)))
        return self.d(torch.cat([a, self.c(F.silu(self.b(a)))], 1))


class Denoiser(nn.Module):
    """A U-Net told the time, as diffusion models are."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Linear(1, 3), UNet(3, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(x + self.time(t[:, None])[:, :, None, None])


class Recurrent(nn.Module):
    """A classifier of series."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = kind(5, 8, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))


class Recommender(nn.Module):
    """Bags of tokens beside dense features, with a product of the two."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag, self.dense = nn.EmbeddingBag(40, 8, sparse=sparse), nn.Linear(6, 8)
        self.top = nn.Sequential(nn.Linear(17, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        a, b = self.bag(tokens), self.dense(features)
        return self.top(torch.cat([a, b, (a * b).sum(1, keepdim=True)], 1))[:, 0]


class Language(nn.Module):
    """A causal transformer of torch's own attention, tied head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(23, 16), nn.Embedding(12, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 23, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for i in range(2):
            q, k, v = (
                p.unflatten(-1, (2, 8)).transpose(1, 2) for p in self.qkv[i](self.norms[2 * i](x)).chunk(3, dim=-1)
            )
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        return self.head(x)


class NanoGPT(Language):
    """Gives logits and loss, as nanoGPT does."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(tokens)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Routed(nn.Module):
    """Mixture of two of four experts, with a balancing loss over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate, self.out = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.into(x))
        chances = self.gate(h).softmax(-1)
        weight, chosen = chances.topk(2, -1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            row, slot = (chosen == i).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(h[row]) * weight[row, slot, None])
        return self.out(h + out), chances


class Autoencoder(nn.Module):
    """Variational, its noise drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * log.exp()), mean, log


class Detector(nn.Module):
    """Lists of images of any size and dictionaries of targets in, a dictionary of losses out, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.box, self.kind = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        h = torch.stack([F.relu(self.body(i[None])).mean((2, 3))[0] for i in images])
        boxes, kinds = self.box(h), self.kind(h)
        if targets is None:
            return [{"boxes": b, "scores": k} for b, k in zip(boxes, kinds, strict=True)]
        return {
            "box": F.smooth_l1_loss(boxes, torch.stack([t["boxes"] for t in targets])),
            "kind": F.cross_entropy(kinds, torch.stack([t["labels"] for t in targets])),
        }


class Carried(nn.Module):
    """Keeps its state from batch to batch, as for truncated backpropagation through time."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 2)
        self.register_buffer("state", torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        new = self.cell(x, self.state[: len(x)].to(x.dtype))
        self.state = new.detach()
        return self.head(new)


def _conv(dims: int) -> nn.Module:
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    pool = {1: nn.AdaptiveAvgPool1d, 3: nn.AdaptiveAvgPool3d}[dims]
    norm = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims]
    return nn.Sequential(
        conv(2, 8, 3, padding=1), norm(8), nn.ReLU(), conv(8, 8, 3, padding=1), nn.GELU(), pool(1), nn.Flatten(1),
        nn.Linear(8, 3),
    )  # fmt: skip


def _labels(count: int, kinds: int) -> Tensor:
    return torch.randint(kinds, (count,))


def _texts() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(23, (20, 9))
    return tokens[:, :-1], tokens[:, 1:]


def _tokens(out: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), wanted.flatten())


def _vae(net: Any, batch: Any) -> Tensor:
    out, mean, log = net(batch[0])
    return F.mse_loss(out, batch[0]) + 0.1 * (mean.square() + (2 * log).exp() - 2 * log).mean()


def _routed(net: Any, batch: Any) -> Tensor:
    out, chances = net(batch[0])
    return F.cross_entropy(out, batch[1]) + 0.1 * chances.mean(0).square().sum()


def _detector() -> Made:
    images = [normal(3, 4 + i % 3, 5) for i in range(20)]
    targets = [{"boxes": normal(4), "labels": torch.randint(3, ())} for _ in range(20)]
    net, opt, _ = made(Detector(), torch.zeros(1))
    rows = list(zip(images, targets, strict=True))
    return net, opt, torch.utils.data.DataLoader(rows, 6, collate_fn=_lists)  # type: ignore[arg-type]


def _lists(rows: list[Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    return [r[0] for r in rows], [r[1] for r in rows]


def _deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(),
        nn.Linear(24, 3),
    )  # fmt: skip


CE, MSE = F.cross_entropy, F.mse_loss
program("tabular", "tabular mlp", lambda: made(_deep(), normal(20, 12), _labels(20, 3)), epochs(pairs(CE)), CE)
program("vision", "segnet", lambda: made(SegNet(), normal(20, 3, 8, 8), torch.randint(4, (20, 8, 8))),
        epochs(pairs(CE)), CE)  # fmt: skip
program("vision", "unet", lambda: made(UNet(), normal(20, 3, 8, 8), torch.randint(2, (20, 8, 8))),
        epochs(pairs(CE)), CE)  # fmt: skip
program("diffusion", "denoiser (x, t)", lambda: made(Denoiser(), normal(20, 3, 8, 8), torch.rand(20).double(),
        normal(20, 3, 8, 8)), epochs(lambda net, b: MSE(net(b[0], b[1]), b[2])))  # fmt: skip
program("series", "lstm", lambda: made(Recurrent(nn.LSTM), normal(20, 7, 5), _labels(20, 3)), epochs(pairs(CE)), CE)
program("series", "gru", lambda: made(Recurrent(nn.GRU), normal(20, 7, 5), _labels(20, 3)), epochs(pairs(CE)), CE)
for _sparse in (False, True):
    program("recommender", f"recommender{', sparse' * _sparse}",
            lambda s=_sparse: (lambda m: (m[0], torch.optim.SGD(m[0].parameters(), lr=0.05), m[2]))(
                made(Recommender(s), torch.randint(40, (20, 5)), normal(20, 6), torch.rand(20).double())),
            epochs(lambda net, b: F.binary_cross_entropy_with_logits(net(b[0], b[1]), b[2])))  # fmt: skip
program("language", "transformer, tied", lambda: made(Language(), *_texts()), epochs(pairs(_tokens)), _tokens)
program("language", "transformer, not tied", lambda: made(Language(False), *_texts()), epochs(pairs(_tokens)), _tokens)
program("language", "nanoGPT (logits, loss)", lambda: made(NanoGPT(), *_texts()),
        epochs(lambda net, b: net(b[0], b[1])[1]))  # fmt: skip
program("experts", "experts with a balancing loss", lambda: made(Routed(), normal(20, 8), _labels(20, 3)),
        epochs(_routed))  # fmt: skip
program("generative", "variational autoencoder", lambda: made(Autoencoder(), normal(20, 12)), epochs(_vae))
program("detection", "lists of images", _detector, epochs(lambda net, b: sum(net(*b).values())))
program("series", "state carried over", lambda: made(Carried(), normal(24, 4), _labels(24, 2)), epochs(pairs(CE)))
program("audio", "convolutions in 1-D", lambda: made(_conv(1), normal(20, 2, 16), _labels(20, 3)),
        epochs(pairs(CE)), CE, batch_norm="exact")  # fmt: skip
program("vision", "convolutions in 3-D", lambda: made(_conv(3), normal(20, 2, 4, 4, 4), _labels(20, 3)),
        epochs(pairs(CE)), CE, batch_norm="exact")  # fmt: skip
program("vision", "BatchNorm of a rank's own", lambda: made(_conv(1), normal(20, 2, 16), _labels(20, 3)),
        epochs(pairs(CE)), CE)  # fmt: skip
program("vision", "channels last", lambda: made(UNet().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        normal(20, 3, 8, 8), torch.randint(2, (20, 8, 8))), epochs(pairs(CE)), CE)  # fmt: skip
