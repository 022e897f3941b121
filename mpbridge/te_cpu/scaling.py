"""Delayed scaling's update, and the casts of a distributed optimizer's slices of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.common.formats import E4M3
from mpbridge.numerics.codes import encode_fp8
from mpbridge.numerics.delayed import updated
from mpbridge.numerics.kernels import amax_of
from mpbridge.numerics.scales import magnitude, mxfp8_factors
from mpbridge.te_cpu.casts import spread, square_peaks
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.registry import kernel


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
