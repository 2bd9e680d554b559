"""A training step as somebody would tune it by hand for one GPU: what `asa` is held against there.

    python benchmarks/gpu_reference.py MODEL --input 3x32x32 --classes 100 --batch 256 --precision tf32|bf16
        [--memory-format channels_last] [--compile none|default|graphs] [--device cuda] [--steps 30]

The model whole, fused SGD, inputs on the device, cuDNN's kernels tried before; nothing of `asa` but the zoo that builds
the model. Prints one JSON document: ``step_s`` the median, ``steps``, and what it ran with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext

import torch

from asa.zoo.models import build


def step_seconds(args: argparse.Namespace) -> list[float]:
    """Seconds of every timed step; the first ones, in which kernels are made and chosen, are not in it."""
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = device.type == "cuda"
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    shape = tuple(map(int, args.input.split("x")))
    form = torch.channels_last if args.memory_format == "channels_last" else torch.contiguous_format
    model = build(args.model, num_classes=args.classes, input_shape=shape).to(device, memory_format=form).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    run = model
    if args.compile != "none":
        run = torch.compile(model, mode="reduce-overhead" if args.compile == "graphs" else None)
    x = torch.randn(args.batch, *shape, device=device).contiguous(memory_format=form)
    y = torch.randint(args.classes, (args.batch,), device=device)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision)

    def one() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=kind) if kind else nullcontext():
            loss = torch.nn.functional.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(args.warmups):
        one()
    return [one() for _ in range(args.steps)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--input", default="3x32x32")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--memory-format", choices=("contiguous", "channels_last"), default="contiguous")
    parser.add_argument("--compile", choices=("none", "default", "graphs"), default="none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warmups", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    times = step_seconds(args)
    print(json.dumps({**vars(args), "step_s": statistics.median(times), "steps": len(times)}))


if __name__ == "__main__":
    main()
