"""What a GEMM reads from a quantized tensor: the same copy that the real GEMM reads, so that a missing usage also fails here.

Source: `CanonicalizeGemmInput` in Transformer Engine's common/gemm/cublaslt_gemm.cu.
"""

from typing import Any

import torch

from mpbridge.common.formats import E2M1, E4M3, E5M2
from mpbridge.numerics.codes import decode_e2m1, decode_fp8
from mpbridge.numerics.operands import Operand
from mpbridge.numerics.scales import mxfp8_factors
from mpbridge.te_cpu import played
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.storages import rows_of, storage_kind, up
from mpbridge.te_cpu.swizzle import unswizzled, unswizzled_columns

_TITLES = {"mxfp8": "MXFP8", "block": "FP8 block scaling", "nvfp4": "NVFP4"}


def is_quantized(tensor: Any) -> bool:
    """Whether the tensor is one of Transformer Engine's quantized tensors or storages."""
    return storage_kind(tensor) is not None


def gemm_operand(tensor: Any, name: str, *, column: bool) -> Operand:
    """One side of a GEMM as [rows, columns] of the logical tensor.

    column: the contraction runs over the rows, so the real kernel needs the column copy. name: 'A' or 'B', for the error.
    Raises RuntimeError with the extension's message if that copy is missing.
    """
    kind = storage_kind(tensor)
    if kind is None:
        plain = tensor.detach()
        return Operand(plain.reshape(rows_of(plain.shape), plain.shape[-1]) if plain.dim() != 2 else plain)
    if kind == "delayed":
        return _per_tensor(tensor, name, column)
    side, data = ("column", tensor._columnwise_data) if column else ("row", tensor._rowwise_data)
    if data is None:
        raise RuntimeError(f"Input {name} is missing {side}-wise usage")
    return {"mxfp8": _mxfp8, "block": _block, "nvfp4": _nvfp4}[kind](tensor, column)


def rows_and_columns(tensor: Any, *, column: bool) -> tuple[int, ...]:
    """Logical shape of an operand. Raises RuntimeError if it has no data."""
    kind = storage_kind(tensor)
    if kind is None:
        return tuple(tensor.shape)
    if kind == "delayed":
        if tensor._data is not None:
            return tuple(tensor._data.shape)
        return (*tensor._transpose.shape[1:], tensor._transpose.shape[0])
    row, turned = tensor._rowwise_data, tensor._columnwise_data
    if row is None and turned is None:
        raise RuntimeError(f"No data found for {_TITLES[kind]} Tensor.")
    # a copy that is missing is no reason to know no shape: what needs the copy says so
    of_column = row is None or (column and turned is not None)
    data = turned if of_column else row
    if kind == "nvfp4":
        wide = (*data.shape[:-1], data.shape[-1] * 2)
        return (*wide[1:], wide[0]) if of_column else wide
    if kind == "block" and of_column and data.dim() and not _compact(tensor):
        return (*data.shape[1:], data.shape[0])
    return tuple(data.shape)


def values_of(tensor: Any, out: torch.dtype, *, column: bool = False) -> torch.Tensor:
    """The dequantized value of one copy, in the logical shape."""
    if storage_kind(tensor) is None:
        plain: torch.Tensor = tensor.detach()
        return plain.to(out)
    value = gemm_operand(tensor, "tensor", column=column).dequantized()
    return value.reshape(rows_and_columns(tensor, column=column)).to(out)


# --- one scale per tensor------------------------------------------------------------------------------------------------------------------
def _per_tensor(tensor: Any, name: str, column: bool) -> Operand:
    data = tensor._data
    transpose: Any = None if getattr(tensor, "_transpose_invalid", True) else tensor._transpose
    number, factor = number_format(tensor._fp8_dtype), tensor._scale_inv.reshape(-1)[0]
    if not now().any_layout:
        data, transpose = (None, transpose) if column else (data, None)
    if data is None and transpose is None:
        side = "column" if column or now().any_layout else "row"
        raise RuntimeError(f"Input {name} is missing {side}-wise usage")
    if data is None:
        turned = transpose.reshape(transpose.shape[0], -1) if transpose.dim() else transpose.reshape(1, 1)
        return Operand(decode_fp8(turned, number, torch.bfloat16).t(), factor)
    if data.dim() != 2:
        data = data.reshape(rows_of(data.shape), data.shape[-1] if data.dim() else 1)
    return Operand(decode_fp8(data, number, torch.bfloat16), factor)


# --- blocks --------------------------------------------------------------------------------------------------------------------------------
def _mxfp8(tensor: Any, column: bool) -> Operand:
    number = number_format(tensor._fp8_dtype)
    data = tensor._columnwise_data if column else tensor._rowwise_data
    data = data.reshape(rows_of(data.shape), data.shape[-1])
    rows, columns = data.shape
    _, factor = mxfp8_factors(_mxfp8_scales(tensor, rows, columns, column=column).to(torch.int32), now().rules)
    blocks = (rows // 32, 32, columns) if column else (rows, columns // 32, 32)
    wide = factor.unsqueeze(1 if column else -1).to(torch.bfloat16)
    return Operand((decode_fp8(data, number, torch.bfloat16).view(blocks) * wide).view(rows, columns))


def _mxfp8_scales(tensor: Any, rows: int, columns: int, *, column: bool) -> torch.Tensor:
    """The exponent bytes of an MXFP8 copy's blocks, in row-major order and without padding."""
    scales: torch.Tensor = tensor._columnwise_scale_inv if column else tensor._rowwise_scale_inv
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        padded = (up(rows // 32, 4), up(columns, 128)) if column else (up(rows, 128), up(columns // 32, 4))
        scales = (unswizzled_columns if column else unswizzled)(scales.reshape(padded))
    return scales[: rows // 32, :columns] if column else scales[:rows, : columns // 32]


def _compact(tensor: Any) -> bool:
    return "COMPACT" in str(getattr(tensor, "_data_format", ""))


def _block(tensor: Any, column: bool) -> Operand:
    number, compact = number_format(tensor._fp8_dtype), _compact(tensor)
    data = tensor._columnwise_data if column else tensor._rowwise_data
    data = data if data.dim() else data.reshape(1, 1)
    flat = data.reshape(-1, data.shape[-1]) if not column or compact else data.reshape(data.shape[0], -1)
    scales = tensor._columnwise_scale_inv if column else tensor._rowwise_scale_inv
    if column and compact:  # row-major data, blocks down the columns
        flat = flat.t().contiguous()
    # a column copy is [columns, rows]: scaled in that shape, used as its transpose
    lines, along = flat.shape
    if tensor._is_2D_scaled:
        factor = scales[:, : -(-along // 128)].repeat_interleave(128, 0)[:lines]
    else:
        factor = scales if compact and not column else scales[:, :lines].t()
    values = _scaled(flat, factor, number)
    return Operand(values.t() if column else values)


def _scaled(codes: torch.Tensor, factor: torch.Tensor, number: Any) -> torch.Tensor:
    """Codes [rows, columns] times the factors [rows, blocks of 128 columns]: in bf16 if that is exact, else in fp32."""
    rows, columns = codes.shape
    exact = bool(torch.equal(factor, factor.to(torch.bfloat16).float())) and _powers_of_two(factor)
    work = torch.bfloat16 if exact else torch.float32
    values = decode_fp8(codes, number, work)
    if columns % 128 == 0:
        return (values.view(rows, columns // 128, 128) * factor.to(work).unsqueeze(-1)).view(rows, columns)
    return values * factor.to(work).repeat_interleave(128, 1)[:, :columns]


def _powers_of_two(factor: torch.Tensor) -> bool:
    bits = factor.contiguous().view(torch.int32)
    # far enough from bf16's smallest normal number for code times factor to be exact
    return bool(((bits & 0x7FFFFF) == 0).all()) and bool((factor > 2.0**-110).all())


def _nvfp4(tensor: Any, column: bool) -> Operand:
    data = tensor._columnwise_data if column else tensor._rowwise_data
    flat = data.reshape(data.shape[0], -1) if column else data.reshape(-1, data.shape[-1])
    rows, columns = flat.shape[0], flat.shape[1] * 2
    scales = tensor._columnwise_scale_inv if column else tensor._rowwise_scale_inv
    amax = tensor._amax_columnwise if column else tensor._amax_rowwise
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        scales = unswizzled(scales.reshape(up(rows, 128), up(columns // 16, 4)))
    factor = decode_fp8(scales[:rows, : columns // 16].contiguous(), E4M3, torch.bfloat16)
    blocks = decode_e2m1(flat, torch.bfloat16).view(rows, columns // 16, 16)
    values = (blocks * factor.unsqueeze(-1)).view(rows, columns)
    largest = E2M1.largest * float(getattr(tensor, "_nvfp4_e4m3_max", 448))
    if amax.numel() > 1:  # one factor per row
        values = values.float() * (amax.float().reshape(-1, 1) / largest)
        return Operand(values.t() if column else values)
    return Operand(values.t() if column else values, amax.float().reshape(()), largest)


# --- contents, by the layout of the storage -------------------------------------------------------------------------------------------------
def gemm_values(operand: Any, *, column: bool) -> torch.Tensor:
    """The logical tensor [rows, columns] in FP32, from the copy that the GEMM reads."""
    if played._now:
        return gemm_operand(operand, "operand", column=column).dequantized()
    made: torch.Tensor = operand.dequantize()
    return made.detach().float().reshape(-1, made.shape[-1])


def scale_of(operand: Any, *, column: bool) -> float | None:
    """The multiplier before the cast: the inverse of the stored scale, or of the median if there are many."""
    for name in ("_scale_inv", "_columnwise_scale_inv" if column else "_rowwise_scale_inv"):
        stored = getattr(operand, name, None)
        if isinstance(stored, torch.Tensor) and stored.numel():
            if stored.dtype is torch.uint8 and storage_kind(operand) == "mxfp8":
                return float(2.0 ** (127 - float(_of_blocks(operand, stored, column=column).float().median())))
            if stored.dtype is torch.float32:
                inner = _of_blocks(operand, stored, column=column)
                positive = inner[inner > 0]
                return 1.0 / float(positive.median()) if positive.numel() else None
    return None


def _of_blocks(operand: Any, stored: torch.Tensor, *, column: bool) -> torch.Tensor:
    """The scales of the tensor's actual blocks: buffers are padded, and the padding is never written."""
    kind = storage_kind(operand)
    if kind not in ("mxfp8", "block"):
        return stored
    shape = rows_and_columns(operand, column=column)
    rows, columns = rows_of(shape), shape[-1]
    if kind == "mxfp8":
        return _mxfp8_scales(operand, rows, columns, column=column)
    if operand._is_2D_scaled:
        high, wide = -(-rows // 128), -(-columns // 128)
        return stored[:wide, :high] if column else stored[:high, :wide]
    if column or _compact(operand):
        return stored[:, :columns] if column else stored
    # the scales of 1 x 128 blocks are stored transposed
    return stored[:, :rows]


def codes_at_limit(operand: Any, shape: torch.Size, *, column: bool) -> torch.Tensor | None:
    """Mask, in the logical shape, of the codes that are the format's largest; None if the codes cannot be laid out in that shape."""
    kind = storage_kind(operand)
    if kind == "delayed":
        data, turned = operand._data, False
        if data is None:
            data, turned = operand._transpose, True
    else:
        data, turned = (operand._columnwise_data, kind != "mxfp8") if column else (operand._rowwise_data, False)
    if data is None:
        return None
    codes = data.view(torch.uint8)
    if kind == "nvfp4":
        codes = torch.stack([codes & 7, codes >> 4 & 7], -1).flatten(-2)
        top = codes == 7
    else:
        top = (codes & 0x7F) == (0x7B if number_format(operand._fp8_dtype) is E5M2 else 0x7E)
    top = top.reshape(top.shape[0], -1).t() if turned else top.reshape(-1, top.shape[-1])
    return top if top.shape == shape else None
