"""GEMMs: exact products of quantized operands, summed in FP32, rounded once."""

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
    empty = 0 in shape_a or 0 in shape_b  # zeros, whatever the operands
    if not empty:
        checks.check_modes(A, B)
    left = gemm_operand(B, "B", column=transB)
    right = gemm_operand(A, "A", column=not transA)
    if not empty:
        checks.check_dimensions(A, transA, shape_a, B, transB, shape_b)
        checks.check_types(A, B, None if _casts(quantizer, A, B) else dtype)
        checks.check_blocks(A, B, use_split_accumulator)
        checks.check_epilogue(A, dtype, biased=bias is not None, gelu=gelu, grad=grad)
    x = left.turned() if transB else left
    w = right.turned() if transA else right
    bias_gradient = pre_gelu = None
    if grad and bias is not None:
        total = left.values.float().sum(0)
        bias_gradient = (total if left.alpha is None else total * left.alpha).to(dtype)
    wide = gelu or accumulate or quantizer is not None
    result = _result(x, w, torch.float32 if wide else dtype, None if grad else bias, alpha)
    if gelu and grad:
        assert gelu_in is not None  # the epilogue reads the input stored by the forward GEMM
        result = gelu_gradient(gelu_in.reshape(result.shape).float()) * result
    elif gelu:
        pre_gelu = result.to(dtype).reshape(shape)
        result = gelu_value(result)
    made = _stored(result.reshape(shape), dtype, D, quantizer, accumulate, beta)
    return [made, bias_gradient, pre_gelu, extra_output]


def _dtype_of(D: Any, A: Any) -> torch.dtype:
    found = D.dtype if isinstance(D, torch.Tensor) else getattr(A, "dtype", torch.bfloat16)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.bfloat16


def _casts(quantizer: Any, A: Any, B: Any) -> bool:
    """Whether the GEMM's epilogue casts to FP8, as for delayed scaling of operands with one scale per tensor."""
    return type(quantizer).__name__ == "Float8Quantizer" and "delayed" in (storage_kind(A), storage_kind(B))


def _output_shape(a: Sequence[int], transa: bool, b: Sequence[int], transb: bool) -> tuple[int, ...]:
    outer = math.prod(a[:-1]) if transa else a[-1]
    return (b[-1], outer) if transb else (*b[:-1], outer)


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


def _stored(
    result: torch.Tensor, dtype: torch.dtype, D: Any, quantizer: Any, accumulate: bool, beta: float | None
) -> Any:
    if D is None:
        rounded = result.to(dtype)
        return rounded if quantizer is None else new_quantized(quantizer, rounded)
    if quantizer is not None:
        # only delayed scaling casts inside the GEMM's epilogue; the others quantize a rounded output
        inside = storage_kind(D) == "delayed" and type(quantizer).__name__ == "Float8Quantizer"
        into = coerced(quantizer, D, tuple(result.shape), dtype)
        return fill(quantizer, result if inside else result.to(dtype), into)
    if accumulate:
        result = D.float() * (1.0 if beta is None else beta) + result.float()
    return D.copy_(result)


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
    shapes = [
        (rows_and_columns(a, column=not transa), rows_and_columns(b, column=transb)) for a, b in zip(A, B, strict=True)
    ]
    used = [i for i, (a, b) in enumerate(shapes) if 0 not in a and 0 not in b]
    if used:
        checks.check_lists([A[i] for i in used], [B[i] for i in used])
    made, start = [], 0
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        out: Any = None if D is None else D[0 if single_output else i]
        if single_output:
            out = out.reshape(-1, out.shape[-1])[start : start + int(m_splits[i])]
            start += int(m_splits[i])
        added, gelu = _at(bias, i), _at(pre_gelu_out, i)
        if 0 in shapes[i][1] or (out is not None and out.numel() == 0):
            for tensor in (None if accumulate else out, added if grad else None, None if grad else gelu):
                if tensor is not None:
                    tensor.zero_()
            made.append(out)
            continue
        if out is not None:  # the kernel looks at an output's address and dtype only
            shape = _output_shape(shapes[i][0], transa, shapes[i][1], transb)
            out = out if tuple(out.shape) == shape or out.numel() != math.prod(shape) else out.view(shape)
        product, bias_gradient, pre_gelu, _ = generic_gemm(
            a, transa, b, transb, out, None, D_type if out is None else None, added, bias_type, gelu is not None, gelu if grad else None, grad,
            accumulate=accumulate, use_split_accumulator=use_split_accumulator,
        )  # fmt: skip
        made.append(product)
        for into, found in ((gelu, pre_gelu), (added, bias_gradient)):
            if into is not None and found is not None:
                into.copy_(found.reshape(into.shape))
    return bias if D is not None or bias else made


def _at(tensors: Sequence[torch.Tensor] | None, index: int) -> torch.Tensor | None:
    return tensors[index] if tensors and tensors[index].numel() else None
