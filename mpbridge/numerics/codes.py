"""Rounding to the low-precision formats: the values that a GEMM reads (`round_nearest`, `round_stochastic`), and the bit codes that a kernel stores.

Values are fp32 on the format's grid, and match the hardware conversions `cvt.rn.satfinite` and `cvt.rs.satfinite`. Only float arithmetic is used:
inductor leaves its vector registers for every reinterpretation of bits, which costs four times as much as the rounding itself. The sign of zero
is not kept: it does not affect a GEMM.

FP8 codes use torch's own conversion, which rounds to nearest even as `round_nearest` does once the value is within the format's range. A test
compares every code, tie and neighbour. Unlike values, a code keeps the sign of a zero.
"""

from __future__ import annotations

import functools
import math

import torch

from mpbridge.common.formats import E2M1, E4M3, E5M2, NumberFormat

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


# --- bit codes -------------------------------------------------------------------------------------------------------------------------------
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
    # a NaN is all ones but for the sign
    if out is torch.bfloat16 and codes.numel() and int((codes & 0x7F).amax()) != 0x7F:
        bits = (codes.view(torch.int8).to(torch.int16) << 4) & _FIELDS
        return bits.view(torch.bfloat16) * 2.0**_REBIAS
    return codes.view(TORCH_FP8[number.name]).to(out)


_FIELDS = -0x8000 | 0x07F0
"""The bits of a bf16 number that an E4M3 code occupies: the sign, four bits of exponent, three of mantissa."""
_REBIAS = 127 - 7


def encode_e2m1(y: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 codes 0 to 15 of fp32 `y` in E2M1, saturating; NaN becomes +6. random: uint8 of y's shape, for stochastic rounding with eight bits
    per element; None: to nearest even.

    A magnitude's code is 2m below 2, m + 2 below 4 and m / 2 + 4 beyond: the lowest of the three, each rounded. Equal to
    `round_nearest` and `round_stochastic`, of whose values it is the code, at a third of the passes over memory.
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
