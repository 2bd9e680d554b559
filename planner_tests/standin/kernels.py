"""CUDA kernels that are the CPU's: every operator that torch dispatches to a CUDA device computes on the host.

Memory of the stand-in's devices is main memory, so a kernel is the CPU's own on tensors that lie where the CUDA ones
lie. Everything above the kernels stays torch's: autograd with its thread a device, autocast with CUDA's lists, views,
the allocator. Operands on different devices are refused, as CUDA refuses them. Random numbers come from the CUDA
generator and advance it. Operators without a CPU kernel are written out below, or fail by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_KEPT = {
    "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "alias", "unfold", "resize_",
    "record_stream", "is_pinned", "_pin_memory", "set_", "set_.source_Storage", "set_.source_Tensor",
    "set_.source_Storage_storage_offset", "is_set_to", "view_as_real", "view_as_complex", "_resize_output_",
    "_efficientzerotensor", "real", "imag", "copy_sparse_to_sparse_",
}  # fmt: skip
"""Operators that compute nothing: of memory and of views, which torch's own do."""
_lib: list[Any] = []


class NotStoodIn(NotImplementedError):
    """There is no CPU kernel to stand in for this operator of CUDA's."""


def _host(x: Tensor) -> Tensor:
    """A CPU tensor in the memory of CUDA tensor ``x``."""
    storage = x.untyped_storage()
    size = storage.nbytes()
    seen = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), size)
    out = torch.empty(0, dtype=x.dtype)
    out.set_(seen, x.storage_offset(), x.size(), x.stride())
    return out.conj() if x.is_conj() else out


class _Devices:
    """The devices that an operator's operands lie on."""

    def __init__(self, name: str) -> None:
        self.name, self.found = name, None

    def host(self, value: Any) -> Any:
        """``value`` with every CUDA tensor in it as the CPU sees it, and the CPU where it says a CUDA device."""
        if isinstance(value, Tensor):
            if value.device.type == "cuda":
                if self.found not in (None, value.device):
                    raise RuntimeError(
                        f"Expected all tensors to be on the same device, but found at least two devices, {self.found} "
                        f"and {value.device}! (when checking argument in method {self.name})"
                    )
                self.found = value.device
                return _host(value)
            return value
        if isinstance(value, torch.device):
            if value.type == "cuda":
                self.found = value if value.index is not None else torch.device("cuda", torch.cuda.current_device())
                return torch.device("cpu")
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(self.host(v) for v in value)
        return value

    def strangers(self, value: Any) -> bool:
        """Whether ``value`` holds a CPU tensor of one dimension or more."""
        if isinstance(value, (list, tuple)):
            return any(self.strangers(v) for v in value)
        return isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() > 0

    def device(self, value: Any) -> Any:
        """``value``, what the CPU computed, in memory of the device."""
        if isinstance(value, Tensor):
            out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self.found)
            if value.numel():
                _host(out).copy_(value)
            return out
        if isinstance(value, (list, tuple)):
            return type(value)(self.device(v) for v in value)
        return value


@contextlib.contextmanager
def _drawing(device: torch.device, generator: Any) -> Iterator[torch.Generator]:
    """The CPU's default generator where the CUDA one stands, which moves on; afterwards the CPU's as it was."""
    ours = generator if generator is not None else torch.cuda.default_generators[device.index]
    before = torch.get_rng_state()
    torch.default_generator.manual_seed((ours.initial_seed() * 1_000_003 + ours.get_offset()) % 2**63)
    try:
        yield torch.default_generator
    finally:
        torch.set_rng_state(before)
        ours.set_offset(ours.get_offset() + 4)


_MAY_DIFFER = {"copy_", "_copy_from", "index_put_", "_index_put_impl_", "_foreach_copy_", "index.Tensor"}
"""Operators whose operands may lie on different devices."""


def _kernel(op: Any, compute: Callable[..., Any] | None) -> Callable[..., Any]:
    schema, name = op._schema, op._schema.name.removeprefix("aten::")
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    back = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
    seeded = torch.Tag.nondeterministic_seeded in op.tags or any(a.name == "generator" for a in schema.arguments)
    names = [a.name for a in schema.arguments]
    outs = [a.name for a in schema.arguments if a.is_out]  # given empty, they become as large as the result
    packet = getattr(torch.ops.aten, name)
    tensors = [i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        devices = _Devices(name)
        generator = kwargs.pop("generator", None) if "generator" in kwargs else None
        if seeded and generator is None:
            for i, a in enumerate(args):
                if isinstance(a, torch.Generator):
                    generator, args = a, (*args[:i], None, *args[i + 1 :])
        theirs = [devices.host(a) for a in args]
        named = {k: devices.host(v) for k, v in kwargs.items()}
        if name not in _MAY_DIFFER and f"{name}.{op._overloadname}" not in _MAY_DIFFER and devices.strangers(args):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{devices.found} and cpu! (when checking argument in method {name})"
            )
        # A number among tensors arrives as itself: another overload's operand.
        numbers = any(i < len(args) and isinstance(args[i], (bool, int, float, complex)) for i in tensors)
        run = compute or (packet if numbers else op)
        assert devices.found is not None, f"{op}: no CUDA operand in {args} {kwargs}"
        made = {
            n: torch.empty(0, dtype=kwargs[n].dtype)
            for n in outs
            if isinstance(kwargs.get(n), Tensor) and not kwargs[n].numel()
        }
        named |= made
        try:
            if seeded:
                with _drawing(devices.found, generator):
                    found = run(*theirs, **named)
            else:
                found = run(*theirs, **named)
        except NotImplementedError as error:
            raise NotStoodIn(f"{op} has no kernel on the CPU: {str(error).splitlines()[0]}") from error
        if not any(back):
            if written and not schema.returns:
                return None
            return devices.device(found)
        given = {names[i]: a for i, a in enumerate(args)} | kwargs
        outputs = [given[names[i]] for i in written]
        for n, result in made.items():
            kwargs[n].resize_(result.shape)
            _host(kwargs[n]).copy_(result)
        if len(back) == 1:
            return outputs[0]
        left, rest = iter(outputs), iter(found if isinstance(found, tuple) else (found,))
        answer = []
        for is_written in back:
            new = next(rest)
            answer.append(next(left) if is_written else devices.device(new))
        return tuple(answer)

    return kernel


def _cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    out, saved, inverse = torch.ops.aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    return out, saved, inverse, torch.empty(0, dtype=torch.uint8)


def _cudnn_batch_norm_backward(x, grad, weight, mean, var, saved, inverse, eps, reserve):
    return torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, mean, var, saved, inverse, True, eps, [True, True, True]
    )


def _batch_norm_with_update(x, weight, bias, mean, var, momentum, eps):
    return _cudnn_batch_norm(x, weight, bias, mean, var, True, momentum, eps)


def _math_attention(*args: Any, **kwargs: Any) -> int:
    return 0


def _weights(query, key, bias, is_causal, scale):
    """Attention weights (..., queries, keys) in float32 or wider, and the scale of the products."""
    kind = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.to(kind) @ key.to(kind).transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1), scale


def _efficient_attention(query, key, value, bias, log, dropout=0.0, is_causal=False, *, scale=None):
    if dropout:
        raise NotStoodIn("attention with dropout in one kernel")
    weights, logs, _ = _weights(query, key, bias, is_causal, scale)
    none = torch.zeros((), dtype=torch.int64)
    return (weights @ value.to(weights.dtype)).to(query.dtype), logs if log else logs[..., :0], none, none.clone()


def _efficient_attention_backward(
    grad, query, key, value, bias, out, logs, seed, offset, dropout, wanted, is_causal=False, *, scale=None
):
    weights, _, scale = _weights(query, key, bias, is_causal, scale)
    kind = weights.dtype
    toward = grad.to(kind) @ value.to(kind).transpose(-2, -1)
    scores = weights * (toward - (toward * weights).sum(-1, keepdim=True))
    found = (
        (scores @ key.to(kind) * scale).to(query.dtype),
        (scores.transpose(-2, -1) @ query.to(kind) * scale).to(key.dtype),
        (weights.transpose(-2, -1) @ grad.to(kind)).to(value.dtype),
        scores.sum_to_size(bias.shape).to(bias.dtype) if wanted[3] else torch.empty(0),
    )
    return tuple(g if w else torch.empty(0) for g, w in zip(found, wanted, strict=True))


def _flash_attention(query, key, value, dropout=0.0, is_causal=False, debug=False, *, scale=None):
    out, logs, seed, offset = _efficient_attention(query, key, value, None, True, dropout, is_causal, scale=scale)
    none = torch.empty(0, dtype=torch.int32)
    return out, logs, none, none.clone(), query.shape[-2], key.shape[-2], seed, offset, torch.empty(0)


def _flash_attention_backward(
    grad, query, key, value, out, logs, _q, _k, _most_q, _most_k, dropout, is_causal, seed, offset, *, scale=None
):
    wanted = (True, True, True, False)
    return _efficient_attention_backward(
        grad, query, key, value, None, out, logs, seed, offset, dropout, wanted, is_causal, scale=scale
    )[:3]


_WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "cudnn_batch_norm": _cudnn_batch_norm,
    "cudnn_batch_norm_backward": _cudnn_batch_norm_backward,
    "_batch_norm_with_update": _batch_norm_with_update,
    "_scaled_dot_product_flash_attention": _flash_attention,
    "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_efficient_attention": _efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
}
_ALSO = ("copy_", "convolution", "convolution_backward", "_fused_sdp_choice")
"""Operators that are composed of others, of which CUDA would choose its own."""


def register() -> int:
    """Replace every CUDA kernel; how many there were."""
    found = [n for n in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA") if n.startswith("aten::")]
    lib = torch.library.Library("aten", "IMPL")
    count = 0
    names = [n.removeprefix("aten::") for n in found]
    for name in [*names, *(n for n in _ALSO if n not in names)]:
        if name in _KEPT:
            continue
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        if packet is None or (overload or "default") not in packet.overloads():
            continue
        op = getattr(packet, overload or "default")
        if base == "_fused_sdp_choice":
            lib.impl(name, _math_attention, "CUDA")
        else:
            lib.impl(name, _kernel(op, _WRITTEN_OUT.get(base)), "CUDA")
        count += 1
    _lib.append(lib)
    return count
