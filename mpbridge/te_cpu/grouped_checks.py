"""What the kernels of grouped tensors refuse, in the extension's words.

Source: Transformer Engine's pytorch/csrc/extensions/cast.cpp, common/cast (`group_*`) and common/hadamard_transform (`graph_safe_group_*`).
"""

from typing import Any

import torch

from mpbridge.te_cpu.grouped_buffers import TILE, Sizes
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.refusals import refusal
from mpbridge.te_cpu.storages import kind_of

_SINCE = (2, 20)
"""The first release whose grouped tensors are laid out as here."""
_ALIGNED = 16
"""Bytes to which the tensor memory accelerator's rows are aligned (TMA_GMEM_ALIGNMENT)."""
_MOST = 64
"""Tensors in a group, where each has a descriptor or an amax of its own (MAX_SUPPORTED_TENSOR_DESCRIPTORS, kMaxTensorsPerKernel)."""


def require(name: str) -> None:
    """Raises Refused in releases whose grouped tensors are laid out in another way."""
    if now().release < _SINCE:
        refusal(name)()


def two_dimensions(tensor: torch.Tensor) -> tuple[int, int]:
    """[rows, columns]. Raises RuntimeError for a tensor of other dimensions."""
    if tensor.dim() != 2:
        raise RuntimeError("Tensor must be 2D")
    return int(tensor.shape[0]), int(tensor.shape[1])


def check_quantizable(quantizer: Any, shape: tuple[int, int], num_tensors: int, sizes: Sizes) -> None:
    """Raises RuntimeError for what the kernel of the quantizer's format refuses."""
    kind, (first_dims, last_dims, _) = kind_of(quantizer), sizes
    if kind == "delayed":
        raise RuntimeError(
            "group_quantize: only supports MXFP8, NVFP4, Float8CurrentScalingQuantizer, or Float8Blockwise quantizer."
        )
    if kind in ("nvfp4", "block") and last_dims is not None:
        raise RuntimeError(f"group_quantize: varying last dim is not supported with {type(quantizer).__name__}.")
    if kind == "block" and not _on_hopper():
        raise RuntimeError("Grouped FP8 block-scaling quantize is only supported on Hopper (SM90-SM99)")
    if kind == "block" and shape[1] % _ALIGNED:
        raise RuntimeError(f"Last dim must be a multiple of TMA_GMEM_ALIGNMENT ({_ALIGNED}) for FP8 alignment.")
    if kind == "mxfp8":
        _check_mxfp8(shape, num_tensors, first_dims, last_dims)
    if kind == "nvfp4":
        _check_nvfp4(quantizer, shape, num_tensors)
    if kind == "current" or (kind == "mxfp8" and first_dims is None and not quantizer.optimize_for_gemm):
        return  # one scale per group, or the scales of one tensor
    rows = (
        first_dims.tolist()
        if first_dims is not None
        else [shape[0] if last_dims is not None else shape[0] // num_tensors]
    )
    for count in rows:
        if count % TILE:  # else its scales would not begin on a tile's boundary
            raise RuntimeError(f"First dimension of each tensor in a group must be divisible by {TILE}, found {count}.")


def _check_mxfp8(
    shape: tuple[int, int], num_tensors: int, first_dims: torch.Tensor | None, last_dims: torch.Tensor | None
) -> None:
    if now().capability < (10, 0):
        raise RuntimeError(
            "MXFP8 grouped quantization needs compute capability 10.0: its kernel is empty on older GPUs."
        )
    if shape[0] % TILE and (first_dims is None or last_dims is None):
        raise RuntimeError(f"First logical dimension of a grouped tensor must be divisible by {TILE}.")
    if last_dims is None:
        return
    _check_number(num_tensors)
    for count in last_dims.tolist():
        if count % TILE:
            raise RuntimeError(
                "For varying last dimensions support, the last dimension of each tensor in a group must be divisible "
                f"by {TILE}, found {count}."
            )


def _check_number(num_tensors: int) -> None:
    if num_tensors > _MOST:
        raise RuntimeError(
            f"Number of tensors in a group is larger than the MAX number of supported descriptors ({_MOST})."
        )


def check_dequantizable(grouped: Any, shape: tuple[int, int]) -> None:
    """Raises RuntimeError for formats, machines and layouts that the kernels refuse."""
    kind = kind_of(grouped.quantizer)
    if kind not in ("mxfp8", "block"):
        raise RuntimeError(f"Grouped dequantize not implemented for {type(grouped.quantizer).__name__}.")
    if kind == "mxfp8" and now().capability < (10, 0):
        raise RuntimeError("MXFP8 Grouped Dequantization is NOT supported by architectures < 10.0")
    if kind == "block" and not _on_hopper():
        raise RuntimeError("Grouped FP8 block-scaling dequantize is only supported on Hopper (SM90-SM99)")
    if (grouped.rowwise_data is None) == (grouped.columnwise_data is None):
        raise RuntimeError("Grouped dequantize takes either rowwise or columnwise data, and not both simultaneously.")
    if grouped._with_gemm_swizzled_scales:
        raise RuntimeError("Input must have scales in compact format.")
    if kind == "block" and grouped.last_dims is not None:
        raise RuntimeError("Grouped FP8 block-scaling dequantize supports no varying last dimension.")
    if kind == "block" and shape[1] % TILE:
        raise RuntimeError(f"Last dim must be a multiple of {TILE} for FP8 block-scaling dequantize (got {shape[1]}).")
    if kind == "mxfp8" and grouped.last_dims is not None:
        _check_number(grouped.num_tensors)
        if shape[1] % TILE:
            raise RuntimeError(f"Last dimension of a grouped tensor should be divisible by {TILE}.")


def _on_hopper() -> bool:
    return (9, 0) <= now().capability < (10, 0)


def _check_nvfp4(quantizer: Any, shape: tuple[int, int], num_tensors: int) -> None:
    if quantizer.with_2d_quantization:
        raise RuntimeError("2D scaling grouped quant kernel is not ready yet")
    if quantizer.nvfp4_use_4over6:
        raise RuntimeError("NVFP4 4over6 quantization is not supported for grouped quantization.")
    if not quantizer.with_rht:
        raise RuntimeError("graph safe grouped quant kernel for non-RHT path is not ready yet")
    if not quantizer.with_post_rht_amax:
        raise RuntimeError("grouped NVFP4 RHT quantization expects post-RHT amax buffers.")
    for size, which in zip(shape, ("First", "Last"), strict=True):
        if size % TILE:
            raise RuntimeError(f"{which} dimension of a grouped tensor should be divisible by {TILE}.")
    if num_tensors > _MOST:
        raise RuntimeError(f"Number of tensors should be less than or equal to {_MOST}")


def check_amaxes(name: str, quantizer: Any, rowwise: Any, columnwise: Any, number: int) -> None:
    """Raises RuntimeError for another format, and for amaxes that are not one fp32 number per tensor."""
    if kind_of(quantizer) != "nvfp4":
        raise RuntimeError(f"{name} only supports NVFP4 quantizers.")
    for amax, which in ((rowwise, "Rowwise"), (columnwise, "Columnwise")):
        if amax is None or amax.dtype is not torch.float32 or amax.numel() != number:
            raise RuntimeError(f"{which} amax of {name} must be float32 with {number} value(s).")


def check_reuse(output: Any, quantizer: Any, shape: tuple[int, int], num_tensors: int, sizes: Sizes) -> None:
    """Raises RuntimeError for an output that does not have the layout that would be made."""
    if any(size is not None for size in sizes):
        raise RuntimeError("group_quantize: output reuse currently requires uniform tensor shapes.")
    if output.num_tensors != num_tensors:
        raise RuntimeError("group_quantize: output has a different number of tensors.")
    if tuple(output.logical_shape) != shape:
        raise RuntimeError("group_quantize: output has an incompatible logical shape.")
    if output.quantizer is None:
        raise RuntimeError("group_quantize: output must have quantized storage.")
    if output.quantizer is not quantizer:
        raise RuntimeError("group_quantize: output must have been created by the same quantizer.")


def check_requantizable(x: Any, quantizer: Any, columnwise: bool, return_dequantized: bool) -> None:
    """Raises RuntimeError for a tensor of another format, or whose copies cannot be derived."""
    if x.rowwise_data is None or x.scale_inv is None:
        raise RuntimeError("Grouped input has no rowwise data and scales for the GEMM to consume.")
    if x.quantizer is None:
        raise RuntimeError("Grouped input has no quantizer.")
    if type(x.quantizer) is not type(quantizer):
        raise RuntimeError("Grouped input and the op disagree on quantization format.")
    if x.quantizer.dtype != quantizer.dtype:
        raise RuntimeError("Grouped input and the quantizer disagree on the FP8 dtype.")
    complete = x.columnwise_data is not None and x.columnwise_scale_inv is not None
    if x._with_gemm_swizzled_scales:
        if columnwise and not complete:
            raise RuntimeError(
                "Grouped input has swizzled scales but no columnwise data for the wgrad GEMM. It cannot be rebuilt, "
                "because dequantization requires scales in compact format."
            )
        if return_dequantized:
            raise RuntimeError(
                "Cannot return a dequantized tensor for an already-swizzled grouped input: "
                "dequantization requires scales in compact format."
            )
        return
    if complete:
        raise RuntimeError(
            "Grouped input already has columnwise data but unswizzled scales; requantizing from it is not supported."
        )
    if kind_of(quantizer) != "mxfp8":
        raise RuntimeError("Requantizing a grouped input is only supported for MXFP8.")
