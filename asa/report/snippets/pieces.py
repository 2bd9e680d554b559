"""Pieces of Python code that several snippets share."""

from __future__ import annotations

from asa.ir.plan import Plan
from asa.report.snippets.uniform_choice import Choice
from asa.report.units import ranks
from asa.zoo.names import OWN

_SEGMENTATION = ("deeplabv3_", "fcn_", "lraspp_")
_INCEPTION_AUX_SIDE = 299
RATES = {"sgd": "lr=0.1, momentum=0.9, weight_decay=5e-4", "adamw": "lr=1e-3, weight_decay=0.05"}
CLASSES = {"sgd": "SGD", "adamw": "AdamW"}
DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}

SPLIT_IMPORTS = (
    "from torch import nn",
    "from torch.distributed.tensor import Replicate",
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
)
SPLIT = '''\
def split(model, mesh):
    """Linear layers of the components in SPLIT: by columns, and gathered; of two in a row the second by rows.

    Attention of torch.nn and convolutions stay whole, and so do weights that two layers share: DTensor does not split
    them.
    """
    between = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.Tanh, nn.Dropout, nn.Identity)
    inside = [n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    held = [id(p) for m in model.modules() for p in m.parameters(recurse=False)]
    how = {}
    for name, module in model.named_modules():
        chosen = any(name == n or name.startswith(n + ".") for n in SPLIT)
        if not chosen or any(name.startswith(n + ".") for n in inside):
            continue
        if getattr(module, "inplace", False):
            module.inplace = False  # what arrives there may be a view
        if isinstance(module, nn.Linear) and held.count(id(module.weight)) == 1:
            how.setdefault(name, ColwiseParallel(output_layouts=Replicate()))
        if type(module) is nn.Sequential:
            first = None
            for child, layer in module.named_children():
                if type(layer) is nn.Linear and first is None:
                    first = f"{name}.{child}"
                elif type(layer) is nn.Linear:
                    how |= {first: ColwiseParallel(), f"{name}.{child}": RowwiseParallel()}
                    first = None
                elif not isinstance(layer, between):
                    first = None
    if how:
        parallelize_module(model, mesh, how)


'''
"""Code with its imports that splits a model for tensor parallelism. ``SPLIT`` names components."""


def header(plan: Plan, choice: Choice) -> str:
    """Comment lines on what the snippet is, and what it does not express."""
    lines = [
        f"{plan.model_spec} as {choice.name} on {ranks(plan.num_ranks)}, global batch {plan.global_batch}, "
        f"{plan.precision}: a plan of asa.",
        *(f"NOT EXPRESSED: {note}." for note in choice.notes),
    ]
    return "".join(f"# {line}\n" for line in lines)


def machines(plan: Plan, choice: Choice) -> tuple[int, int]:
    """Number of machines, and of ranks on each of them."""
    each = min(choice.per_node or plan.num_ranks, plan.num_ranks)
    return plan.num_ranks // each, each


def torchrun(plan: Plan, choice: Choice) -> str:
    """The command that starts FILE on every rank; of several machines, each runs it."""
    count, each = machines(plan, choice)
    if count == 1:
        return f"torchrun --standalone --nproc-per-node {each} FILE"
    meeting = "--rdzv-backend c10d --rdzv-endpoint FIRST:29400"
    return f"on each of {count} machines: torchrun --nnodes {count} --nproc-per-node {each} {meeting} FILE"


def model_lines(plan: Plan) -> tuple[str, str]:
    """The import for the model, and the expression that builds it."""
    spec, classes, shape = plan.model_spec, plan.num_classes, tuple(plan.input_shape)
    if _built_by_asa(plan):
        return (
            "from asa.zoo.models import build",
            f"build({spec!r}, num_classes={classes}, input_shape={shape})",
        )
    more = f", image_size={shape[-1]}" if spec.startswith("vit_") else ""
    more += ", init_weights=False" if spec in ("googlenet", "inception_v3") else ""
    more += f", input_size={shape[1:]}" if spec.startswith("maxvit") else ""
    more += f", aux_logits={min(shape[1:]) >= _INCEPTION_AUX_SIDE}" if spec == "inception_v3" else ""
    more += ", weights_backbone=None, aux_loss=None" if spec.startswith(_SEGMENTATION) else ""
    return "import torchvision", f"torchvision.models.get_model({spec!r}, weights=None, num_classes={classes}{more})"


def _built_by_asa(plan: Plan) -> bool:
    if len(plan.input_shape) == 1:
        return True
    return ":" in plan.model_spec or plan.model_spec in OWN or plan.input_shape[0] != 3


def loss_lines(plan: Plan) -> tuple[str, str]:
    """The import for the loss, and its function: asa's own if the model may have several outputs, or maps."""
    several = plan.model_spec in ("googlenet", "inception_v3") or plan.model_spec.startswith(_SEGMENTATION)
    if several or _built_by_asa(plan):
        return "from asa.executor.model.loss import loss_of", "loss_of"
    return "import torch.nn.functional as F", "F.cross_entropy"


def batch_lines(plan: Plan, rows: str, options: str) -> tuple[str, str]:
    """Expressions for ``rows`` random inputs and labels: images and classes, or tokens."""
    shape = ", ".join(map(str, plan.input_shape))
    if len(plan.input_shape) == 1:
        tokens = f"torch.randint({plan.num_classes}, ({rows}, {shape}), {options})"
        return tokens, tokens
    return (
        f"torch.randn({rows}, {shape}, {options})",
        f"torch.randint({plan.num_classes}, ({rows},), {options})",
    )


def engine_cast(plan: Plan) -> str:
    """Code behind images for an engine of DeepSpeed, whose weights are in half precision: it does not convert what they
    read."""
    casts = {"bf16": ".bfloat16()", "fp16": ".half()"}
    return casts.get(plan.precision, "") if len(plan.input_shape) > 1 else ""


def optimizer(plan: Plan, parameters: str, options: str = "") -> str:
    """The expression that makes the optimizer of ``parameters``, both as code."""
    return f"torch.optim.{CLASSES[plan.optimizer]}({parameters}, {RATES[plan.optimizer]}{options})"


def split_code(plan: Plan) -> str:
    """Code that defines ``split``, with the names of the components to split."""
    return f"SPLIT = {listed(names(plan, tensor=True) or names(plan))}\n\n\n{SPLIT}"


def names(plan: Plan, *, tensor: bool = False, checkpoint: bool = False) -> list[str]:
    """Names of components; with ``tensor`` only those that are split, with ``checkpoint`` only those recomputed."""
    return [c.name for c in plan.components if (not tensor or c.tensor.degree > 1) and (not checkpoint or c.checkpoint)]


def listed(items: list[str]) -> str:
    """Code of a list of names, wrapped over several lines."""
    indent = "    "
    lines, line = [], indent
    for name in items:
        piece = f'"{name}", '
        if len(line) + len(piece) > 110:
            lines.append(line.rstrip())
            line = indent
        line += piece
    return "[\n" + "\n".join([*lines, line.rstrip()]) + "\n]" if items else "[]"
