"""What a machine with GPUs can tell, in pieces of at most eight minutes, each taken up where it was left.

    python benchmarks/gpu.py [--pieces tests,profiles,...] [--out runs/gpu] [--shares 99] [--failed | --again]
                             [--models resnet50,vit_b_16] [--jobs 8]
                             [--memory-models ...] [--input 3x32x32] [--large 3x224x224] [--batch 256] [--seconds 60]

``tests``: all tests marked ``gpu``. ``profiles``: of each model in fp32 and bf16; components against the whole.
``memory``: plans for one GPU, predicted against measured, over batches, precisions, recomputation and optimizers, and
the largest batch that fits. ``rehearsal``: one rank of plans for 8 GPUs. ``speed``: a step beside a reference tuned by
hand, in TF32, compiled, channels_last and as CUDA graphs. ``study``: what 8 GPUs are foreseen to do, from the new
profiles, and the sealed predictions made anew from them.
``machine``: with several GPUs, their links, every strategy, the planner's regret and the sealed predictions.

Every command's answer is kept in ``record.jsonl`` as it comes, failures included, and what is there is not run again
(``--failed`` runs failures again, ``--again`` everything). A command that the end of the eight minutes cuts off is the
first of the next share; ``--shares`` takes up to so many of each piece, one after the other. Commands that time nothing
run ``--jobs`` at a time; one that times something runs alone. Profiles are also put where ``asa plan`` looks for them.
``gpu-report.md`` is the verdict (:mod:`benchmarks.gpu_report`), and names the files to send back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu_report import SEALED, answers, failed, report

LIMIT_S = 480.0
Command = tuple[str, tuple[str, ...]]
"""What a result is filed under, and the arguments of ``python -m``."""
TIMED = (
    "tests of test_profiler", "tests of test_gpu_kernels", "profile ", "reference ", "speed ", "full ", "links",
    "bench ", "sealed",
)  # fmt: skip
"""How the names of commands begin that time something, or want all of a card: nothing runs beside them."""
Stage = Iterable[Iterable[Command]]
"""Chains of commands that do not wait for one another; the next stage waits for all of them."""
_MOST_DOUBLINGS = 8
_FEWEST = 2
_CLASSES, _CLASSES_OF_LARGE = "100", "1000"
_EIGHT = 8
_MOST_OF_IT = 0.9
"""Of a share: a command that had so much and did not end has failed."""


def _asa(*argv: str) -> tuple[str, ...]:
    return ("asa", *argv, "--json")


def tests(_: argparse.Namespace, out: Path) -> Iterator[Stage]:
    """The test suite's own, file by file."""
    marked = [f for f in sorted(Path("planner_tests").glob("test_*.py")) if "mark.gpu" in f.read_text()]
    yield [[_tests(file, out)] for file in marked]


def _tests(file: Path, out: Path) -> Command:
    junit = f"--junit-xml={out / file.with_suffix('.xml').name}"
    return f"tests of {file.stem}", ("pytest", "-q", "-m", "gpu", str(file), junit)


def _profile(
    args: argparse.Namespace, out: Path, model: str, precision: str, *how: str, large: bool = False
) -> Command:
    shape, marks = args.large if large else args.input, "".join(f".{h}" for h in how[1::2])
    file = out / f"{model}{f'.{shape}' if large else ''}{marks}.{precision}.json"
    name = " ".join((f"profile {model} {precision}", *how[1::2], *([shape] if large else [])))
    classes = _CLASSES_OF_LARGE if large else _CLASSES
    given = ("--input", shape, "--classes", classes, "--global-batch", str(args.batch), "--device", "cuda")
    limit = ("--time-limit", f"{args.seconds}s", "-o", str(file))
    return name, _asa("profile", model, *given, "--precision", precision, *how, *limit)


def profiles(args: argparse.Namespace, out: Path) -> Iterator[Stage]:
    """Profiles that the other pieces plan from, and of what was sealed on large images."""
    for model in args.models.split(","):
        for precision in ("fp32", "bf16"):
            yield [[_profile(args, out, model, precision)]]
            if args.large and model in args.large_models.split(","):
                yield [[_profile(args, out, model, precision, large=True)]]


def memory(args: argparse.Namespace, out: Path) -> Iterator[Stage]:
    """Plans for one GPU: what its allocator saw beside what was promised."""
    models = args.memory_models.split(",")
    yield [[_profile(args, out, model, precision) for model in models for precision in ("fp32", "bf16")]]
    cells: list[Iterable[Command]] = []
    for model in models:
        for precision, strategy, optimizer in (
            ("fp32", "single", "sgd"), ("bf16", "single", "sgd"), ("fp32", "single+ckpt", "sgd"),
            ("fp32", "single", "adamw"),
        ):  # fmt: skip
            for batch in sorted({max(_FEWEST, args.batch // n) for n in (1, 2, 4, 8)}):
                what = f"{model} {precision} {strategy} {optimizer} {batch}"
                cells.append(_alone(out, "memory", what, f"{model}.{precision}.json", batch, strategy, optimizer))
    yield cells
    yield [_largest(args, out, model) for model in models]


def _alone(
    out: Path, word: str, what: str, profile: str, batch: int, strategy: str = "single", optimizer: str = "sgd"
) -> Iterator[Command]:
    plan = out / f"{word}.{what.replace(' ', '.')}.json"
    asked = ("--gpus", "1", "--global-batch", str(batch), "--strategies", strategy, "--optimizer", optimizer)
    yield f"plan {what}", _asa("plan", str(out / profile), *asked, "-o", str(plan))
    yield f"{word} {what}", _asa("train", str(plan), "--rehearse", "0")


def _largest(args: argparse.Namespace, out: Path, model: str) -> Iterator[Command]:
    """The largest batch that is foreseen to fit in one piece, doubled until it does not, and what it holds."""
    largest = None
    for k in range(_MOST_DOUBLINGS):
        batch = args.batch << k
        plan, name = out / f"fits.{model}.{batch}.json", f"fits {model} {batch}"
        asked = ("--gpus", "1", "--global-batch", str(batch), "--strategies", "single", "--microbatches", "1")
        yield name, _asa("plan", str(out / f"{model}.fp32.json"), *asked, "--offload", "never", "-o", str(plan))
        if answers(out / "record.jsonl").get(name, {}).get("exit_code") != 0:
            break
        largest = plan, batch
    if largest is not None:
        yield f"full {model} {largest[1]}", _asa("train", str(largest[0]), "--rehearse", "0")


def rehearsal(args: argparse.Namespace, out: Path) -> Iterator[Stage]:
    """One rank of eight."""
    cells = []
    for model in args.models.split(","):
        for strategy in ("ddp", "fsdp", "tensor", "1f1b", "hybrid", "asa"):
            plan = out / f"rehearsal.{model}.{strategy}.json"
            asked = ("--gpus", "8", "--cluster", args.cluster, "--strategies", strategy)
            planned = _asa("plan", str(out / f"{model}.fp32.json"), *asked, "-o", str(plan))
            rehearsed = _asa("train", str(plan), "--rehearse", "0")
            cells.append([(f"plan {model} {strategy}", planned), (f"rehearse {model} {strategy}", rehearsed)])
    yield cells


def speed(args: argparse.Namespace, out: Path) -> Iterator[Stage]:
    """One GPU beside a reference tuned by hand, way by way."""
    ways = (
        ("tf32", "contiguous", "none"), ("bf16", "contiguous", "none"),
        *(("bf16", "channels_last", compiled) for compiled in ("none", "components", "whole", "graphs")),
    )  # fmt: skip
    for precision, form, compiled in ways:
        if compiled != "none" and args.no_compile:
            continue
        for model in args.models.split(","):
            how = ("--memory-format", form, "--compile", compiled)
            what = f"{model} {precision} {form} {compiled}"
            theirs = {"components": "default", "whole": "default"}.get(compiled, compiled)
            given = ("--input", args.input, "--batch", str(args.batch), "--memory-format", form, "--compile", theirs)
            yield [[
                _profile(args, out, model, precision, *how),
                (f"reference {what}", ("benchmarks.gpu_reference", model, *given, "--precision", precision)),
                *_alone(out, "speed", what, f"{model}.{form}.{compiled}.{precision}.json", args.batch),
            ]]  # fmt: skip


def study(args: argparse.Namespace, out: Path) -> Iterator[Stage]:
    """Eight GPUs, foreseen from the profiles that were taken here, and what was sealed of this card made anew."""
    cells = []
    for model in args.models.split(","):
        for strategy in ("ddp", "fsdp", "tensor", "1f1b", "hybrid", "asa"):
            asked = ("--gpus", "8", "--cluster", args.cluster, "--strategies", strategy)
            asked += ("--global-batch", str(args.batch))
            file = out / f"study.{model}.{strategy}.json"
            planned = _asa("plan", str(out / f"{model}.fp32.json"), *asked, "-o", str(file))
            cells.append([(f"study {model} {strategy}", planned)])
    yield cells
    given = ("--profiles", str(out), "--after", str(args.sealed), "--folder", str(out / "sealed"), "--json")
    also = [f"{model}:{args.input}:{_CLASSES}:{args.batch}" for model in args.models.split(",")]
    yield [[("sealed anew", ("benchmarks.make_sealed", *given, "--also", *also))]]


def machine(args: argparse.Namespace, out: Path) -> Iterator[Stage]:
    """What several GPUs are to each other, and what was foretold of machines like this one."""
    yield [_machine(args, out)]


def _machine(args: argparse.Namespace, out: Path) -> Iterator[Command]:
    yield "doctor", _asa("doctor")
    gpus = _gpus()
    if gpus < 2:
        return
    cluster = out / "cluster.json"
    limit = ("--time-limit", f"{args.seconds}s")
    yield "links", _asa("cluster", "measure", "--gpus", str(gpus), "--device", "cuda", *limit, "-o", str(cluster))
    for model in args.models.split(","):
        given = ("--models", model, "--input", args.input, "--classes", _CLASSES, "--gpus", str(gpus))
        among = ("--strategies", args.strategies, "--cluster", str(cluster), "--budget", f"{2 * args.seconds}s")
        batch = ("--global-batch", str(args.batch), "--device", "cuda", "--data", "synthetic")
        yield f"bench {model}", _asa("bench", *given, *batch, *among)
        plan = out / f"verify.{model}.json"
        asked = ("--gpus", str(gpus), "--cluster", str(cluster), "-o", str(plan))
        yield f"plan {model} here", _asa("plan", str(out / f"{model}.fp32.json"), *asked)
        yield f"verify {model}", _asa("verify", str(plan), "--device", "cuda")
    sealed = ("--sealed", str(args.sealed))
    yield "sealed", _asa("bench", "--check-sealed", *sealed, "--device", "cuda", "--budget", f"{5 * args.seconds}s")


PIECES = {
    "tests": tests, "profiles": profiles, "memory": memory, "rehearsal": rehearsal, "speed": speed, "study": study,
    "machine": machine,
}  # fmt: skip


def _gpus() -> int:
    from asa.launch import cuda_devices

    return cuda_devices()


def _eight() -> str:
    """A preset of one machine with eight cards like this one's, if there is one."""
    from asa.cost.machine import presets
    from asa.cost.machine.nearest import same_gpu
    from asa.instruments import nvml

    card = next(iter(nvml.names(1)), "")
    for name in presets.names():
        known = presets.load(name)
        if known.num_devices == _EIGHT and len(known.levels) == 1 and card and same_gpu(known.device.name, card):
            return name
    return "a100-nvlink-8"


_here = threading.local()
_workers: list[subprocess.Popen[str]] = []


def _run(argv: tuple[str, ...], limit: float) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``python -m`` of ``argv``, in a process that this thread keeps.

    Raises:
        TimeoutError: it did not end in ``limit`` seconds.
    """
    if argv[0] == "pytest":
        command = [sys.executable, "-m", *argv]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            _workers.append(process)
            try:
                said, wrong = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                process.kill()
                raise TimeoutError from None
        return process.returncode, said, wrong
    worker = getattr(_here, "worker", None)
    if worker is None or worker.poll() is not None:
        worker = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        _here.worker = worker
        _workers.append(worker)
    assert worker.stdin is not None
    assert worker.stdout is not None
    late = threading.Timer(limit, worker.kill)
    late.start()
    try:
        worker.stdin.write(json.dumps(argv) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = ""
    finally:
        ended = late.is_alive()
        late.cancel()
    if line:
        found = json.loads(line)
        return found["exit_code"], found["said"], found["error"]
    if not ended:
        raise TimeoutError
    return worker.wait(), "", "the process ended without an answer"


class _Share:
    """Runs commands that have no answer yet, until the time of one share is over."""

    def __init__(self, piece: str, args: argparse.Namespace, record: Path) -> None:
        self.piece, self.args, self.record = piece, args, record
        self.known = {name for name, found in answers(record).items() if self._stands(name, found)}
        self.ends = time.monotonic() + args.limit
        self.cut_off = False
        self._most = args.most
        self._change = threading.Condition()
        self._running = 0

    def _stands(self, name: str, found: dict[str, Any]) -> bool:
        return name in self.args.ran or not (self.args.again or (self.args.failed and failed(found)))

    def chain(self, commands: Iterable[Command]) -> None:
        """Run ``commands`` one after the other."""
        for name, argv in commands:
            alone = name.startswith(TIMED)
            with self._change:
                if self._most == 0:
                    return
                self._most = self._most and self._most - 1
                if name in self.known or not name.startswith(self.args.only):
                    continue
                self._change.wait_for(lambda: self._running == 0 if alone else self._running >= 0)  # noqa: B023
                if self.cut_off:
                    return
                self._running = -1 if alone else self._running + 1
            try:
                found = self._answer(name, argv)
            finally:
                with self._change:
                    self._running = 0 if alone else self._running - 1
                    self._change.notify_all()
            if found is None:
                return
            if found["exit_code"] == 0 and name.startswith("profile "):
                _put_away(Path(argv[argv.index("-o") + 1]), self.args.keep)

    def _answer(self, name: str, argv: tuple[str, ...]) -> dict[str, Any] | None:
        """What a command said, filed; None where the share ended before."""
        left = self.ends - time.monotonic()
        began = time.monotonic()
        try:
            if left < 1:
                raise TimeoutError
            code, said, wrong = _run(argv, left)
        except TimeoutError:
            if left < _MOST_OF_IT * self.args.limit:  # others had the time: it has all of the next share
                with self._change:
                    self.cut_off = True
                return None
            code, said, wrong = 124, "", f"it did not end in {left:.0f} s"
        found = {"piece": self.piece, "name": name, "argv": argv, "exit_code": code}
        found["seconds"] = time.monotonic() - began
        answer = _document(said)
        found |= {"answer": answer} if answer else {"said": said[-2000:]}
        with self._change:
            with self.record.open("a") as file:
                file.write(json.dumps(found | ({"error": wrong[-2000:]} if code else {})) + "\n")
            self.args.ran.add(name)
            self.known.add(name)  # a command that two pieces want is run once
        print(f"gpu: {name}: {'ok' if not failed(found) else f'exit code {code}'}", file=sys.stderr)
        return found


def run(piece: str, args: argparse.Namespace, record: Path, pool: ThreadPoolExecutor) -> bool:
    """Every command of ``piece`` that has no answer yet, for at most :data:`LIMIT_S`, by ``pool``; whether none is
    left."""
    share = _Share(piece, args, record)
    for stage in PIECES[piece](args, args.out):
        try:
            for done in [pool.submit(share.chain, chain) for chain in stage]:
                done.result()
        except BaseException:
            share.cut_off = True  # the other chains begin nothing more
            raise
        if share.cut_off:
            print(f"gpu: {piece} used its {args.limit:.0f} s; its next share goes on there", file=sys.stderr)
            return False
    return True


def _put_away(file: Path, folder: Path) -> None:
    """Copy a profile to where ``asa plan MODEL`` looks for it."""
    from asa.ir import codec
    from asa.ir.profile import Profile
    from asa.profiler.paths import profile_path

    place = profile_path(codec.load(Profile, file), folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(file.read_bytes())


def _document(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def main() -> int:
    """Run the pieces asked for; 1 if a command failed or is missing, 5 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", default=",".join(PIECES))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--shares", type=int, default=1, help="how often each piece may use its eight minutes")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a share, at most the default")
    parser.add_argument("--failed", action="store_true", help="run what failed again")
    parser.add_argument("--again", action="store_true", help="run everything again")
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time, of those that time nothing")
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default="", help="commands named so")
    parser.add_argument("--keep", type=Path, default=Path("profiles"), help="folder for profiles that plans may use")
    parser.add_argument("--models", default="resnet50,vit_b_16,vgg16")
    parser.add_argument(
        "--memory-models", default="resnet50,vit_b_16,vgg16,densenet121,efficientnet_v2_s,convnext_large"
    )
    parser.add_argument("--input", default="3x32x32")
    parser.add_argument("--large", default="3x224x224", help="second size of images; empty: none")
    parser.add_argument("--large-models", default="resnet50,vit_b_16", help="models that are profiled on it")
    parser.add_argument("--cluster", help="of eight GPUs, to plan for (default: a preset with this card)")
    parser.add_argument("--strategies", default="ddp,zero1,zero2,fsdp,tensor,gpipe,1f1b,hybrid,asa")
    parser.add_argument("--sealed", type=Path, default=SEALED, help="folder of sealed predictions")
    parser.add_argument("--most", type=int, help="commands of a piece, for a first try")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--no-compile", action="store_true", help="leave out what needs a compiler for the GPU")
    args = parser.parse_args()
    if not _gpus():
        print("gpu: no CUDA device is usable here; `asa doctor` says more", file=sys.stderr)
        return 5
    args.limit = min(args.limit, LIMIT_S)
    args.ran = set()
    args.cluster = args.cluster or _eight()
    args.out.mkdir(parents=True, exist_ok=True)
    record = args.out / "record.jsonl"
    if record.exists() and not record.read_text().endswith("\n"):  # the line that a kill cut off
        with record.open("a") as file:
            file.write("\n")
    score = f"python benchmarks/gpu_report.py {record}"
    whole, pool = True, ThreadPoolExecutor(args.jobs)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    page = args.out / "gpu-report.md"

    def reported() -> None:
        page.write_text(report(record, PIECES, score, args.sealed))

    try:
        for piece in args.pieces.split(","):
            for _ in range(args.shares):
                done = run(piece, args, record, pool)
                reported()
                if done:
                    break
            whole &= done
    finally:  # also where the run is stopped: what was measured until then is on the page
        for worker in _workers:
            worker.kill()
        pool.shutdown(cancel_futures=True)
        reported()
        signal.signal(signal.SIGTERM, usual)
    print(f"gpu: wrote {page}; send it back with {record}; they are scored by: {score}", file=sys.stderr)
    return int(not whole or any(map(failed, answers(record).values())))


if __name__ == "__main__":
    sys.exit(main())
