"""Empty quantized tensors as the compiled quantizers make them: which buffers, their shapes and their names.

Source: `create_tensor`, `convert_and_update_tensor` and `get_scale_shape` of Transformer Engine's pytorch/csrc/quantizer.cpp. Padding of
scales is zero here; the real buffers are not initialised there.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from mpbridge.backend.devices import redirect
from mpbridge.common.errors import Refused
from mpbridge.te_cpu.nvfp4_options import by_rows, check_usages
from mpbridge.te_cpu.played import now

QuantizerKind = Literal["delayed", "current", "mxfp8", "block", "nvfp4"]
Shape = tuple[int, ...]
Copy = tuple[str, Shape, tuple[int, int], int]
_CLASSES: Mapping[QuantizerKind, tuple[str, str, str, str]] = {
    # quantizer, module under transformer_engine.pytorch.tensor, tensor class, storage class
    "delayed": ("Float8Quantizer", "float8_tensor", "Float8Tensor", "Float8TensorStorage"),
    "current": ("Float8CurrentScalingQuantizer", "float8_tensor", "Float8Tensor", "Float8TensorStorage"),
    "mxfp8": ("MXFP8Quantizer", "mxfp8_tensor", "MXFP8Tensor", "MXFP8TensorStorage"),
    "block": ("Float8BlockQuantizer", "float8_blockwise_tensor", "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage"),
    "nvfp4": ("NVFP4Quantizer", "nvfp4_tensor", "NVFP4Tensor", "NVFP4TensorStorage"),
}  # fmt: skip
_QUANTIZERS = {quantizer: kind for kind, (quantizer, *_) in _CLASSES.items()}
_STORAGES = {storage: kind for kind, (*_, storage) in _CLASSES.items() if kind != "current"}


@functools.cache
def _kind_of_class(cls: Any, table: str) -> QuantizerKind | None:
    known = _QUANTIZERS if table == "quantizer" else _STORAGES
    return next((known[base.__name__] for base in cls.__mro__ if base.__name__ in known), None)


def kind_of(quantizer: Any) -> QuantizerKind:
    """The kind of compiled quantizer that an object is; raises Refused for a class that the extension does not know."""
    kind = _kind_of_class(type(quantizer), "quantizer")  # type: ignore[arg-type]
    if kind is None:
        raise Refused(
            f"transformer_engine_torch has no quantizer for {type(quantizer).__name__} (expected one of {', '.join(_QUANTIZERS)})"
        )
    return kind


def storage_kind(tensor: Any) -> QuantizerKind | None:
    """Kind of a quantized tensor or storage; None for a plain tensor. Both per-tensor scalings are 'delayed': they share a class."""
    return _kind_of_class(type(tensor), "storage")  # type: ignore[arg-type]


def rows_of(shape: Sequence[int]) -> int:
    """The product of all dimensions but the last."""
    return math.prod(shape[:-1])


def up(number: int, multiple: int) -> int:
    """`number` rounded up to a multiple."""
    return -(-number // multiple) * multiple


def is_compact(quantizer: Any) -> bool:
    """Whether a blockwise quantizer makes copies for a gather: row-major data, scales without padding (until release 2.11)."""
    return bool(getattr(quantizer, "all_gather_usage", False)) and quantizer.block_scaling_dim == 1


@functools.cache
def _classes(kind: QuantizerKind) -> tuple[type, type, frozenset[str], frozenset[str]]:
    """(tensor class, storage class, arguments of each)."""
    _, module, tensor, storage = _CLASSES[kind]
    package = "transformer_engine.pytorch.tensor"
    full = getattr(importlib.import_module(f"{package}.{module}"), tensor)
    bare = getattr(importlib.import_module(f"{package}.storage.{module}_storage"), storage)
    inner = frozenset(inspect.signature(bare.__new__).parameters)
    return full, bare, inner | frozenset(inspect.signature(full.__new__).parameters), inner


def forget_classes() -> None:
    """Call it when another Transformer Engine is imported."""
    _classes.cache_clear()
    _kind_of_class.cache_clear()


def _made(
    kind: QuantizerKind, quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, values: dict[str, Any]
) -> Any:
    full, bare, outer, inner = _classes(kind)
    options = {
        "fake_dtype": dtype,
        "with_gemm_swizzled_scales": casts_to_tiles(quantizer, shape),
        "row_scaled_nvfp4": getattr(quantizer, "row_scaled_nvfp4", False),
        "nvfp4_use_4over6": getattr(quantizer, "nvfp4_use_4over6", False),
        "nvfp4_e4m3_max": getattr(quantizer, "nvfp4_e4m3_max", 448),
    }
    if quantizer.internal:
        return bare(quantizer=quantizer, **values, **{name: value for name, value in options.items() if name in inner})
    del options["fake_dtype"]
    options["device"] = device
    given = {name: value for name, value in options.items() if name in outer}
    return full(quantizer=quantizer, shape=tuple(shape), dtype=dtype, **values, **given)


def swizzles(quantizer: Any) -> bool:
    """Whether the quantizer wants block scales in the order of the tensor cores (from release 2.12, `optimize_for_gemm`)."""
    return bool(getattr(quantizer, "optimize_for_gemm", False)) and kind_of(quantizer) in ("mxfp8", "nvfp4")


def casts_to_tiles(quantizer: Any, shape: Sequence[int]) -> bool:
    """Whether the kernel that casts a tensor of `shape` writes its scales in that order itself.

    For NVFP4 only some do: the one fused with the Hadamard transform from release 2.17 on, that of square blocks from 2.18 on. After any
    other, `quantize` puts them in order, and a norm, an activation or a GEMM leaves them as they are.
    """
    if not swizzles(quantizer) or kind_of(quantizer) != "nvfp4":
        return swizzles(quantizer)
    if quantizer.with_rht:
        return now().release >= (2, 17) and fused_nvfp4(shape)
    if now().release < (2, 18) or quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6:
        return False
    return bool(quantizer.with_2d_quantization) and fused_nvfp4(shape, 128)


def fused_nvfp4(shape: Sequence[int], rows: int = 64) -> bool:
    """Whether the machine's kernels that cast a tensor to NVFP4 in one go take `shape`. rows: of which its rows have to be a multiple."""
    fits = rows_of(shape) % rows == 0 and shape[-1] % 128 == 0
    return fits and (10, 0) <= now().capability <= (11, 0)


def empty_quantized(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Any:
    """A tensor of zeros (of a storage class if the quantizer is internal) with the buffers for the quantizer's usages.

    Raises RuntimeError, as the extension does, for a shape that does not fit the format's blocks.
    """
    kind = kind_of(quantizer)
    shape = tuple(int(size) for size in shape)
    place = redirect.CPU if device is None or "cuda" in str(device) else torch.device(device)
    make = _per_tensor if kind in ("delayed", "current") else _in_blocks
    return _made(kind, quantizer, shape, dtype, place, make(quantizer, shape, place))


def _bytes(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=torch.uint8, device=device)


def _turned(shape: Shape) -> Shape:
    return (shape[-1], *shape[:-1]) if shape else ()


def copies_of(quantizer: Any) -> tuple[bool, bool]:
    """Whether a quantizer with one scale per tensor stores a row copy and a transpose: the machine's GEMMs decide too."""
    free = now().any_layout
    return bool(quantizer.rowwise_usage or free), bool(quantizer.columnwise_usage and not free)


def _per_tensor(quantizer: Any, shape: Shape, device: torch.device) -> dict[str, Any]:
    row, column = copies_of(quantizer)
    return {
        "data": _bytes(shape, device) if row else None,
        "data_transpose": _bytes(_turned(shape), device) if column else None,
        "fp8_scale_inv": torch.ones(1, dtype=torch.float32, device=device),
        "fp8_dtype": quantizer.dtype,
    }


def _in_blocks(quantizer: Any, shape: Shape, device: torch.device) -> dict[str, Any]:
    kind = kind_of(quantizer)
    values: dict[str, Any] = {"fp4_dtype" if kind == "nvfp4" else "fp8_dtype": quantizer.dtype}
    for name, data, scales, amaxes in _SHAPES[kind](quantizer, shape):
        used = getattr(quantizer, f"{name}_usage")
        kept = torch.float32 if kind == "block" else torch.uint8
        values[f"{name}_data"] = _bytes(data, device) if used else None
        values[f"{name}_scale_inv"] = torch.zeros(scales, dtype=kept, device=device) if used else None
        if kind == "nvfp4":
            values[f"amax_{name}"] = torch.zeros(amaxes, dtype=torch.float32, device=device) if used else None
    if kind == "block":
        values["is_2D_scaled"] = quantizer.block_scaling_dim == 2
        if "data_format" in _classes(kind)[3]:
            forms = importlib.import_module("transformer_engine_torch").Float8BlockScaleTensorFormat
            values["data_format"] = forms.COMPACT if getattr(quantizer, "all_gather_usage", False) else forms.GEMM_READY
    return values


def _check(name: str, shape: Shape, multiple: int) -> None:
    if rows_of(shape) % multiple or (shape and shape[-1] % multiple):
        raise RuntimeError(f"{name} requires tensor dims that are divisible by {multiple} (got shape={shape})")


def _mxfp8(quantizer: Any, shape: Shape) -> tuple[Copy, Copy]:
    _check("MXFP8", shape, 32)
    rows, columns = rows_of(shape), shape[-1]
    return (
        ("rowwise", shape, (up(rows, 128), up(columns // 32, 4)), 0),
        ("columnwise", shape, (up(rows // 32, 4), up(columns, 128)), 0),
    )


def _block_scales(quantizer: Any, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
    """Shape of a blockwise copy's FP32 scales: padded to 4 along the data's major axis, or compact."""
    columns, rows, compact = shape[-1] if shape else 1, rows_of(shape), is_compact(quantizer)
    high, wide = -(-rows // 128), -(-columns // 128)
    if quantizer.block_scaling_dim == 2:
        return (wide, up(high, 4)) if columnwise else (high, up(wide, 4))
    if columnwise:
        return (high, columns if compact else up(columns, 4))
    return (rows, wide) if compact else (wide, up(rows, 4))


def _block(quantizer: Any, shape: Shape) -> tuple[Copy, Copy]:
    compact = is_compact(quantizer)
    if getattr(quantizer, "all_gather_usage", False) and quantizer.columnwise_usage and not compact:
        raise RuntimeError("Compact columnwise format is not supported for 128x128 2D block scaling.")
    columns = shape if compact else _turned(shape)
    return (
        ("rowwise", shape, _block_scales(quantizer, shape, False), 0),
        ("columnwise", columns, _block_scales(quantizer, shape, True), 0),
    )


def _nvfp4(quantizer: Any, shape: Shape) -> tuple[Copy, Copy]:
    _check("NVFP4", shape, 16)
    check_usages(quantizer)
    rows, columns, by_row = rows_of(shape), shape[-1], by_rows(quantizer)
    return (
        ("rowwise", (*shape[:-1], columns // 2), (up(rows, 128), up(columns // 16, 4)), rows if by_row else 1),
        ("columnwise", (columns, rows // 2), (up(columns, 128), up(rows // 16, 4)), columns if by_row else 1),
    )


_SHAPES = {"mxfp8": _mxfp8, "block": _block, "nvfp4": _nvfp4}
"""Format -> of each copy its name, the shapes of data and scales, and the number of amaxes."""


def coerced(quantizer: Any, tensor: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """`tensor` with buffers for the quantizer's usages and no others."""
    kind = kind_of(quantizer)
    expected = "delayed" if kind == "current" else kind
    if storage_kind(tensor) != expected:
        raise RuntimeError(
            f"{type(quantizer).__name__} must output to {_CLASSES[kind][2]}, found {type(tensor).__name__}"
        )
    if kind in ("delayed", "current"):
        return _coerced_per_tensor(quantizer, tensor, tuple(shape))
    if kind == "nvfp4":
        _coerce_nvfp4(quantizer, tensor, shape)
    fresh = None
    for copy in ("rowwise", "columnwise"):
        for name in (f"_{copy}_data", f"_{copy}_scale_inv", *((f"_amax_{copy}",) if kind == "nvfp4" else ())):
            if not getattr(quantizer, f"{copy}_usage"):
                setattr(tensor, name, None)
            elif getattr(tensor, name) is None:
                fresh = fresh if fresh is not None else empty_quantized(quantizer, shape, dtype)
                setattr(tensor, name, getattr(fresh, name))
    if hasattr(tensor, "_with_gemm_swizzled_scales"):
        tensor._with_gemm_swizzled_scales = casts_to_tiles(quantizer, shape)
    return tensor


def _coerce_nvfp4(quantizer: Any, tensor: Any, shape: Sequence[int]) -> None:
    """What a tensor notes of its quantizer; amaxes in another number than the quantizer's are dropped."""
    check_usages(quantizer)
    for option in ("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max"):
        if hasattr(tensor, f"_{option}"):
            setattr(tensor, f"_{option}", getattr(quantizer, option))
    for name, lines in (("_amax_rowwise", rows_of(shape)), ("_amax_columnwise", shape[-1])):
        amax = getattr(tensor, name)
        if amax is not None and amax.numel() != (lines if by_rows(quantizer) else 1):
            setattr(tensor, name, None)


def _coerced_per_tensor(quantizer: Any, tensor: Any, shape: Shape) -> Any:
    row, column = copies_of(quantizer)
    if not (row or column):
        raise RuntimeError(f"Invalid usages for {type(quantizer).__name__}.")
    device = next(t.device for t in (tensor._data, tensor._transpose) if t is not None)
    for name, used, size in (("_data", row, shape), ("_transpose", column, _turned(shape))):
        if not used:
            setattr(tensor, name, None)
        elif getattr(tensor, name) is None:
            setattr(tensor, name, _bytes(size, device))
    tensor._transpose_invalid = not column
    tensor._fp8_dtype = quantizer.dtype
    return tensor
