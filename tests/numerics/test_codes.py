"""Bit codes against the rounding rules (`emulation.rounding`) and ml_dtypes, over every code, tie and neighbour."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpbridge.common.formats import E2M1, E4M3, E5M2
from mpbridge.numerics.codes import (
    decode_e2m1,
    decode_fp8,
    encode_e2m1,
    encode_fp8,
    pack_e2m1,
    round_nearest,
    round_stochastic,
)
from mpbridge.numerics.scales import magnitude, peaks_over
from tests.numerics.test_rounding import ORACLE


def critical(number) -> torch.Tensor:
    """Every value, every midpoint, the floats beside both, and what lies beyond the format; both signs."""
    if number is E2M1:
        values = decode_e2m1(pack_e2m1(torch.arange(16, dtype=torch.uint8))).numpy()
    else:
        values = np.arange(256, dtype=np.uint8).view(ORACLE[number.name]).astype(np.float32)
    values = np.unique(np.abs(values[np.isfinite(values)])).astype(np.float32)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [number.largest * 2, np.inf]]).astype(np.float32)
    points = np.concatenate([points, *(np.nextafter(points, np.float32(end)) for end in (np.inf, -np.inf))])
    return torch.from_numpy(np.concatenate([points, -points]).astype(np.float32))


@pytest.mark.parametrize("number", [E4M3, E5M2], ids=lambda number: number.name)
def test_fp8_codes_are_the_rounded_values(number) -> None:
    y = critical(number)
    codes = encode_fp8(y.clone(), number)
    expected = round_nearest(y, number)
    assert torch.equal(decode_fp8(codes, number), expected)
    clamped = np.clip(y.numpy(), -number.largest, number.largest)
    assert np.array_equal(codes.numpy(), clamped.astype(ORACLE[number.name]).view(np.uint8))


@pytest.mark.parametrize("number", [E4M3, E5M2], ids=lambda number: number.name)
def test_every_fp8_code_decodes_alike_in_every_dtype(number) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = torch.from_numpy(codes.numpy().view(ORACLE[number.name]).astype(np.float32))
    finite = codes[wanted.isfinite()]  # without a NaN the bits are moved, with one torch converts
    for chosen in (codes, finite):
        expected = torch.from_numpy(chosen.numpy().view(ORACLE[number.name]).astype(np.float32))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = decode_fp8(chosen.clone(), number, dtype)
            assert found.dtype is dtype
            torch.testing.assert_close(found.float(), expected, rtol=0, atol=0, equal_nan=True)


def test_e2m1_codes_are_the_rounded_values() -> None:
    y = critical(E2M1)
    y = torch.cat([y, torch.tensor([float("nan")] * (y.numel() % 2 + 2))])
    codes = encode_e2m1(y)
    assert torch.equal(decode_e2m1(pack_e2m1(codes)), round_nearest(y, E2M1))
    plain = y[y.isfinite()]
    clamped = np.clip(plain.numpy(), -6, 6).astype(ORACLE["e2m1"])
    assert np.array_equal(encode_e2m1(plain).numpy(), clamped.view(np.uint8))


@pytest.mark.parametrize("number", [E4M3, E5M2, E2M1], ids=lambda number: number.name)
def test_codes_of_every_bf16_number_are_ml_dtypes(number) -> None:
    """Infinities, NaN of both signs and subnormals among them."""
    y = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    made = encode_e2m1(y) if number is E2M1 else encode_fp8(y.clone(), number)
    number_like = y == y
    oracle = np.clip(y[number_like].numpy(), -number.largest, number.largest).astype(ORACLE[number.name])
    assert np.array_equal(made[number_like].numpy(), oracle.view(np.uint8))
    if number is E2M1:
        assert set(made[~number_like].tolist()) == {7}
    else:
        assert decode_fp8(made[~number_like], number).isnan().all()


def test_stochastic_e2m1_codes_are_the_rounded_values() -> None:
    y = critical(E2M1).repeat_interleave(256)
    random = torch.arange(256, dtype=torch.uint8).repeat(y.numel() // 256)
    codes = encode_e2m1(y, random)
    assert torch.equal(decode_e2m1(pack_e2m1(codes)), round_stochastic(y, random))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [32, 24, 7])
def test_peaks_leave_nan_out_and_keep_infinity(dtype, columns) -> None:
    x = torch.randn(64, columns).to(dtype)
    assert torch.equal(peaks_over(x, 1), magnitude(x).amax(1).float())
    x[3, 4], x[5, 6] = float("nan"), float("-inf")
    for dim in (None, 0, 1, (0, 1)):
        expected = magnitude(x).amax() if dim is None else torch.amax(magnitude(x), dim)
        assert torch.equal(peaks_over(x, dim), expected.float())
    assert float(peaks_over(x)) == float("inf")
