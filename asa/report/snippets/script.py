"""A plan as a script of plain PyTorch, for torchrun."""

from __future__ import annotations

from asa.ir.plan import Plan
from asa.report.snippets import pieces
from asa.report.snippets.left_out import even_batch, parts_of, short
from asa.report.snippets.uniform_choice import Choice

_IMPORTS = {
    "ddp": ("from torch.nn.parallel import DistributedDataParallel",),
    "zero1": (
        "from torch.distributed.optim import ZeroRedundancyOptimizer",
        "from torch.nn.parallel import DistributedDataParallel",
    ),
    "zero2": ("from torch.distributed.fsdp import fully_shard",),
    "fsdp": ("from torch.distributed.fsdp import fully_shard",),
    "tensor": (
        "from torch.distributed.device_mesh import init_device_mesh",
        *pieces.SPLIT_IMPORTS,
    ),
}
_SCHEDULES = {"layers": "ScheduleGPipe", "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}

_DDP = """\
    devices = [device] if device.type == "cuda" else None
    net = DistributedDataParallel(net, device_ids=devices, gradient_as_bucket_view=True)
"""
_FSDP = """\
    modules = dict(net.named_modules())
    for name in UNITS:
        if name in modules and any(True for _ in modules[name].parameters()):
            fully_shard(modules[name], reshard_after_forward={reshard})
    fully_shard(net, reshard_after_forward={reshard})
"""
_RECOMPUTE = """\
    for name in RECOMPUTED:
        parent, _, leaf = name.rpartition(".")
        if name in dict(net.named_modules()):
            setattr(net.get_submodule(parent), leaf, checkpoint_wrapper(net.get_submodule(name)))
"""


def torch_script(plan: Plan, choice: Choice) -> str:
    """The script, with synthetic batches in place of the user's data."""
    return _pipeline(plan, choice) if choice.name in _SCHEDULES else _one_stage(plan, choice)


def _top(plan: Plan, choice: Choice, imports: tuple[str, ...], constants: list[str]) -> str:
    more, build = pieces.model_lines(plan)
    loss, _ = pieces.loss_lines(plan)
    batch, microbatches = _cut(plan, choice.name)
    x, y = pieces.batch_lines(plan, "GLOBAL_BATCH", "generator=generator")
    plain = ["import torch", "import torch.distributed as dist"]
    third = sorted(line for line in (loss, more) if line.startswith("import"))
    own_imports = [line for line in (loss, more) if not line.startswith("import")]
    lines = [
        f"{pieces.header(plan, choice)}#\n# {pieces.torchrun(plan, choice)}",
        "import os",
        *(["from contextlib import nullcontext"] if choice.name in ("ddp", "zero1") else []),
        "",
        *plain,
        *third,
        *imports,
        *own_imports,
        "",
        f"RANKS, GLOBAL_BATCH, MICROBATCHES, STEPS = {plan.num_ranks}, {batch}, "
        f'{microbatches}, int(os.environ.get("STEPS", "10"))',
        *constants,
        "",
        "",
        "def build_model():",
        "    torch.manual_seed(0)",
        f"    return {build}.train()" if more.startswith("import") else f"    return {build}",
        "",
        "",
        "def batch(step):",
        '    """Your data here: the whole batch, the same on every rank."""',
        "    generator = torch.Generator().manual_seed(step)",
        f"    x = {x}",
        f"    return x, {y}",
        "",
        "",
    ]
    return "\n".join(lines) + "\n"


_PLACE = """\
    cuda = {cuda}
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    assert dist.get_world_size() == RANKS, f"start {{RANKS}} ranks"
"""


def _one_stage(plan: Plan, choice: Choice) -> str:
    name = choice.name
    constants, imports = [], _IMPORTS.get(name, ())
    recomputed = pieces.names(plan, checkpoint=True)
    if name in ("fsdp", "zero2"):
        constants.append(f"UNITS = {pieces.listed(pieces.names(plan))}  # gathered one at a time")
    if name == "tensor":
        split = pieces.names(plan, tensor=True) or pieces.names(plan)
        constants.append(f"SPLIT = {pieces.listed(split)}")
    if recomputed:
        constants.append(f"RECOMPUTED = {pieces.listed(recomputed)}")
        imports = (
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper",
            *imports,
        )
    text = _top(plan, choice, imports, constants)
    if name == "tensor":
        text += pieces.SPLIT
    text += "def main():\n" + _PLACE.format(cuda=plan.device_type == "cuda")
    text += "    net = build_model().to(device)\n"
    text += _RECOMPUTE if recomputed else ""
    if name in ("ddp", "zero1"):
        text += _DDP
    elif name in ("fsdp", "zero2"):
        text += _FSDP.format(reshard=name == "fsdp")
    elif name == "tensor":
        text += f"    split(net, init_device_mesh({plan.device_type!r}, (RANKS,)))\n"
    if name == "zero1":
        optimizer, rates = f"torch.optim.{pieces.CLASSES[plan.optimizer]}", pieces.RATES[plan.optimizer]
        text += f"    optimizer = ZeroRedundancyOptimizer(net.parameters(), {optimizer}, {rates})\n"
    else:
        more = ", foreach=False" if name in ("tensor", "fsdp", "zero2") else ""
        text += f"    optimizer = {pieces.optimizer(plan, 'net.parameters()', more)}\n"
    whole_batch = name in ("single", "tensor")
    text += "    for step in range(STEPS):\n        x, y = batch(step)\n"
    if not whole_batch:
        text += "        x, y = x.tensor_split(RANKS)[rank], y.tensor_split(RANKS)[rank]  # this rank's rows\n"
    text += (
        "        parts = list(zip(x.to(device).tensor_split(MICROBATCHES), y.to(device).tensor_split(MICROBATCHES)))\n"
    )
    text += "        total = 0.0\n        for i, (inputs, labels) in enumerate(parts):\n"
    # Weights by number of rows, which give the mean over the whole batch for any division.
    share = "len(labels) / GLOBAL_BATCH" if whole_batch else "len(labels) * RANKS / GLOBAL_BATCH"
    body = _autocast(plan) + f"                loss = {pieces.loss_lines(plan)[1]}(net(inputs), labels) * ({share})\n"
    if name in ("fsdp", "zero2"):
        text += "            net.set_requires_gradient_sync(i + 1 == len(parts))\n"
    if name in ("ddp", "zero1"):
        inner = "".join("    " + line + "\n" for line in body.rstrip("\n").split("\n"))
        text += "            with nullcontext() if i + 1 == len(parts) else net.no_sync():\n" + inner
        text += "                loss.backward()\n"
    else:
        text += body + "            loss.backward()\n"
    text += "            total += loss.item()\n        optimizer.step()\n        optimizer.zero_grad()\n"
    text += '        if rank == 0:\n            print(f"step {step}: loss {total:.4f}", flush=True)\n'
    return text + "    dist.destroy_process_group()\n\n\n" + 'if __name__ == "__main__":\n    main()\n'


def _cut(plan: Plan, name: str) -> tuple[int, int]:
    """Global batch, and its number of microbatches: every rank has a row of each."""
    if name in _SCHEDULES:
        return even_batch(plan, name), plan.num_microbatches
    shards = parts_of(plan, name) // plan.num_microbatches
    return plan.global_batch, max(1, min(plan.num_microbatches, plan.global_batch // shards))


def _autocast(plan: Plan) -> str:
    on = plan.precision in ("bf16", "fp16")
    dtype = f", dtype=torch.{pieces.DTYPES[plan.precision]}" if on else ", enabled=False"
    scaler = "  # add torch.amp.GradScaler" if plan.precision == "fp16" else ""
    return f"            with torch.autocast(device.type{dtype}):{scaler}\n"


def _pipeline(plan: Plan, choice: Choice) -> str:
    schedule = _SCHEDULES["gpipe" if short(plan, choice.name) else choice.name]
    cuts = [plan.components[i].name for i in plan.starts()[1:]]
    imports = (f"from torch.distributed.pipelining import {schedule}, SplitPoint, pipeline",)
    constants = [f"CUTS = {pieces.listed(cuts)}  # the first module of every stage but the first"]
    text = _top(plan, choice, imports, constants) + "def main():\n"
    text += _PLACE.format(cuda=plan.device_type == "cuda")
    return (
        text
        + f"""\
    x, _ = batch(0)
    cuts = {{name: SplitPoint.BEGINNING for name in CUTS}}
    pipe = pipeline(build_model(), mb_args=(x[: GLOBAL_BATCH // MICROBATCHES],), split_spec=cuts)
    stage = pipe.build_stage(rank, device)
    schedule = {schedule}(stage, n_microbatches=MICROBATCHES, loss_fn={pieces.loss_lines(plan)[1]})
    optimizer = {pieces.optimizer(plan, "stage.submod.parameters()")}
    for step in range(STEPS):
        x, y = batch(step)
        if rank == 0:
            schedule.step(x.to(device))
        elif rank + 1 == RANKS:
            losses = []
            schedule.step(target=y.to(device), losses=losses)
            print(f"step {{step}}: loss {{sum(losses).item() / len(losses):.4f}}", flush=True)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
    )
