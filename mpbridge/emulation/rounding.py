"""Rounding of fp32 values to the elements of a low-precision format: to nearest even with saturation, and stochastically for E2M1.

Every function returns fp32 values that lie on the format's grid (not bit codes), is made of a few elementwise operations that
torch.compile fuses, and equals the hardware conversions `cvt.rn.satfinite` and `cvt.rs.satfinite` value for value. The sign of a zero is
not kept: a GEMM cannot see it.
"""

from __future__ import annotations

import math

import torch

from mpbridge.formats import E2M1, NumberFormat

_EXPONENT_FIELD = 0x7F800000
_FP32_MANTISSA = 23
_HALF_BIT = 1 << (_FP32_MANTISSA - 1)


def smallest_normal_exponent(number: NumberFormat) -> int:
    """Exponent of the smallest normal value: -6 for E4M3, -14 for E5M2, 0 for E2M1."""
    return 1 - number.bias


def _binade(y: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    """fp32 bit patterns (int32) of the power of two at or below |y|, never below the format's smallest normal power."""
    return (y.view(torch.int32) & _EXPONENT_FIELD).clamp_min((smallest_normal_exponent(number) + 127) << _FP32_MANTISSA)


def _snap(y: torch.Tensor, binade: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    """y rounded to nearest even at the spacing of its binade.

    Adding 1.5 * 2**(exponent + 23 - mantissa) pushes the bits below the spacing out of the fp32 sum; fp32's own rounding does the rest.
    """
    magic = ((binade + ((_FP32_MANTISSA - number.mantissa) << _FP32_MANTISSA)) | _HALF_BIT).view(torch.float32)
    return (y + magic) - magic


def round_nearest(y: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    """fp32 `y` rounded to nearest even in `number`, saturating: beyond the largest value, and for infinities, the largest value.

    NaN stays NaN, except in E2M1, which has no NaN: there it becomes +6 as in the hardware's conversion.
    """
    clamped = y.clamp(-number.largest, number.largest)
    rounded = _snap(clamped, _binade(clamped, number), number)
    if number is E2M1:
        rounded = torch.where(y.isnan(), torch.full_like(y, number.largest), rounded)
    return rounded


def round_stochastic(y: torch.Tensor, random: torch.Tensor, number: NumberFormat = E2M1) -> torch.Tensor:
    """fp32 `y` rounded up in magnitude with the probability of its distance from the grid point below, saturating.

    random: uint8 of y's shape, uniform; eight bits an element, as the instruction takes, so a probability is a multiple of 1/256 rounded
    down. Saturation makes the result biased beyond the largest value, nowhere else. NaN becomes +6 in E2M1.
    """
    clamped = y.clamp(-number.largest, number.largest)
    binade = _binade(clamped, number)
    spacing = (binade - (number.mantissa << _FP32_MANTISSA)).view(torch.float32)
    # nearest(y + (u - 1/2) spacing) is floor(y + u spacing); 2**-12 keeps the nearest from meeting a tie
    shift = (random.to(torch.float32) * (1.0 / 256.0) - (0.5 - 2.0**-12)) * torch.copysign(spacing, clamped)
    rounded = _snap(clamped + shift, binade, number).clamp(-number.largest, number.largest)
    if number is E2M1:
        rounded = torch.where(y.isnan(), torch.full_like(y, number.largest), rounded)
    return rounded


def random_bytes(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Uniform uint8 of that shape on the generator's device; drawn as int64, which is six times cheaper than torch.rand."""
    count = math.prod(shape)
    words = torch.empty((count + 7) // 8, dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.uint8)[:count].view(shape)
