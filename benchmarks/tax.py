"""What the executor adds to stock PyTorch: the same step, planned and hand-written, in turns in the same ranks.

    python benchmarks/tax.py [--strategies ddp,fsdp,tensor,1f1b] [--pairs 200] [--ranks 2] [-o records/tax.json]

A plan of plain data parallel, fully sharded, tensor parallel or 1F1B runs beside what one would write by hand with
``DistributedDataParallel``, ``fully_shard``, ``parallelize_module`` and ``torch.distributed.pipelining``: same weights,
same samples, same optimizer, the same traffic to the byte (checked before anything is timed). A pair is a step of
each in changing order, and the hand-written one once more: its ratio to itself (A/A) is what noise alone makes. A step
takes as long as its slowest rank. Printed: the median of paired ratios with its 95 % interval (bootstrap; the tax is
what its upper end says), and the Python that asa adds to a step (``own_python.py`` says how that is known).

ResNet-18 at 3x32x32 (data parallel, fully sharded, pipeline), a stack of MLPs (tensor parallel); one thread a rank.
About 0.4 s a pair on two cores: 200 pairs of all four take some six minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent))

from own_python import added_python, own_calls, thin

from asa.executor.model.materialize import materialize
from asa.executor.model.votes import Votes
from asa.executor.training.optimizer import build_optimizer
from asa.executor.training.precision import LossScale
from asa.executor.training.worker import LossCounter, Worker
from asa.ir.layout import bounds
from asa.ir.plan import Assignment, Certificate, DataDegree, Plan, Prediction, Stage, TensorDegree
from asa.launch import run_ranks, tell
from asa.sharding.collectives import direct, segment
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from asa.tracing import trace
from asa.zoo.data import GlobalOrder, ImageSet, fetch

STRATEGIES = ("ddp", "fsdp", "tensor", "1f1b")
INPUT, CLASSES = (3, 32, 32), 100
BATCH = {"ddp": 32, "fsdp": 32, "tensor": 256, "1f1b": 32}
MICROBATCHES = 4
LR, MOMENTUM, DECAY = 0.01, 0.9, 5e-4
SEED = 1
WARM_UP = 5
PYTHON_PAIRS = 60
"""Steps of each, in turns, of which the Python is timed."""

THIN_BATCH = 8
"""Samples of a step on networks thin enough to see the Python around them."""


class MLPs(nn.Module):
    """Blocks of two linear layers with a norm between them."""

    def __init__(self, width: int = 256, hidden: int = 1024, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(1), nn.Linear(3072, width), nn.LayerNorm(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
        return self.head(x)


def network(strategy: str, *, slim: bool = False) -> nn.Module:
    """The model of a comparison, with the same weights whenever it is asked for; ``slim``: with hardly any."""
    torch.manual_seed(0)
    if strategy == "tensor":
        return MLPs(width=16, hidden=32) if slim else MLPs()
    found = torchvision.models.resnet18(num_classes=CLASSES)
    return thin(found) if slim else found


def batch_of(strategy: str, *, slim: bool = False) -> int:
    """Samples of a step on all ranks."""
    return THIN_BATCH if slim else BATCH[strategy]


def plan_of(strategy: str, ranks: int, *, slim: bool = False) -> Plan:
    """The whole strategy as a plan, its prediction left empty."""
    graph_of = trace(network(strategy, slim=slim), torch.zeros((2, *INPUT)), name="tax")
    graph = layer_graph(graph_of, model="tax", input_shape=INPUT, num_classes=CLASSES)
    staged = strategy == "1f1b"
    cut = next((i for i, c in enumerate(graph.components) if c.name.startswith("layer3")), 0)
    components = []
    for i, c in enumerate(graph.components):
        split = strategy == "tensor" and c.name.startswith("blocks")
        data = ranks if strategy in ("ddp", "fsdp") else 1
        components.append(
            Assignment(
                name=c.name,
                stage=int(staged and i >= cut),
                data=DataDegree(strategy="zero3" if strategy == "fsdp" else "replicate", degree=data),
                tensor=TensorDegree(strategy="tensor" if split else "none", degree=ranks if split else 1),
            )
        )
    stages = (Stage(ranks=(0,)), Stage(ranks=(1,))) if staged else (Stage(ranks=tuple(range(ranks))),)
    return Plan(
        model_spec="tax", model_fingerprint=graph_of.model_fingerprint, profile_fingerprint="", cluster="none",
        cluster_fingerprint="", input_shape=INPUT, num_classes=CLASSES, strategy=strategy, gpus=ranks,
        global_batch=batch_of(strategy, slim=slim), precision="fp32", optimizer="sgd", device_type="cpu",
        components=tuple(components), stages=stages, schedule="1f1b" if staged else "none",
        num_microbatches=MICROBATCHES if staged else 1,
        prediction=Prediction(
            step_time_s=1.0, step_time_low_s=1.0, step_time_high_s=1.0, compute_s=1.0, exposed_communication_s=0.0,
            hidden_communication_s=0.0, update_s=0.0, bubble_s=0.0, memory_bytes_per_rank=(1,) * ranks,
            samples_per_s=1.0,
        ),
        certificate=Certificate(solver="hand", status="feasible", lower_bound_s=0.0, gap=1.0, space="", solve_s=0.0),
        baselines=(), origin="estimated",
    )  # fmt: skip


Step = Callable[[Tensor, int], None]
"""A training step on global sample indices; the number is the step's."""


class Planned:
    """The step as ``asa train`` does it."""

    def __init__(self, strategy: str, rank: int, votes: Votes, images: ImageSet, ranks: int, *, slim: bool) -> None:
        plan, device = plan_of(strategy, ranks, slim=slim), torch.device("cpu")
        model = materialize(
            plan, network(strategy, slim=slim), torch.zeros((2, *INPUT)), rank=rank, strategies=offered(),
            device=device, seed=SEED,
        )  # fmt: skip
        model.train()
        optimizer = build_optimizer("sgd", model.updated, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        self.worker = Worker(
            model=model, optimizer=optimizer, scale=LossScale("fp32"), votes=votes,
            precision="fp32", seed=SEED, label_smoothing=0.0,
        )  # fmt: skip
        self.tally, self.images = LossCounter(device), images

    def __call__(self, indices: Tensor, step: int) -> None:
        self.worker.train(self.images, indices, epoch=0, step=step, counter=self.tally)


def by_hand(strategy: str, rank: int, images: ImageSet, ranks: int, *, slim: bool) -> Step:
    """The step as its documentation shows it."""
    net = network(strategy, slim=slim).train()
    split = strategy in ("ddp", "fsdp")
    if strategy == "1f1b":
        return _pipeline(net, rank, images)
    if strategy == "ddp":
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
        net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)
    elif strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard([net.conv1, net.bn1])
        for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
            for block in layer:
                fully_shard(block)
        fully_shard(net.fc)
        fully_shard(net)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (ranks,))
        for block in net.blocks:
            parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # Fused where stock PyTorch has it so: sharded tensors know no fused SGD, and no loop takes them beside plain ones.
    ways = {"fused": True} if strategy == "ddp" else {"foreach": False}
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, **ways)

    def step(indices: Tensor, _: int) -> None:
        mine = indices[slice(*bounds(len(indices), ranks, rank))] if split else indices
        x, y = fetch(images, mine, train=True, seed=SEED, epoch=0, device="cpu")
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def _pipeline(net: Any, rank: int, images: ImageSet) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    front = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)
    back = nn.Sequential(net.layer3, net.layer4, net.avgpool, nn.Flatten(1), net.fc)
    part = (front, back)[rank]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, fused=True)

    def step(indices: Tensor, _: int) -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(fetch(images, indices, train=True, seed=SEED, epoch=0, device="cpu")[0])
        else:
            schedule.step(target=images.labels[indices])
        optimizer.step()

    return step


class Collectives(TorchDispatchMode):
    """How often and with how many bytes each collective and message is called.

    Between CPUs, what is scattered may go by one exchange, and what is gathered by a broadcast of every part
    (:mod:`asa.sharding.collectives.direct`): they count as what they stand for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int | Fraction] = defaultdict(int)
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and "wait" not in (kind := func._schema.name)
            and "wrap" not in kind
        ):
            name = kind.split("::")[1].strip("_")
            name = {"allgather_base": "all_gather", "reduce_scatter_base": "reduce_scatter", "allreduce": "all_reduce",
                    "recv_any_source": "recv", "alltoall_base": "reduce_scatter"}.get(name, name)  # fmt: skip
            first = args[1] if name == "reduce_scatter" and func.namespace == "c10d" else args[0]
            tensors = first if isinstance(first, list | tuple) else [first]
            if name == "broadcast":  # of one rank's part
                self.calls["all_gather"] += Fraction(1, dist.get_world_size())
                name = "all_gather"
            else:
                self.calls[name] += 1
            self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def in_shared_memory(self) -> Iterator[None]:
        """Inside, what goes through :class:`asa.sharding.collectives.segment.Segment` is counted, too."""
        with ExitStack() as stack:
            for name, whole in (("all_reduce", 0), ("all_gather", 0), ("reduce_scatter", 1)):
                usual = getattr(segment.Segment, name)

                def counted(own: Any, *args: Any, usual: Any = usual, name: str = name, whole: int = whole,
                            **options: Any) -> None:  # fmt: skip
                    self.calls[name] += 1
                    self.bytes[name] += args[whole].nbytes
                    usual(own, *args, **options)

                stack.enter_context(patch.object(segment.Segment, name, counted))
            yield


def traffic(step: Step, indices: Tensor, number: int) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes of one step, by operation."""
    seen = Collectives()
    with seen.in_shared_memory(), seen:
        step(indices, number)
    return {k: int(n) for k, n in sorted(seen.calls.items())}, dict(sorted(seen.bytes.items()))


def entrants_of(strategy: str, rank: int, votes: Votes, ranks: int, *, slim: bool) -> dict[str, Step]:
    """The planned step and the hand-written one, on the same samples."""
    generator = torch.Generator().manual_seed(SEED)
    images = ImageSet(
        images=torch.randint(256, (1024, *INPUT), dtype=torch.uint8, generator=generator),
        labels=torch.randint(CLASSES, (1024,), generator=generator), num_classes=CLASSES, mean=(0.5,) * 3,
        std=(0.25,) * 3, name="noise", source="noise", shape=INPUT,
    )  # fmt: skip
    return {
        "asa": Planned(strategy, rank, votes, images, ranks, slim=slim),
        "stock": by_hand(strategy, rank, images, ranks, slim=slim),
    }


def python_of(strategy: str, rank: int, votes: Votes, ranks: int) -> tuple[int, float]:
    """Calls of asa's own functions in a step, and the seconds of Python that asa adds to one. Ranks sleep while they
    wait: awake, they would seem to work."""
    indices = GlobalOrder(1024, THIN_BATCH, SEED, drop_last=True).batch(0, 0)
    entrants = entrants_of(strategy, rank, votes, ranks, slim=True)
    ours, stock = (partial(entrants[name], indices, 10**6) for name in ("asa", "stock"))
    with patch.object(direct, "AWAKE_S", 0.0), patch.object(segment, "AWAKE_S", 0.0):
        for _ in range(WARM_UP):
            ours()
            stock()
        calls = own_calls(ours)
        stock()
        return calls, added_python(ours, stock, lambda: votes.gather([0.0]), PYTHON_PAIRS)


def measure(rank: int, strategy: str, pairs: int, ranks: int) -> dict[str, Any]:
    """One strategy on one rank; the figures are those of the slowest rank, and the same on all."""
    votes = Votes()
    python = python_of(strategy, rank, votes, ranks)
    order = GlobalOrder(1024, BATCH[strategy], SEED, drop_last=True)
    entrants = entrants_of(strategy, rank, votes, ranks, slim=False)
    numbers = dict.fromkeys(entrants, 0)

    def turn(name: str) -> float:
        number = numbers[name]
        numbers[name] += 1
        indices = order.batch(0, number % order.steps_per_epoch)
        votes.gather([0.0])
        start = time.perf_counter()
        entrants[name](indices, number)
        return max(v[0] for v in votes.gather([time.perf_counter() - start]))

    for name in [*entrants] * WARM_UP:
        turn(name)
    moved = {name: traffic(step, order.batch(0, 0), 10**6) for name, step in entrants.items()}
    times: dict[str, list[float]] = {"asa": [], "stock": [], "again": []}
    for pair in range(pairs):
        turns = ["asa", "stock", "again"]
        turns = turns[pair % 3 :] + turns[: pair % 3]
        for name in turns if pair % 2 else reversed(turns):
            times[name].append(turn("stock" if name == "again" else name))
        if rank == 0 and (pair + 1) % 20 == 0:
            tell({"strategy": strategy, "pair": pair + 1, "pairs": pairs})
    return {"times": times, "traffic": moved, "python": python}


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Median, and the ends of its 95 % interval by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def compare(strategy: str, pairs: int, ranks: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure one strategy; the record of it.

    Raises:
        AssertionError: the two do not move the same.
    """
    found = run_ranks(
        ranks, partial(measure, strategy=strategy, pairs=pairs, ranks=ranks), threads=1, timeout_s=300,
        on_message=lambda _, m: say(f"{m['strategy']}: {m['pair']} of {m['pairs']} pairs"),
    )  # fmt: skip
    for rank, one in enumerate(found):
        assert one["traffic"]["asa"] == one["traffic"]["stock"], f"{strategy}, rank {rank}: {one['traffic']}"
    times = found[0]["times"]
    ratio, low, high = interval([a / b for a, b in zip(times["asa"], times["stock"], strict=True)])
    same, same_low, same_high = interval([a / b for a, b in zip(times["again"], times["stock"], strict=True)])
    return {
        "strategy": strategy,
        "ranks": ranks,
        "pairs": pairs,
        "stock_step_s": statistics.median(times["stock"]),
        "asa_step_s": statistics.median(times["asa"]),
        "ratio": ratio,
        "low": low,
        "high": high,
        "a_a": {"ratio": same, "low": same_low, "high": same_high},
        "calls": found[0]["traffic"]["asa"][0],
        "bytes": found[0]["traffic"]["asa"][1],
        "python_calls": max(one["python"][0] for one in found),
        "python_s": max(one["python"][1] for one in found),
        "times": times,
    }


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    records = []
    print("strategy  stock step  asa/stock (95 %)          A/A (95 %)                Python added to a step")
    for strategy in args.strategies.split(","):
        ranks = 2 if strategy == "1f1b" else args.ranks
        r = compare(strategy, args.pairs, ranks)
        records.append(r)
        aa = r["a_a"]
        print(
            f"{strategy:8}  {1e3 * r['stock_step_s']:7.1f} ms  {r['ratio']:.4f} ({r['low']:.4f} - {r['high']:.4f})  "
            f"{aa['ratio']:.4f} ({aa['low']:.4f} - {aa['high']:.4f})  {r['python_calls']} calls, "
            f"{1e3 * r['python_s']:.2f} ms",
            flush=True,
        )
    print("the same collectives, to the byte: " + "; ".join(f"{r['strategy']}: {r['calls']}" for r in records))
    if args.output:
        Path(args.output).write_text(json.dumps({"taken": time.strftime("%Y-%m-%d"), "results": records}) + "\n")


if __name__ == "__main__":
    main()
