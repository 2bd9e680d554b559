"""Programs in the way public training scripts are written: whole scripts with several habits at once, trainers,
published optimizers, counterfactual and fairness losses, scenes, sequences, and self-supervised pairs."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from benchmarks.program_table import Made, made, normal, program, sgd
from benchmarks.program_table.common import BCE, CE, MSE, Named, classified, one_step, small_net

KIND = "public"


def add(name: str, loop: Any, make: Any = classified, job_loss: Any = None, **options: Any) -> None:
    program(KIND, name, make, loop, job_loss, **options)


def usual(
    name: str, loss: Callable[[Any, Any], Tensor], make: Any = classified, count: int = 2, **options: Any
) -> None:
    """A program of the usual loop, with ``loss(net, batch)``."""

    def loop(net: Any, opt: Any, batches: Any) -> None:
        for _ in range(count):
            net.train()
            for batch in batches:
                opt.zero_grad(set_to_none=True)
                loss(net, batch).backward()
                opt.step()

    add(name, loop, make, **options)


# ---- whole scripts


def _mnist(net: Any, opt: Any, batches: Any) -> None:
    """The example of every framework: train, print, test with a summed loss, a schedule by epoch."""
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.7)
    x_test, y_test = torch.linspace(-1, 1, 80, dtype=torch.float64).view(10, 8), torch.arange(10) % 3
    for epoch in range(1, 3):
        net.train()
        for i, (data, target) in enumerate(batches):
            opt.zero_grad()
            loss = F.nll_loss(F.log_softmax(net(data), dim=1), target)
            loss.backward()
            opt.step()
            if i % 2 == 0:
                done, of = i * len(data), len(batches.dataset)
                f"Train Epoch: {epoch} [{done}/{of} ({100.0 * i / len(batches):.0f}%)]\tLoss: {loss.item():.6f}"
        net.eval()
        test_loss, correct = 0.0, 0
        with torch.no_grad():
            for k in range(0, 10, 5):
                out = F.log_softmax(net(x_test[k : k + 5]), dim=1)
                test_loss += F.nll_loss(out, y_test[k : k + 5], reduction="sum").item()
                pred = out.argmax(dim=1, keepdim=True)
                correct += pred.eq(y_test[k : k + 5].view_as(pred)).sum().item()
        schedule.step()


add("script: digits", _mnist)


class Config:
    """Settings of a trainer, as attributes."""

    max_iters, learning_rate, grad_norm_clip, betas = 9, 3e-2, 1.0, (0.9, 0.95)


class Trainer:
    """A trainer with callbacks and an iterator that starts again (minGPT)."""

    def __init__(self, config: Config, model: Any, opt: Any, loader: Any) -> None:
        self.config, self.model, self.optimizer, self.loader = config, model, opt, loader
        self.callbacks: dict[str, list[Any]] = defaultdict(list)
        self.iter_num, self.loss = 0, torch.zeros(())

    def add_callback(self, event: str, callback: Any) -> None:
        self.callbacks[event].append(callback)

    def trigger(self, event: str) -> None:
        for callback in self.callbacks.get(event, []):
            callback(self)

    def run(self) -> None:
        self.model.train()
        data = iter(self.loader)
        while True:
            try:
                batch = next(data)
            except StopIteration:
                data = iter(self.loader)
                batch = next(data)
            x, y = [t.to("cpu") for t in batch]
            self.loss = CE(self.model(x), y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
            self.trigger("on_batch_end")
            self.iter_num += 1
            if self.iter_num >= self.config.max_iters:
                break


def _trainer(net: Any, opt: Any, batches: Any) -> None:
    trainer = Trainer(Config(), net, opt, batches)
    losses: list[float] = []
    trainer.add_callback("on_batch_end", lambda t: losses.append(t.loss.item()))
    trainer.add_callback("on_batch_end", lambda t: t.model.eval() if t.iter_num % 3 == 2 else None)
    trainer.add_callback("on_batch_end", lambda t: t.model.train())
    trainer.run()


def _endless_sampler() -> Made:
    net = small_net().double()
    data = TensorDataset(normal(21, 8), torch.randint(3, (21,)))
    sampler = RandomSampler(data, replacement=True, num_samples=30)
    return net, sgd(net), DataLoader(data, 6, sampler=sampler)


add("script: a trainer with callbacks", _trainer, _endless_sampler)


def _text_script(net: Any, opt: Any, batches: Any) -> None:
    """Micro steps, warm-up and cosine by a function, an estimate of the loss in evaluation (nanoGPT)."""
    steps, accumulation = 6, 2

    def rate(it: int) -> float:
        if it < 2:
            return 0.05 * (it + 1) / 3
        return 0.005 + 0.5 * (1 + math.cos(math.pi * (it - 2) / (steps - 2))) * 0.045

    @torch.no_grad()
    def estimate() -> float:
        net.eval()
        losses = torch.zeros(2)
        for k in range(2):
            x = (torch.arange(30).view(6, 5) * (k + 3)) % 11
            losses[k] = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).item()
        net.train()
        return float(losses.mean())

    best, data = 1e9, itertools.chain.from_iterable(itertools.repeat(batches))
    x, y = next(data)
    for it in range(steps):
        for group in opt.param_groups:
            group["lr"] = rate(it)
        if it % 3 == 0:
            best = min(best, estimate())
        for _ in range(accumulation):
            logits = net(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1) / accumulation
            x, y = next(data)  # fetched while the loss is computed
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)


class Words(nn.Module):
    """Logits of the next word."""

    def __init__(self, words: int = 11) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(words, 8), nn.Linear(8, 8), nn.Linear(8, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.table(tokens))))  # type: ignore[no-any-return]


def _texts(count: int = 24) -> Made:
    net = Words().double()
    tokens = torch.randint(11, (count, 6))
    return net, sgd(net), DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 6)


add("script: text, micro steps, the next batch fetched early", _text_script, _texts)


def _accumulate_like_yolo(net: Any, opt: Any, batches: Any) -> None:
    """Warm-up of rate and accumulation by the number of the batch, an average of weights that warms up, a scaler, and a
    loss times the size of the batch (YOLO)."""
    nominal, number, last = 12, len(batches), -1
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    average = [p.detach().clone() for p in net.parameters()]
    updates, accumulate = 0, 1
    for epoch in range(3):
        opt.zero_grad()
        for i, (x, y) in enumerate(batches):
            ni = i + number * epoch
            if ni <= 4:
                accumulate = max(1, int(np.interp(ni, [0, 4], [1, nominal / 6]).round()))
                for group in opt.param_groups:
                    group["lr"] = np.interp(ni, [0, 4], [0.001, 0.01])
            loss = CE(net(x), y) * 6
            scaler.scale(loss).backward()
            if ni - last >= accumulate:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=10.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                updates += 1
                d = 0.99 * (1 - math.exp(-updates / 20))
                for a, p in zip(average, net.parameters(), strict=True):
                    a.mul_(d).add_(p.detach(), alpha=1 - d)
                last = ni


add("script: accumulation that warms up", _accumulate_like_yolo)


def _times_batch_size(net: Any, opt: Any, batches: Any) -> None:
    """A loss that is multiplied by the number of samples."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            (CE(net(x), y) * x.shape[0]).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 4.0)
            opt.step()


add("a loss times the number of samples", _times_batch_size)
add("a loss times the number of samples, even", _times_batch_size, lambda: classified(count=24))


class EarlyStopping:
    """Counts epochs without improvement."""

    def __init__(self, patience: int) -> None:
        self.patience, self.counter, self.best, self.stop = patience, 0, None, False
        self.kept: dict[str, Tensor] = {}

    def __call__(self, loss: float, model: Any) -> None:
        if self.best is None or loss < self.best - 1e-4:
            self.best, self.counter = loss, 0
            self.kept = copy.deepcopy(model.state_dict())
        else:
            self.counter += 1
            self.stop = self.counter >= self.patience


def _early(net: Any, opt: Any, batches: Any) -> None:
    """ReduceLROnPlateau and early stopping by a validation loader of its own; the best weights are loaded."""
    val = DataLoader(TensorDataset(torch.ones(8, 8).double().cumsum(0) / 8, torch.arange(8) % 3), 4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    stopper = EarlyStopping(2)
    for _ in range(6):
        net.train()
        running = 0.0
        for x, y in batches:
            opt.zero_grad()
            loss = CE(net(x), y)
            loss.backward()
            opt.step()
            running += loss.item() * x.size(0)
        running /= len(batches.dataset)
        net.eval()
        with torch.no_grad():
            value = sum(CE(net(x), y).item() * x.size(0) for x, y in val) / len(val.dataset)  # type: ignore[arg-type]
        plateau.step(value)
        stopper(value, net)
        if stopper.stop:
            break
    net.load_state_dict(stopper.kept)


add("script: plateau and early stopping", _early, lambda: classified(lr=0.5))


def _plateau_of_training(net: Any, opt: Any, batches: Any) -> None:
    """A plateau by the average training loss of each epoch, as averaged by a meter over samples."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.3, threshold=0.05)
    for _ in range(5):
        total, count = 0.0, 0
        for x, y in batches:
            loss = one_step(net, opt, x, y)
            total, count = total + loss.item() * x.size(0), count + x.size(0)
        plateau.step(total / count)


add("a plateau by the meter of training losses", _plateau_of_training, lambda: classified(lr=0.3))


def _resumed(net: Any, opt: Any, batches: Any) -> None:
    """A checkpoint in memory at each epoch; after the second epoch everything is loaded again and trained further."""
    import io

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
    file = io.BytesIO()
    for epoch in range(4):
        for x, y in batches:
            one_step(net, opt, x, y)
        schedule.step()
        if epoch == 1:
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": schedule.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=False)
    net.load_state_dict(kept["net"])
    opt.load_state_dict(kept["opt"])
    schedule.load_state_dict(kept["sched"])
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
        schedule.step()


add("script: checkpoint in memory, resumed", _resumed)


def _resumed_adam() -> Made:
    net, _, batches = classified()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01), batches


add("script: checkpoint in memory, resumed, AdamW", _resumed, _resumed_adam)


def _per_batch_schedules(net: Any, opt: Any, batches: Any) -> None:
    """Two schedulers of which one is stepped by batch and one by epoch, chained."""
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=5)
    poly = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=3, power=0.9)
    for _ in range(3):
        for x, y in batches:
            one_step(net, opt, x, y)
            warm.step()
        poly.step()


add("schedules by batch and by epoch", _per_batch_schedules)


def _total_norms(net: Any, opt: Any, batches: Any) -> None:
    """The new functions of clipping: the total norm is read, then gradients are scaled by it; infinite norms."""
    for epoch in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            kind = 2.0 if epoch else float("inf")
            norm = torch.nn.utils.get_total_norm(grads, norm_type=kind, error_if_nonfinite=True)
            torch.nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, norm)
            opt.step()


add("clipped by get_total_norm", _total_norms)


def _hooked_metrics(net: Any, opt: Any, batches: Any) -> None:
    """Averages of windows of losses decide when the rate falls."""
    window: deque[float] = deque(maxlen=3)
    for _ in range(3):
        for x, y in batches:
            window.append(float(one_step(net, opt, x, y).detach()))
            if len(window) == 3 and window[-1] > sum(window) / 3:
                for group in opt.param_groups:
                    group["lr"] *= 0.8


add("a rate by a window of losses", _hooked_metrics)


# ---- published optimizers


class _Base(torch.optim.Optimizer):
    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def _grads(self) -> Iterator[tuple[Any, Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p, self.state[p]


class Prodigy(_Base):
    """The step size grows by inner products over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared = self.param_groups[0]
        d = shared.setdefault("d", 1e-2)
        num, den = shared.setdefault("num", 0.0), 0.0
        for group, p, state in self._grads():
            if not state:
                state["s"], state["first"], state["m"] = torch.zeros_like(p), p.clone(), torch.zeros_like(p)
            num += d * float(torch.dot(p.grad.flatten(), (state["first"] - p).flatten()))
            state["s"].mul_(0.9).add_(p.grad, alpha=d * group["lr"])
            state["m"].mul_(0.9).add_(p.grad, alpha=d * 0.1)
            den += float(state["s"].abs().sum())
        shared["num"] = 0.9 * num
        shared["d"] = max(d, min(num / max(den, 1e-12), 2 * d))
        for group, p, state in self._grads():
            p.add_(state["m"], alpha=-group["lr"])


class ScheduleFree(_Base):
    """Weights are an average, and are swapped by train() and eval()."""

    @torch.no_grad()
    def _swap(self, factor: float, on: bool) -> None:
        for group in self.param_groups:
            if group.setdefault("train", True) != on:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], factor)
                group["train"] = on

    def eval(self) -> None:
        self._swap(1 - 1 / 0.9, False)

    def train(self) -> None:
        self._swap(1 - 0.9, True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        for g, p, state in self._grads():
            z = state.setdefault("z", p.clone())
            c = 1 / group["k"]
            p.lerp_(z, c)
            p.add_(p.grad, alpha=g["lr"] * (0.9 * (1 - c) - 1))
            z.sub_(p.grad, alpha=g["lr"])


class Adan(_Base):
    """Nesterov momentum by differences of gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, state in self._grads():
            if not state:
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p), n=torch.zeros_like(p), last=p.grad.clone())
            off = p.grad - state["last"]
            state["m"].lerp_(p.grad, 0.1)
            state["v"].lerp_(off, 0.1)
            state["n"].lerp_((p.grad + 0.9 * off) ** 2, 0.1)
            state["last"] = p.grad.clone()
            p.sub_(group["lr"] * (state["m"] + 0.9 * state["v"]) / (state["n"].sqrt() + 1e-8))


class Larc(_Base):
    """A rate for each layer by the norms of weight and gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, _ in self._grads():
            w, g = torch.norm(p), torch.norm(p.grad)
            trust = 0.02 * w / (g + 1e-4 * w + 1e-8) if w > 0 and g > 0 else 1.0
            p.add_(p.grad + 1e-4 * p, alpha=-float(min(trust / group["lr"], 1.0)) * group["lr"])


class Noam:
    """The wrapper of the annotated Transformer: no optimizer of torch's."""

    def __init__(self, optimizer: Any, size: int = 8, warmup: int = 4) -> None:
        self.optimizer, self.size, self.warmup, self._step = optimizer, size, warmup, 0

    def step(self) -> None:
        self._step += 1
        rate = self.size**-0.5 * min(self._step**-0.5, self._step * self.warmup**-1.5)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * rate
        self.optimizer.step()


def _with(kind: Any, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        net, _, batches = classified()
        return net, kind(net.parameters(), **options), batches

    return make


def _steps(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)


def _free(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        net.train()
        opt.train()
        for x, y in batches:
            one_step(net, opt, x, y)
        net.eval()
        opt.eval()


add("optimizer: Prodigy", _steps, _with(Prodigy, lr=1.0))
add("optimizer: schedule-free", _free, _with(ScheduleFree, lr=0.1))
add("optimizer: Adan", _steps, _with(Adan, lr=0.01))
add("optimizer: Adan, elementwise", _steps, _with(Adan, lr=0.01), elementwise=True)
add("optimizer: LARC", _steps, _with(Larc, lr=0.1))


def _noam(net: Any, opt: Any, batches: Any) -> None:
    """The loss is summed over tokens and divided by their number (the annotated Transformer)."""
    wrapped = Noam(opt)
    for _ in range(2):
        for x, y in batches:
            log = F.log_softmax(net(x), -1)
            ntokens = (y != 0).data.sum()
            smooth = torch.full_like(log, 0.1 / 9)
            smooth.scatter_(2, y.unsqueeze(2), 0.9)
            smooth[..., 0] = 0
            smooth = smooth.masked_fill((y == 0).unsqueeze(2), 0.0)
            loss = F.kl_div(log, smooth, reduction="sum") / ntokens
            loss.backward()
            wrapped.step()
            opt.zero_grad(set_to_none=True)


add("script: smoothed words over tokens, a rate in a wrapper", _noam, _texts)


def _sophia(net: Any, opt: Any, batches: Any) -> None:
    """Every second step an estimate of curvature from labels drawn of the model's own answers (Sophia-G)."""
    moments = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for k, (x, y) in enumerate(itertools.chain(batches, batches)):
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        if k % 2 == 1:
            opt.zero_grad()
            logits = net(x)
            drawn = torch.distributions.Categorical(logits=logits).sample()
            CE(logits, drawn).backward()
            for n, p in net.named_parameters():
                moments[n].lerp_(p.grad**2, 0.5)
            with torch.no_grad():
                for n, p in net.named_parameters():
                    p.mul_(1 - 0.01 * moments[n].clamp(max=1))


add("curvature from drawn labels", _sophia)


def _empirical_fisher(net: Any, opt: Any, batches: Any) -> None:
    """Squares of the batch's gradients scale the next updates (a loop's own preconditioner)."""
    squares = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for s, p in zip(squares, net.parameters(), strict=True):
            s.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
            p.grad.div_(s.sqrt().add_(1e-2))
        opt.step()


add("gradients preconditioned by their squares", _empirical_fisher)


def _two_optimizers(net: Any, opt: Any, batches: Any) -> None:
    """Matrices by one optimizer, vectors by another, with schedules of their own."""
    vectors = torch.optim.Adam([p for p in net.parameters() if p.dim() == 1], lr=0.01)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
        torch.optim.lr_scheduler.OneCycleLR(vectors, 0.02, 8),
    ]
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        vectors.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        vectors.step()
        for schedule in schedules:
            schedule.step()


def _matrices() -> Made:
    net, _, batches = classified()
    return net, torch.optim.SGD([p for p in net.parameters() if p.dim() > 1], lr=0.05, momentum=0.9), batches


add("matrices and vectors by two optimizers", _two_optimizers, _matrices)


# ---- counterfactual, fair, ranked


def _binary(count: int = 21) -> Made:
    return made(small_net(1), normal(count, 8), torch.randint(2, (count,)).double(), torch.randint(2, (count,)))


def _parity(net: Any, batch: Any) -> Tensor:
    """The difference of mean scores of two groups is punished."""
    x, y, group = batch
    out = net(x).squeeze(1)
    scores = out.sigmoid()
    gap = scores[group == 1].mean() - scores[group == 0].mean()
    return BCE(out, y) + gap.abs().nan_to_num()


def _soft_f1(net: Any, batch: Any) -> Tensor:
    x, y, _ = batch
    p = net(x).squeeze(1).sigmoid()
    tp, fp, fn = (p * y).sum(), (p * (1 - y)).sum(), ((1 - p) * y).sum()
    return 1 - 2 * tp / (2 * tp + fp + fn + 1e-8)


def _auc(net: Any, batch: Any) -> Tensor:
    """A hinge over all pairs of a positive and a negative."""
    x, y, _ = batch
    out = net(x).squeeze(1)
    pos, neg = out[y == 1], out[y == 0]
    if len(pos) == 0 or len(neg) == 0:
        return out.sum() * 0.0
    return F.relu(1 - (pos[:, None] - neg[None])).mean()


def _self_normalised(net: Any, batch: Any) -> Tensor:
    """Inverse propensities that are divided by their sum (SNIPS)."""
    x, reward, action = batch
    logp = F.logsigmoid(net(x).squeeze(1) * (2 * action.double() - 1))
    w = (logp - math.log(0.5)).exp()
    return -(w * reward).sum() / w.sum()


def _mmd(net: Any, batch: Any) -> Tensor:
    """Kernels between outputs and fixed points."""
    x, y, _ = batch
    z, prior = net(x), torch.linspace(-2, 2, 7, dtype=x.dtype)[:, None]
    k = lambda a, b: torch.exp(-(torch.cdist(a, b) ** 2)).mean()  # noqa: E731
    return k(z, z) + k(prior, prior) - 2 * k(z, prior) + BCE(z.squeeze(1), y)


def _sinkhorn(net: Any, batch: Any) -> Tensor:
    """Transport of outputs to fixed points by a few scalings."""
    z, points = net(batch[0]), torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    cost = torch.cdist(z, points) ** 2
    kernel, a, b = torch.exp(-cost), 1 / len(z), 1 / len(points)
    u = torch.full((len(z),), a, dtype=z.dtype)
    for _ in range(5):
        v = b / (kernel.t() @ u)
        u = a / (kernel @ v)
    return (u[:, None] * kernel * v[None] * cost).sum()


def _marginal_likelihood(net: Any, batch: Any) -> Tensor:
    """A Gaussian process over features of the batch."""
    x, y, _ = batch
    f = net(x)
    k = torch.exp(-(torch.cdist(f, f) ** 2)) + 0.5 * torch.eye(len(x), dtype=x.dtype)
    return -torch.distributions.MultivariateNormal(torch.zeros_like(y), k).log_prob(y) / len(x)


for _name, _loss in (
    ("loss: parity of groups", _parity), ("loss: soft F1", _soft_f1), ("loss: AUC by pairs", _auc),
    ("loss: propensities over their sum", _self_normalised), ("loss: discrepancy to a prior", _mmd),
    ("loss: transport to points", _sinkhorn), ("loss: a process over the batch", _marginal_likelihood),
):  # fmt: skip
    usual(_name, _loss, _binary)


def _dragon(net: Any, batch: Any) -> Tensor:
    """Two outcomes and a propensity: each sample's own outcome by its treatment, with targeted regularisation."""
    x, y, t = batch
    out, t = net(x), t.double()
    y0, y1, g = out[:, 0], out[:, 1], out[:, 2].sigmoid() * 0.98 + 0.01
    factual = ((1 - t) * (y - y0) ** 2 + t * (y - y1) ** 2).mean()
    eps = net.eps if hasattr(net, "eps") else 0.0
    h = t / g - (1 - t) / (1 - g)
    return factual + F.binary_cross_entropy(g, t) + 0.1 * ((y - (t * y1 + (1 - t) * y0 + eps * h)) ** 2).mean()


class Dragon(Named):
    """With a parameter that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))


def _treated() -> Made:
    return made(Dragon(), normal(21, 8), normal(21), torch.randint(2, (21,)))


usual("loss: treatment effects, a parameter of the loss", _dragon, _treated)


def _treatment_means(net: Any, batch: Any) -> Tensor:
    """Errors of each treatment are averaged by themselves (TARNet with weights of groups)."""
    x, y, t = batch
    out = net(x)
    loss = out.sum() * 0.0
    for k in range(2):
        if (t == k).any():
            loss = loss + MSE(out[t == k, k], y[t == k])
    return loss


usual("loss: a mean for each treatment", _treatment_means, _treated)


def _counts() -> Made:
    return made(
        small_net(2), normal(21, 8).abs(), torch.poisson(torch.full((21,), 3.0).double()), normal(21).abs() + 0.5
    )


def _zinb(net: Any, batch: Any) -> Tensor:
    """Counts with too many zeros, by the size of each sample."""
    x, y, size = batch
    out = net(x)
    mean, pi = F.softplus(out[:, 0]) * size, out[:, 1]
    zero = F.softplus(-pi + torch.log(torch.exp(-mean) + 1e-8)) - F.softplus(-pi)
    other = -F.softplus(-pi) - pi + y * torch.log(mean + 1e-8) - mean - torch.lgamma(y + 1)
    return -torch.where(y < 0.5, zero, other).mean()


usual("loss: counts with many zeros", _zinb, _counts)


def _tweedie(net: Any, batch: Any) -> Tensor:
    x, y, weight = batch
    mu = net(x)[:, 0].exp()
    return torch.sum(weight * (-y * mu**-0.5 / -0.5 + mu**0.5 / 0.5)) / torch.sum(weight)


usual("loss: Tweedie over exposure", _tweedie, _counts)


def _crps(net: Any, batch: Any) -> Tensor:
    x, y, _ = batch
    mean, scale = net(x)[:, 0], F.softplus(net(x)[:, 1]) + 1e-3
    z = (y - mean) / scale
    n = torch.distributions.Normal(torch.zeros((), dtype=z.dtype), torch.ones((), dtype=z.dtype))
    return (scale * (z * (2 * n.cdf(z) - 1) + 2 * n.log_prob(z).exp() - 1 / math.sqrt(math.pi))).mean()


usual("loss: CRPS, two calls", _crps, _counts)


# ---- scenes and fields


class Field(nn.Module):
    """Colour and density at points, with sines of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, points: Tensor) -> Tensor:
        encoded = torch.cat([f(points * 2**k) for k in range(2) for f in (torch.sin, torch.cos)], -1)
        return self.head(F.relu(self.second(F.relu(self.first(encoded)))))  # type: ignore[no-any-return]


def _rays() -> Made:
    return made(Field(), normal(21, 3), normal(21, 3), torch.rand(21, 3).double())


def _rendered(chunk: int) -> Callable[[Any, Any], Tensor]:
    def loss(net: Any, batch: Any) -> Tensor:
        """Points on each ray go through the model in pieces; colours are summed along rays."""
        origin, direction, colour = batch
        t = torch.linspace(0.1, 1, 4, dtype=origin.dtype)
        points = (origin[:, None] + direction[:, None] * t[:, None]).reshape(-1, 3)
        raw = torch.cat([net(points[i : i + chunk]) for i in range(0, len(points), chunk)]).view(-1, 4, 4)
        alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * 0.3)
        trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return MSE(((alpha * trans)[..., None] * raw[..., :3].sigmoid()).sum(1), colour)

    return loss


usual("rays rendered, points at once", _rendered(10_000), _rays)
usual("rays rendered, in pieces", _rendered(8), _rays)


def _eikonal(net: Any, batch: Any) -> Tensor:
    """A signed distance, with slopes of length one."""
    x = batch[0].clone().requires_grad_(True)
    d = net(x)[:, :1]
    slope = torch.autograd.grad(d.sum(), x, create_graph=True)[0]
    return d.abs().mean() + 0.1 * ((slope.norm(dim=1) - 1) ** 2).mean()


usual("a signed distance with slopes of one", _eikonal, _rays)


class Codes(nn.Module):
    """A code for each sample, trained with the decoder (DeepSDF)."""

    def __init__(self, count: int = 21) -> None:
        super().__init__()
        self.codes = nn.Embedding(count, 4)
        self.body = nn.Sequential(nn.Linear(11, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.codes(index)
        return self.body(torch.cat([code, x], 1)).squeeze(1), code


def _coded() -> Made:
    net = Codes().double()
    groups = [{"params": net.codes.parameters(), "lr": 0.1}, {"params": net.body.parameters()}]
    data = TensorDataset(torch.arange(21), normal(21, 7), normal(21))
    return net, torch.optim.Adam(groups, lr=0.01), DataLoader(data, 6, shuffle=True, generator=torch.Generator())


def _decoded(net: Any, batch: Any) -> Tensor:
    index, x, y = batch
    out, code = net(index, x)
    return (out.clamp(-0.5, 0.5) - y.clamp(-0.5, 0.5)).abs().mean() + 1e-2 * torch.mean(torch.norm(code, dim=1))


usual("a code for each sample", _decoded, _coded)


# ---- sequences


class Series(Dataset[Any]):
    """Sequences of several lengths."""

    def __init__(self, count: int = 21) -> None:
        draw = torch.Generator().manual_seed(5)
        self.rows = [torch.randn(2 + i * 5 % 4, 4, generator=draw, dtype=torch.float64) for i in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.rows[i], i % 3


def _longest_first(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    rows = sorted(rows, key=lambda r: -len(r[0]))
    lengths = torch.tensor([len(r[0]) for r in rows])
    return pad_sequence([r[0] for r in rows], batch_first=True), lengths, torch.tensor([r[1] for r in rows])


class Reader(nn.Module):
    """Packed sequences through a recurrent layer, with the mean over true steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8, batch_first=True, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.rnn(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=True))
        out, lens = pad_packed_sequence(out, batch_first=True)
        return self.head(out.sum(1) / lens[:, None])  # type: ignore[no-any-return]


def _series(collate: Any) -> Callable[[], Made]:
    def make() -> Made:
        net = Reader().double()
        return net, sgd(net), DataLoader(Series(), 6, collate_fn=collate, drop_last=False)

    return make


usual("packed sequences, longest first", lambda net, b: CE(net(b[0], b[1]), b[2]), _series(_longest_first))


class Tagger(nn.Module):
    """A class for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])  # type: ignore[no-any-return]


def _tagged() -> Made:
    net = Tagger().double()
    return net, sgd(net), DataLoader(Series(), 6, collate_fn=_longest_first)


def _masked_steps(net: Any, batch: Any) -> Tensor:
    """Only true steps count: they are selected by a mask, and averaged."""
    x, lengths, y = batch
    mask = torch.arange(x.size(1))[None] < lengths[:, None]
    out = net(x)
    labels = (y[:, None] + torch.arange(x.size(1))) % 3
    return CE(out[mask], labels[mask])


def _positions_by_where(net: Any, batch: Any) -> Tensor:
    """Positive and negative scores at places that are not padding (SASRec)."""
    x, lengths, _ = batch
    mask = torch.arange(x.size(1))[None] < lengths[:, None]
    places = torch.where(mask)
    out = net(x)
    pos, neg = out[..., 0], out[..., 1]
    return BCE(pos[places], torch.ones_like(pos)[places]) + BCE(neg[places], torch.zeros_like(neg)[places])


def _by_length_of_each(net: Any, batch: Any) -> Tensor:
    """The mean over steps of each sequence, then over sequences."""
    x, lengths, y = batch
    mask = (torch.arange(x.size(1))[None] < lengths[:, None]).double()
    labels = ((y[:, None] + torch.arange(x.size(1))) % 3).flatten()
    steps = CE(net(x).flatten(0, 1), labels, reduction="none").view_as(mask)
    return ((steps * mask).sum(1) / mask.sum(1)).mean()


usual("true steps selected by a mask", _masked_steps, _tagged)
usual("true steps by torch.where", _positions_by_where, _tagged)
usual("a mean for each sequence", _by_length_of_each, _tagged)


def _windows(net: Any, opt: Any, batches: Any) -> None:
    """Long sequences in windows, the state detached between them, one update for each (language models)."""
    for _ in range(2):
        for x, y in batches:
            state = None
            for t in range(0, x.size(1), 3):
                opt.zero_grad()
                out, state = net(x[:, t : t + 3], state)
                state = tuple(s.detach() for s in state)
                MSE(out, y[:, t : t + 3]).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.25)
                opt.step()


class Forecaster(nn.Module):
    """A recurrent layer whose state goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        out, state = self.rnn(x, state)
        return self.head(out), state


def _long() -> Made:
    return made(Forecaster(), normal(21, 9, 2), normal(21, 9, 2))


add("windows of sequences, the state goes along", _windows, _long)


def _with_state() -> Any:
    return torch.zeros(2, 1, 2).double(), (torch.zeros(1, 2, 8).double(), torch.zeros(1, 2, 8).double())


def _scheduled(net: Any, opt: Any, batches: Any) -> None:
    """The forecast of each step is fed into the next, by a coin of a generator with a fixed seed."""
    coin = random.Random(4)
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            state, last, loss = None, x[:, :1], 0.0
            for t in range(x.size(1)):
                out, state = net(last, state)
                loss = loss + MSE(out, y[:, t : t + 1])
                last = y[:, t : t + 1] if coin.random() < 0.5 else out
            (loss / x.size(1)).backward()
            opt.step()


add("forecasts fed back by a coin", _scheduled, _long)
add("forecasts fed back by a coin, said before", _scheduled, _long, example_input=_with_state())
add("forecasts fed back by a coin, even", _scheduled, lambda: made(Forecaster(), normal(24, 9, 2), normal(24, 9, 2)))


class Reversible(nn.Module):
    """Each series is normalised by itself, and its forecast set back (RevIN)."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
        self.mix = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True).detach()
        std = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
        z = (x - mean) / std * self.gain + self.shift
        out = self.mix(z.transpose(1, 2)).transpose(1, 2)
        return (out - self.shift) / (self.gain + 1e-8) * std + mean


usual("series normalised by themselves, set back", lambda net, b: MSE(net(b[0]), b[1][:, :3]),
      lambda: made(Reversible(), normal(21, 9, 2), normal(21, 9, 2)))  # fmt: skip


class Scan(nn.Module):
    """A selective state space in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.step, self.head = nn.Linear(2, 6), nn.Linear(2, 6), nn.Linear(6, 2)
        self.decay = nn.Parameter(-torch.arange(1.0, 7.0))

    def forward(self, x: Tensor) -> Tensor:
        delta, u = F.softplus(self.step(x)), self.into(x)
        h, out = torch.zeros(x.size(0), 6, dtype=x.dtype), []
        for t in range(x.size(1)):
            h = torch.exp(delta[:, t] * self.decay) * h + delta[:, t] * u[:, t]
            out.append(h)
        return self.head(torch.stack(out, 1))  # type: ignore[no-any-return]


usual(
    "a state space scanned",
    lambda net, b: MSE(net(b[0]), b[1]),
    lambda: made(Scan(), normal(21, 9, 2), normal(21, 9, 2)),
)


class Doubling(Dataset[Any]):
    """Words and contexts; each epoch draws other negatives when it is told to."""

    def __init__(self, count: int = 24) -> None:
        draw = torch.Generator().manual_seed(2)
        self.pairs = torch.randint(13, (count, 2), generator=draw)
        self.negatives = torch.zeros(count, 3, dtype=torch.long)

    def draw(self, seed: int) -> None:
        self.negatives = torch.randint(13, self.negatives.shape, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.pairs[i, 0], self.pairs[i, 1], self.negatives[i]


class SkipGram(nn.Module):
    """Two tables; the forward is the loss."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.u, self.v = nn.Embedding(13, 6, sparse=sparse), nn.Embedding(13, 6, sparse=sparse)

    def forward(self, u: Tensor, v: Tensor, neg: Tensor) -> Tensor:
        score = (self.u(u) * self.v(v)).sum(1).clamp(-10, 10)
        other = torch.bmm(self.v(neg), self.u(u).unsqueeze(2)).squeeze(2).clamp(-10, 10)
        return torch.mean(-F.logsigmoid(score) - F.logsigmoid(-other).sum(1))


def _skipgram(sparse: bool) -> Callable[[], Made]:
    def make() -> Made:
        net = SkipGram(sparse).double()
        kind: Any = torch.optim.SparseAdam if sparse else torch.optim.Adagrad
        return net, kind(list(net.parameters()), lr=0.05), DataLoader(Doubling(), 7)

    return make


def _negatives(net: Any, opt: Any, batches: Any) -> None:
    """Negatives are drawn anew in front of each epoch, by a method of the data set."""
    for epoch in range(2):
        batches.dataset.draw(epoch)
        for u, v, neg in batches:
            opt.zero_grad()
            loss = net(u, v, neg)
            loss.backward()
            opt.step()


add("words in context, the loss is the model", _negatives, _skipgram(False))
add("words in context, sparse", _negatives, _skipgram(True))


# ---- self-supervised


class Pair(nn.Module):
    """A backbone and a predictor."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.predictor = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        za, zb = self.backbone(a), self.backbone(b)
        return self.predictor(za), self.predictor(zb), za.detach(), zb.detach()


def _views(net: Callable[[], nn.Module]) -> Callable[[], Made]:
    return lambda: made(net(), normal(21, 8), normal(21, 8))


def _simsiam(net: Any, batch: Any) -> Tensor:
    pa, pb, za, zb = net(*batch)
    criterion = nn.CosineSimilarity(dim=1)
    return -(criterion(pa, zb).mean() + criterion(pb, za).mean()) * 0.5


usual("siamese pairs", _simsiam, _views(Pair))


def _byol(net: Any, opt: Any, batches: Any) -> None:
    """The target is a copy outside of the model, moved by hand after each step, its momentum by a cosine."""
    target = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
    target.load_state_dict(net.backbone.state_dict())
    total, k = 2 * len(batches), 0
    for _ in range(2):
        for a, b in batches:
            opt.zero_grad()
            pa, pb, _, _ = net(a, b)
            with torch.no_grad():
                ta, tb = target(a), target(b)
            loss = 2 - F.cosine_similarity(pa, tb).mean() - F.cosine_similarity(pb, ta).mean()
            loss.backward()
            opt.step()
            m = 1 - 0.1 * (math.cos(math.pi * k / total) + 1) / 2
            k += 1
            for q, t in zip(net.backbone.parameters(), target.parameters(), strict=True):
                t.data = t.data * m + q.data * (1 - m)


add("a target moved by hand", _byol, _views(Pair))


class Encoder(nn.Module):
    """Features of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.body(x), dim=1)


def _moco(net: Any, opt: Any, batches: Any) -> None:
    """A queue outside of the model, that each step's keys enter, with a pointer."""
    key = Encoder().double()
    key.load_state_dict(net.state_dict())
    queue, at = F.normalize(torch.ones(4, 12).double().cumsum(1).sin(), dim=0), 0
    for a, b in itertools.chain(batches, batches):
        opt.zero_grad()
        q = net(a)
        with torch.no_grad():
            for p, k in zip(net.parameters(), key.parameters(), strict=True):
                k.mul_(0.9).add_(p, alpha=0.1)
            keys = key(b)
        logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ queue], 1) / 0.2
        CE(logits, torch.zeros(len(a), dtype=torch.long)).backward()
        opt.step()
        for i in range(len(keys)):
            queue[:, (at + i) % 12] = keys[i]
        at = (at + len(keys)) % 12


add("a queue with a pointer outside of the model", _moco, _views(Encoder))


def _bank(net: Any, opt: Any, batches: Any) -> None:
    """A bank with a feature for each sample, by its number; negatives are drawn by a generator of one seed."""
    bank = F.normalize(torch.ones(21, 4).double().cumsum(0).cos(), dim=1)
    draw = torch.Generator().manual_seed(1)
    for x, index in itertools.chain(batches, batches):
        opt.zero_grad()
        z = net(x)
        others = bank[torch.randint(21, (8,), generator=draw)]
        logits = torch.cat([(z * bank[index]).sum(1, keepdim=True), z @ others.t()], 1) / 0.3
        CE(logits, torch.zeros(len(x), dtype=torch.long)).backward()
        opt.step()
        bank[index] = F.normalize(0.5 * bank[index] + 0.5 * z.detach(), dim=1)


add("a bank by number, few negatives", _bank, lambda: made(Encoder(), normal(21, 8), torch.arange(21)))


def _rotated(net: Any, batch: Any) -> Tensor:
    """Four versions of each sample in one call, with their numbers as labels."""
    x, _ = batch
    versions = torch.cat([torch.roll(x, k, 1) for k in range(3)])
    labels = torch.arange(3).repeat_interleave(len(x))
    return CE(net(versions), labels)


usual("versions of each sample in one call", _rotated)


class Masked(nn.Module):
    """A learned token takes the place of those that a mask hides."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.into, self.mix, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        w = mask.unsqueeze(-1).type_as(self.token)
        x = x * (1 - w) + self.token.expand(x.size(0), x.size(1), -1) * w
        h = self.into(x)
        return self.head(F.gelu(self.mix(h) + h.mean(1, keepdim=True)))  # type: ignore[no-any-return]


def _hidden_rebuilt(net: Any, batch: Any) -> Tensor:
    """The error counts where it was hidden, divided by how much was (SimMIM, MAE)."""
    x, mask = batch
    loss = ((net(x, mask) - x) ** 2).mean(-1)
    return (loss * mask).sum() / (mask.sum() + 1e-5)


usual("hidden tokens rebuilt, over how many were hidden", _hidden_rebuilt,
      lambda: made(Masked(), normal(21, 6, 4), (torch.rand(21, 6) < 0.4).double()))  # fmt: skip


def _data2vec(net: Any, opt: Any, batches: Any) -> None:
    """Targets are a teacher's answers, normalised over the batch and places."""
    teacher = Masked().double()
    teacher.load_state_dict(net.state_dict())
    for x, mask in itertools.chain(batches, batches):
        with torch.no_grad():
            y = teacher(x, torch.zeros_like(mask))
            y = F.layer_norm(y, y.shape[-1:])
        opt.zero_grad()
        out = net(x, mask)
        chosen = mask.bool()
        F.smooth_l1_loss(out[chosen], y[chosen], beta=0.5).backward()
        opt.step()
        with torch.no_grad():
            for p, t in zip(net.parameters(), teacher.parameters(), strict=True):
                t.lerp_(p, 0.05)


add("a teacher's answers where it was hidden", _data2vec,
    lambda: made(Masked(), normal(21, 6, 4), (torch.rand(21, 6) < 0.4).double()))  # fmt: skip


# ---- several losses, several loaders


def _fixmatch(net: Any, opt: Any, batches: Any) -> None:
    """Few labelled samples beside the loader's: both in one call, a confident answer is a label, a ratio of means."""
    xl, yl = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8), torch.arange(4) % 3
    for weak, strong in itertools.chain(batches, batches):
        opt.zero_grad()
        out_l = net(xl)
        with torch.no_grad():
            probs = net(weak).softmax(1)
            confidence, label = probs.max(1)
            mask = confidence.ge(0.34).double()
        unlabelled = (CE(net(strong), label, reduction="none") * mask).mean()
        (CE(out_l, yl) + unlabelled).backward()
        opt.step()


add("confident answers beside labelled samples", _fixmatch, lambda: made(small_net(), normal(21, 8), normal(21, 8)))


def _zipped(net: Any, opt: Any, batches: Any) -> None:
    """A labelled loader of the loop's own is cycled beside the loader."""
    labelled = DataLoader(TensorDataset(torch.linspace(-1, 1, 80).double().view(10, 8), torch.arange(10) % 3), 4)
    for _ in range(2):
        for (x, y), (xl, yl) in zip(batches, itertools.cycle(labelled), strict=False):
            opt.zero_grad()
            (CE(net(x), y) + 0.5 * CE(net(xl), yl)).backward()
            opt.step()


add("two loaders, one cycled", _zipped)


def _without_forgetting(net: Any, opt: Any, batches: Any) -> None:
    """Answers of the old model hold the new one, at a temperature (LwF)."""
    old = None
    for epoch in range(3):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            loss = CE(out, y)
            if old is not None:
                with torch.no_grad():
                    before = old(x)
                loss = loss + 4 * F.kl_div(F.log_softmax(out / 2, 1), F.softmax(before / 2, 1), reduction="batchmean")
            loss.backward()
            opt.step()
        if epoch == 0:
            old = small_net().double()
            old.load_state_dict(net.state_dict())
            old.requires_grad_(False).eval()


add("held by its own old answers", _without_forgetting)


class Shared(nn.Module):
    """Two tasks over one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 3), "b": nn.Linear(16, 1)})
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}


def _uncertain(net: Any, batch: Any) -> Tensor:
    x, y, z = batch
    out = net(x)
    losses = {"a": CE(out["a"], y), "b": MSE(out["b"].squeeze(1), z)}
    return sum(torch.exp(-net.log_vars[i]) * loss + net.log_vars[i] for i, loss in enumerate(losses.values()))  # type: ignore[return-value]


def _tasks() -> Made:
    return made(Shared(), normal(21, 8), torch.randint(3, (21,)), normal(21))


usual("tasks weighed by uncertainty", _uncertain, _tasks)


def _weight_average(net: Any, opt: Any, batches: Any) -> None:
    """Weights of tasks by how their losses fell in the last two epochs (DWA)."""
    history: list[list[float]] = []
    for _ in range(4):
        weights = [1.0, 1.0]
        if len(history) > 1:
            w = [history[-1][i] / history[-2][i] for i in range(2)]
            e = [math.exp(v / 2) for v in w]
            weights = [2 * v / sum(e) for v in e]
        sums = [0.0, 0.0]
        for x, y, z in batches:
            opt.zero_grad()
            out = net(x)
            losses = [CE(out["a"], y), MSE(out["b"].squeeze(1), z)]
            (weights[0] * losses[0] + weights[1] * losses[1]).backward()
            opt.step()
            sums = [s + loss.item() for s, loss in zip(sums, losses, strict=True)]
        history.append(sums)


add("tasks weighed by the fall of their losses", _weight_average, _tasks)


def _alternating_tasks(net: Any, opt: Any, batches: Any) -> None:
    """One task a batch, in turn: the other head has no gradient."""
    for k, (x, y, z) in enumerate(itertools.chain(batches, batches)):
        opt.zero_grad(set_to_none=True)
        out = net(x)
        (CE(out["a"], y) if k % 2 else MSE(out["b"].squeeze(1), z)).backward()
        opt.step()


add("tasks in turn", _alternating_tasks, _tasks)


class Deep(nn.Module):
    """Answers at several depths, the first ones only in training (deep supervision)."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.outs = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        answers = []
        for stage, out in zip(self.stages, self.outs, strict=True):
            x = F.relu(stage(x)) + x
            answers.append(out(x))
        return answers if self.training else answers[-1]


def _deep(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        net.train()
        for x, y in batches:
            opt.zero_grad()
            losses = [CE(out, y) for out in net(x)]
            sum(w * loss for w, loss in zip((0.2, 0.3, 1.0), losses, strict=True)).backward()  # type: ignore[union-attr]
            opt.step()
        net.eval()
        with torch.no_grad():
            assert net(torch.ones(2, 8).double()).shape == (2, 3)


add("answers at depths in training", _deep, lambda: classified(Deep))


def _hard_pixels(net: Any, batch: Any) -> Tensor:
    """The hardest pixels of the batch count: those above a threshold, at least so many (OHEM)."""
    x, y = batch
    loss = CE(net(x), y, reduction="none").view(-1)
    loss = torch.sort(loss, descending=True)[0]
    kept = len(loss) // 4
    loss = loss[loss > loss[kept]] if loss[kept] > 1.0 else loss[:kept]
    return loss.mean() if len(loss) else loss.sum()


def _pixels() -> Made:
    net = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    return made(net, normal(21, 2, 4, 4), torch.randint(3, (21, 4, 4)))


usual("the hardest pixels of the batch", _hard_pixels, _pixels)


def _centres(net: Any, batch: Any) -> Tensor:
    """A focal loss of heat maps, divided by the number of peaks of the batch (CenterNet)."""
    x, y = batch
    heat = net(x).sigmoid().clamp(1e-4, 1 - 1e-4)[:, 0]
    peak = (y == 0).double()
    near = (1 - peak) * (y == 1).double() * 0.5
    pos = (torch.log(heat) * (1 - heat) ** 2 * peak).sum()
    neg = (torch.log(1 - heat) * heat**2 * (1 - near) ** 4 * (1 - peak)).sum()
    peaks = peak.sum()
    return -neg if peaks == 0 else -(pos + neg) / peaks


usual("heat maps over the number of peaks", _centres, _pixels)


def _dice_and_ce(net: Any, batch: Any) -> Tensor:
    """Dice over all pixels of each sample and class, and cross-entropy with weights."""
    x, y = batch
    out = net(x)
    p, t = out.softmax(1), F.one_hot(y, 3).permute(0, 3, 1, 2).to(out.dtype)
    inter, union = (p * t).sum((2, 3)), (p + t).sum((2, 3))
    weight = torch.tensor([0.2, 1.0, 2.0], dtype=out.dtype)
    return CE(out, y, weight=weight, label_smoothing=0.1) + 1 - ((2 * inter + 1) / (union + 1)).mean()


usual("Dice by sample, weighted entropy", _dice_and_ce, _pixels)


def _boundary(net: Any, batch: Any) -> Tensor:
    """Perceptual: Gram matrices of features, of each sample."""
    x, _ = batch
    f = net(x).flatten(2)
    gram = f @ f.transpose(1, 2) / f.shape[1] / f.shape[2]
    style = torch.eye(3, dtype=x.dtype)
    return MSE(gram, style.expand(x.size(0), 3, 3)) + 1e-3 * (net(x)[..., 1:] - net(x)[..., :-1]).abs().sum()


usual("Gram matrices, and total variation summed", _boundary, _pixels)


# ---- norms in training


class Normed(nn.Module):
    """BatchNorm between layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 12), nn.BatchNorm1d(12, **options), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def _frozen_from_epoch(net: Any, opt: Any, batches: Any) -> None:
    """Statistics are frozen from the second epoch on."""
    for epoch in range(3):
        net.train()
        if epoch:
            for m in net.modules():
                if isinstance(m, nn.BatchNorm1d):
                    m.eval()
        for x, y in batches:
            one_step(net, opt, x, y)


add("statistics frozen from an epoch on", _frozen_from_epoch, lambda: classified(Normed), batch_norm="exact")


def _precise(net: Any, opt: Any, batches: Any) -> None:
    """Statistics are computed anew over all batches, without gradients, behind training (update_bn)."""
    for _ in range(2):
        net.train()
        for x, y in batches:
            one_step(net, opt, x, y)
    torch.optim.swa_utils.update_bn(batches, net)


add("statistics anew by update_bn", _precise, lambda: classified(Normed), batch_norm="exact")


def _swa(net: Any, opt: Any, batches: Any) -> None:
    """Averaged weights by hand and SWALR, put in at the end."""
    swalr = torch.optim.swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=2)
    mean, count = None, 0
    for epoch in range(4):
        for x, y in batches:
            one_step(net, opt, x, y)
        if epoch >= 1:
            now = [p.detach().clone() for p in net.parameters()]
            mean = now if mean is None else [m + (p - m) / (count + 1) for m, p in zip(mean, now, strict=True)]
            count += 1
            swalr.step()
    with torch.no_grad():
        for p, m in zip(net.parameters(), mean or [], strict=True):
            p.copy_(m)


add("averaged by SWALR, put in", _swa)


class Renorm(nn.Module):
    """Batch renormalisation: corrections by running statistics, which forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 12), nn.Linear(12, 3)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("std", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            m, s = h.mean(0), h.std(0, unbiased=False) + 1e-5
            r = (s.detach() / self.std).clamp(1 / 3, 3)
            d = ((m.detach() - self.mean) / self.std).clamp(-5, 5)
            h = (h - m) / s * r + d
            self.mean += 0.1 * (m.detach() - self.mean)
            self.std += 0.1 * (s.detach() - self.std)
        else:
            h = (h - self.mean) / self.std
        return self.head(F.relu(h))  # type: ignore[no-any-return]


usual("batch renormalisation", lambda net, b: CE(net(b[0]), b[1]), lambda: classified(Renorm))


# ---- data


class Repeated(Sampler[Any]):
    """A sampler that never ends, so that workers live on (timm's loader)."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader[Any]):
    """A loader whose iterator is kept over epochs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeated(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


def _multi() -> Made:
    net = small_net().double()
    return net, sgd(net), MultiEpochs(TensorDataset(normal(21, 8), torch.randint(3, (21,))), 6)


add("data: a loader that keeps its iterator", _steps, _multi)


class Prefetcher:
    """Wraps a loader and reads one batch ahead (apex)."""

    def __init__(self, loader: Any) -> None:
        self.loader = iter(loader)
        self.preload()

    def preload(self) -> None:
        try:
            self.x, self.y = next(self.loader)
        except StopIteration:
            self.x = self.y = None
            return
        self.x = (self.x - 0.1) / 1.1

    def next(self) -> Any:
        x, y = self.x, self.y
        if x is not None:
            self.preload()
        return x, y


def _prefetched(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        prefetcher = Prefetcher(batches)
        x, y = prefetcher.next()
        while x is not None:
            one_step(net, opt, x, y)
            x, y = prefetcher.next()


add("data: a prefetcher", _prefetched)


def _sliced(net: Any, opt: Any, batches: Any) -> None:
    """So many steps an epoch, by islice."""
    for _ in range(3):
        for _, (x, y) in enumerate(itertools.islice(batches, 2), start=1):
            one_step(net, opt, x, y)


add("data: so many steps an epoch", _sliced)


def _transform_changes() -> Made:
    class Scaled(Dataset[Any]):
        scale = 1.0

        def __init__(self) -> None:
            self.x, self.y = normal(21, 8), torch.randint(3, (21,))

        def __len__(self) -> int:
            return 21

        def __getitem__(self, i: int) -> Any:
            return self.x[i] * self.scale, self.y[i]

    net = small_net().double()
    return net, sgd(net), DataLoader(Scaled(), 6, shuffle=True)


def _progressive(net: Any, opt: Any, batches: Any) -> None:
    """The data set's transform is another one in each epoch."""
    for epoch in range(3):
        batches.dataset.scale = 0.5 + 0.25 * epoch
        for x, y in batches:
            one_step(net, opt, x, y)


add("data: a transform by epoch, shuffled", _progressive, _transform_changes)


def _curriculum(net: Any, opt: Any, batches: Any) -> None:
    """Loaders of growing size over the easy part of the data set, made in the loop."""
    data = batches.dataset
    for epoch in range(3):
        some = DataLoader(torch.utils.data.Subset(data, range(9 + 6 * epoch)), batch_size=3 + 3 * epoch)
        for x, y in some:
            one_step(net, opt, x, y)


add("data: loaders over growing parts", _curriculum)


def _indices_split() -> Made:
    net = small_net().double()
    data = TensorDataset(normal(30, 8), torch.randint(3, (30,)))
    order = np.random.permutation(30).tolist()
    return net, sgd(net), DataLoader(data, 6, sampler=SubsetRandomSampler(order[:21]))


add("data: a random part by SubsetRandomSampler", _steps, _indices_split)


def _sampler_drops() -> Made:
    net = small_net().double()
    data = TensorDataset(normal(22, 8), torch.randint(3, (22,)))
    return net, sgd(net), DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 6, drop_last=True))


add("data: batches of a sampler, last left out", _steps, _sampler_drops)


class Chunks(IterableDataset[Any]):
    """A stream in chunks, shuffled in a buffer by a seed of the epoch."""

    def __init__(self, count: int = 22) -> None:
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=draw, dtype=torch.float64)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order, buffer = random.Random(self.epoch), list[int]()
        for i in range(len(self.x)):
            buffer.append(i)
            if len(buffer) > 5:
                k = buffer.pop(order.randrange(len(buffer)))
                yield self.x[k], k % 3
        for k in buffer:
            yield self.x[k], k % 3


def _streamed(workers: int) -> Callable[[], Made]:
    def make() -> Made:
        net = small_net().double()
        return net, sgd(net), DataLoader(Chunks(), 6, num_workers=workers)

    return make


def _by_epoch(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(2):
        batches.dataset.set_epoch(epoch)
        for x, y in batches:
            one_step(net, opt, x, y)


add("data: a stream shuffled in a buffer", _by_epoch, _streamed(0))
add("data: a stream shuffled in a buffer, a worker", _by_epoch, _streamed(1))


# ---- graphs


class Graph(nn.Module):
    """Two layers of a graph network; edges come with the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for k, layer in enumerate((self.first, self.second)):
            h = layer(x)
            x = h.index_add(0, edges[1], h[edges[0]]) / 2
            x = x if k else F.relu(x)
        return x


def _whole_graph() -> Made:
    x, edges = normal(20, 8), torch.randint(20, (2, 50))
    y, seen = torch.randint(3, (20,)), torch.rand(20) < 0.6
    net = Graph().double()
    return net, sgd(net), [(x, edges, y, seen)]


usual("one graph, its seen nodes", lambda net, b: CE(net(b[0], b[1])[b[3]], b[2][b[3]]), _whole_graph, 4)


class Pooled(nn.Module):
    """Dense graphs: adjacency and features of each, pooled over true nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor) -> Tensor:
        h = F.relu(adj @ self.first(x)) * mask.unsqueeze(-1)
        return self.head(h.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))  # type: ignore[no-any-return]


usual("dense graphs, pooled", lambda net, b: CE(net(b[0], b[1], b[2]), b[3]),
      lambda: made(Pooled(), normal(21, 5, 4), (torch.rand(21, 5, 5) < 0.4).double(),
                   (torch.rand(21, 5) < 0.7).double(), torch.randint(3, (21,))))  # fmt: skip


# ---- reinforcement


def _policy(net: Any, opt: Any, _batches: Any) -> None:
    """Actions are drawn by a generator of one seed in episodes that the loop plays; returns are normalised."""
    draw = torch.Generator().manual_seed(9)
    for episode in range(6):
        state = torch.ones(8, dtype=torch.float64) * (episode + 1) / 6
        logps, rewards = [], []
        for _ in range(4):
            logits = net(state[None])[0]
            action = torch.multinomial(logits.detach().softmax(0), 1, generator=draw)
            logps.append(F.log_softmax(logits, 0)[action])
            state = state.roll(1) * 0.9 + 0.1 * action
            rewards.append(float(state[0]) - 0.1 * float(action))
        returns, total = [], 0.0
        for r in reversed(rewards):
            total = r + 0.9 * total
            returns.insert(0, total)
        goal = torch.tensor(returns, dtype=torch.float64)
        goal = (goal - goal.mean()) / (goal.std() + 1e-6)
        opt.zero_grad()
        torch.cat([-lp * g for lp, g in zip(logps, goal, strict=True)]).sum().backward()
        opt.step()


add("episodes played in the loop", _policy)


class ActorCritic(nn.Module):
    """A policy and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pi, self.v = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.pi(h), self.v(h).squeeze(-1)


def _rollout() -> Made:
    return made(ActorCritic(), normal(24, 8), torch.randint(3, (24,)), normal(24) - 1.1, normal(24), normal(24))


def _ppo(net: Any, opt: Any, batches: Any) -> None:
    """Minibatches of a rollout through the loader, advantages normalised in each, an entropy bonus, a clipped value,
    and an early stop by the divergence (CleanRL)."""
    for _ in range(3):
        kls = []
        for x, action, old_logp, advantage, target in batches:
            opt.zero_grad()
            logits, value = net(x)
            dist = torch.distributions.Categorical(logits=logits)
            ratio = (dist.log_prob(action) - old_logp).exp()
            with torch.no_grad():
                kls.append(((ratio - 1) - ratio.log()).mean().item())
            a = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean()
            (policy - 0.01 * dist.entropy().mean() + 0.5 * ((value - target) ** 2).mean()).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
        if np.mean(kls) > 10:
            break


add("clipped policy, advantages of each minibatch", _ppo, _rollout)


def _ppo_normalised_before(net: Any, opt: Any, batches: Any) -> None:
    """Advantages are normalised over the whole rollout before the loader is made: only the mean remains."""
    for x, action, old_logp, a, target in itertools.chain(batches, batches):
        opt.zero_grad()
        logits, value = net(x)
        logp = F.log_softmax(logits, 1).gather(1, action[:, None]).squeeze(1)
        ratio = (logp - old_logp).exp()
        (-(torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)).mean() + F.smooth_l1_loss(value, target)).backward()
        opt.step()


add("clipped policy, advantages normalised before", _ppo_normalised_before, _rollout)


def _delayed(net: Any, opt: Any, batches: Any) -> None:
    """Twin critics against a slow target; the policy every second batch (TD3), noise by a generator of one seed."""
    target = Twins().double()
    target.load_state_dict(net.state_dict())
    for k, (s, a, r, s2) in enumerate(itertools.chain(batches, batches)):
        with torch.no_grad():
            a2 = target.actor(s2).clamp(-1, 1)
            goal = r + 0.9 * torch.min(*target.values(s2, a2))
        opt.zero_grad()
        one, two = net(s, a, "values")
        loss = MSE(one, goal) + MSE(two, goal)
        if k % 2:
            loss = loss - 0.1 * net(s, None, "actor").mean()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p, t in zip(net.parameters(), target.parameters(), strict=True):
                t.lerp_(p, 0.05)


class Twins(nn.Module):
    """An actor and two critics, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.actor_net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2), nn.Tanh())
        self.one, self.two = nn.Linear(10, 1), nn.Linear(10, 1)

    def actor(self, s: Tensor) -> Tensor:
        return self.actor_net(s)  # type: ignore[no-any-return]

    def values(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([s, a], 1)
        return self.one(both).squeeze(1), self.two(both).squeeze(1)

    def forward(self, s: Tensor, a: Tensor | None, what: str) -> Any:
        return self.values(s, a) if a is not None and what == "values" else self.actor(s)


add("twin critics, a late actor", _delayed,
    lambda: made(Twins(), normal(21, 8), normal(21, 2), normal(21), normal(21, 8)),
    example_input=(torch.zeros(2, 8).double(), torch.zeros(2, 2).double(), "values"))  # fmt: skip


# ---- language models


class Prompted(nn.Module):
    """Learned tokens in front of each sample, the rest frozen (prompt tuning)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.requires_grad_(False)
        self.prompt = nn.Parameter(torch.linspace(-1, 1, 16).view(2, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.cat([self.prompt.expand(len(tokens), -1, -1), self.table(tokens)], 1)
        h = h + torch.tanh(self.mix(h)).mean(1, keepdim=True)
        return self.head(h)[:, 2:]  # type: ignore[no-any-return]


def _trained_only(net: Callable[[], nn.Module]) -> Callable[[], Made]:
    def make() -> Made:
        model = net().double()
        tokens = torch.randint(11, (21, 6))
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, lr=0.05), DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 6)

    return make


def _next_word(net: Any, batch: Any) -> Tensor:
    return CE(net(batch[0]).flatten(0, 1), batch[1].flatten())


usual("learned tokens in front of a frozen model", _next_word, _trained_only(Prompted))


def _z_loss(net: Any, batch: Any) -> Tensor:
    """The log of the normaliser is held near zero, over tokens that count."""
    logits, y = net(batch[0]), batch[1]
    z = torch.logsumexp(logits, -1)
    mask = (y != 0).double()
    per_token = CE(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(mask)
    return ((per_token + 1e-2 * z**2) * mask).sum() / mask.sum()


usual("a penalty on the normaliser, over tokens", _z_loss, _texts)


class Several(nn.Module):
    """Heads for the next words (multi-token prediction)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.heads = nn.Embedding(11, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> list[Tensor]:
        h = self.table(tokens)
        return [self.out(torch.tanh(head(h))) for head in self.heads]


def _multi_token(net: Any, batch: Any) -> Tensor:
    x, y = batch
    losses = []
    for k, logits in enumerate(net(x)):
        keep = y.size(1) - k
        losses.append(CE(logits[:, :keep].flatten(0, 1), y[:, k:].flatten(), ignore_index=0))
    return torch.stack(losses).mean()


def _several() -> Made:
    tokens = torch.randint(11, (21, 6))
    return made(Several(), tokens[:, :-1], tokens[:, 1:])


usual("two words ahead, tied", _multi_token, _several)


def _reward_model(net: Any, batch: Any) -> Tensor:
    """Scores of the last true word of two answers (reward models)."""
    chosen, rejected = batch
    both = net(torch.cat([chosen, rejected]))[:, -1, 0]
    good, bad = both.chunk(2)
    return -F.logsigmoid(good - bad).mean() + 0.01 * ((good + bad) ** 2).mean()


usual("rewards of two answers, one call", _reward_model, _texts)


def _grown(net: Any, opt: Any, batches: Any) -> None:
    """Answers are sampled until each has ended, then learned from (expert iteration, greedy)."""
    for x, _ in itertools.chain(batches, batches):
        seen = x[:, :2]
        with torch.no_grad():
            while seen.size(1) < 8 and not bool((seen == 0).any(1).all()):
                seen = torch.cat([seen, net(seen)[:, -1].argmax(-1, keepdim=True)], 1)
        opt.zero_grad()
        CE(net(seen[:, :-1]).flatten(0, 1), seen[:, 1:].flatten()).backward()
        opt.step()


add("decoded until each has ended, then learned", _grown, _texts)


def _decoded_in_eval(net: Any, opt: Any, batches: Any) -> None:
    """After each epoch a few words are decoded until each has ended, from samples of the loop's own."""
    start = torch.tensor([[1], [4], [7]])
    for _ in range(2):
        net.train()
        for x, y in batches:
            opt.zero_grad()
            _next_word(net, (x, y)).backward()
            opt.step()
        net.eval()
        seen = start
        with torch.no_grad():
            while seen.size(1) < 9 and not bool((seen == 0).any(1).all()):
                seen = torch.cat([seen, net(seen)[:, -1].argmax(-1, keepdim=True)], 1)


add("decoded between epochs", _decoded_in_eval, _texts)


def _decoded_of_loader(net: Any, opt: Any, batches: Any) -> None:
    """After each epoch answers to the loader's samples are decoded until each has ended."""
    for _ in range(2):
        net.train()
        for x, y in batches:
            opt.zero_grad()
            _next_word(net, (x, y)).backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            for x, _ in batches:
                seen = x[:, :1]
                while seen.size(1) < 9 and not bool((seen == 0).any(1).all()):
                    seen = torch.cat([seen, net(seen)[:, -1].argmax(-1, keepdim=True)], 1)


add("decoded over the loader in evaluation", _decoded_of_loader, _texts)


# ---- odds and ends


def _compiled_step(net: Any, opt: Any, batches: Any) -> None:
    """A step in a function, with a counter in a closure and the rate in a table."""
    rates, state = {0: 0.05, 1: 0.01}, {"step": 0}

    def train_step(x: Tensor, y: Tensor) -> dict[str, float]:
        opt.zero_grad()
        out = net(x)
        loss = CE(out, y)
        loss.backward()
        opt.step()
        state["step"] += 1
        return {"loss": loss.item(), "acc": (out.argmax(1) == y).double().mean().item()}

    for epoch in range(2):
        for group in opt.param_groups:
            group["lr"] = rates[epoch]
        logs = [train_step(x, y) for x, y in batches]
        {k: sum(log[k] for log in logs) / len(logs) for k in logs[0]}


add("script: a step in a function, logs averaged", _compiled_step)


def _seeds_by_epoch(net: Any, opt: Any, batches: Any) -> None:
    """The seed is set by hand in front of each epoch, the order follows."""
    for epoch in range(2):
        torch.manual_seed(100 + epoch)
        np.random.seed(epoch)
        random.seed(epoch)
        for x, y in batches:
            one_step(net, opt, x, y)


add("script: seeds set by epoch, shuffled", _seeds_by_epoch, lambda: classified(shuffle=True))


def _mixed_by_seed(net: Any, opt: Any, batches: Any) -> None:
    """Samples are mixed with others of the batch, by a permutation of a generator of one seed (mixup, manual)."""
    draw = torch.Generator().manual_seed(5)
    for x, y in itertools.chain(batches, batches):
        order, lam = torch.randperm(x.size(0), generator=draw), 0.7
        opt.zero_grad()
        out = net(lam * x + (1 - lam) * x[order])
        (lam * CE(out, y) + (1 - lam) * CE(out, y[order])).backward()
        opt.step()


add("mixed by a generator of one seed", _mixed_by_seed)


def _noise_on_labels(net: Any, opt: Any, batches: Any) -> None:
    """One-hot labels are smoothed by hand and scattered."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        target = torch.full((x.size(0), 3), 0.05, dtype=x.dtype)
        target.scatter_(1, y.unsqueeze(1), 0.9)
        torch.mean(torch.sum(-target * F.log_softmax(net(x), -1), dim=-1)).backward()
        opt.step()


add("labels scattered by hand", _noise_on_labels)


def _distilled_by_layers(net: Any, opt: Any, batches: Any) -> None:
    """A frozen teacher with hooks on its layers; a regression of features through a layer outside of the model."""
    teacher = Named().double()
    teacher.requires_grad_(False)
    kept: dict[str, Tensor] = {}
    teacher.second.register_forward_hook(lambda _m, _i, out: kept.__setitem__("t", out))
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        out = net(x)
        with torch.no_grad():
            teacher(x)
        hint = MSE(out, kept["t"][:, :3])
        (CE(out, y) + 0.5 * hint).backward()
        opt.step()


add("a teacher with hooks", _distilled_by_layers)


def _unfrozen_in_groups(net: Any, opt: Any, batches: Any) -> None:
    """The head first, then layers from above with lower rates, added as groups (gradual unfreezing)."""
    for epoch, name in enumerate(("", "second", "first")):
        if name:
            layer = getattr(net, name)
            layer.requires_grad_(True)
            opt.add_param_group({"params": layer.parameters(), "lr": 0.05 / 2**epoch})
        for x, y in batches:
            one_step(net, opt, x, y)


def _head_only() -> Made:
    net, _, batches = classified(Named)
    net.requires_grad_(False)
    net.head.requires_grad_(True)  # type: ignore[union-attr]
    return net, torch.optim.SGD(net.head.parameters(), lr=0.05, momentum=0.9), batches  # type: ignore[union-attr]


add("layers unfrozen in groups", _unfrozen_in_groups, _head_only)


def _accumulated_by_tokens(net: Any, opt: Any, batches: Any) -> None:
    """Sums of several batches are divided by the tokens of all of them before the update."""
    for _ in range(2):
        opt.zero_grad()
        tokens = 0
        for k, (x, y) in enumerate(batches):
            F.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=0, reduction="sum").backward()
            tokens += int((y != 0).sum())
            if k % 2 == 1 or k + 1 == len(batches):
                for p in net.parameters():
                    p.grad /= tokens
                opt.step()
                opt.zero_grad()
                tokens = 0


add("sums of batches over their tokens", _accumulated_by_tokens, _texts)


def _remainder(net: Any, opt: Any, batches: Any) -> None:
    """Accumulation of three, the rest divided by what it has (timm)."""
    size, each = len(batches), 3
    for _ in range(2):
        opt.zero_grad()
        rest = size % each
        for i, (x, y) in enumerate(batches):
            last = i >= size - rest
            need = (i + 1) % each == 0 or i + 1 == size
            (CE(net(x), y) / (rest if last else each)).backward()
            if need:
                opt.step()
                opt.zero_grad()


add("accumulation, the rest by what it has", _remainder, lambda: classified(count=27))


def _r_drop(net: Any, opt: Any, batches: Any) -> None:
    """Two calls in one, answers held together by a symmetric divergence; no dropout."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        a, b = net(torch.cat([x, x * 0.9])).chunk(2)
        p, q = F.log_softmax(a, 1), F.log_softmax(b, 1)
        kl = F.kl_div(p, q.exp(), reduction="none").sum(1) + F.kl_div(q, p.exp(), reduction="none").sum(1)
        (0.5 * (CE(a, y) + CE(b, y)) + 0.5 * kl.mean() / 2).backward()
        opt.step()


add("two versions in one call, held together", _r_drop)


def _best_of(net: Any, opt: Any, batches: Any) -> None:
    """The best of several guesses counts (a relaxed loss by the least of each sample)."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        guesses = net(x).view(x.shape[0], 3, 1)
        errors = (guesses - y.view(-1, 1, 1).double()).pow(2).mean(-1)
        best = errors.min(1)
        (0.95 * best.values.mean() + 0.05 * errors.mean()).backward()
        opt.step()


add("the best of several guesses", _best_of)


def _iwae(net: Any, batch: Any) -> Tensor:
    """Samples of a latent by fixed quantiles, importance weighted."""
    x = batch[0]
    h = net(x)
    mean, scale = h[:, :1], F.softplus(h[:, 1:2]) + 0.1
    quantiles = torch.linspace(-1.5, 1.5, 5, dtype=x.dtype)
    z = mean + scale * quantiles
    logw = -0.5 * (x[:, :1] - z) ** 2 - 0.5 * z**2 + 0.5 * quantiles**2 + scale.log()
    return -(torch.logsumexp(logw, 1) - math.log(5)).mean()


usual("importance weighted bound", _iwae)


def _annealed(net: Any, opt: Any, batches: Any) -> None:
    """The weight of a term follows the number of steps, cyclically; free bits of each dimension over the batch."""
    for step, (x, y) in enumerate(itertools.chain(batches, batches, batches)):
        opt.zero_grad()
        out = net(x)
        beta = min(1.0, (step % 4) / 2)
        kl = (0.5 * out**2).mean(0).clamp(min=0.05).sum()
        (CE(out, y) + beta * kl).backward()
        opt.step()


add("free bits over the batch, annealed", _annealed)


class MadeNet(nn.Module):
    """Masked layers: each output depends on earlier inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        a, b = torch.arange(8), torch.arange(16) % 7
        self.register_buffer("m1", (b[:, None] >= a[None]).double())
        self.register_buffer("m2", (a[:, None] > b[None]).double())

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, self.first.weight * self.m1, self.first.bias))
        return F.linear(h, self.second.weight * self.m2, self.second.bias)


usual("masked layers, one number after the other", lambda net, b: BCE(net(b[0]), b[0].sigmoid()),
      lambda: classified(MadeNet))  # fmt: skip


def _shared_scale(net: Any, batch: Any) -> Tensor:
    """A loss in units of the batch's own spread of targets."""
    x, y = batch
    target = y.double()
    return MSE(net(x)[:, 0], target) / (target.var(unbiased=False) + 1e-6)


usual("an error in units of the batch's variance", _shared_scale)


def _moment_matched(net: Any, batch: Any) -> Tensor:
    """Running moments of outputs, kept in the loop as plain tensors, centre the loss."""
    x, y = batch
    out = net(x)
    return CE(out, y) + (out.mean(0) ** 2).sum() + ((out.var(0, unbiased=False) - 1) ** 2).sum()


usual("moments of outputs in the loss", _moment_matched)


def _hinge_gan(net: Any, opt: Any, batches: Any) -> None:
    """A critic several times for each update of the generator, both in one module with optimizers of their own; noise
    comes with the batch."""
    opt_g = torch.optim.Adam(net.gen.parameters(), lr=0.01, betas=(0.5, 0.9))
    for k, (x, z) in enumerate(itertools.chain(batches, batches)):
        opt.zero_grad()
        real, fake = net(x, "critic"), net(net(z, "gen").detach(), "critic")
        (F.relu(1 - real).mean() + F.relu(1 + fake).mean()).backward()
        opt.step()
        if k % 3 == 2:
            opt_g.zero_grad()
            (-net(net(z, "gen"), "critic").mean()).backward()
            opt_g.step()


class Players(nn.Module):
    """Generator and critic."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor, what: str = "critic") -> Tensor:
        return self.gen(x) if what == "gen" else self.critic(x)  # type: ignore[no-any-return]


def _players() -> Made:
    net = Players().double()
    data = TensorDataset(normal(24, 8), normal(24, 8))
    return net, torch.optim.Adam(net.critic.parameters(), lr=0.01, betas=(0.5, 0.9)), DataLoader(data, 6)


add("three critics for a generator, by name", _hinge_gan, _players)


def _real_labels(net: Any, opt: Any, batches: Any) -> None:
    """Labels of ones and zeros as long as the batch (DCGAN), with accuracies logged."""
    for x, z in itertools.chain(batches, batches):
        size = x.size(0)
        label = torch.full((size,), 1.0, dtype=x.dtype)
        opt.zero_grad()
        real = net(x).view(-1)
        err_real = BCE(real, label)
        err_real.backward()
        real.sigmoid().mean().item()
        label.fill_(0.0)
        err_fake = BCE(net(z).view(-1), label)
        err_fake.backward()
        opt.step()


add("labels of ones and zeros, two backwards", _real_labels, lambda: made(small_net(1), normal(24, 8), normal(24, 8)))
