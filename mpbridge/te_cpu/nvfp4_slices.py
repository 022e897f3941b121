"""Stored NVFP4 weights: casts of a distributed optimizer's slices, and column copies made from row copies (from release 2.14)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpbridge.common.formats import E4M3
from mpbridge.numerics.codes import encode_e2m1, encode_fp8, pack_e2m1
from mpbridge.numerics.kernels import amax_of
from mpbridge.numerics.scales import nvfp4_block, nvfp4_global
from mpbridge.te_cpu.casts import spread, square_peaks
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.registry import kernel
from mpbridge.te_cpu.scaling import piece, window

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
    if out is None:
        return made
    out.copy_(made.view(out.shape))
    return out


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
