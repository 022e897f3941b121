"""Bytes of Transformer Engine's low-precision weights: data, the transposed copy if the hardware needs one, and scales."""

from __future__ import annotations

from collections.abc import Iterator

from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.planning.memory.layers import Parameter
from mpbridge.precision.policy import Quant
from mpbridge.precision.scalings import Scaling

WeightCopy = tuple[str, str, DType, int]


def weight_copies(parameter: Parameter, quant: Quant, run: RunFacts) -> Iterator[WeightCopy]:
    """(role, parameter, dtype, elements) of a weight in low precision, in addition to its entry in the parameter buffer.

    Weights that are not stored in low precision are quantized once per step and kept over its micro-batches, unless disable_parameter_transpose_cache is
    set. Sources: Transformer Engine 2.11 tensor/storage/*.py and tensor/{mxfp8,nvfp4,float8_blockwise}_tensor.py.
    """
    if not quant.stored and run.model.get("disable_parameter_transpose_cache"):
        return
    size, name = parameter.weight.elements, parameter.name
    rows, columns = parameter.weight.shape
    data = size if quant.bits == 8 else -(-size // 2)
    reused = bool(run.ddp.get("reuse_grad_buf_for_mxfp8_param_ag"))
    # stored weights are in the parameter buffer itself, unless that is the gradient buffer
    if not quant.stored or (quant.row.stored.through_grads and reused):
        yield "weight_copies", name, DType.UINT8, data
    if quant.row.keeps_transposed(run.machine.arch if run.machine is not None else None):
        yield "weight_transposes", name, DType.UINT8, data
    width = DType.FP32 if quant.row.stored.scale_bytes == 4 else DType.UINT8
    yield "weight_scales", name, width, weight_scales(quant.row, rows, columns)


def weight_scales(row: Scaling, rows: int, columns: int) -> int:
    """Number of scales of a weight, for both copies together, including the kernels' padding of scale tensors."""
    if row.blocks is None or row.per_tensor:
        return 1
    # one scale per line and block, unless lines share a stored scale: NVFP4 writes the scale of a 16x16 block once per line
    along, across = row.blocks[1].along, row.blocks[1].across if row.stored.lines == 1 else 1

    def one(lines: int, length: int) -> int:
        return _up(-(-lines // across), row.stored.lines) * _up(-(-length // (along or length)), row.stored.count)

    return one(rows, columns) + one(columns, rows)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
