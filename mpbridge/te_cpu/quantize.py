"""Entry points that quantize and dequantize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.te_cpu.casts import fill, new_quantized, turned
from mpbridge.te_cpu.enums import torch_dtype
from mpbridge.te_cpu.operands import is_quantized, values_of
from mpbridge.te_cpu.registry import kernel
from mpbridge.te_cpu.storages import coerced, empty_quantized, storage_kind


def plain(tensor: Any) -> torch.Tensor:
    """A tensor's values without its autograd history; quantized ones are dequantized."""
    if is_quantized(tensor):
        return tensor.dequantize()  # type: ignore[no-any-return]
    found: torch.Tensor = tensor.detach()
    return found


def quantized(tensor: torch.Tensor, quantizer: Any, out: Any = None) -> Any:
    """`tensor` as stored by the quantizer, unchanged without one. Custom quantizers do this themselves."""
    if quantizer is None:
        if out is not None:
            out.copy_(tensor.reshape(out.shape))
            return out
        return tensor
    if getattr(quantizer, "custom", False):
        return quantizer.quantize(tensor) if out is None else quantizer.update_quantized(tensor, out)
    with torch.no_grad():
        if out is None:
            return new_quantized(quantizer, tensor)
        return fill(quantizer, tensor, coerced(quantizer, out, tensor.shape, tensor.dtype))


@kernel
def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """`tensor` quantized, into `output` if given; a noop flag of 1 leaves `output` unchanged."""
    if noop is not None and noop.numel() and float(noop.reshape(-1)[0]) == 1.0:
        return output
    return quantized(plain(tensor), quantizer, output)


@kernel
def dequantize(input: Any, otype: Any) -> torch.Tensor:
    """The values of a quantized tensor: from its row copy, or from the column copy if that is the only one."""
    with torch.no_grad():
        return values_of(input, torch_dtype(otype), column=_only_columns(input))


def _only_columns(tensor: Any) -> bool:
    if storage_kind(tensor) == "delayed":
        return tensor._data is None
    return getattr(tensor, "_rowwise_data", None) is None


@kernel
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = None, pin_memory: bool = False
) -> Any:
    """A quantized tensor with uninitialised buffers."""
    del pin_memory
    return empty_quantized(quantizer, shape, dtype, device)


@kernel
def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    """Every tensor quantized by the quantizer at the same index."""
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


@kernel
def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Parts of the first dimension, each quantized by its own quantizer."""
    del disable_bulk_allocation
    parts = torch.split(tensor.detach(), [int(size) for size in split_sections])
    return [quantize(part.contiguous(), quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


@kernel
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """[sum over the tokens, in the input's dtype; the input quantized]."""
    source = input.detach()
    total = source.reshape(-1, source.shape[-1]).float().sum(0).to(source.dtype)
    return [total, quantized(source, quantizer)]


@kernel
def fp8_transpose(input: torch.Tensor, dtype: Any = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Per-tensor FP8's column copy of its codes."""
    del dtype
    made = turned(input)
    if out is None:
        return made
    out.copy_(made.view(out.shape))
    return out


@kernel
def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The first two dimensions exchanged, contiguous."""
    made = tensor.detach().transpose(0, 1).contiguous()
    if out is None:
        return made
    out.copy_(made)
    return out
