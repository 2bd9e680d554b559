"""``asa bench truth``: the planning against what others published."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import asa
from asa.cli import options as o
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.errors import UnavailableError, UsageError
from asa.ir import codec
from asa.ir.graph import LayerGraph

FOLDER = Path(asa.__file__).resolve().parent.parent.parent / "shared" / "truth"
"""Beside the source: ``../shared/truth``, seen from the repository."""

_SHAPE, _CLASSES = (3, 224, 224), 1000


def run(args: Arguments, console: Console) -> None:
    """Compare, show; a missed target is in the table and no error.

    Raises:
        UsageError: no such part. UnavailableError: no file of any part asked for.
    """
    from asa.planner.truth import suite
    from asa.report import truth as report
    from asa.strategies import offered

    parts: tuple[str, ...] = args.only or suite.PARTS
    unknown = [part for part in parts if part not in suite.PARTS]
    if unknown:
        raise UsageError(f"--only {unknown[0]!r} is no part of the comparison; there is {', '.join(suite.PARTS)}")
    folder = Path(args.truth) if args.truth else FOLDER
    with console.progress("comparing") as progress:
        made = suite.compare(folder, parts, offered(), structure, progress)
    if not made.figures:
        missing = "; ".join(said for said in made.left_out if said.split(":")[0] in parts)
        raise UnavailableError(f"nothing to compare with: {missing}; name the folder of the record with --truth DIR")
    console.result(codec.document(made), lambda: report.render(made))


@cache
def structure(model: str) -> LayerGraph:
    """A torchvision classifier at ImageNet's size, traced here."""
    import torch

    from asa.sharding.describe import layer_graph
    from asa.tracing import trace
    from asa.zoo.models import build

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many short operators: threads lose more than they win where others compute
    try:
        traced = trace(build(model, num_classes=_CLASSES, input_shape=_SHAPE), torch.zeros(2, *_SHAPE), name=model)
    finally:
        torch.set_num_threads(threads)
    return layer_graph(traced, model=model, input_shape=_SHAPE, num_classes=_CLASSES)


VERB = Verb(
    name="bench truth",
    help="the planning against what others published: optima, workloads, measured iterations and scaling",
    run=run,
    options=(
        Option(name="truth", help="folder of public measurements (default: ../shared/truth)", metavar="DIR"),
        Option(name="only", help="parts: pipedream,piper,vtrain,scaling (default: all)", parse=o.names, metavar="A,B"),
        o.JSON,
    ),
    details="Every figure stands beside its target, met or missed. Nothing is trained; scaling traces three models.",
)
