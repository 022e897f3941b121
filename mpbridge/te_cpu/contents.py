"""The contents of Transformer Engine's quantized tensors, by the layout of their storage: values, scales, codes."""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.common.formats import E5M2
from mpbridge.te_cpu import played
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.operands import gemm_operand, mxfp8_scales, rows_and_columns
from mpbridge.te_cpu.storages import rows_of, storage_kind


def values_of(operand: Any, *, column: bool) -> torch.Tensor:
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
        return mxfp8_scales(operand, rows, columns, column=column)
    if operand._is_2D_scaled:
        high, wide = -(-rows // 128), -(-columns // 128)
        return stored[:wide, :high] if column else stored[:high, :wide]
    if column or "COMPACT" in str(getattr(operand, "_data_format", "")):
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
