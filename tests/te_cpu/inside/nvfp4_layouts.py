"""NVFP4: the order of its scales, options that exclude each other, and fast math."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import NVFP4BlockScaling
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from mpbridge.backend.devices.redirect import CPU
from mpbridge.common.errors import Refused
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.precision.regions import Quant
from mpbridge.te_cpu.operands import gemm_operand, values_of
from mpbridge.te_cpu.played import now, playing
from mpbridge.te_cpu.swizzle import swizzled

BLACKWELL = now().capability >= (10, 0)
E4M3 = tex.DType.kFloat8E4M3
RHT = {"with_rht": True, "with_post_rht_amax": True}
SQUARE = {"with_2d_quantization": True}
ROWS = {"row_scaled_nvfp4": True}
SIX = {"nvfp4_use_4over6": True}


def nvfp4(*, tiles: bool = False, **options: Any) -> Any:
    made = NVFP4Quantizer(**options)
    made.optimize_for_gemm = tiles
    return made


def tokens(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape).bfloat16()


# --- names of arguments ------------------------------------------------------------------------------------------------------------------
@pytest.mark.since((2, 20))
def test_a_dropped_column_copy_of_square_blocks_is_made_again_from_the_rows() -> None:
    x = tokens(64, 128)
    both, rows = nvfp4(**SQUARE)(x), nvfp4(columnwise=False, **SQUARE)(x)
    assert rows._columnwise_data is None
    rows.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert torch.equal(rows._columnwise_data, both._columnwise_data)
    assert torch.equal(values_of(rows, torch.float32, column=True), values_of(both, torch.float32, column=True))


@pytest.mark.since((2, 20))
@pytest.mark.parametrize(
    ("name", "wide", "defaults"),
    [("scaled_dswiglu", 2, ()), ("scaled_dsituglu", 2, (4.0, 25.0)), ("scaled_clamped_dswiglu", 2, (7.0, 1.702, 1.0)), ("scaled_dsrelu", 1, ())],
)  # fmt: skip
def test_backward_activations_take_the_forward_input_by_its_name(name, wide, defaults) -> None:
    x, grad, factors = torch.randn(4, 8 * wide), torch.randn(4, 8), torch.rand(4)
    function = getattr(tex, name)
    by_name = function(grad=grad, fwd_input=x, act_scales=factors, quantizer=None)
    assert torch.equal(by_name[0], function(grad, x, factors, None, *defaults)[0])


# --- the order of scales -----------------------------------------------------------------------------------------------------------------
LAYOUTS = [
    # rows, columns, options, whether a Blackwell's kernel puts the scales in tiles itself
    pytest.param(128, 128, RHT, True, id="transform"),
    pytest.param(64, 128, RHT, True, id="transform, 64 rows"),
    pytest.param(96, 128, RHT, False, id="transform, 96 rows"),
    pytest.param(128, 64, RHT, False, id="transform, 64 columns"),
    pytest.param(128, 128, SQUARE, True, id="square"),
    pytest.param(64, 128, SQUARE, False, id="square, 64 rows"),
    pytest.param(128, 192, SQUARE, False, id="square, 192 columns"),
    pytest.param(128, 128, SQUARE | SIX, False, id="square, four over six"),
    pytest.param(128, 128, ROWS, False, id="by row"),
    pytest.param(128, 128, {}, False, id="plain"),
]


@pytest.mark.since((2, 20))
@pytest.mark.parametrize(("rows", "columns", "options", "fused"), LAYOUTS)
def test_scales_are_in_tiles_where_the_kernel_puts_them_and_behind_quantize(rows, columns, options, fused) -> None:
    x, compact, tiled = tokens(rows, columns), nvfp4(**options), nvfp4(tiles=True, **options)
    expected = compact(x)
    assert compact.make_empty(x.shape, dtype=x.dtype)._with_gemm_swizzled_scales is False
    assert tiled.make_empty(x.shape, dtype=x.dtype)._with_gemm_swizzled_scales is (fused and BLACKWELL)
    alone = tex.multi_tensor_quantize([x], [tiled])[0]
    assert alone._with_gemm_swizzled_scales is (fused and BLACKWELL)
    again = tiled(x)
    for made in (tiled(x), tex.quantize(x, tiled, again), alone):
        assert made is alone or made._with_gemm_swizzled_scales is True
        for name in ("_rowwise", "_columnwise"):
            assert torch.equal(getattr(made, f"{name}_data"), getattr(expected, f"{name}_data"))
            scales = getattr(expected, f"{name}_scale_inv")
            ordered = swizzled(scales) if made._with_gemm_swizzled_scales else scales
            assert torch.equal(getattr(made, f"{name}_scale_inv"), ordered)


@pytest.mark.since((2, 20))
def test_norms_leave_scales_that_their_kernel_does_not_order() -> None:
    x, quantizer = tokens(96, 128), nvfp4(tiles=True, **RHT)
    y = tex.rmsnorm_fwd(x, torch.ones(128).bfloat16(), 1e-5, None, quantizer, tex.DType.kBFloat16, 0, False)[0]
    assert y._with_gemm_swizzled_scales is False


@pytest.mark.since((2, 20))
@pytest.mark.parametrize(
    ("sizes", "options", "fused"),
    [([128, 0, 256], RHT, True), ([128, 64], RHT, False), ([128, 128], {}, False)],
    ids=["tiles", "64 rows", "without the transform"],
)
def test_scales_of_parts_quantized_together_are_all_in_tiles_or_none(sizes, options, fused) -> None:
    x, quantizers = tokens(sum(sizes), 128), [nvfp4(tiles=True, **options) for _ in sizes]
    parts = tex.split_quantize(x, sizes, quantizers)
    assert {part._with_gemm_swizzled_scales for part in parts} == {fused and BLACKWELL}
    for part, own in zip(parts, torch.split(x, sizes), strict=True):
        if len(own):
            alone = nvfp4(**options)(own)
            for column in (False, True):
                found, wanted = (values_of(one, torch.float32, column=column) for one in (part, alone))
                assert torch.equal(found, wanted)


@pytest.fixture
def release():
    """Plays the machine with another release for the rest of the test."""
    with ExitStack() as stack:
        yield lambda number: stack.enter_context(playing(now().machine, number))


@pytest.mark.since((2, 20))
@pytest.mark.played("blackwell")
@pytest.mark.parametrize(
    ("number", "transform", "square"),
    [((2, 16), False, False), ((2, 17), True, False), ((2, 18), True, True)],
    ids=["2.16", "2.17", "2.18"],
)
def test_kernels_learned_tiles_release_by_release(number, transform, square, release) -> None:
    release(number)
    x = tokens(128, 128)
    for options, expected in ((RHT, transform), (SQUARE, square)):
        quantizer = nvfp4(tiles=True, **options)
        assert quantizer.make_empty(x.shape, dtype=x.dtype)._with_gemm_swizzled_scales is expected
        assert quantizer(x)._with_gemm_swizzled_scales is (number >= (2, 17))


@pytest.mark.since((2, 20))
def test_row_scaled_tensors_have_no_column_copy_before_2_19(release) -> None:
    x = tokens(64, 64)
    assert nvfp4(**ROWS)(x)._columnwise_data is not None
    release((2, 18))
    with pytest.raises(RuntimeError, match="Row-scaled NVFP4 quantization does not support columnwise usage"):
        nvfp4(**ROWS)(x)


# --- what is refused ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.since((2, 20))
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (SIX | RHT, "4over6 quantization does not support RHT"),
        (SIX | {"stochastic_rounding": True}, "4over6 quantization does not support stochastic rounding"),
        (SIX | SQUARE | {"rowwise": False}, "4over6 2D quantization requires rowwise output"),
        (ROWS | RHT, "Row-scaled NVFP4 quantization does not support RHT"),
        (ROWS | SQUARE, "Row-scaled NVFP4 quantization does not support 2D quantization"),
        (ROWS | {"stochastic_rounding": True}, "Row-scaled NVFP4 quantization does not support stochastic rounding"),
        (ROWS | {"with_amax_reduction": True}, "Row-scaled NVFP4 quantization does not support amax reduction"),
        (ROWS | {"rowwise": False}, "Row-scaled NVFP4 quantization requires rowwise usage"),
        (ROWS | SIX, "Row-scaled NVFP4 transpose quantization is not supported with 4over6 mode"),
    ],
)
def test_options_that_exclude_each_other_are_refused_in_the_extensions_words(options, words) -> None:
    with pytest.raises(RuntimeError, match=words):
        nvfp4(**options)(tokens(64, 64))


@pytest.mark.since((2, 20))
@pytest.mark.parametrize("x", [torch.ones(64, 64), torch.ones(48, 64).bfloat16()], ids=["fp32", "48 rows"])
def test_column_copies_by_row_need_bf16_in_multiples_of_32(x) -> None:
    with pytest.raises(RuntimeError, match="requires BF16 input and dimensions that are multiples of 32"):
        nvfp4(**ROWS)(x)
    assert nvfp4(columnwise=False, **ROWS)(x)._amax_rowwise.numel() == len(x)


def test_transforms_need_their_own_amax() -> None:
    with pytest.raises(RuntimeError, match="Pre-RHT amax is not supported yet"):
        nvfp4(with_rht=True)(tokens(64, 64))


def test_square_columns_without_rows_are_refused_until_2_16() -> None:
    quantizer = nvfp4(rowwise=False, **SQUARE)
    if now().release >= (2, 17):
        assert quantizer(tokens(64, 64))._rowwise_data is None
        return
    with pytest.raises(RuntimeError, match="only supported when return_identity is true"):
        quantizer(tokens(64, 64))


@pytest.mark.parametrize(
    ("options", "words"),
    [(SQUARE, "support 2D quantization"), ({"with_rht": True}, "yet support pre-RHT amax")],
    ids=["square", "amax"],
)
def test_parts_quantized_together_are_refused_what_their_kernel_does_not_do(options, words) -> None:
    with pytest.raises(RuntimeError, match=f"NVFP4 split-quantize does not {words}"):
        tex.split_quantize(tokens(128, 128), [64, 64], [nvfp4(**options), nvfp4(**options)])


def test_parts_of_64_columns_are_not_quantized_together_before_2_14() -> None:
    x, quantizers = tokens(128, 64), [nvfp4(**RHT), nvfp4(**RHT)]
    if now().release >= (2, 14):
        parts = tex.split_quantize(x, [64, 64], quantizers)
        assert torch.equal(parts[0]._rowwise_data, quantizers[0](x[:64])._rowwise_data)
        return
    with pytest.raises(RuntimeError, match="requires inner dim to be multiple of 128"):
        tex.split_quantize(x, [64, 64], quantizers)


@pytest.mark.since((2, 20))
@pytest.mark.played("blackwell")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "does not support RHT"),
        ({"disable_rht": True, "nvfp4_4over6": "all"}, "not supported with 4over6 mode"),
        ({"disable_rht": True}, None),
    ],
    ids=["transform", "four over six", "neither"],
)
def test_recipes_with_row_scaling_train_with_neither_the_transform_nor_four_over_six(options, words) -> None:
    layer = te.Linear(128, 64, params_dtype=torch.bfloat16, device="cuda")
    x = tokens(64, 128).requires_grad_()
    with te.autocast(enabled=True, recipe=NVFP4BlockScaling(row_scaled_activation=True, **options)):
        if words:
            with pytest.raises(RuntimeError, match=words):
                layer(x)
            return
        layer(x).sum().backward()
    assert layer.weight.grad.isfinite().all()


# --- tensors that are written again ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [
    lambda: MXFP8Quantizer(fp8_dtype=E4M3),
    lambda: Float8CurrentScalingQuantizer(fp8_dtype=E4M3, device=torch.device("cuda")),
    nvfp4,
], ids=["mxfp8", "current", "nvfp4"])  # fmt: skip
def test_a_flag_that_skips_the_cast_changes_usages_and_no_contents(make) -> None:
    x, skip, quantizer = tokens(64, 64), torch.ones(1), make()
    new = tex.quantize(x, quantizer, None, skip)
    assert new.shape == x.shape
    quantizer.set_usage(columnwise=False)
    both = make()(x)
    before = both.dequantize()
    assert tex.quantize(x * 3, quantizer, both, skip) is both
    assert torch.equal(both.dequantize(), before)
    assert getattr(both, "_columnwise_data", getattr(both, "_transpose", None)) is None


@pytest.mark.since((2, 20))
def test_a_tensor_takes_the_row_scaling_of_its_last_quantizer() -> None:
    x = tokens(64, 96)
    made = nvfp4(columnwise=False)(x)
    again = tex.quantize(x, nvfp4(columnwise=False, **ROWS), made)
    assert again is made
    assert made._row_scaled_nvfp4 is True
    assert torch.equal(made._amax_rowwise, x.abs().amax(1).float())
    assert torch.equal(made.dequantize(), nvfp4(columnwise=False, **ROWS)(x).dequantize())


# --- fast math ---------------------------------------------------------------------------------------------------------------------------
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def codes_by_definition(x: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Packed codes of [rows, columns] under multipliers in BF16: the nearest E2M1 value, of two as near the one with the even code."""
    factor = (torch.full_like(amax, 448 * 6) / amax / scales.view(torch.float8_e4m3fn).float()).bfloat16().double()
    found = (x.double().reshape(*scales.shape, 16) * factor.unsqueeze(-1)).reshape(x.shape)
    distance = (found.abs().unsqueeze(-1) - E2M1.double()).abs() + torch.tensor([0.0, 1e-9] * 4)
    codes = distance.argmin(-1) + 8 * (found < 0)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def cast(x: torch.Tensor, monkeypatch, on: str = "1", **options: Any) -> Any:
    monkeypatch.setenv("NVTE_USE_FAST_MATH", on)
    return nvfp4(**options)(x)


@pytest.mark.since((2, 14))
def test_fast_math_rounds_multipliers_to_bf16(monkeypatch) -> None:
    x = tokens(64, 96)
    slow, fast = cast(x, monkeypatch, "0"), cast(x, monkeypatch)
    assert torch.equal(fast._rowwise_scale_inv, slow._rowwise_scale_inv)
    assert not torch.equal(fast._rowwise_data, slow._rowwise_data)
    assert torch.equal(fast._rowwise_data, codes_by_definition(x, fast._rowwise_scale_inv[:64, :6], fast._amax_rowwise))
    turned, scales = x.t().contiguous(), fast._columnwise_scale_inv[:96, :4]
    assert torch.equal(fast._columnwise_data, codes_by_definition(turned, scales, fast._amax_columnwise))


@pytest.mark.since((2, 14))
@pytest.mark.parametrize("shape", [(64, 64), (48, 64)])
@pytest.mark.parametrize("options", [RHT, {}], ids=["transform", "plain"])
def test_the_emulation_rounds_multipliers_likewise(shape, options, monkeypatch) -> None:
    x, fast = tokens(*shape), [("fast_math", True), ("hadamard", bool(options))]
    stored = cast(x, monkeypatch, **options)
    quant = Quant(format="e2m1", scaling="nvfp4", options=tuple(fast))
    emulated = Quantizer(quant, ["fc"], randomness=Randomness(0, CPU), device=CPU, release=(2, 14), compiled=False)
    for gemm, column in (("fprop", False), ("wgrad", True)):
        found = emulated.operand(x, slot="fc", gemm=gemm, side="x")
        assert torch.equal(found.values.reshape(-1), gemm_operand(stored, "x", column=column).values.reshape(-1))


@pytest.mark.since((2, 14))
def test_a_value_that_the_extension_cannot_read_is_refused(monkeypatch) -> None:
    with pytest.raises(RuntimeError, match="Invalid environment variable value"):
        cast(tokens(64, 64), monkeypatch, "true")


@pytest.mark.since((2, 20))
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((64, 64), torch.bfloat16, SQUARE),
        ((64, 64), torch.bfloat16, SIX),
        ((64, 64), torch.bfloat16, {"rowwise": False}),
        ((64, 64), torch.float32, {}),
        ((48, 64), torch.bfloat16, {}),
    ],
    ids=["square", "four over six", "columns alone", "fp32", "48 rows"],
)
def test_fast_math_changes_no_other_kernel(shape, dtype, options, monkeypatch) -> None:
    x = tokens(*shape).to(dtype)
    slow, fast = cast(x, monkeypatch, "0", **options), cast(x, monkeypatch, **options)
    for name in ("_rowwise_data", "_columnwise_data"):
        if getattr(slow, name) is not None:
            assert torch.equal(getattr(fast, name), getattr(slow, name))


@pytest.mark.since((2, 14))
@pytest.mark.played("blackwell")
def test_fast_math_is_refused_where_it_approximates(monkeypatch) -> None:
    with pytest.raises(Refused, match=r"NVTE_USE_FAST_MATH=1: .*approximate reciprocal"):
        cast(tokens(64, 128), monkeypatch, **RHT)
    with pytest.raises(Refused, match="NVTE_USE_FAST_MATH"):
        tex.split_quantize(tokens(32, 128), [16, 16], [nvfp4(**RHT), nvfp4(**RHT)])
    x = tokens(64, 64)  # casts that are not fused with the transform
    slow, fast = cast(x, monkeypatch, "0", **RHT), cast(x, monkeypatch, **RHT)
    assert not torch.equal(fast._columnwise_data, slow._columnwise_data)


def test_fast_math_has_no_effect_before_2_14(monkeypatch) -> None:
    if now().release < (2, 14):
        x = tokens(64, 96)
        assert torch.equal(cast(x, monkeypatch)._rowwise_data, cast(x, monkeypatch, "0")._rowwise_data)
