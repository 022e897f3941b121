"""GEMMs: exact products of quantized operands, summed in FP32, rounded once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.numerics.gemm import joint_factor, product
from mpbridge.numerics.operands import Operand
from mpbridge.te_cpu import gemm_checks as checks
from mpbridge.te_cpu.activations import gelu_gradient, gelu_value
from mpbridge.te_cpu.casts import fill, new_quantized
from mpbridge.te_cpu.enums import torch_dtype
from mpbridge.te_cpu.operands import gemm_operand, rows_and_columns
from mpbridge.te_cpu.played import kernel
from mpbridge.te_cpu.storages import coerced, storage_kind


@kernel
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: Any = None,
    workspace_size: int = 0,
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """[D, bias gradient, input of the GELU, extra output] of D = op(B) op(A), which is row-major for op(A) op(B) in column-major order.

    Raises RuntimeError for a missing copy, and for types, dimensions and outputs that the kernel refuses.
    """
    del bias_type, workspace, workspace_size, bulk_overlap, comm_type
    if comm_overlap is not None:
        raise RuntimeError("Userbuffers overlap of GEMM and communication needs a CUDA device")
    if not accumulate and beta:
        raise RuntimeError(
            "Trying to use non-zero beta while not accumulating into D tensor. Beta has nothing to be applied to."
        )
    bias = None if bias is None or (bias.numel() == 0 and not grad) else bias
    shape_a, shape_b = rows_and_columns(A, column=not transA), rows_and_columns(B, column=transB)
    checks.check_shapes(shape_a, transA, shape_b, transB)
    shape = _output_shape(shape_a, transA, shape_b, transB)
    if D is not None:
        checks.check_output(D, rows_and_columns(D, column=False), shape, output_dtype)
    dtype = torch_dtype(output_dtype) if output_dtype is not None else _dtype_of(D, A)
    if 0 not in shape_a and 0 not in shape_b:  # an empty product is zeros, whatever its operands
        checks.check_modes(A, B)
    left = gemm_operand(B, "B", column=transB)
    right = gemm_operand(A, "A", column=not transA)
    if 0 not in shape_a and 0 not in shape_b:
        checks.check_dimensions(A, transA, shape_a, B, transB, shape_b)
        checks.check_types(A, B, None if _casts(quantizer, A, B) else dtype)
        checks.check_blocks(A, B, use_split_accumulator)
        checks.check_epilogue(A, dtype, biased=bias is not None, gelu=gelu, grad=grad)
    x = left.turned() if transB else left
    w = right.turned() if transA else right
    bias_gradient = _bias_gradient(left, shape_b, dtype) if grad and bias is not None else None
    pre_gelu = None
    if gelu:
        result = _result(x, w, torch.float32, None if grad else bias, alpha)
        if grad:
            assert gelu_in is not None  # the epilogue reads the input stored by the forward GEMM
            result = gelu_gradient(gelu_in.reshape(result.shape).float()) * result
        else:
            pre_gelu = result.to(dtype).reshape(shape)
            result = gelu_value(result)
    else:
        wide = accumulate or quantizer is not None
        result = _result(x, w, torch.float32 if wide else dtype, None if grad else bias, alpha)
    return [
        _stored(result.reshape(shape), dtype, D, quantizer, accumulate, beta),
        bias_gradient,
        pre_gelu,
        extra_output,
    ]


def _dtype_of(D: Any, A: Any) -> torch.dtype:
    found = D.dtype if isinstance(D, torch.Tensor) else getattr(A, "dtype", torch.bfloat16)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.bfloat16


def _casts(quantizer: Any, A: Any, B: Any) -> bool:
    """Whether the GEMM's epilogue casts to FP8, as for delayed scaling of operands with one scale per tensor."""
    return type(quantizer).__name__ == "Float8Quantizer" and "delayed" in (storage_kind(A), storage_kind(B))


def _output_shape(a: Sequence[int], transa: bool, b: Sequence[int], transb: bool) -> tuple[int, ...]:
    outer = a[0] if transa and len(a) == 2 else int(torch.Size(a[:-1]).numel()) if transa else a[-1]
    if transb:
        return (b[-1], outer)
    return (*b[:-1], outer)


def _result(x: Operand, w: Operand, out: torch.dtype, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    if x.values.numel() == 0 or w.values.numel() == 0:
        return x.values.new_zeros(x.values.shape[0], w.values.shape[1], dtype=out)
    low = x.values.dtype is torch.bfloat16 and w.values.dtype is torch.bfloat16
    if low and alpha == 1.0 and x.factor is None and w.factor is None and bias is None and out is torch.bfloat16:
        return torch.mm(x.values, w.values)
    if alpha == 1.0:
        return product(x, w, out, bias)
    joint = joint_factor(x, w)
    result = (x.values.float() @ w.values.float()) * (alpha if joint is None else alpha * joint)
    return (result if bias is None else result + bias.float()).to(out)


def _bias_gradient(dy: Operand, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    total = dy.values.float().sum(0)
    return (total if dy.alpha is None else total * dy.alpha).to(dtype)


def _stored(
    result: torch.Tensor, dtype: torch.dtype, D: Any, quantizer: Any, accumulate: bool, beta: float | None
) -> Any:
    if quantizer is not None:
        # only delayed scaling casts inside the GEMM's epilogue; the others quantize a rounded output
        source = (
            result
            if storage_kind(D) == "delayed" and type(quantizer).__name__ == "Float8Quantizer"
            else result.to(dtype)
        )
        if D is None:
            return new_quantized(quantizer, result.to(dtype) if source.dtype != dtype else source)
        return fill(quantizer, source, coerced(quantizer, D, tuple(result.shape), dtype))
    if D is None:
        return result.to(dtype)
    if accumulate:
        before = D.float()
        D.copy_(before * (1.0 if beta is None else beta) + result.float())
    else:
        D.copy_(result)
    return D


@kernel
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor] | None,
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Any = None,
    workspace_size: int = 0,
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    math_sm_count: int = 0,
) -> Any:
    """One GEMM per expert, into its own output or its rows of one output; returns biases (forward) or bias gradients (backward)."""
    if single_output and D is None:
        raise RuntimeError("not implemented, D should be allocated for single output case.")
    used = [
        (a, b)
        for a, b in zip(A, B, strict=True)
        if 0 not in rows_and_columns(a, column=not transa) and 0 not in rows_and_columns(b, column=transb)
    ]
    if used:
        checks.check_lists(*zip(*used, strict=True))
    made, start = [], 0
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        if single_output:
            assert D is not None
            whole = D[0].reshape(-1, D[0].shape[-1])
            out: Any = whole[start : start + int(m_splits[i])]
            start += int(m_splits[i])
        else:
            out = D[i] if D is not None else None
        extra = _at(bias, i), bias_type, _at(pre_gelu_out, i), grad
        how = {"accumulate": accumulate, "use_split_accumulator": use_split_accumulator}
        made.append(_one_of_group((a, transa, b, transb), out, D_type, *extra, **how))
    return bias if D is not None or bias else made


def _at(tensors: Sequence[torch.Tensor] | None, index: int) -> torch.Tensor | None:
    return tensors[index] if tensors and tensors[index].numel() else None


def _one_of_group(
    operands: tuple[Any, bool, Any, bool],
    out: Any,
    dtype: Any,
    bias: Any,
    bias_type: Any,
    gelu: Any,
    grad: bool,
    **how: bool,
) -> Any:
    a, transa, b, transb = operands
    if 0 in rows_and_columns(b, column=transb) or (isinstance(out, torch.Tensor) and out.numel() == 0):
        for tensor in (None if how["accumulate"] else out, bias if grad else None, None if grad else gelu):
            if tensor is not None:
                tensor.zero_()
        return out
    if out is not None:  # the kernel looks at an output's address and dtype only
        shape = _output_shape(
            rows_and_columns(a, column=not transa), transa, rows_and_columns(b, column=transb), transb
        )
        dtype = None
        out = out if tuple(out.shape) == shape or out.numel() != math.prod(shape) else out.view(shape)
    stored = gelu if grad else None
    made, bias_gradient, pre_gelu, _ = generic_gemm(
        *operands, out, None, dtype, bias, bias_type, gelu is not None, stored, grad, **how
    )
    if pre_gelu is not None:
        gelu.copy_(pre_gelu.reshape(gelu.shape))
    if bias_gradient is not None and bias is not None:
        bias.copy_(bias_gradient.reshape(bias.shape))
    return made
