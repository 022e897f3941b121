"""Operands of every recipe: against Transformer Engine's references (golden), and properties that the rules promise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbridge.common.errors import CheckpointError, Refused
from mpbridge.common.formats import E4M3, E5M2
from mpbridge.numerics.codes import round_nearest
from mpbridge.numerics.operands import COPY_OF
from mpbridge.numerics.quantizer import Quantizer
from mpbridge.numerics.stored import StoredWeight, stored
from tests.numerics import golden
from tests.numerics.conftest import operand, quant_of, quantizer_of, scale_of

HERE = Path(__file__).resolve().parent
VALUES = json.loads((HERE / "golden_te_2_11.json").read_text())["values"]


def quantizer(scaling: str, format: str = "e4m3", **fields: Any) -> Quantizer:
    return quantizer_of(quant_of(scaling, format, **fields))


# --- golden -------------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(VALUES))
def test_operands_equal_transformer_engines_reference(name: str) -> None:
    scaling, *rest = name.split("_")
    side = {"activation": "x", "weight": "w"}.get(rest[0], "x")
    copy = rest[-1] if rest[-1] in ("row", "column") else "row"
    q = quantizer(scaling, "hybrid" if "e5m2" in rest else "e4m3")
    if "e5m2" in rest:  # no recipe has E5M2 forward; the references were asked for it, so the rule is compared too
        q.forward_format = E5M2
    for kind, x in golden.inputs().items():
        found = golden.entry(operand(q, x, side, copy).values)
        assert found["sha"] == VALUES[name][kind]["sha"], f"{kind}: {found} but the reference gave {VALUES[name][kind]}"


# --- properties ---------------------------------------------------------------------------------------------------------------------------
ALL = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")


def tensor(seed: int, rows: int = 64, columns: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values, sizes = torch.randn(rows, columns, generator=generator), torch.randn(rows, 1, generator=generator)
    return (values * torch.exp2(sizes * 4)).bfloat16()


@pytest.mark.parametrize(("side", "copy"), sorted({(side, copy) for (_, side), copy in COPY_OF.items()}))
@pytest.mark.parametrize("scaling", ALL)
def test_operands_are_exact_in_bf16_and_leave_their_input_alone(scaling: str, side: str, copy: str) -> None:
    x = tensor(1)
    before = x.clone()
    exact = quantizer(scaling, "hybrid" if scaling != "nvfp4" else "e2m1")
    exact.out = torch.float32
    wide, narrow = operand(exact, x, side, copy), operand(quantizer(scaling, "hybrid"), x, side, copy)
    assert narrow.values.dtype is torch.bfloat16
    assert torch.equal(wide.values, narrow.values.float())
    assert torch.equal(x, before)


@given(seed=st.integers(0, 10**6), scaling=st.sampled_from(["tensorwise", "blockwise", "mxfp8"]))
@settings(max_examples=30, deadline=None)
def test_quantising_twice_is_quantising_once(seed: int, scaling: str) -> None:
    # powers of two and per-tensor codes: the block's largest code is not lost, so the scale found again is the same or finer
    q = quantizer(scaling)
    once = operand(q, tensor(seed)).dequantized()
    twice = operand(q, once).dequantized()
    assert torch.allclose(twice, once, rtol=2e-7 if scaling == "tensorwise" else 0, atol=0)


@given(seed=st.integers(0, 10**6), power=st.integers(-20, 20), scaling=st.sampled_from(ALL[1:]))
@settings(max_examples=40, deadline=None)
def test_scaling_the_input_by_a_power_of_two_scales_the_operand(seed: int, power: int, scaling: str) -> None:
    x = tensor(seed).float()
    q = quantizer(scaling)
    a, b = operand(q, x), operand(q, x * 2.0**power)
    assert torch.equal(a.dequantized() * 2.0**power, b.dequantized())


@given(seed=st.integers(0, 10**6), scaling=st.sampled_from(["tensorwise", "blockwise", "mxfp8"]))
@settings(max_examples=30, deadline=None)
def test_order_is_kept_within_a_block(seed: int, scaling: str) -> None:
    row = tensor(seed, 1, 32).float().sort(1).values
    q = operand(quantizer(scaling), row.expand(64, 32).repeat(1, 4)).dequantized()[0, :32]
    assert (q.diff() >= 0).all()


@pytest.mark.parametrize("scaling", ["blockwise", "mxfp8"])
def test_row_and_column_copies_come_from_the_high_precision_tensor(scaling: str) -> None:
    x = tensor(3, 128, 128)
    q = quantizer(scaling)
    row, column = operand(q, x), operand(q, x, copy="column")
    assert torch.equal(column.values, operand(q, x.t().contiguous()).values.t())
    # a column copy made from the row copy would differ
    assert not torch.equal(column.values, operand(q, row.dequantized().bfloat16(), copy="column").values)


def test_hybrid_means_e5m2_gradients_for_every_fp8_scaling() -> None:
    x = tensor(4)
    for scaling in ("tensorwise", "blockwise", "mxfp8"):
        gradient, e5m2 = operand(quantizer(scaling, "hybrid"), x, "dy"), quantizer(scaling, "e4m3")
        assert not torch.equal(gradient.values, operand(e5m2, x, "dy").values)
        e5m2.gradient_format = E5M2
        assert torch.equal(gradient.values, operand(e5m2, x, "dy").values)


def test_partial_blocks_of_blockwise_are_padded_with_zeros() -> None:
    q = quantizer("blockwise")
    x = tensor(5, 48, 208)
    full = torch.zeros(128, 256, dtype=x.dtype)
    full[:48, :208] = x
    for side, copy in (("x", "row"), ("x", "column"), ("w", "row")):
        assert torch.equal(operand(q, x, side, copy).values, operand(q, full, side, copy).values[:48, :208])


@pytest.mark.parametrize("scaling", ALL)
def test_zero_tensors_stay_zero(scaling: str) -> None:
    x = torch.zeros(32, 128, dtype=torch.bfloat16)
    for side in ("x", "w", "dy"):
        assert not operand(quantizer(scaling), x, side).dequantized().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("scaling", ALL)
def test_other_base_dtypes_quantize_to_the_same_numbers(scaling: str, dtype: torch.dtype) -> None:
    x = (tensor(6) * 0.01).to(torch.float16)  # exact in fp16 and fp32
    a, b = operand(quantizer(scaling), x.to(dtype)), operand(quantizer(scaling), x.float())
    assert torch.equal(a.values, b.values)


# --- what is not finite -------------------------------------------------------------------------------------------------------------------
def spoiled(value: float) -> torch.Tensor:
    x = tensor(7, 32, 128)
    x[0, 0] = value
    return x


def test_tensorwise_infinity_gives_scale_one_and_saturates() -> None:
    q = operand(quantizer("tensorwise"), spoiled(math.inf))
    assert q.alpha.item() == 1.0
    assert q.values[0, 0] == 448
    assert q.values.isfinite().all()


def test_tensorwise_nan_stays_nan_and_does_not_touch_the_scale() -> None:
    q, clean = operand(quantizer("tensorwise"), spoiled(math.nan)), operand(quantizer("tensorwise"), spoiled(0.0))
    assert q.values[0, 0].isnan()
    assert q.alpha == clean.alpha
    assert torch.equal(q.values.flatten()[1:], clean.values.flatten()[1:])


def test_mxfp8_block_with_infinity_is_wiped_out_at_2_11() -> None:
    q = operand(quantizer("mxfp8"), spoiled(math.inf)).values
    assert q[0, 0].isnan()
    assert not q[0, 1:32].any()
    assert torch.equal(q[0, 32:], operand(quantizer("mxfp8"), spoiled(0.0)).values[0, 32:])


def test_nvfp4_has_no_nan() -> None:
    q = operand(quantizer("nvfp4"), spoiled(math.nan)).values
    assert q.isfinite().all()
    assert q[0, 0] > 0


# --- stochastic rounding ------------------------------------------------------------------------------------------------------------------
def test_stochastic_gradients_are_unbiased_but_for_clipped_block_maxima() -> None:
    """Measured bias of <q, x> / <x, x> over 200 draws: about -0.4 %, because an E4M3 block scale may round down and its maximum clips at 6."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = quantizer("nvfp4")
    mean = sum(operand(q, x, "dy").dequantized() for _ in range(200)) / 200
    high = x.float()
    # blocks whose maximum does not clip are unbiased: the mean over draws lies within its own standard error everywhere
    scale = high.view(-1, 16).abs().amax(1, keepdim=True)
    bias = float((mean * high).sum() / (high * high).sum() - 1)
    assert -0.008 < bias < -0.001
    inner = high.view(-1, 16).abs() < 0.8 * scale
    mean, high = mean.view(-1, 16)[inner], high.view(-1, 16)[inner]
    inside = float((mean * high).sum() / (high * high).sum() - 1)
    # eight random bits round a probability down to a multiple of 1/256: at most 0.2 % low on average
    assert abs(inside) < 0.003


def test_random_bits_depend_on_step_name_and_draw_only() -> None:
    x = tensor(8)
    first, second = quantizer("nvfp4"), quantizer("nvfp4")
    a, b = operand(first, x, "dy").values, operand(first, x, "dy").values
    assert not torch.equal(a, b)
    assert torch.equal(operand(second, x, "dy").values, a)
    second._randomness.begin(5)
    assert not torch.equal(operand(second, x, "dy").values, a)
    second._randomness.begin(0)
    assert torch.equal(operand(second, x, "dy").values, a)


# --- delayed scaling ----------------------------------------------------------------------------------------------------------------------
def feed(q: Quantizer, amaxes: list[float]) -> list[float]:
    """Scales of the forward input after each of the amaxes."""
    found = []
    for amax in amaxes:
        x = torch.zeros(8, 16, dtype=torch.bfloat16)
        x[0, 0] = amax
        operand(q, x)
        q.end_forward()
        found.append(scale_of(q, "fc", "x"))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("algo", "history", "amaxes", "scales"),
    [
        # the fused kernel neither rolls nor rescales on an amax of zero, so history 4 still remembers the 8: 448/8
        pytest.param("max", 4, [8, 0, 0, 0, 0, 0, 2], [56] * 7, id="zeros-do-not-age-the-history"),
        pytest.param("max", 2, [8, 4, 2, 1], [56, 56, 112, 224], id="max-of-two"),
        pytest.param("max", 1, [8, 4, 0, 2], [56, 112, 112, 224], id="history-of-one"),
        pytest.param("most_recent", 4, [8, 4, 0, 2], [56, 112, 112, 224], id="most-recent"),
        pytest.param("most_recent", 1, [8, math.inf, math.nan, 4], [56, 56, 56, 112], id="infinity-and-nan-keep-it"),
        # an infinite amax stays in the history and freezes the scale until it rolls out
        pytest.param("max", 2, [8, math.inf, 4, 4], [56, 56, 56, 112], id="infinity-freezes-max"),
    ],
)
def test_delayed_history(algo: Any, history: int, amaxes: list[float], scales: list[float]) -> None:
    assert feed(quantizer("delayed", amax_algo=algo, amax_history=history), amaxes) == scales


def test_delayed_scale_starts_at_one_and_is_one_step_late() -> None:
    q = quantizer("delayed")
    x = torch.full((8, 16), 1000.0, dtype=torch.bfloat16)
    assert (operand(q, x).values == 448).all()  # saturated under the scale of the start
    q.end_forward()
    assert operand(q, x).dequantized() == pytest.approx(1000.0, rel=0.05)


def test_margin_halves_the_scale_and_tiny_amaxes_saturate_it() -> None:
    assert feed(quantizer("delayed", margin=1), [8.0]) == [28.0]
    assert feed(quantizer("delayed"), [1e-38 / 64]) == [torch.finfo(torch.float32).max]


def test_two_micro_batches_count_their_larger_amax() -> None:
    q = quantizer("delayed")
    for amax in (2.0, 8.0, 4.0):
        operand(q, torch.full((8, 16), amax, dtype=torch.bfloat16))
    q.end_forward()
    assert scale_of(q, "fc", "x") == 56.0


def test_gradient_scales_move_at_the_end_of_backward_only() -> None:
    q = quantizer("delayed", "hybrid")
    operand(q, torch.full((8, 16), 2.0, dtype=torch.bfloat16), "dy")
    q.end_forward()
    assert scale_of(q, "fc", "dy") == 1.0
    q.end_backward()
    assert scale_of(q, "fc", "dy") == 57344.0 / 2


def test_delayed_state_round_trips_and_misfits_are_named() -> None:
    q = quantizer("delayed", amax_history=3)
    feed(q, [8.0, 2.0])
    other = quantizer("delayed", amax_history=3)
    other.load_state(q.state())
    assert feed(other, [1.0, 1.0]) == feed(q, [1.0, 1.0])
    with pytest.raises(CheckpointError, match=r"expected shape \(3,\).*fc\.x"):
        quantizer("delayed", amax_history=2).load_state(q.state())
    with pytest.raises(CheckpointError, match=r"missing: fc\.dy"):
        quantizer("delayed", amax_history=3).load_state({name: t for name, t in q.state().items() if name != "fc.dy"})


def test_custom_factories_are_refused() -> None:
    with pytest.raises(Refused, match=r"package\.module\.factory"):
        quantizer("custom", factory="package.module.factory")


# --- as stored ----------------------------------------------------------------------------------------------------------------------------
def read_back(made: StoredWeight) -> torch.Tensor:
    """Code times block scale, by the formats' definitions; one scale for all of the tensor is left out, as in `Operand.values`."""
    if made.codes.dtype is torch.uint8:
        grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        nibbles = torch.stack([made.codes & 15, made.codes >> 4], -1).flatten(1).long()
        codes = torch.where(nibbles > 7, -1.0, 1.0) * grid[nibbles % 8]
    else:
        codes = made.codes.float()
    scales = torch.exp2(made.scales.float() - 127) if made.scales.dtype is torch.uint8 else made.scales.float()
    if scales.shape[1] == 1 and made.scales.dtype is torch.float32:
        return codes
    return codes * scales.repeat_interleave(-(-codes.shape[1] // scales.shape[1]), 1)


@pytest.mark.parametrize("name", ["nvfp4_weight_row", "blockwise_weight_e4m3_row", "tensorwise_e4m3"])
def test_stored_codes_stand_for_the_values_of_transformer_engines_reference(name: str) -> None:
    for kind, x in golden.inputs().items():
        values = read_back(stored(quantizer(name.partition("_")[0]), x))
        assert golden.entry(values + 0.0)["sha"] == VALUES[name][kind]["sha"], kind  # an operand has no negative zero


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_what_lies_beyond_the_format_saturates_in_stored_codes(scaling: str) -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(3)).bfloat16() * 1000
    x[5, 7], x[6, 8] = float("-inf"), float("nan")  # an infinite amax: the scale is 1
    found = stored(quantizer(scaling), x).codes.float()
    assert torch.equal(found[x == x], round_nearest(x.float(), E4M3)[x == x])
    assert float(found[5, 7]) == -448
    assert bool(found[6, 8].isnan())


@pytest.mark.usefixtures("torchaos_own")
def test_stored_mxfp8_is_torchaos() -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = ScaleCalculationMode.RCEIL
    for kind in ("normal", "outliers", "row_scaled", "wide"):
        x = golden.inputs()[kind].bfloat16()
        made = stored(quantizer("mxfp8"), x)
        scales, codes = to_mx(x, torch.float8_e4m3fn, 32, mode)
        assert torch.equal(made.scales, scales.view(torch.uint8).view(made.scales.shape)), kind
        assert torch.equal(made.codes.view(torch.uint8), codes.view(torch.uint8)), kind


@pytest.mark.parametrize(
    ("scaling", "options"),
    [
        ("tensorwise", {"power_of_two": True}),
        ("blockwise", {"power_of_two": False}),
        ("mxfp8", {}),
        ("mxfp8", {"square_weights": True}),
        ("nvfp4", {"square_weights": False}),
        ("nvfp4", {"four_over_six": "weights"}),
        ("nvfp4", {"four_over_six": "weights", "four_over_six_256": "none", "square_weights": False}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_stored_codes_stand_for_what_the_gemm_reads(scaling: str, options: dict[str, Any]) -> None:
    x = torch.randn(272, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[5, 7] = 30
    q = quantizer_of(quant_of(scaling, options=tuple(sorted(options.items()))), release=(2, 20))
    made, wanted = stored(q, x), operand(q, x, "w")
    found = read_back(made) if made.scales.shape[1] > 1 else made.codes.float()
    assert torch.equal(found + 0.0, wanted.values.float())
    if made.amax is not None:
        assert float(made.amax) / made.reach == pytest.approx(float(wanted.alpha), rel=1e-6)
        assert float(made.divisor * wanted.alpha) == pytest.approx(1.0, rel=1e-6)


def test_square_weights_of_mxfp8_share_a_scale_over_32_lines() -> None:
    """By the definition: E8M0 of the amax of 32x32 elements over 448, rounded up, and E4M3's nearest codes; rows shrink by 2**-20, so lines would differ."""
    quant = quant_of("mxfp8", options=(("square_weights", True),))
    q = quantizer_of(quant, release=(2, 20))
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * torch.exp2(-torch.arange(64) % 21.0)[:, None]
    x = x.bfloat16()
    scale = torch.exp2(torch.ceil(torch.log2(x.float().abs().view(2, 32, 3, 32).amax((1, 3)) / 448)))
    scale = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    wanted = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(operand(q, x, "w").values.float(), wanted)
    assert not torch.equal(operand(q, x, "x").values.float(), wanted)
    with pytest.raises(Refused, match=r"square_weights=true needs Transformer Engine 2\.20"):
        quantizer_of(quant, release=(2, 11))
