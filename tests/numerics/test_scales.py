"""Scale rules: exhaustive where the inputs can be listed, torchao as the second opinion for MXFP8, versions side by side."""

from __future__ import annotations

import math

import pytest
import torch

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import E4M3, E5M2, NumberFormat
from mpbridge.numerics import scales


def positive_bf16() -> torch.Tensor:
    """Every positive finite bf16 number, fp32."""
    return torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


@pytest.mark.usefixtures("torchaos_own")
def test_mxfp8_bytes_equal_torchaos_round_up_for_every_positive_bf16_amax() -> None:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    amax = positive_bf16()
    blocks = torch.zeros(len(amax), 32)
    blocks[:, 3] = amax
    scale, _ = to_mx(blocks.bfloat16(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(scales.mxfp8_exponent(amax, E4M3), scale.view(torch.uint8).flatten().int())


@pytest.mark.parametrize("number", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_mxfp8_byte_is_the_exact_exponent_rounded_up_for_every_normal_bf16_amax(number: NumberFormat) -> None:
    amax = positive_bf16()
    amax = amax[amax >= 2.0**-126]
    # frexp: amax/largest = m * 2**e with m in [1/2, 1); ceil(log2) is e - 1 at a power of two, else e. Exact in double precision.
    mantissa, exponent = torch.frexp(amax.double() / number.largest)
    expected = (exponent - (mantissa == 0.5).int() + 127).clamp_min(0)
    assert torch.equal(scales.mxfp8_exponent(amax, number), expected.int())


def test_mxfp8_edge_bytes_by_release() -> None:
    bytes_ = torch.tensor([0, 1, 127, 254, 255], dtype=torch.int32)
    multiplier, value = scales.mxfp8_factors(bytes_, scales.rules_for((2, 11)))
    assert multiplier.tolist() == [1.0, 2.0**126, 1.0, 0.0, -math.inf]
    assert value.tolist() == [0.0, 2.0**-126, 1.0, 2.0**127, math.inf]
    multiplier, value = scales.mxfp8_factors(bytes_, scales.rules_for((2, 13)))
    assert multiplier.tolist()[:4] == [2.0**127, 2.0**126, 1.0, 2.0**-127]
    assert multiplier[4].isnan()
    assert value.tolist()[:4] == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert value[4].isnan()


def test_blocks_of_byte_zero_flush_at_2_11_and_are_represented_from_2_13() -> None:
    # the counts are those of reference numerics: bf16 amaxes up to 2.63e-36
    amax = positive_bf16()
    exponent = scales.mxfp8_exponent(amax, E4M3)
    assert int((exponent == 0).sum()) == 1120
    assert float(amax[exponent == 0].max()) == pytest.approx(2.63e-36, rel=1e-2)
    assert not ((exponent == 254).any())


@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        pytest.param(0.0, 1.0, id="zero"),
        pytest.param(math.inf, 1.0, id="infinity"),
        pytest.param(math.nan, 1.0, id="nan"),
        pytest.param(1e-45, scales.FP32_LARGEST, id="overflowing-quotient"),
        pytest.param(448.0, 1.0, id="largest"),
    ],
)
def test_tensor_scale_of_unusual_amaxes(amax: float, expected: float) -> None:
    assert scales.scale_from_amax(torch.tensor(amax), 448.0, power_of_two=False).item() == expected


def test_tensor_scale_is_a_true_division_and_its_power_of_two_is_rounded_down() -> None:
    amax = positive_bf16()
    exact = (448.0 / amax.double()).float().clamp_max(scales.FP32_LARGEST)
    scale = scales.scale_from_amax(amax, 448.0, power_of_two=False)
    assert torch.equal(scale, torch.where(exact.isinf(), torch.tensor(scales.FP32_LARGEST), exact))
    power = scales.scale_from_amax(amax, 448.0, power_of_two=True)
    mantissa, _ = torch.frexp(power)
    assert (mantissa == 0.5).all()
    assert ((power <= scale) & (power * 2 > scale)).all()


def test_vanishing_blocks_take_the_input_dtypes_largest_value() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert (
        scales.scale_from_amax(torch.tensor(1e-38), 57344.0, power_of_two=False, when_infinite=largest).item()
        == largest
    )


def test_nvfp4_global_scale() -> None:
    assert scales.nvfp4_global(torch.tensor([0.0, 2688.0, 1.0, math.inf])).tolist() == [1.0, 1.0, 2688.0, 1.0]
    assert scales.nvfp4_global(torch.tensor(1e-40)).item() == scales.FP32_LARGEST


def test_nvfp4_block_rule_changes_with_2_14_on_ties_only() -> None:
    overall = torch.tensor([1.0, 0.3, 7.0, 123.0]).bfloat16().float()
    amax = positive_bf16()
    old, new = scales.rules_for((2, 11)), scales.rules_for((2, 14))
    differing = 0
    for peak in overall:
        blocks = amax[(amax <= peak) & (amax > peak * 2.0**-20)]
        a, b = (
            scales.nvfp4_block(blocks, scales.nvfp4_global(peak), old)[1],
            scales.nvfp4_block(blocks, scales.nvfp4_global(peak), new)[1],
        )
        differing += int((a != b).sum())
        step = (torch.minimum(a, b) * 2.0**-3).clamp_min(E4M3.smallest)
        assert ((a - b).abs() <= step).all()
    assert differing < 0.005 * len(amax)
    # the tie that separates them, found by search and pinned: gamax, block amax
    gamaxes = (1 + torch.arange(128) / 128).float()
    pairs = ((scales.nvfp4_block(amax, scales.nvfp4_global(g), rules)[1] for rules in (old, new)) for g in gamaxes)
    assert any((a != b).any() for a, b in pairs)


def test_nvfp4_largest_block_gets_a_scale_whose_product_with_six_reaches_its_amax() -> None:
    peak = torch.tensor(3.7).bfloat16().float()
    overall = scales.nvfp4_global(peak)
    multiplier, scale = scales.nvfp4_block(peak, overall, scales.rules_for())
    assert scale.item() == 448.0
    assert (6.0 * scale / overall).item() == pytest.approx(peak.item(), rel=1e-6)
    assert multiplier.item() == pytest.approx(6.0 / peak.item(), rel=1e-6)


def test_release_table_is_ordered_and_old_releases_are_refused() -> None:
    assert [row.since for row in scales.RULES] == sorted(row.since for row in scales.RULES)
    assert scales.rules_for((2, 11)).nvfp4_divides
    assert scales.rules_for((2, 11)).mxfp8_flushes
    assert not scales.rules_for((2, 20)).nvfp4_divides
    with pytest.raises(BadValue, match=r"2\.3 is older"):
        scales.rules_for((2, 3))
