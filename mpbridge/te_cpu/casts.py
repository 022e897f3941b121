"""Fills quantized tensors: the rounding rules come from `mpbridge.numerics`, the layout from `storages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.common.formats import E4M3
from mpbridge.numerics.codes import encode_e2m1, encode_fp8, pack_e2m1, random_bytes
from mpbridge.numerics.scales import (
    mxfp8_exponent,
    mxfp8_factors,
    nvfp4_block,
    nvfp4_fast_multiplier,
    nvfp4_global,
    peaks_over,
    scale_from_amax,
)
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.nvfp4_options import FourOverSix, check, refuse_approximations, rounds_multiplier
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.storages import empty_quantized, fused_nvfp4, is_compact, kind_of, rows_of, swizzles
from mpbridge.te_cpu.swizzle import swizzled, swizzled_columns


def new_quantized(quantizer: Any, x: torch.Tensor) -> Any:
    """`x` quantized into new buffers."""
    return fill(quantizer, x, empty_quantized(quantizer, x.shape, x.dtype))


def fill(quantizer: Any, x: torch.Tensor, out: Any) -> Any:
    """`x` quantized into `out`, which has the buffers for the quantizer's usages; returns `out`."""
    if x.numel() == 0:
        return out
    kind = kind_of(quantizer)
    if kind == "delayed":
        _delayed(quantizer, x, out)
    elif kind == "current":
        _current(quantizer, x, out)
    else:
        flat = x.reshape(rows_of(x.shape), x.shape[-1] if x.dim() else 1)
        {"mxfp8": _mxfp8, "block": _block, "nvfp4": _nvfp4}[kind](quantizer, flat, out)
    return out


def turned(codes: torch.Tensor) -> torch.Tensor:
    """Per-tensor FP8's column copy: the last axis moved to the front, [features, ...]."""
    if codes.dim() < 2:
        return codes.clone()
    flat = codes.reshape(rows_of(codes.shape), codes.shape[-1])
    return flat.t().contiguous().view(codes.shape[-1], *codes.shape[:-1])


# --- one scale per tensor------------------------------------------------------------------------------------------------------------------
def _delayed(quantizer: Any, x: torch.Tensor, out: Any) -> None:
    seen = quantizer.amax
    if seen.numel():
        # the kernel takes an atomic maximum, so the largest of an interval's micro-batches is kept
        with torch.inference_mode():  # the buffer may be an inference tensor, which a compiled kernel can write to
            seen.copy_(torch.fmax(seen, peaks_over(x).reshape(seen.shape)))
    store(quantizer, x, quantizer.scale.float().reshape(()), out)


def _current(quantizer: Any, x: torch.Tensor, out: Any) -> None:
    amax = current_reduced(quantizer, peaks_over(x).reshape(1))
    scale = current_scale(quantizer, amax)
    if getattr(quantizer, "amax", None) is not None:  # the quantizer has these buffers until release 2.18
        quantizer.amax.copy_(amax.reshape(quantizer.amax.shape))
        quantizer.scale.copy_(scale.reshape(quantizer.scale.shape))
    store(quantizer, x, scale.reshape(()), out)


def current_reduced(quantizer: Any, amax: torch.Tensor) -> torch.Tensor:
    """`amax`, replaced in place by the maximum over the quantizer's group if it reduces amaxes."""
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
    return amax


def current_scale(quantizer: Any, amax: torch.Tensor) -> torch.Tensor:
    """Scale of current scaling from fp32 amaxes."""
    largest = number_format(quantizer.dtype).largest
    return scale_from_amax(_at_least(amax, quantizer.amax_epsilon), largest, power_of_two=quantizer.force_pow_2_scales)


def _at_least(amax: torch.Tensor, epsilon: float) -> torch.Tensor:
    return amax.clamp_min(epsilon) if epsilon else amax


def store(quantizer: Any, x: torch.Tensor, scale: torch.Tensor, out: Any) -> None:
    """Per-tensor FP8's codes of `x` for one scale, and the scale's inverse, into `out`."""
    codes = encode_fp8(x.float() * scale, number_format(quantizer.dtype))
    if out._data is not None:
        out._data.copy_(codes.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(turned(codes).view(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.copy_((1.0 / scale).expand(out._scale_inv.shape))


# --- MXFP8 ---------------------------------------------------------------------------------------------------------------------------------
def _mxfp8(quantizer: Any, x: torch.Tensor, out: Any) -> None:
    rows, columns = x.shape
    number = number_format(quantizer.dtype)
    tiles = swizzles(quantizer)
    # [rows / 32, columns / 32] for blocks of 32 x 32, available from release 2.19 on; both copies share them
    squares = x.reshape(rows // 32, 32, columns // 32, 32)
    square = peaks_over(squares, (1, 3)) if getattr(quantizer, "with_2d_quantization", False) else None
    copies = (
        ("rowwise", x.reshape(rows, columns // 32, 32), -1, 0, swizzled),
        ("columnwise", x.reshape(rows // 32, 32, columns), 1, 1, swizzled_columns),
    )
    for name, view, along, lines, order in copies:
        if not getattr(quantizer, f"{name}_usage"):
            continue
        peaks = peaks_over(view, along) if square is None else square.repeat_interleave(32, lines)
        exponent = mxfp8_exponent(peaks, number)
        multiplier, _ = mxfp8_factors(exponent, now().rules)
        data = getattr(out, f"_{name}_data")
        data.copy_(encode_fp8(view.float() * multiplier.unsqueeze(along), number).view(data.shape))
        _put(getattr(out, f"_{name}_scale_inv"), exponent, order if tiles else None)


def _put(place: torch.Tensor, scales: torch.Tensor, order: Any) -> None:
    """Writes scales into the upper left of a padded buffer with zero padding, in tile order if `order` is given."""
    if order is None:
        if place.shape != scales.shape:
            place.zero_()  # releases until 2.15 do not initialise it
        place[: scales.shape[0], : scales.shape[1]].copy_(scales)
        return
    padded = torch.zeros_like(place)
    padded[: scales.shape[0], : scales.shape[1]].copy_(scales)
    place.copy_(order(padded))


# --- blocks of 128 -------------------------------------------------------------------------------------------------------------------------
def block_scales(amax: torch.Tensor, quantizer: Any, source: torch.dtype) -> torch.Tensor:
    """Scales of blocks from their fp32 amaxes; a block whose scale overflows gets the largest value of the source's dtype."""
    return scale_from_amax(
        _at_least(amax, quantizer.amax_epsilon),
        number_format(quantizer.dtype).largest,
        power_of_two=quantizer.force_pow_2_scales,
        when_infinite=torch.finfo(source).max,
    )


def square_peaks(x: torch.Tensor, side: int) -> torch.Tensor:
    """fp32 amax of every side x side block of [rows, columns]; blocks at the edge are padded with zeros."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % side, 0, -rows % side))
    blocks = padded.reshape(-(-rows // side), side, -(-columns // side), side)
    return peaks_over(blocks, (1, 3))


def spread(scales: torch.Tensor, side: int, shape: Sequence[int]) -> torch.Tensor:
    """Scales of square blocks, expanded to one per element of `shape`."""
    return scales.repeat_interleave(side, 0).repeat_interleave(side, 1)[: shape[0], : shape[1]]


def _block(quantizer: Any, x: torch.Tensor, out: Any) -> None:
    if quantizer.force_pow_2_scales is False and now().blocks_become_mxfp8:
        raise RuntimeError(
            "On Blackwell and newer, the FP8 block scaling recipe is emulated with MXFP8, which requires using power of two scaling factors."
        )
    if quantizer.block_scaling_dim == 2:
        _square_blocks(quantizer, x, out)
        return
    rows, columns = x.shape
    number, compact = number_format(quantizer.dtype), is_compact(quantizer)
    if quantizer.rowwise_usage:
        view = torch.nn.functional.pad(x, (0, -columns % 128)).reshape(rows, -1, 128)
        scale = block_scales(peaks_over(view, -1), quantizer, x.dtype)
        codes = encode_fp8(_times_blocks(x, scale), number)
        out._rowwise_data.copy_(codes.view(out._rowwise_data.shape))
        inverse = 1.0 / scale
        _put(out._rowwise_scale_inv, inverse if compact else inverse.t(), None)
    if quantizer.columnwise_usage:
        view = torch.nn.functional.pad(x, (0, 0, 0, -rows % 128)).reshape(-1, 128, columns)
        scale = block_scales(peaks_over(view, 1), quantizer, x.dtype)
        scaled = view.float() * scale.unsqueeze(1)
        codes = encode_fp8(scaled.view(-1, columns)[:rows], number)
        out._columnwise_data.copy_((codes if compact else codes.t()).reshape(out._columnwise_data.shape))
        _put(out._columnwise_scale_inv, 1.0 / scale, None)


def _times_blocks(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, columns] times a scale for every 128 columns."""
    rows, columns = x.shape
    if columns % 128:
        return x.float() * scale.repeat_interleave(128, 1)[:, :columns]
    return (x.view(rows, -1, 128).float() * scale.unsqueeze(-1)).view(rows, columns)


def _square_blocks(quantizer: Any, x: torch.Tensor, out: Any) -> None:
    scale = block_scales(square_peaks(x, 128), quantizer, x.dtype)
    codes = encode_fp8(x.float() * spread(scale, 128, x.shape), number_format(quantizer.dtype))
    if quantizer.rowwise_usage:
        out._rowwise_data.copy_(codes.view(out._rowwise_data.shape))
        _put(out._rowwise_scale_inv, 1.0 / scale, None)
    if quantizer.columnwise_usage:
        out._columnwise_data.copy_(codes.t().reshape(out._columnwise_data.shape))
        _put(out._columnwise_scale_inv, (1.0 / scale).t(), None)


# --- NVFP4 ---------------------------------------------------------------------------------------------------------------------------------
def rotated(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The random Hadamard transform of [tokens, features] along the tokens in groups of 16: [features, tokens] in x's dtype."""
    groups = x.t().reshape(-1, 16)
    return (groups.float() @ matrix.float()).to(x.dtype).view(x.shape[1], x.shape[0])


def _nvfp4(quantizer: Any, x: torch.Tensor, out: Any) -> None:
    check(quantizer, x)
    turned_x = nvfp4_columns(quantizer, x)
    nvfp4_amaxes(quantizer, x, turned_x, out)
    nvfp4_reduced(quantizer, out._amax_rowwise, out._amax_columnwise)
    nvfp4_codes(quantizer, x, turned_x, out)


def nvfp4_columns(quantizer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """What the column copy of [tokens, features] quantizes: [features, tokens], transformed if the quantizer says so; None without such a copy."""
    if quantizer.with_rht and x.dtype != torch.bfloat16:
        raise RuntimeError("RHT is only supported for bfloat16 input")
    refuse_approximations(quantizer, fused=fused_nvfp4(x.shape))
    if not quantizer.columnwise_usage:
        return None
    return rotated(x, quantizer.rht_matrix) if quantizer.with_rht else x.t().contiguous()


def nvfp4_amaxes(quantizer: Any, x: torch.Tensor, turned_x: torch.Tensor | None, out: Any) -> None:
    """Writes the amaxes of both copies into `out`."""
    by_row = bool(getattr(quantizer, "row_scaled_nvfp4", False))
    if quantizer.rowwise_usage:
        out._amax_rowwise.copy_(peaks_over(x, 1) if by_row else peaks_over(x).reshape(1))
    if turned_x is not None:
        out._amax_columnwise.copy_(peaks_over(turned_x, 1) if by_row else peaks_over(turned_x).reshape(1))


def nvfp4_reduced(quantizer: Any, *amaxes: torch.Tensor | None) -> None:
    """The maximum of every amax over the quantizer's group, in place, if it reduces amaxes."""
    if quantizer.with_amax_reduction:
        for amax in amaxes:
            if amax is not None:
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())


def nvfp4_codes(quantizer: Any, x: torch.Tensor, turned_x: torch.Tensor | None, out: Any) -> None:
    """Codes and block scales of both copies for the amaxes in `out`, the scales in the order that `out` names."""
    order = swizzled if getattr(out, "_with_gemm_swizzled_scales", False) else None
    copies = [(x, "rowwise")] if quantizer.rowwise_usage else []
    copies += [(turned_x, "columnwise")] if turned_x is not None else []
    for source, name in copies:
        packed, scales = nvfp4_rows(
            source,
            getattr(out, f"_amax_{name}"),
            square=quantizer.with_2d_quantization,
            stochastic=quantizer.stochastic_rounding,
            choice=FourOverSix.of(quantizer),
            rounded=rounds_multiplier(quantizer, source),
        )
        data = getattr(out, f"_{name}_data")
        data.copy_(packed.view(data.shape))
        _put(getattr(out, f"_{name}_scale_inv"), scales, order)


def nvfp4_rows(
    x: torch.Tensor,
    amax: torch.Tensor,
    *,
    square: bool = False,
    stochastic: bool = False,
    choice: FourOverSix | None = None,
    rounded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes [rows, columns/2], E4M3 bytes of the block scales [rows, columns/16]) of [rows, columns].

    amax: fp32, for the whole tensor or per row. square: scales shared by 16 x 16 elements. choice: selects each block's scale by Four Over Six.
    rounded: multipliers in BF16, as under fast math.
    """
    rows, step = x.shape[0], max(_LINES, _CACHED // max(x.shape[1], 1) // _LINES * _LINES)
    parts = [
        _nvfp4_lines(
            x[at : at + step], amax[at : at + step] if amax.numel() > 1 else amax, square, stochastic, choice, rounded
        )
        for at in range(0, rows, step)
    ]
    return parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


_LINES = 16
"""Rows that may share a scale."""
_CACHED = 2**18
"""Elements cast at a time: their intermediate values, a few MB, stay in a core's cache, and large tensors take half as long."""


def _nvfp4_lines(
    x: torch.Tensor, amax: torch.Tensor, square: bool, stochastic: bool, choice: FourOverSix | None, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`nvfp4_rows` of some rows."""
    rows, columns = x.shape
    if square:
        peak = square_peaks(x, 16).repeat_interleave(16, 0)[:rows]
    else:
        peak = peaks_over(x.reshape(rows, columns // 16, 16), -1)
    if choice is not None:
        multiplier, scale = choice.factors(x, peak, amax, square)
    else:
        overall = nvfp4_global(amax.float().reshape(-1, 1))
        multiplier, scale = nvfp4_block(peak, overall, now().rules)
        multiplier = nvfp4_fast_multiplier(scale, overall) if rounded else multiplier
    scaled = (x.reshape(rows, columns // 16, 16).float() * multiplier.unsqueeze(-1)).view(rows, columns)
    random = random_bytes(scaled.shape, torch.default_generator) if stochastic else None
    return pack_e2m1(encode_e2m1(scaled, random)), encode_fp8(scale, E4M3)
