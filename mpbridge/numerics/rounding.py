"""Rounding of fp32 values to the values of a low-precision format: to nearest even with saturation, and stochastically for E2M1.

Every function returns fp32 values on the format's grid (not bit codes) and matches the hardware conversions `cvt.rn.satfinite` and
`cvt.rs.satfinite` value for value. Only float arithmetic is used: inductor leaves its vector registers for every reinterpretation of bits,
which costs four times as much as the rounding itself. The sign of zero is not kept: it does not affect a GEMM.
"""

from __future__ import annotations

import math

import torch

from mpbridge.common.formats import E2M1, NumberFormat

_FP32_MANTISSA = 23


def smallest_normal(number: NumberFormat) -> float:
    """2**-6 for E4M3, 2**-14 for E5M2, 1 for E2M1."""
    return 2.0 ** (1 - number.bias)


def _nan_to_largest(rounded: torch.Tensor, y: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    # E2M1 has no NaN: the hardware converts it to +6
    return torch.where(y == y, rounded, number.largest) if number.name == E2M1.name else rounded


def round_nearest(y: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    """fp32 `y` rounded to nearest even in `number`, saturating: beyond the largest value, and for infinities, the largest value.

    NaN stays NaN, except in E2M1, which has no NaN: there it becomes +6.

    `anchor` has the wanted spacing as its unit in the last place, so that fp32's own rounding of `anchor - clamped` rounds y. A multiple
    of y works for normal numbers: it is an even number of units whenever y is a tie, and where the difference falls below the anchor's
    power of two, y is so close to a power of two that the finer spacing rounds it to the same value. Below the smallest normal the spacing
    is constant.
    """
    clamped = y.clamp(-number.largest, number.largest)
    lift = 2.0 ** (_FP32_MANTISSA - number.mantissa)
    floor = smallest_normal(number)
    anchor = torch.where(clamped.abs() < floor, 1.5 * floor * lift, clamped * lift)
    return _nan_to_largest(anchor - (anchor - clamped), y, number)


def round_stochastic(y: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """fp32 `y` rounded to E2M1: up in magnitude with a probability equal to its relative distance from the grid point below, saturating at 6.

    random: uint8 of y's shape, uniform; eight bits per element, as the hardware instruction takes, so a probability is a multiple of 1/256,
    rounded down. Beyond that, only saturation biases the result. NaN becomes +6.
    """
    size = y.abs().clamp_max(E2M1.largest)
    spacing = torch.where(size >= 4, 2.0, torch.where(size >= 2, 1.0, 0.5))
    units = torch.where(size >= 4, 0.5, torch.where(size >= 2, 1.0, 2.0))
    up = torch.floor(size * units + random.to(torch.float32) * (1.0 / 256.0)) * spacing
    return _nan_to_largest(torch.copysign(up.clamp_max(E2M1.largest), y), y, E2M1)


def random_bytes(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Uniform uint8 of that shape on the generator's device; drawn as int64, which is six times cheaper than torch.rand."""
    count = math.prod(shape)
    words = torch.empty((count + 7) // 8, dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.uint8)[:count].view(shape)
