"""GEMMs of grouped tensors: one product per group (from release 2.20 on).

Source: Transformer Engine's pytorch/csrc/extensions/gemm.cpp and common/gemm/cublaslt_grouped_gemm.cu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpbridge.te_cpu.enums import DType
from mpbridge.te_cpu.gemm import generic_gemm
from mpbridge.te_cpu.gemm_checks import dtype_code, dtype_name, is_blockwise, mode_of, scaling_mode
from mpbridge.te_cpu.grouped_buffers import members
from mpbridge.te_cpu.grouped_checks import require
from mpbridge.te_cpu.operands import rows_and_columns
from mpbridge.te_cpu.played import KERNELS, now
from mpbridge.te_cpu.storages import kind_of, storage_kind

_INPUTS = (DType.kFloat8E4M3, DType.kFloat8E5M2, DType.kBFloat16, DType.kFloat16, DType.kFloat4E2M1)
_ORDERED = ("NVTE_MXFP8_1D_SCALING", "NVTE_NVFP4_1D_SCALING")
"""Modes whose scales lie in tile order."""
_LIST = 64
"""Tensors that a list may have: their addresses are arguments of a CUDA kernel."""


def _enter(form: str, name: str) -> None:
    """Registers the GEMM of one form: of grouped tensors, of a list of tensors A (for example experts' weights), or into a list of tensors D (for example
    gradients of experts' weights), which takes no bias. name: of the function in the library."""
    entry = f"te_general_grouped_gemm_for_{form}"
    listed_a, listed_d = form == "discrete_in", form == "discrete_out"

    def gemm(
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
        require(entry)
        if listed_d and bias is not None:
            raise RuntimeError("Bias is not supported for discrete output grouped GEMM.")
        if listed_a and len({scaling_mode(one) for one in A}) > 1:
            raise RuntimeError("Tensors have different scaling modes")
        sizes = [len(one) if listed else one.num_tensors for one, listed in ((A, listed_a), (B, False), (D, listed_d))]
        _check_machine(name, sizes, alpha, beta)
        b = _Side.of_group(B, "B", transb)
        if listed_a:
            _check_inputs((b,))
            _check_number("A", len(A))
            a = _Side.of_list(A, transa)
            _check_list(a, b)
        else:
            a = _Side.of_group(A, "A", transa)
            _check_inputs((a, b))
        _check_output_dtype((a, b), *((dtype_code(D[0]), "D") if listed_d else (dtype_of_group(D), "outputs")))
        for side in (a, b):
            side.check_copies()
        _check_scaling(name, (a, b))
        for i, one in enumerate(A if listed_a else ()):
            if len(rows_and_columns(one, column=not transa)) != 2:
                raise RuntimeError(f"Grouped GEMM: A_list tensor {i} must be 2D.")
        if listed_d:
            _check_outputs(D)
        _check_order(b)
        left, right, out = (list(one) if isinstance(one, (list, tuple)) else _parts(one) for one in (A, B, D))
        alphas, betas = (found.reshape(-1).expand(len(right)).tolist() for found in (alpha, beta))
        for one, other, into, scale, kept in zip(left, right, out, alphas, betas, strict=True):
            if into.numel() and 0 in rows_and_columns(other, column=transb):  # a sum over no tokens
                into.mul_(kept) if kept else into.zero_()
            elif into.numel():
                generic_gemm(
                    one, transa, other, transb, into, None, into.dtype, None, None, False, None, False,
                    accumulate=kept != 0.0, use_split_accumulator=use_split_accumulator, alpha=scale, beta=kept if kept else None,
                )  # fmt: skip
        _add_bias(D, bias, bias_scale)
        return D

    KERNELS[entry] = gemm


_enter("grouped_tensor", "nvte_grouped_gemm")
_enter("discrete_in", "nvte_grouped_gemm_with_discrete_inputA")
_enter("discrete_out", "nvte_grouped_gemm_with_discrete_out")


@dataclass(frozen=True, slots=True)
class _Side:
    """What is checked of an operand of all groups."""

    name: str
    transposed: bool
    mode: str
    code: int
    row: bool
    column: bool
    ordered: bool
    """Whether the flag says that the scales are in tile order."""
    true_order: bool = True
    """Whether they are."""

    @classmethod
    def of_group(cls, grouped: Any, name: str, transposed: bool) -> _Side:
        """A grouped tensor, when the kernel has put MXFP8 scales in tile order, for B those of the copy that is not read."""
        quantizer = grouped.quantizer
        kind = None if quantizer is None else kind_of(quantizer)
        mode = mode_of(kind, square=kind == "block" and quantizer.block_scaling_dim == 2)
        row, column = grouped.rowwise_data is not None, grouped.columnwise_data is not None
        ordered = was = bool(grouped._with_gemm_swizzled_scales)
        if kind == "mxfp8" and not was:
            ordered = bool(grouped.scale_inv is not None if transposed else grouped.columnwise_scale_inv is not None)
        wrong = name == "B" and ordered and not was and math.prod(grouped.logical_shape) > 0
        return cls(name, transposed, mode, dtype_of_group(grouped), row, column, ordered, not wrong)

    @classmethod
    def of_list(cls, tensors: Sequence[Any], transposed: bool) -> _Side:
        """A list for A: the copies that all have, since the kernel has put all scales in tile order."""
        kinds = [storage_kind(one) for one in tensors]
        copies = [
            (True, False) if kind is None
            else (one._data is not None, one._transpose is not None and not one._transpose_invalid) if kind == "delayed"
            else (one._rowwise_data is not None, one._columnwise_data is not None)
            for one, kind in zip(tensors, kinds, strict=True)
        ]  # fmt: skip
        for at, name in enumerate(("rowwise", "columnwise")):
            if len({dtype_code(one) for one, has in zip(tensors, copies, strict=True) if has[at]}) > 1:
                raise RuntimeError(f"Grouped GEMM: A_list {name} dtypes must match.")
        row, column = (all(has[at] for has in copies) for at in (0, 1))
        return cls("A", transposed, scaling_mode(tensors[0]), dtype_code(tensors[0]), row, column, True)

    @property
    def fp8(self) -> bool:
        """Whether the data are FP8."""
        return self.code in (DType.kFloat8E4M3, DType.kFloat8E5M2)

    @property
    def fp4(self) -> bool:
        """Whether the data are FP4."""
        return self.code == DType.kFloat4E2M1

    def check_copies(self) -> None:
        """The copy that the kernel reads is there (choose_grouped_operand_storage)."""
        reads_column = self.transposed is (self.name == "B")
        if not (self.row or self.column):
            raise RuntimeError(f"Grouped GEMM: {self.name} is missing both row-wise and column-wise data")
        if self.mode == "NVTE_MXFP8_1D_SCALING":
            if not (self.column if reads_column else self.row):
                raise RuntimeError(
                    f"Grouped GEMM: MXFP8 {'' if self.transposed else 'non-'}transposed {self.name} "
                    f"is missing {'column' if reads_column else 'row'}-wise data"
                )
            return
        any_layout = now().any_layout and not is_blockwise(self.mode)
        if reads_column and (self.fp4 or (self.fp8 and not any_layout)):
            if not self.column:
                raise RuntimeError(f"Grouped GEMM: {self.name} is missing column-wise data needed for TN layout")
        elif not self.row and self.fp8 and not any_layout:
            raise RuntimeError("Grouped GEMM: FP8 on Hopper requires row-wise data for this transpose config.")


def dtype_of_group(grouped: Any) -> int:
    """`dtype_code` of a grouped tensor's data."""
    if grouped.quantizer is not None:
        return int(grouped.quantizer.dtype)
    data = grouped.rowwise_data if grouped.rowwise_data is not None else grouped.columnwise_data
    return -1 if data is None else dtype_code(data)


def _check_machine(name: str, sizes: Sequence[int], alpha: torch.Tensor, beta: torch.Tensor) -> None:
    """The GPU has the kernel, and there are as many tensors and numbers as it takes."""
    if len(set(sizes)) > 1:
        raise RuntimeError(
            f"Grouped GEMM: inputs must have the same number of tensors, got {', '.join(map(str, sizes))}"
        )
    if not (9, 0) <= now().capability <= (11, 0):
        raise RuntimeError(f"{name} requires Hopper (SM90) or Blackwell (SM10x and SM110).")
    number = 1 if now().capability < (10, 0) else sizes[0]
    for title, found in (("alpha", alpha), ("beta", beta)):
        if found.numel() != number:
            raise RuntimeError(f"Grouped GEMM: {title} must have {number} element(s), got {found.numel()}")


def _check_inputs(sides: Sequence[_Side]) -> None:
    """Grouped operands have types that the kernel takes, alike, and scales in tile order (validate_grouped_gemm_inputs)."""
    for side in sides:
        if side.code not in _INPUTS:
            raise RuntimeError(f"Grouped GEMM inputs must be FP8, NVFP4, BF16, or FP16, got {dtype_name(side.code)}.")
    first = sides[0]
    for side in sides:
        _alike(
            (side.fp8 == first.fp8, "be FP8 or both be non-FP8."),
            (side.fp4 == first.fp4, "be NVFP4 or both be non-NVFP4."),
            (("MXFP8" in side.mode) == ("MXFP8" in first.mode), "use MXFP8 scaling or both not."),
            (is_blockwise(side.mode) == is_blockwise(first.mode), "use FP8 block scaling or both not."),
        )
        if side.mode in _ORDERED and not side.ordered:
            raise RuntimeError("Grouped GEMM: scales must be swizzled for GEMM (MXFP8/NVFP4).")


def _alike(*rows: tuple[bool, str]) -> None:
    for alike, text in rows:
        if not alike:
            raise RuntimeError(f"Grouped GEMM: A and B must both {text}")


def _check_list(a: _Side, b: _Side) -> None:
    if a.code not in _INPUTS:
        raise RuntimeError("Grouped GEMM: A_list tensors must be FP8, NVFP4, BF16, or FP16.")
    low = (a.fp8 or a.fp4) == (b.fp8 or b.fp4), "be low-precision (FP8/NVFP4) or both not."
    _alike(low, (a.fp8 == b.fp8, "be FP8 or both be non-FP8."))


def _check_scaling(name: str, sides: tuple[_Side, _Side]) -> None:
    """Scaling modes go together, on this machine (validate_grouped_gemm_scaling_modes, validate_nvfp4_grouped_gemm_support)."""
    modes = [side.mode for side in sides]
    blocks = [is_blockwise(mode) for mode in modes]
    if modes[0] == modes[1] == "NVTE_BLOCK_SCALING_2D":
        raise RuntimeError(
            f"{name}: Only 1D by 1D, 1D by 2D, and 2D by 1D FP8 block scaling grouped GEMM is supported, but got 2D by 2D."
        )
    if modes[0] != modes[1] and not all(blocks):
        raise RuntimeError(f"{name}: incompatible A/B scaling modes.")
    major, minor = now().capability
    if any(blocks) and major != 9:
        raise RuntimeError(
            f"{name}: FP8 block scaling grouped GEMM is only supported on Hopper (SM90-SM99), not SM{10 * major + minor}."
        )
    if modes[0] == "NVTE_NVFP4_1D_SCALING" and major < 10:
        raise RuntimeError(
            "Grouped GEMM: NVFP4 requires per-group alpha/beta support because each group has its own amax-derived global scale."
        )


def _check_output_dtype(sides: Sequence[_Side], code: int, name: str) -> None:
    if code not in (DType.kBFloat16, DType.kFloat16, DType.kFloat32):
        raise RuntimeError(f"Grouped GEMM: {name} must be BF16, FP16, or FP32.")
    if code == DType.kFloat16 and any(side.fp4 for side in sides):
        raise RuntimeError("FP4 GEMM does not support FP16 output!")


def _check_number(name: str, number: int) -> None:
    if number > _LIST:
        raise RuntimeError(f"Grouped GEMM: {name}_list supports up to {_LIST} tensors per kernel, got {number}")


def _check_outputs(D: Sequence[torch.Tensor]) -> None:
    """A list of outputs (build_grouped_gemm_multi_out_args)."""
    _check_number("D", len(D))
    for i, one in enumerate(D):
        if dtype_code(one) != dtype_code(D[0]):
            expected, got = dtype_name(dtype_code(D[0])), dtype_name(dtype_code(one))
            raise RuntimeError(f"Grouped GEMM: D_list tensor {i} dtype mismatch. Expected {expected} got {got}")
        if one.dim() != 2:
            raise RuntimeError(f"Grouped GEMM: D_list tensor {i} must be 2D.")


def _check_order(b: _Side) -> None:
    """Transformer Engine puts the scales of the copy of B that is not read in tile order, and marks both (maybe_swizzle_grouped_tensor)."""
    if not b.true_order:
        used, other = ("column", "row") if b.transposed else ("row", "column")
        raise RuntimeError(
            f"Grouped GEMM: the {used}-wise MXFP8 scales of B are compact, and the kernel puts the {other}-wise ones in tile order, "
            "so that a GPU computes garbage: quantize B with optimize_for_gemm"
        )


def _parts(grouped: Any) -> list[Any]:
    return [one for one, _, _ in members(grouped)]


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
