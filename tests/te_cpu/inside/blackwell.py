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


def test_swizzled_scales_are_read_back() -> None:
    if not hasattr(MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3), "optimize_for_gemm"):
        pytest.skip("this release stores no swizzled scales")
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
