"""``asa verify``: checks that training under a plan is numerically the same as on one device."""

from __future__ import annotations

from asa.cli import options as o
from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments, Verb
from asa.ir import codec
from asa.launch.devices import check_cuda
from asa.strategies import offered


def run(args: Arguments, console: Console) -> int:
    """Train a few steps both ways, compare and show the result; returns 1 if they differ.

    Raises:
        UnavailableError: too few CUDA devices.
    """
    path, plan = places.newest_plan(args.plan)  # before the slow import of torch, so that errors appear at once
    device = plan.device_type if args.device == "auto" else args.device
    if device == "cuda":
        check_cuda(plan.num_processes, "verify with --device cpu")

    from functools import partial

    from asa.executor.measuring.equivalence import verify
    from asa.report.text import verify as report
    from asa.report.units import ranks
    from asa.zoo.models import build

    console.say(f"asa: verifying {path} on {ranks(plan.num_processes)}")
    factory = partial(
        build, plan.model_spec, num_classes=plan.num_classes, input_shape=plan.sample_shape, seed=args.seed
    )
    with console.waiting(f"verifying {plan.model_spec}"):
        verdict = verify(plan, factory, offered(), device=device, samples=args.samples, silence_s=args.timeout)
    data = {"kind": "equivalence", **codec.to_data(verdict)}
    console.result(data, lambda: report.render(verdict))
    return 0 if verdict.equivalent or verdict.within_tolerance else 1


VERBS = (
    Verb(
        name="verify",
        help="train five steps under a plan and five on one device, and compare losses, gradients and weights",
        run=run,
        options=(
            o.PLAN,
            o.option(o.DEVICE, help="where to run; auto: as planned", default="auto"),
            o.number("samples", help="samples of one batch (default: a few per rank)"),
            o.SEED,
            o.span(
                "timeout",
                help="time without progress after which a side counts as hung: 90s, 10m (default: 60s)",
                default=60.0,
            ),
            o.JSON,
        ),
        details="Exit code 1 if they differ by more than ten times the measured rounding noise. A plan that compresses "
        "gradients is never equivalent; it is compared with a tolerance.",
    ),
)
