"""What holds on a Blackwell."""

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from .gemm_refusals import multiply, quantizer


def test_mxfp8_scales_are_padded_and_compact_data_dequantizes() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 96, dtype=torch.bfloat16)
    made = quantizer("mxfp8", tiles=False)(x)
    assert made._rowwise_scale_inv.shape == (128, 4)
    assert made._columnwise_scale_inv.shape == (4, 128)
    assert made._rowwise_scale_inv[64:].count_nonzero() == 0
    # the scale byte is the exponent of the smallest power of two with amax / 448 below it
    amax = x[:, :32].abs().amax(1).float()
    exponents = made._rowwise_scale_inv[:64, 0].int() - 127
    assert torch.equal(exponents, torch.ceil(torch.log2(amax / 448)).int())
    assert float((made.dequantize() - x).abs().max() / x.abs().max()) < 0.04


@pytest.mark.since((2, 12))
def test_swizzled_scales_are_read_back() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(160, 256, dtype=torch.bfloat16), torch.randn(96, 256, dtype=torch.bfloat16)
    results, stored = [], []
    for ready in (False, True):
        cast = quantizer("mxfp8", tiles=ready)
        cast.internal = True
        a, b = cast(w), cast(x)
        assert a._with_gemm_swizzled_scales is ready
        results.append(multiply(a, b))
        stored.append(a._rowwise_scale_inv)
    assert torch.equal(*results)
    assert not torch.equal(*stored)


@pytest.mark.since((2, 20))
@pytest.mark.parametrize("kind", ["mxfp8_rowwise", "mxfp8_columnwise", "nvfp4"])
def test_scales_of_weights_that_lie_apart_are_put_in_tiles(kind) -> None:
    """Where each scale goes is cuBLAS's formula for one tile of 128 by 4; padding is cleared."""
    torch.manual_seed(0)
    column, packed = kind.endswith("columnwise"), 48 if kind == "nvfp4" else 96
    shapes = {"rowwise": ((160, 3), (256, 4)), "columnwise": ((5, 96), (8, 128)), "nvfp4": ((160, 6), (256, 8))}
    shape, padded = shapes[kind.removeprefix("mxfp8_")]
    data = [torch.zeros(160, packed, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.randint(1, 255, padded, dtype=torch.uint8) for _ in data]
    data_at, scales_at, buffer = tex.grouped_mlp_experimental.swizzle_scales_and_pack_ptrs_for_discrete_weights(
        data, scales, kind, torch.device("cuda")
    )
    count = scales[0].numel()
    assert data_at.tolist() == [part.data_ptr() for part in data]
    assert scales_at.tolist() == [buffer.data_ptr() + index * count for index in range(2)]
    outer, inner = reversed(shape) if column else shape
    across = (padded[0] if column else padded[1]) // 4
    for found, given in zip(buffer.view(2, -1), scales, strict=True):
        expected = torch.zeros(count, dtype=torch.uint8)
        for row in range(outer):
            for at in range(inner):
                tile = row // 128 * across + at // 4
                expected[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + at % 4] = (
                    given[at, row] if column else given[row, at]
                )
        assert torch.equal(found, expected)


@pytest.mark.since((2, 20))
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_scales_put_in_tiles_later_are_those_of_a_quantizer_that_does(kind) -> None:
    torch.manual_seed(0)
    x = torch.randn(160, 96, dtype=torch.bfloat16)
    plain, tiled = (quantizer(kind, tiles=ready)(x) for ready in (False, True))
    before = plain._rowwise_scale_inv.clone()
    for _ in range(2):  # a second call changes nothing
        tex.swizzle_scales_for_gemm_(plain)
        assert plain._with_gemm_swizzled_scales
        assert torch.equal(plain._rowwise_scale_inv, tiled._rowwise_scale_inv)
        assert torch.equal(plain._columnwise_scale_inv, tiled._columnwise_scale_inv)
    assert not torch.equal(before, plain._rowwise_scale_inv)


def test_nvfp4_codes_are_two_a_byte_under_two_scales() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    made = quantizer("nvfp4", tiles=False)(x)
    assert made._rowwise_data.shape == (64, 64)
    assert made._columnwise_data.shape == (128, 32)
    assert made._rowwise_scale_inv.shape == (128, 8)
    assert float(made._amax_rowwise) == float(x.abs().max())
    assert float((made.dequantize() - x).norm() / x.norm()) < 0.15


@pytest.mark.parametrize("shape", [(33, 64), (64, 33)])
def test_shapes_that_do_not_fit_are_refused_in_the_extensions_words(shape) -> None:
    words = r"divisible by (MXFP8_BLOCK_SCALING_SIZE|32)|MXFP8|32"
    with pytest.raises((RuntimeError, AssertionError, ValueError), match=words):
        quantizer("mxfp8", tiles=False)(torch.randn(*shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_storage_classes_and_tensors_dequantize_alike(kind) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    bare, full = (quantizer(kind, tiles=False) for _ in range(2))
    bare.internal = True
    whole = full(x)
    assert torch.equal(bare(x).dequantize(dtype=torch.bfloat16), whole.dequantize())
    assert torch.equal(whole.to(torch.float64), whole.dequantize().double())


@pytest.mark.since((2, 20))
@pytest.mark.parametrize(("mode", "largest"), [("MAE", 256), ("MSE", 448)])
def test_four_over_six_with_fast_errors_chooses_as_transformer_engines_reference(mode, largest, monkeypatch) -> None:
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    torch.manual_seed(0)
    x = torch.randn(1024, 256, dtype=torch.bfloat16)  # torch releases draw other values
    options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": largest, "nvfp4_4over6_err_mode": mode}
    codes = []
    for fast in (False, True):
        monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", str(int(fast)))
        made = NVFP4Quantizer(**options)(x)
        wanted = reference_nvfp4.NVFP4QuantizerRef(
            dtype=reference_utils.Fp4Formats.E2M1, rowwise=True, columnwise=False, pow_2_scales=False, eps=0.0, quant_tile_shape=(1, 16),
            nvfp4_4over6_err_use_fast_math=fast, **options,
        ).quantize(x)  # fmt: skip
        assert torch.equal(made._rowwise_data, wanted.data.view(torch.uint8))
        codes.append(made._rowwise_data)
    if mode == "MAE":  # some of these blocks are near enough to a tie; squares part them
        assert not torch.equal(*codes)


@pytest.mark.since((2, 17))
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("mode", "power"), [("MAE", 1), ("MSE", 2)])
def test_four_over_six_errs_less(square, mode, power) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    options = {"with_2d_quantization": square, "nvfp4_use_4over6": True, "nvfp4_e4m3_max": 448}
    chosen = NVFP4Quantizer(**options, nvfp4_4over6_err_mode=mode)(x)
    plain = NVFP4Quantizer(with_2d_quantization=square)(x)
    assert chosen._nvfp4_use_4over6
    assert chosen._nvfp4_e4m3_max == 448
    apart = [(made.dequantize(dtype=torch.float32) - x.float()).abs() for made in (chosen, plain)]
    errors = [float(one.pow(power).mean()) for one in apart]
    # square blocks of these values may all choose 6
    assert errors[0] < errors[1] or (square and errors[0] == errors[1])
