"""Bit codes of the low-precision formats: what a kernel stores, whereas `rounding` returns the values that a GEMM reads.

FP8 uses torch's own conversion, which rounds to nearest even as `rounding.round_nearest` does once the value is within the format's
range. A test compares every code, tie and neighbour with `rounding`. Unlike its values, a code keeps the sign of a zero.
"""

from __future__ import annotations

import functools

import torch

from mpbridge.common.formats import E2M1, E4M3, E5M2, NumberFormat

TORCH_FP8 = {E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2}


def encode_fp8(y: torch.Tensor, number: NumberFormat, *, within: bool = False) -> torch.Tensor:
    """uint8 codes of fp32 `y`, rounded to nearest even in E4M3 or E5M2, saturating; NaN stays NaN. Overwrites `y`. within: no finite value rounds beyond the largest code."""
    y = y if within else y.clamp_(-number.largest, number.largest)
    return y.to(TORCH_FP8[number.name]).view(torch.uint8)


def decode_fp8(codes: torch.Tensor, number: NumberFormat, out: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of uint8 codes; exact in fp32, bf16 and fp16.

    torch's own conversion to bf16 runs element by element, ten times slower than shifting bits: an E5M2 code is the upper half of an fp16
    number, and the fields of an E4M3 code become those of a bf16 number with another bias, which a power of two corrects.
    """
    if out is torch.bfloat16 and number.name == E5M2.name:
        return (codes.to(torch.int16) << 8).view(torch.float16).to(out)
    if out is torch.bfloat16 and codes.numel() and not _has_nan(codes):
        bits = (codes.view(torch.int8).to(torch.int16) << 4) & _FIELDS
        return bits.view(torch.bfloat16) * 2.0**_REBIAS
    return codes.view(TORCH_FP8[number.name]).to(out)


_FIELDS = -0x8000 | 0x07F0
"""The bits of a bf16 number that an E4M3 code occupies: the sign, four bits of exponent, three of mantissa."""
_REBIAS = 127 - 7


def _has_nan(codes: torch.Tensor) -> bool:
    """Whether any E4M3 code is a NaN: all of its bits but the sign are ones."""
    return int((codes & 0x7F).amax()) == 0x7F


def encode_e2m1(y: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 codes 0 to 15 of fp32 `y` in E2M1, saturating; NaN becomes +6. random: uint8 of y's shape, for stochastic rounding with eight bits
    per element; None: to nearest even.

    To nearest even, it is the number of midpoints below the magnitude; stochastically, 2m below 2, m + 2 below 4 and m / 2 + 4 beyond: the lowest of the three, each
    rounded. Equal to `rounding.round_nearest` and `round_stochastic`, of whose values it is the code.
    """
    size = y.abs()
    if random is None:
        # NaN is above no limit: each comparison that holds takes one from +6
        code = torch.full_like(size, 7, dtype=torch.uint8)
        for limit, tie_is_below in _LIMITS:
            code -= (size <= limit if tie_is_below else size < limit).view(torch.uint8)
    else:
        size.clamp_(max=E2M1.largest)
        share = random.to(torch.float32).mul_(1.0 / 256.0)
        low = torch.minimum((size * 2).add_(share).floor_(), (size + share).floor_().add_(2))
        low = torch.minimum(low, size.mul_(0.5).add_(share).floor_().add_(4)).clamp_(max=7)
        code = torch.where(low == low, low, 7.0).to(torch.uint8)
    return code | (torch.signbit(y) & (y == y)).view(torch.uint8) << 3


_LIMITS = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))
"""Midpoints between E2M1's magnitudes, and whether the even code is the one below."""


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes per byte along the last axis, the first in the low nibble; the axis has an even length."""
    pairs = codes.contiguous().view(torch.int16)
    return ((pairs | (pairs >> 4)) & 0xFF).to(torch.uint8)


@functools.lru_cache(maxsize=4)
def _pairs(out: torch.dtype) -> torch.Tensor:
    """[256, 2]: the two values of every byte."""
    half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([half, -half])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1).to(out)


def decode_e2m1(packed: torch.Tensor, out: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of packed codes: the last axis is twice as long."""
    return torch.nn.functional.embedding(packed.to(torch.int32), _pairs(out)).flatten(-2)
