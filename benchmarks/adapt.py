"""Does adapting pay, really? A run on two ranks while something else has the core of one of them.

    asa profile resnet18 --global-batch 32; asa plan resnet18 --gpus 2 --global-batch 32 -o plan.json
    python benchmarks/adapt.py plan.json [--seconds 60] [--load 1] [-o records/adapt.json]

Each rank is kept on a core of its own. Three runs from the same plan, in the same minutes: *undisturbed*; *kept*, the
plan kept whatever comes; *adapted*, as ``asa train`` adapts. In the last two, busy loops (``--load`` of them, on the
core of rank 1) begin after a third of the run and end after two thirds. Then the *oracle*: under the same load from
beginning to end, every plan of a short list is run for a while (the plan itself, one rank alone on the free core, and
what the planner answers when it is told by how much the rank is slower), and the fastest counts. Printed: seconds a
step in the three thirds (means over their second halves, so that what came of a change counts), what was found and
changed and when, seconds that changes took, and how much of the oracle's speed the adapted run has.

The plan's profile and cluster must be on hand, as for ``asa train``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asa.cli.choose import origins
from asa.cli.console import Console
from asa.cli.replanning import solve_again
from asa.errors import AsaError
from asa.executor.model.materialize import materialize
from asa.executor.model.votes import Votes
from asa.executor.running.loop import TrainingExecutor
from asa.executor.training.settings import TrainSettings
from asa.executor.training.stopping import StopRequest
from asa.interfaces.executor import Look
from asa.ir import codec
from asa.ir.cluster import Cluster, RankDevice
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile, Stat
from asa.launch import run_ranks, tell
from asa.scheduler import Model, adapt
from asa.strategies import offered
from asa.zoo.data import ImageSet
from asa.zoo.models import build

SLOW = 1
"""The process whose core is disturbed."""


@contextmanager
def busy(core: int, load: int) -> Iterator[None]:
    """Inside, ``load`` loops have ``core``, too."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(load)]
    try:
        yield
    finally:
        for loop in loops:
            loop.send_signal(signal.SIGKILL)
            loop.wait()


def _noise(plan: Plan) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    channels, height, width = plan.input_shape
    count = 64 * plan.global_batch
    return ImageSet(
        images=torch.randint(256, (count, channels, height, width), dtype=torch.uint8, generator=generator),
        labels=torch.randint(plan.num_classes, (count,), generator=generator), num_classes=plan.num_classes,
        mean=(0.5,) * channels, std=(0.25,) * channels, name="noise", source="noise", shape=(channels, height, width),
    )  # fmt: skip


class _Timed(TrainingExecutor):
    """Tells of every line of the log when it came, and of every change of plan what it took."""

    def run_epoch(self, epoch: int, look: Look | None = None) -> Any:
        """As always, with a word to the parent before each look."""

        def looking(measured: Measurements, step: int) -> None:
            if self.leads:
                mean = measured.mean_step_s or measured.step_time.median
                tell({"kind": "line", "at": time.time(), "step": step, "step_s": mean + measured.data_wait_s})
            if look is not None:
                look(measured, step)

        return super().run_epoch(epoch, looking)

    def migrate(self, plan: Plan, processes: tuple[int, ...] | None = None) -> None:
        """As always, and how long it took."""
        began = time.time()
        super().migrate(plan, processes)
        if self.leads:
            text = f"{plan.num_ranks} ranks on {list(self.processes)}, weights {list(plan.stages[0].weights or ())}"
            tell({"kind": "change", "at": began, "step": self.step, "seconds": time.time() - began, "to": text})


def _rank(
    rank: int, plan: Plan, known: tuple[Profile, Cluster] | None, cores: list[int],
    seconds: float, folder: str,
) -> None:  # fmt: skip
    os.sched_setaffinity(0, {cores[rank]})
    votes, images = Votes(120), _noise(plan)
    settings = TrainSettings(
        out=folder, epochs=1_000, steps_per_epoch=64, lr=0.01, timeout_s=120, log_every=20, data="synthetic"
    )

    def parallel(wanted: Plan, runs: tuple[int, ...]) -> Any:
        model = build(wanted.model_spec, num_classes=wanted.num_classes, input_shape=wanted.input_shape, seed=0)  # type: ignore[arg-type]
        return materialize(
            wanted, model, torch.zeros(2, *wanted.input_shape), rank=rank, strategies=offered(),
            device=torch.device("cpu"), processes=runs, timeout_s=120, alike=True,
        )  # fmt: skip

    executor = _Timed(
        plan, parallel, settings, train=images, test=_noise(replace(plan, global_batch=1)), votes=votes,
        stop=StopRequest(), announce=lambda _: None, folder=Path(folder) / "checkpoints", run="adapt",
    )  # fmt: skip
    executor.save = lambda _epoch: None  # type: ignore[method-assign]
    if rank == 0:
        tell({"kind": "begin", "at": time.time()})
    ends = time.time() + seconds
    model = None
    if known is not None:
        model = Model(profile=known[0], cluster=known[1], strategies=offered(), solve=solve_again)
    say: Callable[[dict[str, Any]], None] = lambda _: None  # noqa: E731
    if rank == 0:
        say = lambda e: tell({"kind": "said", "at": time.time(), "event": e})  # noqa: E731
    for _ in adapt(executor, range(1_000), say, model=model if rank == 0 else None, following=known is not None):
        if votes.anyone(time.time() > ends):
            return


def run(
    plan: Plan, known: tuple[Profile, Cluster] | None, cores: list[int], seconds: float, load: int, *,
    thirds: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """One run of ``seconds``, disturbed in its middle third (or all of it); what its ranks told, in order."""
    told: list[dict[str, Any]] = []
    loops: list[Any] = []

    def hear(_rank: int, message: dict[str, Any]) -> None:
        told.append(message)
        since = message["at"] - next((m["at"] for m in told if m["kind"] == "begin"), message["at"])
        wanted = load > 0 and (not thirds or seconds / 3 <= since < 2 * seconds / 3)
        if wanted and not loops:
            loops.append(busy(cores[SLOW], load))
            loops[0].__enter__()
            told.append({"kind": "load", "at": time.time()})
        elif not wanted and loops:
            loops.pop().__exit__(None, None, None)

    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(
                len(cores),
                partial(_rank, plan=plan, known=known, cores=cores, seconds=seconds, folder=folder),
                threads=1,
                timeout_s=300,
                on_message=hear,
            )
        finally:
            if loops:
                loops.pop().__exit__(None, None, None)
    return told


def means(told: list[dict[str, Any]], seconds: float, parts: int = 3) -> list[float]:
    """Seconds a step in the second half of every part of the run."""
    began = next(m["at"] for m in told if m["kind"] == "begin")
    found = []
    for part in range(parts):
        low, high = ((part + 0.5) * seconds / parts, (part + 1) * seconds / parts)
        steps = [m["step_s"] for m in told if m["kind"] == "line" and low <= m["at"] - began < high]
        found.append(statistics.mean(steps) if steps else float("nan"))
    return found


def oracle(
    plan: Plan, known: tuple[Profile, Cluster], cores: list[int], seconds: float, load: int, factor: float
) -> tuple[float, str]:
    """The fastest of a few plans while rank 1 is disturbed all the time, and takes ``factor`` times as long: seconds a
    step, and which it is."""
    profile, cluster = known
    slow = tuple(
        RankDevice(name=cluster.device.name, speed=1 / factor if p == SLOW else 1.0) for p in range(len(cores))
    )
    tried = {"the plan": plan}
    for name, devices, gpus in (("the planner's, told", slow, len(cores)), ("one rank", (), 1)):
        try:
            tried[name] = solve_again(plan, _measured_as(plan), profile, replace(cluster, devices=devices), gpus)
        except AsaError as error:
            print(f"  {name}: {error}")
    best = (float("inf"), "")
    for name, candidate in tried.items():
        (step_s,) = means(run(candidate, None, cores, seconds, load, thirds=False), seconds, 1)
        print(f"  under the load, {name}: {1e3 * step_s:.1f} ms a step", flush=True)
        best = min(best, (step_s, name))
    return best


def _measured_as(plan: Plan) -> Measurements:
    """Nothing but the plan's own promise."""
    seconds = plan.prediction.step_time_s
    return Measurements(
        plan_fingerprint=codec.fingerprint(plan), strategy=plan.strategy, num_ranks=plan.num_ranks,
        global_batch=plan.global_batch, step_time=Stat.of([seconds]), predicted_step_time_s=seconds,
        communication_s=None, data_wait_s=0.0, peak_memory_bytes=None,
        predicted_memory_bytes=plan.prediction.memory_bytes_per_rank,
    )  # fmt: skip


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plan")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=int, default=1)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    plan = codec.load(Plan, Path(args.plan))
    known = origins(plan, Console())
    cores = sorted(os.sched_getaffinity(0))[: plan.num_ranks]
    record: dict[str, Any] = {"model": plan.model_spec, "load": args.load, "seconds": args.seconds}
    for name, model, load in (("undisturbed", None, 0), ("kept", None, args.load), ("adapted", known, args.load)):
        told = run(plan, model, cores, args.seconds, load)
        first, middle, last = record[name] = means(told, args.seconds)
        print(
            f"{name:12} {1e3 * first:7.1f} ms, {'disturbed' if load else 'then'} {1e3 * middle:7.1f} ms, "
            f"after {1e3 * last:7.1f} ms",
            flush=True,
        )
        if name == "adapted":
            begins = next((m["at"] for m in told if m["kind"] == "load"), 0.0)
            for m in told:
                if m["kind"] == "change":
                    steps = sum(1 for x in told if x["kind"] == "line" and begins <= x["at"] <= m["at"])
                    print(f"  {m['at'] - begins:6.1f} s after the load began, step {m['step']} ({steps} lines later): "
                          f"{m['to']}, in {m['seconds']:.2f} s")  # fmt: skip
                elif m["kind"] == "said" and m["event"]["event"] in ("finding", "replan"):
                    e = m["event"]
                    print(f"  {m['at'] - begins:6.1f} s: {e.get('line') or e.get('why') or e.get('kind')}")
            record["changes"] = [m for m in told if m["kind"] == "change"]
    factor = max(1.1, record["kept"][1] / record["kept"][0])
    step_s, name = oracle(plan, known, cores, args.seconds / 3, args.load, factor)
    record["oracle"] = {"step_s": step_s, "plan": name}
    kept, adapted = record["kept"][1], record["adapted"][1]
    regained = (kept - adapted) / (kept - step_s) if kept > step_s else float("nan")
    print(
        f"oracle       {1e3 * step_s:7.1f} ms ({name}); the adapted run has {100 * step_s / adapted:.0f} % of its "
        f"speed, and regained {100 * regained:.0f} % of what the load cost a run that kept its plan"
    )
    if args.output:
        Path(args.output).write_text(json.dumps({"taken": time.strftime("%Y-%m-%d"), **record}) + "\n")


if __name__ == "__main__":
    main()
