"""A simulated rank with Transformer Engine's own Python (`emulate: te`) on meta tensors: weights stored in a low-precision format, counted buffer by buffer.

Building the model quantizes the initial weights; here every buffer is made but nothing is written into it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from mpbridge.backend.engines.contract import Live
from mpbridge.common.formats import DType
from mpbridge.planning.memory.keeps import STATES
from mpbridge.planning.memory.roles import Role
from mpbridge.settings.huggingface.tensors import FUSED_NORMS
from mpbridge.training.simulate.meta import META

_BUFFERS: Mapping[str, str] = MappingProxyType({
    "_data": "params", "_rowwise_data": "params", "_transpose": "weight_transposes", "_columnwise_data": "weight_transposes",
    "_scale_inv": "weight_scales", "_rowwise_scale_inv": "weight_scales", "_columnwise_scale_inv": "weight_scales",
})  # fmt: skip
"""Attributes of Transformer Engine's quantized tensors (pytorch/tensor/storage/*.py) -> our role."""
_GROUPED = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))\d+$")
COPIES = ("weight_copies", "weight_transposes", "weight_scales")
"""Roles of quantized weights other than their entry in a parameter buffer."""


def install() -> None:
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
