"""A table of training programs under every kind of plan, against one process: right, warned, refused, or wrong.

    python -m benchmarks.programs [--only NAME] [--kind KIND] [--plans ddp,fsdp,tensor,mixed,zero1,job,auto,torch]
                                  [--ranks 2]

The programs are those of ``benchmarks/program_table``, in float64. Each trains in this process and, under a plan, on
two forked ranks, or more; the weights are compared. The record is resumed: what it has is not run again. Ranks run many
programs, and are started anew where one of them broke or hung.

``right``: the numbers of one process. ``warned``: others, and a warning or a line of ``asa`` named what differs.
``unchecked``: others, and a line said that the loss, or something in it, was not checked, and why.
``refused``: an error of ``asa``'s on every rank before the first update. ``silent``: others without a word.
``broken``: any other error, or an error behind the first update. ``hung``: no answer in time.

The plan ``torch`` is no plan of ``asa``'s: it is torch's own data parallelism, each rank with its rows of every batch.
What it gets right and ``asa`` refuses is counted in the end, as are lines told to programs that are right.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

import asa
from asa.api.loop import process_counts
from asa.errors import AsaError, InvalidInputError, UsageError
from asa.ir.plan import Plan
from asa.launch import run_ranks, tell
from asa.sharding.split import TensorPart
from asa.sharding.split.wire import whole
from benchmarks.program_table import PLANS, Program, table
from planner_tests.hand_plans import Choose, alternating, hand_plan, uniform

RECORD = Path(__file__).parent / "records" / "programs.json"
PROFILES = Path(__file__).parent.parent / "profiles"
Task = tuple[str, str]
"""Names of a program and of a plan."""
NAMING = (
    "draws random numbers", "draws its own", "taken out of a tensor", "in evaluation, too", "not a mean over samples",
    "by the sample's place", "differs between ranks", "differ between ranks", "from other samples", "with pieces of a",
    "weighs the mean of", "ignored by the loss", "from what one device would give", "a hook on its gradient",
    "keeps something from call to call", "no longer the same", "normalises over", "forward changes", "is not updated",
    "asks how many there are", "asks how many samples", "gradients of the model's inputs",
    "was changed behind", "a forward hook on", "a backward hook on", "was changed in place",
    "the data set is no longer", "ranks have the same others", "shortens rows", "was changed through",
    "updates element by element", "had a gradient before", "is changed in the loop by numbers of",
    "is not the model's own", "updates each parameter by itself",
    "leaves tensors with gradients in", "changes its inputs in place",
    "asks how many processes there are", "bends a mean", "ranks begin at other places",
    "from a parameter of model.modules()", "counts some of them twice",
    "was without a backward",
)  # fmt: skip
"""Words in warnings and lines that name what differs from one process; that something was not checked is none."""


def seeded() -> None:
    """Everything that is drawn is drawn again."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def alone(program: Program, how: str = "", ranks: int = 2) -> dict[str, Tensor]:
    """The weights that one process trains without ``asa``; under ``torch``, on the batches that so many ``ranks``
    share there."""
    seeded()
    net, opt, batches = program.make()
    more = program.loop(net, opt, Share(batches, None, ranks) if how == "torch" else batches)
    return {**net.state_dict(), **(more or {})}


def distance(value: Tensor, wanted: Tensor) -> float:
    """Relative distance. What is no number on both sides is no difference: one process has it, too."""
    both = ~value.isfinite() & ~wanted.isfinite()
    size = wanted.masked_fill(both, 0.0).abs().max().clamp(min=1e-6)
    return float(((value - wanted).abs().masked_fill(both, 0.0).max() / size).nan_to_num(nan=1e300, posinf=1e300))


class Watched:
    """A loader that notes when its second batch is asked for: then the first step is over."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.first_step: float | None = None

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(self._batches):
            if i == 1 and self.first_step is None:
                self.first_step = time.perf_counter()
            yield batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


BY_HAND = (
    "loss", "loop", "model", "data", "strange", "script", "method", "habit", "repository", "public", "published",
    "copies", "varied", "fresh", "recipe", "around", "everyday", "composed",
)  # fmt: skip
"""Kinds of programs for which plans are written by hand where they can be: what is tried is not the planner."""
_LAYOUTS: dict[str, tuple[Callable[[int], Choose], str]] = {
    "ddp": (lambda n: uniform(n, 1), "replicate"),
    "fsdp": (lambda n: uniform(n, 1), "zero3"),
    "tensor": (lambda n: uniform(1, n), "replicate"),
    "mixed": (alternating, "replicate"),
    "zero1": (lambda n: uniform(n, 1), "zero1"),
}


def by_hand(program: Program, how: str, ranks: int) -> Plan | None:
    """A plan for so many ranks that nothing is measured for; None where the model takes no single tensor of the
    loader's."""
    net, _, batches = program.make()
    batch = next(iter(batches))
    x = batch[0] if isinstance(batch, tuple | list) else None
    if (
        not isinstance(x, Tensor)
        or x.layout is not torch.strided
        or sum(p.default is p.empty for p in signature(net.forward).parameters.values()) != 1
    ):
        return None
    choose, data = _LAYOUTS[how]
    example = x[:1].repeat(2, *[1] * (x.dim() - 1))
    try:
        return hand_plan(
            net, ranks, choose(ranks), input_shape=tuple(x.shape[1:]), num_classes=1, example=example,
            data_strategy=lambda _i: data, global_batch=len(x),
        )  # fmt: skip
    except InvalidInputError:
        return None


def whole_of(tensor: Tensor) -> Tensor:
    """What a program returns, as one device has it, while the ranks that hold parts of it are there."""
    if isinstance(tensor, TensorPart):
        return whole(tensor.held.detach(), tensor.parted)
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(program: Program, how: str, seconds: dict[str, float]) -> dict[str, Tensor]:
    """The weights that a rank has in the end."""
    if how == "torch":
        return trained_by_torch(program)
    ranks = dist.get_world_size()
    cluster = str(PROFILES / f"cluster.local-gloo-{2 if ranks == 2 else 4}.json")
    usual = {"cluster": cluster, "cache": None, "time_limit_s": 0.5, "timeout_s": 60, **program.options}
    seeded()
    ours = program.kind in BY_HAND and how in _LAYOUTS and "example_input" not in program.options
    plan = by_hand(program, how, ranks) if how == "mixed" or ours else None
    seeded()
    if plan is not None:
        usual["plan"] = plan
    elif how == "mixed":
        raise UsageError("no plan by hand: the model takes no single tensor")
    elif how in PLANS:
        usual["strategies"] = (how,)
    began = time.perf_counter()
    if how == "job":
        return trained_by_job(program, usual, seconds)
    net, opt, loader = asa.parallelize(*program.make(), **usual)
    seconds["start"] = time.perf_counter() - began
    batches, before = Watched(loader), net.in_step.updates
    try:
        more = program.loop(net, opt, batches)
        if batches.first_step is not None:
            seconds["first step"] = batches.first_step - began
        return {**net.state_dict(), **{n: whole_of(t) for n, t in (more or {}).items()}}
    finally:
        seconds["updates"] = float(net.in_step.updates - before)
        net.close()


class ByHand(DistributedDataParallel):
    """Torch's own wrapper; names of the model are found, as a user writes ``net.module``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def state_dict(self, *args: Any, **more: Any) -> Any:
        """Of the model."""
        return self.module.state_dict(*args, **more)

    def load_state_dict(self, *args: Any, **more: Any) -> Any:
        """Into the model."""
        return self.module.load_state_dict(*args, **more)


class Share:
    """A loader of whose batches a rank has every ``ranks``-th row, as ``DistributedSampler`` gives them; all rows
    without a rank. Batches that cannot be shared evenly are left out: a mean of means is no mean there, whoever shares
    them."""

    def __init__(self, batches: Any, rank: int | None, ranks: int) -> None:
        self._batches, self._rank, self._ranks = batches, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            rows = next((len(t) for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 0)
            if rows % self._ranks == 0:
                yield tree_map(lambda t, n=rows: self._mine(t, n), batch)

    def _mine(self, leaf: Any, rows: int) -> Any:
        cut = self._rank is not None and isinstance(leaf, Tensor) and leaf.shape[:1] == (rows,)
        return leaf[self._rank :: self._ranks] if cut else leaf

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def trained_by_torch(program: Program) -> dict[str, Tensor]:
    """The same by torch's own data parallelism on this rank's rows of every batch."""
    seeded()
    net, opt, batches = program.make()
    wrapped = ByHand(net, find_unused_parameters=True)
    more = program.loop(wrapped, opt, Share(batches, dist.get_rank(), dist.get_world_size()))
    return {**net.state_dict(), **(more or {})}


def trained_by_job(program: Program, usual: dict[str, Any], seconds: dict[str, float]) -> dict[str, Tensor]:
    """The same by ``asa.Job`` under a pipeline, on the batches that the loop sees."""
    began = time.perf_counter()
    net, opt, batches = program.make()
    epochs = 1 if program.kind in ("timm", "torchvision") else 2
    steps = [batch for _ in range(epochs) for batch in batches]
    job = asa.Job(net, opt, batches, program.job_loss, strategies=("gpipe", "1f1b"), replan=False, **usual)  # type: ignore[arg-type]
    seconds["start"] = time.perf_counter() - began
    try:
        for i, batch in enumerate(steps):
            job.train_step(batch)
            if i == 0:
                seconds["first step"], seconds["updates"] = time.perf_counter() - began, 1.0
        return job.state_dict()
    finally:
        job.close()


def judged(program: Program, how: str, wanted: dict[str, Tensor]) -> dict[str, Any]:
    """What this rank says of a program under a plan."""
    seconds: dict[str, float] = {}
    text = io.StringIO()
    found: dict[str, Any]
    with warnings.catch_warnings(record=True) as heard, contextlib.redirect_stderr(text):
        warnings.simplefilter("always")
        try:
            state = spread(program, how, seconds)
            missing = wanted.keys() ^ state.keys()
            missing |= {n for n in wanted.keys() & state.keys() if wanted[n].shape != state[n].shape}
            apart = max(
                (distance(state[n].to(w.dtype), w), n)
                for n, w in wanted.items()
                if n not in missing and w.numel() and (w.is_floating_point() or w.is_complex())
            )
            found = {"distance": apart[0], "tensor": apart[1], "missing": sorted(missing)[:3]}
        except AsaError as error:
            kind = "broken" if seconds.get("updates") else "refused"
            found = {"verdict": kind, "why": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        except Exception as error:
            found = {"verdict": "broken", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    lines = [line for line in text.getvalue().splitlines() if line.startswith("asa:")]
    heard_of = [str(w.message) for w in heard if w.category is UserWarning]
    said = [line for line in (*heard_of, *lines) if any(words in line for words in NAMING)]
    return {
        **found,
        "said": [s[:300] for s in said],
        "unchecked": next((line for line in lines if "was not checked" in line), ""),
        "seconds": {k: round(v, 2) for k, v in seconds.items() if k != "updates"},
    }


def rank_runs(rank: int, tasks: list[Task], wanted: dict[Task, dict[str, Tensor]]) -> None:
    """Run ``tasks`` one after another and tell the parent of each, until ranks disagree about how one ended."""
    process_counts._own_files = list  # files of the table have the words of all its programs
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    for i, (name, how) in enumerate(tasks):
        tell({"begun": [name, how]})
        found = judged(table()[name], how, wanted[name, "torch" if how == "torch" else ""])
        tell({"task": [name, how], **found})
        kind = found.get("verdict", "done")
        store.set(f"{i}/{rank}", kind)
        kinds = set()
        for other in range(dist.get_world_size()):
            store.wait([f"{i}/{other}"], timedelta(seconds=90))
            kinds.add(store.get(f"{i}/{other}").decode())
        if len(kinds) > 1 or kinds == {"broken"}:
            raise RuntimeError("ranks are no longer in step")


def verdict(program: Program, answers: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """What the ranks' answers come to."""
    kinds = [a["verdict"] for a in answers if "verdict" in a]
    said = list(dict.fromkeys(s for a in answers for s in a["said"]))[:2]
    seconds = max((a["seconds"] for a in answers), key=lambda s: s.get("first step", 0.0), default={})
    if kinds:
        kind = "refused" if kinds.count("refused") == len(answers) == ranks else "broken"
        return {"verdict": kind, "why": next(a["why"] for a in answers if "why" in a), "seconds": seconds}
    worst = max(answers, key=lambda a: a["distance"])
    right = worst["distance"] <= program.within and not worst["missing"]
    unchecked = next((a["unchecked"] for a in answers if a["unchecked"]), "")
    kind = "right" if right else "warned" if said else "unchecked" if unchecked else "silent"
    more = {"missing": worst["missing"]} if worst["missing"] else {}
    if kind == "unchecked":
        more["why"] = unchecked[:300]
    return {"verdict": kind, "distance": worst["distance"], "tensor": worst["tensor"], "said": said, "seconds": seconds,
            **more}  # fmt: skip


def run(tasks: list[Task], keep: Any, ranks: int) -> None:
    """Run all ``tasks`` on so many ranks; ``keep(name, how, verdict)`` as they end."""
    programs = table()
    while tasks:
        some, wanted = tasks[:24], dict[Task, dict[str, Tensor]]()
        for name, kind in dict.fromkeys((n, "torch" if how == "torch" else "") for n, how in some):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    wanted[name, kind] = alone(programs[name], kind, ranks)
                except Exception as error:
                    raise RuntimeError(f"{name} does not train in one process") from error
        answers: dict[Task, list[dict[str, Any]]] = {}
        begun: list[Task] = []

        def hear(_rank: int, message: Any, answers: Any = answers, begun: Any = begun) -> None:
            if "begun" in message:
                begun.append(tuple(message["begun"]))
                return
            task = tuple(message["task"])
            answers.setdefault(task, []).append(message)
            if len(answers[task]) == ranks:
                keep(*task, verdict(programs[task[0]], answers[task], ranks))

        try:
            run_ranks(ranks, rank_runs, some, wanted, threads=1, timeout_s=60, limit_s=60 * len(some), on_message=hear)
            tasks = tasks[len(some) :]
        except AsaError as error:
            ended = [t for t in some if len(answers.get(t, ())) == ranks]
            if begun and begun[-1] not in ended:
                last = begun[-1]
                one = answers.get(last)
                why = f"{' '.join(str(error).split())[:200]}"
                if one and "exited with code 2" in why:  # a line of its own, where it could not be raised
                    one = one[:1] * ranks
                told = one is not None and "verdict" in one[0]
                keep(*last, verdict(programs[last[0]], one or [], ranks) if told else {"verdict": "hung", "why": why})
                ended.append(last)
            if not ended:
                raise
            tasks = [t for t in tasks if t not in ended]


def main() -> None:
    """Run what the record lacks, and print what is not right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only")
    parser.add_argument("--kind")
    parser.add_argument("--plans", default=",".join((*PLANS, "job")))
    parser.add_argument("--again", action="store_true", help="run what the record has, too")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("-o", type=Path, help="the record; of two ranks in the repository, if it is left out")
    args = parser.parse_args()
    args.o = args.o or RECORD.with_suffix(".json" if args.ranks == 2 else f".{args.ranks}.json")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    record: dict[str, dict[str, Any]] = json.loads(args.o.read_text()) if args.o.exists() else {}
    tasks = []
    for name, program in table().items():
        if (args.only and args.only not in name) or (args.kind and program.kind != args.kind):
            continue
        for how in args.plans.split(","):
            if (how == "job" and program.job_loss is None) or (how in record.get(name, {}) and not args.again):
                continue
            tasks.append((name, how))

    def keep(name: str, how: str, found: dict[str, Any]) -> None:
        record.setdefault(name, {})[how] = found
        beside = args.o.with_suffix(".new")
        beside.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        beside.replace(args.o)  # a run that is stopped leaves a whole file
        if found["verdict"] != "right":
            word = found.get("why") or f"{found['distance']:.1e} {found['tensor']} {found['said']}"
            print(f"{found['verdict']:8} {name} under {how}: {word[:330]}", flush=True)

    run(tasks, keep, args.ranks)
    ours = [(n, how, found) for n, each in record.items() for how, found in each.items() if how != "torch"]
    print(dict(Counter(found["verdict"] for *_, found in ours)))
    by_torch = {n for n, each in record.items() if each.get("torch", {}).get("verdict") == "right"}
    for n, how, found in ours:
        if n in by_torch and found["verdict"] in ("refused", "broken", "hung"):
            print(f"not done, and right by torch: {n} under {how}: {found['why'][:150]}")
    told = Counter(
        re.sub(r"[0-9]+", "#", s)[:70]
        for *_, found in ours
        if found["verdict"] == "right"
        for s in found.get("said", ())
    )
    print(
        "right, and told something:",
        sum(bool(f.get("said")) for *_, f in ours if f["verdict"] == "right"),
        told.most_common(9),
    )


if __name__ == "__main__":
    main()
