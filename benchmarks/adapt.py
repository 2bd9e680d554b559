"""Does adapting pay, really? ``asa train`` on two ranks, disturbed from outside while it runs.

    asa profile resnet18 --global-batch 32 --input 3x32x32
    asa plan resnet18 --gpus 2 --global-batch 32 -o plan.json
    python benchmarks/adapt.py plan.json [--cases core,quota,...] [--steps 300] [-o benchmarks/records/adapt.json]

Disturbances, none of them a flag of asa:

- *core*: busy loops (``--load`` of them) on the core of rank 1.
- *quota*: rank 1 in a cgroup that may run half of every 10 ms.
- *stops*: rank 1 is stopped (SIGSTOP) for half of every 200 ms.
- *bursts*: as *core*, but for 5 s in every 10 s.
- *growing*: as *quota*, with less of the core every 5 s.
- *both*: busy loops on the cores of both ranks; nobody is slower than the other.
- *shared*: both ranks on one core.
- *memory*: the memory cgroup of the run is lowered to what it uses just then, and a little.
- *links*: each rank in a network namespace, planned for the links between those as they are measured there, which are
  then brought down to ``--megabits`` by ``tc``.
- *none*: nothing; nothing may be found or changed.

Of each, one adapting run is disturbed in its middle third: the first third gives *undisturbed* and the last what it is
*after*. Then, disturbed from beginning to end and keeping their plan: *kept*, the plan itself, and a short list of
others (one rank, the planner's answer when it is told the slowdown that was measured, and what the adapting run changed
to), of which the fastest is the *oracle*. Seconds a step are medians over lines of the log, of the second half of each
third; the machine's own mood between runs is in them. ``--alone`` puts the runs, and what disturbs them, into a
control group that gets nearly all of every core whenever it wants it: what else the machine does is then no part of
the figures. Needs Linux, and root for all but *core*, *shared* and *none*.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from emulated import links as measured_links
from namespaces import NotPermitted, leave_network, name_of, rooms, shape, unshape

from asa.cli.choose import origins
from asa.cli.console import Console
from asa.cli.replanning import solve_again
from asa.errors import AsaError
from asa.interfaces.executor import Placement
from asa.ir import codec
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Stat
from asa.planner import Request
from asa.planner import plan as solve
from asa.scheduler import Model
from asa.scheduler.costs import Slowness
from asa.scheduler.model import same
from asa.strategies import offered

SLOW = 1
"""The rank that is disturbed."""
CASES = ("none", "core", "quota", "stops", "bursts", "growing", "both", "shared", "memory", "links")
ONE_SLOW = ("core", "quota", "stops", "bursts", "growing")
"""Cases in which only rank 1 is slow."""
EPOCH = 50
CGROUPS = Path("/sys/fs/cgroup")
MEMORY_GROUP = CGROUPS / "memory" / f"asa-adapt-{os.getpid()}"
CPU_GROUP = CGROUPS / "cpu" / f"asa-adapt-{os.getpid()}"
_MOST_SHARES = 1 << 18


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(p) for p in task.read_text().split()]
    return found


def _cores(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except ProcessLookupError:
        return set()


def _threads(pid: int) -> list[int]:
    return [int(p.name) for p in Path(f"/proc/{pid}/task").iterdir()]


@dataclass
class Run:
    """One ``asa train`` and what it has logged so far."""

    folder: Path
    started: list[subprocess.Popen[bytes]]
    apart: bool
    events: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def poll(self) -> None:
        """Read what is new in the log."""
        log = self.folder / "log.jsonl"
        if log.is_file():
            with log.open() as file:
                file.seek(self._read)
                for line in iter(file.readline, ""):
                    if not line.endswith("\n"):
                        break
                    self._read += len(line)
                    self.events.append(json.loads(line))

    @property
    def step(self) -> int:
        return next((e["step"] for e in reversed(self.events) if e["event"] == "steps"), 0)

    def ranks(self) -> list[int]:
        """Process ids by rank: each is bound to the core of its number."""
        if self.apart:
            return [p.pid for p in self.started]
        bound = {tuple(_cores(p)): p for p in _children(self.started[0].pid) if len(_cores(p)) == 1}
        return [bound[key] for key in sorted(bound)]


Disturbance = Callable[[Run, argparse.Namespace], Any]


@contextmanager
def core(run: Run, args: argparse.Namespace) -> Iterator[None]:
    """Others have the core of rank 1, too."""
    (own,) = _cores(run.ranks()[SLOW]) if len(run.ranks()) > SLOW else {max(os.sched_getaffinity(0))}
    with _loops([own], args.load):
        yield


@contextmanager
def both(_run: Run, args: argparse.Namespace) -> Iterator[None]:
    """Others have the cores of all ranks, too."""
    with _loops(sorted(os.sched_getaffinity(0))[:2], args.load):
        yield


@contextmanager
def _loops(cores: Iterable[int], load: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Busy loops, ``load`` on each of ``cores``."""
    code = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code, str(core)]) for core in cores for _ in range(load)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def _repeated(act: Callable[[int], None], every_s: float) -> Iterator[None]:
    """Calls ``act`` with 0, 1, 2 and so on, once in every ``every_s`` seconds."""
    over = threading.Event()

    def repeat() -> None:
        count = 0
        while not over.is_set():
            act(count)
            count += 1
            over.wait(every_s)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _send(pids: Iterable[int], signal_number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


@contextmanager
def stops(run: Run, _args: argparse.Namespace) -> Iterator[None]:
    """Rank 1 is stopped for half of the time."""
    victim = run.ranks()[SLOW : SLOW + 1]
    try:
        with _repeated(lambda i: _send(victim, (signal.SIGCONT, signal.SIGSTOP)[i % 2]), 0.1):
            yield
    finally:
        _send(victim, signal.SIGCONT)


@contextmanager
def bursts(run: Run, args: argparse.Namespace) -> Iterator[None]:
    """Others have the core of rank 1 half of the time, for seconds."""
    (own,) = _cores(run.ranks()[SLOW]) if len(run.ranks()) > SLOW else {max(os.sched_getaffinity(0))}
    with _loops([own], args.load) as loops:
        pids = [loop.pid for loop in loops]
        with _repeated(lambda i: _send(pids, (signal.SIGCONT, signal.SIGSTOP)[i % 2]), 5.0):
            yield


@contextmanager
def growing(run: Run, args: argparse.Namespace) -> Iterator[None]:
    """Rank 1 is throttled more and more, down to ``--share``."""
    file = (CPU_GROUP if CPU_GROUP.exists() else CPU_GROUP.parent) / "quota" / "cpu.cfs_quota_us"

    def less(count: int) -> None:
        file.write_text(str(int(10000 * max(args.share, 0.9 - 0.1 * count))))

    with quota(run, args), _repeated(less, 5.0):
        yield


@contextmanager
def quota(run: Run, args: argparse.Namespace) -> Iterator[None]:
    """Rank 1 is throttled for a part of every 10 ms."""
    around = CPU_GROUP if CPU_GROUP.exists() else CPU_GROUP.parent
    folder = around / "quota"
    folder.mkdir()
    try:
        (folder / "cpu.cfs_period_us").write_text("10000")
        (folder / "cpu.cfs_quota_us").write_text(str(int(10000 * args.share)))
        ranks = run.ranks()
        if len(ranks) > SLOW:  # one rank alone runs where nothing is throttled
            (folder / "cgroup.procs").write_text(str(ranks[SLOW]))
        yield
    finally:
        _leave(folder, around)


def _leave(folder: Path, parent: Path) -> None:
    for pid in (folder / "cgroup.procs").read_text().split():
        try:
            (parent / "cgroup.procs").write_text(pid)
        except ProcessLookupError:
            continue
    for _ in range(100):  # whoever was killed is a member until somebody has collected it
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)


@contextmanager
def alone() -> Iterator[None]:
    """This process, and all it starts, before all others on every core."""
    CPU_GROUP.mkdir()
    try:
        (CPU_GROUP / "cpu.shares").write_text(str(_MOST_SHARES))
        (CPU_GROUP / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        _leave(CPU_GROUP, CPU_GROUP.parent)


@contextmanager
def shared(run: Run, _args: argparse.Namespace) -> Iterator[None]:
    """All ranks on the core of rank 0, with all their threads."""
    ranks = run.ranks()
    before = {p: _cores(p) for p in ranks}
    for pid in ranks[1:]:
        for thread in _threads(pid):
            os.sched_setaffinity(thread, before[ranks[0]])
    try:
        yield
    finally:
        for pid, cores in before.items():
            if Path(f"/proc/{pid}").exists():
                for thread in _threads(pid):
                    os.sched_setaffinity(thread, cores)


@contextmanager
def memory(run: Run, args: argparse.Namespace) -> Iterator[None]:
    """The run's cgroup may hold what it holds already, and ``--spare`` MiB more."""
    folder = MEMORY_GROUP
    limit = folder / "memory.limit_in_bytes"
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    used = int(stat["total_rss"]) + int(stat.get("total_shmem", 0))
    for spare in range(args.spare, args.spare + 1024, 8):  # what the kernel cannot take away it refuses
        with suppress(OSError):
            limit.write_text(str(used + (spare << 20)))
            run.events.append(
                {"event": "note", "step": run.step, "message": f"limit lowered to {used / 2**20 + spare:.0f} MiB"}
            )
            break
    try:
        yield
    finally:
        limit.write_text("-1")


@contextmanager
def links(_run: Run, args: argparse.Namespace) -> Iterator[None]:
    """The links between ranks carry less."""
    shape(2, args.megabits)
    try:
        yield
    finally:
        unshape(2)


@contextmanager
def none(_run: Run, _args: argparse.Namespace) -> Iterator[None]:
    """Nothing."""
    yield


DISTURBANCES: dict[str, Disturbance] = {
    "none": none, "core": core, "quota": quota, "stops": stops, "bursts": bursts, "growing": growing, "both": both,
    "shared": shared, "memory": memory, "links": links,
}  # fmt: skip


def _start(plan_file: Path, plan: Plan, out: Path, case: str, steps: int, adapting: bool) -> Run:
    command = [
        sys.executable, "-m", "asa", "train", str(plan_file), "--data", "synthetic",
        "--epochs", str(-(-steps // EPOCH)), "--steps-per-epoch", str(min(EPOCH, steps)), "--lr", "0.01",
        "--out", str(out), "--timeout", "60s",
    ]  # fmt: skip
    if not adapting:
        command.append("--no-replan")
    said = (out.parent / f"{out.name}.txt").open("wb")
    if case == "links":
        started = []
        for rank in range(plan.num_processes):
            env = {
                "RANK": str(rank), "WORLD_SIZE": str(plan.num_processes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            inside = ["ip", "netns", "exec", name_of(rank), "taskset", "-c", str(rank), *command]
            started.append(subprocess.Popen(inside, env=os.environ | env, stdout=said, stderr=said))
        return Run(out, started, True)

    def enter() -> None:
        (MEMORY_GROUP / "cgroup.procs").write_text(str(os.getpid()))

    before = enter if case == "memory" else None
    return Run(out, [subprocess.Popen(command, stdout=said, stderr=said, preexec_fn=before)], False)


def train(
    plan_file: Path, out: Path, case: str, args: argparse.Namespace, *, steps: int, begins: int, ends: int,
    adapting: bool,
) -> Run:  # fmt: skip
    """One run to its end, disturbed between two steps; events ``disturbed`` and ``free`` say when that was."""
    plan = codec.load(Plan, plan_file)
    run, inside, was = _start(plan_file, plan, out, case, steps, adapting), ExitStack(), False
    deadline = time.monotonic() + args.limit
    with inside:
        while any(p.poll() is None for p in run.started):
            run.poll()
            if run.step > begins and not was:
                inside.enter_context(DISTURBANCES[case](run, args))
                run.events.append({"event": "disturbed", "step": run.step, "time": time.time()})
                was = True
            elif run.step >= ends and was:
                inside.close()
                run.events.append({"event": "free", "step": run.step, "time": time.time()})
                ends = 10**9
            if time.monotonic() > deadline:
                for p in run.started:
                    p.terminate()
                    p.wait(30)
                print(f"  {case}: ended after {args.limit:g} s, in step {run.step}")
            time.sleep(0.05)
    run.poll()
    run.events.append({"event": "exit", "codes": [p.returncode for p in run.started]})
    return run


def step_s(run: Run, low: float, high: float) -> float:
    """Seconds of a step: the median over lines of the log in (low, high], each counted as often as it has steps."""
    found, last = [], 0
    for e in run.events:
        if e["event"] == "steps":
            if low < e["step"] <= high:
                found += [e["step_time_s"]] * max(1, e["step"] - last)
            last = e["step"]
    return statistics.median(found) if found else math.nan


def told(plan: Plan, case: str, factor: float) -> Iterator[tuple[str, Plan]]:
    """Other plans to try by hand: one rank, and the planner's when it is told the slowdown."""
    profile, cluster = origins(plan, Console())
    seconds = plan.prediction.step_time_s
    measured = Measurements(
        plan_fingerprint=codec.fingerprint(plan), strategy=plan.strategy, num_ranks=plan.num_ranks,
        global_batch=plan.global_batch, step_time=Stat.of([seconds]), predicted_step_time_s=seconds,
        communication_s=None, data_wait_s=0.0, peak_memory_bytes=None,
        predicted_memory_bytes=plan.prediction.memory_bytes_per_rank,
    )  # fmt: skip
    model = Model(profile=profile, cluster=cluster, strategies=offered(), solve=solve_again)
    log = math.log(max(1.0, factor))
    slow = Slowness(
        common=0.0, ranks=(0.0, log if case in ONE_SLOW else 0.0),
        levels=tuple(log if case == "links" else 0.0 for _ in cluster.levels),
        stolen=(SLOW,) if case in ONE_SLOW else (),
    )  # fmt: skip
    now = Placement(plan=plan, processes=(0, 1))
    try:
        seen = [now]
        for i, found in enumerate(model.best(now, measured, slow)):
            if not any(same(found, other) for other in seen):
                seen.append(found)
                yield f"told {i}", found.plan
        alone = Placement(plan=replace(solve_again(plan, measured, profile, cluster, 1), gpus=1), processes=(0,))
        if not any(same(alone, other) for other in seen):
            yield "one rank", alone.plan
    except AsaError as error:
        print(f"  {error}")


def planned_there(plan_file: Path, folder: Path) -> Path:
    """The best plan for the links between the namespaces, which are measured in place and kept in ``profiles/``."""
    plan = codec.load(Plan, plan_file)
    profile, cluster = origins(plan, Console())
    there = measured_links(2, 0.0, 10.0)
    cluster = replace(cluster, name="namespaces-2", levels=there.levels, source=there.source)
    codec.save(cluster, Path("profiles/cluster.namespaces-2.json"))
    request = Request(gpus=2, global_batch=plan.global_batch, time_limit_s=4.0)
    file = folder.absolute() / "links.plan.json"
    codec.save(solve(profile, cluster, offered(), request)[0], file)
    return file


def examine(case: str, plan_file: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All runs of a case, and what they come to."""
    plan, steps = codec.load(Plan, plan_file), args.steps
    third = steps // 3
    run = train(plan_file, folder / f"{case}-adapted", case, args, steps=steps, begins=third, ends=2 * third,
                adapting=True)  # fmt: skip
    begin = next((e["step"] for e in run.events if e["event"] == "disturbed"), third)
    free = next((e["step"] for e in run.events if e["event"] == "free"), 2 * third)
    said = [e for e in run.events if e["event"] in ("finding", "replan", "note", "disturbed", "free", "exit")]
    for e in said:
        print(f"  step {e.get('step', '-'):>5}: {e['event']} {e.get('kind', '')} "
              f"{e.get('line') or e.get('why') or e.get('message') or e.get('codes', '')}", flush=True)  # fmt: skip
    names = [e for e in said if e["event"] == "finding" and begin <= e["step"] <= free]
    row: dict[str, Any] = {
        "case": case,
        "undisturbed_s": step_s(run, begin / 2, begin),
        "adapted_s": step_s(run, (begin + free) / 2, free),
        "after_s": step_s(run, (free + run.step) / 2, run.step),
        "exit": run.events[-1]["codes"],
        "named": [(e["step"] - begin, e["line"]) for e in names],
        "named_before": [(e["step"], e["line"]) for e in said if e["event"] == "finding" and e["step"] < begin],
        "changes": [
            {k: e.get(k) for k in ("step", "kind", "why", "rung", "processes", "predicted_gain", "seconds")}
            for e in said if e["event"] == "replan" and e["kind"] in ("switch", "rollback")
        ],
    }  # fmt: skip
    if case in ("none", "memory") or args.no_oracle:
        return row
    constant = {"steps": third, "begins": 0, "ends": 10**9, "adapting": False}
    kept = train(plan_file, folder / f"{case}-kept", case, args, **constant)
    row["kept_s"] = step_s(kept, kept.step / 2, kept.step)
    tried = {"the plan": row["kept_s"]}
    factor = args.factor or max(1.1, row["kept_s"] / row["undisturbed_s"])
    for name, other in told(plan, case, factor):
        file = folder / f"{case}-{name.replace(' ', '-')}.json"
        codec.save(other, file)
        one = train(file, folder / f"{case}-{name.replace(' ', '-')}", case, args, **constant)
        tried[name] = step_s(one, one.step / 2, one.step)
        weights, foreseen = [s.weights for s in other.stages], other.prediction.step_time_s
        print(f"  disturbed all along, {name}: {1e3 * tried[name]:.1f} ms, {1e3 * foreseen:.1f} predicted "
              f"({other.strategy} on {other.num_ranks}, {weights})", flush=True)  # fmt: skip
    tried["what it changed to"] = row["adapted_s"]
    best = min(tried, key=lambda k: tried[k] if math.isfinite(tried[k]) else math.inf)
    return row | {
        "tried_s": tried,
        "oracle": best,
        "oracle_s": tried[best],
        "of_oracle": tried[best] / row["adapted_s"],
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--load", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.5, help="of every 10 ms, with the quota")
    parser.add_argument("--megabits", type=float, default=200.0)
    parser.add_argument("--spare", type=int, default=1, help="MiB, with less memory")
    parser.add_argument("--factor", type=float, default=0.0, help="slowdown the planner is told (default: as measured)")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one run")
    parser.add_argument("--alone", action="store_true", help="before all other processes on every core")
    parser.add_argument("--no-oracle", action="store_true", help="the adapting run alone")
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch, alone() if args.alone else nullcontext():
        folder = args.keep or Path(scratch)
        folder.mkdir(exist_ok=True, parents=True)
        for case in args.cases.split(","):
            print(f"{case}:", flush=True)
            file = args.plan.absolute()
            with ExitStack() as stack:
                try:
                    if case == "links":
                        leave_network()
                        stack.enter_context(rooms(2))
                        file = planned_there(args.plan, folder)
                    elif case == "memory":
                        MEMORY_GROUP.mkdir()
                        stack.callback(_leave, MEMORY_GROUP, CGROUPS / "memory")
                    row = examine(case, file, args, folder)
                except (NotPermitted, OSError) as why:
                    print(f"  skipped: {why}", flush=True)
                    continue
            rows.append(row)
            if args.output:  # after every case: a run that is cut short has what it had
                head = {
                    "taken": time.strftime("%Y-%m-%d"), "model": codec.load(Plan, args.plan).model_spec,
                    "global_batch": codec.load(Plan, args.plan).global_batch, "steps": args.steps,
                    "load_average": os.getloadavg()[2],
                }  # fmt: skip
                args.output.write_text(json.dumps(head | {"cases": rows}, indent=1) + "\n")
            times = {k[:-2]: v for k, v in row.items() if k.endswith("_s") and k != "tried_s"}
            print("  " + ", ".join(f"{k} {1e3 * v:.1f} ms" for k, v in times.items())
                  + (f", {100 * row['of_oracle']:.0f} % of the oracle ({row['oracle']})" if "oracle" in row else ""),
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
