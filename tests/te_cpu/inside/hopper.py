"""What holds on a Hopper."""

from __future__ import annotations

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer


@pytest.mark.parametrize("made", [recipe.MXFP8BlockScaling, recipe.NVFP4BlockScaling])
def test_recipes_of_later_machines_are_refused_in_transformer_engines_words(made) -> None:
    with (
        pytest.raises((AssertionError, RuntimeError), match=r"compute capability 10\.0"),
        te.autocast(enabled=True, recipe=made()),
    ):
        pass


def test_a_gemm_without_the_transpose_that_it_needs_fails() -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    quantizer = Float8CurrentScalingQuantizer(
        fp8_dtype=tex.DType.kFloat8E4M3, device=torch.device("cuda"), rowwise=True, columnwise=False
    )
    a, b = quantizer(torch.randn(16, 64, dtype=torch.bfloat16)), quantizer(x)
    arguments = (
        None,
        None,
        tex.DType.kBFloat16,
        None,
        tex.DType.kBFloat16,
        False,
        None,
        False,
        torch.zeros(1, dtype=torch.uint8),
        1,
        False,
        True,
    )
    y = tex.generic_gemm(a, True, b, False, *arguments)[0]
    torch.testing.assert_close(y.float(), b.dequantize().float() @ a.dequantize().float().t(), rtol=0.02, atol=0.05)
    with pytest.raises(RuntimeError, match="Input A is missing column-wise usage"):
        tex.generic_gemm(a, False, quantizer(torch.randn(32, 16, dtype=torch.bfloat16)), False, *arguments)
