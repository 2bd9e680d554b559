"""Runs on which nothing is slow: what is said of them? Windows of real runs, kept, and the loop's detection on them.

    python benchmarks/clean.py record PLAN -o FILE [--epochs 6] [--steps 100]
    python benchmarks/clean.py replay [FILE ...] [-o benchmarks/records/clean.json]

*record* is ``asa train`` on synthetic data, and keeps what the leading rank was handed at every look, with the files
that its plan was made from. *replay* hands all of that to a loop of today's code, which may change no plan. Clean
windows are those in which nobody else had a core of the run for a tenth of the time, nor in the ten windows before;
whatever is found in them is a false alarm. *Searches*: how often another plan was looked for in them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asa.cli import entry
from asa.cli.choose import origins
from asa.cli.console import Console
from asa.errors import InfeasibleError
from asa.interfaces.executor import Placement, Probe
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.scheduler import Model, Policy
from asa.scheduler.costs import STOLEN_SHARE
from asa.scheduler.decide import Change, Decider
from asa.strategies import offered

AFTER = 10
"""Windows after one in which others had a core, before a run is clean again."""
TRACES = Path(__file__).resolve().parent / "records" / "clean"


def _short(value: Any) -> Any:
    """Figures of five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list | tuple) else value


def record(args: argparse.Namespace) -> None:
    """A run, and its windows."""
    plan = codec.load(Plan, args.plan)
    profile, cluster = origins(plan, Console())
    with tempfile.TemporaryDirectory() as scratch:
        seen = Path(scratch) / "windows"
        usual = Decider.window

        def window(
            self: Decider, current: Placement, measured: Measurements, *, steps: int, left: int | None,
            probe: Probe | None = None,
        ) -> Change | None:  # fmt: skip
            with seen.open("a") as file:
                print(
                    json.dumps({"steps": steps, "at": time.time(), "measured": _short(codec.to_data(measured))}),
                    file=file,
                )
            return usual(self, current, measured, steps=steps, left=left, probe=probe)

        Decider.window = window  # type: ignore[method-assign]  # ranks are forked: theirs, too
        command = ["train", str(args.plan), "--data", "synthetic", "--epochs", str(args.epochs), "--steps-per-epoch",
                   str(args.steps), "--lr", "0.01", "--out", str(Path(scratch) / "run")]  # fmt: skip
        code = entry.run(command)
        head = {"plan": codec.dumps(plan), "profile": codec.dumps(profile), "cluster": codec.dumps(cluster),
                "said": args.say, "exit": code}  # fmt: skip
        text = json.dumps(head) + "\n" + seen.read_text()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(text.splitlines()) - 1} windows, exit {code}")


def _keep(*_: Any) -> Plan:
    raise InfeasibleError("only what is found matters here")


def replay(file: Path) -> dict[str, Any]:
    """What is found in a kept run."""
    head, *windows = (json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines())
    plan = codec.loads(Plan, head["plan"], source=file.name)
    profile, cluster = (
        codec.loads(kind, head[key], source=file.name) for kind, key in ((Profile, "profile"), (Cluster, "cluster"))
    )
    model = Model(profile=profile, cluster=cluster, strategies=offered(), solve=_keep)
    decider = Decider(model, plan.num_ranks, Policy())
    now, step, clean, since = Placement(plan=plan, processes=tuple(range(plan.num_ranks))), 0, 0, AFTER
    searches = 0
    found: list[tuple[int, str]] = []
    named: list[tuple[int, str]] = []
    for w in windows:
        step += w["steps"]
        measured = codec.build(Measurements, w["measured"], source=file.name)
        decider.window(now, measured, steps=w["steps"], left=None)
        since = 0 if any((r.stolen_share or 0.0) >= STOLEN_SHARE for r in measured.per_rank) else since + 1
        clean += since > AFTER
        (found if since > AFTER else named).extend((step, f.line) for f in decider.found)
        searches += bool(decider.events) and since > AFTER
    return {"file": file.name, "said": head["said"], "windows": len(windows), "clean": clean, "steps": step,
            "false_alarms": found, "searches": searches, "named_under_load": named}  # fmt: skip


def main() -> None:
    """Record a run, or replay some."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = parser.add_subparsers(required=True, dest="what")
    recorded = parts.add_parser("record")
    recorded.add_argument("plan", type=Path)
    recorded.add_argument("--epochs", type=int, default=6)
    recorded.add_argument("--steps", type=int, default=100)
    recorded.add_argument("--say", default="", help="in words, where that was")
    recorded.add_argument("-o", "--output", type=Path, required=True)
    replayed = parts.add_parser("replay")
    replayed.add_argument("files", type=Path, nargs="*")
    replayed.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.what == "record":
        record(args)
        return
    rows = [replay(file) for file in args.files or sorted(TRACES.glob("*.gz"))]
    total = {"clean_windows": sum(r["clean"] for r in rows), "false_alarms": sum(len(r["false_alarms"]) for r in rows)}
    print(json.dumps(total | {"runs": rows}, indent=1))
    if args.output:
        args.output.write_text(json.dumps(total | {"runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
