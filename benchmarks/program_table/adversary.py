"""Programs that someone would write who looks for what a spread program gets wrong, and that all occur in practice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import asa
from benchmarks.program_table import Made, epochs, loader, made, normal, pairs, program

CE = F.cross_entropy


def _net(out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out))


def _classes(net: Any = _net, count: int = 21, batch: int = 6) -> Made:
    """The last batch has 3 samples, unevenly shared."""
    return made(net(), normal(count, 8), torch.randint(3, (count,)), batch=batch)


def _images(net: nn.Module, count: int = 21) -> Made:
    return made(net, normal(count, 3, 6, 6), torch.randint(3, (count,)))


def _ignoring(out: Tensor, y: Tensor) -> Tensor:
    """Label smoothing with ignored targets and class weights."""
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=out.dtype)
    return CE(out, torch.where(y == 2, -100, y), label_smoothing=0.1, weight=weights)


def _segmented(out: Tensor, y: Tensor) -> Tensor:
    """Pixels with ignored ones and smoothing, [N, C, H, W]."""
    wanted = (y[:, None, None] + torch.arange(6)[:, None] + torch.arange(6)) % 4 - 1
    return CE(out, wanted, ignore_index=-1, label_smoothing=0.1)


def _triplet(out: Tensor, y: Tensor) -> Tensor:
    """Hardest positive and negative of the batch."""
    apart = torch.cdist(out, out)
    same = y[:, None] == y[None]
    far = apart.masked_fill(~same, 0).amax(1)
    near = apart.masked_fill(same, 1e3).amin(1)
    return F.relu(far - near + 0.3).mean()


def _info(out: Tensor, _y: Tensor) -> Tensor:
    """Two views by halves of the features, in-batch softmax."""
    a, b = F.normalize(out[:, :4], dim=1), F.normalize(out[:, 4:], dim=1)
    near = a @ b.T / 0.2
    return CE(near, torch.arange(len(near)))


def _subset(net: Any, batch: Any) -> Tensor:
    """The loss of those samples only that are hard by their label."""
    x, y = batch
    keep = y > 0
    return CE(net(x)[keep], y[keep]) if keep.any() else net(x).sum() * 0


def _subset_before(net: Any, batch: Any) -> Tensor:
    """Only some samples go through the model."""
    x, y = batch
    keep = y != 1
    return CE(net(x[keep]), y[keep]) if keep.any() else 0 * net(x).sum()


def _some_values(net: Any, batch: Any) -> Tensor:
    """Of a mean that is none of targets; every rank has some."""
    x, y = batch
    keep = x[:, 0] > x[:, 0].min()
    return F.mse_loss(net(x[keep]), y[keep]) if keep.any() else 0 * net(x).sum()


def _halves(out: Tensor, y: Tensor) -> Tensor:
    """Compares the halves of a batch: of one sample there are none."""
    first, second = out.chunk(2)
    return CE(out, y) + (first.mean(0) - second.mean(0)).square().sum()


def _paired(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Every sample is mixed with its neighbour: one alone has none."""
    x, y = (torch.stack(part) for part in zip(*rows, strict=True))
    other = torch.stack([rows[(i + 1) % len(rows)][0] for i in range(len(rows))])
    if len(rows) < 2:
        raise ValueError("a sample has no neighbour")
    return 0.7 * x + 0.3 * other, y


class _Spread(nn.Module):
    """Divides by a deviation over the batch, which one sample has not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(F.gelu(h / (0.1 + h.std(0))))


class _Recurrent(nn.Module):
    """Keeps a state whose rows are the batch's, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.h = nn.GRUCell(8, 6), nn.Linear(6, 3), None

    def forward(self, x: Tensor) -> Tensor:
        h = self.cell(x, self.h)
        self.h = h.detach()
        return self.head(h)


class _Uncertain(nn.Module):
    """Two tasks, weighed by what is learned of their uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 3), nn.Linear(16, 1)
        self.log_sigma = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.a(h), self.b(h)[:, 0]


def _uncertain(net: Any, batch: Any) -> Tensor:
    a, b = net(batch[0])
    s = net.log_sigma
    first, second = CE(a, batch[1]), F.mse_loss(b, batch[1].to(b.dtype))
    return first * torch.exp(-s[0]) + s[0] + second * torch.exp(-s[1]) + s[1]


class _Checkpointed(nn.Module):
    """Recomputes its middle by torch's own means."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU()), _head()

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        if self.training:
            h = checkpoint(self.middle, h, use_reentrant=False)
        else:
            h = self.middle(h)
        return self.last(h)  # type: ignore[no-any-return]


def _head() -> nn.Module:
    return nn.Linear(16, 3)


class _Counting(nn.Module):
    """Counts its samples, and keeps a running mean of its features that it takes away."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.a(x))
        if self.training:
            self.seen += len(x)
            self.mean.lerp_(h.detach().mean(0), 0.1)
        return self.b(h - self.mean)  # type: ignore[no-any-return]


class _Steps(nn.Module):
    """Warms a temperature up by the number of its calls."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.net(x) / (1 + 1 / (1 + self.steps))  # type: ignore[no-any-return]


def _short_left_out(net: Any, opt: Any, batches: Any) -> None:
    """Leaves out batches that are not full, by the number of their samples."""
    for _ in range(2):
        for x, y in batches:
            if x.size(0) != 6:
                continue
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()


def _by_group(net: Any, opt: Any, batches: Any) -> None:
    """Clips the gradients of every group by a norm of its own."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            for group in opt.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 0.05)
            opt.step()


def _grouped() -> Made:
    net, _, batches = _classes()
    parameters = list(net.parameters())
    groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}]
    return net, torch.optim.SGD(groups, lr=0.05, momentum=0.9), batches


def _by_hand_norm(net: Any, opt: Any, batches: Any) -> None:
    """Clips by a norm that the loop computes itself from ``p.grad``."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
            for p in net.parameters():
                if p.grad is not None:
                    p.grad.mul_(min(1.0, 0.1 / float(norm)))
            opt.step()


def _finder(net: Any, opt: Any, batches: Any) -> None:
    """A learning rate that grows batch by batch, stopped when the loss does; then back to the first weights."""
    before = {k: v.clone() for k, v in net.state_dict().items()}
    rate, best = 0.01, float("inf")
    for x, y in batches:
        for group in opt.param_groups:
            group["lr"] = rate
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        opt.step()
        rate *= 1.3
        best = min(best, float(asa.reduce(loss.detach())))
    net.load_state_dict(before)
    for group in opt.param_groups:
        group["lr"] = 0.02 + 0.01 * best
    epochs(pairs(CE), 1)(net, opt, batches)


def _moving(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A moving average that is updated in the loop and evaluated by swapping it in."""
    average = {n: p.detach().clone() for n, p in net.named_parameters()}
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
            with torch.no_grad():
                for n, p in net.named_parameters():
                    average[n].lerp_(p.detach(), 0.3)
    with torch.no_grad():
        for n, p in net.named_parameters():
            p.copy_(average[n])
    return {}


def _swa(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """``torch.optim.swa_utils``, with its schedule."""
    schedule = torch.optim.swa_utils.SWALR(opt, swa_lr=0.02, anneal_epochs=1)
    average = torch.optim.swa_utils.AveragedModel(net)
    for epoch in range(3):
        epochs(pairs(CE), 1)(net, opt, batches)
        if epoch:
            average.update_parameters(net)
            schedule.step()
    return {f"average.{k}": v.clone() for k, v in average.module.state_dict().items()}


def _finite_only(net: Any, opt: Any, batches: Any) -> None:
    """Leaves out the step where a gradient is not finite; one sample in the second batch is not."""
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            out = net(x)
            if i == 1:
                out = out * torch.where(torch.arange(len(out)) == 0, float("inf"), 1.0)[:, None]
            CE(out, y).backward()
            if all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None):
                opt.step()


def _lbfgs(net: Any, opt: Any, batches: Any) -> None:
    """LBFGS over a batch, with a line search."""
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = CE(net(x), y)
            loss.backward()
            return loss

        opt.step(closure)


def _searching() -> Made:
    net, _, batches = _classes()
    return net, torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe"), batches


def _functional(net: Any, batch: Any) -> Tensor:
    """``torch.func.functional_call`` with the model's own parameters."""
    out = torch.func.functional_call(net, dict(net.named_parameters()), (batch[0],))
    return CE(out, batch[1])


def _per_sample(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of single samples, clipped one by one (differential privacy without noise)."""
    for x, y in batches:

        def one(p: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
            return CE(torch.func.functional_call(net, p, (a[None],)), b[None])

        own = {n: p.detach() for n, p in net.named_parameters()}
        each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(own, x, y)
        for n, p in net.named_parameters():
            norm = each[n].flatten(1).norm(dim=1).clamp(min=0.1)
            p.grad = (each[n] / norm.view(-1, *[1] * (each[n].dim() - 1))).mean(0)
        opt.step()


def _by_all_reduce(net: Any, opt: Any, batches: Any) -> None:
    """Averages gradients itself, as a program does that was written for several ranks."""
    several = torch.distributed.is_initialized() and hasattr(net, "plan")
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            for p in net.parameters() if several else ():
                if p.grad is not None:
                    torch.distributed.all_reduce(p.grad)
                    p.grad /= torch.distributed.get_world_size()
            opt.step()


def _frozen_norm(net: Any, opt: Any, batches: Any) -> None:
    """BatchNorm frozen by a function that ``train`` is followed by, its weights too."""
    for _ in range(2):
        net.train()
        for m in net.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                m.eval()
                m.weight.requires_grad_(False)
                m.bias.requires_grad_(False)
        epochs(pairs(CE), 1)(net, opt, batches)


def _cut_mixed(net: Any, opt: Any, batches: Any) -> None:
    """CutMix: boxes of images and their labels come from the batch in reverse order."""
    for _ in range(2):
        for x, y in batches:
            other = torch.arange(len(x) - 1, -1, -1)
            mixed = x.clone()
            mixed[:, :, 1:4, 1:4] = x[other][:, :, 1:4, 1:4]
            share = 9 / 36
            opt.zero_grad()
            out = net(mixed)
            ((1 - share) * CE(out, y) + share * CE(out, y[other])).backward()
            opt.step()


def _gan(net: Any, opt: Any, batches: Any) -> None:
    """Both networks in one module, an optimizer each, one frozen while the other learns."""
    bce = F.binary_cross_entropy_with_logits
    for _ in range(2):
        for real, z in batches:
            net.maker.requires_grad_(False)
            net.judge.requires_grad_(True)
            opt.zero_grad()
            on_real, on_fake = net(real, z)
            (bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))).backward()
            opt.step()
            net.maker.requires_grad_(True)
            net.judge.requires_grad_(False)
            opt.other.zero_grad()
            _, on_fake = net(real, z)
            bce(on_fake, torch.ones_like(on_fake)).backward()
            opt.other.step()


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, real: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.judge(real), self.judge(self.maker(z))


def _gan_made() -> Made:
    net = _Both().double()
    opt: Any = torch.optim.Adam(net.judge.parameters(), lr=0.01, eps=1e-3)
    opt.other = torch.optim.Adam(net.maker.parameters(), lr=0.01, eps=1e-3)
    return net, opt, loader(normal(21, 6), normal(21, 4))


class _Tied(nn.Module):
    """Encoder and decoder share one matrix; the loss reads it too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.up(x).tanh(), self.up.weight.T, self.shift)


def _tied(net: Any, batch: Any) -> Tensor:
    return F.mse_loss(net(batch[0]), batch[0]) + 0.01 * net.up.weight.square().sum()


class _Named(nn.Module):
    """Gives a dictionary that contains its inputs' statistics, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.net(x)
        return {"logits": out, "size": x.shape[0], "energy": out.square().mean(), "hidden": [out, out * 2]}


def _named(net: Any, batch: Any) -> Tensor:
    found = net(batch[0])
    return CE(found["logits"], batch[1]) + 0.1 * found["energy"] + 0.01 * found["hidden"][1].square().mean()


def _total_over(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of a sum over an epoch's samples, divided by how many there were at the end."""
    seen = 0
    opt.zero_grad()
    for x, y in batches:
        CE(net(x), y, reduction="sum").backward()
        seen += len(x)
    for p in net.parameters():
        if p.grad is not None:
            p.grad /= seen
    opt.step()


def _token_mean(out: Tensor, y: Tensor) -> Tensor:
    """Tokens that count are as many as the sample's label says, and one."""
    mask = (torch.arange(out.shape[1]) <= y[:, None]).to(out.dtype)
    each = F.mse_loss(out, torch.zeros_like(out), reduction="none").mean(-1)
    return (each * mask).sum() / mask.sum()


def _balanced(out: Tensor, y: Tensor) -> Tensor:
    """Class weights from the batch's own frequencies."""
    counts = torch.bincount(y, minlength=3).clamp(min=1)
    return CE(out, y, weight=(len(y) / counts).to(out.dtype))


def _queue() -> Any:
    """A queue of old features, contrasted with the batch's (MoCo)."""

    def loop(net: Any, opt: Any, batches: Any) -> None:
        queue = torch.zeros(0, 8, dtype=torch.float64)
        for _ in range(2):
            for x, _y in batches:
                opt.zero_grad()
                out = F.normalize(net(x), dim=1)
                near = torch.cat([(out * out.roll(1, 1)).sum(1, keepdim=True), out @ queue.T], 1)
                CE(near / 0.2, torch.zeros(len(near), dtype=torch.long)).backward()
                opt.step()
                queue = torch.cat([queue, out.detach()])[-12:]

    return loop


def _huber_by_quantile(out: Tensor, y: Tensor) -> Tensor:
    """The threshold is the median error of the batch."""
    error = (out[:, 0] - y).abs()
    delta = error.detach().median()
    return torch.where(error < delta, 0.5 * error**2 / delta, error - 0.5 * delta).mean()


def _returns(out: Tensor, y: Tensor) -> Tensor:
    """Policy gradient with advantages that are normalised over the batch."""
    reward = y.to(out.dtype)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    return -(out.log_softmax(1).gather(1, y[:, None])[:, 0] * advantage).mean()


def _convolved() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 3),
    )  # fmt: skip


def _job(name: str, loss: Any, make: Any = _classes, **options: Any) -> None:
    program("adversary", name, make, epochs(pairs(loss)), loss, **options)


_job("smoothing with ignored targets and weights", _ignoring)
_job("smoothing with ignored pixels", _segmented, lambda: _images(nn.Conv2d(3, 3, 3, padding=1)))
_job("triplets mined in the batch", _triplet)
_job("softmax within the batch", _info, lambda: _classes(lambda: _net(8)))
_job("class weights of the batch", _balanced)
_job("tokens up to a length", _token_mean, lambda: made(_net(4), normal(21, 5, 8), torch.randint(5, (21,))))
_job("threshold by the batch's median", _huber_by_quantile)
_job("advantages normalised over the batch", _returns)
_job("gradient checkpoints of its own", CE, lambda: _classes(_Checkpointed))
_job("buffers that count samples", CE, lambda: _classes(_Counting))
_job("a temperature by the number of calls", CE, lambda: _classes(_Steps))
program("adversary", "loss of a part of the batch", _classes, epochs(_subset))
program("adversary", "a part of the batch in the model", _classes, epochs(_subset_before))
program("adversary", "uncertainties of two tasks", lambda: _classes(_Uncertain), epochs(_uncertain))
program("adversary", "short batches left out", _classes, _short_left_out)
program("adversary", "clipped by group", _grouped, _by_group)
program("adversary", "clipped by a norm of its own making", _classes, _by_hand_norm)
program("adversary", "learning rate finder", _classes, _finder)
program("adversary", "moving average swapped in", _classes, _moving)
program("adversary", "stochastic weight averaging", _classes, _swa)
program("adversary", "steps left out that are not finite", _classes, _finite_only)
program("adversary", "line search", _searching, _lbfgs)
program("adversary", "functional call", _classes, epochs(_functional))
program("adversary", "gradients of single samples", _classes, _per_sample)
program("adversary", "gradients averaged by hand", _classes, _by_all_reduce)
program("adversary", "frozen BatchNorm", lambda: _images(_convolved()), _frozen_norm, batch_norm="exact")
program("adversary", "boxes mixed in reverse order", lambda: _images(_convolved()), _cut_mixed, batch_norm="exact")
program("adversary", "GAN in one module", _gan_made, _gan)
program("adversary", "one matrix twice, and in the loss", lambda: _classes(_Tied), epochs(_tied))
program("adversary", "dictionary with a statistic", lambda: _classes(_Named), epochs(_named))
program("adversary", "a sum divided at the end", _classes, _total_over)
program("adversary", "queue of old features", lambda: _classes(lambda: _net(8)), _queue())
program("adversary", "clipped by the sum of sizes", _classes,
        epochs(pairs(CE), after=lambda n: nn.utils.clip_grad_norm_(n.parameters(), 0.1, norm_type=1.0)))  # fmt: skip
program("adversary", "norm of all weights beside the loss", _classes,
        epochs(lambda net, b: CE(net(b[0]), b[1]) + 1e-2 * sum(p.abs().sum() for p in net.parameters())))  # fmt: skip
_job("halves of a batch compared", _halves)
_job("the worst five", lambda o, y: CE(o, y, reduction="none").topk(5).values.mean(), lambda: _classes(count=18))
_job("pairs in collate", CE, lambda: made(_net(), normal(20, 8), torch.randint(3, (20,)), collate_fn=_paired))
_job("divided by a deviation over the batch", CE, lambda: _classes(_Spread, 20))
_job("squeezed", lambda o, y: F.mse_loss(o.squeeze(), y), lambda: made(_net(1), normal(20, 8), normal(20)))
_job("a recurrent state in an attribute", CE, lambda: _classes(_Recurrent, 18))
program("adversary", "a part of the batch in the model, values", lambda: made(_net(), normal(21, 8), normal(21, 3)),
        epochs(_some_values))  # fmt: skip
