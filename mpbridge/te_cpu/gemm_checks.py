"""What GEMMs refuse, in the words of the extension or of cuBLASLt.

Source: Transformer Engine's pytorch/csrc/extensions/gemm.cpp and common/gemm/cublaslt_gemm.cu; cuBLASLt's table of types for cublasLtMatmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.formats import E5M2, say
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.storages import rows_of, storage_kind

_OUTPUTS = {
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float16: (torch.float16, torch.float32),
    torch.float32: (torch.float32,),
}
"""Dtype of both operands -> dtypes of the product."""
_MODES = {"mxfp8": "NVTE_MXFP8_1D_SCALING", "nvfp4": "NVTE_NVFP4_1D_SCALING"}


def scaling_mode(tensor: Any) -> str:
    """The extension's name for how an operand is scaled; tensors that are not quantized count as scaled as a whole."""
    kind = storage_kind(tensor)
    if kind == "block":
        return f"NVTE_BLOCK_SCALING_{2 if tensor._is_2D_scaled else 1}D"
    return _MODES.get(kind or "", "NVTE_DELAYED_TENSOR_SCALING")


def check_shapes(a: Sequence[int], transa: bool, b: Sequence[int], transb: bool) -> None:
    """Raises RuntimeError if op(B) op(A) has no product. a, b: logical shapes, of which all dimensions but the last count as rows."""
    (a0, a1), (b0, b1) = ((rows_of(shape), shape[-1] if len(shape) else 1) for shape in (a, b))
    if (a1 if transa else a0) != (b0 if transb else b1):
        raise RuntimeError(
            f"Invalid matrix dimensions for GEMM (A=({a0},{a1}), transa={int(transa)}, B=({b0},{b1}), transb={int(transb)})"
        )


def check_output(D: Any, shape: Sequence[int], dtype: torch.dtype | None) -> None:
    """Raises RuntimeError for an output of another shape, or not of `dtype` if that is given. Quantized outputs are made over."""
    if not isinstance(D, torch.Tensor) or storage_kind(D) is not None:
        return
    if tuple(D.shape) != tuple(shape):
        raise RuntimeError(f"GEMM output has invalid dims (expected {tuple(shape)}, got {tuple(D.shape)})")
    if dtype is not None and D.dtype is not dtype:
        raise RuntimeError(f"GEMM output has invalid dtype (expected {say(dtype)}, found {say(D.dtype)})")


def check_types(A: Any, B: Any, out: torch.dtype) -> None:
    """Raises RuntimeError for operands of two formats, and for a product in a dtype that neither library offers for them.

    out: the dtype in which the product is rounded before it is quantized or stored.
    """
    modes = scaling_mode(A), scaling_mode(B)
    if modes[0] != modes[1] and not all("BLOCK_SCALING" in mode for mode in modes):
        raise RuntimeError(
            "Inputs A and B to GEMM need to have compatible scaling modes, but got "
            f"A.scaling_mode = {modes[0]}, B.scaling_mode = {modes[1]}"
        )
    kinds = storage_kind(A), storage_kind(B)
    if None in kinds:
        types = [say(one.dtype) if kind is None else "fp8" for one, kind in zip((A, B), kinds, strict=True)]
        if types[0] != types[1]:
            raise RuntimeError(f"CUBLAS_STATUS_NOT_SUPPORTED: no product of {types[0]} and {types[1]}")
        if out not in _OUTPUTS.get(A.dtype, ()):
            raise RuntimeError(f"CUBLAS_STATUS_NOT_SUPPORTED: no product of {types[0]} factors in {say(out)}")
    if "nvfp4" in kinds and out is torch.float16:
        raise RuntimeError("FP4 GEMM does not support FP16 output!")
    if all(hasattr(one, "_fp8_dtype") and number_format(one._fp8_dtype) is E5M2 for one in (A, B)):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED: both operands are E5M2")


def check_dimensions(A: Any, transA: bool, a: Sequence[int], B: Any, transB: bool, b: Sequence[int]) -> None:
    """Raises RuntimeError for leading dimensions that cuBLAS cannot take of FP8 operands."""
    kind = storage_kind(A)
    if kind not in ("delayed", "block") or storage_kind(B) != kind:
        return
    inner, outer = int(torch.Size(a[:-1]).numel()), a[-1]
    tokens = int(torch.Size(b[:-1]).numel())
    m, k = (inner, outer) if transA else (outer, inner)
    n = b[-1] if transB else tokens
    if 0 in (m, n, k):
        return
    every = kind == "block" or not now().any_layout
    lda = k if transA or every else m
    ldb = k if not transB or every else n
    for name, leading in (("A", lda), ("B", ldb)):
        if leading % 16:
            raise RuntimeError(f"Leading dimension requirement on {name} for FP8 GEMM. Caller must pad.")
    if kind == "block" and (m % 8 or (not B._is_2D_scaled and n % 8)):
        raise RuntimeError("Outer dimension requirement for NVTE_BLOCK_SCALING GEMM. Caller must pad.")


def check_blocks(A: Any, B: Any, split_accumulator: bool) -> None:
    """Raises RuntimeError for blockwise FP8 products that cuBLAS does not offer on Hopper; later GPUs multiply such operands as MXFP8."""
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
    """Raises RuntimeError for epilogues of blockwise FP8 on Hopper other than adding a bias and a GELU's gradient in 16 bits (cublaslt_gemm.cu)."""
    if storage_kind(A) != "block" or now().blocks_become_mxfp8:
        return
    if (biased and grad) or (gelu and not grad):
        raise RuntimeError(
            "Epilogue requested outside of the available and tested cuBLAS functionality for float8 block scaled GEMM"
        )
    if gelu and dtype is torch.float32:
        raise RuntimeError("CUBLAS_STATUS_INVALID_VALUE: an unsupported value or parameter was passed to the function")
