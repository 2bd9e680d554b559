"""What each mechanism of the search is worth: every one switched off in turn, the others left as they are.

    python benchmarks/ablation.py [--seconds 4] [--only NAME,NAME] [--cases NAME,NAME] [-o FILE]

Cases: ResNet-50, ViT-B/16 and VGG-16 on 8 devices over fast and slow links, with all their memory and with 1.2 times
what the leanest plan needs, and a random chain of 30 components over slow links in tight memory, which takes longest.
The search runs in one process and its limit counts work, so that a busy machine changes little. A row says how the plan
of a case compares with the plan of the whole search (``slower``), and how far each is from its bound (``gap``). A
mechanism whose rows are all zero is to go; ``WHY`` says of each other one why it stays.

The record of a full run is ``benchmarks/records/ablation.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import planner as cases_of  # noqa: E402

from asa.cost.machine import presets  # noqa: E402
from asa.cost.machine.estimate import on_device  # noqa: E402
from asa.ir import codec  # noqa: E402
from asa.ir.profile import Profile  # noqa: E402
from asa.ir.units import GIB  # noqa: E402
from asa.planner import Request, plan, search  # noqa: E402
from asa.planner.answer import canonical  # noqa: E402
from asa.planner.pipeline import case, climb, explored, joint, open_list, whole  # noqa: E402
from asa.planner.stage import labels, singles  # noqa: E402
from asa.strategies import offered  # noqa: E402

RECORD = ROOT / "benchmarks" / "records" / "ablation.json"

Patch = tuple[Any, str, Any]


def _no_bounds(pipelines: Any, _best: float, counts: Any = None) -> tuple[dict[int, float], list[Any]]:
    return dict.fromkeys(pipelines.microbatches() if counts is None else counts, 0.0), []


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _never(*_: Any, **__: Any) -> float:
    return float("inf")


def _as_far_as_weights_say(self: Any, columns: Any, _best: float, _ends: float) -> tuple[float, float]:
    """In place of :meth:`OpenList._explore_fully`: cuts are left where column generation ends."""
    self._floor = min(self._floor, columns.bound)
    return float("inf"), float("inf")


def _counted_only(self: Any, _cutoff: float, _until: float) -> None:
    """In place of :meth:`Single._solve_by_charges`: nothing more is proved of choices that do not fit."""
    self.stuck = True


MECHANISMS: dict[str, list[Patch]] = {
    "nothing": [],
    "first plans of pipelines": [(search, "first_plans", lambda *_, **__: [])],
    "quick bounds of pipelines": [(search, "floors", _no_bounds), (joint, "floors", _no_bounds)],
    "whole strategies of fewer devices": [(search, "on_fewer", _nothing)],
    "first plans of one stage": [(search, "first_plan", _never)],
    "descent beside a choice": [(labels.Solver, "_descend", _nothing)],
    "the ILP's turns": [(singles.Single, "_by_ilp", _nothing)],
    "all ways to run the stages of fixed cuts": [(open_list.OpenList, "_explore_fully", _as_far_as_weights_say)],
    "more labels for stages that stayed rough": [(explored.Explored, "refine", lambda *_: False)],
    "longer strides far from the best plan": [(open_list.OpenList, "_next", lambda self, _best: self._share)],
    "climbing from first plans": [(climb.Climber, "climb", lambda _self, outline, _ends: outline)],
    "the best uniform split": [(whole, "practice", lambda *_, **__: (None, 0.0))],
    "many changes of a stage at once": [(canonical._Around, "_packed", lambda *_: iter(()))],
    "weights against a plan near the best one at once": [(open_list, "_NEAR", 1.0)],
    "pipelines without the memory limit first": [(case.Case, "_without_limit", lambda *_: False)],
    "parts of a stage in another style": [(canonical._Around, "_partly", lambda *_: iter(()))],
    "plans near one that does not fit": [(singles.Single, "_accept_near", _nothing)],
    "the ILP beyond choices that do not fit": [(singles.Single, "_solve_by_charges", _counted_only)],
    "local search after the search": [
        (search, "improved", lambda _prices, found, *_: found),
        (search, "canonical", lambda _prices, found, *_: found),
    ],
}


WHY = {
    "first plans of pipelines": "ResNet-50 in slack memory over slow links is 16 % slower without; beyond 128 ranks "
    "or 100 components they are all there is.",
    "quick bounds of pipelines": "ViT-B/16 in tight memory over slow links is 0.7 % slower without, with a gap of 8 %; "
    "beyond 128 ranks they are the only bound on pipelines.",
    "whole strategies of fewer devices": "No plan of a search that has time needs them; one that has none is no "
    "slower than data parallelism on fewer devices.",
    "first plans of one stage": "No case of these needs them; of 50 golden cases at the usual limit 5 are slower "
    "without, by up to 6.3 % (decision 0127).",
    "descent beside a choice": "No case of these needs it; of 50 golden cases at the usual limit 2 are slower "
    "without, by up to 2.0 % (decision 0127).",
    "the ILP's turns": "No plan is slower by more than 0.5 % without; of 73 golden cases at the usual limit 39 keep a "
    "gap above 0.5 %, and 35 with them.",
    "all ways to run the stages of fixed cuts": "Small problems are proved with them, as brute force says; no plan of "
    "these cases is slower without.",
    "more labels for stages that stayed rough": "No case of these needs them; without any exploration of listed stages "
    "4 of 140 golden cases are slower, by up to 3.5 % (decision 0127).",
    "longer strides far from the best plan": "ResNet-50 in slack memory over slow links is 2.1 % slower without, with "
    "a gap of 6 %.",
    "weights against a plan near the best one at once": "No case of these needs them; ResNet-50 at 32 pixels on 8 L4 "
    "has the same plan after half of the time (decision 0126).",
    "parts of a stage in another style": "No case of these needs them; ResNet-50 at 32 pixels on 8 L4 with 30 % of the "
    "memory is 0.5 % slower without (decision 0126).",
    "the ILP beyond choices that do not fit": "ResNet-50 on 8 H100 with 30 % of the memory is 0.6 % slower without.",
    "many changes of a stage at once": "ResNet-50 at 32 pixels on 8 L4 over PCIe with 30 % of the memory is 1.7 % "
    "slower without (decision 0177).",
    "plans near one that does not fit": "ResNet-50 on 8 L4 over Ethernet with 30 % of the memory is 7.9 % slower "
    "without, in about half of all runs (decision 0168).",
    "pipelines without the memory limit first": "ResNet-50 at 32 pixels on 8 L4 over 25 Gbit/s with 75 % of the memory "
    "is 5.0 % slower without, with a gap of 13 % in place of 0 (decision 0202).",
    "climbing from first plans": "Of 73 golden cases at the usual limit 14 are slower without, by up to 23 %.",
    "the best uniform split": "No plan may be slower than what one would configure by hand.",
    "local search after the search": "It gives plans that take equally long a fixed order, and finds what time was "
    "too short for (decision 0126).",
}
"""Why a mechanism stays, from the record's rows."""


@contextmanager
def switched_off(name: str) -> Iterator[None]:
    """The planner without one mechanism (or several), in one process."""
    with ExitStack() as stack:
        for where, attribute, other in (patch for part in name.split("+") for patch in MECHANISMS[part]):
            stack.enter_context(mock.patch.object(where, attribute, other))
        stack.enter_context(mock.patch.object(search, "can_fork", return_value=False))
        yield


def requests(folder: Path) -> Iterator[tuple[str, Path, str, float | None]]:
    """Name, profile, cluster and GiB of every case."""
    files = cases_of.Files(folder)
    for model in cases_of.SHIPPED:
        path = ROOT / "profiles" / f"{model}.cpu.fp32.json"
        for cluster, links in ((cases_of.FAST, "fast"), (cases_of.SLOW, "slow")):
            yield f"{model} {links} slack", path, cluster, None
            yield f"{model} {links} tight", path, cluster, cases_of.tight(path, cluster, 8)
    path = files.random(30, 5)
    yield "random30.5 slow tight", path, cases_of.SLOW, cases_of.tight(path, cases_of.SLOW, 8)


def measured(path: Path, cluster: str, memory: float | None, seconds: float) -> dict[str, float]:
    """Step time of the plan, its gap, and CPU seconds."""
    links = presets.load(cluster)
    profile = on_device(codec.load(Profile, path), links)
    limit = None if memory is None else int(memory * GIB)
    request = Request(
        gpus=8, global_batch=cases_of.BATCH, memory_bytes=limit, prefer_simple=False, time_limit_s=seconds
    )
    began = time.process_time()
    found = plan(profile, links, offered(), request)[0]
    return {
        "step_time_s": found.prediction.step_time_s,
        "gap": found.certificate.gap,
        "cpu_s": round(time.process_time() - began, 3),
    }


def main(argv: list[str]) -> int:
    """Prints a line a mechanism and case, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU seconds of search (default: 4)")
    parser.add_argument("--only", help="mechanisms, comma-separated, those joined by + at once (default: all)")
    parser.add_argument("--cases", help="cases whose names contain one of these (default: all)")
    parser.add_argument("-o", "--output", type=Path, default=RECORD)
    args = parser.parse_args(argv)
    wanted = args.only.split(",") if args.only else list(MECHANISMS)
    rows, whole = [], dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        every = [c for c in requests(Path(folder)) if not args.cases or any(x in c[0] for x in args.cases.split(","))]
        for name in dict.fromkeys(["nothing", *wanted]):
            for case_name, path, cluster, memory in every:
                with switched_off(name):
                    found = measured(path, cluster, memory, args.seconds)
                base = whole.setdefault(case_name, found)
                slower = found["step_time_s"] / base["step_time_s"] - 1
                rows.append({"off": name, "case": case_name, **found, "slower": slower})
                print(
                    f"{name:<34} {case_name:<24} {1e3 * found['step_time_s']:10.3f} ms {100 * slower:+7.2f} % "
                    f"gap {100 * found['gap']:6.2f} % {found['cpu_s']:6.2f} s",
                    flush=True,
                )
    record = {"schema_version": 1, "kind": "ablation", "created": datetime.now(UTC).isoformat(timespec="seconds"),
              "cpu_seconds": args.seconds, "why": WHY, "rows": rows}  # fmt: skip
    args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _summary(rows)
    return 0


def _summary(rows: list[dict[str, Any]]) -> None:
    base = {r["case"]: r for r in rows if r["off"] == "nothing"}
    pick: Callable[[str], list[dict[str, Any]]] = lambda name: [r for r in rows if r["off"] == name]  # noqa: E731
    print(f"\n{'switched off':<34} plans slower by > 0.5 %   worst    gaps > 0.5 % (all on: "
          f"{sum(r['gap'] > 0.005 for r in base.values())})   CPU s in all")  # fmt: skip
    for name in dict.fromkeys(r["off"] for r in rows):
        own = pick(name)
        print(f"{name:<34} {sum(r['slower'] > 0.005 for r in own):>3}                      "
              f"{100 * max(r['slower'] for r in own):6.2f} %   {sum(r['gap'] > 0.005 for r in own):>3}"
              f"                        {sum(r['cpu_s'] for r in own):.1f}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
