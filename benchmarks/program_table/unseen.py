"""Programs of public repositories: samplers that read the loop, statistics kept between steps, weights written by
samples, gradients measured or made by hand."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, default_collate

from benchmarks.program_table import Made, made, normal, sgd
from benchmarks.program_table.common import CE, MSE, Named, add_program, by_loss, classified, one_step, small_net
from benchmarks.program_table.scripts import numbers


def _numbered(net: Any = small_net, count: int = 21, **options: Any) -> Made:
    """Samples with a class and their number."""
    return made(net(), normal(count, 8), torch.randint(3, (count,)), torch.arange(count), **options)


def _held_out() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(11, 8, generator=g).double(), torch.randint(3, (11,), generator=g)


def _sampled(sampler: Any, count: int = 21, **options: Any) -> Made:
    net = small_net().double()
    data = TensorDataset(normal(count, 8), torch.randint(3, (count,)), torch.arange(count))
    return net, sgd(net), DataLoader(data, **{"batch_size": 6, "sampler": sampler, **options})


# ---- samplers and loaders


class Endless(Sampler[int]):
    """Shuffles without end, for training by iterations."""

    def __iter__(self) -> Iterator[int]:
        g = torch.Generator().manual_seed(2)
        while True:
            yield from torch.randperm(21, generator=g).tolist()


def _iterations(net: Any, opt: Any, batches: Any) -> None:
    """Ten iterations over a sampler that never ends."""
    for _, (x, y, _i) in zip(range(10), batches, strict=False):
        one_step(net, opt, x, y)


add_program("a sampler without end", _iterations, lambda: _sampled(Endless()))


class Told(Sampler[int]):
    """Reads its ``level`` while it is drawn from."""

    def __init__(self) -> None:
        self.level, self.scores = 0, torch.zeros(21)

    def __iter__(self) -> Iterator[int]:
        for i in range(21):
            yield (i * (1 + self.level % 2) + self.level) % 21

    def __len__(self) -> int:
        return 21


def _told_by_step(net: Any, opt: Any, batches: Any) -> None:
    """The loop sets the sampler's level in every step."""
    for _ in range(2):
        for step, (x, y, _i) in enumerate(batches):
            one_step(net, opt, x, y)
            batches.sampler.level = step


add_program("a sampler told in every step", _told_by_step, lambda: _sampled(Told()))


class Hard(Sampler[int]):
    """Samples with the largest scores first, of those that are left."""

    def __init__(self) -> None:
        self.scores = torch.zeros(21)

    def __iter__(self) -> Iterator[int]:
        left = list(range(21))
        while left:
            left.remove(pick := max(left, key=lambda i: (float(self.scores[i % 7]), -i)))
            yield pick

    def __len__(self) -> int:
        return 21


def _hardest_first(net: Any, opt: Any, batches: Any) -> None:
    """Scores of groups of samples follow their losses, in the middle of an epoch."""
    for _ in range(2):
        for x, y, i in batches:
            opt.zero_grad()
            each = CE(net(x), y, reduction="none")
            each.mean().backward()
            opt.step()
            batches.sampler.scores[i % 7] = each.detach().float()


add_program("a sampler that follows losses within an epoch", _hardest_first, lambda: _sampled(Hard()))


class Balanced(Sampler[int]):
    """Draws classes by weights that the loop sets."""

    def __init__(self) -> None:
        self.weights = [1.0, 1.0, 1.0]

    def __iter__(self) -> Iterator[int]:
        each = torch.tensor([self.weights[i % 3] for i in range(21)])
        return iter(torch.multinomial(each, 18, True, generator=torch.Generator().manual_seed(1)).tolist())

    def __len__(self) -> int:
        return 18


def _classes_weighed(net: Any, opt: Any, batches: Any) -> None:
    """Weights of groups are the share of wrong answers in them, in a list."""
    for _ in range(3):
        wrong, seen = [0.1] * 3, [0.2] * 3
        for x, y, i in batches:
            opt.zero_grad()
            out = net(x)
            CE(out, y).backward()
            opt.step()
            for k, miss in zip((i % 3).tolist(), (out.argmax(1) != y).tolist(), strict=True):
                wrong[k] += miss
                seen[k] += 1
        batches.sampler.weights = [w / s for w, s in zip(wrong, seen, strict=True)]


add_program("groups drawn by their share of errors", _classes_weighed, lambda: _sampled(Balanced()))


def _named_rows(rows: Any) -> Any:
    x, y, i = default_collate(rows)
    return x, y, [f"sample{int(n)}" for n in i]


def _by_names(net: Any, opt: Any, batches: Any) -> None:
    """Losses are weighed by what is looked up by a sample's name."""
    table = {f"sample{i}": 0.1 * i for i in range(21)}
    for _ in range(2):
        for x, y, names in batches:
            opt.zero_grad()
            each = CE(net(x), y, reduction="none")
            sum(table[n] * v for n, v in zip(names, each, strict=False)).div(len(each)).backward()
            opt.step()


add_program("names in a collate_fn, with zip", _by_names, lambda: _sampled(None, collate_fn=_named_rows))


def _by_names_vector(net: Any, opt: Any, batches: Any) -> None:
    table = {f"sample{i}": 0.1 * i for i in range(21)}
    for _ in range(2):
        for x, y, names in batches:
            opt.zero_grad()
            each = CE(net(x), y, reduction="none")
            w = torch.tensor([table[n] for n in names[: len(x)]]).double()
            (w * each).mean().backward()
            opt.step()


add_program("names in a collate_fn, a vector", _by_names_vector, lambda: _sampled(None, collate_fn=_named_rows))


def _array_rows(rows: Any) -> Any:
    x, y, i = default_collate(rows)
    return x, y, i.numpy() * 0.1


def _by_arrays(net: Any, opt: Any, batches: Any) -> None:
    """A collate_fn adds an array with a row for each sample."""
    for _ in range(2):
        for x, y, w in batches:
            opt.zero_grad()
            (torch.from_numpy(w)[: len(x)] * CE(net(x), y, reduction="none")).mean().backward()
            opt.step()


add_program("an array in a collate_fn", _by_arrays, lambda: _sampled(None, collate_fn=_array_rows))


def _with_table(rows: Any) -> Any:
    x, y, _i = default_collate(rows)
    return x, y, torch.arange(48).view(6, 8).double() / 48


def _by_table(net: Any, opt: Any, batches: Any) -> None:
    """A collate_fn adds a table with as many rows as a batch."""
    for _ in range(2):
        for x, y, table in batches:
            opt.zero_grad()
            CE(net(x + table.mean(0)), y).backward()
            opt.step()


add_program("a table in a collate_fn", _by_table, lambda: _sampled(None, collate_fn=_with_table))


def _listed(batches: list[Any], net: Any = small_net) -> Made:
    net = net().double()
    return net, sgd(net), batches


def _tables() -> list[Any]:
    return [
        {"x": normal(6, 8), "y": torch.randint(3, (6,)), "table": torch.randn(6, 8).double(), "names": list("abcdef")}
        for _ in range(4)
    ]


def _by_table_of_list(net: Any, opt: Any, batches: Any) -> None:
    """Every batch of a list has a table of six rows that is no samples."""
    for batch in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(batch["x"] + batch["table"].mean(0)), batch["y"]).backward()
        opt.step()


add_program("a table in a list of batches", _by_table_of_list, lambda: _listed(_tables()))


def _by_names_of_list(net: Any, opt: Any, batches: Any) -> None:
    worth = {c: 0.3 * i for i, c in enumerate("abcdef")}
    for batch in itertools.chain(batches, batches):
        opt.zero_grad()
        each = CE(net(batch["x"]), batch["y"], reduction="none")
        torch.stack([worth[n] * v for n, v in zip(batch["names"], each, strict=False)]).mean().backward()
        opt.step()


add_program("names in a list of batches", _by_names_of_list, lambda: _listed(_tables()))


class Packed(nn.Module):
    """Words of several sequences, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens)
        return self.out(h + h.cumsum(1) / 10)  # type: ignore[no-any-return]


def _joined(rows: Any) -> Any:
    return torch.cat([r[0] for r in rows])[None], torch.cat([r[1] for r in rows])[None]


def _packed() -> Made:
    net = Packed().double()
    words = [torch.randint(11, (3 + i % 4,)) for i in range(21)]
    data: Any = [(w, w.roll(-1)) for w in words]
    return net, sgd(net), DataLoader(data, 6, collate_fn=_joined)


def _reads_packed(net: Any, opt: Any, batches: Any) -> None:
    for tokens, wanted in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(tokens).flatten(0, 1), wanted.flatten()).backward()
        opt.step()


add_program("sequences packed into one row", _reads_packed, _packed)


class Arrays:
    """Yields arrays."""

    def __init__(self) -> None:
        g = np.random.default_rng(0)
        self.x, self.y = g.normal(size=(21, 8)), g.integers(3, size=21)

    def __iter__(self) -> Iterator[Any]:
        for i in range(0, 21, 6):
            yield self.x[i : i + 6], self.y[i : i + 6]


def _from_arrays(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, torch.from_numpy(x), torch.from_numpy(y))


add_program("a loader of arrays", _from_arrays, lambda: _listed(Arrays()))  # type: ignore[arg-type]


class Noisy(TensorDataset):
    """Adds a shift that the loop sets."""

    shift = 0.0

    def __getitem__(self, i: Any) -> Any:
        x, y = super().__getitem__(i)
        return x + self.shift, y


def _noisy() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Noisy(normal(21, 8), torch.randint(3, (21,))), 6)


def _level_by_step(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for step, (x, y) in enumerate(batches):
            one_step(net, opt, x, y)
            batches.dataset.shift = 0.1 * step


add_program("a data set whose level is set in every step", _level_by_step, _noisy)


def _level_by_loss(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            batches.dataset.shift = one_step(net, opt, x, y).detach()


add_program("a data set whose level is a loss", _level_by_loss, _noisy)


class Rollouts(IterableDataset[Any]):
    """States that a policy walks through: what it answers decides where it goes next."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __iter__(self) -> Iterator[Any]:
        g = torch.Generator().manual_seed(3)
        state = torch.randn(8, generator=g).double()
        for _ in range(18):
            with torch.no_grad():
                move = self.policy[0](state[None])[0, :1].tanh()
            state = 0.5 * state + 0.3 * move + 0.1 * torch.randn(8, generator=g).double()
            yield state, state.sum().gt(0).long()


def _walked() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Rollouts([net]), 6)


def _walks(net: Any, opt: Any, batches: Any) -> None:
    batches.dataset.policy[0] = net
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)


add_program("a stream that the policy walks through", _walks, _walked)

# ---- statistics kept between steps


def _bank_by_number(net: Any, opt: Any, batches: Any) -> None:
    """A memory bank with a feature for each sample, which are told apart (instance discrimination)."""
    bank = torch.nn.functional.normalize(torch.arange(63).view(21, 3).double().cos(), dim=1)
    for _ in range(3):
        for x, _y, i in batches:
            opt.zero_grad()
            z = F.normalize(net(x), dim=1)
            CE(z @ bank.T / 0.5, i).backward()
            opt.step()
            bank[i] = F.normalize(0.5 * bank[i] + 0.5 * z.detach(), dim=1)


add_program("a bank of features by number", _bank_by_number, _numbered)


def _labels_counted(net: Any, opt: Any, batches: Any) -> None:
    """Classes are weighed by how often they were seen so far."""
    counts = torch.ones(3).double()
    for x, y in itertools.chain(batches, batches):
        counts += torch.bincount(y, minlength=3)
        opt.zero_grad()
        CE(net(x), y, weight=counts.sum() / (3 * counts)).backward()
        opt.step()


add_program("classes weighed by counts so far", _labels_counted)


def _prior_so_far(net: Any, opt: Any, batches: Any) -> None:
    """Logits are shifted by the prior of the labels seen so far (logit adjustment)."""
    counts = torch.ones(3).double()
    for x, y in itertools.chain(batches, batches):
        counts.index_add_(0, y, torch.ones(len(y)).double())
        opt.zero_grad()
        CE(net(x) + (counts / counts.sum()).log(), y).backward()
        opt.step()


add_program("logits shifted by labels so far", _prior_so_far)


def _class_losses(net: Any, opt: Any, batches: Any) -> None:
    """Classes are weighed by a running mean of their losses."""
    means = torch.ones(3).double()
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        each = CE(net(x), y, reduction="none")
        (means[y] * each).mean().backward()
        opt.step()
        for c in range(3):
            if (y == c).any():
                means[c] = 0.5 * means[c] + 0.5 * each[y == c].mean().detach()


add_program("classes weighed by their running loss", _class_losses)


def _numbered_labels(net: Any, opt: Any, batches: Any) -> None:
    """Classes get numbers in the order in which they appear."""
    known: dict[int, int] = {}
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, x, torch.tensor([known.setdefault(c, len(known)) for c in y.tolist()]))


add_program("labels numbered as they appear", _numbered_labels)


def _dual(net: Any, opt: Any, batches: Any) -> None:
    """A multiplier of a constraint grows with its violation."""
    multiplier = torch.zeros(()).double()
    for x, y in itertools.chain(batches, batches, batches):
        opt.zero_grad()
        out = net(x)
        size = out.square().mean() - 0.05
        (CE(out, y) + multiplier * size).backward()
        opt.step()
        multiplier = (multiplier + 0.5 * size.detach()).clamp(min=0)


add_program("a multiplier of a constraint", _dual)


def _dual_late(net: Any, opt: Any, batches: Any) -> None:
    """The same, begun in the third epoch."""
    multiplier = torch.zeros(()).double()
    for epoch in range(4):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            size = out.square().mean() - 0.05
            (CE(out, y) + multiplier * size).backward()
            opt.step()
            if epoch > 1:
                multiplier = (multiplier + 0.5 * size.detach()).clamp(min=0)


add_program("a multiplier from the third epoch on", _dual_late)


def _baseline(net: Any, opt: Any, batches: Any) -> None:
    """Policy gradients less a running mean of rewards."""
    mean = torch.zeros(()).double()
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        log = net(x).log_softmax(1)
        reward = (log.argmax(1) == y).double()
        mean = 0.9 * mean + 0.1 * reward.mean()
        (-(reward - mean) * log.gather(1, log.argmax(1)[:, None])[:, 0]).mean().backward()
        opt.step()


add_program("rewards less their running mean", _baseline)


def _welford(net: Any, opt: Any, batches: Any) -> None:
    """Rewards are divided by a deviation that is kept up over all samples so far."""
    count, mean, m2 = 1e-4, torch.zeros(()).double(), torch.ones(()).double() * 1e-4
    for x, _y in itertools.chain(batches, batches):
        reward = x[:, 0]
        delta = reward.mean() - mean
        total = count + len(reward)
        mean = mean + delta * len(reward) / total
        m2 = m2 + reward.var(unbiased=False) * len(reward) + delta**2 * count * len(reward) / total
        count = total
        opt.zero_grad()
        MSE(net(x)[:, 0], (reward - mean) / (m2 / count + 1e-3).sqrt()).backward()
        opt.step()


add_program("rewards scaled by all so far", _welford)


def _free(net: Any, opt: Any, batches: Any) -> None:
    """A perturbation by the place in the batch is kept from batch to batch (free adversarial training)."""
    delta = torch.zeros(6, 8).double()
    for x, y in itertools.chain(batches, batches):
        for _ in range(2):
            noise = delta[: len(x)].clone().requires_grad_()
            opt.zero_grad()
            CE(net(x + noise), y).backward()
            opt.step()
            assert noise.grad is not None
            delta[: len(x)] = (noise.detach() + 0.1 * noise.grad.sign()).clamp(-0.3, 0.3)


add_program("a perturbation kept by place", _free)


def _mixed_with_before(net: Any, opt: Any, batches: Any) -> None:
    """Every batch is mixed with the one before."""
    before = None
    for x, y in itertools.chain(batches, batches):
        if before is not None:
            n = min(len(x), len(before))
            x = torch.cat([0.7 * x[:n] + 0.3 * before[:n], x[n:]])
        before = x.detach()
        one_step(net, opt, x, y)


add_program("mixed with the batch before", _mixed_with_before)


def _percentile(net: Any, opt: Any, batches: Any) -> None:
    """Only samples whose loss is above the median of recent losses are trained on (selective backprop)."""
    recent: deque[float] = deque(maxlen=24)
    for x, y in itertools.chain(batches, batches):
        with torch.no_grad():
            each = CE(net(x), y, reduction="none")
        recent.extend(each.tolist())
        keep = each >= float(np.median(recent))
        if keep.any():
            one_step(net, opt, x[keep], y[keep])


add_program("samples above the median of recent losses", _percentile)


def _threshold_by_all(net: Any, opt: Any, batches: Any) -> None:
    """Losses of all samples are written down in evaluation; those below the mean are trusted in the next epoch."""
    losses = torch.zeros(21).double()
    for _ in range(3):
        trusted = losses <= losses.mean()
        for x, y, i in batches:
            opt.zero_grad()
            (CE(net(x), y, reduction="none") * (0.2 + trusted[i].double())).mean().backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            for x, y, i in batches:
                losses[i] = CE(net(x), y, reduction="none")
        net.train()


add_program("samples trusted by losses in evaluation", _threshold_by_all, _numbered)


def _co_taught(net: Any, opt: Any, batches: Any) -> None:
    """Two models choose each other's samples: those with small losses (co-teaching)."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        a, b = net(x).chunk(2, 1)
        one, two = CE(a, y, reduction="none"), CE(b, y, reduction="none")
        keep = max(1, int(0.7 * len(x)))
        (one[two.argsort()[:keep]].mean() + two[one.argsort()[:keep]].mean()).backward()
        opt.step()


add_program("two heads choose samples for each other", _co_taught, lambda: classified(lambda: small_net(6)))


class Follows(nn.Module):
    """Subtracts a running mean that is a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean = small_net(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * float(x.detach().mean())
        return self.net(x - self.mean)  # type: ignore[no-any-return]


def _plain_loop(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, x, y)


add_program("a running mean in a Python number", _plain_loop, lambda: classified(Follows))


class Chosen(nn.Module):
    """Experts choose their samples: each takes those with the largest scores of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        score, out = self.gate(x).softmax(1), x.new_zeros(len(x), 3)
        for e, expert in enumerate(self.experts):
            top, at = score[:, e].topk((len(x) + 1) // 2)
            out = out.index_add(0, at, top[:, None] * expert(x[at]))
        return out


add_program("experts that choose samples", _plain_loop, lambda: classified(Chosen))

# ---- gradients measured, or made by hand


def _noise_scale(net: Any, opt: Any, batches: Any) -> None:
    """The rate goes by the noise of gradients: of one batch, and of two."""
    parameters = list(net.parameters())
    for epoch in range(2):
        small = 0.0
        for k, (x, y) in enumerate(batches):
            (CE(net(x), y) / 2).backward()
            if k % 2 == 0:
                small = sum(float((2 * p.grad).square().sum()) for p in parameters)
            else:
                big = sum(float(p.grad.square().sum()) for p in parameters)
                opt.param_groups[0]["lr"] = 0.05 * min(1.0, big / small) / (1 + epoch)
                opt.step()
                opt.zero_grad()


add_program("a rate by the noise of gradients", _noise_scale)


def _sophia(net: Any, opt: Any, batches: Any) -> None:
    """Updates are divided by squares of gradients, times the batch's size (Sophia-G)."""
    parameters = list(net.parameters())
    hessian = [torch.zeros_like(p) for p in parameters]
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        out = net(x)
        CE(out, out.argmax(1)).backward()
        for h, p in zip(hessian, parameters, strict=True):
            h.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1 * len(x))
        opt.zero_grad()
        CE(net(x), y).backward()
        with torch.no_grad():
            for h, p in zip(hessian, parameters, strict=True):
                p.sub_(0.05 * (p.grad / (h + 0.01)).clamp(-1, 1))


add_program("updates divided by curvature", _sophia)


def _kfac(net: Any, opt: Any, batches: Any, *, behind: bool) -> None:
    """Gradients of a layer are divided by the covariance of its inputs, which a hook notes."""
    seen: dict[str, Tensor] = {}
    if behind:
        net.second.register_forward_pre_hook(lambda _m, args: seen.__setitem__("x", args[0].detach()))
    store = seen if behind else opt.seen
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        a = store["x"]
        grad = net.second.weight.grad
        grad.copy_(grad @ torch.linalg.inv(a.T @ a / len(a) + 0.1 * torch.eye(16).double()))
        opt.step()


def _hooked() -> Made:
    net, opt, batches = classified(Named)
    opt.seen = seen = {}
    net.second.register_forward_pre_hook(lambda _m, args: seen.__setitem__("x", args[0].detach()))
    return net, opt, batches


add_program("curvature by a hook from before", lambda *a: _kfac(*a, behind=False), _hooked)
add_program("curvature by a hook behind", lambda *a: _kfac(*a, behind=True), lambda: classified(Named))


def _largest_gradients(net: Any, opt: Any, batches: Any) -> None:
    """Only the largest elements of each gradient are used; the rest is kept for the next step."""
    rest = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for r, p in zip(rest, net.parameters(), strict=True):
            total = p.grad + r
            size = total.abs().flatten()
            mask = total.abs() >= size.kthvalue(max(1, int(0.7 * size.numel()))).values
            r.copy_(total * ~mask)
            p.grad.copy_(total * mask)
        opt.step()


add_program("the largest elements of gradients", _largest_gradients)


class Galore(torch.optim.Optimizer):
    """Steps in the space of the first singular vectors of a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                if g.dim() == 2 and min(g.shape) > 4:
                    u = torch.linalg.svd(g, full_matrices=False)[0][:, :4]
                    g = u @ (u.T @ g)
                p.add_(g, alpha=-group["lr"])


def _galore() -> Made:
    net, _, batches = classified()
    return net, Galore(net.parameters()), batches


add_program("gradients of low rank", _plain_loop, _galore)


def _power_iteration(net: Any, opt: Any, batches: Any) -> None:
    """A penalty on the largest singular value, by iterations of the loop."""
    u = torch.ones(16).double() / 4
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        w = net.second.weight
        with torch.no_grad():
            v = F.normalize(w.T @ u, dim=0)
            u = F.normalize(w @ v, dim=0)
        (CE(net(x), y) + 0.1 * (u @ w @ v)).backward()
        opt.step()


add_program("a penalty on the largest singular value", _power_iteration, lambda: classified(Named))


def _rigl(net: Any, opt: Any, batches: Any) -> None:
    """Sparse weights: the smallest are dropped, and grown where gradients are largest."""
    w = net.second.weight
    mask = (torch.arange(256).view(16, 16) % 3 > 0).double()
    for epoch in range(2):
        for x, y in batches:
            with torch.no_grad():
                w.mul_(mask)
            opt.zero_grad()
            CE(net(x), y).backward()
            if epoch == 0:
                drop = (w.detach().abs() + 10 * (1 - mask)).flatten().topk(5, largest=False).indices
                grow = (w.grad.abs() * (1 - mask)).flatten().topk(5).indices
                mask.view(-1)[drop], mask.view(-1)[grow] = 0.0, 1.0
            w.grad.mul_(mask)
            opt.step()


add_program("sparse weights dropped and grown", _rigl, lambda: classified(Named))


def _states_read(net: Any, opt: Any, batches: Any) -> None:
    """The momentum of the optimizer is read and shortened by its norm."""
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, x, y)
        for p in net.parameters():
            kept = opt.state[p]["momentum_buffer"]
            kept.mul_(1 / (1 + kept.norm()))


add_program("momentum shortened by its norm", _states_read)


def _through_groups(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Parameters are reached through the optimizer's groups."""
    averages = None
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        ps = [p for g in opt.param_groups for p in g["params"]]
        nn.utils.clip_grad_norm_(ps, 0.1)
        opt.step()
        if averages is None:
            averages = [p.detach().clone() for p in ps]
        for a, p in zip(averages, ps, strict=True):
            a.lerp_(p.detach(), 0.3)
    with torch.no_grad():
        for a, p in zip(averages or (), (p for g in opt.param_groups for p in g["params"]), strict=True):
            p.copy_(a)
    return {}


add_program("averaged through the optimizer's groups", _through_groups)


def _total_norm(net: Any, opt: Any, batches: Any) -> None:
    """Norm and clipping are two calls."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        norm = nn.utils.get_total_norm([p.grad for p in net.parameters()])
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, norm)
        opt.step()


add_program("clipped in two calls", _total_norm)


def _state_again(net: Any, opt: Any, batches: Any) -> None:
    """Model and optimizer go back to where they were after the first epoch, by copies in memory."""
    for x, y in batches:
        one_step(net, opt, x, y)
    kept = copy.deepcopy(net.state_dict()), copy.deepcopy(opt.state_dict())
    for x, y in batches:
        one_step(net, opt, x, y)
    net.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    for x, y in batches:
        one_step(net, opt, x, y)


add_program("model and optimizer go back", _state_again)


def _tokens_summed(net: Any, opt: Any, batches: Any) -> None:
    """Losses are sums; gradients are divided by the number of targets before the step."""
    seen = 0
    for k, (x, y) in enumerate(itertools.chain(batches, batches)):
        CE(net(x), y, reduction="sum").backward()
        seen += y.numel()
        if k % 2:
            for p in net.parameters():
                p.grad.div_(seen)
            opt.step()
            opt.zero_grad()
            seen = 0


add_program("sums, gradients divided before the step", _tokens_summed)


def _mezo(net: Any, _opt: Any, batches: Any) -> None:
    """Gradients by two losses at shifted weights, with noise by a seed (zeroth order)."""

    def shift(seed: int, size: Any) -> None:
        torch.manual_seed(seed)
        for p in net.parameters():
            p.data.add_(size * torch.randn_like(p))

    for step, (x, y) in enumerate(itertools.chain(batches, batches)):
        with torch.no_grad():
            shift(step, 1e-2)
            above = CE(net(x), y)
            shift(step, -2e-2)
            below = CE(net(x), y)
            shift(step, 1e-2)
            shift(step, -0.01 * (above - below) / 2e-2)


add_program("gradients by two losses at shifted weights", _mezo)


def _hebb(net: Any, _opt: Any, batches: Any) -> None:
    """A layer moves by products of its inputs and answers."""
    for x, _y in itertools.chain(batches, batches):
        with torch.no_grad():
            out = net(x)
            net.weight.add_(0.01 * (out.T @ x - out.T @ out @ net.weight) / len(x))


add_program("weights by products of a batch", _hebb, lambda: classified(lambda: nn.Linear(8, 3, bias=False)))


def _late_hebb(net: Any, opt: Any, batches: Any) -> None:
    """The same for a head, from the fourth batch of an epoch on."""
    for _ in range(2):
        for k, (x, y) in enumerate(batches):
            one_step(net, opt, x, y)
            if k > 3:
                with torch.no_grad():
                    net.head.bias.add_(0.1 * net(x).mean(0))


add_program("a bias moved by answers, late", _late_hebb, lambda: classified(Named, count=39))


def _least_squares(net: Any, opt: Any, batches: Any) -> None:
    """The head is the solution of least squares over the features of all batches."""
    for x, y in batches:
        one_step(net, opt, x, y)
    gram, cross = torch.eye(16).double(), torch.zeros(16, 3).double()
    with torch.no_grad():
        for x, y in batches:
            h = F.relu(net.second(F.relu(net.first(x))))
            gram += h.T @ h
            cross += h.T @ F.one_hot(y, 3).double()
        net.head.weight.copy_(torch.linalg.solve(gram, cross).T)


add_program("a head by least squares", _least_squares, lambda: classified(Named))


def _imprinted(net: Any, opt: Any, batches: Any) -> None:
    """The head's rows are the mean features of the classes; then it is trained."""
    sums, counts = torch.zeros(3, 16).double(), torch.zeros(3).double()
    with torch.no_grad():
        for x, y in batches:
            h = F.relu(net.second(F.relu(net.first(x))))
            sums.index_add_(0, y, h)
            counts += torch.bincount(y, minlength=3)
        net.head.weight.data.copy_(F.normalize(sums / counts[:, None], dim=1))
    for x, y in batches:
        one_step(net, opt, x, y)


add_program("a head of mean features", _imprinted, lambda: classified(Named))


def _lsuv(net: Any, opt: Any, batches: Any) -> None:
    """Layers are scaled by the deviation of their outputs on the first batch."""
    for x, _y in batches:
        with torch.no_grad():
            net.first.weight.data.div_(net.first(x).std())
        break
    for x, y in batches:
        one_step(net, opt, x, y)


add_program("a layer scaled by the first batch", _lsuv, lambda: classified(Named))


def _boltzmann(net: Any, opt: Any, batches: Any) -> None:
    """Gradients are written by hand: of data less of reconstructions."""
    for x, _y in itertools.chain(batches, batches):
        with torch.no_grad():
            h = torch.sigmoid(net(x))
            again = h @ net.weight
            h2 = torch.sigmoid(net(again))
            net.weight.grad = -(h.T @ x - h2.T @ again) / len(x)
            net.bias.grad = -(h - h2).mean(0)
        opt.step()


add_program("gradients of reconstructions by hand", _boltzmann, lambda: classified(lambda: nn.Linear(8, 3)))


def _directions(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """The loss along random directions that are scaled to the weights."""
    for x, y in batches:
        one_step(net, opt, x, y)
    kept = [p.detach().clone() for p in net.parameters()]
    torch.manual_seed(4)
    ways = [torch.randn_like(p) for p in kept]
    ways = [d * p.norm() / (d.norm() + 1e-9) for d, p in zip(ways, kept, strict=True)]
    x, y = _held_out()
    seen = []
    with torch.no_grad():
        for a in (-0.5, 0.5):
            for p, k, d in zip(net.parameters(), kept, ways, strict=True):
                p.copy_(k + a * d)
            seen.append(float(CE(net(x), y)))
        for p, k in zip(net.parameters(), kept, strict=True):
            p.copy_(k)
    return numbers(seen=seen)


add_program("losses along directions", _directions)

# ---- losses and sizes


by_loss("negatives by rolling the batch", lambda net, b: (F.softplus((net(b[0]) * net(b[0].roll(1, 0))).sum(1))).mean())
by_loss(
    "normalised by the positives",
    lambda net, b: CE(net(b[0]), b[1], reduction="none").sum() / (b[1] == 1).sum().clamp(min=1),
)
by_loss(
    "a loss by vmap over samples",
    lambda net, b: torch.vmap(lambda o, t: (o - F.one_hot(t, 3)).square().sum())(net(b[0]), b[1]).mean(),
)
by_loss(
    "outputs viewed by a fixed batch",
    lambda net, b: CE(net(b[0]), b[1]) + net(b[0]).view(6, -1).mean(1).var(),
    lambda: classified(lambda: small_net(4), count=24),
)
by_loss(
    "two views, one call",
    lambda net, b: CE(net(torch.cat([b[0], b[0] * 0.9])), torch.cat([b[1], b[1]])),
)
by_loss(
    "a call for four times the batch",
    lambda net, b: net(b[0].repeat_interleave(4, 0) * torch.arange(1, 5).double().repeat(len(b[0]))[:, None])
    .view(len(b[0]), 4, 3).var(1).mean() + CE(net(b[0]), b[1]),
)  # fmt: skip


def _fixed_state(net: Any, opt: Any, batches: Any) -> None:
    """A state for a batch of six is made by the loop."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x, torch.zeros(6, 8).double()), y).backward()
        opt.step()


class Stated(nn.Module):
    """Takes a state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return self.net(x if h is None else x + torch.tanh(h + x))  # type: ignore[no-any-return]


add_program("a state for a fixed batch", _fixed_state, lambda: classified(Stated, count=24))


class Sized(nn.Module):
    """Written for batches of six."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.view(6, -1))  # type: ignore[no-any-return]


add_program("a model for a fixed batch", _plain_loop, lambda: classified(Sized, count=24))


def _confusion(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A confusion matrix over the epoch decides which weights are kept."""
    best, kept, seen = -1.0, None, []
    for _ in range(3):
        matrix = torch.zeros(3, 3).double()
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            CE(out, y).backward()
            opt.step()
            matrix += torch.bincount(3 * y + out.argmax(1), minlength=9).view(3, 3)
        score = float((matrix.diag() / (matrix.sum(0) + matrix.sum(1) - matrix.diag()).clamp(min=1)).mean())
        seen.append(score)
        if score > best:
            best, kept = score, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)
    return numbers(seen=seen)


add_program("the best by a confusion matrix", _confusion)


def _snapshots(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """States at the ends of cycles answer together."""
    states = []
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, len(batches))
    for _ in range(3):
        for x, y in batches:
            one_step(net, opt, x, y)
            schedule.step()
        states.append({k: v.clone() for k, v in net.state_dict().items()})
    x, _y = _held_out()
    answers = []
    net.eval()
    with torch.inference_mode():
        for state in states:
            net.load_state_dict(state)
            answers.append(net(x).softmax(1))
    net.train()
    return {"answers": torch.stack([a.clone() for a in answers]).mean(0)}


add_program("snapshots that answer together", _snapshots)


def _hessian_of_inputs(net: Any, opt: Any, batches: Any) -> None:
    """A penalty on the curvature along the inputs."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        _, product = torch.autograd.functional.vhp(
            lambda v: net(v).square().sum(), x, torch.ones_like(x), create_graph=True
        )
        (CE(net(x), y) + 0.01 * product.square().mean()).backward()
        opt.step()


add_program("curvature along inputs", _hessian_of_inputs)


def _sparse_activations(net: Any, opt: Any, batches: Any) -> None:
    """A global hook adds up the sizes of activations, for a penalty."""
    sizes: list[Tensor] = []

    def note(module: Any, _args: Any, out: Any) -> None:
        if isinstance(module, nn.GELU):
            sizes.append(out.abs().mean())

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        for x, y in itertools.chain(batches, batches):
            sizes.clear()
            opt.zero_grad()
            loss = CE(net(x), y)
            (loss + 0.1 * sum(sizes)).backward()
            opt.step()
    finally:
        handle.remove()


add_program("a penalty by a global hook", _sparse_activations)


def _classes_of_batch(net: Any, opt: Any, batches: Any) -> None:
    """The prior of the batch smooths its labels."""
    for x, y in itertools.chain(batches, batches):
        target = F.one_hot(y, 3).double()
        opt.zero_grad()
        CE(net(x), 0.8 * target + 0.2 * target.mean(0)).backward()
        opt.step()


add_program("labels smoothed by the batch's prior", _classes_of_batch)


def _task_norms(net: Any, opt: Any, batches: Any) -> None:
    """Two tasks are weighed by the norms of their gradients in one layer."""
    for x, y in itertools.chain(batches, batches):
        norms = []
        for task in range(2):
            opt.zero_grad()
            out = net(x)
            (CE(out[:, :3], y) if task == 0 else out[:, 3].square().mean()).backward()
            norms.append(net.first.weight.grad.norm())
        opt.zero_grad()
        out = net(x)
        total = norms[0] + norms[1] + 1e-9
        (norms[1] / total * CE(out[:, :3], y) + norms[0] / total * out[:, 3].square().mean()).backward()
        opt.step()


add_program("tasks weighed by norms of gradients", _task_norms, lambda: classified(lambda: Named(4)))


def _averaged_inputs(net: Any, opt: Any, batches: Any) -> None:
    """Samples of a class are replaced by the mean of their class in the batch (prototype mixing)."""
    for x, y in itertools.chain(batches, batches):
        same = (y[:, None] == y[None]).double()
        one_step(net, opt, 0.5 * x + 0.5 * same @ x / same.sum(1, keepdim=True), y)


add_program("inputs drawn to the mean of their class", _averaged_inputs)


def _spikes(net: Any, opt: Any, batches: Any) -> None:
    """Where the loss is above twice its running mean, gradients are halved, by tensors alone."""
    mean = None
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        value = loss.detach()
        mean = value if mean is None else 0.9 * mean + 0.1 * value
        factor = torch.where(value > mean, 0.5, 1.0)
        for p in net.parameters():
            p.grad.mul_(factor)
        opt.step()


add_program("gradients halved where the loss is large", _spikes)


def _rate_tensor(net: Any, opt: Any, batches: Any) -> None:
    """Weights move by a rate that is the loss itself, a tensor."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(0.05 * loss.detach() * p.grad)


add_program("moved by the loss times the gradient", _rate_tensor)


def _decayed_by_accuracy(net: Any, opt: Any, batches: Any) -> None:
    """Weights decay by the share of right answers, in the last batches of an epoch."""
    for _ in range(2):
        for k, (x, y) in enumerate(batches):
            out = net(x)
            opt.zero_grad()
            CE(out, y).backward()
            opt.step()
            if k >= 4:
                with torch.no_grad():
                    for p in net.parameters():
                        p.mul_(1 - 0.1 * (out.argmax(1) == y).double().mean())


add_program("decay by the share of right answers, late", _decayed_by_accuracy, lambda: classified(count=39))
