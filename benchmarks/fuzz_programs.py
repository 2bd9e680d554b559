"""Randomly drawn programs under randomly drawn plans: the numbers of one process, or a word about it.

    python benchmarks/fuzz_programs.py [--count 100] [--seed 0] [--ranks 2] [--only 17] [-o records/fuzz_programs.json]

A draw is a model (layers, skips, heads, experts, tables, norms, parts that are frozen or in evaluation), a loss (means
and penalties over one head or several), a loader (sizes that leave uneven last batches, shuffled or not), an optimizer
or two of ``torch.optim``, what the loop does beside the usual (accumulation, clipping, schedules, freezing later,
several backwards, averages), and a plan: layouts, data strategies and recomputation per component. All in float64 on
forked ranks; the state after two epochs is compared with that of one process. Draw i is a function of the seed and i.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.api.loop import process_counts
from asa.errors import AsaError
from asa.ir.plan import Plan
from asa.launch import run_ranks, tell
from planner_tests.hand_plans import hand_plan

FEATURES, CLASSES, TOKENS = 8, 4, 20
STRANGE = ["weighted", "ignored", "masked", "hardest", "spread", "log_of_mean", "gathered", "by_place"]
"""Losses that are no plain means over samples; some say what they divide by."""
LOOPS = ["usual", "accumulate", "clip", "schedule", "thaw", "two_backwards", "average", "again", "kept", "by_loss",
         "by_reduced_loss", "plateau", "chunks", "skips", "clip_values", "by_hand"]  # fmt: skip
EXPLAINED: tuple[tuple[str, dict[str, str]], ...] = (
    ("the loss is not a mean over samples", dict.fromkeys(STRANGE, "mean")),
    ("is made beside the batch, by the sample's place", {"by_place": "mean"}),
    ("made beside the batch has one row on every rank", {"by_place": "mean"}),
    ("every rank has one sample, and a number 1", dict.fromkeys(STRANGE, "mean")),
    ("BatchNorm over all ranks counts some of them twice", {"exact_norm": "linear", "frozen_norm": "linear"}),
    ("computes a sample's output, or its gradient, from other samples", {"mixing": "linear"}),
    ("what the model computes over its batch counts some of them twice", {"mixing": "linear"}),
    ("with pieces of a batch", {"chunks": "usual"}),
    ("and the program asks how many there are", {"chunks": "usual"}),
    ("hyperparameters of the optimizer differ", {"by_loss": "usual"}),
    ("a number that is taken out of a tensor", {"by_loss": "usual"}),
    ("asa.reduce(x) weighs the mean of a rank by its samples", {"by_reduced_loss": "usual"}),
    ("targets are ignored by the loss for the first time", {"ignored": "mean"}),
)
"""What is said of numbers that are others, and what explains them then: without it, they are to be right."""
BRANCHED = "took another way on some ranks"
ALLOWED, NOISE = 1e-8, 10.0
"""Largest relative distance of a tensor that rounding may explain, and how many times as far as last digits move it in
one process: adaptive steps amplify what is near zero."""


class Experts(nn.Module):
    """One of two maps computes a sample; a third never does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = x[:, 0] > 0.2, torch.zeros_like(x)
        for map_, mine in zip(self.maps, (chosen, ~chosen, chosen & ~chosen), strict=True):
            if mine.any():
                out = out.index_put((mine.nonzero()[:, 0],), map_(x[mine]))
        return out


class Skip(nn.Module):
    """Adds what a layer makes to what it is given, times a number that is learned."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(width, width), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * F.gelu(self.layer(x))


class Mixing(nn.Module):
    """Takes the mean of its batch away: a rank has another, and is warned of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.5 * x.mean(0)


class Net(nn.Module):
    """A body of random layers with one head or two."""

    def __init__(self, layers: list[str], width: int, heads: int, tokens: bool) -> None:
        super().__init__()
        first: nn.Module = (
            nn.EmbeddingBag(TOKENS, width, sparse="sparse" in layers) if tokens else nn.Linear(FEATURES, width)
        )
        made: dict[str, Any] = {
            "linear": lambda: nn.Sequential(nn.Linear(width, width), nn.GELU()),
            "wide": lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)),
            "norm": lambda: nn.LayerNorm(width), "frozen_norm": lambda: nn.BatchNorm1d(width),
            "exact_norm": lambda: nn.BatchNorm1d(width), "mixing": Mixing,
            "skip": lambda: Skip(width), "experts": lambda: Experts(width), "group": lambda: nn.GroupNorm(2, width),
        }  # fmt: skip
        self.body = nn.Sequential(first, *(made[name]() for name in layers if name in made))
        self.heads = nn.ModuleList(nn.Linear(width, CLASSES) for _ in range(heads))

    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        return tuple(head(h) for head in self.heads) if len(self.heads) > 1 else self.heads[0](h)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A program and how it is spread; ``layout`` and ``data`` by component, taken in turn."""

    number: int
    layers: tuple[str, ...]
    width: int
    heads: int
    tokens: bool
    frozen: bool
    loss: str
    optimizer: str
    loop: str
    samples: int
    batch: int
    shuffle: bool
    layout: tuple[tuple[int, int], ...]
    data: tuple[str, ...]
    checkpoint: bool


def drawn(seed: int, number: int, ranks: int) -> Draw:
    """Draw ``number``."""
    r = random.Random(f"{seed}:{number}")
    kinds = ["linear", "wide", "norm", "frozen_norm", "skip", "experts", "group", "exact_norm"] * 3 + ["mixing"]
    tokens = r.random() < 0.25
    layers = tuple(r.choice(kinds) for _ in range(r.randint(1, 4)))
    optimizer = r.choice(["sgd", "adamw", "adagrad", "rmsprop", "two", "nesterov", "adam_amsgrad"])
    if tokens and optimizer in ("sgd", "adagrad") and r.random() < 0.5:
        layers, optimizer = (*layers, "sparse"), "plain"
    heads = r.choice([1, 1, 2])
    layouts = [(d, t) for d in range(1, ranks + 1) for t in range(1, ranks + 1) if ranks % (d * t) == 0]
    alike = r.random() < 0.6
    batch, count = r.randint(2, 9), r.uniform(2, 4)
    if {"exact_norm", "frozen_norm"} & {*layers}:  # one process needs two samples in every call
        batch, count = max(batch, 4), round(count)
    losses = ["mean", "mean", "smoothed", "squares", "second", *STRANGE, *([] if tokens else ["penalty"])]
    return Draw(
        number=number, layers=layers, width=r.choice([6, 8, 12]), heads=heads, tokens=tokens, frozen=r.random() < 0.25,
        loss=r.choice(losses), optimizer=optimizer,
        loop=_possible(r.choice(LOOPS), layers),
        samples=round(count * batch), batch=batch, shuffle=r.random() < 0.5,
        layout=tuple((ranks, 1) if alike and r.random() < 0.8 else r.choice(layouts) for _ in range(1 if alike else 4)),
        data=tuple(r.choice(["replicate", "zero1", "zero2", "zero3"]) for _ in range(1 if alike else 4)),
        checkpoint=r.random() < 0.2,
    )  # fmt: skip


def _possible(loop_: str, layers: tuple[str, ...]) -> str:
    """The loop, where torch has it: values of sparse gradients cannot be clipped."""
    return "usual" if loop_ == "clip_values" and "sparse" in layers else loop_


def made(draw: Draw) -> tuple[nn.Module, Any, DataLoader[Any]]:
    """The program's model, optimizer and loader: the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw.number)
        net = Net(list(draw.layers), draw.width, draw.heads, draw.tokens).double()
    x, y = draw_samples(draw)
    for kind, m in zip(["first", *(k for k in draw.layers if k != "sparse")], net.body, strict=True):
        if kind == "frozen_norm":
            m.eval()
    if draw.frozen:
        next(net.parameters()).requires_grad_(False)
    loader = DataLoader(
        TensorDataset(x, y), draw.batch, shuffle=draw.shuffle, generator=torch.Generator().manual_seed(1)
    )
    return net, _optimizer(draw.optimizer, list(net.parameters())), loader


def draw_samples(draw: Draw) -> tuple[Tensor, Tensor]:
    """All inputs and labels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw.number + 1)
        x = torch.randint(TOKENS, (draw.samples, 5)) if draw.tokens else torch.randn(draw.samples, FEATURES).double()
        return x, torch.randint(CLASSES, (draw.samples,))


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "two":
        half = len(parameters) // 2
        first = torch.optim.SGD(parameters[:half], lr=0.05, momentum=0.9)
        first.second = torch.optim.AdamW(parameters[half:], lr=0.01, eps=1e-3)  # type: ignore[attr-defined]
        return first
    kinds: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
        "plain": lambda: torch.optim.SGD(parameters, lr=0.05),
        "nesterov": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.8, nesterov=True),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
        "adam_amsgrad": lambda: torch.optim.Adam(parameters, lr=0.01, eps=1e-3, amsgrad=True),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.02, eps=1e-3),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=0.005, eps=1e-2),
    }
    found: torch.optim.Optimizer = kinds[name]()
    return found


def _loss(draw: Draw, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if draw.loss == "penalty":
        x = x.detach().requires_grad_()
    out = net(x)
    outs = out if isinstance(out, tuple) else (out,)
    if draw.loss == "second":
        return F.cross_entropy(outs[-1], y)
    if draw.loss in STRANGE:
        return _strange(draw.loss, outs[0], y)
    total = sum(
        (F.cross_entropy(o, y, label_smoothing=0.1 * (draw.loss == "smoothed")) for o in outs), outs[0].new_zeros(())
    )
    if draw.loss == "squares":
        total = total + 0.1 * sum((o.square().mean() for o in outs), outs[0].new_zeros(()))
    if draw.loss == "penalty":
        (slope,) = torch.autograd.grad(outs[0].square().sum(), x, create_graph=True)
        total = total + 0.1 * (slope.norm(dim=1) - 1).square().mean()
    return total


def _strange(kind: str, out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out, y, reduction="none")
    found: Tensor = {
        "weighted": lambda: F.cross_entropy(out, y, weight=torch.tensor([0.2, 3.0, 1.0, 0.5], dtype=out.dtype)),
        "ignored": lambda: F.cross_entropy(out, torch.where(y == 1, -100, y)),
        "masked": lambda: asa.mean_over(each[y > 0].sum(), (y > 0).sum()),
        "hardest": lambda: each.topk((len(y) + 1) // 2).values.mean(),
        "spread": lambda: each.mean() + 0.1 * out.var(0, unbiased=False).sum(),
        "log_of_mean": lambda: each.mean().log1p(),
        "gathered": lambda: (lambda o, t: (F.cross_entropy(o, t, reduction="none") ** 2).mean().sqrt())(
            asa.gather(out), asa.gather(y)
        ),
        "by_place": lambda: (each * torch.arange(1.0, 1 + len(y)).to(each)).mean(),
    }[kind]()
    return found


def loop(draw: Draw, net: nn.Module, opt: Any, batches: Any) -> dict[str, Tensor]:
    """What the program does; its state behind that."""
    optimizers = [opt, *([opt.second] if draw.optimizer == "two" else [])]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers if draw.loop == "schedule"]
    plateaus = [torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5) for o in optimizers]
    averages = [p.detach().clone() for p in net.parameters()] if draw.loop == "average" else []
    for epoch in range(2):
        if draw.loop == "thaw":
            first, *_, last = net.parameters()
            first.requires_grad_(epoch == 1)
            last.requires_grad_(epoch == 0)
        for i, (x, y) in enumerate(batches):
            if draw.loop != "accumulate" or i % 2 == 0:
                for o in optimizers:
                    o.zero_grad(set_to_none=draw.loop != "again")
            if draw.loop == "chunks" and len(y) > 1:
                half = len(y) // 2
                (_loss(draw, net, x[:half], y[:half]) * (half / len(y))).backward()
                x, y = x[half:], y[half:]
            loss = _loss(draw, net, x, y)
            if draw.loop == "skips" and float(loss.detach()) < 1.2:
                continue
            loss.backward(retain_graph=draw.loop == "two_backwards")
            if draw.loop in ("by_loss", "by_reduced_loss"):
                size = float(loss.detach() if draw.loop == "by_loss" else asa.reduce(loss.detach()))
                for group in optimizers[0].param_groups:
                    group["lr"] = 0.02 * size
            if draw.loop == "clip_values":
                nn.utils.clip_grad_value_(net.parameters(), 0.01)
            if draw.loop == "by_hand":
                with torch.no_grad():
                    for p in net.parameters():
                        if p.grad is not None and p.requires_grad:
                            p.sub_(p.grad.to_dense() if p.grad.is_sparse else p.grad, alpha=0.05)
                continue
            if draw.loop == "two_backwards":
                (0.5 * loss).backward()
            if draw.loop == "again":
                _loss(draw, net, x, y).backward()
            if draw.loop == "kept":
                before = [p.grad for p in net.parameters()]
                for o in optimizers:
                    o.zero_grad()
                _loss(draw, net, x, y).mul(2).backward()
                for p, g in zip(net.parameters(), before, strict=True):
                    if g is not None and p.grad is not None:
                        p.grad = p.grad - 0.5 * g
            if draw.loop == "clip":
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if draw.loop != "accumulate" or i % 2 == 1:
                for o in optimizers:
                    o.step()
            for a, p in zip(averages, net.parameters(), strict=bool(averages)) if averages else ():
                a.mul_(0.5).add_(p.detach(), alpha=0.5)
        for schedule in schedules:
            schedule.step()
        if draw.loop == "plateau":
            net.eval()
            with torch.no_grad():
                x, y = draw_samples(draw)
                seen = float(F.cross_entropy(o[0] if isinstance(o := net(x), tuple) else o, y))
            net.train()
            for plateau in plateaus:
                plateau.step(seen)
    return dict(net.state_dict())


def plan_of(draw: Draw, ranks: int) -> Plan:
    """The plan of a draw."""
    net, _, loader = made(draw)
    x = next(iter(loader))[0][:1].repeat(2, 1)
    found = hand_plan(
        net, ranks, lambda i, _n: draw.layout[i % len(draw.layout)], input_shape=tuple(x.shape[1:]),
        num_classes=CLASSES, example=x, data_strategy=lambda i: draw.data[i % len(draw.data)], global_batch=draw.batch,
    )  # fmt: skip
    if draw.checkpoint:
        found = replace(found, components=tuple(replace(c, checkpoint=True) for c in found.components))
    return found


def spread(draw: Draw, plan: Plan) -> tuple[str, Any]:
    """What this rank says of the draw: ("done", (state, what it heard)), ("refused", text) or ("broken", text)."""
    text = io.StringIO()
    with warnings.catch_warnings(record=True) as heard, contextlib.redirect_stderr(text):
        warnings.simplefilter("always")
        try:
            net, opt, batches = asa.parallelize(*made(draw), plan=plan, batch_norm="exact")
            state = loop(draw, net, opt, batches)
            net.close()
        except AsaError as error:
            return "refused", f"{type(error).__name__}: {error}"
        except Exception as error:
            return "broken", f"{type(error).__name__}: {error}"
    said = [str(w.message) for w in heard if w.category is UserWarning]
    return "done", (state, said + text.getvalue().splitlines())


def spread_all(rank: int, draws: list[Draw], plans: list[Plan]) -> None:
    """Tell the parent what this rank says of each draw, up to one behind which ranks may be out of step."""
    process_counts._own_files = list  # files of the harness have such words, the drawn programs have none
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    for draw, plan in zip(draws, plans, strict=True):
        found = spread(draw, plan)
        tell((draw.number, found))
        if found[0] == "refused" and BRANCHED in found[1]:  # others wait for this rank until it is gone
            return
        store.set(f"{draw.number}/{rank}", found[0])
        keys = [f"{draw.number}/{r}" for r in range(dist.get_world_size())]
        store.wait(keys, timedelta(seconds=30))
        if {store.get(key).decode() for key in keys} not in ({"done"}, {"refused"}):
            return


def judged(draw: Draw, ranks: int) -> dict[str, Any]:
    """The verdict on a draw: ``right``, ``refused``, ``warned``, ``silent`` (other numbers without a word), ``broken``
    (an error that is none of asa's) or ``hung``."""
    return judged_all([draw], ranks)[0]


def judged_all(draws: list[Draw], ranks: int) -> list[dict[str, Any]]:
    """The verdicts on draws. What was said of one whose numbers differ counts if they do not differ without that."""
    found = _compared(draws, ranks)
    apart = [i for i, f in enumerate(found) if f["verdict"] == "silent"]
    plainer = {i: without(draws[i], found[i]["said"]) for i in apart}
    asked = {i: draw for i, draw in plainer.items() if draw is not None}
    again = judged_all(list(asked.values()), ranks) if asked else []
    for i, rest in zip(asked, again, strict=True):
        if rest["verdict"] in ("right", "warned", "refused"):
            found[i]["verdict"] = "warned"
        else:
            found[i]["without it"] = rest
    return found


def without(draw: Draw, said: list[str]) -> Draw | None:
    """The draw without what was ``said`` to differ; None where nothing in it was."""
    named: dict[str, str] = {}
    for words, instead in EXPLAINED:
        if any(words in line for line in said):
            named |= instead
    found = replace(
        draw, loss=named.get(draw.loss, draw.loss), loop=named.get(draw.loop, draw.loop),
        layers=tuple(named.get(layer, layer) for layer in draw.layers),
    )  # fmt: skip
    return found if found != draw else None


def _compared(draws: list[Draw], ranks: int) -> list[dict[str, Any]]:
    """What the same ranks, running draws one after another as far as they stay in step, come to: ``silent`` is any
    difference here."""
    found: list[dict[str, Any]] = []
    while len(found) < len(draws):
        known, left = len(found), draws[len(found) :]
        answers: dict[int, dict[int, Any]] = {d.number: {} for d in left}

        def hear(rank: int, message: Any, answers: dict[int, dict[int, Any]] = answers) -> None:
            answers[message[0]][rank] = message[1]

        why = ""
        try:
            plans = [plan_of(d, ranks) for d in left]
            run_ranks(
                ranks, spread_all, left, plans, threads=1, timeout_s=20, limit_s=60 + 5 * len(left), on_message=hear
            )
        except AsaError as error:
            why = str(error)
        for draw in left:
            said = answers[draw.number]
            if not said and len(found) > known:  # its ranks went with the draw before it
                break
            if len(said) < ranks and all(kind == "done" for kind, _ in said.values()):
                if why:
                    found.append({"verdict": "hung", "why": why})
                break
            found.append(_verdict(draw, list(said.values())))
            kinds = {kind for kind, _ in said.values()}
            if len(said) < ranks or kinds not in ({"done"}, {"refused"}):
                break
    return found


def _verdict(draw: Draw, answers: list[tuple[str, Any]]) -> dict[str, Any]:
    wrong = [(kind, what) for kind, what in answers if kind != "done"]
    if wrong:
        kind = "broken" if any(kind == "broken" for kind, _ in wrong) else "refused"
        return {"verdict": kind, "why": next(what for k, what in wrong if k == kind)}
    wanted = loop(draw, *made(draw))
    worst, allowed = max((_apart(state, wanted) for _, (state, _) in answers), key=lambda a: max(a.values())), ALLOWED
    name = max(worst, key=lambda n: worst[n])
    if worst[name] > ALLOWED:
        # What one process makes of last digits in its weights is no difference: of a bias before a norm, say, whose
        # gradient is zero but for rounding.
        rounding = _apart(loop(draw, *nudged(*made(draw))), wanted)
        name = max(worst, key=lambda n: worst[n] / max(ALLOWED, NOISE * rounding[n]))
        allowed = max(ALLOWED, NOISE * rounding[name])
    said = [text for _, (_, heard) in answers for text in heard]
    verdict = "right" if worst[name] <= allowed else "silent"
    kept = [line for line in dict.fromkeys(said) if any(words in line for words, _ in EXPLAINED)]
    return {"verdict": verdict, "distance": worst[name], "tensor": name, "said": kept or said[-1:]}


def _apart(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Relative distance by tensor. What is no number on both sides is no difference: one process has it, too."""
    found = {}
    for n, w in wanted.items():
        if w.numel():
            both = ~state[n].isfinite() & ~w.isfinite()
            off = (state[n] - w).abs().masked_fill(both, 0.0).max() / w.masked_fill(both, 0.0).abs().max().clamp(
                min=1e-6
            )
            found[n] = float(off.nan_to_num(nan=1e300, posinf=1e300))
    return found


def nudged(net: nn.Module, opt: Any, batches: Any) -> tuple[nn.Module, Any, Any]:
    """The program with every weight moved by its last digits."""
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.mul_(1 + 4e-16 * (-1) ** i)
    return net, opt, batches


def main() -> None:
    """Draw, judge, print what is not right, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", type=int)
    parser.add_argument("-o", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    numbers = [args.only] if args.only is not None else range(args.first, args.first + args.count)
    verdicts: Counter[str] = Counter()
    rows = []
    for first in range(0, len(numbers), 10):
        draws = [drawn(args.seed, number, args.ranks) for number in numbers[first : first + 10]]
        for draw, found in zip(draws, judged_all(draws, args.ranks), strict=True):
            verdicts[found["verdict"]] += 1
            rows.append({"seed": args.seed, "ranks": args.ranks, **asdict(draw), **found})
            if found["verdict"] not in ("right", "warned"):
                print(draw.number, found, asdict(draw), flush=True)
        if args.o is not None:
            _record(args.o, rows)
    print(dict(verdicts))


def _record(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add ``rows`` to the record, which counts what it has by verdict."""
    known = json.loads(path.read_text())["draws"] if path.exists() else []
    draws = {(d["seed"], d["ranks"], d["number"]): d for d in (*known, *rows)}
    counts = Counter(d["verdict"] for d in draws.values())
    text = ",\n".join(json.dumps(d) for _, d in sorted(draws.items()))
    path.write_text(f'{{"verdicts": {json.dumps(counts)}, "draws": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
