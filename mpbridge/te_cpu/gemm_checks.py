"""What a GEMM refuses: operands, outputs and epilogues for which Transformer Engine or cuBLAS has no kernel.

Source: Transformer Engine's pytorch/csrc/extensions/gemm.cpp and common/gemm/cublaslt_gemm.cu; cuBLAS's table of types for cublasLtMatmul.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpbridge.common.formats import E5M2
from mpbridge.te_cpu.enums import TORCH, DType, number_format
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.storages import QuantizerKind, rows_of, storage_kind

_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_CODES: Mapping[torch.dtype, int] = {dtype: code for code, dtype in TORCH.items() if dtype is not torch.uint8} | {
    torch.uint8: DType.kByte,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}


def dtype_code(tensor: Any) -> int:
    """Transformer Engine's number for the dtype of a tensor's data, -1 if it has none."""
    if storage_kind(tensor) is None:
        return int(_CODES.get(tensor.dtype, -1))
    return int(tensor._fp4_dtype if storage_kind(tensor) == "nvfp4" else tensor._fp8_dtype)


def dtype_name(code: int) -> str:
    """The extension's name for one of its dtypes."""
    return next((one.name.removeprefix("k") for one in DType if one == code), "an unknown dtype")


def mode_of(kind: QuantizerKind | None, *, square: bool = False) -> str:
    """The extension's scaling mode; plain tensors have that of one scale per tensor. square: blockwise FP8 of 128 x 128."""
    if kind == "block":
        return "NVTE_BLOCK_SCALING_2D" if square else "NVTE_BLOCK_SCALING_1D"
    if kind in ("mxfp8", "nvfp4"):
        return f"NVTE_{kind.upper()}_1D_SCALING"
    return "NVTE_DELAYED_TENSOR_SCALING"


def scaling_mode(tensor: Any) -> str:
    """`mode_of` a tensor."""
    kind = storage_kind(tensor)
    return mode_of(kind, square=kind == "block" and bool(tensor._is_2D_scaled))


def is_blockwise(mode: str) -> bool:
    """Whether a scaling mode is one of blockwise FP8's two."""
    return mode.startswith("NVTE_BLOCK_SCALING")


def check_shapes(a: Sequence[int], transa: bool, b: Sequence[int], transb: bool) -> None:
    """The dimensions that are summed over are equal."""
    (a0, a1), (b0, b1) = ((rows_of(shape), shape[-1] if shape else 1) for shape in (a, b))
    if (a1 if transa else a0) != (b0 if transb else b1):
        raise RuntimeError(
            f"Invalid matrix dimensions for GEMM (A=({a0},{a1}), transa={int(transa)}, B=({b0},{b1}), transb={int(transb)})"
        )


def check_output(D: Any, found: Sequence[int], expected: Sequence[int], dtype: Any) -> None:
    """An output that is given has the product's shape, dimension by dimension, and the dtype that is asked for, if any."""
    if tuple(found) != tuple(expected):
        said = ["[" + ",".join(map(str, shape)) + "]" for shape in (expected, found)]
        raise RuntimeError(f"GEMM output has invalid dims (expected {said[0]}, got {said[1]})")
    if dtype is not None:
        wanted = int(_CODES[dtype] if isinstance(dtype, torch.dtype) else dtype)
        if wanted != dtype_code(D):
            raise RuntimeError(f"GEMM output has invalid dtype (expected {wanted}, found {dtype_code(D)})")


def check_modes(A: Any, B: Any) -> None:
    """Both operands are scaled alike; blockwise FP8 comes in two modes that go together."""
    modes = scaling_mode(A), scaling_mode(B)
    blocks = [is_blockwise(mode) for mode in modes]
    if any(blocks) and not all(blocks) and now().blocks_become_mxfp8:
        raise RuntimeError("Input tensor must be a block scaling tensor")
    if modes[0] != modes[1] and not all(blocks):
        raise RuntimeError(
            "Inputs A and B to GEMM need to have compatible scaling modes, but got "
            f"A.scaling_mode = {modes[0]}, B.scaling_mode = {modes[1]}"
        )


def check_lists(A: Sequence[Any], B: Sequence[Any]) -> None:
    """All operands on a side of GEMMs in a list are scaled alike."""
    sides = [[scaling_mode(one) for one in side] for side in (A, B)]
    if any(len(set(side)) > 1 for side in sides):
        # the text came with swizzled scales
        raise RuntimeError(
            "Tensors have different scaling modes"
            if now().release >= (2, 12)
            else "Scaling mode of the input tensors must be the same."
        )
    blocks = [is_blockwise(mode) for side in sides for mode in side]
    if now().blocks_become_mxfp8 and any(blocks) and not all(blocks):
        raise RuntimeError("Either all tensors or no tensor must be FP8 block scaling tensors")


def check_types(A: Any, B: Any, output: torch.dtype | None) -> None:
    """Products that cuBLAS has. output: None if the GEMM itself casts to FP8."""
    plain = [storage_kind(one) is None for one in (A, B)]
    names = " and ".join(dtype_name(dtype_code(one)) for one in (A, B))
    if not any(plain):
        if all(number_format(dtype_code(one)) is E5M2 for one in (A, B)):
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED: both operands are E5M2")
        if storage_kind(A) == "nvfp4" and output is torch.float16:
            raise RuntimeError("FP4 GEMM does not support FP16 output!")
        known: tuple[torch.dtype, ...] = _WIDE
    else:
        if not all(plain) or A.dtype != B.dtype:
            raise RuntimeError(f"CUBLAS_STATUS_NOT_SUPPORTED: operands of two types ({names})")
        known = (A.dtype, torch.float32) if A.dtype in _WIDE else ()
    if output is not None and output not in known:
        raise RuntimeError(f"CUBLAS_STATUS_NOT_SUPPORTED: {output} output of {names} operands")


def check_dimensions(A: Any, transA: bool, a: Sequence[int], B: Any, transB: bool, b: Sequence[int]) -> None:
    """The leading dimensions that cuBLAS requires for FP8 operands."""
    kind = storage_kind(A)
    if kind not in ("delayed", "block") or storage_kind(B) != kind:
        return
    inner, outer = math.prod(a[:-1]), a[-1]
    m, k = (inner, outer) if transA else (outer, inner)
    n = b[-1] if transB else math.prod(b[:-1])
    every = kind == "block" or not now().any_layout
    lda = k if transA or every else m
    ldb = k if not transB or every else n
    for name, leading in (("A", lda), ("B", ldb)):
        if leading % 16:
            raise RuntimeError(f"Leading dimension requirement on {name} for FP8 GEMM. Caller must pad.")
    if kind == "block" and (m % 8 or (not B._is_2D_scaled and n % 8)):
        raise RuntimeError("Outer dimension requirement for NVTE_BLOCK_SCALING GEMM. Caller must pad.")


def check_blocks(A: Any, B: Any, split_accumulator: bool) -> None:
    """Blockwise FP8 products that cuBLAS does not support on Hopper; later GPUs multiply such operands as MXFP8."""
    if storage_kind(A) != "block" or storage_kind(B) != "block" or now().blocks_become_mxfp8:
        return
    if A._is_2D_scaled and B._is_2D_scaled:
        raise RuntimeError(
            "Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling "
            + ("GEMM is supported" if now().release >= (2, 19) else "supported, but got 2D by 2D")
        )
    if not split_accumulator:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED: block scaling is supported with the split accumulator only")


def check_epilogue(A: Any, dtype: torch.dtype, *, biased: bool, gelu: bool, grad: bool) -> None:
    """Blockwise FP8 on Hopper supports only adding a bias and a GELU's gradient in 16 bits as epilogues (cublaslt_gemm.cu)."""
    if storage_kind(A) != "block" or now().blocks_become_mxfp8:
        return
    if (biased and grad) or (gelu and not grad):
        raise RuntimeError(
            "Epilogue requested outside of the available and tested cuBLAS functionality for float8 block scaled GEMM"
        )
    if gelu and dtype is torch.float32:
        raise RuntimeError("CUBLAS_STATUS_INVALID_VALUE: an unsupported value or parameter was passed to the function")
