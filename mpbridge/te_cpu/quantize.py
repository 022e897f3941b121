"""Entry points that quantize and dequantize."""

from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.te_cpu.casts import fill, turned
from mpbridge.te_cpu.enums import torch_dtype
from mpbridge.te_cpu.nvfp4_options import cast_together, check_split, refuse_approximations
from mpbridge.te_cpu.operands import is_quantized, values_of
from mpbridge.te_cpu.played import kernel, now
from mpbridge.te_cpu.storages import coerced, empty_quantized, fused_nvfp4, kind_of, storage_kind, swizzles
from mpbridge.te_cpu.swizzle import swizzle_scales_for_gemm_


def plain(tensor: Any) -> torch.Tensor:
    """A tensor's values without its autograd history; quantized ones are dequantized."""
    if is_quantized(tensor):
        return tensor.dequantize()  # type: ignore[no-any-return]
    found: torch.Tensor = tensor.detach()
    return found


def quantized(tensor: torch.Tensor, quantizer: Any, out: Any = None) -> Any:
    """`tensor` as stored by the quantizer, unchanged without one. Custom quantizers do this themselves."""
    if quantizer is None:
        return tensor if out is None else out.copy_(tensor.reshape(out.shape))
    if getattr(quantizer, "custom", False):
        return quantizer.quantize(tensor) if out is None else quantizer.update_quantized(tensor, out)
    with torch.no_grad():
        return fill(quantizer, tensor, buffers(tensor.shape, tensor.dtype, quantizer, out))


@kernel
def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """`tensor` quantized, into `output` if given, the scales in the order that the quantizer wants.

    A noop flag of 1 leaves the contents of `output` unchanged, but not which copies it has; without `output`, those of the result are undefined.
    """
    skipped = noop is not None and noop.numel() and float(noop.reshape(-1)[0]) == 1.0
    source = plain(tensor)
    if quantizer is None or getattr(quantizer, "custom", False):
        return output if skipped else quantized(source, quantizer, output)
    with torch.no_grad():
        made = buffers(source.shape, source.dtype, quantizer, output)
        return in_order(made if skipped else fill(quantizer, source, made), quantizer)


def buffers(shape: torch.Size, dtype: torch.dtype, quantizer: Any, out: Any) -> Any:
    """`out` with the buffers for the quantizer's usages, or a new tensor of them."""
    return empty_quantized(quantizer, shape, dtype) if out is None else coerced(quantizer, out, shape, dtype)


def in_order(made: Any, quantizer: Any) -> Any:
    """`made` with NVFP4's scales in the order that the quantizer wants, if the kernel has not put them so (from release 2.17 on)."""
    if storage_kind(made) == "nvfp4" and swizzles(quantizer) and now().release >= (2, 17):
        swizzle_scales_for_gemm_(made)
    return made


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
    return [quantized(plain(tensor), quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


@kernel
def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Parts of the first dimension, each quantized by its own quantizer."""
    sizes = [int(size) for size in split_sections]
    parts = [part.contiguous() for part in torch.split(tensor.detach(), sizes)]
    known = all(one is not None and not getattr(one, "custom", False) for one in quantizer_list)
    if parts and not disable_bulk_allocation and known and all(kind_of(one) == "nvfp4" for one in quantizer_list):
        return _split_nvfp4(tensor.detach(), parts, quantizer_list)
    return [quantized(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


def _split_nvfp4(tensor: torch.Tensor, parts: Sequence[torch.Tensor], quantizers: Sequence[Any]) -> list[Any]:
    """The parts in NVFP4, whose scales all are in the order of the tensor cores or none: a kernel casts them together."""
    if tensor.numel() and cast_together(quantizers, parts):
        check_split(quantizers, tensor)
        refuse_approximations(quantizers[0], fused=fused_nvfp4((0, tensor.shape[-1])), since=(2, 12))
    tiles = now().release >= (2, 17) and all(
        swizzles(quantizer) and quantizer.with_rht and fused_nvfp4(part.shape, 128)
        for part, quantizer in zip(parts, quantizers, strict=True)
    )
    made = []
    with torch.no_grad():
        for part, quantizer in zip(parts, quantizers, strict=True):
            out = empty_quantized(quantizer, part.shape, part.dtype)
            if hasattr(out, "_with_gemm_swizzled_scales"):
                out._with_gemm_swizzled_scales = tiles
            made.append(fill(quantizer, part, out))
    return made


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
    return made if out is None else out.copy_(made.view(out.shape))


@kernel
def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The first two dimensions exchanged, contiguous."""
    made = tensor.detach().transpose(0, 1).contiguous()
    return made if out is None else out.copy_(made)
