"""Bit codes of the low-precision formats: what a kernel stores, whereas `rounding` returns the values that a GEMM reads.

FP8 uses torch's own conversion, which rounds to nearest even as `rounding.round_nearest` does once the value is within the format's
range. A test compares every code, tie and neighbour with `rounding`. Unlike its values, a code keeps the sign of a zero.
"""

from __future__ import annotations

import functools

import torch

from mpbridge.common.formats import E2M1, E4M3, E5M2, NumberFormat

TORCH_FP8 = {E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2}
EIGHT_BITS = frozenset(value for name, value in vars(torch).items() if name.startswith("float8_"))
"""The 8-bit floats of this torch: 2.6 has no E8M0."""


def encode_fp8(y: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    """uint8 codes of fp32 `y`, rounded to nearest even in E4M3 or E5M2, saturating; NaN stays NaN. Overwrites `y`."""
    return y.clamp_(-number.largest, number.largest).to(TORCH_FP8[number.name]).view(torch.uint8)


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

    A magnitude's code is 2m below 2, m + 2 below 4 and m / 2 + 4 beyond: the lowest of the three, each rounded. Equal to
    `rounding.round_nearest` and `round_stochastic`, of whose values it is the code, at a third of the passes over memory.
    """
    size = y.abs().clamp_(max=E2M1.largest)
    if random is None:
        code = torch.minimum((size * 2).round_(), size.round().add_(2))
        code = torch.minimum(code, size.mul_(0.5).round_().add_(4))
    else:
        share = random.to(torch.float32).mul_(1.0 / 256.0)
        code = torch.minimum((size * 2).add_(share).floor_(), (size + share).floor_().add_(2))
        code = torch.minimum(code, size.mul_(0.5).add_(share).floor_().add_(4)).clamp_(max=7)
    # 4 with y's sign: subtracting it and adding 4 adds 8 to the code of a negative number, in vector registers, which signbit leaves
    four = (y.view(torch.int32) & _SIGN).bitwise_or_(_FOUR).view(torch.float32)
    if bool(code.amax().isnan()):
        four, code = torch.where(y == y, four, 4.0), torch.where(y == y, code, 7.0)
    return code.sub_(four).add_(4).to(torch.uint8)


_SIGN, _FOUR = -0x80000000, 0x40800000
"""Bits of fp32: the sign, and 4.0."""


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes per byte along the last axis, the first in the low nibble; the axis has an even length."""
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)  # the low byte


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
