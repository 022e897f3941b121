"""Element rounding against the definition of the formats and against ml_dtypes, over every code."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpbridge.common.formats import E2M1, E4M3, E5M2, NumberFormat
from mpbridge.numerics.codes import random_bytes, round_nearest, round_stochastic

FORMATS = [pytest.param(number, id=number.name) for number in (E4M3, E5M2, E2M1)]
ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}


def grid(number: NumberFormat) -> list[float]:
    """Every finite value of the format in ascending order, from sign, exponent and mantissa fields."""
    values = set()
    for sign, exponent, mantissa in itertools.product((1, -1), range(2**number.exponent), range(2**number.mantissa)):
        scale = 2.0 ** (max(exponent, 1) - number.bias)
        values.add(sign * scale * ((exponent > 0) + mantissa / 2**number.mantissa))
    # the codes above the largest finite value are NaN (E4M3) or infinity and NaN (E5M2)
    return sorted(value for value in values if abs(value) <= number.largest)


def oracle(y: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    saturated = y.clamp(-number.largest, number.largest).numpy()
    return torch.from_numpy(saturated.astype(ORACLE[number.name]).astype(np.float32))


@pytest.mark.parametrize("number", FORMATS)
def test_every_code_is_its_own_rounding(number: NumberFormat) -> None:
    values = torch.tensor(grid(number))
    # NaNs, infinities and the second zero are left out
    assert len(values) == 2**number.bits - {"e4m3": 3, "e5m2": 9, "e2m1": 1}[number.name]
    assert torch.equal(round_nearest(values, number), values)


@pytest.mark.parametrize("number", FORMATS)
def test_midpoints_go_to_the_even_neighbour_and_floats_beside_them_to_the_nearer(number: NumberFormat) -> None:
    values = np.array(grid(number), dtype=np.float64)
    below, above = values[:-1], values[1:]
    middle = ((below + above) / 2).astype(np.float32)
    assert np.array_equal(middle.astype(np.float64), (below + above) / 2)  # exact in fp32
    # in the format's own order the even neighbour has an even distance, in steps, from zero
    even = np.where((np.arange(len(below)) - list(values).index(0.0)) % 2 == 0, below, above)
    lower, upper = (np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf))
    for inputs, expected in ((middle, even), (lower, below), (upper, above)):
        found = round_nearest(torch.from_numpy(inputs), number)
        assert torch.equal(found, torch.from_numpy(expected.astype(np.float32)))


@pytest.mark.parametrize("number", FORMATS)
def test_all_bf16_inputs_round_as_ml_dtypes_rounds_them(number: NumberFormat) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    y = bits.view(torch.bfloat16).float()
    y = y[~y.isnan()]
    assert torch.equal(round_nearest(y, number), oracle(y, number))


@pytest.mark.parametrize("number", FORMATS)
def test_floats_around_every_binade_edge_round_as_ml_dtypes_rounds_them(number: NumberFormat) -> None:
    # the trick behind round_nearest is most delicate just above and below powers of two
    edges = torch.tensor([2.0**k * (1 + j / 32) for k in range(-20, 18) for j in range(32)])
    near = torch.cat([(edges.view(torch.int32) + offset).view(torch.float32) for offset in range(-40, 41)])
    y = torch.cat([near, -near])
    assert torch.equal(round_nearest(y, number), oracle(y, number))


@pytest.mark.parametrize(
    ("number", "value", "expected"),
    [
        pytest.param(E4M3, float("inf"), 448.0, id="e4m3-infinity-saturates"),
        pytest.param(E5M2, float("-inf"), -57344.0, id="e5m2-infinity-saturates"),
        pytest.param(E4M3, 465.0, 448.0, id="e4m3-beyond-largest"),
        pytest.param(E5M2, 65536.0, 57344.0, id="e5m2-beyond-largest"),
        pytest.param(E2M1, 5.0, 4.0, id="e2m1-tie-to-even"),
        pytest.param(E2M1, float("nan"), 6.0, id="e2m1-has-no-nan"),
        pytest.param(E4M3, -0.0, 0.0, id="negative-zero-is-zero"),
    ],
)
def test_named_cases(number: NumberFormat, value: float, expected: float) -> None:
    assert round_nearest(torch.tensor([value]), number).item() == expected


@pytest.mark.parametrize("number", FORMATS[:2])
def test_nan_stays_nan_in_eight_bits(number: NumberFormat) -> None:
    assert round_nearest(torch.tensor([float("nan")]), number).isnan().all()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40), st.sampled_from([E4M3, E5M2, E2M1]))
def test_rounding_keeps_order_and_rounding_twice_is_rounding_once(numbers: list[float], number: NumberFormat) -> None:
    y = torch.tensor(sorted(numbers), dtype=torch.float32)
    rounded = round_nearest(y, number)
    assert (rounded.diff() >= 0).all()
    assert torch.equal(round_nearest(rounded, number), rounded)
    assert torch.equal(round_nearest(-y, number), -rounded)


# --- stochastic rounding -----------------------------------------------------------------------------------------------------------------
def test_stochastic_rounding_goes_up_with_the_probability_of_the_fraction() -> None:
    # over all 256 random bytes the number of times that rounding goes up is floor(256 * fraction), for every grid interval
    random = torch.arange(256, dtype=torch.uint8)
    values = [v for v in grid(E2M1) if v >= 0]
    for low, high in itertools.pairwise(values):
        for part in range(0, 256, 5):
            y = low + (high - low) * (part + 0.25) / 256
            out = round_stochastic(torch.full((256,), y), random)
            assert set(out.tolist()) <= {low, high}
            assert int((out == high).sum()) == part
            assert torch.equal(round_stochastic(torch.full((256,), -y), random), -out)


def test_stochastic_rounding_leaves_grid_values_and_saturates_beyond_six() -> None:
    random = torch.arange(256, dtype=torch.uint8)
    for value in grid(E2M1):
        assert (round_stochastic(torch.full((256,), value), random) == value).all()
    for value in (6.01, 1e30, float("inf")):
        assert (round_stochastic(torch.full((256,), value), random) == 6).all()
    assert (round_stochastic(torch.full((256,), float("nan")), random) == 6).all()


def test_random_bytes_are_uniform_and_follow_the_generator() -> None:
    draw = lambda: random_bytes(torch.Size([1000, 257]), torch.Generator().manual_seed(7))  # noqa: E731
    assert torch.equal(draw(), draw())
    counts = torch.bincount(draw().flatten().long(), minlength=256).double()
    # chi-squared of 255 degrees of freedom: 4 standard deviations above the mean
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 255 + 4 * (2 * 255) ** 0.5
