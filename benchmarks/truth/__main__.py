"""Compares the planning with what others published: optima, workloads, measured iterations and scaling.

    python -m benchmarks.truth [--truth DIR] [--only pipedream,piper,vtrain,scaling] [--json]

Reads ``../shared/truth``. Every figure stands beside its target, met or missed; a missed one is no error. Nothing is
trained; ``scaling`` traces three models. Exit codes are ``asa``'s: 2 usage, 3 a broken file, 5 nothing to compare with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from asa.cli.console import Console
from asa.errors import AsaError, UnavailableError, UsageError
from asa.ir import codec
from asa.ir.graph import LayerGraph
from asa.strategies import offered
from benchmarks.truth import show, suite
from benchmarks.truth.figures import Truth

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "truth"
_SHAPE, _CLASSES = (3, 224, 224), 1000


def main(argv: Sequence[str]) -> int:
    """Prints the comparison and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, default=FOLDER, metavar="DIR", help="folder of public measurements")
    parser.add_argument("--only", default=",".join(suite.PARTS), metavar="A,B", help="parts (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    console = Console(as_json=args.json)
    try:
        with console.keeping_stdout():
            made = compare(args.truth, tuple(args.only.split(",")), console)
            console.result(codec.document(made), lambda: show.render(made))
    except AsaError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return error.exit_code
    return 0


def compare(folder: Path, parts: tuple[str, ...], console: Console) -> Truth:
    """Every figure of ``parts`` that the files in ``folder`` allow.

    Raises:
        UsageError: no such part. InvalidInputError: a broken file. UnavailableError: no file of any part asked for.
    """
    for part in parts:
        if part not in suite.PARTS:
            raise UsageError(f"--only {part!r} is no part of the comparison; there is {', '.join(suite.PARTS)}")
    with console.progress("comparing") as progress:
        made = suite.compare(folder, parts, offered(), structure, progress)
    if not made.figures:
        missing = "; ".join(said for said in made.left_out if said.split(":")[0] in parts)
        raise UnavailableError(f"nothing to compare with: {missing}; name the folder of the record with --truth DIR")
    return made


@cache
def structure(model: str) -> LayerGraph:
    """The structure of a torchvision classifier at 3 x 224 x 224 and 1,000 classes, traced here on one thread."""
    import torch

    from asa.sharding.layers.describe import layer_graph
    from asa.tracing import trace
    from asa.zoo.models import build

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many short operators: threads lose more than they win where others compute
    try:
        traced = trace(build(model, num_classes=_CLASSES, input_shape=_SHAPE), torch.zeros(2, *_SHAPE), name=model)
    finally:
        torch.set_num_threads(threads)
    return layer_graph(traced, model=model, input_shape=_SHAPE, num_classes=_CLASSES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
