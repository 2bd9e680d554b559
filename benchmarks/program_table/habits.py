"""Habits of loops that go by numbers of a batch, statistics that are collected, layers of every kind, odd gradients."""

from __future__ import annotations

import copy
import math
import types
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.program_table import Made, epochs, loader, made, normal, pairs, program
from benchmarks.program_table.common import CE, classified, one_step, small_net
from benchmarks.program_table.scripts import numbers

# ---- numbers of a batch


def _steps_by_samples(net: Any, opt: Any, batches: Any) -> None:
    """An update for every 12 samples that were seen."""
    seen = 0
    opt.zero_grad()
    for _ in range(2):
        for x, y in batches:
            (CE(net(x), y) / 2).backward()
            seen += len(x)
            if seen >= 12:
                opt.step()
                opt.zero_grad()
                seen = 0


def _rate_by_samples(net: Any, opt: Any, batches: Any) -> None:
    """The rate falls with the samples that were seen."""
    seen = 0
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            seen += x.size(0)
            for group in opt.param_groups:
                group["lr"] = 0.05 / (1 + seen / 10)


def _rate_by_batch(net: Any, opt: Any, batches: Any) -> None:
    """A small batch has a small rate."""
    for x, y in batches:
        opt.param_groups[0]["lr"] = 0.05 * x.shape[0] / 6
        one_step(net, opt, x, y)


def _average_by_samples(net: Any, opt: Any, batches: Any) -> None:
    """Averaged weights with a decay by samples."""
    average = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            decay = 0.9 ** (len(x) / 6)
            with torch.no_grad():
                for a, p in zip(average, net.parameters(), strict=True):
                    a.mul_(decay).add_(p, alpha=1 - decay)
    with torch.no_grad():
        for a, p in zip(average, net.parameters(), strict=True):
            p.copy_(a)


def _annealed_by_samples(net: Any, opt: Any, batches: Any) -> None:
    """The weight of a second loss grows with the samples seen."""
    seen = 0
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        seen += len(y)
        (CE(out, y) + min(1.0, seen / 30) * out.square().mean()).backward()
        opt.step()


def _left_out_small(net: Any, opt: Any, batches: Any) -> None:
    """Batches of fewer than six samples do not count."""
    for _ in range(2):
        for x, y in batches:
            if len(x) != 6:
                continue
            one_step(net, opt, x, y)


def _sum_over_size(net: Any, opt: Any, batches: Any) -> None:
    """Sums over a fixed batch size."""
    for x, y in batches:
        opt.zero_grad()
        (CE(net(x), y, reduction="sum") / batches.batch_size).backward()
        opt.step()


def _rate_by_loader(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Totals from the loader: length, data set, batch size."""
    total = len(batches) * 2
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1 - i / total)
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            schedule.step()
    return numbers(size=batches.batch_size, samples=len(batches.dataset), last=batches.drop_last)


# ---- statistics that are collected before, or in between


def _standardised(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Mean and deviation of the data, by a pass over the loader."""
    total, squares, count = torch.zeros(8).double(), torch.zeros(8).double(), 0
    for x, _ in batches:
        total += x.sum(0)
        squares += x.square().sum(0)
        count += len(x)
    mean = total / count
    std = (squares / count - mean**2).sqrt()
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, (x - mean) / std, y)
    return {"mean": mean}


def _standardised_by_batches(net: Any, opt: Any, batches: Any) -> None:
    """The mean of the means of batches."""
    mean = torch.stack([x.mean(0) for x, _ in batches]).mean(0)
    for x, y in batches:
        one_step(net, opt, x - mean, y)


def _class_weights(net: Any, opt: Any, batches: Any) -> None:
    """Class weights by counting the labels that the loader yields."""
    counts = torch.zeros(3).double()
    for _, y in batches:
        counts += torch.bincount(y, minlength=3)
    weight = counts.sum() / (3 * counts.clamp(min=1))
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y, weight=weight).backward()
            opt.step()


def _positive_weight(net: Any, opt: Any, batches: Any) -> None:
    """The weight of positives as a number, counted before."""
    positive = sum(int((y == 0).sum()) for _, y in batches)
    total = sum(len(y) for _, y in batches)
    weight = torch.tensor((total - positive) / max(positive, 1))
    for x, y in batches:
        opt.zero_grad()
        F.binary_cross_entropy_with_logits(net(x)[:, 0], (y == 0).double(), pos_weight=weight).backward()
        opt.step()


def _running_centre(net: Any, opt: Any, batches: Any) -> None:
    """A running mean of outputs is taken from them."""
    centre = torch.zeros(3).double()
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            CE(out - centre, y).backward()
            opt.step()
            centre = 0.9 * centre + 0.1 * out.detach().mean(0)


def _running_scale(net: Any, opt: Any, batches: Any) -> None:
    """Returns are divided by a running deviation, with numpy."""
    var = 1.0
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)[:, 0]
            reward = y.double().numpy()
            var = 0.9 * var + 0.1 * float(np.var(reward))
            F.mse_loss(out, torch.as_tensor(reward / math.sqrt(var + 1e-8))).backward()
            opt.step()


def _prototypes(net: Any, opt: Any, batches: Any) -> None:
    """Running means of classes, to which outputs are drawn."""
    proto = torch.zeros(3, 3).double()
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            (CE(out, y) + 0.1 * (out - proto[y]).square().mean()).backward()
            opt.step()
            with torch.no_grad():
                for k in range(3):
                    if (y == k).any():
                        proto[k] = 0.8 * proto[k] + 0.2 * out[y == k].mean(0)


def _group_dro(net: Any, opt: Any, batches: Any) -> None:
    """Distributionally robust: weights of groups grow with their losses."""
    q = torch.ones(3).double() / 3
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            each = CE(net(x), y, reduction="none")
            hot = F.one_hot(y, 3).double()
            losses = (hot.T @ each) / hot.sum(0).clamp(min=1)
            q = q * (0.5 * losses.detach()).exp()
            q = q / q.sum()
            (q * losses).sum().backward()
            opt.step()


def _relabelled(net: Any, opt: Any, batches: Any) -> None:
    """Labels in the data set are replaced by answers of the model."""
    data = batches.dataset
    for _ in range(3):
        for x, y, i in batches:
            opt.zero_grad()
            out = net(x)
            CE(out, y).backward()
            opt.step()
            data.tensors[1][i] = out.detach().argmax(1)


def _best_by_training(net: Any, opt: Any, batches: Any) -> None:
    """The best weights by the loss of the epoch on the rank."""
    best, kept = math.inf, copy.deepcopy(net.state_dict())
    for epoch in range(4):
        total = 0.0
        for x, y in batches:
            total += one_step(net, opt, x, y).item() * (1 if epoch % 2 else 1.02)
        if total < best:
            best, kept = total, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)


def _left_early(net: Any, opt: Any, batches: Any) -> None:
    """Leaves the epoch when a loss is small."""
    for _ in range(3):
        for x, y in batches:
            if one_step(net, opt, x, y).item() < 1.09:
                break


def _grad_by_loss(net: Any, opt: Any, batches: Any) -> None:
    """Polyak's step: the rate is the loss over the squared norm of the gradient."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            loss = CE(net(x), y)
            loss.backward()
            squares = sum(float(p.grad.square().sum()) for p in net.parameters())
            rate = min(0.1, loss.item() / (squares + 1e-8))
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(rate * p.grad)


# ---- more samples than the loader's


def _rehearsed(net: Any, opt: Any, batches: Any) -> None:
    """Exemplars are appended to every batch."""
    x0, y0 = normal(4, 8), torch.tensor([0, 1, 2, 0])
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, torch.cat([x, x0]), torch.cat([y, y0]))


def _rehearsed_apart(net: Any, opt: Any, batches: Any) -> None:
    """Exemplars are a second term of the loss."""
    x0, y0 = normal(4, 8), torch.tensor([0, 1, 2, 0])
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            (CE(net(x), y) + CE(net(x0), y0)).backward()
            opt.step()


def _last_batch_again(net: Any, opt: Any, batches: Any) -> None:
    """Every batch comes with the one before."""
    before: Any = None
    for _ in range(2):
        for x, y in batches:
            a, b = (x, y) if before is None else (torch.cat([x, before[0]]), torch.cat([y, before[1]]))
            one_step(net, opt, a, b)
            before = x, y


def _two_loaders(net: Any, opt: Any, batches: Any) -> None:
    """Labelled batches, and unlabelled ones of a loader that is not placed."""
    other = DataLoader(TensorDataset(normal(20, 8)), 5)
    for _ in range(2):
        for (x, y), (u,) in zip(batches, other, strict=False):
            opt.zero_grad()
            (CE(net(x), y) + net(u).square().mean()).backward()
            opt.step()


def _two_loaders_joined(net: Any, opt: Any, batches: Any) -> None:
    """FixMatch: both in one call of the model."""
    other = DataLoader(TensorDataset(normal(40, 8)), 10)
    for (x, y), (u,) in zip(batches, other, strict=False):
        opt.zero_grad()
        out = net(torch.cat([x, u]))
        sure, label = out[len(x) :].detach().softmax(1).max(1)
        each = CE(out[len(x) :], label, reduction="none") * (sure > 0.4)
        (CE(out[: len(x)], y) + each.mean()).backward()
        opt.step()


def _same_loader_twice(net: Any, opt: Any, batches: Any) -> None:
    """A loader beside itself."""
    for (x, y), (u, _) in zip(batches, batches, strict=True):
        opt.zero_grad()
        (CE(net(x), y) + net(u).square().mean()).backward()
        opt.step()


def _validated_inside(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A pass over the loader within a pass, for a number."""
    seen = []
    for i, (x, y) in enumerate(batches):
        one_step(net, opt, x, y)
        if i % 2:
            net.eval()
            with torch.no_grad():
                seen.append(sum(len(b) for b, _ in batches))
            net.train()
    return numbers(seen=seen)


def _two_batches_a_backward(net: Any, opt: Any, batches: Any) -> None:
    """Losses of two batches in one backward."""
    losses = []
    for _ in range(2):
        for x, y in batches:
            losses.append(CE(net(x), y))
            if len(losses) == 2:
                opt.zero_grad()
                (sum(losses) / 2).backward()
                opt.step()
                losses = []


def _worst_of_two(net: Any, opt: Any, batches: Any) -> None:
    """The larger of two losses is learned."""
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        torch.stack([CE(out, y), out.square().mean()]).max().backward()
        opt.step()


def _log_of_losses(net: Any, opt: Any, batches: Any) -> None:
    """The geometric mean of two losses."""
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        (CE(out, y) * (out.square().mean() + 1e-3)).sqrt().backward()
        opt.step()


# ---- gradients


def _cached(net: Any, opt: Any, batches: Any) -> None:
    """The loss is differentiated by the outputs first, then these by the weights (GradCache)."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            leaf = out.detach().requires_grad_()
            CE(leaf, y).backward()
            out.backward(leaf.grad)
            opt.step()


def _cached_again(net: Any, opt: Any, batches: Any) -> None:
    """Outputs without gradients, their gradients, then the model again."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            with torch.no_grad():
                leaf = net(x)
            leaf = leaf.requires_grad_()
            (g,) = torch.autograd.grad(CE(leaf, y), leaf)
            (net(x) * g).sum().backward()
            opt.step()


def _cached_contrast(net: Any, opt: Any, batches: Any) -> None:
    """The same of a loss between samples."""
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        leaf = out.detach().requires_grad_()
        same = (y[:, None] == y[None]).double()
        F.binary_cross_entropy_with_logits(leaf @ leaf.T, same).backward()
        out.backward(leaf.grad)
        opt.step()


def _some_leaves(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of the last layer alone."""
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward(inputs=list(net.parameters())[-2:])
        opt.step()


def _several_roots(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        torch.autograd.backward([CE(out, y), 0.1 * out.square().mean()])
        opt.step()


def _surgery(net: Any, opt: Any, batches: Any) -> None:
    """Conflicting gradients of two losses are projected (PCGrad)."""
    for _ in range(2):
        for x, y in batches:
            found = []
            for which in range(2):
                opt.zero_grad()
                out = net(x)
                (CE(out, y) if which else (out - 1).square().mean()).backward()
                found.append([p.grad.detach().clone() for p in net.parameters()])
            for p, a, b in zip(net.parameters(), *found, strict=True):
                dot = (a * b).sum()
                with torch.no_grad():
                    p.grad = a + b if dot >= 0 else a + b - dot * (a / a.square().sum() + b / b.square().sum())
            opt.step()


def _foreach(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Weights and gradients by torch._foreach."""
    norm = torch.zeros(())
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        grads = [p.grad for p in net.parameters()]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, float(0.1 / norm))
        opt.step()
        with torch.no_grad():
            torch._foreach_mul_(list(net.parameters()), 0.99)
    return numbers(norm=norm)


def _total_norm(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Clipping in its two halves; a norm that must be finite; the largest element."""
    out = []
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        parameters = list(net.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters], error_if_nonfinite=True)
        nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
        out.append(float(norm))
        out.append(float(nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=math.inf)))
        opt.step()
    return numbers(norms=out)


def _hypergradient(net: Any, opt: Any, batches: Any) -> None:
    """The rate follows the product of gradients that follow each other."""
    before = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            dot = sum((p.grad * b).sum() for p, b in zip(net.parameters(), before, strict=True))
            for group in opt.param_groups:
                group["lr"] += 0.01 * float(dot)
            before = [p.grad.clone() for p in net.parameters()]
            opt.step()


def _variance_reduced(net: Any, opt: Any, batches: Any) -> None:
    """SVRG: the gradient of all, and corrections by batches at old weights."""
    old = copy.deepcopy(net.state_dict())
    total = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in batches:
        net.zero_grad()
        CE(net(x), y).backward()
        for t, p in zip(total, net.parameters(), strict=True):
            t += p.grad / len(batches)
    for x, y in batches:
        now = copy.deepcopy(net.state_dict())
        net.load_state_dict(old)
        net.zero_grad()
        CE(net(x), y).backward()
        then = [p.grad.clone() for p in net.parameters()]
        net.load_state_dict(now)
        opt.zero_grad()
        CE(net(x), y).backward()
        for p, t, g in zip(net.parameters(), then, total, strict=True):
            p.grad.add_(g - t)
        opt.step()


def _langevin(net: Any, opt: Any, batches: Any) -> None:
    """Noise on the weights, as large as they are."""
    for x, y in batches:
        one_step(net, opt, x, y)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)
                p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.01)
                p.grad.add_(torch.empty_like(p).normal_(0, 0.01))


def _moved_back(net: Any, opt: Any, batches: Any) -> None:
    """Weights are rows of length one at most."""
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            with torch.no_grad():
                for p in net.parameters():
                    if p.dim() == 2:
                        p.div_(p.norm(dim=1, keepdim=True).clamp(min=0.5) * 2)


def _renormed(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        one_step(net, opt, x, y)
        with torch.no_grad():
            for p in net.parameters():
                if p.dim() == 2:
                    p.copy_(torch.renorm(p, 2, 0, 0.5))


def _lottery(net: Any, opt: Any, batches: Any) -> None:
    """Weights below the mean are masked, and the rest rewound."""
    first = [p.detach().clone() for p in net.parameters()]
    epochs(pairs(CE), 1)(net, opt, batches)
    with torch.no_grad():
        masks = [(p.abs() > p.abs().mean()).to(p.dtype) for p in net.parameters()]
        for p, m, f in zip(net.parameters(), masks, first, strict=True):
            p.copy_(f * m)
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        for p, m in zip(net.parameters(), masks, strict=True):
            p.grad.mul_(m)
        opt.step()
        with torch.no_grad():
            for p, m in zip(net.parameters(), masks, strict=True):
                p.mul_(m)


def _new_gradients(net: Any, opt: Any, batches: Any) -> None:
    """Gradients are replaced by other tensors, and some by None."""
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        for i, p in enumerate(net.parameters()):
            p.grad = None if i == 1 else p.grad.sign() * 0.01 if i == 2 else 0.5 * p.grad
        opt.step()


def _state_reset(net: Any, opt: Any, batches: Any) -> None:
    """The optimizer forgets everything behind an epoch."""
    epochs(pairs(CE), 1)(net, opt, batches)
    opt.state = defaultdict(dict)
    epochs(pairs(CE), 1)(net, opt, batches)
    opt.state.clear()
    epochs(pairs(CE), 1)(net, opt, batches)


def _through_state(net: Any, opt: Any, batches: Any) -> None:
    """Momenta are halved in between, by the optimizer's state."""
    for _ in range(2):
        epochs(pairs(CE), 1)(net, opt, batches)
        for p in net.parameters():
            for v in opt.state[p].values():
                if isinstance(v, Tensor) and v.dim():
                    v.mul_(0.5)


def _step_hooks(net: Any, opt: Any, batches: Any) -> None:
    """Hooks of the optimizer that clip before and decay behind an update."""

    def before(_opt: Any, _args: Any, _options: Any) -> None:
        nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 0.1)

    def behind(_opt: Any, _args: Any, _options: Any) -> None:
        with torch.no_grad():
            for g in opt.param_groups:
                for p in g["params"]:
                    p.mul_(0.99)

    opt.register_step_pre_hook(before)
    opt.register_step_post_hook(behind)
    epochs(pairs(CE))(net, opt, batches)


def _kept_for_backward(net: Any, opt: Any, batches: Any) -> None:
    """Activations on the host, and packed by hooks."""
    for x, y in batches:
        opt.zero_grad()
        with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            loss = CE(net(x), y)
        loss.backward()
        opt.step()


def _checkpointed(net: Any, opt: Any, batches: Any) -> None:
    """The whole model under a checkpoint of the loop's."""
    for x, y in batches:
        opt.zero_grad()
        CE(checkpoint(net, x, use_reentrant=False), y).backward()
        opt.step()


def _checkpointed_reentrant(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        CE(checkpoint(net, x.requires_grad_(), use_reentrant=True), y).backward()
        opt.step()


def _checkpointed_layers(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        CE(checkpoint_sequential(net, 2, x, use_reentrant=False), y).backward()
        opt.step()


def _jacobian(net: Any, batch: Any) -> Tensor:
    """A penalty on products of a fixed direction with the model's slope, in forward mode's place."""
    x = batch[0].clone().requires_grad_()
    out = net(x)
    direction = torch.ones_like(out)
    (slope,) = torch.autograd.grad(out, x, direction, create_graph=True)
    return CE(out, batch[1]) + 0.01 * slope.square().sum(1).mean()


def _curved(net: Any, batch: Any) -> Tensor:
    """Second derivatives by the inputs (a physics-informed network)."""
    x = batch[0].clone().requires_grad_()
    out = net(x)[:, :1]
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return (curve[:, :1] + out.sin()).square().mean()


# ---- models


class Patched(nn.Module):
    """A layer whose forward was replaced on the object, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        plain = self.b.forward
        self.b.forward = lambda x: plain(x) * 0.5 + x  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))  # type: ignore[no-any-return]


def _patched_whole() -> nn.Module:
    net = small_net()
    net.forward = types.MethodType(lambda self, x: nn.Sequential.forward(self, x) * 2, net)  # type: ignore[method-assign]
    return net


class Layers(nn.Module):
    """A stem, some layers, and a head."""

    def __init__(self, *between: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Linear(8, 16), nn.Sequential(*between), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)).flatten(1))  # type: ignore[no-any-return]


class Of(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


class Image(nn.Module):
    """Eight numbers as channels of a small image, layers, and a head."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.between = nn.Sequential(*between)
        self.b = nn.LazyLinear(3)
        self.double()
        self.forward(torch.zeros(2, 8).double())

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, 2, 2, 2).repeat(1, 1, 2, 2)
        return self.b(self.between(self.stem(h)).flatten(1))  # type: ignore[no-any-return]


class Lazy(nn.Module):
    """Layers that get their sizes at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LazyLinear(16), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))  # type: ignore[no-any-return]


class Words(nn.Module):
    """Tokens in, an embedding with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.e, self.b = nn.Embedding(7, 8, **options), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.e(x).mean(1))  # type: ignore[no-any-return]


def _words(**options: Any) -> Made:
    return made(Words(**options), torch.randint(7, (21, 5)), torch.randint(3, (21,)))


class Shared(nn.Module):
    """One layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(3):
            h = h + F.gelu(self.b(h))
        return self.c(h)  # type: ignore[no-any-return]


class Extra(nn.Module):
    """Something in its state that is no tensor; buffers that are not kept; an empty parameter; a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.none = small_net(), nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3]), persistent=False)
        self.register_buffer("flag", torch.tensor(True))
        self.calls = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(3.0)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale + self.shift + self.none.sum()  # type: ignore[no-any-return]


class Gone(nn.Module):
    """Parameters in a list and a dictionary, one of which no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 3))])
        self.dict = nn.ParameterDict({"used": nn.Parameter(torch.zeros(3)), "not": nn.Parameter(torch.ones(3))})

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.list[0]).tanh() @ self.list[1] + self.dict["used"]  # type: ignore[no-any-return]


class Straight(nn.Module):
    """Binary weights with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight
        w = w + (w.sign() * w.abs().mean() - w).detach()
        return self.b(F.linear(x, w, self.a.bias).tanh())  # type: ignore[no-any-return]


class Observed(nn.Module):
    """Quantised by the range seen so far, which is kept in buffers."""

    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.a(x))
        if self.training:
            with torch.no_grad():
                self.low.copy_(torch.minimum(self.low, h.min()))
                self.high.copy_(torch.maximum(self.high, h.max()))
        step = (self.high - self.low).clamp(min=1e-3) / 15
        return self.b(h + ((h / step).round() * step - h).detach())  # type: ignore[no-any-return]


class Answer(NamedTuple):
    """Outputs by name."""

    logits: Tensor
    hidden: Tensor


@dataclass
class Record:
    """Outputs by attribute."""

    logits: Tensor
    hidden: Tensor


class Named(nn.Module):
    """Outputs of a kind of its own."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net, self.kind = small_net(), kind

    def forward(self, x: Tensor) -> Any:
        out = self.net(x)
        return self.kind(out, out * 2)


class Symmetric(nn.Module):
    """A parametrization: symmetric."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def _parametrized(kind: str) -> nn.Module:
    net: Any = small_net().double()
    match kind:
        case "orthogonal":
            parametrizations.orthogonal(net[2])
        case "symmetric":
            parametrize.register_parametrization(net[2], "weight", Symmetric())
        case "old weight norm":
            nn.utils.weight_norm(net[2])
        case "old spectral norm":
            nn.utils.spectral_norm(net[2])
    return net  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """torch's transformer, time first, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(2, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.t, self.b = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x.view(len(x), 4, 2)).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=h.dtype)
        return self.b(self.t(h, mask=mask)[-1])  # type: ignore[no-any-return]


class Adaptive(nn.Module):
    """The adaptive softmax gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(8, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 12, [4, 8])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(F.gelu(self.body(x)), y).loss  # type: ignore[no-any-return]


def _hooked_after(kind: str) -> Any:
    """A hook that is added behind the call, on a layer."""

    def loop(net: Any, opt: Any, batches: Any) -> None:
        layer = [m for m in net.modules() if isinstance(m, nn.Linear)][1]
        match kind:
            case "forward":
                layer.register_forward_hook(lambda _m, _i, out: out * 0.5)
            case "pre":
                layer.register_forward_pre_hook(lambda _m, i: (i[0] * 0.5,))
            case "backward":
                layer.register_full_backward_hook(
                    lambda _m, gs, _o: tuple(None if g is None else g / g.norm() for g in gs)
                )
            case "backward pre":
                layer.register_full_backward_pre_hook(lambda _m, gs: tuple(g / g.norm() for g in gs))
            case "model":
                net.register_forward_hook(lambda _m, _i, out: out * 0.5)
            case "model pre":
                net.register_forward_pre_hook(lambda _m, i: (i[0] * 0.5,))
        epochs(pairs(CE), 1)(net, opt, batches)

    return loop


def _head_replaced(net: Any, opt: Any, batches: Any) -> None:
    """Another head in the middle of the last epoch."""
    for i, (x, y) in enumerate(batches):
        if i == 2:
            head = nn.Linear(16, 3).double()
            with torch.no_grad():
                head.weight.fill_(0.1)
                head.bias.zero_()
            net[4] = head
            opt.add_param_group({"params": list(head.parameters())})
        one_step(net, opt, x, y)


def _weight_replaced(net: Any, opt: Any, batches: Any) -> None:
    """A new parameter in a layer, in the middle of the last epoch."""
    for i, (x, y) in enumerate(batches):
        if i == 2:
            layer = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
            layer.weight = nn.Parameter(torch.full_like(layer.weight, 0.1))
            opt.add_param_group({"params": [layer.weight]})
        one_step(net, opt, x, y)


def _state_in_place(net: Any, opt: Any, batches: Any) -> None:
    """Weights are changed through the dictionary of the state."""
    for _ in range(2):
        epochs(pairs(CE), 1)(net, opt, batches)
        with torch.no_grad():
            for v in net.state_dict().values():
                v.mul_(0.5)


def _assigned(net: Any, opt: Any, batches: Any) -> None:
    """Tensors of a state take the parameters' places."""
    state = {n: v.clone() * 0.5 for n, v in net.state_dict().items()}
    net.load_state_dict(state, assign=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    epochs(pairs(CE), 1)(net, opt, batches)


def _initialised_by_data(net: Any, opt: Any, batches: Any) -> None:
    """Weights drawn through ``m.weight.data``."""
    torch.manual_seed(7)
    for m in net.modules():
        if isinstance(m, nn.Linear):
            m.weight.data.normal_(0.0, 0.1)
            m.bias.data.zero_()
    epochs(pairs(CE), 1)(net, opt, batches)
    torch.manual_seed(8)
    for m in net.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
    epochs(pairs(CE), 1)(net, opt, batches)


def _called_forward(net: Any, opt: Any, batches: Any) -> None:
    """``forward`` is called by its name."""
    for x, y in batches:
        opt.zero_grad()
        CE(net.forward(x), y).backward()
        opt.step()


def _layer_by_layer(net: Any, opt: Any, batches: Any) -> None:
    """The loop goes through the layers itself."""
    for x, y in batches:
        opt.zero_grad()
        h = x
        for layer in net:
            h = layer(h)
        CE(h, y).backward()
        opt.step()


def _sliced(net: Any, opt: Any, batches: Any) -> None:
    """Features by a slice of the model, a head by its last layer."""
    for x, y in batches:
        opt.zero_grad()
        CE(net[-1](net[:-1](x)), y).backward()
        opt.step()


def _compiled_after(net: Any, opt: Any, batches: Any) -> None:
    """Compiled behind the call."""
    fast = torch.compile(net, backend="eager")
    epochs(pairs(CE), 1)(fast, opt, batches)


def _precision_changed(net: Any, opt: Any, batches: Any) -> None:
    """Single precision from the second epoch on, and back."""
    epochs(pairs(CE), 1)(net, opt, batches)
    net.float()
    for x, y in batches:
        one_step(net, opt, x.float(), y)
    net.double()


def _by_attribute(net: Any, _opt: Any, batches: Any) -> None:
    """Groups by marks on the parameters, made behind the call."""
    decay = [p for p in net.parameters() if not getattr(p, "no_decay", False)]
    rest = [p for p in net.parameters() if getattr(p, "no_decay", False)]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    epochs(pairs(CE))(net, torch.optim.SGD([g for g in groups if g["params"]], lr=0.05), batches)


def _marked() -> nn.Module:
    net = small_net()
    for p in list(net.parameters())[::2]:
        p.no_decay = True  # type: ignore[attr-defined]
    return net


def _averaged_by_torch(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """torch's averaged model, made before the call, follows the parameters."""
    average = opt.average
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            average.update_parameters(net)
    return {f"average.{n}": v for n, v in average.state_dict().items()}


def _averaged_made() -> Made:
    net, opt, batches = classified()
    opt.average = torch.optim.swa_utils.AveragedModel(  # type: ignore[attr-defined]
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    )
    return net, opt, batches


class Cautious(torch.optim.AdamW):
    """AdamW whose gradients are scaled by each tensor's norm first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm().clamp(min=1e-6))
        return super().step(closure)


# ---- drawn in the loop or in forward


def _drawn(kind: str) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        rng = np.random.default_rng(3)
        for x, y in batches:
            opt.zero_grad()
            match kind:
                case "generator":
                    x = x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
                case "numpy":
                    x = x + 0.1 * torch.from_numpy(rng.standard_normal(tuple(x.shape)))
                case "in place":
                    x = x + torch.empty_like(x).uniform_(-0.1, 0.1)
                case "dropout":
                    x = F.dropout(x, 0.2)
                case "normal":
                    x = torch.distributions.Normal(x, 0.1).sample()
            out = net(x)
            if kind == "action":
                policy = torch.distributions.Categorical(logits=out)
                action = policy.sample()
                loss = -(policy.log_prob(action) * (action == y).double()).mean()
            else:
                loss = CE(out, y)
            loss.backward()
            opt.step()

    return loop


FORWARD_DRAWS: dict[str, Any] = {
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel": lambda h: F.gumbel_softmax(h, dim=1),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.7)),
    "multinomial": lambda h: h * F.one_hot(torch.multinomial(h.detach().softmax(1), 1)[:, 0], 16),
    "permuted features": lambda h: h + 0.1 * h[:, torch.randperm(16)],
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "numpy": lambda h: h * torch.from_numpy(np.random.rand(*h.shape)),
    "one number for all": lambda h: h * torch.rand(()),
}


# ---- losses


def _lovasz(out: Tensor, y: Tensor) -> Tensor:
    """Lovász hinge over the batch."""
    errors, order = (1 - out[:, 0] * (2.0 * (y == 0) - 1)).sort(descending=True)
    truth = (y == 0).double()[order]
    inter, union = truth.sum() - truth.cumsum(0), truth.sum() + (1 - truth).cumsum(0)
    jaccard = 1 - inter / union
    return torch.dot(F.relu(errors), torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]]))


def _cox(out: Tensor, y: Tensor) -> Tensor:
    """Partial likelihood of survival: sums over those who live longer."""
    order = (y + torch.arange(len(y)) * 0.01).argsort(descending=True)
    risk = out[order, 0]
    return -(risk - risk.logcumsumexp(0)).mean()


def _mmd(out: Tensor, y: Tensor) -> Tensor:
    """Distance of two groups' distributions."""
    k = (-torch.cdist(out, out).square()).exp()
    a, b = (y == 0).double(), (y != 0).double()
    a, b = a / a.sum().clamp(min=1), b / b.sum().clamp(min=1)
    return CE(out, y) + (a @ k @ a + b @ k @ b - 2 * a @ k @ b)


def _coral(out: Tensor, y: Tensor) -> Tensor:
    return CE(out, y) + torch.cov(out.T).square().sum()


def _ranked(out: Tensor, y: Tensor) -> Tensor:
    """All pairs whose labels differ."""
    gap = out[:, None, 0] - out[None, :, 0]
    wanted = (y[:, None] - y[None]).sign()
    return F.softplus(-gap * wanted)[wanted != 0].mean()


def _concordance(out: Tensor, y: Tensor) -> Tensor:
    a, b = out[:, 0], y.double()
    covariance = ((a - a.mean()) * (b - b.mean())).mean()
    return 1 - 2 * covariance / (a.var(correction=0) + b.var(correction=0) + (a.mean() - b.mean()) ** 2 + 1e-3)


def _swapped(out: Tensor, _y: Tensor) -> Tensor:
    """Assignments are balanced over the batch (Sinkhorn)."""
    with torch.no_grad():
        q = (out / 0.5).exp()
        for _ in range(3):
            q = q / q.sum(0, keepdim=True)
            q = q / q.sum(1, keepdim=True)
    return -(q * out.log_softmax(1)).sum(1).mean()


def _balanced_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Answers are to be spread over classes: the entropy of their mean."""
    mean = out.softmax(1).mean(0)
    return CE(out, y) + (mean * mean.log()).sum()


USUAL_LOSSES: dict[str, Any] = {
    "gaussian nll": lambda o, y: F.gaussian_nll_loss(o[:, 0], y.double(), o[:, 1].exp()),
    "poisson nll": lambda o, y: F.poisson_nll_loss(o[:, 0], y.double()),
    "huber": lambda o, y: F.huber_loss(o[:, 0], y.double()),
    "cosine embedding": lambda o, y: F.cosine_embedding_loss(o[:, :1], o[:, 1:2], 2.0 * (y == 0) - 1),
    "multilabel soft margin": lambda o, y: F.multilabel_soft_margin_loss(o, F.one_hot(y, 3).double()),
    "margin ranking": lambda o, y: F.margin_ranking_loss(o[:, 0], o[:, 1], 2.0 * (y == 0) - 1, margin=0.1),
    "hinge embedding": lambda o, y: F.hinge_embedding_loss(o[:, 0], 2.0 * (y == 0) - 1),
    "quantile": lambda o, y: torch.maximum(0.9 * (y - o[:, 0]), -0.1 * (y - o[:, 0])).mean(),
    "triplet": lambda o, _y: F.triplet_margin_loss(o[:, :1], o[:, 1:2], o[:, 2:]),
    "binary, weighted, by sample": lambda o, y: F.binary_cross_entropy_with_logits(
        o, F.one_hot(y, 3).double(), weight=(1 + y)[:, None].double(), pos_weight=torch.tensor([1.0, 2.0, 3.0])
    ),
    "soft targets with weights": lambda o, y: CE(
        o, F.one_hot(y, 3) * 0.8 + 0.1, weight=torch.tensor([1.0, 2.0, 0.5]).double()
    ),
    "mean of a mask of features": lambda o, _y: (o.square() * (torch.arange(3) != 1)).mean(),
    "none, then weighted by rows": lambda o, y: (CE(o, y, reduction="none") * (1 + y)).mean(),
}
UNUSUAL_LOSSES: dict[str, Any] = {
    "none, weighted and divided by the weights": lambda o, y: (
        (CE(o, y, reduction="none") * (1 + y)).sum() / (1 + y).sum()
    ),
    "mean over a class": lambda o, y: CE(o, y, reduction="none")[y != 1].mean() if (y != 1).any() else o.sum() * 0,
    "lovasz": _lovasz,
    "partial likelihood": _cox,
    "discrepancy": _mmd,
    "covariance": _coral,
    "ranked pairs": _ranked,
    "concordance": _concordance,
    "balanced assignments": _swapped,
    "entropy of the mean": _balanced_entropy,
    "perplexity": lambda o, y: CE(o, y).exp(),
    "root mean square": lambda o, y: (o[:, 0] - y).square().mean().sqrt(),
    "largest of a batch": lambda o, y: CE(o, y) + o.abs().max(),
    "norm of all outputs": lambda o, y: CE(o, y) + 0.01 * o.norm(),
    "r squared": lambda o, y: (o[:, 0] - y).square().sum() / ((y - y.double().mean()).square().sum() + 1),
    "explained by sums": lambda o, y: CE(o, y, reduction="sum") / len(y),
    "by the batch's size twice": lambda o, y: CE(o, y, reduction="sum") / len(y) ** 2,
}

# ---- the table

_loops: dict[str, Any] = {
    "an update for twelve samples": _steps_by_samples,
    "a rate by samples seen": _rate_by_samples,
    "a rate by the batch": _rate_by_batch,
    "an average by samples": _average_by_samples,
    "a term that grows with samples": _annealed_by_samples,
    "odd batches left out": _left_out_small,
    "sums over a fixed size": _sum_over_size,
    "a schedule by the loader": _rate_by_loader,
    "standardised by a pass": _standardised,
    "standardised by means": _standardised_by_batches,
    "class weights by a pass": _class_weights,
    "positive weight by a pass": _positive_weight,
    "centred by a running mean": _running_centre,
    "scaled by a running deviation": _running_scale,
    "prototypes": _prototypes,
    "groups weighed by their losses": _group_dro,
    "best by training loss": _best_by_training,
    "epochs left early": _left_early,
    "Polyak's step": _grad_by_loss,
    "exemplars appended": _rehearsed,
    "exemplars apart": _rehearsed_apart,
    "the last batch again": _last_batch_again,
    "a second loader": _two_loaders,
    "a second loader, joined": _two_loaders_joined,
    "a loader beside itself": _same_loader_twice,
    "a pass within a pass": _validated_inside,
    "two batches a backward": _two_batches_a_backward,
    "the larger of two losses": _worst_of_two,
    "the geometric mean of losses": _log_of_losses,
    "gradients cached": _cached,
    "gradients cached, again": _cached_again,
    "gradients cached, contrast": _cached_contrast,
    "gradients of some leaves": _some_leaves,
    "several roots": _several_roots,
    "gradient surgery": _surgery,
    "foreach": _foreach,
    "clipping in halves": _total_norm,
    "hypergradient": _hypergradient,
    "variance reduced": _variance_reduced,
    "Langevin": _langevin,
    "rows of length one": _moved_back,
    "renormed": _renormed,
    "lottery": _lottery,
    "gradients replaced": _new_gradients,
    "optimizer state reset": _state_reset,
    "momenta halved": _through_state,
    "hooks of an optimizer": _step_hooks,
    "saved tensors packed": _kept_for_backward,
    "checkpoint around the model": _checkpointed,
    "reentrant checkpoint": _checkpointed_reentrant,
    "checkpointed layers": _checkpointed_layers,
    "head replaced": _head_replaced,
    "weight replaced": _weight_replaced,
    "state changed in place": _state_in_place,
    "state assigned": _assigned,
    "drawn through data": _initialised_by_data,
    "forward by name": _called_forward,
    "layer by layer": _layer_by_layer,
    "slices of a model": _sliced,
    "compiled behind the call": _compiled_after,
    "precision changed": _precision_changed,
}
for _name, _loop in _loops.items():
    program("habit", _name, classified, _loop)
    program("habit", f"{_name}, even", lambda: classified(count=24, batch=8), _loop)
program(
    "habit",
    "labels replaced",
    lambda: made(small_net(), normal(21, 8), torch.randint(3, (21,)), torch.arange(21), shuffle=True),
    _relabelled,
)
for _kind in ("forward", "pre", "backward", "backward pre", "model", "model pre"):
    program("habit", f"hook behind the call: {_kind}", classified, _hooked_after(_kind))
for _kind in ("generator", "numpy", "in place", "dropout", "normal", "action"):
    program("habit", f"drawn in the loop: {_kind}", classified, _drawn(_kind))
for _kind, _draw in FORWARD_DRAWS.items():
    program(
        "habit", f"drawn in forward: {_kind}", lambda f=_draw: classified(lambda: Layers(Of(f))), epochs(pairs(CE)), CE
    )  # type: ignore[misc]
for _kind, _loss in {**USUAL_LOSSES, **UNUSUAL_LOSSES}.items():
    program("habit", f"loss: {_kind}", classified, epochs(pairs(_loss)), _loss)
for _kind in ("orthogonal", "symmetric", "old weight norm", "old spectral norm"):
    program(
        "habit", f"parametrized: {_kind}", lambda k=_kind: classified(lambda: _parametrized(k)), epochs(pairs(CE)), CE
    )  # type: ignore[misc]
_models: dict[str, Any] = {
    "a layer's forward replaced": Patched,
    "the model's forward replaced": _patched_whole,
    "one layer three times": Shared,
    "extra state": Extra,
    "parameters in containers": Gone,
    "straight-through": Straight,
    "range observed": Observed,
    "time first": Decoder,
    "lazy": Lazy,
    "glu": lambda: Layers(nn.Linear(16, 32), nn.GLU()),
    "prelu": lambda: Layers(nn.Linear(16, 16), nn.PReLU(16)),
    "softmax of features": lambda: Layers(nn.Linear(16, 16), nn.Softmax(1)),
    "cumulative features": lambda: Layers(nn.Linear(16, 16), Of(lambda h: h.cumsum(1))),
    "sorted features": lambda: Layers(nn.Linear(16, 16), Of(lambda h: h.sort(1).values)),
    "rolled features": lambda: Layers(nn.Linear(16, 16), Of(lambda h: h + h.roll(1, 1))),
    "features halved": lambda: Layers(nn.Linear(16, 16), Of(lambda h: h[:, :8] * h[:, 8:]), width=8),
    "features in odd and even": lambda: Layers(nn.Linear(16, 16), Of(lambda h: h[:, ::2] - h[:, 1::2]), width=8),
    "features transformed": lambda: Layers(nn.Linear(16, 16), Of(lambda h: torch.fft.fft(h).real)),
    "largest of pairs": lambda: Layers(nn.Linear(16, 16), Of(lambda h: h.view(-1, 8, 2).amax(2)), width=8),
    "products of features": lambda: Layers(nn.Linear(16, 4), Of(lambda h: torch.einsum("ni,nj->nij", h, h).flatten(1))),
    "norm by rms": lambda: Layers(nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 16)),
    "features normalised": lambda: Layers(nn.Linear(16, 16), Of(lambda h: F.normalize(h, dim=1))),
    "features less their mean": lambda: Layers(nn.Linear(16, 16), Of(lambda h: h - h.mean(1, keepdim=True))),
    "top features": lambda: Layers(nn.Linear(16, 16), Of(lambda h: h * (h >= h.topk(4, 1).values[:, -1:]))),
    "grouped convolution": lambda: Image(nn.Conv2d(8, 8, 3, groups=4, padding=1), nn.ReLU()),
    "depthwise": lambda: Image(nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 8, 1)),
    "transposed": lambda: Image(nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 1)),
    "pixel shuffle": lambda: Image(nn.Conv2d(8, 16, 1), nn.PixelShuffle(2), nn.Conv2d(4, 4, 1)),
    "channel shuffle": lambda: Image(nn.Conv2d(8, 8, 1), nn.ChannelShuffle(4), nn.Conv2d(8, 4, 1)),
    "local response": lambda: Image(nn.Conv2d(8, 8, 1), nn.LocalResponseNorm(3), nn.Conv2d(8, 4, 1)),
    "softmax of channels": lambda: Image(nn.Conv2d(8, 8, 1), nn.Softmax2d(), nn.Conv2d(8, 4, 1)),
    "circular padding": lambda: Image(nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), nn.Conv2d(8, 4, 1)),
    "squeeze and excite": lambda: Image(nn.Conv2d(8, 8, 1), Of(lambda h: h * h.mean((2, 3), keepdim=True).sigmoid())),
    "group norm": lambda: Image(nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 3)),
    "dropout of channels, none": lambda: Image(nn.Conv2d(8, 8, 1), nn.Dropout2d(0.0), nn.Conv2d(8, 4, 1)),
    "upsampled": lambda: Image(nn.Conv2d(8, 8, 1), nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 3)),
    "unfolded": lambda: Image(nn.Unfold(2)),
}
for _kind, _model in _models.items():
    program("habit", f"model: {_kind}", lambda m=_model: classified(m), epochs(pairs(CE)), CE)  # type: ignore[misc]
for _kind, _model in {
    "instance norm with statistics": lambda: Image(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
    "batch norm, cumulative": lambda: Layers(nn.BatchNorm1d(16, momentum=None)),
    "batch norm, not affine": lambda: Layers(nn.BatchNorm1d(16, affine=False), nn.Linear(16, 16)),
    "batch norm, no statistics": lambda: Layers(nn.BatchNorm1d(16, track_running_stats=False)),
    "batch norm, synchronised": lambda: Layers(nn.SyncBatchNorm(16)),
}.items():
    program("habit", f"norm: {_kind}", lambda m=_model: classified(m, 24), epochs(pairs(CE)), CE, batch_norm="exact")  # type: ignore[misc]
for _kind, _options in {
    "max_norm": {"max_norm": 0.5},
    "padding_idx": {"padding_idx": 0},
    "scaled by frequency": {"scale_grad_by_freq": True},
}.items():
    program("habit", f"words: {_kind}", lambda o=_options: _words(**o), epochs(pairs(CE)), CE)  # type: ignore[misc]
for _kind, _of in {"named tuple": Answer, "record": Record}.items():
    program(
        "habit",
        f"answer: {_kind}",
        lambda k=_of: classified(lambda: Named(k)),  # type: ignore[misc]
        epochs(lambda n, b: CE((o := n(b[0])).logits, b[1]) + 0.1 * o.hidden.square().mean()),
    )
program(
    "habit",
    "adaptive softmax",
    lambda: made(Adaptive(), normal(21, 8), torch.randint(12, (21,))),
    epochs(lambda n, b: n(b[0], b[1])),
)
program("habit", "slopes of the model in the loss", classified, epochs(_jacobian))
program(
    "habit",
    "curvature in the loss",
    lambda: classified(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))),
    epochs(_curved),
)
program("habit", "groups by marks", lambda: classified(_marked), _by_attribute)
program("habit", "torch's averaged model", _averaged_made, _averaged_by_torch)
program(
    "habit",
    "AdamW with normed gradients",
    lambda: ((m := classified())[0], Cautious(m[0].parameters(), lr=0.01), m[2]),
    epochs(pairs(CE)),
    CE,
)
for _kind, _opt in {
    "amsgrad, maximise": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True, eps=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, eps=1e-3),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rate as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), eps=1e-3),
}.items():
    program(
        "habit",
        f"optimizer: {_kind}",
        lambda o=_opt: ((m := classified())[0], o(m[0].parameters()), m[2]),  # type: ignore[misc]
        epochs(pairs(CE)),
        CE,
        within=1e-6 if _kind == "Rprop" else 1e-8,
    )


class Fetched(Dataset[Any]):
    """A data set that gives several samples at once."""

    def __init__(self) -> None:
        self.x, self.y = normal(21, 8), torch.randint(3, (21,))

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [(self.x[i], self.y[i]) for i in rows]


class Told(Dataset[Any]):
    """Samples as dictionaries with text, numbers and arrays."""

    def __init__(self) -> None:
        self.x, self.y = np.random.randn(21, 8), np.random.randint(0, 3, 21)

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "text": f"sample {i}",
            "x": self.x[i],
            "y": int(self.y[i]),
            "meta": {"index": i, "weight": 0.5 + i / 21},
        }


def _told(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    read = []
    for batch in batches:
        opt.zero_grad()
        each = CE(net(batch["x"]), batch["y"], reduction="none")
        (each * batch["meta"]["weight"]).mean().backward()
        opt.step()
        read += [t for t in batch["text"] if t == "sample 0"]
    return numbers(kept=len(batches.dataset))


program(
    "habit",
    "data: several at once",
    lambda: (*classified()[:2], DataLoader(Fetched(), 6, shuffle=True)),
    epochs(pairs(CE)),
    CE,
)
program("habit", "data: dictionaries with text", lambda: (*classified()[:2], DataLoader(Told(), 6)), _told)
program(
    "habit",
    "data: two workers",
    lambda: (*classified()[:2], DataLoader(Fetched(), 6, shuffle=True, num_workers=2, prefetch_factor=1)),
    epochs(pairs(CE), 1),
)
program(
    "habit",
    "data: fewer samples than a batch",
    lambda: (*classified()[:2], loader(normal(5, 8), torch.randint(3, (5,)), batch=8)),
    epochs(pairs(CE)),
    CE,
)
program(
    "habit",
    "data: last left out",
    lambda: (*classified()[:2], loader(normal(21, 8), torch.randint(3, (21,)), drop_last=True)),
    epochs(pairs(CE)),
    CE,
)
