"""Bit codes of the low-precision formats: what a kernel stores, where `rounding` gives the values that a GEMM sees.

FP8 goes through torch's own conversion, which rounds to nearest even as `rounding.round_nearest` does once the value is within the format's
range; E2M1 goes through `round_nearest` and `round_stochastic` themselves. Unlike those, a code keeps the sign of a zero.
"""

from __future__ import annotations

import functools

import torch

from mpbridge.emulation.rounding import round_nearest, round_stochastic
from mpbridge.formats import E2M1, E4M3, E5M2, NumberFormat

TORCH_FP8 = {E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2}
_SIGN = 8  # of an E2M1 code


def encode_fp8(y: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    """uint8 codes of fp32 `y`, rounded to nearest even in E4M3 or E5M2, saturating; NaN stays NaN. Overwrites `y`."""
    return y.clamp_(-number.largest, number.largest).to(TORCH_FP8[number.name]).view(torch.uint8)


def decode_fp8(codes: torch.Tensor, number: NumberFormat, out: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of uint8 codes; exact in fp32, bf16 and fp16 (E5M2 in fp16 too: same exponent)."""
    return codes.view(TORCH_FP8[number.name]).to(out)


def encode_e2m1(y: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 codes 0 to 15 of fp32 `y` in E2M1, saturating; NaN becomes +6. random: uint8 of y's shape, for stochastic rounding; None: to
    nearest even."""
    value = round_nearest(y, E2M1) if random is None else round_stochastic(y, random)
    size = value.abs()
    # the code of a magnitude is piecewise linear in it, and concave: 0 .5 1 1.5 2 | 2 3 4 | 4 6
    code = torch.minimum(torch.minimum(size * 2, size + 2), size * 0.5 + 4).to(torch.uint8)
    negative = torch.signbit(y) & (y == y)
    return code + negative.to(torch.uint8) * _SIGN


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte along the last axis, the first in the low nibble; the axis has an even length."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


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
