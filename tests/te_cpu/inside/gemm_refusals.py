"""GEMMs that a GPU refuses are refused here, and with the extension's messages; the products that it has are not."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from mpbridge.common.errors import Refused
from mpbridge.te_cpu.played import now, playing

E4M3 = tex.DType.kFloat8E4M3
LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True)}
WIDE = {torch.bfloat16: tex.DType.kBFloat16, torch.float16: tex.DType.kFloat16, torch.float32: tex.DType.kFloat32}


def quantizer(kind: str, *, row: bool = True, column: bool = True, tiles: bool = True, **options: Any) -> Any:
    """tiles: scales of MXFP8 and NVFP4 in the order in which GEMMs read them. options: of the class."""
    usages = {"rowwise": row, "columnwise": column}
    if kind == "current":
        return Float8CurrentScalingQuantizer(fp8_dtype=E4M3, device=torch.device("cuda"), **usages)
    if kind == "block":
        return Float8BlockQuantizer(fp8_dtype=E4M3, block_scaling_dim=1, **usages)
    made = NVFP4Quantizer(**usages, **options) if kind == "nvfp4" else MXFP8Quantizer(fp8_dtype=E4M3, **usages)
    made.optimize_for_gemm = tiles
    return made


def operand(kind: str, rows: int = 128, columns: int = 128) -> Any:
    """Random numbers of a plain dtype or a format."""
    x = torch.randn(rows, columns)
    if kind in ("bfloat16", "float16", "float32"):
        return x.to(getattr(torch, kind))
    return quantizer(kind)(x.bfloat16())


def multiply(
    a: Any, b: Any, layout: str = "TN", *, out: Any = None, dtype: Any = torch.bfloat16, into: Any = None
) -> Any:
    transa, transb = LAYOUTS[layout]
    code = None if dtype is None else WIDE[dtype]
    return tex.generic_gemm(
        a, transa, b, transb, out, into, code, None, tex.DType.kBFloat16, False, None, False, torch.zeros(1), 1, False, True
    )[0]  # fmt: skip


KINDS = ("bfloat16", "float16", "float32", "current", "block", "mxfp8", "nvfp4")
MODES = {"block": "NVTE_BLOCK_SCALING_1D", "mxfp8": "NVTE_MXFP8_1D_SCALING", "nvfp4": "NVTE_NVFP4_1D_SCALING"}


@pytest.mark.parametrize(("a", "b"), list(permutations(KINDS, 2)))
def test_operands_of_two_formats_are_not_multiplied(a: str, b: str) -> None:
    modes = [MODES.get(kind, "NVTE_DELAYED_TENSOR_SCALING") for kind in (a, b)]
    if "block" in (a, b) and now().blocks_become_mxfp8:
        message = "Input tensor must be a block scaling tensor"
    elif modes[0] != modes[1]:
        message = f"compatible scaling modes, but got A.scaling_mode = {modes[0]}, B.scaling_mode = {modes[1]}"
    else:
        message = "CUBLAS_STATUS_NOT_SUPPORTED: operands of two types"
    with pytest.raises(RuntimeError, match=message):
        multiply(operand(a), operand(b, 64))


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("float32", torch.bfloat16, "NOT_SUPPORTED: torch.bfloat16 output of Float32"),
        ("bfloat16", torch.float16, "NOT_SUPPORTED: torch.float16 output of BFloat16"),
        ("float16", torch.bfloat16, "NOT_SUPPORTED: torch.bfloat16 output of Float16"),
        ("nvfp4", torch.float16, "FP4 GEMM does not support FP16 output!"),
    ],
)
def test_outputs_that_cublas_does_not_have_are_refused(kind: str, dtype: torch.dtype, message: str) -> None:
    a, b = operand(kind), operand(kind, 64)
    with pytest.raises(RuntimeError, match=message):
        multiply(a, b, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in KINDS[3:] for dtype in WIDE if (kind, dtype) != ("nvfp4", torch.float16)]
    + [(name, dtype) for name in KINDS[:3] for dtype in dict.fromkeys((getattr(torch, name), torch.float32))],
)
def test_products_that_a_gpu_has_are_computed(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = operand(kind), operand(kind, 64)
    wide = [one.float() if kind in KINDS[:3] else one.dequantize(dtype=torch.float32) for one in (a, b)]
    out = torch.empty(64, 128, dtype=dtype)
    assert multiply(a, b, dtype=dtype, out=out) is out
    torch.testing.assert_close(out.float(), wide[1] @ wide[0].t(), rtol=2**-7, atol=2**-6)


def test_an_output_has_the_shape_and_the_dtype_of_the_product() -> None:
    a, b = operand("bfloat16", 64, 32), operand("bfloat16", 16, 32)
    for out, dtype, message in (
        (torch.ones(64, 16), torch.float32, r"invalid dims \(expected \[16,64\], got \[64,16\]\)"),
        (torch.ones(1, 16, 64), torch.float32, r"invalid dims \(expected \[16,64\], got \[1,16,64\]\)"),
        (torch.ones(16, 64), torch.bfloat16, r"invalid dtype \(expected 6, found 4\)"),
    ):
        with pytest.raises(RuntimeError, match=f"GEMM output has {message}"):
            multiply(a, b, out=out, dtype=dtype)
        assert bool((out == 1).all())
    # dimensions but the last are B's; with no dtype asked for, the output's own holds
    out = torch.empty(2, 8, 64)
    multiply(a, b.view(2, 8, 32), out=out, dtype=None)
    torch.testing.assert_close(out.view(16, 64), b.float() @ a.float().t(), rtol=1e-5, atol=1e-4)


def test_dimensions_that_do_not_meet_are_refused() -> None:
    words = r"Invalid matrix dimensions for GEMM \(A=\(64,32\), transa=1, B=\(16,64\), transb=0\)"
    with pytest.raises(RuntimeError, match=words):
        multiply(operand("bfloat16", 64, 32), operand("bfloat16", 16, 64))


@pytest.mark.parametrize("kind", ["block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("layout", "name"), [("NN", "A"), ("NT", "A"), ("NT", "B"), ("TN", "A"), ("TN", "B")])
def test_a_copy_that_was_not_made_is_named(kind: str, layout: str, name: str) -> None:
    missing = "row" if layout == "TN" else "column"
    half = quantizer(kind, row=missing != "row", column=missing != "column")(torch.randn(128, 128).bfloat16())
    with pytest.raises(RuntimeError, match=f"Input {name} is missing {missing}-wise usage"):
        multiply(*(half if name == side else operand(kind) for side in "AB"), layout)


# --- lists of GEMMs -----------------------------------------------------------------------------------------------------------------------
def multiply_lists(a: Sequence[Any], b: Sequence[Any], layout: str, out: Sequence[torch.Tensor]) -> Any:
    transa, transb = LAYOUTS[layout]
    none = [torch.empty(0)] * len(a)
    return tex.te_general_grouped_gemm(
        list(a), transa, list(b), transb, list(out), WIDE[out[0].dtype], [], none, tex.DType.kBFloat16, False, none, False,
        [torch.zeros(1)], 1, False, True, 0,
    )  # fmt: skip


def test_a_list_of_gemms_takes_one_format() -> None:
    out = [torch.empty(64, 128, dtype=torch.bfloat16) for _ in range(2)]
    mixed = [operand("bfloat16"), operand("mxfp8")]
    message = "Tensors have different scaling modes" if now().release >= (2, 12) else "must be the same"
    with pytest.raises(RuntimeError, match=message):
        multiply_lists(mixed, [operand("bfloat16", 64), operand("mxfp8", 64)], "TN", out)
    message = "Either all tensors or no tensor" if now().blocks_become_mxfp8 else "compatible scaling modes"
    with pytest.raises(RuntimeError, match=message):
        multiply_lists([operand("block")] * 2, [operand("mxfp8", 64)] * 2, "TN", out)


@pytest.mark.parametrize(("layout", "name"), [("NN", "A"), ("NT", "B")])
def test_a_list_of_gemms_names_a_copy_that_was_not_made(layout: str, name: str) -> None:
    full, rows = operand("mxfp8"), quantizer("mxfp8", column=False)(torch.randn(128, 128).bfloat16())
    a, b = ([rows if name == side else full] * 2 for side in "AB")
    with pytest.raises(RuntimeError, match=f"Input {name} is missing column-wise usage"):
        multiply_lists(a, b, layout, [torch.empty(128, 128, dtype=torch.bfloat16)] * 2)


def test_a_list_of_gemms_looks_at_outputs_addresses_only() -> None:
    a, b = [operand("bfloat16", 64, 32)], [operand("bfloat16", 16, 32)]
    out = torch.empty(2, 8, 64)
    multiply_lists(a, b, "TN", [out])
    torch.testing.assert_close(out.view(16, 64), b[0].float() @ a[0].float().t(), rtol=1e-5, atol=1e-4)


def test_releases_before_have_no_grouped_tensors_here() -> None:
    with playing(now().machine, (2, 19)), pytest.raises(Refused, match=r"group_quantize .* from release 2\.20 on"):
        tex.group_quantize(torch.randn(256, 128), quantizer("current"), 2, torch.tensor([128, 128]))
