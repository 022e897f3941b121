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

_SIDE = 16


@kernel
def nvfp4_2d_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int = _SIDE
) -> None:
    """Amaxes of 16 x 16 blocks over a slice of an [h, w] weight."""
    whole = torch.zeros(h * w, dtype=tensor.dtype)
    whole[start_offset : start_offset + tensor.numel()] = tensor.detach().reshape(-1)
    found = square_peaks(whole.view(h, w), block_len)
    amax[: found.shape[0], : found.shape[1]].copy_(found)


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
        nvfp4_2d_compute_partial_amax(part, partial, height, width, start, block_len)
        overall.copy_(torch.fmax(overall, amax_of(part.detach()).reshape(overall.shape)))


@kernel
def nvfp4_compute_global_scale(global_amax: torch.Tensor, global_scale: torch.Tensor) -> None:
    """448 * 6 / amax."""
    global_scale.copy_(nvfp4_global(global_amax.float()).reshape(global_scale.shape))


@kernel
def nvfp4_compute_per_block_scale(block_amax: torch.Tensor, scale: torch.Tensor, global_amax: torch.Tensor) -> None:
    """Block scales, E4M3 values in FP32."""
    _, found = nvfp4_block(block_amax.float(), nvfp4_global(global_amax.float().reshape(())), now().rules)
    scale.copy_(found.reshape(scale.shape))


@kernel
def nvfp4_expand_scale_to_fp8(
    input: torch.Tensor, output: torch.Tensor, tile_rows: int, tile_cols: int, rows_padded: int, block_len: int = _SIDE
) -> None:
    """E4M3 bytes of block scales, one row per row of the weight."""
    codes = encode_fp8(input.float().clone()[:tile_rows, :tile_cols], E4M3).repeat_interleave(block_len, 0)
    rows = min(rows_padded, codes.shape[0])
    output.zero_()
    output[:rows, :tile_cols].copy_(codes[:rows].view(output.dtype))


@kernel
def nvfp4_fused_scale(
    block_amax: torch.Tensor,
    global_amax: torch.Tensor,
    per_block_scale: torch.Tensor,
    target_scale: torch.Tensor,
    target_amax: torch.Tensor,
    tile_rows: int,
    tile_cols: int,
    rows_padded: int,
    block_len: int = _SIDE,
) -> None:
    """Block scales, their bytes in the weight's row copy, and its amax."""
    nvfp4_compute_per_block_scale(block_amax, per_block_scale, global_amax)
    nvfp4_expand_scale_to_fp8(per_block_scale, target_scale, tile_rows, tile_cols, rows_padded, block_len)
    target_amax.copy_(global_amax.reshape(target_amax.shape))


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
    """`nvfp4_fused_scale` of every weight."""
    tensors = zip(
        block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list, strict=True
    )
    sizes = zip(tile_rows_list, tile_cols_list, rows_padded_list, strict=True)
    for (peaks, overall, scale, target, amax), (rows, columns, padded) in zip(tensors, sizes, strict=True):
        nvfp4_fused_scale(peaks, overall, scale, target, amax, rows, columns, padded, block_len)


@kernel
def nvfp4_2d_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int = _SIDE,
) -> None:
    """Packed codes of a slice with the weight's block scales. The slice may begin or end in the middle of a byte."""
    overall = global_scale.float().reshape(())
    multiplier = (1.0 / (scale.float() * (1.0 / overall))).clamp_max(torch.finfo(torch.float32).max)
    factors = spread(multiplier, block_len, (h, w)).reshape(-1)[start_offset : start_offset + inp.numel()]
    codes = encode_e2m1(inp.detach().reshape(-1).float() * factors)
    target = out.view(-1)
    if start_offset % 2 == 0 and codes.numel() % 2 == 0:
        target.copy_(pack_e2m1(codes))
        return
    nibbles = torch.stack([target & 15, target >> 4], 1).reshape(-1)
    begin = start_offset % 2
    nibbles[begin : begin + codes.numel()] = codes
    target.copy_(pack_e2m1(nibbles))


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
    """`nvfp4_2d_partial_cast` of every slice."""
    tensors = zip(inp_list, out_list, scale_list, global_scale_list, strict=True)
    sizes = zip(h_list, w_list, start_offset_list, strict=True)
    for (part, out, scale, overall), (height, width, start) in zip(tensors, sizes, strict=True):
        nvfp4_2d_partial_cast(part, out, scale, overall, height, width, start, block_len)


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
