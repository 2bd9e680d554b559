"""Whether predictions know how sure they are: coverage of their intervals, and P(best) and regret against the truth.

    python benchmarks/calibration.py [RECORD ...] [--folder DIR] [-o FILE]

Records are the JSON documents of ``asa bench``, ``asa bench --check-sealed``, ``benchmarks/prediction.py`` and
``benchmarks/regret.py`` (default: all of them in ``benchmarks/records``). Every cell that was predicted with an
interval and measured counts for coverage, but for those that a constant was fitted to since (``used_to_fit``, which
stand beside the rest); beside that, training and the plans of regret records by themselves, the latter also in units of
what the plans of a cell share, which is taken from those very cells. Cells of regret records, and the planner's choice
in every cell of a prediction record, count for P(best) and expected regret; ``beside_strategies`` has P(best) of the
same cells computed again beside whole strategies alone, as it is stated now.
The figure goes to the folder as SVG, PDF, PNG and CSV.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from reliability import Outcome, StatedInterval, chart, scores

from asa.planner.answer.posterior import DRAWS, OWN, TIE, sample
from asa.report.pages.bench import draw

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"


def told(document: dict[str, Any]) -> Iterator[StatedInterval]:
    """Every cell with an interval and a measurement of training, whatever kind of record it is in."""
    for row in document.get("results", ()):
        if row.get("step_time_s") is not None and row.get("predicted_low_s") is not None:
            yield StatedInterval(
                low_s=row["predicted_low_s"], high_s=row["predicted_high_s"], measured_s=row["step_time_s"]["median"]
            )  # fmt: skip
    for cell in document.get("cells", ()):
        if cell.get("measured") and "low_s" in cell:
            yield StatedInterval(low_s=cell["low_s"], high_s=cell["high_s"], measured_s=cell["measured"]["median"])


def in_turns(document: dict[str, Any], *, shared: bool = False, fitted: bool = False) -> Iterator[StatedInterval]:
    """Plans of regret records, which take single steps in turns, of cells that were used to fit something or not. With
    ``shared``, in units of what all plans of a cell share: no test of a prediction, since that is taken from what was
    measured."""
    for cell in document.get("cells", ()):
        plans = cell.get("screened", ()) if bool(cell.get("used_to_fit")) == fitted else ()
        factor = median(p["step_s"] / p["predicted_s"] for p in plans) if plans and shared else 1.0
        for p in plans:
            yield StatedInterval(low_s=p["low_s"], high_s=p["high_s"], measured_s=p["step_s"] / factor)


def outcomes(document: dict[str, Any]) -> Iterator[Outcome]:
    """What was said of choices, before and after verification, and how they turned out."""
    for choice in document.get("choices", ()):
        yield Outcome(
            p_best=choice["p_best"], expected_regret=choice["expected_regret"], best=choice["regret"] <= TIE,
            regret=choice["regret"],
        )  # fmt: skip
    for cell in document.get("cells", ()):
        if "regret" not in cell or not cell.get("confidence"):
            continue
        said = cell["confidence"]
        yield Outcome(
            p_best=said["p_best"], expected_regret=said["expected_regret"], best=cell["regret"] <= TIE,
            regret=cell["regret"],
        )  # fmt: skip
        if cell.get("verified") and cell.get("verified_regret") is not None:
            said, regret = cell["verified"]["after"], cell["verified_regret"]
            yield Outcome(
                p_best=said["p_best"], expected_regret=said["expected_regret"], best=regret <= TIE, regret=regret
            )  # fmt: skip


def beside_strategies(document: dict[str, Any]) -> Iterator[Outcome]:
    """P(best) of the answer of each cell of regret records beside whole strategies alone, computed again from their
    predictions with an independent error of each, and what steps taken in turns said."""
    for cell in document.get("cells", ()):
        plans = {p["plan"]: p for p in cell.get("screened", ())}
        answer = plans.pop("asa", None)
        others = [
            p for name, p in plans.items()
            if name != "verified" and not name.startswith("change") and p["predicted_s"] != answer["predicted_s"]
        ] if answer else []  # fmt: skip
        if not others:
            continue
        logs = np.log([p["predicted_s"] for p in (answer, *others)])
        times = np.exp(sample(logs, np.eye(len(logs)) * OWN**2, DRAWS))
        fastest, measured = times.min(axis=1), min(p["step_s"] for p in (answer, *others))
        yield Outcome(
            p_best=float((times[:, 0] <= fastest * (1 + TIE)).mean()),
            expected_regret=float((times[:, 0] / fastest - 1).mean()),
            best=answer["step_s"] <= measured * (1 + TIE), regret=answer["step_s"] / measured - 1,
        )  # fmt: skip


def main() -> None:
    """Read, score, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="*", type=Path)
    parser.add_argument("--folder", type=Path, default=RECORDS / "figures")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    paths = args.records or sorted(RECORDS.glob("*.json"))
    read = [json.loads(p.read_text(encoding="utf-8")) for p in paths]
    documents = [d if isinstance(d, dict) else {} for d in read]
    training = [t for d in documents for t in told(d)]
    intervals = [*training, *(t for d in documents for t in in_turns(d))]
    choices = [x for d in documents for x in outcomes(d)]
    found = scores(intervals, choices)
    for path, document in zip(paths, documents, strict=True):
        own = [*told(document), *in_turns(document)]
        if own:
            print(f"{path.name}: {sum(t.inside() for t in own)} of {len(own)} cells in their 90 % intervals")
    found["training"] = scores(training, [])
    found["used_to_fit"] = scores([t for d in documents for t in in_turns(d, fitted=True)], [])
    found["in_turns"] = {
        name: scores([t for d in documents for t in in_turns(d, shared=shared)], [])
        for name, shared in (("as_measured", False), ("beside_each_other", True))
    }
    found["beside_strategies"] = {
        p.name: scores([], some) for p, d in zip(paths, documents, strict=True) if (some := list(beside_strategies(d)))
    } | {"all": scores([], [x for d in documents for x in beside_strategies(d)])}
    print(json.dumps(found, indent=1))
    written, _ = draw(chart(intervals, choices), args.folder)
    print(f"wrote {written[0]}")
    if args.output is not None:
        document = {"schema_version": 1, "records": [p.name for p in paths], "scores": found}
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
