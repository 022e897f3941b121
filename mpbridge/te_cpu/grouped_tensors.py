"""Grouped tensors: the operands of all experts in common buffers, quantized and dequantized together (from release 2.20 on).

Source: Transformer Engine's pytorch/csrc/extensions/cast.cpp and swizzle.cpp, and the checks of the kernels that they launch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.emulation.scales import peaks_over
from mpbridge.te_cpu.casts import (
    current_reduced,
    current_scale,
    fill,
    nvfp4_amaxes,
    nvfp4_codes,
    nvfp4_columns,
    nvfp4_reduced,
    store,
)
from mpbridge.te_cpu.enums import torch_dtype
from mpbridge.te_cpu.grouped import tiles
from mpbridge.te_cpu.grouped_buffers import Group, Sizes, empty_grouped, is_one_tensor, members, new_grouped, part
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.quantize import dequantize, quantized
from mpbridge.te_cpu.refusals import refusal
from mpbridge.te_cpu.registry import kernel
from mpbridge.te_cpu.storages import empty_quantized, kind_of, rows_of

_SINCE = (2, 20)
"""The first release whose grouped tensors are laid out as here."""
_TILE = 128
"""Rows of a group must be a multiple, so that its scales begin on a tile's boundary."""
_MOST = 64
"""Tensors in a group (MAX_SUPPORTED_TENSOR_DESCRIPTORS)."""


@kernel
def group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
    noop_flag: torch.Tensor | None = None,
    output: Any = None,
) -> Any:
    """[rows, columns] quantized group by group, into `output` if given; a noop flag of 1 leaves it unchanged. Returns a GroupedTensor.

    first_dims, last_dims: int64 [num_tensors], each group's rows and columns; None if equal. Raises RuntimeError for sizes, formats and
    options that the kernels refuse.
    """
    require("group_quantize")
    shape = _two_dimensions(tensor)
    if output is None:
        output = empty_grouped(quantizer, shape, tensor.dtype, num_tensors, (first_dims, last_dims, tensor_offsets))
    else:
        _check_reuse(output, quantizer, shape, num_tensors, (first_dims, last_dims, tensor_offsets))
    if tensor.numel() and not (noop_flag is not None and float(noop_flag.reshape(-1)[0]) == 1.0):
        _check(quantizer, shape, num_tensors, last_dims)
        _fill(quantizer, tensor, output)
    return output


@kernel
def nvfp4_group_quantize_with_amax(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    rowwise_amax: torch.Tensor | None = None,
    columnwise_amax: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
) -> Any:
    """`group_quantize` to NVFP4 with amaxes that are known: fp32 [num_tensors] each; the result holds these very tensors."""
    require("nvfp4_group_quantize_with_amax")
    shape = _two_dimensions(tensor)
    _check_amaxes("nvfp4_group_quantize_with_amax", quantizer, rowwise_amax, columnwise_amax, num_tensors)
    out = empty_grouped(quantizer, shape, tensor.dtype, num_tensors, (first_dims, last_dims, tensor_offsets))
    if out.amax is not None:
        out.amax = rowwise_amax
    if out.columnwise_amax is not None:
        out.columnwise_amax = columnwise_amax
    nvfp4_reduced(quantizer, out.amax, out.columnwise_amax)
    if tensor.numel():
        _check(quantizer, shape, num_tensors, last_dims)
        _fill(quantizer, tensor, out, amaxes_known=True)
    return out


@kernel
def nvfp4_quantize_with_amax(
    tensor: torch.Tensor, quantizer: Any, rowwise_amax: torch.Tensor, columnwise_amax: torch.Tensor
) -> Any:
    """`tensor` quantized to NVFP4 with amaxes that are known: fp32 [1] each; the result holds these very tensors."""
    require("nvfp4_quantize_with_amax")
    _check_amaxes("nvfp4_quantize_with_amax", quantizer, rowwise_amax, columnwise_amax, 1)
    out = empty_quantized(quantizer, tensor.shape, tensor.dtype)
    if out._amax_rowwise is not None:
        out._amax_rowwise = rowwise_amax
    if out._amax_columnwise is not None:
        out._amax_columnwise = columnwise_amax
    nvfp4_reduced(quantizer, out._amax_rowwise, out._amax_columnwise)
    if tensor.numel():
        x = tensor.detach().reshape(rows_of(tensor.shape), tensor.shape[-1])
        nvfp4_codes(quantizer, x, nvfp4_columns(quantizer, x), out)
    return out


@kernel
def bgrad_group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """(`group_quantize` to MXFP8 or blockwise FP8, sums over each group's rows: [num_tensors, columns] in the tensor's dtype)."""
    require("bgrad_group_quantize")
    columns = _two_dimensions(tensor)[1]
    if last_dims is not None:
        raise RuntimeError("bgrad_group_quantize: varying last dim is not supported")
    if kind_of(quantizer) not in ("mxfp8", "block"):
        raise RuntimeError("bgrad_group_quantize: only MXFP8 and FP8 block-scaling quantizers are supported.")
    made = group_quantize(tensor, quantizer, num_tensors, first_dims, None, tensor_offsets)
    total = torch.zeros(num_tensors, columns, dtype=tensor.dtype, device=tensor.device)
    if tensor.numel():
        for row, (_, start, shape) in zip(total, members(made), strict=True):
            row.copy_(part(tensor, start, shape).float().sum(0))
    return made, total


@kernel
def group_dequantize(input: Any, otype: Any) -> Any:
    """The values of a grouped tensor in a GroupedTensor without a quantizer. Raises RuntimeError for formats that the kernel refuses."""
    require("group_dequantize")
    dtype = torch_dtype(otype)
    rows, columns = (int(size) for size in input.logical_shape)
    # the extension allocates a column copy as well, and does not fill it
    data, unused = (torch.zeros(rows * columns, dtype=dtype) for _ in range(2))
    made = new_grouped(
        False, (rows, columns), dtype, input.num_tensors, None, (input.first_dims, input.last_dims, input.tensor_offsets),
        data=data, columnwise_data=unused,
    )  # fmt: skip
    if not rows * columns:
        return made
    kind = kind_of(input.quantizer)
    if kind not in ("mxfp8", "block"):
        raise RuntimeError(f"Grouped dequantize not implemented for {type(input.quantizer).__name__}.")
    if kind == "mxfp8" and (input.rowwise_data is None) == (input.columnwise_data is None):
        raise RuntimeError("Grouped MXFP8 dequantize takes either rowwise or columnwise data.")
    if input._with_gemm_swizzled_scales:
        raise RuntimeError("Input must have scales in compact format.")
    for member, start, shape in members(input):
        if math.prod(shape):
            part(data, start, shape).copy_(dequantize(member, otype))
    return made


@kernel
def grouped_swizzle_for_gemm(tensor: Any, rowwise: bool, columnwise: bool) -> None:
    """Puts an MXFP8 grouped tensor's scales in tile order, once. The scales of a copy that is not asked for are dropped, as by the extension."""
    require("grouped_swizzle_for_gemm")
    quantizer = tensor.quantizer
    if quantizer is None or kind_of(quantizer) != "mxfp8" or tensor._with_gemm_swizzled_scales:
        return
    row = rowwise and tensor.scale_inv is not None and tensor.scale_inv.numel() > 0
    column = columnwise and tensor.columnwise_scale_inv is not None and tensor.columnwise_scale_inv.numel() > 0
    if not (row or column):
        return
    uniform = tensor.first_dims is None and tensor.last_dims is None
    parts = members(tensor)
    tensor.scale_inv = _in_tile_order(parts, "rowwise", tensor.scale_inv, uniform) if row else None
    columns = tensor.columnwise_scale_inv
    tensor.columnwise_scale_inv = _in_tile_order(parts, "columnwise", columns, uniform) if column else None
    tensor._with_gemm_swizzled_scales = True


def _in_tile_order(parts: Sequence[Group], name: str, scales: torch.Tensor, uniform: bool) -> torch.Tensor:
    """The scales of one copy of all groups, each group's in tile order; in two dimensions if the groups have one shape, as by the extension."""
    padded = sum(getattr(member, f"_{name}_scale_inv").numel() for member, _, _ in parts)
    made, at = scales.new_zeros(padded if uniform else scales.numel()), 0
    for member, _, shape in parts:
        stored = getattr(member, f"_{name}_scale_inv")
        if math.prod(shape):
            made[at : at + stored.numel()] = tiles(stored, f"mxfp8_{name}", *shape).reshape(-1)
        at += stored.numel()
    _, _, shape = parts[0]
    along = shape[1] if name == "rowwise" else shape[0]
    return made.view(-1, -(-along // _TILE) * 4) if uniform else made


@kernel
def group_requantize_inplace(
    grouped_x: Any,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    otype: Any,
    tensor_offsets: torch.Tensor | None = None,
    return_dequantized: bool = False,
) -> torch.Tensor | None:
    """Makes an MXFP8 tensor that arrived with its row copy alone ready for GEMMs: row scales in tile order, and a column copy of its values.

    The column copy is made if the quantizer uses one. Returns the values [rows, columns] if asked for. Raises RuntimeError for a tensor of
    another format, or whose copies cannot be derived.
    """
    require("group_requantize_inplace")
    columnwise = bool(quantizer.columnwise_usage)
    _check_requantizable(grouped_x, quantizer, columnwise, return_dequantized)
    if grouped_x._with_gemm_swizzled_scales:
        return None
    rows, columns = (int(size) for size in grouped_x.logical_shape)
    if rows % _TILE or columns % _TILE:
        raise RuntimeError(
            f"Requantizing a grouped input requires dims that are multiples of {_TILE}, but got ({rows}, {columns})."
        )
    values = None
    if columnwise or return_dequantized:
        values = group_dequantize(grouped_x, otype).rowwise_data.view(rows, columns)
    grouped_swizzle_for_gemm(grouped_x, True, False)
    grouped_x.scale_inv = grouped_x.scale_inv.reshape(-1)
    if columnwise and values is not None:
        fused = _requantized_by_one_kernel(quantizer, otype, rows, first_dims, tensor_offsets)
        # the one kernel leaves the quantizer as it is; the chain of kernels switches its row copy off
        columns_only = quantizer.copy() if fused else quantizer
        columns_only.set_usage(rowwise=False, columnwise=True)
        columns_only.optimize_for_gemm = fused or quantizer.optimize_for_gemm
        made = group_quantize(values, columns_only, num_tensors, first_dims, None, tensor_offsets)
        grouped_x.columnwise_data, grouped_x.columnwise_scale_inv = made.columnwise_data, made.columnwise_scale_inv
        grouped_x._with_gemm_swizzled_scales = grouped_x._with_gemm_swizzled_scales or fused
    return values if return_dequantized else None


# --- checks --------------------------------------------------------------------------------------------------------------------------------
def require(name: str) -> None:
    """Raises Refused in releases whose grouped tensors are laid out in another way."""
    if now().release < _SINCE:
        refusal(name)()


def _two_dimensions(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise RuntimeError("Tensor must be 2D")
    return int(tensor.shape[0]), int(tensor.shape[1])


def _check(quantizer: Any, shape: tuple[int, int], num_tensors: int, last_dims: torch.Tensor | None) -> None:
    """What each format's kernel requires of the whole."""
    kind = kind_of(quantizer)
    if kind == "delayed":
        raise RuntimeError(
            "group_quantize: only supports MXFP8, NVFP4, Float8CurrentScalingQuantizer, or Float8Blockwise quantizer."
        )
    if num_tensors > _MOST:
        raise RuntimeError(
            f"Number of tensors in a group is larger than the MAX number of supported descriptors ({_MOST})."
        )
    if kind in ("nvfp4", "block") and last_dims is not None:
        raise RuntimeError(f"group_quantize: varying last dim is not supported with {type(quantizer).__name__}.")
    if kind == "block" and not (9, 0) <= now().capability < (10, 0):
        raise RuntimeError("Grouped FP8 block-scaling quantize is only supported on Hopper (SM90-SM99)")
    if kind == "nvfp4":
        _check_nvfp4(quantizer, shape)


def _check_nvfp4(quantizer: Any, shape: tuple[int, int]) -> None:
    if quantizer.with_2d_quantization:
        raise RuntimeError("2D scaling grouped quant kernel is not ready yet")
    if quantizer.nvfp4_use_4over6:
        raise RuntimeError("NVFP4 4over6 quantization is not supported for grouped quantization.")
    if not quantizer.with_rht:
        raise RuntimeError("graph safe grouped quant kernel for non-RHT path is not ready yet")
    if not quantizer.with_post_rht_amax:
        raise RuntimeError("grouped NVFP4 RHT quantization expects post-RHT amax buffers.")
    for size, which in zip(shape, ("First", "Last"), strict=True):
        if size % _TILE:
            raise RuntimeError(f"{which} dimension of a grouped tensor should be divisible by {_TILE}.")


def _check_amaxes(name: str, quantizer: Any, rowwise: Any, columnwise: Any, number: int) -> None:
    if kind_of(quantizer) != "nvfp4":
        raise RuntimeError(f"{name} only supports NVFP4 quantizers.")
    for amax, which in ((rowwise, "Rowwise"), (columnwise, "Columnwise")):
        if amax is None or amax.dtype is not torch.float32 or amax.numel() != number:
            raise RuntimeError(f"{which} amax of {name} must be float32 with {number} value(s).")


def _check_reuse(output: Any, quantizer: Any, shape: tuple[int, int], num_tensors: int, sizes: Sizes) -> None:
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


def _check_requantizable(x: Any, quantizer: Any, columnwise: bool, return_dequantized: bool) -> None:
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


def _requantized_by_one_kernel(
    quantizer: Any, otype: Any, rows: int, first_dims: torch.Tensor | None, tensor_offsets: torch.Tensor | None
) -> bool:
    """Whether the extension would use its fused kernel; its values are those of the chain of kernels."""
    return (
        os.environ.get("NVTE_FUSED_GROUP_REQUANTIZE", "1") != "0"
        and (first_dims is not None or tensor_offsets is not None)
        and rows > 0
        and torch_dtype(otype) is torch.bfloat16
        and int(quantizer.dtype) == 7  # E4M3
        and now().capability >= (10, 0)
    )


# --- every group's part -------------------------------------------------------------------------------------------------------------------
def _fill(quantizer: Any, tensor: torch.Tensor, out: Any, *, amaxes_known: bool = False) -> None:
    """Every group quantized into its part of the buffers; amaxes_known: NVFP4's are in `out` already."""
    source = tensor.detach()
    if is_one_tensor(out):
        whole = quantized(source, quantizer)
        for copy, name in ((out.rowwise_data, "rowwise_data"), (out.columnwise_data, "columnwise_data")):
            if copy is not None:
                copy.copy_(getattr(whole, f"_{name}").reshape(-1))
        for scales, name in ((out.scale_inv, "rowwise"), (out.columnwise_scale_inv, "columnwise")):
            if scales is not None:
                scales.copy_(getattr(whole, f"_{name}_scale_inv").reshape(-1))
        return
    groups = [(member, part(source, start, shape)) for member, start, shape in members(out)]
    kind = kind_of(quantizer)
    if kind == "current":
        _fill_current(quantizer, groups, out)
        return
    for member, x in groups:
        if x.numel() == 0:
            continue
        if x.shape[0] % _TILE:
            raise RuntimeError(f"Rows of every group must be a multiple of {_TILE}, found {x.shape[0]}.")
        if kind == "nvfp4":  # the grouped kernel does not reduce the amaxes over ranks
            turned_x = nvfp4_columns(quantizer, x)
            if not amaxes_known:
                nvfp4_amaxes(quantizer, x, turned_x, member)
            nvfp4_codes(quantizer, x, turned_x, member)
        else:
            fill(quantizer, x, member)


def _fill_current(quantizer: Any, groups: Sequence[tuple[Any, torch.Tensor]], out: Any) -> None:
    peaks = [peaks_over(x).reshape(1) if x.numel() else torch.zeros(1) for _, x in groups]
    out.amax.copy_(current_reduced(quantizer, torch.cat(peaks)))
    out.scale.copy_(current_scale(quantizer, out.amax))
    for (member, x), scale in zip(groups, out.scale, strict=True):
        if x.numel():
            store(quantizer, x, scale, member)
        else:
            member._scale_inv.copy_(1.0 / scale)
