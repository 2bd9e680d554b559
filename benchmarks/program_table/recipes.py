"""Training recipes as whole scripts write them: references of vision, language, detection and tabular models."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import lr_scheduler as rates
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    TensorDataset,
)

import asa
from benchmarks.program_table import Made, epochs, loader, made, normal, program, sgd
from benchmarks.program_table.common import BCE, CE, Named, classified, one_step, small_net

KIND = "recipe"


def add(name: str, loop: Any, make: Any = classified, **options: Any) -> None:
    """Add a program to the table."""
    program(KIND, f"recipe: {name}", make, loop, **options)


def usual(name: str, loss: Any, make: Any = classified, **options: Any) -> None:
    """A program of the usual loop, with ``loss(net, batch)``."""
    add(name, epochs(loss), make, **options)


class Block(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv, self.bn, self.act = (
            nn.Conv2d(c, c, 3, padding=1, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        out += x
        return self.act(out)


class Res(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Block(8), Block(8))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, classes)
        for m in self.modules():
            if isinstance(m, Block):
                nn.init.zeros_(m.bn.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.layers(self.stem(x))), 1))


def images(net: Any = Res, count: int = 20, batch: int = 8, **options: Any) -> Made:
    return made(net(), normal(count, 3, 8, 8), torch.randint(3, (count,)), batch=batch, **options)


class Ema(AveragedModel):
    """torchvision's."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, "cpu", lambda avg, p, _n: decay * avg + (1 - decay) * p, use_buffers=True)


def _accuracy(out: Tensor, y: Tensor, topk: tuple[int, ...] = (1,)) -> list[Tensor]:
    with torch.inference_mode():
        _, pred = out.topk(max(topk), 1, True, True)
        correct = pred.t().eq(y[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / y.size(0)) for k in topk]


def _torchvision(net: Any, _opt: Any, batches: Any) -> Any:
    norms = [p for m in net.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters(recurse=False)]
    known = {id(p) for p in norms}
    others = [p for p in net.parameters() if id(p) not in known]
    opt = torch.optim.SGD([{"params": others, "weight_decay": 1e-2}, {"params": norms, "weight_decay": 0.0}],
                          lr=0.1, momentum=0.9, nesterov=True)  # fmt: skip
    main = rates.CosineAnnealingLR(opt, T_max=2, eta_min=1e-3)
    warm = rates.LinearLR(opt, start_factor=0.01, total_iters=1)
    schedule = rates.SequentialLR(opt, [warm, main], [1])
    ema = Ema(net, 0.8)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    window: deque[float] = deque(maxlen=20)
    for epoch in range(3):
        net.train()
        for i, (image, target) in enumerate(batches):
            output = net(image)
            loss = criterion(output, target)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            if i % 2 == 0:
                ema.update_parameters(net)
                if epoch < 1:
                    ema.n_averaged.fill_(0)
            acc1, _acc3 = _accuracy(output, target, (1, 3))
            window.append(loss.item())
            window.append(acc1.item())
        schedule.step()
        net.eval()
        with torch.inference_mode():
            for image, target in batches:
                _accuracy(net(image), target)
    return {f"ema.{k}": v for k, v in ema.state_dict().items()}


add("torchvision's reference, norms exact", _torchvision, images, batch_norm="exact")


def _unitwise(x: Tensor) -> Tensor:
    return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)


def _agc(parameters: Any, clip: float = 0.01, eps: float = 1e-3) -> None:
    for p in parameters:
        if p.grad is None:
            continue
        most = _unitwise(p.detach()).clamp_(min=eps).mul_(clip)
        norm = _unitwise(p.grad.detach())
        p.grad.detach().copy_(torch.where(norm < most, p.grad, p.grad.detach() * (most / norm.clamp(min=1e-6))))


class EmaV3(nn.Module):
    """timm's."""

    def __init__(self, model: nn.Module, decay: float = 0.9, warm: bool = True) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay, self.warm = decay, warm

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, 1 - (step + 1) ** -0.7) if self.warm else self.decay
        mine, theirs = [], []
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values(), strict=False):
            if e.is_floating_point():
                mine.append(e)
                theirs.append(m)
            else:
                e.copy_(m)
        torch._foreach_lerp_(mine, theirs, weight=1.0 - decay)


def _timm(net: Any, opt: Any, batches: Any) -> Any:
    ema = EmaV3(net)
    accum, updates, total = 2, 0, len(batches)
    last = total % accum
    per_epoch = (total + accum - 1) // accum
    for epoch in range(3):
        num_updates = epoch * per_epoch
        opt.zero_grad()
        losses = n = 0.0
        for i, (x, y) in enumerate(batches):
            here = last if last and i >= total - last else accum
            need = i == total - 1 or (i + 1) % accum == 0
            with contextlib.nullcontext() if need or not hasattr(net, "no_sync") else net.no_sync():
                loss = CE(net(x), y, label_smoothing=0.1)
                if accum > 1:
                    loss = loss / here
                loss.backward(create_graph=False)
            if need:
                _agc(list(net.parameters())[:-2])
                opt.step()
                opt.zero_grad()
            losses, n = losses + loss.item() * accum * x.size(0), n + x.size(0)
            if not need:
                continue
            num_updates += 1
            updates += 1
            ema.update(net, step=updates)
            for g in opt.param_groups:
                g["lr"] = 0.05 * (1 + math.cos(math.pi * num_updates / (3 * per_epoch))) / 2
    return {f"ema.{k}": v for k, v in ema.module.state_dict().items()}


add("timm's reference: accumulation, adaptive clipping, EMA", _timm, lambda: classified(count=33))
add("timm's reference, images, norms exact", _timm, lambda: images(count=36), batch_norm="exact")


class Attention(nn.Module):
    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(c, 3 * c, bias=False), nn.Linear(c, c, bias=False), heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Gpt(nn.Module):
    def __init__(self, vocab: int = 17, c: int = 16, block: int = 8) -> None:
        super().__init__()
        self.config = SimpleNamespace(block_size=block, vocab=vocab)
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab, c), "wpe": nn.Embedding(block, c),
            "h": nn.ModuleList([nn.ModuleDict({
                "ln_1": nn.LayerNorm(c), "attn": Attention(c, 2), "ln_2": nn.LayerNorm(c),
                "mlp": nn.Sequential(nn.Linear(c, 2 * c), nn.GELU(), nn.Linear(2 * c, c))}) for _ in range(2)]),
            "ln_f": nn.LayerNorm(c)})  # fmt: skip
        self.lm_head = nn.Linear(c, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        _b, t = idx.size()
        assert t <= self.config.block_size
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(0, t, device=idx.device))
        for h in self.transformer.h:
            x = x + h["attn"](h["ln_1"](x))
            x = x + h["mlp"](h["ln_2"](x))
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return self.lm_head(x[:, [-1], :]), None

    def configure_optimizers(self, lr: float) -> torch.optim.Optimizer:
        named = {n: p for n, p in self.named_parameters() if p.requires_grad}
        groups = [{"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
                  {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-3)

    @torch.no_grad()
    def generate(self, idx: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits, _ = self(idx if idx.size(1) <= self.config.block_size else idx[:, -self.config.block_size :])
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return idx


class Windows(Dataset[Any]):
    def __init__(self, count: int = 22, block: int = 8, vocab: int = 17) -> None:
        self.data, self.block = torch.randint(vocab, (count + block,)), block

    def __len__(self) -> int:
        return len(self.data) - self.block

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.data[i : i + self.block], self.data[i + 1 : i + 1 + self.block]


def gpt() -> Made:
    net = Gpt().double()
    return net, net.configure_optimizers(3e-3), DataLoader(Windows(), 6, shuffle=True)


def _nanogpt(net: Any, opt: Any, batches: Any) -> Any:
    accum, best, step = 2, 1e9, 0
    endless = itertools.chain.from_iterable(itertools.repeat(batches))
    x, y = next(endless)
    raw = net.module if hasattr(net, "module") else net
    while step < 4:
        lr = 3e-3 * min(1, (step + 1) / 2)
        for group in opt.param_groups:
            group["lr"] = lr
        if step % 2 == 0:
            net.eval()
            with torch.no_grad():
                losses = torch.zeros(2)
                for k in range(2):
                    _, loss = net(x, y)
                    losses[k] = loss.item()
            net.train()
            best = min(best, losses.mean().item())
        for micro in range(accum):
            net.require_backward_grad_sync = micro == accum - 1
            _logits, loss = net(x, y)
            loss = loss / accum
            x, y = next(endless)
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
    raw.eval()
    return {"text": raw.generate(torch.zeros(1, 1, dtype=torch.long), 5).double()}


add("nanoGPT's loop, its switch for exchange, text at the end", _nanogpt, gpt)


class Output(OrderedDict[str, Any]):
    """A model's output as Hugging Face has it: names, attributes and places."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12, padding_idx=0)
        layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(12, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        hidden = self.encoder(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = nn.CrossEntropyLoss()(logits.view(-1, 4), labels.view(-1))
        return Output(loss=loss, logits=logits)


class Encoding(UserDict[str, Any]):
    """A batch as tokenizers make it."""

    def to(self, device: Any) -> Encoding:
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def _features(count: int = 22) -> list[dict[str, Any]]:
    r = random.Random(3)
    lengths = [r.randint(3, 7) for _ in range(count)]
    return [
        {"input_ids": [r.randint(1, 19) for _ in range(n)], "labels": [r.randint(0, 3) for _ in range(n)]}
        for n in lengths
    ]


def _collated(kind: Any) -> Any:
    def collate(features: list[dict[str, Any]]) -> Any:
        longest = max(len(f["input_ids"]) for f in features)
        pad = lambda f, k, v: f[k] + [v] * (longest - len(f[k]))  # noqa: E731
        return kind({
            "input_ids": torch.tensor([pad(f, "input_ids", 0) for f in features]),
            "attention_mask": torch.tensor([[i < len(f["input_ids"]) for i in range(longest)] for f in features]).int(),
            "labels": torch.tensor([pad(f, "labels", -100) for f in features]),
        })  # fmt: skip

    return collate


def tagged(kind: Any = dict) -> Made:
    net = Tagger().double()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3), DataLoader(
        _features(), 5, shuffle=True, collate_fn=_collated(kind))  # fmt: skip


def _hf_simple(net: Any, opt: Any, batches: Any) -> None:
    schedule = rates.LambdaLR(opt, lambda s: max(0.0, 1 - s / (2 * len(batches))))
    for _ in range(2):
        net.train()
        for batch in batches:
            batch = {k: v.to("cpu") for k, v in batch.items()}
            outputs = net(**batch)
            loss = outputs.loss
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad()
        net.eval()
        seen: list[np.ndarray] = []
        for batch in batches:
            with torch.no_grad():
                outputs = net(**batch)
            seen.extend(outputs.logits.argmax(-1).numpy())


add("Hugging Face without a trainer, an output with names", _hf_simple, tagged)
add("Hugging Face without a trainer, batches of a tokenizer", _hf_simple, lambda: tagged(Encoding))


def _smoother(outputs: Any, labels: Tensor, epsilon: float = 0.1) -> Tensor:
    log_probs = -F.log_softmax(outputs["logits"], dim=-1)
    labels = labels.unsqueeze(-1)
    padding = labels.eq(-100)
    labels = torch.clamp(labels, min=0)
    nll = log_probs.gather(dim=-1, index=labels)
    smoothed = log_probs.sum(dim=-1, keepdim=True)
    nll.masked_fill_(padding, 0.0)
    smoothed.masked_fill_(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return (1 - epsilon) * nll.sum() / active + epsilon * smoothed.sum() / (active * log_probs.shape[-1])


def _hf_trainer(smooth: bool) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        total = torch.tensor(0.0)
        for _ in range(2):
            iterator = iter(batches)
            for _update in range((len(batches) + 1) // 2):
                samples = []
                for _i in range(2):
                    with contextlib.suppress(StopIteration):
                        samples.append(next(iterator))
                items = sum(b["labels"].ne(-100).sum() for b in samples)
                for batch in samples:
                    net.train()
                    if smooth:
                        labels = batch.pop("labels")
                        loss = _smoother(net(**batch), labels) / len(samples)
                    else:
                        labels = batch["labels"]
                        logits = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                        loss = CE(logits.view(-1, 4), labels.view(-1), reduction="sum") / items
                    loss.backward()
                    total += loss.detach()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                net.zero_grad()

    return loop


add("Hugging Face's trainer, tokens of a window", _hf_trainer(False), tagged)
add("Hugging Face's trainer, labels smoothed", _hf_trainer(True), tagged)


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.classifier, self.aux_classifier = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size, features = x.shape[-2:], self.backbone(x)
        result = OrderedDict()
        result["out"] = F.interpolate(self.classifier(features), size=size, mode="bilinear", align_corners=False)
        if self.training:
            result["aux"] = F.interpolate(
                self.aux_classifier(features), size=size, mode="bilinear", align_corners=False
            )
        return result


class Confusion:
    def __init__(self, n: int) -> None:
        self.n, self.mat = n, torch.zeros(n, n, dtype=torch.int64)

    def update(self, a: Tensor, b: Tensor) -> None:
        k = (a >= 0) & (a < self.n)
        self.mat += torch.bincount(self.n * a[k].to(torch.int64) + b[k], minlength=self.n**2).reshape(self.n, self.n)


def _segment(net: Any, _opt: Any, batches: Any) -> None:
    groups = [{"params": [p for p in net.backbone.parameters() if p.requires_grad]},
              {"params": [p for p in net.classifier.parameters() if p.requires_grad]},
              {"params": [p for p in net.aux_classifier.parameters() if p.requires_grad], "lr": 0.5}]  # fmt: skip
    opt = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-3)
    iters = len(batches)
    main = rates.PolynomialLR(opt, total_iters=iters * 2, power=0.9)
    for _ in range(2):
        net.train()
        for image, target in batches:
            losses = {k: CE(v, target, ignore_index=255) for k, v in net(image).items()}
            loss = losses["out"] + 0.5 * losses["aux"] if len(losses) > 1 else losses["out"]
            opt.zero_grad()
            loss.backward()
            opt.step()
            main.step()
        net.eval()
        seen = Confusion(3)
        with torch.inference_mode():
            for image, target in batches:
                seen.update(target.flatten(), net(image)["out"].argmax(1).flatten())


def segmented() -> Made:
    target = torch.randint(3, (14, 8, 8))
    target[torch.rand(14, 8, 8) < torch.rand(14, 1, 1)] = 255
    return made(Segmenter(), normal(14, 3, 8, 8), target, batch=4)


add("torchvision's segmentation, auxiliary head, pixels left out", _segment, segmented, batch_norm="exact")


class Frozen(nn.Module):
    """Its norms stay in evaluation whatever mode it is put into."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16)
        )
        self.head = nn.Linear(16, 3)
        with torch.no_grad():
            for m in self.body:
                if isinstance(m, nn.BatchNorm1d):
                    m.running_mean.normal_()
                    m.running_var.uniform_(0.5, 2)
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _modes(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        net.train()
        for x, y in batches:
            one_step(net, opt, x, y)
        net.eval()
        with torch.no_grad():
            for x, _y in batches:
                net(x)


add("norms held in evaluation by the model's train()", _modes, lambda: classified(Frozen, 24))


class Norms(nn.Module):
    def __init__(self, last: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _freeze_partly(net: Any, opt: Any, batches: Any) -> None:
    """The backbone is frozen and in evaluation for an epoch, then trained with its own rate."""
    for p in net.body.parameters():
        p.requires_grad = False
    opt = torch.optim.Adam(filter(lambda p: p.requires_grad, net.parameters()), lr=1e-2, eps=1e-3)
    for epoch in range(3):
        net.train()
        if epoch == 0:
            net.body.eval()
        if epoch == 1:
            for p in net.body.parameters():
                p.requires_grad = True
            opt.add_param_group({"params": net.body.parameters(), "lr": 1e-3})
        for x, y in batches:
            one_step(net, opt, x, y)


add(
    "a head first, then a backbone with norms, groups added",
    _freeze_partly,
    lambda: classified(Norms, 24),
    batch_norm="exact",
)


class Spectral(nn.Module):
    """A layer of a Fourier operator: complex weights on the lowest modes."""

    def __init__(self, c: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(c, c, modes, dtype=torch.cdouble) / c)
        self.w = nn.Conv1d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        ft = torch.fft.rfft(x)
        out = torch.zeros_like(ft)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", ft[:, :, : self.modes], self.weight)
        return F.gelu(torch.fft.irfft(out, n=x.size(-1)) + self.w(x))


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.layers, self.out = nn.Linear(2, 4), nn.Sequential(Spectral(), Spectral()), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.linspace(0, 1, x.size(1)).to(x).reshape(1, -1, 1).expand(x.size(0), -1, 1)
        return self.out(self.layers(self.lift(torch.cat([x, grid], -1)).permute(0, 2, 1)).permute(0, 2, 1))


class Relative:
    """Mean over samples of relative distances."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        n = x.size(0)
        return (torch.norm(x.reshape(n, -1) - y.reshape(n, -1), 2, 1) / torch.norm(y.reshape(n, -1), 2, 1)).mean()


def operator() -> Made:
    torch.set_default_dtype(torch.float64)
    net = Operator()
    torch.set_default_dtype(torch.float32)
    return (
        net,
        torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-3, weight_decay=1e-4),
        loader(normal(18, 16, 1), normal(18, 16, 1)),
    )


def _operator(net: Any, opt: Any, batches: Any) -> None:
    schedule, loss_of, seen = rates.StepLR(opt, 1, 0.5), Relative(), 0.0
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            out = net(x).view(x.size(0), -1)
            loss = loss_of(out, y.view(y.size(0), -1))
            loss.backward()
            opt.step()
            seen += loss.item()
        schedule.step()


add("a Fourier operator, complex weights, relative losses", _operator, operator)


@dataclass
class Sample:
    """A batch as an object of the program."""

    x: Tensor
    y: Tensor
    names: list[str]

    def to(self, device: Any) -> Sample:
        return Sample(self.x.to(device), self.y.to(device), self.names)


def _stacked(samples: list[Any]) -> Any:
    return Sample(
        torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]), [str(int(y)) for _, y in samples]
    )


def objects() -> Made:
    net = small_net().double()
    return (
        net,
        sgd(net),
        DataLoader(TensorDataset(normal(21, 8), torch.randint(3, (21,))), 6, shuffle=True, collate_fn=_stacked),
    )


def _objects(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for batch in batches:
            batch = batch.to("cpu")
            one_step(net, opt, batch.x, batch.y)


add("a batch that is a dataclass with names", _objects, objects)


class Dcgan(nn.Module):
    def __init__(self, i: int, o: int, norm: bool) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(i, 16), nn.LayerNorm(16) if norm else nn.Identity(), nn.LeakyReLU(0.2), nn.Linear(16, o)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


def _two_calls(net: Any, opt: Any, batches: Any) -> Any:
    """DCGAN as in PyTorch's examples, the generator by a call of its own."""
    torch.manual_seed(5)
    gen = Dcgan(4, 8, True).double()
    of_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-3)
    if not isinstance(batches, DataLoader):
        gen, of_g, _ = asa.parallelize(
            gen, of_g, loader(normal(24, 4), normal(24, 4)), strategies=("ddp",), cache=None, time_limit_s=0.5
        )
    criterion = nn.BCEWithLogitsLoss()
    for _ in range(2):
        for real, z in batches:
            net.zero_grad()
            label = torch.full((real.size(0),), 1.0, dtype=real.dtype)
            out = net(real).view(-1)
            err = criterion(out, label)
            err.backward()
            fake = gen(z)
            label.fill_(0.0)
            criterion(net(fake.detach()).view(-1), label).backward()
            opt.step()
            gen.zero_grad()
            label.fill_(1.0)
            criterion(net(fake).view(-1), label).backward()
            of_g.step()
    return {f"g.{k}": v for k, v in gen.state_dict().items()}


add("DCGAN, two models, each by a call", _two_calls, lambda: made(Dcgan(8, 1, False), normal(24, 8), normal(24, 4)))


def _sum_of_nothing(net: Any, batch: Any) -> Tensor:
    """Touches every parameter, as programs do against unused ones."""
    x, y = batch
    return CE(net(x), y) + 0.0 * sum(p.sum() for p in net.parameters())


usual("every parameter touched by a sum of nothing", _sum_of_nothing)


def _regular(net: Any, batch: Any) -> Tensor:
    x, y = batch
    l1 = sum(p.abs().sum() for p in net.parameters())
    l2 = sum((p**2).sum() for n, p in net.named_parameters() if "bias" not in n)
    return CE(net(x), y) + 1e-3 * l1 + 1e-3 * l2


usual("L1 and L2 by hand", _regular)


class Dict(Dataset[Any]):
    """Samples with a name, a number, None never."""

    def __init__(self, count: int = 21) -> None:
        self.x, self.y = normal(count, 8), torch.randint(3, (count,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "image": self.x[i],
            "label": int(self.y[i]),
            "meta": {"path": f"{i}.png", "size": (4, i)},
            "weight": 0.5 + (i % 3),
        }


def named_batches() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Dict(), 6, shuffle=True)


def _named(net: Any, opt: Any, batches: Any) -> Any:
    paths = []
    for _ in range(2):
        for b in batches:
            opt.zero_grad()
            loss = (CE(net(b["image"]), b["label"], reduction="none") * b["weight"]).mean()
            loss.backward()
            opt.step()
            paths += b["meta"]["path"]
            assert len(b["meta"]["path"]) == len(b["label"]) == len(b["meta"]["size"][1])
    return {}


add("nested batches with names and sizes", _named, named_batches)


class Fetched(Dataset[Any]):
    """Fetches a whole batch at once, as tables do."""

    def __init__(self) -> None:
        self.x, self.y = normal(21, 8), torch.randint(3, (21,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: Any) -> Any:
        return {"x": self.x[i], "y": self.y[i]}

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        rows = {"x": self.x[numbers], "y": self.y[numbers]}
        return [{k: v[i] for k, v in rows.items()} for i in range(len(numbers))]


def _by_name(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for b in batches:
            one_step(net, opt, b["x"], b["y"])


def table_rows(whole: bool = False) -> Made:
    net, data = small_net().double(), Fetched()
    if whole:
        sampler = BatchSampler(RandomSampler(data), 6, False)
        return net, sgd(net), DataLoader(data, sampler=sampler, batch_size=None)
    return net, sgd(net), DataLoader(data, 6, shuffle=True)


add("batches fetched at once", _by_name, table_rows)
add("batches by a batch sampler as the sampler", _by_name, lambda: table_rows(True))
add("data stacked by name", _by_name, lambda: (n := small_net().double(), sgd(n), DataLoader(
    StackDataset(x=normal(21, 8), y=torch.randint(3, (21,))), 6, shuffle=True)))  # fmt: skip


def _progressive(net: Any, opt: Any, batches: Any) -> None:
    """Images grow, rates restart, statistics of norms are frozen in the last epoch."""
    schedule = rates.CosineAnnealingWarmRestarts(opt, T_0=1, T_mult=2)
    for epoch in range(3):
        net.train()
        if epoch == 2:
            for m in net.modules():
                if isinstance(m, nn.BatchNorm2d):
                    m.eval()
                    m.weight.requires_grad_(False)
        for i, (x, y) in enumerate(batches):
            size = 4 + 2 * epoch
            one_step(net, opt, F.interpolate(x, size=size, mode="bilinear"), y)
            schedule.step(epoch + i / len(batches))


add("images grow, restarts by fractions, norms frozen at the end", _progressive, images, batch_norm="exact")


def _one_cycle(net: Any, opt: Any, batches: Any) -> Any:
    opt = torch.optim.AdamW(
        [{"params": net.layers.parameters(), "lr": 1e-3}, {"params": [*net.stem.parameters(), *net.fc.parameters()]}],
        lr=1e-2,
        eps=1e-3,
    )
    schedule = rates.OneCycleLR(opt, max_lr=[1e-3, 1e-2], epochs=2, steps_per_epoch=len(batches), pct_start=0.3)
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=2.0**10, growth_interval=2)
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cpu", enabled=False):
                loss = CE(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_value_(net.parameters(), 0.05)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if before <= scaler.get_scale():
                schedule.step()
    return {"scale": torch.tensor(scaler.get_scale())}


add("one cycle for two groups, a scaler that grows, values clipped", _one_cycle, images, batch_norm="exact")


def _scaler_overflow(net: Any, opt: Any, batches: Any) -> Any:
    """One sample makes a gradient that is not finite: the step is left out, the scale halved, the rate not moved."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    schedule = rates.ExponentialLR(opt, 0.9)
    for epoch in range(2):
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            out = net(x)
            if epoch == 0 and i == 1:
                out = out * torch.where(x[:, :1] > x[:, :1].max() - 1e-9, math.inf, 1.0)
            scaler.scale(CE(out, y)).backward()
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if scaler.get_scale() >= before and torch.isfinite(norm):
                schedule.step()
    return {"scale": torch.tensor(scaler.get_scale())}


add("a scaler that leaves a step out", _scaler_overflow, lambda: classified(count=24))


class Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(normal(3, 16))

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - self.centers[y]).pow(2).sum(1).mean()


def _losses_with_parameters(net: Any, _opt: Any, batches: Any) -> Any:
    """Weights of tasks and centres are in modules beside the model, in one optimizer with it."""
    torch.manual_seed(7)
    centers, sigma = Centers(), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = torch.optim.Adam(
        [
            {"params": net.parameters()},
            {"params": centers.parameters(), "lr": 0.1},
            {"params": [sigma], "weight_decay": 0},
        ],
        lr=1e-2,
        eps=1e-3,
    )
    for x, y in itertools.chain(batches, batches):
        out, f = net(x)
        losses = torch.stack([CE(out, y), 0.01 * centers(f, y)])
        loss = (torch.exp(-sigma) * losses + sigma).sum()
        opt.zero_grad()
        loss.backward()
        for p in centers.parameters():
            p.grad.data *= 1 / 0.5
        opt.step()
    return {"centers": centers.centers.detach(), "sigma": sigma.detach()}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.body(x)
        return self.head(f), f


add(
    "centres and weights of tasks in one optimizer with the model", _losses_with_parameters, lambda: classified(Two, 24)
)
add("centres and weights of tasks, uneven", _losses_with_parameters, lambda: classified(Two, 21))


def _time_first(samples: list[Any]) -> Any:
    x, y = zip(*samples, strict=True)
    return pad_sequence(list(x)), torch.stack(y), torch.tensor([len(s) for s in x])


class Reader(nn.Module):
    """Reads packed sequences, time first, and takes its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(5, 8, num_layers=2, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        _, (h, _) = self.rnn(packed)
        return self.fc(torch.cat([h[-2], h[-1]], 1))


def read_time_first(batch: int = 6) -> Made:
    g = torch.Generator().manual_seed(2)
    data = [
        (torch.randn(int(n), 5, generator=g).double(), torch.tensor(int(n) % 3))
        for n in torch.randint(2, 8, (20,), generator=g)
    ]
    net = Reader().double()
    return (
        net,
        torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-3),
        DataLoader(data, batch, shuffle=True, collate_fn=_time_first),
    )  # type: ignore[arg-type]


def _packed(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y, n in batches:
            opt.zero_grad()
            CE(net(x, n), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.25)
            opt.step()


add("packed sequences, time first, lengths beside", _packed, read_time_first)


class Masked(nn.Module):
    """Attention whose mask, or positions, come with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.qkv, self.out = nn.Linear(4, 8), nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.inp(x)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).mean(1))


def _with_mask(samples: list[Any]) -> Any:
    x = torch.stack([s[0] for s in samples])
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return x, mask, torch.stack([s[1] for s in samples])


def masked(count: int, key: bool = False) -> Made:
    net = Masked().double()
    data = TensorDataset(normal(count, 6, 4), torch.randint(3, (count,)))
    collate = (lambda s: dict(zip(("x", "mask", "y"), _with_mask(s), strict=True))) if key else _with_mask
    return net, sgd(net), DataLoader(data, 6, shuffle=True, collate_fn=collate)


def _mask_loss(net: Any, batch: Any) -> Tensor:
    x, mask, y = (batch[k] for k in ("x", "mask", "y")) if isinstance(batch, dict) else batch
    return CE(net(x, mask), y)


usual("a mask of 6 places in batches of six, by collate", _mask_loss, lambda: masked(24))
usual("a mask of 6 places in batches of six, by collate, by name", _mask_loss, lambda: masked(24, True))
usual("a mask of 6 places in batches of six, uneven", _mask_loss, lambda: masked(22))


def _fairseq(samples: list[Any]) -> Any:
    longest = max(len(s) for s in samples)
    pad = lambda t: F.pad(t, (0, longest - len(t)), value=0)  # noqa: E731
    source = torch.stack([pad(s[:-1]) for s in samples])
    target = torch.stack([pad(s[1:]) for s in samples])
    lengths = torch.tensor([len(s) - 1 for s in samples])
    return {"id": list(range(len(samples))), "nsentences": len(samples), "ntokens": int((target != 0).sum()),
            "net_input": {"tokens": source, "lengths": lengths}, "target": target}  # fmt: skip


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.out = (
            nn.Embedding(20, 8, padding_idx=0),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 20),
        )

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.out(self.rnn(self.words(tokens))[0])

    def get_normalized_probs(self, out: Tensor) -> Tensor:
        return F.log_softmax(out, -1)


def sentences(batch: int = 5) -> Made:
    g = torch.Generator().manual_seed(2)
    data = [torch.randint(1, 20, (int(n),), generator=g) for n in torch.randint(3, 9, (21,), generator=g)]
    net = Words().double()
    return (
        net,
        torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-3),
        DataLoader(data, batch, shuffle=True, collate_fn=_fairseq),
    )  # type: ignore[arg-type]


def _criterion(net: Any, batch: Any) -> tuple[Tensor, int, dict[str, Any]]:
    out = net(**batch["net_input"])
    lprobs = net.get_normalized_probs(out).view(-1, 20)
    target = batch["target"].view(-1)
    nll = F.nll_loss(lprobs, target, ignore_index=0, reduction="sum")
    smooth = -lprobs.masked_fill(target.eq(0)[:, None], 0).sum(-1).sum()
    loss = 0.9 * nll + 0.1 / 20 * smooth
    return (
        loss,
        batch["ntokens"],
        {"loss": loss.data, "ntokens": batch["ntokens"], "nsentences": batch["target"].size(0)},
    )


def _fairseq_usual(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for batch in batches:
            opt.zero_grad()
            loss, size, _log = _criterion(net, batch)
            (loss / size).backward()
            opt.step()


def _fairseq_grads(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of sums over two batches, then divided by the tokens of both."""
    for _ in range(2):
        opt.zero_grad()
        size = 0
        for i, batch in enumerate(batches):
            loss, n, _log = _criterion(net, batch)
            loss.backward()
            size += n
            if i % 2:
                for p in net.parameters():
                    if p.grad is not None:
                        p.grad.mul_(1 / size)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                opt.step()
                opt.zero_grad()
                size = 0


add("fairseq: sums over tokens that collate counted", _fairseq_usual, sentences)
add("fairseq: gradients of sums divided by tokens that collate counted", _fairseq_grads, sentences)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(self.words(x).mean(1))))


def worded(net: Any = Rows, count: int = 21) -> Made:
    return made(net(), torch.randint(12, (count, 5)), torch.randint(3, (count,)))


def _rows_held(net: Any, opt: Any, batches: Any) -> None:
    """New words learn, old ones are held: their gradients are zeroed, and copied back."""
    first = net.words.weight.detach().clone()
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            net.words.weight.grad[:7] = 0
            net.body.weight.grad[:, 3].zero_()
            opt.step()
            with torch.no_grad():
                net.words.weight[:7] = first[:7]


add("old rows of a table held, by gradients and by copies", _rows_held, worded)


def _groups_emptied(net: Any, opt: Any, batches: Any) -> None:
    """Groups are written anew in place, with their state thrown away."""
    for epoch in range(3):
        if epoch == 1:
            opt.param_groups.clear()
            opt.state.clear()
            opt.add_param_group({"params": net.head.parameters(), "lr": 0.02})
        if epoch == 2:
            opt.param_groups[0]["params"] = [*net.head.parameters(), *net.first.parameters()]
            opt.param_groups[0]["momentum"] = 0.5
        for x, y in batches:
            net.zero_grad()
            CE(net(x), y).backward()
            opt.step()


add("groups cleared and written anew", _groups_emptied, lambda: classified(Named))


def _group_split(net: Any, opt: Any, batches: Any) -> None:
    """One group becomes two, parameters keep their momentum."""
    for epoch in range(2):
        if epoch == 1:
            group = opt.param_groups[0]
            no_decay = [p for p in group["params"] if p.ndim < 2]
            group["params"] = [p for p in group["params"] if p.ndim >= 2]
            opt.param_groups.append(
                {**{k: v for k, v in group.items() if k != "params"}, "params": no_decay, "weight_decay": 0.0}
            )
        for x, y in batches:
            one_step(net, opt, x, y)


add("a group split in two, momentum kept", _group_split)


def _carried(net: Any, opt: Any, batches: Any) -> None:
    """Accumulates four batches, across epochs and around evaluation."""
    step, best = 0, 0.0
    for _ in range(3):
        for x, y in batches:
            net.train()
            (CE(net(x), y) / 4).backward()
            step += 1
            if step % 3 == 0:
                net.eval()
                with torch.no_grad():
                    right = torch.zeros(())
                    for a, b in DataLoader(TensorDataset(*_held_out()), 5):
                        right += (net(a).argmax(1) == b).sum()
                best = max(best, right.item())
            if step % 4 == 0:
                opt.step()
                opt.zero_grad()


def _held_out() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(9)
    return torch.randn(12, 8, generator=g).double(), torch.randint(3, (12,), generator=g)


add("accumulation across epochs, around evaluation", _carried)
add("accumulation across epochs, norms exact", _carried, lambda: classified(Norms, 27), batch_norm="exact")


def _compiled(net: Any, opt: Any, batches: Any) -> Any:
    """Compiled behind the call; averages of the module inside; saved without the prefix."""
    model = torch.compile(net, backend="eager")
    ema = AveragedModel(model._orig_mod, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        model.train()
        for x, y in batches:
            one_step(model, opt, x, y)
            ema.update_parameters(model._orig_mod)
    state = {k.removeprefix("_orig_mod."): v for k, v in model.state_dict().items()}
    return {**state, **{f"ema.{k}": v for k, v in ema.module.state_dict().items()}}


add("compiled behind the call, averages inside, prefix removed", _compiled)


def _tutorial(net: Any, opt: Any, batches: Any) -> None:
    """Transfer learning as in PyTorch's tutorial: phases, gradients set by phase, the best state loaded at the end."""
    schedule = rates.StepLR(opt, step_size=1, gamma=0.5)
    held = DataLoader(TensorDataset(*_held_out()), 4)
    loaders, sizes = {"train": batches, "val": held}, {"train": len(batches.dataset), "val": 12}
    best, best_acc = copy.deepcopy(net.state_dict()), 0.0
    for _ in range(3):
        for phase in ("train", "val"):
            net.train() if phase == "train" else net.eval()
            running_loss, corrects = 0.0, 0
            for inputs, labels in loaders[phase]:
                opt.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = net(inputs)
                    _, preds = torch.max(outputs, 1)
                    loss = CE(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        opt.step()
                running_loss += loss.item() * inputs.size(0)
                corrects += torch.sum(preds == labels.data)
            if phase == "train":
                schedule.step()
            acc = corrects.double() / sizes[phase]
            if phase == "val" and acc > best_acc:
                best_acc, best = acc, copy.deepcopy(net.state_dict())
    net.load_state_dict(best)


add("transfer learning as in the tutorial", _tutorial, lambda: classified(Named))
add("transfer learning as in the tutorial, norms exact", _tutorial, lambda: classified(Norms, 24), batch_norm="exact")


class Yolo(nn.Module):
    """Predicts boxes on a grid; targets carry the number of their image."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.MaxPool2d(2)),
            nn.Conv2d(8, 6, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).permute(0, 2, 3, 1)


def _boxes(samples: list[Any]) -> Any:
    x, targets = zip(*samples, strict=True)
    numbered = []
    for i, t in enumerate(targets):
        row = torch.zeros(len(t), 6, dtype=t.dtype)
        row[:, 0], row[:, 1:] = i, t
        numbered.append(row)
    return torch.stack(x), torch.cat(numbered), [str(i) for i in range(len(x))]


def boxed() -> Made:
    g = torch.Generator().manual_seed(4)
    data = [
        (torch.randn(3, 8, 8, generator=g).double(), torch.rand(int(n), 5, generator=g).double())
        for n in torch.randint(1, 4, (16,), generator=g)
    ]
    net = Yolo().double()
    return net, sgd(net, 0.01), DataLoader(data, 4, shuffle=True, collate_fn=_boxes)  # type: ignore[arg-type]


def _yolo(net: Any, opt: Any, batches: Any) -> None:
    """Objectness over all cells, boxes over the mean of all targets of the batch, times the batch's size."""
    for _ in range(2):
        for images_, targets, _paths in batches:
            pred = net(images_)
            number, cell = targets[:, 0].long(), (targets[:, 2:4] * 4).long()
            found = pred[number, cell[:, 1], cell[:, 0]]
            box = (1 - torch.exp(-(found[:, :4] - targets[:, 2:]).square().sum(1))).mean()
            obj = torch.zeros_like(pred[..., 4])
            obj[number, cell[:, 1], cell[:, 0]] = 1.0
            loss = (0.5 * box + BCE(pred[..., 4], obj)) * images_.shape[0]
            opt.zero_grad()
            loss.backward()
            opt.step()


add("boxes on a grid, numbered, times the batch's size", _yolo, boxed)


def _endless(net: Any, opt: Any, batches: Any) -> None:
    """Steps are counted, the iterator begins anew when it has ended, the last step breaks out."""
    it, step = iter(batches), 0
    while True:
        try:
            x, y = next(it)
        except StopIteration:
            it = iter(batches)
            x, y = next(it)
        for g in opt.param_groups:
            g["lr"] = 0.05 * min((step + 1) / 3, 1.0, (8 - step) / 4)
        one_step(net, opt, x, y)
        step += 1
        if step == 7:
            break
    for x, y in batches:
        one_step(net, opt, x, y)


add("steps counted, broken off, then a whole epoch", _endless)


class Moving(nn.Module):
    """Normalises inputs by statistics that it has seen in training, as agents do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - self.mean) / (self.var + 1e-8).sqrt())


def _observed(net: Any, opt: Any, batches: Any) -> None:
    """The loop tells the model what it saw, whole, before each step."""
    for x, y in itertools.chain(batches, batches):
        seen = asa.gather(x)
        with torch.no_grad():
            mean, var, n = seen.mean(0), seen.var(0, unbiased=False), len(seen)
            delta, total = mean - net.mean, net.count + n
            m2 = net.var * net.count + var * n + delta**2 * net.count * n / total
            net.mean.copy_(net.mean + delta * n / total)
            net.var.copy_(m2 / total)
            net.count.copy_(total)
        one_step(net, opt, x, y)


add("inputs normalised by gathered statistics in buffers", _observed, lambda: classified(Moving))


@dataclass
class Answer:
    loss: Tensor | None
    logits: Tensor
    hidden: tuple[Tensor, ...]
    cache: Any = None


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(
        self, x: Tensor, labels: Tensor | None = None, *, scale: float = 1.0, return_loss: bool = True
    ) -> Answer:
        h1 = F.relu(self.a(x))
        h2 = F.relu(self.b(h1)) * scale
        out = self.c(h2)
        return Answer(CE(out, labels) if labels is not None and return_loss else None, out, (h1, h2))


def _answers(net: Any, opt: Any, batches: Any) -> Any:
    teacher = copy.deepcopy(net).eval().requires_grad_(False)
    for epoch in range(2):
        for x, y in batches:
            with torch.no_grad():
                t = teacher(x)
            a = net(x, y, scale=1.0 + 0.1 * epoch)
            soft = F.kl_div(F.log_softmax(a.logits / 2, -1), F.softmax(t.logits / 2, -1), reduction="batchmean") * 4
            hint = sum(F.mse_loss(h, s) for h, s in zip(a.hidden, t.hidden, strict=False))
            opt.zero_grad()
            (0.5 * a.loss + 0.5 * soft + 0.1 * hint).backward()
            opt.step()
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), net.parameters(), strict=False):
                p.mul_(0.5).add_(q, alpha=0.5)
    return {f"t.{k}": v for k, v in teacher.state_dict().items()}


add("a record with the loss, a scale by name, a slow teacher", _answers, lambda: classified(Answers))


class Stream(IterableDataset[Any]):
    """Samples of a file, those with an odd sum left out; workers share them."""

    def __init__(self, count: int) -> None:
        self.x, self.y, self.epoch = normal(count, 8), torch.randint(3, (count,)), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        info = torch.utils.data.get_worker_info()
        for i in order[info.id :: info.num_workers] if info else order:
            if self.y[i] != 1 or self.x[i, 0] > 0:
                yield {"x": self.x[i], "y": self.y[i], "key": str(i)}


def streamed(workers: int = 0) -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Stream(30), 5, num_workers=workers)


def _streamed(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(2):
        batches.dataset.set_epoch(epoch)
        for b in batches:
            one_step(net, opt, b["x"], b["y"])
            assert len(b["key"]) == len(b["y"])


add("a stream that leaves samples out, set by epoch", _streamed, streamed)
add("a stream that leaves samples out, set by epoch, workers", _streamed, lambda: streamed(2))


def _joined_data(net: Any, opt: Any, batches: Any) -> None:
    """Labelled batches from the loader, others from a second loader that ends earlier and begins anew."""
    torch.manual_seed(3)
    other = DataLoader(TensorDataset(normal(9, 8)), 3, shuffle=True, generator=torch.Generator().manual_seed(1))
    more = iter(other)
    for _ in range(2):
        for x, y in batches:
            try:
                (u,) = next(more)
            except StopIteration:
                more = iter(other)
                (u,) = next(more)
            opt.zero_grad()
            with torch.no_grad():
                pseudo = net(u).softmax(1)
            strong = net(u * 1.1)
            (CE(net(x), y) + 0.5 * CE(strong, pseudo)).backward()
            opt.step()


add("labelled samples, and others from a loader that begins anew", _joined_data)


def _r_drop(net: Any, opt: Any, batches: Any) -> None:
    """Two passes; their answers compared by a sum over classes and a mean over samples; a warm weight by step."""
    step = 0
    for _ in range(2):
        for x, y in batches:
            a, b = net(x), net(x.flip(1))
            p, q = F.log_softmax(a, -1), F.log_softmax(b, -1)
            kl = (
                F.kl_div(p, q, log_target=True, reduction="none") + F.kl_div(q, p, log_target=True, reduction="none")
            ).sum(-1)
            ce = 0.5 * (CE(a, y) + CE(b, y))
            opt.zero_grad()
            (ce + min(1.0, step / 4) * 0.5 * kl.mean()).backward()
            nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 1.0, norm_type=math.inf)
            opt.step()
            step += 1


add("two passes compared, largest gradient clipped", _r_drop)


def _by_parts(net: Any, _opt: Any, batches: Any) -> None:
    """Body and head have optimizers and schedules of their own, one of them steps every second batch."""
    first = torch.optim.SGD(net.first.parameters(), lr=0.05, momentum=0.9)
    rest = torch.optim.AdamW(list(net.second.parameters()) + list(net.head.parameters()), lr=1e-2, eps=1e-3)
    schedules = [rates.CosineAnnealingLR(first, 6), rates.LambdaLR(rest, lambda s: 0.9**s)]
    for i, (x, y) in enumerate(itertools.chain(batches, batches)):
        first.zero_grad()
        if i % 2 == 0:
            rest.zero_grad()
        CE(net(x), y).backward()
        first.step()
        schedules[0].step()
        if i % 2:
            for p in rest.param_groups[0]["params"]:
                p.grad.div_(2)
            rest.step()
            schedules[1].step()


add("two optimizers of unlike paces", _by_parts, lambda: classified(Named))


def _nan_guard(net: Any, opt: Any, batches: Any) -> None:
    """Gradients that are not finite are set to zero; a loss that is not is left out by all."""
    for _ in range(2):
        for x, y in batches:
            loss = CE(net(x), y)
            if not torch.isfinite(asa.reduce(loss.detach())):
                continue
            opt.zero_grad()
            loss.backward()
            for p in net.parameters():
                torch.nan_to_num_(p.grad, nan=0.0, posinf=1.0, neginf=-1.0)
            total = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
            nn.utils.clip_grads_with_norm_(net.parameters(), 0.5, total)
            opt.step()


add("gradients made finite, clipped by a norm from before", _nan_guard)


def _numpy_sampler(net: Any, _opt: Any, batches: Any) -> None:
    """Subsets by folds, each with a model that begins anew from one state, by load_state_dict."""
    start = copy.deepcopy(net.state_dict())
    for fold in range(2):
        net.load_state_dict(start)
        opt = torch.optim.SGD(net.parameters(), lr=0.05 * (fold + 1), momentum=0.9)
        for i, (x, y) in enumerate(batches):
            if i % 2 == fold:
                one_step(net, opt, x, y)


add("folds by number of the batch, from one state", _numpy_sampler)


def _grouped_loss(net: Any, batch: Any) -> Tensor:
    """A mean over classes of means over pixels, each sample by itself, with a weight by its area."""
    x, y = batch
    out = net(x)["out"]
    each = F.cross_entropy(out, y.clamp(max=2), reduction="none")
    ok = (y != 255).to(each.dtype)
    per = (each * ok).flatten(1).sum(1) / ok.flatten(1).sum(1).clamp(min=1)
    return per.mean()


usual("pixels averaged by sample, auxiliary head unused", _grouped_loss, segmented, batch_norm="exact")


def _penalty_by_modules(net: Any, batch: Any) -> Tensor:
    """Decay of the weights of linear layers, by modules; biases and norms are left out."""
    x, y = batch
    decay = sum(m.weight.pow(2).sum() for m in net.modules() if isinstance(m, nn.Linear))
    return CE(net(x), y) + 1e-2 * decay


usual("decay of linear layers, by modules", _penalty_by_modules)


def _gram(net: Any, batch: Any) -> Tensor:
    """Rows of the head kept apart: its normalised Gram matrix."""
    x, y = batch
    w = F.normalize(net.head.weight, dim=1)
    return CE(net(x), y) + 0.1 * (w @ w.t() - torch.eye(3, dtype=w.dtype)).pow(2).sum()


usual("rows of the head kept apart", _gram, lambda: classified(Named))


def _schedule_from_before(net: Any, opt: Any, batches: Any) -> None:
    """Rates by layers from names, a schedule per step, momentum of the schedule."""
    groups: dict[str, Any] = {}
    for name, p in net.named_parameters():
        depth = ("first", "second", "head").index(name.split(".")[0])
        decays = p.ndim > 1
        group = groups.setdefault(
            f"{depth}{decays}",
            {"params": [], "lr": 0.02 * 0.7 ** (2 - depth), "weight_decay": 0.1 * decays, "lr_scale": 0.7},
        )
        group["params"].append(p)
    opt = torch.optim.AdamW(list(groups.values()), betas=(0.9, 0.98), eps=1e-3)
    values = np.concatenate([np.linspace(0, 1, 3), 0.5 * (1 + np.cos(np.pi * np.arange(5) / 5))])
    initial = [g["lr"] for g in opt.param_groups]
    for it, (x, y) in enumerate(itertools.chain(batches, batches)):
        for g, lr in zip(opt.param_groups, initial, strict=False):
            g["lr"] = lr * float(values[it]) * g["lr_scale"]
            if g["weight_decay"] > 0:
                g["weight_decay"] = 0.1 + 0.05 * it
        opt.zero_grad()
        loss = CE(net(x), y)
        if not math.isfinite(loss.item()):
            raise SystemExit(1)
        loss.backward()
        for n, p in net.named_parameters():
            if n.startswith("head") and it < 2:
                p.grad = None
        norms = [p.grad.data.norm(2) for p in net.parameters() if p.grad is not None]
        for p in net.parameters():
            if p.grad is not None:
                coef = 0.3 / (p.grad.data.norm(2) + 1e-6)
                if coef < 1:
                    p.grad.data.mul_(coef)
        del norms
        opt.step()


add(
    "layer-wise rates, a last layer held, each gradient clipped (DINO)",
    _schedule_from_before,
    lambda: classified(Named, 24),
)


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = (
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16)),
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 12, bias=False)),
        )

    def forward(self, crops: Any) -> Tensor:
        if not isinstance(crops, list):
            crops = [crops]
        return self.head(torch.cat([self.backbone(c) for c in crops]))


def _byol(net: Any, opt: Any, batches: Any) -> Any:
    """Two augmented views from the loader, targets by a moving copy, symmetric, cosine; a momentum by step."""
    target = copy.deepcopy(net)
    for p in target.parameters():
        p.requires_grad = False
    for step, (_, a, b) in enumerate(itertools.chain(batches, batches)):
        pa, pb = net(a), net(b)
        with torch.no_grad():
            ta, tb = target(a), target(b)
        loss = (2 - 2 * F.cosine_similarity(pa, tb.detach(), dim=-1)).mean() + (
            2 - 2 * F.cosine_similarity(pb, ta, dim=-1)
        ).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        m = 1 - (1 - 0.9) * (math.cos(math.pi * step / 8) + 1) / 2
        with torch.no_grad():
            for q, k in zip(net.parameters(), target.parameters(), strict=False):
                k.data.mul_(m).add_((1 - m) * q.detach().data)
    return {f"t.{k}": v for k, v in target.state_dict().items()}


add(
    "a moving target, symmetric cosine, momentum by step",
    _byol,
    lambda: made(Student(), normal(24, 8), normal(24, 8), normal(24, 8)),
)


def _replaced_loader(net: Any, opt: Any, batches: Any) -> None:
    """Every epoch a validation metric decides on the rate and on stopping; the last good state returns."""
    held, best, bad, kept = _held_out(), -1.0, 0, None
    for _ in range(4):
        net.train()
        for x, y in batches:
            one_step(net, opt, x, y)
        net.eval()
        with torch.no_grad():
            score = float((net(held[0]).argmax(-1) == held[1]).double().mean())
        if score > best:
            best, bad, kept = score, 0, {k: v.clone() for k, v in net.state_dict().items()}
        else:
            bad += 1
            for g in opt.param_groups:
                g["lr"] *= 0.5
            if bad == 2:
                break
    net.load_state_dict(kept)


add(
    "stopping and rates by a metric on held out samples",
    _replaced_loader,
    lambda: classified(count=21, shuffle=True, generator=torch.Generator().manual_seed(2)),
)
