"""What a machine with GPUs can tell, in pieces of at most eight minutes, each taken up where it was left.

    python benchmarks/gpu.py [--pieces tests,profiles,memory,rehearsal,machine] [--out runs/gpu] [--again]
                             [--models resnet50,vit_b_16] [--input 3x32x32] [--batch 256] [--seconds 60]

``tests``: all tests marked ``gpu``. ``profiles``: of each model in fp32 and bf16; components against the whole.
``memory``: plans for one GPU, predicted against measured, over batches, precisions, recomputation and optimizers.
``rehearsal``: one rank of plans for 8 GPUs, compute and memory. ``machine``: with several GPUs, their links and the
sealed predictions. Every command's answer is kept in ``record.jsonl`` as it comes, failures included, and what is
there is not run again (``--again`` does). ``gpu-report.md`` is the verdict, and names the two files to send back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT_S = 480.0
_WITHIN = 0.05
"""How far the sum of components may be from the whole model, of its time."""

Command = tuple[str, tuple[str, ...]]
"""What a result is filed under, and the arguments of ``python -m``."""


def _asa(*argv: str) -> tuple[str, ...]:
    return ("asa", *argv, "--json")


def tests(_: argparse.Namespace, out: Path) -> Iterator[Command]:
    """The test suite's own."""
    yield "tests", ("pytest", "-q", "-m", "gpu", "planner_tests", f"--junit-xml={out / 'tests.xml'}")


def profiles(args: argparse.Namespace, out: Path) -> Iterator[Command]:
    """Profiles that the other pieces plan from."""
    for model in args.models.split(","):
        for precision in ("fp32", "bf16"):
            file = out / f"{model}.{precision}.json"
            shape = ("--input", args.input, "--classes", "100", "--global-batch", str(args.batch))
            limit = ("--time-limit", f"{args.seconds}s", "-o", str(file))
            yield f"profile {model} {precision}", _asa("profile", model, *shape, "--device", "cuda",
                                                       "--precision", precision, *limit)  # fmt: skip


def memory(args: argparse.Namespace, out: Path) -> Iterator[Command]:
    """Plans for one GPU: what its allocator saw beside what was promised."""
    for model in args.models.split(","):
        for precision, strategy, optimizer in (
            ("fp32", "single", "sgd"), ("bf16", "single", "sgd"), ("fp32", "single+ckpt", "sgd"),
            ("fp32", "single", "adamw"),
        ):  # fmt: skip
            for batch in sorted({max(2, args.batch // n) for n in (1, 2, 4, 8)}):
                what = f"{model} {precision} {strategy} {optimizer} {batch}"
                plan = out / f"memory.{what.replace(' ', '.')}.json"
                asked = (
                    "--gpus",
                    "1",
                    "--global-batch",
                    str(batch),
                    "--strategies",
                    strategy,
                    "--optimizer",
                    optimizer,
                )
                yield f"plan {what}", _asa("plan", str(out / f"{model}.{precision}.json"), *asked, "-o", str(plan))
                yield f"memory {what}", _asa("train", str(plan), "--rehearse", "0")


def rehearsal(args: argparse.Namespace, out: Path) -> Iterator[Command]:
    """One rank of eight."""
    for model in args.models.split(","):
        for strategy in ("ddp", "fsdp", "tensor", "1f1b", "asa"):
            plan = out / f"rehearsal.{model}.{strategy}.json"
            asked = ("--gpus", "8", "--cluster", args.cluster, "--strategies", strategy)
            yield f"plan {model} {strategy}", _asa("plan", str(out / f"{model}.fp32.json"), *asked, "-o", str(plan))
            yield f"rehearse {model} {strategy}", _asa("train", str(plan), "--rehearse", "0")


def machine(_: argparse.Namespace, out: Path) -> Iterator[Command]:
    """What several GPUs are to each other, and what was foretold of machines like this one."""
    yield "doctor", _asa("doctor")
    if _gpus() > 1:
        yield "links", _asa("cluster", "measure", "--device", "cuda", "-o", str(out / "cluster.json"))
        yield "sealed", _asa("bench", "--check-sealed", "--device", "cuda", "--budget", "6m")


PIECES = {"tests": tests, "profiles": profiles, "memory": memory, "rehearsal": rehearsal, "machine": machine}


def _gpus() -> int:
    from asa.launch import cuda_devices

    return cuda_devices()


def run(piece: str, args: argparse.Namespace, out: Path) -> None:
    """Every command of ``piece`` that has no answer yet, until its time is over."""
    record, known = out / "record.jsonl", answers(out)
    ends = time.monotonic() + LIMIT_S
    for name, argv in PIECES[piece](args, out):
        if name in known and not args.again:
            continue
        left = ends - time.monotonic()
        if left < 1:
            print(f"gpu: {piece} used its {LIMIT_S:.0f} s; run it again for the rest", file=sys.stderr)
            return
        began = time.monotonic()
        try:
            done = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, timeout=left)
            code, said, wrong = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            code, said, wrong = 124, "", f"it did not end in {left:.0f} s"
        found = {"piece": piece, "name": name, "argv": argv, "exit_code": code, "seconds": time.monotonic() - began}
        answer = _document(said)
        found |= {"answer": answer} if answer else {"said": said[-2000:]}
        with record.open("a") as file:
            file.write(json.dumps(found | ({"error": wrong[-2000:]} if code else {})) + "\n")
        (out / "gpu-report.md").write_text(report(out))
        print(f"gpu: {name}: {'ok' if code == 0 else f'exit code {code}'}", file=sys.stderr)


def _document(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def answers(out: Path) -> dict[str, dict[str, Any]]:
    """The last answer to each command."""
    record = out / "record.jsonl"
    lines = record.read_text().splitlines() if record.exists() else ()
    return {found["name"]: found for found in map(json.loads, lines)}


def report(out: Path) -> str:
    """The verdict on a page: what failed, and how far predictions were off."""
    found = answers(out)
    failed = [f for f in found.values() if f["exit_code"]]
    lines = ["# What the GPUs said", "", f"{len(found)} commands, {len(failed)} failed.", ""]
    for piece in PIECES:
        own = [f for f in found.values() if f["piece"] == piece]
        lines += [f"## {piece}", "", *([line for f in own for line in _told(f)] or ["not run"]), ""]
    lines += [
        "## To send back", "", f"Attach `{out / 'record.jsonl'}` and `{out / 'gpu-report.md'}`. On a machine of "
        "several GPUs `asa bench --check-sealed` scores them against the sealed predictions.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _told(found: dict[str, Any]) -> list[str]:
    name, answer = found["name"], found.get("answer") or {}
    if found["exit_code"]:
        last = (found.get("error") or found.get("said") or "").strip().splitlines()[-1:]
        return [f"- {name}: FAILED with {found['exit_code']}: {''.join(last)}"]
    if name.startswith("profile "):
        off = [w["components_s"] / w["whole"]["median"] - 1 for w in answer["whole"]]
        worst = max(off, key=abs, default=0.0)
        doubt = answer["provenance"].get("disturbed", "")
        good = "ok" if abs(worst) <= _WITHIN else "TOO FAR OFF"
        doubt = f"; {doubt}" if doubt else ""
        return [f"- {name}: components are {100 * worst:+.1f} % off the whole at worst, {good}{doubt}"]
    if name.startswith(("memory ", "rehearse ")):
        promised, seen = answer["predicted_memory_bytes"], answer["peak_memory_bytes"]
        mib, off = 2**20, promised / seen - 1
        return [f"- {name}: memory {promised / mib:.0f} MiB predicted, {seen / mib:.0f} measured ({off:+.1%})"]
    return [] if name.startswith("plan ") else [f"- {name}: ok in {found['seconds']:.0f} s"]


def main() -> int:
    """Run the pieces asked for; 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", default=",".join(PIECES))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--models", default="resnet50,vit_b_16,vgg16")
    parser.add_argument("--input", default="3x32x32")
    parser.add_argument("--cluster", default="a100-nvlink-8")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    for piece in args.pieces.split(","):
        run(piece, args, out)
    (out / "gpu-report.md").write_text(report(out))
    print(f"gpu: wrote {out / 'gpu-report.md'}; send it back with {out / 'record.jsonl'}", file=sys.stderr)
    return int(any(f["exit_code"] for f in answers(out).values()))


if __name__ == "__main__":
    sys.exit(main())
