"""Export of a run's weights for use without asa: one safetensors file with the plain model's own names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from asa.errors import InvalidInputError, NoCheckpointError, UnavailableError
from asa.executor.running.outdir import CHECKPOINTS
from asa.executor.training import checkpoint
from asa.executor.training.checkpoint import CheckedCheckpoint
from asa.ir import codec
from asa.ir.codec import noun
from asa.tracing import trace
from asa.zoo.inputs import example
from asa.zoo.models import build


@noun
class Exported:
    """What was exported, and from which checkpoint. ``notes``: newer checkpoints that were skipped, and why."""

    model_spec: str
    step: int
    checkpoint: str
    plan_fingerprint: str
    tensors: int
    bytes: int
    notes: tuple[str, ...]


def export_weights(run: Path, output: Path, *, step: int | None = None) -> Exported:
    """Write the weights of a complete checkpoint of ``run`` to ``output``: of the newest one, or of the one after
    ``step``.

    Raises:
        NoCheckpointError: there is none.
        InvalidInputError: it does not fit the model.
        UnavailableError: the file cannot be written.
    """
    source, weights = _read(run / CHECKPOINTS, step)
    manifest = source.manifest
    plan = manifest.plan
    model = build(plan.model_spec, num_classes=plan.num_classes, input_shape=plan.sample_shape, seed=manifest.seed)
    state = plain_state(
        model, weights,
        lambda: trace(model, example(plan.sample_shape), name=plan.model_spec).unused,
    )  # fmt: skip
    metadata = {
        "format": "pt",
        "model": manifest.model_spec,
        "num_classes": str(plan.num_classes),
        "input_shape": "x".join(map(str, plan.input_shape)),
        "step": str(manifest.step),
        "plan_fingerprint": manifest.plan_fingerprint,
    }
    if name := next((n for n, t in state.items() if t.dtype == torch.complex128), ""):
        raise UnavailableError(f"cannot write {output}: {name} is complex128, safetensors holds at most complex64")
    if codec.is_special(output):
        raise UnavailableError(f"cannot write {output}: weights go to a file, and it is none; choose another -o")
    try:
        with codec.replacing(output) as temporary:
            save_file(state, temporary, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise UnavailableError(f"cannot write {output}: {getattr(error, 'strerror', None) or error}") from None
    return Exported(
        model_spec=manifest.model_spec,
        step=manifest.step,
        checkpoint=str(source.path),
        plan_fingerprint=manifest.plan_fingerprint,
        tensors=len(state),
        bytes=output.stat().st_size,
        notes=source.notes,
    )


def _read(folder: Path, step: int | None) -> tuple[CheckedCheckpoint, dict[str, Tensor]]:
    """The checkpoint and its weights. If a run at work removes it meanwhile, a newer one is taken."""
    while True:
        source = _find(folder, step)
        try:
            return source, checkpoint.read(source.path, checkpoint.MODEL)
        except InvalidInputError:
            if step is not None or source.path.exists():
                raise


def _find(folder: Path, step: int | None) -> CheckedCheckpoint:
    if step is None:
        return checkpoint.find(folder)
    path = folder / f"step_{step:08d}"
    if not path.is_dir():
        available = ", ".join(p.name for p in sorted(folder.glob("step_*")) if p.is_dir()) or "none"
        raise NoCheckpointError(f"no checkpoint after step {step} in {folder}; there is {available}")
    return CheckedCheckpoint(path=path, manifest=checkpoint.check(path), notes=())


def plain_state(
    model: nn.Module, stored: dict[str, Tensor], unread: Callable[[], Collection[str]] = tuple
) -> dict[str, Tensor]:
    """``stored`` with all names of ``model.state_dict()``. A shared tensor is stored under only one of its names, and
    those that no forward reads (``unread``, called if there are others) under none: they are what they are in
    ``model``.

    Raises:
        InvalidInputError: a tensor is missing, or has another shape.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    ):  # fmt: skip
        names.setdefault(id(tensor), []).append(name)
    of = {name: group for group in names.values() for name in group}
    tensors = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    sources = {name: next((n for n in (name, *of.get(name, ())) if n in stored), None) for name in tensors}
    idle = unread() if None in sources.values() else ()
    state: dict[str, Tensor] = {}
    for name, expected in tensors.items():
        source = sources[name]
        if source is None and not set(of.get(name, ())).isdisjoint(idle):
            state[name] = expected.detach().clone()
            continue
        if source is None or stored[source].shape != expected.shape:
            lacks = "lacks it" if source is None else f"holds {list(stored[source].shape)}"
            raise InvalidInputError(f"the checkpoint is of another model: {name} is {list(expected.shape)}, it {lacks}")
        # Files have no aliases: each name gets bytes of its own.
        state[name] = stored[source].contiguous() if source == name else stored[source].clone()
    return state
