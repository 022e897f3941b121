"""Grouped tensors: the operands of all experts in common buffers, quantized and dequantized together (from release 2.20 on).

Source: Transformer Engine's pytorch/csrc/extensions/cast.cpp and swizzle.cpp, and the checks of the kernels that they launch.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.numerics.scales import peaks_over
from mpbridge.te_cpu.casts import (
    current_scale,
    fill,
    nvfp4_amaxes,
    nvfp4_codes,
    nvfp4_columns,
    nvfp4_reduced,
    reduced,
    store,
)
from mpbridge.te_cpu.enums import torch_dtype
from mpbridge.te_cpu.grouped_buffers import TILE, Group, empty_grouped, is_one_tensor, members, new_grouped, part
from mpbridge.te_cpu.grouped_checks import (
    check_amaxes,
    check_dequantizable,
    check_quantizable,
    check_requantizable,
    check_reuse,
    require,
    two_dimensions,
)
from mpbridge.te_cpu.nvfp4_options import check
from mpbridge.te_cpu.played import kernel, now
from mpbridge.te_cpu.quantize import dequantize, in_order, quantized
from mpbridge.te_cpu.storages import empty_quantized, kind_of, rows_of
from mpbridge.te_cpu.swizzle import tiles


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
    shape, sizes = two_dimensions(tensor), (first_dims, last_dims, tensor_offsets)
    if output is None:
        output = empty_grouped(quantizer, shape, tensor.dtype, num_tensors, sizes)
    else:
        check_reuse(output, quantizer, shape, num_tensors, sizes)
    if tensor.numel():
        check_quantizable(quantizer, shape, num_tensors, sizes)
        # the kernels of NVFP4 are not given the flag
        if noop_flag is None or float(noop_flag.reshape(-1)[0]) != 1.0 or kind_of(quantizer) == "nvfp4":
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
    shape, sizes = two_dimensions(tensor), (first_dims, last_dims, tensor_offsets)
    check_amaxes("nvfp4_group_quantize_with_amax", quantizer, rowwise_amax, columnwise_amax, num_tensors)
    out = empty_grouped(quantizer, shape, tensor.dtype, num_tensors, sizes)
    if out.amax is not None:
        out.amax = rowwise_amax
    if out.columnwise_amax is not None:
        out.columnwise_amax = columnwise_amax
    nvfp4_reduced(quantizer, out.amax, out.columnwise_amax)
    if tensor.numel():
        check_quantizable(quantizer, shape, num_tensors, sizes)
        _fill(quantizer, tensor, out, amaxes_known=True)
    return out


@kernel
def nvfp4_quantize_with_amax(
    tensor: torch.Tensor, quantizer: Any, rowwise_amax: torch.Tensor, columnwise_amax: torch.Tensor
) -> Any:
    """`tensor` quantized to NVFP4 with amaxes that are known: fp32 [1] each; the result holds these very tensors."""
    require("nvfp4_quantize_with_amax")
    check_amaxes("nvfp4_quantize_with_amax", quantizer, rowwise_amax, columnwise_amax, 1)
    out = empty_quantized(quantizer, tensor.shape, tensor.dtype)
    if out._amax_rowwise is not None:
        out._amax_rowwise = rowwise_amax
    if out._amax_columnwise is not None:
        out._amax_columnwise = columnwise_amax
    nvfp4_reduced(quantizer, out._amax_rowwise, out._amax_columnwise)
    if tensor.numel():
        x = tensor.detach().reshape(rows_of(tensor.shape), tensor.shape[-1])
        check(quantizer, x)
        nvfp4_codes(quantizer, x, nvfp4_columns(quantizer, x), out)
    return in_order(out, quantizer)


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
    columns = two_dimensions(tensor)[1]
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
    check_dequantizable(input, (rows, columns))
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
    rows, columns = tensor.scale_inv, tensor.columnwise_scale_inv
    row = rowwise and rows is not None and rows.numel() > 0
    column = columnwise and columns is not None and columns.numel() > 0
    if row or column:
        uniform, parts = tensor.first_dims is None and tensor.last_dims is None, members(tensor)
        tensor.scale_inv = _in_tile_order(parts, "rowwise", rows, uniform) if row else None
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
    return made.view(-1, -(-along // TILE) * 4) if uniform else made


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
    check_requantizable(grouped_x, quantizer, columnwise, return_dequantized)
    if grouped_x._with_gemm_swizzled_scales:
        return None
    rows, columns = (int(size) for size in grouped_x.logical_shape)
    if rows % TILE or columns % TILE:
        raise RuntimeError(
            f"Requantizing a grouped input requires dims that are multiples of {TILE}, but got ({rows}, {columns})."
        )
    values = None
    if columnwise or return_dequantized:
        values = group_dequantize(grouped_x, otype).rowwise_data.view(rows, columns)
    grouped_swizzle_for_gemm(grouped_x, True, False)
    grouped_x.scale_inv = grouped_x.scale_inv.reshape(-1)
    if columnwise and values is not None:
        usable = tensor_offsets
        if usable is not None and (usable.dtype is not torch.int64 or usable.numel() != num_tensors + 1):
            usable = None
        fused = _requantized_by_one_kernel(quantizer, otype, rows, first_dims, usable)
        # the one kernel leaves the quantizer as it is; the chain of kernels switches its row copy off
        columns_only = quantizer.copy() if fused else quantizer
        columns_only.set_usage(rowwise=False, columnwise=True)
        if fused:
            columns_only.optimize_for_gemm = True
            columns_only.with_2d_quantization = False  # the one kernel is not told
            first_dims = first_dims if usable is None else usable.diff() // columns  # offsets alone are enough for it
        made = group_quantize(values, columns_only, num_tensors, first_dims, None, tensor_offsets)
        grouped_x.columnwise_data, grouped_x.columnwise_scale_inv = made.columnwise_data, made.columnwise_scale_inv
        grouped_x._with_gemm_swizzled_scales = grouped_x._with_gemm_swizzled_scales or fused
    return values if return_dequantized else None


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
        for into, name in (
            (out.rowwise_data, "rowwise_data"), (out.columnwise_data, "columnwise_data"),
            (out.scale_inv, "rowwise_scale_inv"), (out.columnwise_scale_inv, "columnwise_scale_inv"),
        ):  # fmt: skip
            if into is not None:
                into.copy_(getattr(whole, f"_{name}").reshape(-1))
        return
    groups = [(member, part(source, start, shape)) for member, start, shape in members(out)]
    kind = kind_of(quantizer)
    if kind == "current":
        _fill_current(quantizer, groups, out)
        return
    for member, x in groups:
        if x.numel() == 0:
            continue
        if kind == "nvfp4":  # the grouped kernel does not reduce the amaxes over ranks
            turned_x = nvfp4_columns(quantizer, x)
            if not amaxes_known:
                nvfp4_amaxes(quantizer, x, turned_x, member)
            nvfp4_codes(quantizer, x, turned_x, member)
        else:
            fill(quantizer, x, member)


def _fill_current(quantizer: Any, groups: Sequence[tuple[Any, torch.Tensor]], out: Any) -> None:
    peaks = [peaks_over(x).reshape(1) if x.numel() else torch.zeros(1) for _, x in groups]
    out.amax.copy_(reduced(quantizer, torch.cat(peaks)))
    out.scale.copy_(current_scale(quantizer, out.amax))
    for (member, x), scale in zip(groups, out.scale, strict=True):
        if x.numel():
            store(quantizer, x, scale, member)
        else:
            member._scale_inv.copy_(1.0 / scale)
