"""torch on the meta device for one simulated rank: minimal workarounds for what does not work there, installed once, in a separate process; and the tensors that
Transformer Engine's own Python (`emulate: te`) builds there, counted buffer by buffer."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.backend.devices import redirect
from mpbridge.backend.engines.contract import Live
from mpbridge.backend.megatron import process
from mpbridge.common.formats import DType
from mpbridge.planning.memory.keeps import STATES
from mpbridge.planning.memory.roles import Role
from mpbridge.settings.huggingface.tensors import FUSED_NORMS

META = torch.device("meta")


class Fused(torch.autograd.Function):
    """Saves what a fused attention saves: queries, keys, values, output, and one FP32 sum per head and token. [sequence, batch, heads, width] in,
    [sequence, batch, heads x width] out."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """An output of the right shape."""
        length, batch, heads = query.shape[:3]
        out = query.new_empty(length, batch, heads * value.shape[3])
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of the right shapes."""
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def install() -> None:
    """Puts tensors that request CUDA, and new parameters, on the meta device; cannot be undone in this process."""
    torch.utils._device._device_constructors()  # before the device layer wraps the factories: else set_default_device sees none of them
    redirect.CPU = META
    torch.set_default_device(META)
    # "No backend type associated with device type meta" otherwise
    dist.batch_isend_irecv = lambda operations: [one.op(one.tensor, one.peer, one.group) for one in operations]  # type: ignore[assignment]
    storage: Any = torch.UntypedStorage
    pointer = storage.data_ptr  # aliases are recognised by it, and it is 0 on meta
    storage.data_ptr = lambda self: self._cdata if self.device.type == "meta" else pointer(self)
    _types()
    _values()
    for owner, name, replacement in process.meta_patches():
        setattr(owner, name, replacement)
    from mpbridge.backend.models.local_spec import CausalAttention

    core = importlib.import_module("megatron.core.transformer.dot_product_attention")
    for kind in (CausalAttention, core.DotProductAttention):
        kind.forward = lambda self, query, key, value, *args, **kwargs: Fused.apply(query, key, value)  # type: ignore[method-assign, no-untyped-call]


def _types() -> None:
    """megatron-core's optimizers compare type() strings (distrib_optimizer.py)."""
    kind: Any = torch.Tensor
    old = kind.type

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = old(self, *args, **kwargs)
        return found.replace("meta.", "") if isinstance(found, str) else found

    kind.type = named


def _values() -> None:
    """Values that meta tensors do not have: those given in Python stay real; norms, losses and the loss scale are 1; nothing is infinite; copies are equal."""
    kind: Any = torch.Tensor
    item, as_float, as_bool, listed, select = kind.item, kind.__float__, kind.__bool__, kind.tolist, kind.masked_select
    made, equal = torch.tensor, torch.equal
    lib: Any = torch

    def known(tensor: Any) -> bool:
        return bool(tensor.device.type != "meta")

    lib.tensor = lambda *a, **k: made(*a, **({"device": "cpu"} | k))
    lib.equal = lambda a, b: equal(a, b) if known(a) and known(b) else a.shape == b.shape
    kind.item = lambda t: item(t) if known(t) else (1.0 if t.is_floating_point() else 0)
    kind.__float__ = lambda t: as_float(t) if known(t) else 1.0
    kind.__int__ = lambda t: int(item(t)) if known(t) else 0
    kind.__bool__ = lambda t: as_bool(t) if known(t) else False
    kind.tolist = lambda t: listed(t) if known(t) else [0.0] * t.numel()
    # the router's choice: as many tokens as under balanced routing
    kind.masked_select = lambda t, mask: (
        select(t, mask) if known(t) else t.expand_as(mask).reshape(-1).narrow(0, 0, process.Chosen.count)
    )
    state = torch.get_rng_state()
    lib.get_rng_state = lambda *a: state
    lib.set_rng_state = lambda *a: None


_BUFFERS: Mapping[str, str] = MappingProxyType({
    "_data": "params", "_rowwise_data": "params", "_transpose": "weight_transposes", "_columnwise_data": "weight_transposes",
    "_scale_inv": "weight_scales", "_rowwise_scale_inv": "weight_scales", "_columnwise_scale_inv": "weight_scales",
})  # fmt: skip
"""Attributes of Transformer Engine's quantized tensors (pytorch/tensor/storage/*.py) -> our role."""
_GROUPED = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))\d+$")
COPIES = ("weight_copies", "weight_transposes", "weight_scales")
"""Roles of quantized weights other than their entry in a parameter buffer."""


def install_quantized() -> None:
    """Call it after `meta.install`, inside of `transformer_engine_on_cpu`; cannot be undone in this process."""
    from mpbridge.te_cpu import casts, quantize

    kind: Any = torch.Tensor
    moved = kind.cpu
    # reset_parameters puts the initial values on the host before it quantizes them
    kind.cpu = lambda tensor, *a, **k: tensor if tensor.device == META else moved(tensor, *a, **k)
    for owner in (casts, quantize):
        filled: Any = owner
        filled.fill = lambda quantizer, values, out: out


def at_rest(live: Iterable[Live], *, apart: bool) -> Iterator[Live]:
    """`live` with each quantized weight replaced by the tensors that it consists of, and norms fused into linears under their own names.

    apart: weights are not part of a parameter buffer (MXFP8's, which are gathered through the gradient buffer).
    """
    for one in live:
        name = _label(one.role, _own_name(one.parameter))
        buffers = [(role, getattr(one.tensor, part, None)) for part, role in _BUFFERS.items()]
        if apart:
            buffers = [("weight_copies" if role == "params" else role, buffer) for role, buffer in buffers]
        held = [(role, buffer) for role, buffer in buffers if isinstance(buffer, torch.Tensor) and buffer.numel()]
        if not held:
            yield dataclasses.replace(one, parameter=name)
        yield from (Live(role=role, parameter=name, tensor=buffer) for role, buffer in held)


def resting(wanted: Iterable[Role]) -> Iterator[Role]:
    """`wanted` without the copies of weights that are stored in high precision: a step's forward pass makes them, and no step is run."""
    rows = list(wanted)
    high = {role.parameter for role in rows if role.name == "params" and role.dtype is not DType.UINT8}
    for role in rows:
        if role.name not in COPIES or role.parameter not in high:
            yield role._replace(parameter=_label(role.name, role.parameter))


def _label(role: str, parameter: str) -> str:
    """The name under which a row is compared. Modules with a fused norm have it at another place, so that a shard begins in another parameter: what ranks own is
    compared in sum. Grouped experts are counted by rank in modules, over all ranks here."""
    return "" if role in STATES else _GROUPED.sub(r"\1", parameter)


def _own_name(parameter: str) -> str:
    for own, fused in FUSED_NORMS.items():
        for part in ("weight", "bias"):
            if parameter.endswith(fused.removesuffix("weight") + part):
                return parameter.removesuffix(fused.removesuffix("weight") + part) + own.removesuffix("weight") + part
    return parameter
