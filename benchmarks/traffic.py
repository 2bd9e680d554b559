"""Do neighbours of any two configurations move what they declare? Every ordered pair on 2 and 4 ranks, for real.

    python benchmarks/traffic.py [--ranks 2,4] [--out FILE]

Configurations are all layouts of a stage with all data strategies. A walk through them in which every pair occurs once
is cut into networks of a dozen components; of each the bytes by operation in a training step, as the ranks' collectives
have them, are compared with what the pages of ``asa.strategies`` and the boundaries say. Ends with 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from asa.launch import run_ranks  # noqa: E402
from planner_tests.traffic_checks import configurations, declared, intercepted, plan_of, stretches  # noqa: E402

COMPONENTS = 12


def main() -> int:
    """Run all, print what differs, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="sizes of the stage")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "records" / "traffic.json")
    args = parser.parse_args()
    record, wrong = [], 0
    for width in (int(x) for x in args.ranks.split(",")):
        started, every = time.monotonic(), stretches(width, COMPONENTS)
        ran = run_ranks(
            width, intercepted, [plan_of(s) for s in every], [len(s) for s in every], threads=1, timeout_s=900
        )
        differing = []
        for i, stretch in enumerate(every):
            said = dict(declared(stretch))
            if any(seen[i] != said for seen in ran):
                differing.append([x.text for x in stretch])
                print(f"differs: {' | '.join(differing[-1])}\n  declared {said}\n  moved    {[s[i] for s in ran]}")
        pairs = sum(len(s) - 1 for s in every)
        wrong += len(differing)
        record.append(
            {
                "ranks": width,
                "configurations": len(configurations(width)),
                "pairs": pairs,
                "networks": len(every),
                "differing": differing,
            }
        )
        seconds = time.monotonic() - started
        print(f"{width} ranks: {pairs} pairs in {len(every)} networks, {len(differing)} differ, {seconds:.0f} s")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
