"""What holds on a Blackwell."""

from __future__ import annotations

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer


def test_mxfp8_scales_are_padded_and_compact_data_dequantizes() -> None:
    torch.manual_seed(0)
    quantizer = MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3)
    x = torch.randn(64, 96, dtype=torch.bfloat16)
    made = quantizer(x)
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
        quantizer = MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3)
        quantizer.optimize_for_gemm, quantizer.internal = ready, True
        a, b = quantizer(w), quantizer(x)
        assert a._with_gemm_swizzled_scales is ready
        results.append(
            tex.generic_gemm(
                a,
                True,
                b,
                False,
                None,
                None,
                tex.DType.kBFloat16,
                None,
                tex.DType.kBFloat16,
                False,
                None,
                False,
                torch.zeros(1),
                1,
                False,
                False,
            )[0]
        )
        stored.append(a._rowwise_scale_inv)
    assert torch.equal(*results)
    assert not torch.equal(*stored)


def test_nvfp4_codes_are_two_a_byte_under_two_scales() -> None:
    torch.manual_seed(0)
    quantizer = NVFP4Quantizer(
        rowwise=True,
        columnwise=True,
        with_rht=False,
        with_post_rht_amax=False,
        with_2d_quantization=False,
        stochastic_rounding=False,
    )
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    made = quantizer(x)
    assert made._rowwise_data.shape == (64, 64)
    assert made._columnwise_data.shape == (128, 32)
    assert made._rowwise_scale_inv.shape == (128, 8)
    assert float(made._amax_rowwise) == float(x.abs().max())
    assert float((made.dequantize() - x).norm() / x.norm()) < 0.15


@pytest.mark.parametrize("shape", [(33, 64), (64, 33)])
def test_shapes_that_do_not_fit_are_refused_in_the_extensions_words(shape) -> None:
    with pytest.raises(
        (RuntimeError, AssertionError, ValueError), match=r"divisible by (MXFP8_BLOCK_SCALING_SIZE|32)|MXFP8|32"
    ):
        MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3)(torch.randn(*shape, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "kind", [lambda: MXFP8Quantizer(tex.DType.kFloat8E4M3), NVFP4Quantizer], ids=["mxfp8", "nvfp4"]
)
def test_storage_classes_and_tensors_dequantize_alike(kind) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    bare, full = kind(), kind()
    bare.internal = True
    whole = full(x)
    assert torch.equal(bare(x).dequantize(dtype=torch.bfloat16), whole.dequantize())
    assert torch.equal(whole.to(torch.float64), whole.dequantize().double())


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
    errors = [
        float((made.dequantize(dtype=torch.float32) - x.float()).abs().pow(power).mean()) for made in (chosen, plain)
    ]
    # square blocks of these values may all choose 6
    assert errors[0] < errors[1] or (square and errors[0] == errors[1])
