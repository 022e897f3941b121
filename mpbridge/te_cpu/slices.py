"""Delayed scaling's update, the casts of a distributed optimizer's slices of weights, and NVFP4's column copies made from row copies."""

from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.common.formats import E4M3
from mpbridge.numerics.codes import encode_e2m1, encode_fp8, pack_e2m1
from mpbridge.numerics.kernels import amax_of
from mpbridge.numerics.scales import magnitude, mxfp8_factors, nvfp4_block, nvfp4_global, updated
from mpbridge.te_cpu.casts import spread, square_peaks
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.played import kernel, now


@kernel
def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Writes the amax of `input`."""
    amax.copy_(amax_of(input.detach()).reshape(amax.shape))


@kernel
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Rolls histories and updates scales, in place; a tensor whose amax is 0 keeps both. Source: common/recipe/delayed_scaling.cu."""
    largest, at = number_format(fp8_dtype).largest, 0
    for history, scale in zip(amax_histories, scales, strict=True):
        count = history.shape[1]
        reduced = amax_reduction_buffer[at : at + count]
        at += count
        last = torch.where(reduced != 0, reduced, history[0])
        rolled, renewed = updated(history, scale, last, amax_compute_algo, largest, int(margin))
        with torch.inference_mode():  # either may be an inference tensor, which a compiled kernel can write to
            history.copy_(rolled)
            scale.copy_(renewed)


# --- slices of a weight: the optimizer's shard need not begin at a block's edge -------------------------------------------------------------
def window(part: torch.Tensor, rows: int, columns: int, start: int) -> torch.Tensor:
    """A [rows, columns] matrix that is zero outside of the slice, in the slice's dtype."""
    whole = torch.zeros(rows * columns, dtype=part.dtype)
    whole[start : start + part.numel()] = part.detach().reshape(-1)
    return whole.view(rows, columns)


def piece(factors: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """The factors of a slice's elements, from those of its whole matrix."""
    return factors.reshape(-1)[start : start + count]


@kernel
def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Amaxes of square blocks over a slice of an [h, w] weight."""
    found = square_peaks(window(tensor, h, w, start_offset), block_len)
    amax[: found.shape[0], : found.shape[1]].copy_(found)


@kernel
def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: Any,
) -> None:
    """FP8 codes of a slice of an [h, w] weight under the scales of its square blocks."""
    factors = piece(spread(scale, block_len, (h, w)), start_offset, inp.numel())
    codes = encode_fp8(inp.detach().reshape(-1).float() * factors, number_format(out_dtype))
    out.copy_(codes.view(out.dtype).view(out.shape))


@kernel
def mxfp8_scaling_compute_partial_amax(
    input: torch.Tensor, amax_rowwise: torch.Tensor, amax_colwise: torch.Tensor, rows: int, cols: int, start_offset: int
) -> None:
    """Amaxes of 1x32 and 32x1 blocks over a slice of a [rows, cols] weight."""
    whole = magnitude(window(input, rows, cols, start_offset))
    amax_rowwise[:rows, : cols // 32].copy_(whole.view(rows, cols // 32, 32).amax(-1))
    amax_colwise[: rows // 32, :cols].copy_(whole.view(rows // 32, 32, cols).amax(1))


@kernel
def mxfp8_scaling_partial_cast(
    input: torch.Tensor,
    output_rowwise: torch.Tensor,
    output_colwise: torch.Tensor,
    scale_inv_rowwise: torch.Tensor,
    scale_inv_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """E4M3 codes of both copies of a slice of a [rows, cols] weight with the given E8M0 scale bytes."""
    part, count = input.detach().reshape(-1).float(), input.numel()
    by_row, _ = mxfp8_factors(scale_inv_rowwise[:rows, : cols // 32].to(torch.int32), now().rules)
    by_column, _ = mxfp8_factors(scale_inv_colwise[: rows // 32, :cols].to(torch.int32), now().rules)
    for out, factors in (
        (output_rowwise, by_row.repeat_interleave(32, 1)),
        (output_colwise, by_column.repeat_interleave(32, 0)),
    ):
        codes = encode_fp8(part * piece(factors, start_offset, count), E4M3)
        out.copy_(codes.view(out.shape))


_SIDE = 16


@kernel
def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list: Sequence[torch.Tensor | None],
    partial_amax_list: Sequence[torch.Tensor],
    global_amax_list: Sequence[torch.Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int = _SIDE,
) -> None:
    """Amaxes of the blocks and of the whole of every slice."""
    rows = zip(master_weight_list, partial_amax_list, global_amax_list, h_list, w_list, start_offset_list, strict=True)
    for part, partial, overall, height, width, start in rows:
        if part is None or part.numel() == 0:
            continue
        found = square_peaks(window(part, height, width, start), block_len)
        partial[: found.shape[0], : found.shape[1]].copy_(found)
        overall.copy_(torch.fmax(overall, amax_of(part.detach()).reshape(overall.shape)))


@kernel
def nvfp4_compute_global_scale(global_amax: torch.Tensor, global_scale: torch.Tensor) -> None:
    """448 * 6 / amax."""
    global_scale.copy_(nvfp4_global(global_amax.float()).reshape(global_scale.shape))


@kernel
def nvfp4_multi_tensor_fused_scale(
    block_amax_list: Sequence[torch.Tensor],
    global_amax_list: Sequence[torch.Tensor],
    per_block_scale_list: Sequence[torch.Tensor],
    target_scale_list: Sequence[torch.Tensor],
    target_amax_list: Sequence[torch.Tensor],
    tile_rows_list: Sequence[int],
    tile_cols_list: Sequence[int],
    rows_padded_list: Sequence[int],
    block_len: int = _SIDE,
) -> None:
    """For every weight: block scales (E4M3 values in FP32), their bytes in its row copy (one row of them per row of the weight), and its amax."""
    tensors = zip(
        block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list, strict=True
    )
    sizes = zip(tile_rows_list, tile_cols_list, rows_padded_list, strict=True)
    for (peaks, overall, scale, target, amax), (rows, columns, padded) in zip(tensors, sizes, strict=True):
        _, found = nvfp4_block(peaks.float(), nvfp4_global(overall.float().reshape(())), now().rules)
        scale.copy_(found.reshape(scale.shape))
        codes = encode_fp8(scale.float().clone()[:rows, :columns], E4M3).repeat_interleave(block_len, 0)[:padded]
        target.zero_()
        target[: len(codes), :columns].copy_(codes.view(target.dtype))
        amax.copy_(overall.reshape(amax.shape))


@kernel
def nvfp4_multi_tensor_2d_partial_cast(
    inp_list: Sequence[torch.Tensor],
    out_list: Sequence[torch.Tensor],
    scale_list: Sequence[torch.Tensor],
    global_scale_list: Sequence[torch.Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int = _SIDE,
) -> None:
    """Packed codes of every slice with its weight's block scales. A slice may begin or end in the middle of a byte."""
    tensors = zip(inp_list, out_list, scale_list, global_scale_list, strict=True)
    sizes = zip(h_list, w_list, start_offset_list, strict=True)
    for (part, out, scale, overall), (height, width, start) in zip(tensors, sizes, strict=True):
        multiplier = 1.0 / (scale.float() * (1.0 / overall.float().reshape(())))
        factors = spread(multiplier.clamp_max(torch.finfo(torch.float32).max), block_len, (height, width))
        codes = encode_e2m1(part.detach().reshape(-1).float() * piece(factors, start, part.numel()))
        target, begin = out.view(-1), start % 2
        nibbles = torch.stack([target & 15, target >> 4], 1).reshape(-1)
        nibbles[begin : begin + codes.numel()] = codes
        target.copy_(pack_e2m1(nibbles))


@kernel
def nvfp4_data_transpose(input: torch.Tensor, *, out: torch.Tensor | None) -> torch.Tensor:
    """[rows, columns/2] packed codes as [columns, rows/2], in `out` if given."""
    flat = input.reshape(-1, input.shape[-1])
    codes = torch.stack([flat & 15, flat >> 4], -1).reshape(flat.shape[0], -1)
    made = pack_e2m1(codes.t().contiguous())
    return made if out is None else out.copy_(made.view(out.shape))


@kernel
def nvfp4_2d_scale_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """Turns the scale bytes of the row copy into those of the column copy: square blocks have one scale for both."""
    tiles = input[: M_tiles * _SIDE : _SIDE, :K_tiles]
    rows = tiles.t().repeat_interleave(_SIDE, 0)
    output.zero_()
    output[: rows.shape[0], :M_tiles].copy_(rows[: output.shape[0]])


@kernel
def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[torch.Tensor],
    columnwise_data_list: Sequence[torch.Tensor],
    rowwise_scale_inv_list: Sequence[torch.Tensor],
    columnwise_scale_inv_list: Sequence[torch.Tensor],
    M_list: Sequence[int],
    K_list: Sequence[int],
) -> None:
    """Column copies of every weight."""
    lists = (rowwise_data_list, columnwise_data_list, rowwise_scale_inv_list, columnwise_scale_inv_list, M_list, K_list)
    for row, column, row_scale, column_scale, rows, columns in zip(*lists, strict=True):
        nvfp4_data_transpose(row, out=column)
        nvfp4_2d_scale_transpose(row_scale, column_scale, -(-rows // _SIDE), -(-columns // _SIDE))
