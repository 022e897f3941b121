"""Grouped tensors that the kernels refuse, and those that look like them and are taken."""

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex

from mpbridge.te_cpu.played import now

from .gemm_refusals import LAYOUTS, operand, quantizer
from .groups import ROWS, blocks, current, mxfp8, nvfp4, tokens

BF16 = tex.DType.kBFloat16
GROUPS = 4
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


# --- GEMMs -----------------------------------------------------------------------------------------------------------------------------------
def plain(columns: int, dtype: torch.dtype = torch.bfloat16, *, groups: int = GROUPS, rows: int = 128) -> Any:
    """A grouped tensor of zeros."""
    module = importlib.import_module("transformer_engine.pytorch.tensor.storage.grouped_tensor_storage")
    return module.GroupedTensorStorage(
        shape=(groups * rows, columns), dtype=dtype, num_tensors=groups, data=torch.zeros(groups * rows * columns, dtype=dtype),
        shapes=[(rows, columns)] * groups,
    )  # fmt: skip


def grouped(kind: str, columns: int = 128, *, row: bool = True, column: bool = True, compact: bool = False) -> Any:
    options = {"with_rht": True, "with_post_rht_amax": True} if kind == "nvfp4" else {}
    made = quantizer(kind, row=row, column=column, tiles=not compact, **options)
    return tex.group_quantize(torch.randn(GROUPS * 128, columns).bfloat16(), made, GROUPS, None)


def multiply_groups(a: Any, b: Any, d: Any, layout: str = "TN") -> None:
    """All products at once; a list for A or D takes the entry point for lists."""
    transa, transb = LAYOUTS[layout]
    name = "discrete_in" if isinstance(a, list) else "discrete_out" if isinstance(d, list) else "grouped_tensor"
    number = d.num_tensors if hasattr(d, "num_tensors") else len(d)
    scales = torch.ones(number if now().capability >= (10, 0) else 1)
    call = getattr(tex, f"te_general_grouped_gemm_for_{name}")
    call(a, transa, b, transb, d, None, None, scales, scales * 0)


def experts(kind: str) -> list[Any]:
    return [operand(kind, 256, 128) for _ in range(GROUPS)]


def outputs(*dtypes: torch.dtype, shape: tuple[int, ...] = (256, 128)) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtypes[i % len(dtypes)]) for i in range(GROUPS)]


def test_groups_have_the_types_that_the_kernel_takes() -> None:
    wide = torch.float32
    for a, b, d, message in (
        (plain(128, wide), plain(128, wide), plain(128, wide), "inputs must be FP8, NVFP4, BF16, or FP16, got Float32"),
        (experts("bfloat16"), plain(128, wide), plain(256, wide), "inputs must be FP8, NVFP4, BF16, or FP16, got Float32"),
        (experts("float32"), plain(128), plain(256), "A_list tensors must be FP8, NVFP4, BF16, or FP16"),
        (experts("bfloat16"), grouped("current"), plain(256), "both be low-precision"),
        (plain(128), grouped("current"), plain(128), "both be FP8 or both be non-FP8"),
        (experts("bfloat16"), plain(128), plain(256, torch.int32), "outputs must be BF16, FP16, or FP32"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            multiply_groups(a, b, d)


def test_a_list_of_experts_is_of_one_kind_and_at_most_64() -> None:
    mixed = experts("bfloat16")
    for mixed[2], message in (
        (operand("mxfp8", 256, 128), "Tensors have different scaling modes"),
        (operand("float16", 256, 128), "A_list rowwise dtypes must match"),
        (operand("bfloat16", 256, 128).unsqueeze(0), "A_list tensor 2 must be 2D"),
    ):
        with pytest.raises(RuntimeError, match=message):
            multiply_groups(mixed, plain(128), plain(256))
    for number, outcome in (
        (64, nullcontext()),
        (65, pytest.raises(RuntimeError, match="A_list supports up to 64 tensors per kernel, got 65")),
    ):
        groups = [plain(16, groups=number, rows=8) for _ in range(2)]
        with outcome:
            multiply_groups([operand("bfloat16", 16, 16)] * number, *groups)


def test_a_list_of_outputs_is_of_one_kind_and_at_most_64() -> None:
    a, b = plain(128), plain(256)
    multiply_groups(a, b, outputs(torch.float32), "NT")
    for d, message in (
        (outputs(torch.bfloat16, torch.float32), "D_list tensor 1 dtype mismatch. Expected BFloat16 got Float32"),
        (outputs(torch.float32, shape=(1, 256, 128)), "D_list tensor 0 must be 2D"),
        (outputs(torch.int32), "D must be BF16, FP16, or FP32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            multiply_groups(a, b, d, "NT")
    both = [plain(16, groups=65, rows=8) for _ in range(2)]
    with pytest.raises(RuntimeError, match="D_list supports up to 64 tensors per kernel, got 65"):
        multiply_groups(*both, [torch.zeros(16, 16) for _ in range(65)], "NT")


def test_more_than_64_experts_do_not_train_over_grouped_tensors() -> None:
    how = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    with pytest.raises(RuntimeError, match="A_list supports up to 64 tensors per kernel, got 65"):
        te.GroupedLinear(65, 16, 16, **how, use_grouped_tensor=True)(
            torch.randn(65 * 16, 16).bfloat16(), torch.full((65,), 16)
        )
    alone = te.GroupedLinear(65, 16, 16, **how)
    assert alone(torch.randn(65 * 16, 16).bfloat16(), [16] * 65).shape == (65 * 16, 16)


@pytest.mark.played("blackwell")
@pytest.mark.parametrize(
    ("layout", "side", "usages", "message"),
    [
        ("TN", "B", {"row": False}, "MXFP8 non-transposed B is missing row-wise data"),
        ("NN", "A", {"column": False}, "MXFP8 non-transposed A is missing column-wise data"),
        ("NT", "A", {"column": False}, "MXFP8 non-transposed A is missing column-wise data"),
        ("NT", "B", {"column": False}, "MXFP8 transposed B is missing column-wise data"),
    ],
)
def test_groups_of_mxfp8_have_the_copy_that_is_read(
    layout: str, side: str, usages: dict[str, bool], message: str
) -> None:
    a, b = (grouped("mxfp8", **(usages if side == name else {})) for name in "AB")
    d: Any = [torch.zeros(128, 128) for _ in range(GROUPS)] if layout == "NT" else plain(128)
    with pytest.raises(RuntimeError, match=message):
        multiply_groups(a, b, d, layout)


@pytest.mark.played("blackwell")
def test_groups_of_b_come_with_scales_in_tile_order() -> None:
    a = experts("mxfp8")
    multiply_groups(a, grouped("mxfp8"), plain(256))
    with pytest.raises(RuntimeError, match="scales must be swizzled"):
        multiply_groups(a, grouped("mxfp8", column=False, compact=True), plain(256))
    # Transformer Engine orders the other copy's scales and marks both
    with pytest.raises(RuntimeError, match="row-wise MXFP8 scales of B are compact"):
        multiply_groups(a, grouped("mxfp8", compact=True), plain(256))
    with pytest.raises(RuntimeError, match="scales must be swizzled"):
        multiply_groups(experts("nvfp4"), grouped("nvfp4", compact=True), plain(256))
    # A's are put in order, also those of a list of which some are already
    made = quantizer("mxfp8", tiles=False)
    results, b = [], grouped("mxfp8")
    for weights in (a, [made(one.dequantize()) for one in a[:2]] + a[2:]):
        d = plain(256)
        multiply_groups(weights, b, d)
        results.append(d.rowwise_data)
    assert torch.equal(*results)
    assert results[0].count_nonzero()


@pytest.mark.played("blackwell")
def test_groups_of_nvfp4_have_no_fp16_output_and_no_blocks_are_multiplied() -> None:
    with pytest.raises(RuntimeError, match="FP4 GEMM does not support FP16 output!"):
        multiply_groups(experts("nvfp4"), grouped("nvfp4"), plain(256, torch.float16))
    with pytest.raises(RuntimeError, match="FP4 GEMM does not support FP16 output!"):
        multiply_groups(grouped("nvfp4"), grouped("nvfp4", 256), outputs(torch.float16), "NT")
    with pytest.raises(RuntimeError, match="both use MXFP8 scaling or both not"):
        multiply_groups(grouped("mxfp8"), grouped("current"), plain(128))
    whole = plain(128)
    whole.quantizer = quantizer("block")  # which quantizes no groups on this machine
    with pytest.raises(RuntimeError, match=r"discrete_inputA: FP8 block scaling .* on Hopper \(SM90-SM99\), not SM100"):
        multiply_groups(experts("block"), whole, plain(256))


@pytest.mark.played("hopper")
@pytest.mark.parametrize("kind", ["current", "block"])
def test_groups_of_fp8_have_the_transposes_that_hopper_reads(kind: str) -> None:
    whole = grouped(kind, 256)
    with pytest.raises(RuntimeError, match="A is missing column-wise data needed for TN layout"):
        multiply_groups(grouped(kind, column=False), whole, outputs(torch.float32), "NT")
    with pytest.raises(RuntimeError, match="B is missing column-wise data needed for TN layout"):
        multiply_groups(whole, grouped(kind, column=False), [torch.zeros(128, 256) for _ in range(GROUPS)], "NT")
