"""GEMMs of grouped tensors: one product per group (from release 2.20 on).

Source: Transformer Engine's pytorch/csrc/extensions/gemm.cpp and common/gemm/cublaslt_grouped_gemm.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.formats import say
from mpbridge.te_cpu.gemm import generic_gemm
from mpbridge.te_cpu.gemm_checks import scaling_mode
from mpbridge.te_cpu.grouped_buffers import members
from mpbridge.te_cpu.grouped_checks import require
from mpbridge.te_cpu.operands import rows_and_columns
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.registry import kernel
from mpbridge.te_cpu.storages import storage_kind


@kernel
def te_general_grouped_gemm_for_grouped_tensor(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    workspace_setup: Any = None,
    workspace_cublas: Any = None,
    use_split_accumulator: bool = False,
    math_sm_count: int = 0,
) -> Any:
    """D = alpha op(B) op(A) + beta D for every group, in place, plus the group's row of `bias` times its rows of `bias_scale` (fp32 [rows of D]).

    alpha, beta: fp32, one per group, on Hopper one for all. Returns D. Raises RuntimeError for operands, machines and numbers that the
    kernel refuses.
    """
    del workspace_setup, workspace_cublas, math_sm_count
    require("te_general_grouped_gemm_for_grouped_tensor")
    _multiply(_parts(A, "A"), transa, _parts(B, "B"), transb, _parts(D, "D"), alpha, beta, use_split_accumulator)
    _add_bias(D, bias, bias_scale)
    return D


@kernel
def te_general_grouped_gemm_for_discrete_in(
    A: Sequence[Any],
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    workspace_setup: Any = None,
    workspace_cublas: Any = None,
    use_split_accumulator: bool = False,
    math_sm_count: int = 0,
) -> Any:
    """`te_general_grouped_gemm_for_grouped_tensor` of a list of tensors A, for example experts' weights."""
    del workspace_setup, workspace_cublas, math_sm_count
    require("te_general_grouped_gemm_for_discrete_in")
    _multiply(_list(A, "A"), transa, _parts(B, "B"), transb, _parts(D, "D"), alpha, beta, use_split_accumulator)
    _add_bias(D, bias, bias_scale)
    return D


@kernel
def te_general_grouped_gemm_for_discrete_out(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Sequence[torch.Tensor],
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    workspace_setup: Any = None,
    workspace_cublas: Any = None,
    use_split_accumulator: bool = False,
    math_sm_count: int = 0,
) -> Any:
    """`te_general_grouped_gemm_for_grouped_tensor` into a list of tensors, for example gradients of experts' weights; takes no bias."""
    del bias_scale, workspace_setup, workspace_cublas, math_sm_count
    require("te_general_grouped_gemm_for_discrete_out")
    if bias is not None:
        raise RuntimeError("Bias is not supported for discrete output grouped GEMM.")
    _multiply(_parts(A, "A"), transa, _parts(B, "B"), transb, _list(D, "D"), alpha, beta, use_split_accumulator)
    return D


def _parts(grouped: Any, name: str) -> list[Any]:
    parts = [part for part, _, _ in members(grouped)]
    # the extension puts MXFP8's compact scales in order before the product; of B the ones of the copy that the product does not read
    unordered = ("nvfp4",) if name == "A" else ("nvfp4", "mxfp8")
    if storage_kind(parts[0]) in unordered and not grouped._with_gemm_swizzled_scales:
        raise RuntimeError(f"Grouped GEMM: scales of {name} must be swizzled for GEMM (MXFP8/NVFP4).")
    return parts


def _list(tensors: Sequence[Any], name: str) -> list[Any]:
    """The tensors of a list. Raises RuntimeError for one that the kernel refuses."""
    if len(tensors) > _MOST:
        raise RuntimeError(f"Grouped GEMM: {name}_list supports up to {_MOST} tensors per kernel, got {len(tensors)}")
    if len({scaling_mode(tensor) for tensor in tensors}) > 1:
        raise RuntimeError("Tensors have different scaling modes")
    first = _dtype(tensors[0])
    for i, tensor in enumerate(tensors):
        if len(tensor.shape) != 2:
            raise RuntimeError(f"Grouped GEMM: {name}_list tensor {i} must be 2D.")
        if _dtype(tensor) != first:
            raise RuntimeError(
                f"Grouped GEMM: {name}_list tensor {i} dtype mismatch. Expected {first} got {_dtype(tensor)}"
            )
    return list(tensors)


_MOST = 64
"""Tensors in a list (kMaxGroups)."""


def _dtype(tensor: Any) -> str:
    return say(tensor.dtype) if storage_kind(tensor) is None else str(getattr(tensor, "_fp8_dtype", "fp4"))


def _check_inputs(a: Sequence[Any], b: Sequence[Any]) -> None:
    for tensor in (a[0], b[0]):
        if storage_kind(tensor) is None and tensor.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError(f"Grouped GEMM inputs must be FP8, NVFP4, BF16, or FP16, got {say(tensor.dtype)}.")
    kinds = storage_kind(a[0]), storage_kind(b[0])
    if (kinds[0] is None) != (kinds[1] is None):
        raise RuntimeError("Grouped GEMM: A and B must both be FP8 or both be non-FP8.")
    for kind, format in (("nvfp4", "NVFP4"), ("mxfp8", "MXFP8"), ("block", "FP8 block")):
        if (kinds[0] == kind) != (kinds[1] == kind):
            raise RuntimeError(f"Grouped GEMM: A and B must both use {format} scaling or both not.")


def _multiply(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    d: Sequence[torch.Tensor],
    alpha: torch.Tensor,
    beta: torch.Tensor,
    split: bool,
) -> None:
    if not len(a) == len(b) == len(d):
        raise RuntimeError(
            f"Grouped GEMM: inputs must have the same number of tensors, got {len(a)}, {len(b)}, {len(d)}"
        )
    _check_inputs(a, b)
    if not (9, 0) <= now().capability <= (11, 0):
        raise RuntimeError("nvte_grouped_gemm requires Hopper (SM90) or Blackwell (SM10x and SM110).")
    number = 1 if now().capability < (10, 0) else len(a)
    for name, found in (("alpha", alpha), ("beta", beta)):
        if found.numel() != number:
            raise RuntimeError(f"Grouped GEMM: {name} must have {number} element(s), got {found.numel()}")
    alphas, betas = (found.reshape(-1).expand(len(a)).tolist() for found in (alpha, beta))
    for left, right, out, scale, kept in zip(a, b, d, alphas, betas, strict=True):
        if out.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise RuntimeError("Grouped GEMM: outputs must be BF16, FP16, or FP32.")
        if out.numel() == 0:
            continue
        if 0 in rows_and_columns(right, "B", column=transb):  # a sum over no tokens
            out.mul_(kept) if kept else out.zero_()
            continue
        generic_gemm(
            left, transa, right, transb, out, None, out.dtype, None, None, False, None, False,
            accumulate=kept != 0.0, use_split_accumulator=split, alpha=scale, beta=kept if kept else None,
        )  # fmt: skip


def _add_bias(d: Any, bias: Any, scale: torch.Tensor | None) -> None:
    """Adds to the rounded products, and rounds again."""
    if bias is None:
        return
    if scale is not None and (scale.dtype is not torch.float32 or scale.shape != (d.logical_shape[0],)):
        raise RuntimeError(
            f"Grouped scaled bias add: scale must be float32 with one element for each of {d.logical_shape[0]} rows, "
            f"got {scale.dtype} with shape {tuple(scale.shape)}"
        )
    for (out, start, shape), (row, _, _) in zip(members(d), members(bias), strict=True):
        if out.numel() == 0:
            continue
        if row.dtype is not out.dtype or row.numel() != shape[1]:
            raise RuntimeError("Grouped bias add: output and bias must have matching dtypes and last dims")
        added = row.reshape(1, -1).double()
        if scale is not None:
            first = start // shape[1]
            added = added * scale[first : first + shape[0]].unsqueeze(1)
        # one rounding to fp32, as by a fused multiply-add
        out.copy_((out.double() + added).float())
