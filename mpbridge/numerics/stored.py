"""A weight as training's kernels store it: codes and scales, where `Quantizer.operand` returns the values that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpbridge.common.errors import Refused
from mpbridge.common.formats import E2M1, E4M3, NumberFormat
from mpbridge.numerics.codes import TORCH_FP8, encode_e2m1, encode_fp8, pack_e2m1
from mpbridge.numerics.operands import cropped, spread, square_peaks
from mpbridge.numerics.quantizer import Quantizer
from mpbridge.numerics.scales import nvfp4_global, peaks_over, scale_from_amax

PIECE = 1 << 18
"""Elements that are cast at a time: 1 MiB in fp32."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The row copy of a weight [rows, columns], which fprop reads."""

    codes: torch.Tensor
    """FP8: float8_e4m3fn or float8_e5m2, [rows, columns]. FP4: uint8 [rows, columns / 2], the even column in the low nibble."""
    scales: torch.Tensor
    """One row per row of the weight, one column per block along it. fp32: multiplies the codes; uint8: the E8M0 byte; float8_e4m3fn: below a second level."""
    amax: torch.Tensor | None = None
    """NVFP4: fp32 amax of the second level, a scalar."""
    reach: float = 1.0
    """NVFP4: the value of the largest code under the largest block scale; the second level multiplies by amax / reach."""

    @property
    def divisor(self) -> torch.Tensor:
        """NVFP4: the second level as the factor S that blocks were scaled by, fp32 [1]."""
        assert self.amax is not None
        return nvfp4_global(self.amax.reshape(1), self.reach / E2M1.largest)


def stored(quantizer: Quantizer, weight: torch.Tensor) -> StoredWeight:
    """`weight` [rows, columns] by that quantizer's rule for weights. Raises Refused for delayed scaling, whose scale is not the weight's own."""
    rule, number = quantizer.rule, quantizer.format_of("w")
    if rule == "history":
        raise Refused("delayed scaling quantizes with a scale from earlier steps, which the weight does not determine")
    if rule == "current":
        amax = peaks_over(weight)
        scale = scale_from_amax(amax, number.largest, power_of_two=bool(quantizer.options.get("power_of_two")))
        codes = _in_pieces(weight, scale.expand(len(weight), 1), number, amax * scale)
        return StoredWeight(codes, (1.0 / scale).expand(weight.shape[0], 1))
    if rule == "e4m3_blocks":
        return _nvfp4(quantizer, weight)
    block, padded, view = quantizer._in_blocks(weight, "w", "row")
    amax = _peaks(view)
    amax = square_peaks(amax, block.along) if block.across > 1 else amax
    multiplier, factor = quantizer._factors(amax, "w", weight.dtype)
    wide = spread(multiplier, block.along) if block.across > 1 else multiplier
    codes = _in_pieces(view, wide, number, amax * multiplier).view(padded.shape)
    if block.across > 1:
        scales = factor.repeat_interleave(block.across, 0)[: len(weight)]
    else:
        scales = factor.view(padded.shape[0], -1)
    if block.scale == "e8m0":
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return StoredWeight(cropped(codes, weight.shape), scales)


def _rows(view: torch.Tensor) -> int:
    """Entries of a view's first axis that make up a piece."""
    return max(1, PIECE * len(view) // max(view.numel(), 1))


def _peaks(view: torch.Tensor) -> torch.Tensor:
    """fp32 amax of each block of a view, shaped to multiply it."""
    return torch.cat([peaks_over(piece, 1) for piece in torch.split(view, _rows(view))]).unsqueeze(1)


def _in_pieces(
    view: torch.Tensor, multiplier: torch.Tensor, number: NumberFormat | None, peaks: torch.Tensor | None = None
) -> torch.Tensor:
    """A view times its multiplier in FP8, or (None) in E2M1 with two codes to a byte; in pieces that stay in the cache, which is several times faster.

    peaks: largest magnitudes of the products, without NaN. If they are within FP8's range, up to a rounding, nothing saturates.
    """
    within = number is None or (peaks is not None and bool((peaks <= number.largest * 1.001).all()))
    shape = view.shape if number is not None else (*view.shape[:-1], view.shape[-1] // 2)
    out = torch.empty(shape, dtype=torch.uint8 if number is None else TORCH_FP8[number.name])
    rows = _rows(view)
    for piece, factor, place in zip(*(torch.split(one, rows) for one in (view, multiplier, out)), strict=True):
        scaled = piece.float().mul_(factor) if piece.dtype is not torch.float32 else piece * factor
        if number is not None and not within:
            scaled.clamp_(-number.largest, number.largest)
        place.copy_(pack_e2m1(encode_e2m1(scaled)) if number is None else scaled)
    return out


def _nvfp4(quantizer: Quantizer, weight: torch.Tensor) -> StoredWeight:
    source, view, across = quantizer._nvfp4_view(weight, "w", "row")
    if quantizer.block("w").square and not quantizer.four_over_six("w"):
        multiplier, scale, amax = quantizer._square_factors(view, _peaks(view), "w", None)
    else:
        multiplier, scale, amax = quantizer._nvfp4_factors(weight, view, "w", "row")
    if across:
        # the view is of the transpose, [column blocks, along, rows], and two codes to a byte are neighbours in a row
        view, multiplier = (one.expand(view.shape).reshape(source.shape).t().contiguous() for one in (view, multiplier))
    codes = _in_pieces(view, multiplier, None).view(len(weight), -1)
    along, rows = quantizer.block("w").along, weight.shape[0]
    if not quantizer.block("w").square:
        scales = scale.view(rows, -1)
    elif across:
        scales = scale.squeeze(1).t()
    else:
        scales = scale.squeeze(1)[:, ::along].repeat_interleave(along, 0)
    reach = E2M1.largest / quantizer.rules.nvfp4_headroom * quantizer._largest_scale("w")
    return StoredWeight(codes, encode_fp8(scales.contiguous(), E4M3).view(torch.float8_e4m3fn), amax, reach)
