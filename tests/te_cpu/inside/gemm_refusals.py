"""GEMMs that the extension or cuBLASLt refuses: a forgotten copy or quantization, and outputs that do not fit."""

from __future__ import annotations

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from .groups import blocks, current, mxfp8

BLACKWELL = torch.cuda.get_device_capability() >= (10, 0)
BF16, FP16, FP32 = tex.DType.kBFloat16, tex.DType.kFloat16, tex.DType.kFloat32
OURS = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}
X = torch.randn(256, 128, dtype=torch.bfloat16)


def nvfp4():
    return NVFP4Quantizer(rowwise=True, columnwise=True)


FORMATS = {
    "bf16": lambda x: x,
    "fp16": lambda x: x.half(),
    "fp32": lambda x: x.float(),
    "current": lambda x: current()(x),
    **(
        {"mxfp8": lambda x: mxfp8()(x), "nvfp4": lambda x: nvfp4()(x)}
        if BLACKWELL
        else {"blocks": lambda x: blocks(1)(x)}
    ),
}
COPIED = ["mxfp8", "nvfp4"] if BLACKWELL else ["blocks"]


def multiply(a, b, *, layout: str = "TN", out=None, dtype=BF16):
    """op(b) op(a) by the extension."""
    workspace = torch.empty(1024, dtype=torch.uint8)
    return tex.generic_gemm(
        a, layout[0] == "T", b, layout[1] == "T", out, None, dtype, None, BF16, False, None, False, workspace, 1024, False, True
    )[0]  # fmt: skip


@pytest.mark.parametrize("left", FORMATS)
@pytest.mark.parametrize("right", FORMATS)
def test_two_formats_have_no_product(left, right) -> None:
    a, b = FORMATS[left](X), FORMATS[right](X)
    dtype = {"fp16": FP16, "fp32": FP32}.get(left, BF16)
    if left == right:
        values = [one if left in ("bf16", "fp16", "fp32") else one.dequantize() for one in (a, b)]
        expected = values[1].double() @ values[0].double().t()
        torch.testing.assert_close(
            multiply(a, b, dtype=dtype).double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())
        )
        return
    scaled = {"mxfp8", "nvfp4", "blocks"} & {left, right}
    message = "compatible scaling modes" if scaled else "CUBLAS_STATUS_NOT_SUPPORTED: no product of"
    with pytest.raises(RuntimeError, match=message):
        multiply(a, b, dtype=dtype)


@pytest.mark.parametrize("form", COPIED)
@pytest.mark.parametrize(
    ("layout", "missing", "message"),
    [
        ("TN", "row a", "Input A is missing row-wise usage"),
        ("TN", "row b", "Input B is missing row-wise usage"),
        ("NN", "column a", "Input A is missing column-wise usage"),
        ("NT", "column b", "Input B is missing column-wise usage"),
        ("TN", "row a, column a", "Input A does not hold any data!"),
    ],
)
def test_a_copy_that_is_missing_is_named(form, layout, missing, message) -> None:
    one = torch.randn(256, 256, dtype=torch.bfloat16)
    tensors = {"a": FORMATS[form](one), "b": FORMATS[form](one)}
    for what in missing.split(", "):
        copy, name = what.split()
        setattr(tensors[name], f"_{copy}wise_data", None)
        setattr(tensors[name], f"_{copy}wise_scale_inv", None)
    with pytest.raises(RuntimeError, match=message):
        multiply(tensors["a"], tensors["b"], layout=layout)


def test_an_output_of_another_shape_or_dtype_is_not_written() -> None:
    weight, x = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(4, 4, 128, dtype=torch.bfloat16)
    for shape in ((64, 16), (16, 64), (1, 16, 64)):
        with pytest.raises(RuntimeError, match=r"invalid dims \(expected \(4, 4, 64\), got"):
            multiply(weight, x, out=torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"invalid dtype \(expected bf16, found fp32\)"):
        multiply(weight, x, out=torch.zeros(4, 4, 64))
    with pytest.raises(
        RuntimeError, match=r"Invalid matrix dimensions for GEMM \(A=\(64,128\), transa=0, B=\(16,128\)"
    ):
        multiply(weight, x, layout="NN")
    out = torch.zeros(4, 4, 64)
    assert multiply(weight, x, out=out, dtype=FP32) is out
    assert out.count_nonzero()


@pytest.mark.parametrize(("factors", "product"), [(FP32, BF16), (BF16, FP16), (FP16, BF16)])
def test_a_product_in_a_dtype_that_cublas_does_not_offer(factors, product) -> None:
    x = X.to(OURS[factors])
    with pytest.raises(RuntimeError, match=r"CUBLAS_STATUS_NOT_SUPPORTED: no product of .* factors in"):
        multiply(x, x, dtype=product)


@pytest.mark.played("blackwell")
def test_nvfp4_has_no_product_in_fp16() -> None:
    with pytest.raises(RuntimeError, match="does not support FP16 output"):
        multiply(nvfp4()(X), nvfp4()(X), dtype=FP16)


# --- groups --------------------------------------------------------------------------------------------------------------------------------
ROWS = 128


def grouped(tensor: torch.Tensor, number: int, make=None):
    if make is not None:
        return tex.group_quantize(tensor, make(), number, None)
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

    shapes = [(len(tensor) // number, tensor.shape[1])] * number
    return GroupedTensorStorage(
        shape=tuple(tensor.shape), dtype=tensor.dtype, num_tensors=number, data=tensor.reshape(-1), shapes=shapes
    )


def multiply_groups(a, b, d) -> None:
    number = 1 if not BLACKWELL else b.num_tensors
    name = "in" if isinstance(a, list) else "out" if isinstance(d, list) else None
    function = getattr(tex, f"te_general_grouped_gemm_for_{f'discrete_{name}' if name else 'grouped_tensor'}")
    function(a, True, b, False, d, None, None, torch.ones(number), torch.zeros(number), None, None, True)


def operands(number: int = 2, make=None, dtype=torch.bfloat16):
    """(weights, tokens, products) of groups."""
    weights, tokens = (torch.randn(number * ROWS, 128, dtype=dtype) for _ in range(2))
    products = torch.zeros(number * ROWS, ROWS, dtype=torch.bfloat16)
    return grouped(weights, number, make), grouped(tokens, number, make), grouped(products, number)


@pytest.mark.since((2, 20))
def test_groups_are_multiplied_in_lists_of_up_to_64() -> None:
    weights, tokens, products = operands(64)
    multiply_groups([part.clone() for part in weights.split_into_quantized_tensors()], tokens, products)
    assert products.rowwise_data.count_nonzero()
    weights, tokens, products = operands(65)
    with pytest.raises(RuntimeError, match="A_list supports up to 64 tensors per kernel, got 65"):
        multiply_groups(weights.split_into_quantized_tensors(), tokens, products)
    with pytest.raises(RuntimeError, match="D_list supports up to 64 tensors per kernel, got 65"):
        multiply_groups(weights, tokens, products.split_into_quantized_tensors())


@pytest.mark.since((2, 20))
def test_lists_hold_matrices_of_one_dtype_and_one_scaling() -> None:
    weights, tokens, products = operands()
    first, second = products.split_into_quantized_tensors()
    with pytest.raises(RuntimeError, match="D_list tensor 1 dtype mismatch"):
        multiply_groups(weights, tokens, [first, second.float()])
    with pytest.raises(RuntimeError, match="D_list tensor 0 must be 2D"):
        multiply_groups(weights, tokens, [first.unsqueeze(0), second])
    parts = weights.split_into_quantized_tensors()
    other = mxfp8() if BLACKWELL else blocks(1)
    with pytest.raises(RuntimeError, match="Tensors have different scaling modes"):
        multiply_groups([parts[0], other(parts[1])], tokens, products)


@pytest.mark.since((2, 20))
def test_groups_of_two_formats_have_no_product() -> None:
    plain, quantized = operands(), operands(make=(lambda: mxfp8(tiles=True)) if BLACKWELL else lambda: blocks(1))
    with pytest.raises(RuntimeError, match="both be FP8 or both be non-FP8"):
        multiply_groups(plain[0], quantized[1], plain[2])
    with pytest.raises(RuntimeError, match=r"use (MXFP8|FP8 block) scaling or both not"):
        multiply_groups(operands(make=current)[0], quantized[1], plain[2])
    wide = operands(dtype=torch.float32)
    with pytest.raises(RuntimeError, match="must be FP8, NVFP4, BF16, or FP16, got fp32"):
        multiply_groups(wide[0], wide[1], plain[2])


@pytest.mark.since((2, 20))
@pytest.mark.played("blackwell")
def test_compact_scales_of_tokens_are_not_put_in_order() -> None:
    tiles, compact = operands(make=lambda: mxfp8(tiles=True)), operands(make=mxfp8)
    multiply_groups(compact[0], tiles[1], tiles[2])
    assert tiles[2].rowwise_data.count_nonzero()
    with pytest.raises(RuntimeError, match="scales of B must be swizzled"):
        multiply_groups(tiles[0], compact[1], tiles[2])
