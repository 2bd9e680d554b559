"""The planning against what others published: the same as ``asa bench truth``.

    python benchmarks/truth.py [--truth DIR] [--only pipedream,piper,vtrain,scaling] [--json]

Reads ``../shared/truth``: optima of PipeDream, a workload of Piper, measured iterations (vTrain), published scaling.
"""

from __future__ import annotations

import sys

from asa.cli.entry import run

if __name__ == "__main__":
    sys.exit(run(["bench", "truth", *sys.argv[1:]]))
