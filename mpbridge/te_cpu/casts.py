"""Fills quantized tensors: the rounding rules come from `mpbridge.numerics`, the layout from `storages`."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.common.formats import E4M3
from mpbridge.numerics.codes import encode_e2m1, encode_fp8, pack_e2m1, random_bytes
from mpbridge.numerics.scales import (
    FP32_LARGEST,
    mxfp8_exponent,
    mxfp8_factors,
    nvfp4_block,
    nvfp4_fast_multiplier,
    nvfp4_global,
    peaks_over,
    scale_from_amax,
)
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.nvfp4_options import FourOverSix, by_rows, check, refuse_approximations, rounds_multiplier
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
    return codes.clone() if codes.dim() < 2 else codes.movedim(-1, 0).contiguous()


# --- one scale per tensor------------------------------------------------------------------------------------------------------------------
def _delayed(quantizer: Any, x: torch.Tensor, out: Any) -> None:
    seen = quantizer.amax
    if seen.numel():
        # the kernel takes an atomic maximum, so the largest of an interval's micro-batches is kept
        with torch.inference_mode():  # the buffer may be an inference tensor, which a compiled kernel can write to
            seen.copy_(torch.fmax(seen, peaks_over(x).reshape(seen.shape)))
    store(quantizer, x, quantizer.scale.float().reshape(()), out)


def _current(quantizer: Any, x: torch.Tensor, out: Any) -> None:
    amax = reduced(quantizer, peaks_over(x).reshape(1))
    scale = current_scale(quantizer, amax)
    if getattr(quantizer, "amax", None) is not None:  # the quantizer has these buffers until release 2.18
        quantizer.amax.copy_(amax.reshape(quantizer.amax.shape))
        quantizer.scale.copy_(scale.reshape(quantizer.scale.shape))
    store(quantizer, x, scale.reshape(()), out)


def reduced(quantizer: Any, amax: torch.Tensor) -> torch.Tensor:
    """`amax`, replaced in place by the maximum over the quantizer's group if it reduces amaxes."""
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
    return amax


def current_scale(quantizer: Any, amax: torch.Tensor, when_infinite: float = FP32_LARGEST) -> torch.Tensor:
    """Scales of current scaling or of blocks from fp32 amaxes; `when_infinite` for one that overflows."""
    least = amax.clamp_min(quantizer.amax_epsilon) if quantizer.amax_epsilon else amax
    largest, power = number_format(quantizer.dtype).largest, quantizer.force_pow_2_scales
    return scale_from_amax(least, largest, power_of_two=power, when_infinite=when_infinite)


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
    into = place if order is None else torch.zeros_like(place)
    if into.shape != scales.shape:
        into.zero_()  # releases until 2.15 do not initialise it
    into[: scales.shape[0], : scales.shape[1]].copy_(scales)
    if order is not None:
        place.copy_(order(into))


# --- blocks of 128 -------------------------------------------------------------------------------------------------------------------------
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
    number, compact, overflow = number_format(quantizer.dtype), is_compact(quantizer), torch.finfo(x.dtype).max
    if quantizer.rowwise_usage:
        view = torch.nn.functional.pad(x, (0, -columns % 128)).reshape(rows, -1, 128)
        scale = current_scale(quantizer, peaks_over(view, -1), overflow)
        codes = encode_fp8(_times_blocks(x, scale), number)
        out._rowwise_data.copy_(codes.view(out._rowwise_data.shape))
        inverse = 1.0 / scale
        _put(out._rowwise_scale_inv, inverse if compact else inverse.t(), None)
    if quantizer.columnwise_usage:
        view = torch.nn.functional.pad(x, (0, 0, 0, -rows % 128)).reshape(-1, 128, columns)
        scale = current_scale(quantizer, peaks_over(view, 1), overflow)
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
    scale = current_scale(quantizer, square_peaks(x, 128), torch.finfo(x.dtype).max)
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
    for source, amax in ((x if quantizer.rowwise_usage else None, out._amax_rowwise), (turned_x, out._amax_columnwise)):
        if source is not None:
            amax.copy_(peaks_over(source, 1 if by_rows(quantizer) else None).reshape(amax.shape))


def nvfp4_reduced(quantizer: Any, *amaxes: torch.Tensor | None) -> None:
    """`reduced` of every amax that there is."""
    for amax in amaxes:
        if amax is not None:
            reduced(quantizer, amax)


def nvfp4_codes(quantizer: Any, x: torch.Tensor, turned_x: torch.Tensor | None, out: Any) -> None:
    """Codes and block scales of both copies for the amaxes in `out`, the scales in the order that `out` names."""
    order = swizzled if getattr(out, "_with_gemm_swizzled_scales", False) else None
    for source, name in ((x if quantizer.rowwise_usage else None, "rowwise"), (turned_x, "columnwise")):
        if source is None:
            continue
        amax, rounded = getattr(out, f"_amax_{name}"), rounds_multiplier(quantizer, source)
        step = max(_LINES, _CACHED // max(source.shape[1], 1) // _LINES * _LINES)
        parts = [
            _nvfp4_lines(quantizer, lines, amax[at : at + step] if amax.numel() > 1 else amax, rounded)
            for at, lines in zip(range(0, len(source), step), torch.split(source, step), strict=True)
        ]
        packed, scales = (torch.cat(of) if len(of) > 1 else of[0] for of in zip(*parts, strict=True))
        data = getattr(out, f"_{name}_data")
        data.copy_(packed.view(data.shape))
        _put(getattr(out, f"_{name}_scale_inv"), scales, order)


_LINES = 16
"""Rows that may share a scale."""
_CACHED = 2**18
"""Elements cast at a time: their intermediate values, a few MB, stay in a core's cache, and large tensors take half as long."""


def _nvfp4_lines(
    quantizer: Any, x: torch.Tensor, amax: torch.Tensor, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes [rows, columns/2], E4M3 bytes of the block scales [rows, columns/16]) of [rows, columns].

    amax: fp32, for the whole tensor or per row. rounded: multipliers in BF16, as under fast math.
    """
    rows, columns = x.shape
    square, choice = quantizer.with_2d_quantization, FourOverSix.of(quantizer)
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
    random = random_bytes(scaled.shape, torch.default_generator) if quantizer.stochastic_rounding else None
    return pack_e2m1(encode_e2m1(scaled, random)), encode_fp8(scale, E4M3)
