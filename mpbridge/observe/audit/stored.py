"""The actual storage format and bytes of a live tensor, whether plain, sharded or quantized."""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import dtype

_PARTS = (
    "_data",
    "_transpose",
    "_rowwise_data",
    "_columnwise_data",
    "_scale_inv",
    "_rowwise_scale_inv",
    "_columnwise_scale_inv",
)
"""Inner tensors of Transformer Engine's quantized tensors (tensor/storage/*.py of 2.11); their .dtype is only nominal."""


def local(tensor: Any) -> Any:
    """This rank's shard of a DTensor; the tensor itself otherwise."""
    inner = getattr(tensor, "_local_tensor", None)
    return tensor if inner is None else inner


def _parts(tensor: Any) -> list[torch.Tensor]:
    found = [getattr(tensor, name, None) for name in _PARTS]
    return [part for part in found if isinstance(part, torch.Tensor)]


def values(tensor: Any) -> Any:
    """A GEMM's operand as a plain tensor: torchao's float8 tensors are dequantized; any other operand is returned as is."""
    widen = getattr(tensor, "to_original_precision", None)
    return tensor if widen is None else widen().to(tensor.dtype)  # (exact: its scales are powers of two)


def plain_moment(tensor: Any) -> torch.Tensor | None:
    """This rank's part of an optimizer state; None for FP16 and 8-bit ones, which are codes whose scale is elsewhere (fused_adam.py)."""
    inner = local(tensor)
    plain = type(inner) in (torch.Tensor, torch.nn.Parameter)
    return inner.detach() if plain and inner.dtype in (torch.float32, torch.bfloat16, torch.float64) else None


def storage(tensor: Any) -> str:
    """Short dtype name ('bf16', 'int16'), or the class name of a quantized tensor ('Float8Tensor')."""
    inner = local(tensor)
    if _parts(inner):
        return type(inner).__name__
    try:
        return dtype(inner.dtype).short
    except BadValue:
        return str(inner.dtype).removeprefix("torch.")


def elements(tensor: Any) -> int:
    """Elements of this rank's part."""
    return int(local(tensor).numel())


def size(tensor: Any) -> int:
    """Bytes of this rank's part, scales and transposed copies of a quantized tensor included."""
    inner = local(tensor)
    parts = _parts(inner)
    return (
        sum(part.numel() * part.element_size() for part in parts)
        if parts
        else int(inner.numel()) * int(inner.element_size())
    )
