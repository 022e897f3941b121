"""Bytes of Transformer Engine's low-precision weights: data, the transposed copy where the hardware wants one, and scales."""

from __future__ import annotations

from collections.abc import Iterator

from mpbridge.facts import RunFacts
from mpbridge.formats import DType
from mpbridge.hardware.machines import Machine
from mpbridge.memory.layers import Parameter
from mpbridge.precision.policy import Quant

Copy = tuple[str, str, DType, int]


def needs_transpose(machine: Machine | None) -> bool:
    """Whether FP8 GEMMs exist in one layout only, so that per-tensor weights are kept transposed too. An unknown machine counts as Hopper.

    Transformer Engine 2.11 common/transformer_engine.cpp: other layouts at compute capability 10.0 to 12.0 and from 13.0 on.
    """
    if machine is None or machine.arch is None:
        return True
    return not ((10, 0) <= machine.arch < (12, 0) or machine.arch >= (13, 0))


def weight_copies(parameter: Parameter, quant: Quant, run: RunFacts) -> Iterator[Copy]:
    """(role, parameter, dtype, elements) of a weight in the low format beside its entry in the parameter buffer.

    Weights that do not rest in the low format are quantized once a step and kept over its micro-batches, unless disable_parameter_transpose_cache says
    otherwise. Sources: Transformer Engine 2.11 tensor/storage/*.py and tensor/{mxfp8,nvfp4,float8_blockwise}_tensor.py.
    """
    if not quant.stored and run.model.get("disable_parameter_transpose_cache"):
        return
    size, name = parameter.weight.elements, parameter.name
    rows, columns = parameter.weight.shape
    data = size if quant.bits == 8 else -(-size // 2)
    reused = bool(run.ddp.get("reuse_grad_buf_for_mxfp8_param_ag"))
    # stored weights lie in the parameter buffer themselves, unless that is the gradient buffer in disguise
    if not quant.stored or (quant.scaling == "mxfp8" and reused):
        yield "weight_copies", name, DType.UINT8, data
    if quant.scaling in ("mxfp8", "nvfp4", "blockwise") or needs_transpose(run.machine):
        yield "weight_transposes", name, DType.UINT8, data
    dtype, scales = _scales(quant, rows, columns)
    yield "weight_scales", name, dtype, scales


def _scales(quant: Quant, rows: int, columns: int) -> tuple[DType, int]:
    """dtype and number of a weight's scales, both copies together; kernels' padding of scale tensors included where it is known."""

    def up(value: int, step: int) -> int:
        return -(-value // step) * step

    if quant.scaling == "mxfp8":
        # rows padded to 128 and blocks to 4, in both directions (tensor/mxfp8_tensor.py)
        return DType.UINT8, up(rows, 128) * up(-(-columns // 32), 4) + up(-(-rows // 32), 4) * up(columns, 128)
    if quant.scaling == "nvfp4":
        return DType.UINT8, up(rows, 128) * up(-(-columns // 16), 4) + up(columns, 128) * up(-(-rows // 16), 4)
    if quant.scaling == "blockwise":
        # one FP32 for a block of 128x128, the inner count padded to 4 (tensor/float8_blockwise_tensor.py)
        high, wide = -(-rows // 128), -(-columns // 128)
        return DType.FP32, high * up(wide, 4) + wide * up(high, 4)
    return DType.FP32, 1
