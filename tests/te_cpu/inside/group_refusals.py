"""Grouped tensors that the kernels refuse, and those that look like them and are taken."""

from __future__ import annotations

import pytest
import torch
import transformer_engine_torch as tex

from .groups import ROWS, blocks, current, mxfp8, nvfp4, tokens

BF16 = tex.DType.kBFloat16
pytestmark = pytest.mark.since((2, 20))


def quantized(make, rows: int, columns: int, number: int, first=None, last=None):
    x = torch.randn(rows, columns, dtype=torch.bfloat16)
    sizes = (None if dims is None else torch.tensor(dims) for dims in (first, last))
    return tex.group_quantize(x, make(), number, *sizes)


@pytest.mark.played("blackwell")
@pytest.mark.parametrize(
    ("make", "layout", "message"),
    [
        (mxfp8, (96, 64, 3), "First logical dimension of a grouped tensor must be divisible by 128"),
        (mxfp8, (288, 64, 2, (128, 128)), "First logical dimension of a grouped tensor must be divisible by 128"),
        (mxfp8, (128, 192, 2, None, (64, 128)), "last dimension of each tensor in a group must be divisible by 128"),
        (mxfp8, (128, 65 * 128, 65, None, (128,) * 65), "larger than the MAX number"),
        (lambda: mxfp8(tiles=True), (256, 64, 4), "each tensor in a group must be divisible by 128, found 64"),
        (nvfp4, (256, 128, 2, (64, 192)), "each tensor in a group must be divisible by 128, found 64"),
        (nvfp4, (65 * 128, 128, 65, (128,) * 65), "less than or equal to 64"),
        (lambda: blocks(1), (256, 128, 2), "only supported on Hopper"),
    ],
)
def test_a_blackwell_refuses(make, layout, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        quantized(make, *layout)


@pytest.mark.played("hopper")
@pytest.mark.parametrize(
    ("make", "layout", "message"),
    [
        (lambda: blocks(1), (384, 128, 2), "each tensor in a group must be divisible by 128, found 192"),
        (lambda: blocks(2), (256, 120, 2), r"multiple of TMA_GMEM_ALIGNMENT \(16\)"),
        (mxfp8, (256, 128, 2), r"needs compute capability 10\.0"),
    ],
)
def test_a_hopper_refuses(make, layout, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        quantized(make, *layout)


@pytest.mark.parametrize("make", [current, pytest.param(mxfp8, marks=pytest.mark.played("blackwell"))])
def test_more_groups_than_descriptors_are_taken_where_none_are_needed(make) -> None:
    made = quantized(make, 65 * 128, 64, 65, (128,) * 65)
    assert len(made.split_into_quantized_tensors()) == 65


@pytest.mark.played("hopper")
def test_a_hopper_dequantizes_one_copy_of_blocks() -> None:
    made = tex.group_quantize(tokens()[0], blocks(1), len(ROWS), tokens()[1])
    with pytest.raises(RuntimeError, match="not both simultaneously"):
        tex.group_dequantize(made, BF16)


@pytest.mark.played("blackwell")
def test_offsets_alone_place_the_groups_of_the_fused_kernel_and_its_blocks_stay_rows() -> None:
    x, rows = tokens()
    wires = [tex.group_quantize(x, mxfp8(columns=False), len(ROWS), rows) for _ in range(2)]
    square = mxfp8(tiles=True)
    square.with_2d_quantization = True
    tex.group_requantize_inplace(wires[0], mxfp8(tiles=True), len(ROWS), rows, BF16)
    tex.group_requantize_inplace(wires[1], square, len(ROWS), None, BF16, wires[1].tensor_offsets)
    assert wires[0].columnwise_data.count_nonzero()
    assert torch.equal(wires[0].columnwise_data, wires[1].columnwise_data)
    assert torch.equal(wires[0].columnwise_scale_inv, wires[1].columnwise_scale_inv)


@pytest.mark.played("blackwell")
def test_the_kernels_of_nvfp4_are_not_told_to_skip() -> None:
    x = tokens(512)[0]
    quantizer = nvfp4()
    out = tex.group_quantize(x, quantizer, 4, None)
    tex.group_quantize(-3 * x, quantizer, 4, None, output=out, noop_flag=torch.ones(1))
    assert torch.equal(out.amax, tex.group_quantize(-3 * x, nvfp4(), 4, None).amax)


@pytest.mark.played("blackwell")
def test_known_amaxes_leave_scales_in_the_order_that_gemms_read() -> None:
    x = torch.randn(96, 128, dtype=torch.bfloat16)  # 96 rows are cast by a kernel that leaves the order to another
    own = nvfp4(tiles=True)(x)
    made = tex.nvfp4_quantize_with_amax(x, nvfp4(tiles=True), own._amax_rowwise, own._amax_columnwise)
    assert made._with_gemm_swizzled_scales
    assert torch.equal(made._rowwise_scale_inv, own._rowwise_scale_inv)
    early = nvfp4()
    early.with_post_rht_amax = False
    with pytest.raises(RuntimeError, match="Pre-RHT amax is not supported yet"):
        tex.nvfp4_quantize_with_amax(x, early, own._amax_rowwise, own._amax_columnwise)
