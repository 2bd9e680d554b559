"""Whole training scripts: validation, early stopping, metrics, phases, averages, what is saved in between."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import lr_scheduler
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, TensorDataset

import asa
from benchmarks.program_table import Made, epochs, loader, made, normal, pairs, program, sgd

CE = F.cross_entropy
USUAL = {"strategies": ("ddp",), "cache": None, "time_limit_s": 0.5, "cluster": "profiles/cluster.local-gloo-2.json"}


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def _classes(net: Any = _net, count: int = 21, batch: int = 6, **options: Any) -> Made:
    """The last batch has 3 samples, unevenly shared."""
    return made(net(), normal(count, 8), torch.randint(3, (count,)), batch=batch, **options)


def _held_out(count: int = 11) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(count, 8, generator=g, dtype=torch.float64)
    return loader(x, torch.randint(3, (count,), generator=g), batch=4)


def numbers(**values: Any) -> dict[str, Tensor]:
    """What a program found out itself, to be compared as weights are."""
    return {k: torch.as_tensor(v).double() for k, v in values.items()}


def _step(net: Any, opt: Any, batch: Any) -> Tensor:
    opt.zero_grad()
    loss = CE(net(batch[0]), batch[1])
    loss.backward()
    opt.step()
    return loss


@torch.no_grad()
def _validate(net: Any, batches: Any) -> tuple[float, float]:
    net.eval()
    total = right = count = 0.0
    for x, y in batches:
        out = net(x)
        total += CE(out, y, reduction="sum").item()
        right += (out.argmax(1) == y).sum().item()
        count += len(y)
    net.train()
    return total / count, right / count


def _best(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Early stopping and the best weights by a validation set; the rate falls on plateaus."""
    held, best, kept, bad = _held_out(), math.inf, {}, 0
    plateau = lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.05)
    stopped = when = -1
    for epoch in range(6):
        net.train()
        for batch in batches:
            _step(net, opt, batch)
        value, _ = _validate(net, held)
        plateau.step(value)
        if value < best - 1e-2:
            best, kept, bad, when = value, copy.deepcopy(net.state_dict()), 0, epoch
        else:
            bad += 1
        if bad == 2:
            stopped = epoch
            break
    net.load_state_dict(kept, strict=True)
    return numbers(best=best, when=when, stopped=stopped, lr=opt.param_groups[0]["lr"])


class Meter:
    """A running average."""

    def __init__(self) -> None:
        self.sum = self.count = 0.0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n

    @property
    def avg(self) -> float:
        return self.sum / self.count


def _metered(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Loss and accuracy of an epoch, each by the numbers of its batches."""
    losses, hits = Meter(), Meter()
    for _ in range(2):
        losses, hits = Meter(), Meter()
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            loss = CE(out, y)
            losses.update(loss.item(), x.size(0))
            hits.update((out.argmax(1) == y).double().mean().item(), x.size(0))
            loss.backward()
            opt.step()
    return numbers(loss=losses.avg, hits=hits.avg)


def _counted(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Correct answers over the size of the data set, and a confusion matrix."""
    table, right, total = torch.zeros(3, 3), 0, 0.0
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        loss = CE(out, y)
        loss.backward()
        opt.step()
        total += loss.item() * len(x)
        guess = out.argmax(1)
        right += (guess == y).sum().item()
        for t, p in zip(y.view(-1), guess.view(-1), strict=True):
            table[t.long(), p.long()] += 1
    return numbers(loss=total / len(batches.dataset), accuracy=right / len(batches.dataset), table=table)


def _collected(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Answers are kept as arrays; a metric is made of all at the end of the epoch."""
    guesses, wanted = [], []
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        loss = CE(out, y)
        loss.backward()
        opt.step()
        guesses.append(out.detach().cpu().numpy())
        wanted.extend(y.tolist())
    all_of = np.concatenate(guesses)
    return numbers(accuracy=(all_of.argmax(1) == np.array(wanted)).mean(), seen=len(wanted))


def _resumed(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Saves everything to a file behind an epoch, trains on, and goes back to it."""
    schedule = lr_scheduler.StepLR(opt, 1, gamma=0.5)
    epochs(pairs(CE), 1)(net, opt, batches)
    schedule.step()
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict()}, file)
    epochs(pairs(CE), 1)(net, opt, batches)
    file.seek(0)
    state = torch.load(file)
    missing = net.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    schedule.load_state_dict(state["schedule"])
    epochs(pairs(CE), 1)(net, opt, batches)
    schedule.step()
    return numbers(lr=schedule.get_last_lr()[0], missing=len(missing.missing_keys))


class Shadow:
    """Averages of parameters by name, which are put in their place for a while."""

    def __init__(self, net: Any) -> None:
        self.net, self.backup = net, {}
        self.shadow = {n: p.data.clone() for n, p in net.named_parameters() if p.requires_grad}

    def update(self) -> None:
        for n, p in self.net.named_parameters():
            if p.requires_grad:
                self.shadow[n] = (0.2 * p.data + 0.8 * self.shadow[n]).clone()

    def apply(self) -> None:
        for n, p in self.net.named_parameters():
            if p.requires_grad:
                self.backup[n] = p.data
                p.data = self.shadow[n]

    def restore(self) -> None:
        for n, p in self.net.named_parameters():
            if p.requires_grad:
                p.data = self.backup[n]
        self.backup = {}


def _shadowed(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    average, seen = Shadow(net), []
    for _ in range(2):
        for batch in batches:
            _step(net, opt, batch)
            average.update()
        average.apply()
        seen.append(_validate(net, _held_out())[0])
        average.restore()
    return numbers(seen=seen)


def _fast_gradient(net: Any, opt: Any, batches: Any) -> None:
    """Moves the first weights along their gradient, adds the gradient there, and moves them back."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            backup = {}
            for n, p in net.named_parameters():
                if p.requires_grad and n.startswith("0."):
                    backup[n] = p.data.clone()
                    norm = torch.norm(p.grad)
                    if norm != 0 and not torch.isnan(norm):
                        p.data.add_(0.5 * p.grad / norm)
            CE(net(x), y).backward()
            for n, p in net.named_parameters():
                if n in backup:
                    p.data = backup[n]
            opt.step()


def _by_hand(net: Any, _opt: Any, batches: Any) -> None:
    """No optimizer: weights are moved by the loop, as in lessons."""
    for _ in range(2):
        for x, y in batches:
            CE(net(x), y).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.05 * p.grad
                    p.grad.zero_()


def _by_data(net: Any, _opt: Any, batches: Any) -> None:
    """The same by ``p.data``, and the model's own ``zero_grad``."""
    for _ in range(2):
        for x, y in batches:
            net.zero_grad()
            CE(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.25)
            for p in net.parameters():
                p.data.add_(p.grad.data, alpha=-0.05)


def _second_phase(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Head first, then everything, with an optimizer made for it."""
    for p in list(net.parameters())[:2]:
        p.requires_grad = False
    epochs(pairs(CE), 1)(net, opt, batches)
    for p in net.parameters():
        p.requires_grad = True
    later = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
    schedule = lr_scheduler.CosineAnnealingLR(later, 8)
    for batch in itertools.chain(batches, batches):
        _step(net, later, batch)
        schedule.step()
    return numbers(lr=schedule.get_last_lr())


def _only_trained(net: Any, _opt: Any, batches: Any) -> None:
    """Optimizers made anew for what is trained, an epoch each."""
    for i in range(3):
        for j, p in enumerate(net.parameters()):
            p.requires_grad_(j // 2 >= 2 - i)
        new = torch.optim.SGD(filter(lambda p: p.requires_grad, net.parameters()), lr=0.05 / (1 + i), momentum=0.9)
        epochs(pairs(CE), 1)(net, new, batches)


def _restarts(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Warm restarts by fractions of an epoch, behind a warm-up."""
    warm = lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 3))
    rates = []
    for batch in batches:
        _step(net, opt, batch)
        warm.step()
    restarts = lr_scheduler.CosineAnnealingWarmRestarts(opt, 1, 2)
    for epoch in range(2):
        for i, batch in enumerate(batches):
            _step(net, opt, batch)
            restarts.step(epoch + i / len(batches))
            rates.append(restarts.get_last_lr()[0])
    return numbers(rates=rates)


def _cyclic(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Rate and momentum go up and down; then a sequence of schedules."""
    cycle = lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=3, cycle_momentum=True)
    for batch in batches:
        _step(net, opt, batch)
        cycle.step()
    parts = [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)]
    both = lr_scheduler.SequentialLR(opt, parts, [2])
    for batch in batches:
        _step(net, opt, batch)
        both.step()
    return numbers(lr=both.get_last_lr(), momentum=opt.param_groups[0]["momentum"])


def _endless(net: Any, opt: Any, batches: Any) -> None:
    """A number of steps; the loader begins anew when it ends."""
    source = iter(batches)
    for _ in range(11):
        try:
            batch = next(source)
        except StopIteration:
            source = iter(batches)
            batch = next(source)
        _step(net, opt, batch)


def _cycled(net: Any, opt: Any, batches: Any) -> None:
    for i, batch in enumerate(itertools.cycle(batches)):
        if i == 9:
            break
        _step(net, opt, batch)


def _first_only(net: Any, opt: Any, batches: Any) -> None:
    """Learns one batch by heart before it trains, and leaves epochs early."""
    one = next(iter(batches))
    for _ in range(3):
        _step(net, opt, one)
    for _ in range(2):
        for i, batch in enumerate(batches):
            if i == 2:
                break
            _step(net, opt, batch)


def _drawn_batches(net: Any, opt: Any, batches: Any) -> None:
    """Batches are drawn by the loop from two tensors; the loader is not used."""
    x, y = batches.dataset.tensors
    for _ in range(6):
        rows = torch.randint(len(x), (6,))
        _step(net, opt, (x[rows], y[rows]))


def _permuted(net: Any, opt: Any, batches: Any) -> None:
    """The same in epochs, by a permutation."""
    x, y = batches.dataset.tensors
    for _ in range(2):
        order = torch.randperm(len(x))
        for i in range(0, len(x), 5):
            rows = order[i : i + 5]
            _step(net, opt, (x[rows], y[rows]))


def _larger_later(net: Any, opt: Any, batches: Any) -> None:
    """The second phase has a loader of its own with larger batches."""
    epochs(pairs(CE), 1)(net, opt, batches)
    for batch in DataLoader(batches.dataset, 9, shuffle=True, generator=torch.Generator().manual_seed(1)):
        _step(net, opt, batch)


def _grown(net: Any, opt: Any, batches: Any) -> None:
    """The loader's own batches grow behind an epoch."""
    epochs(pairs(CE), 1)(net, opt, batches)
    batches.batch_sampler.batch_size = 9
    epochs(pairs(CE), 1)(net, opt, batches)


def _folds(net: Any, _opt: Any, batches: Any) -> dict[str, Tensor]:
    """Cross-validation: every fold begins with the first weights."""
    first, data, scores = copy.deepcopy(net.state_dict()), batches.dataset, []
    rows = np.arange(len(data))
    for k in range(3):
        net.load_state_dict(first)
        new = torch.optim.SGD(net.parameters(), lr=0.05)
        train = DataLoader(data, 6, sampler=SubsetRandomSampler(rows[rows % 3 != k].tolist()))
        for batch in train:
            _step(net, new, batch)
        scores.append(_validate(net, DataLoader(Subset(data, rows[rows % 3 == k].tolist()), 4))[0])
    return numbers(scores=scores)


def _folds_anew(net: Any, _opt: Any, batches: Any) -> dict[str, Tensor]:
    """The same with a model, optimizer and loader for each fold, each placed."""
    data, scores, state = batches.dataset, [], {}
    rows = np.arange(len(data))
    for k in range(3):
        torch.manual_seed(k)
        model = _net().double()
        new, train = sgd(model), DataLoader(Subset(data, rows[rows % 3 != k].tolist()), 6, shuffle=True)
        if hasattr(net, "plan"):
            model, new, train = asa.parallelize(model, new, train, **USUAL)
        for batch in train:
            _step(model, new, batch)
        scores.append(_validate(model, DataLoader(Subset(data, rows[rows % 3 == k].tolist()), 4))[0])
        state = {f"last.{n}": v for n, v in model.state_dict().items()}
    return {**state, **numbers(scores=scores)}


def _consolidated(net: Any, opt: Any, batches: Any) -> None:
    """Elastic weight consolidation: squared gradients of one task weigh the way from its weights in the next."""
    epochs(pairs(CE), 1)(net, opt, batches)
    old = {n: p.detach().clone() for n, p in net.named_parameters()}
    fisher = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for x, y in batches:
        net.zero_grad()
        CE(net(x), y).backward()
        for n, p in net.named_parameters():
            fisher[n] += p.grad.detach() ** 2 / len(batches)
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), (y + 1) % 3)
        for n, p in net.named_parameters():
            loss = loss + 10 * (fisher[n] * (p - old[n]) ** 2).sum()
        loss.backward()
        opt.step()


def _reptile(net: Any, opt: Any, batches: Any) -> None:
    """Goes part of the way from the weights before some steps to those behind them."""
    for outer in range(2):
        before = copy.deepcopy(net.state_dict())
        epochs(pairs(CE), 1)(net, opt, batches)
        after = net.state_dict()
        step = 0.5 * (1 - outer / 2)
        net.load_state_dict({n: before[n] + (after[n] - before[n]) * step for n in before})


def _soup(net: Any, opt: Any, batches: Any) -> None:
    """The mean of the weights behind each epoch."""
    total: dict[str, Tensor] = {}
    for _ in range(3):
        epochs(pairs(CE), 1)(net, opt, batches)
        for n, v in net.state_dict().items():
            total[n] = total.get(n, 0) + v
    net.load_state_dict({n: v / 3 for n, v in total.items()})


def _as_vector(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Keeps weights as one vector and mixes it in."""
    kept = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    epochs(pairs(CE), 1)(net, opt, batches)
    now = nn.utils.parameters_to_vector(net.parameters()).detach()
    nn.utils.vector_to_parameters(0.5 * kept + 0.5 * now, net.parameters())
    epochs(pairs(CE), 1)(net, opt, batches)
    return numbers(way=(now - kept).norm())


def _centred(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of matrices less their mean over inputs."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            for p in net.parameters():
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.data.add_(-p.grad.data.mean(dim=1, keepdim=True))
            opt.step()


def _adaptive_clip(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of units clipped by the norm of their weights."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            for p in net.parameters():
                if p.dim() < 2:
                    continue
                size = p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.02
                norm = p.grad.detach().norm(dim=1, keepdim=True)
                p.grad.detach().copy_(torch.where(norm > size, p.grad * (size / norm.clamp(min=1e-6)), p.grad))
            opt.step()


class SAM(torch.optim.Optimizer):
    """Sharpness-aware, around another optimizer that it makes itself."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.norm(
            torch.stack([p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]), p=2
        )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)).to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


def _sam_made() -> Made:
    net, _, batches = _classes()
    return net, SAM(net.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9), batches


def _sam(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            CE(net(x), y).backward()
            opt.first_step()
            CE(net(x), y).backward()
            opt.second_step()


class Lookahead:
    """Around an optimizer: slow weights follow every third step."""

    def __init__(self, base: Any) -> None:
        self.base, self.count = base, 0
        self.slow = [[p.data.clone() for p in g["params"]] for g in base.param_groups]

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def step(self) -> None:
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for group, slow in zip(self.base.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.add_(p.data - s, alpha=0.5)
                    p.data.copy_(s)


def _lookahead(net: Any, opt: Any, batches: Any) -> None:
    epochs(pairs(CE))(net, Lookahead(opt), batches)


def _pruned_made() -> Made:
    net = _net()
    prune.l1_unstructured(net[2], "weight", amount=0.3)
    return _classes(lambda: net)


def _pruned(net: Any, opt: Any, batches: Any) -> None:
    """Half of a layer is pruned behind the first epoch."""
    epochs(pairs(CE), 1)(net, opt, batches)
    prune.l1_unstructured(net[2], "weight", amount=0.5)
    epochs(pairs(CE), 1)(net, opt, batches)


def _begun_anew(net: Any, opt: Any, batches: Any) -> None:
    """Initialised by a function behind the call."""

    def initialise(m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    torch.manual_seed(3)
    net.apply(initialise)
    epochs(pairs(CE))(net, opt, batches)


def _momentum_of_norms(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Momentum of BatchNorm falls; a last pass takes statistics anew."""
    for epoch in range(2):
        for m in net.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.momentum = 0.5 * 0.5**epoch
        epochs(pairs(CE), 1)(net, opt, batches)
    torch.optim.swa_utils.update_bn(batches, net)
    return numbers(held=_validate(net, _held_out())[0])


def _accumulated(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Two batches a step, and what is left at the end; a rate by steps."""
    total = 0.0
    schedule = lr_scheduler.LambdaLR(opt, lambda i: 0.9**i)
    for _ in range(2):
        opt.zero_grad(set_to_none=False)
        for i, (x, y) in enumerate(batches):
            loss = CE(net(x), y) / 2
            loss.backward()
            total += loss.detach()
            if (i + 1) % 2 == 0 or i + 1 == len(batches):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                schedule.step()
                opt.zero_grad(set_to_none=False)
    return numbers(lr=schedule.get_last_lr())


def _profiled(net: Any, opt: Any, batches: Any) -> None:
    """Under torch's profiler, with anomalies looked for, and numbers of the model printed."""
    sizes = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert sizes == sum(v.numel() for v in net.state_dict().values())
    str(net)
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1)) as seen:
        for batch in batches:
            with torch.autograd.detect_anomaly(check_nan=True), torch.profiler.record_function("step"):
                _step(net, opt, batch)
            seen.step()
    for p in net.state_dict().values():
        torch.histc(p.float(), 4)


def _seeded(net: Any, opt: Any, batches: Any) -> None:
    """Seeds anew in every epoch, and draws noise on the inputs by it."""
    for epoch in range(2):
        torch.manual_seed(epoch)
        np.random.seed(epoch)
        for x, y in batches:
            share = np.random.beta(0.4, 0.4)
            order = torch.randperm(x.size(0))
            opt.zero_grad()
            out = net(share * x + (1 - share) * x[order])
            (share * CE(out, y) + (1 - share) * CE(out, y[order])).backward()
            opt.step()


def _remembered(net: Any, opt: Any, batches: Any) -> None:
    """Temporal ensembling: what was answered for a sample before is its second target."""
    table = torch.zeros(21, 3, dtype=torch.float64)
    for epoch in range(3):
        for x, y, i in batches:
            opt.zero_grad()
            out = net(x)
            (CE(out, y) + 0.5 * epoch * F.mse_loss(out.softmax(1), table[i])).backward()
            opt.step()
            table[i] = 0.6 * table[i] + 0.4 * out.detach().softmax(1)


def _hard_first(net: Any, opt: Any, batches: Any) -> None:
    """Samples are drawn by their last losses."""
    data, losses = batches.dataset, torch.ones(21, dtype=torch.float64)
    for _ in range(2):
        for x, y, i in batches:
            opt.zero_grad()
            each = CE(net(x), y, reduction="none")
            each.mean().backward()
            opt.step()
            losses[i] = each.detach()
        rows = losses.argsort(descending=True)[:8]
        x, y, _i = data[rows]
        _step(net, opt, (x, y))


def _numbered(shuffle: bool) -> Made:
    return made(_net(), normal(21, 8), torch.randint(3, (21,)), torch.arange(21), shuffle=shuffle)


def _weighted_average(net: Any, opt: Any, batches: Any) -> None:
    """Two losses weighed by how fast each fell in the last epochs."""
    last, weights = [], [1.0, 1.0]
    for _ in range(3):
        sums = np.zeros(2)
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            both = CE(out, y), out.square().mean()
            (weights[0] * both[0] + weights[1] * both[1]).backward()
            opt.step()
            sums += [b.item() for b in both]
        last.append(sums / len(batches))
        if len(last) > 1:
            fall = np.exp(last[-1] / last[-2] / 2.0)
            weights = (2 * fall / fall.sum()).tolist()


def _annealed(net: Any, opt: Any, batches: Any) -> None:
    """A temperature in an attribute of the model, changed by the loop."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
        net.temperature *= 0.5


class Tempered(nn.Module):
    """Divides by a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = _net(), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.temperature  # type: ignore[no-any-return]


def _joined() -> Made:
    net, opt, one = _classes()
    other = TensorDataset(normal(9, 8), torch.randint(3, (9,)))
    return net, opt, DataLoader(ConcatDataset([one.dataset, other]), 7, shuffle=True, drop_last=True)


usual = epochs(pairs(CE))
_loops: dict[str, Any] = {
    "early stopping by a validation set": _best, "meters": _metered, "counts of correct answers": _counted,
    "answers kept as arrays": _collected, "saved, and gone back": _resumed, "shadow weights in p.data": _shadowed,
    "fast gradient on the first weights": _fast_gradient, "weights moved by hand": _by_hand,
    "weights moved by p.data": _by_data, "an optimizer for a second phase": _second_phase,
    "optimizers for what is trained": _only_trained, "warm restarts": _restarts, "cyclic rate and momentum": _cyclic,
    "an endless loader": _endless, "a cycled loader": _cycled, "one batch by heart": _first_only,
    "batches drawn by the loop": _drawn_batches, "a permutation of the loop's": _permuted,
    "a loader of a second phase": _larger_later, "batches that grow": _grown, "folds": _folds,
    "folds, each placed": _folds_anew, "elastic weight consolidation": _consolidated, "reptile": _reptile,
    "the mean of epochs": _soup, "weights as one vector": _as_vector, "gradients centred": _centred,
    "adaptive clipping": _adaptive_clip, "lookahead": _lookahead, "pruned in between": _pruned,
    "initialised behind the call": _begun_anew, "accumulated with a rest": _accumulated, "profiled": _profiled,
    "mixup by numpy, seeded": _seeded, "losses weighed by their fall": _weighted_average,
}  # fmt: skip
for _name, _loop in _loops.items():
    program("script", _name, _classes, _loop)
program("script", "SAM as an optimizer", _sam_made, _sam)
program("script", "pruned before", _pruned_made, usual, CE)
program("script", "momentum of norms", lambda: _classes(_normed, 24), _momentum_of_norms, batch_norm="exact")
program("script", "temporal ensembling", lambda: _numbered(False), _remembered)
program("script", "temporal ensembling, shuffled", lambda: _numbered(True), _remembered)
program("script", "hard samples again", lambda: _numbered(True), _hard_first)
program("script", "temperature in an attribute", lambda: _classes(Tempered), _annealed)
program("script", "data sets joined", _joined, usual, CE)
program("script", "shuffled, early stopping", lambda: _classes(shuffle=True), _best)
program("script", "early stopping, BatchNorm", lambda: _classes(_normed, 24, shuffle=True), _best, batch_norm="exact")
