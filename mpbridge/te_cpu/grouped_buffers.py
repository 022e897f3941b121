"""Buffers of grouped tensors: the data of group i start at element `tensor_offsets[i]` of every copy, its scales behind the groups' before it.

Source: `create_grouped_tensor` in Transformer Engine's pytorch/csrc/quantizer.cpp. A buffer may be longer than its groups: what lies behind
the last one is neither read nor written.
"""

import importlib
import math
from typing import Any

import torch

from mpbridge.te_cpu.storages import copies_of, empty_quantized, kind_of, swizzles
from mpbridge.te_cpu.swizzle import splits_to_offsets

Sizes = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Rows and columns of every group, int64 [groups], None where they are equal; and the elements at which groups begin, int64 [groups + 1], if known."""
TILE = 128
"""Rows of a tile of scales."""
Group = tuple[Any, int, tuple[int, int]]
"""A tensor that shares the buffers, the element at which its data start, its shape."""


def members(grouped: Any) -> list[Group]:
    """Every group of a grouped tensor. Raises RuntimeError for groups that end behind the buffers."""
    ends, elements = grouped.tensor_offsets, math.prod(grouped.logical_shape)
    if ends is not None and int(ends[-1]) > elements:
        raise RuntimeError(f"The groups end at element {int(ends[-1])} of a grouped tensor of {elements} elements.")
    if is_one_tensor(grouped):
        return _slices(grouped)
    # a shallow copy, since splitting notes shapes and offsets that a grouped tensor on a GPU does not know
    whole = _classes()[1].copy(grouped)
    parts = whole.split_into_quantized_tensors()
    for member in parts:
        if hasattr(member, "_with_gemm_swizzled_scales"):  # a quantizer may order scales in another way than these were
            member._with_gemm_swizzled_scales = grouped._with_gemm_swizzled_scales
    shapes = [(int(rows), int(columns)) for rows, columns in whole.tensor_shapes]
    starts = whole.offsets or [i * math.prod(shapes[0]) for i in range(len(shapes))]
    return list(zip(parts, [int(start) for start in starts[: len(shapes)]], shapes, strict=True))


def is_one_tensor(grouped: Any) -> bool:
    """Whether the scales are those of one MXFP8 tensor: groups of one shape whose rows do not fill tiles, in compact order."""
    return bool(
        grouped.quantizer is not None
        and kind_of(grouped.quantizer) == "mxfp8"
        and grouped.first_dims is None
        and grouped.last_dims is None
        and grouped.logical_shape[0] // grouped.num_tensors % TILE
        and not grouped._with_gemm_swizzled_scales
    )


def _slices(grouped: Any) -> list[Group]:
    """Groups of `is_one_tensor`: they share the data, and have copies of their scales."""
    rows, columns = grouped.logical_shape[0] // grouped.num_tensors, grouped.logical_shape[1]
    made = []
    for i in range(grouped.num_tensors):
        member = empty_quantized(grouped.quantizer, (rows, columns), grouped.fake_dtype)
        for copy, scales, name, high in (
            (grouped.rowwise_data, grouped.scale_inv, "rowwise", rows),
            (grouped.columnwise_data, grouped.columnwise_scale_inv, "columnwise", rows // 32),
        ):
            if copy is not None:
                setattr(member, f"_{name}_data", part(copy, i * rows * columns, (rows, columns)))
                own = getattr(member, f"_{name}_scale_inv")
                own[:high] = scales.view(-1, own.shape[1])[i * high : (i + 1) * high]
        made.append((member, i * rows * columns, (rows, columns)))
    return made


def part(buffer: torch.Tensor, start: int, shape: tuple[int, int]) -> torch.Tensor:
    """A group's [rows, columns] in a buffer of all groups."""
    return buffer.reshape(-1)[start : start + math.prod(shape)].view(shape)


def _classes() -> tuple[Any, Any]:
    """GroupedTensor, GroupedTensorStorage."""
    package = "transformer_engine.pytorch.tensor"
    return (
        importlib.import_module(f"{package}.grouped_tensor").GroupedTensor,
        importlib.import_module(f"{package}.storage.grouped_tensor_storage").GroupedTensorStorage,
    )


def new_grouped(
    internal: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    num_tensors: int,
    quantizer: Any,
    sizes: Sizes,
    **buffers: Any,
) -> Any:
    """A GroupedTensor of these buffers, or GroupedTensorStorage if internal. Raises RuntimeError for sizes of another length or dtype."""
    first_dims, last_dims, offsets = sizes
    for name, found, length in (
        ("first_dims", first_dims, num_tensors),
        ("last_dims", last_dims, num_tensors),
        ("tensor_offsets", offsets, num_tensors + 1),
    ):
        if found is not None and (found.dtype is not torch.int64 or found.numel() != length):
            raise RuntimeError(
                f"{name} must have dtype int64 and length {length}, found {found.dtype} and {found.numel()}."
            )
    if offsets is None:
        offsets = _offsets(first_dims, last_dims, shape)
    return _classes()[1 if internal else 0](
        shape=list(shape),
        stride=[shape[1], 1],
        dtype=dtype,
        num_tensors=num_tensors,
        quantizer=quantizer,
        first_dims=first_dims,
        last_dims=last_dims,
        tensor_offsets=offsets,
        **buffers,
    )


def _offsets(
    first_dims: torch.Tensor | None, last_dims: torch.Tensor | None, shape: tuple[int, int]
) -> torch.Tensor | None:
    if first_dims is not None and last_dims is not None:
        return splits_to_offsets(first_dims * last_dims, 1)
    if first_dims is not None:
        return splits_to_offsets(first_dims, shape[1])
    return None if last_dims is None else splits_to_offsets(last_dims, shape[0])


def empty_grouped(quantizer: Any, shape: tuple[int, int], dtype: torch.dtype, num_tensors: int, sizes: Sizes) -> Any:
    """A grouped tensor of zeros with the buffers for the quantizer's usages."""
    kind = kind_of(quantizer)
    both = sizes[0] is not None and sizes[1] is not None
    if kind == "current" and both:
        raise RuntimeError(
            "FP8 current-scaling grouped quantization does not support varying both first and last dimensions."
        )
    one_scale = kind in ("delayed", "current")
    row, column = copies_of(quantizer) if one_scale else (quantizer.rowwise_usage, quantizer.columnwise_usage)
    buffers: dict[str, Any] = {}
    for wanted, data, scale in ((row, "data", "scale_inv"), (column, "columnwise_data", "columnwise_scale_inv")):
        if wanted:
            buffers[data] = torch.zeros(math.prod(shape) // (2 if kind == "nvfp4" else 1), dtype=torch.uint8)
            buffers[scale] = _empty_scales(quantizer, shape, num_tensors, columnwise=data != "data", both=both)
    if one_scale:
        shared = torch.ones(num_tensors)
        buffers.update({name: shared for name in ("scale_inv", "columnwise_scale_inv") if name in buffers})
        buffers.update(amax=torch.zeros(num_tensors), scale=torch.ones(num_tensors))
    if kind == "nvfp4":
        buffers.update(_nvfp4_amaxes(quantizer, shape[0], num_tensors, row, column))
    return new_grouped(
        bool(quantizer.internal), shape, dtype, num_tensors, quantizer, sizes,
        with_gemm_swizzled_scales=swizzles(quantizer), **buffers,
    )  # fmt: skip


def _nvfp4_amaxes(quantizer: Any, rows: int, number: int, row: bool, column: bool) -> dict[str, Any]:
    by_row = quantizer.row_scaled_nvfp4
    if by_row and (column or not row):
        raise RuntimeError("Row-scaled NVFP4 grouped quantization takes rowwise usage and no columnwise usage.")
    return {
        "amax": torch.zeros(rows if by_row else number) if row else None,
        "columnwise_amax": torch.zeros(number) if column else None,
        "row_scaled_nvfp4": by_row,
        "nvfp4_use_4over6": quantizer.nvfp4_use_4over6,
        "nvfp4_e4m3_max": quantizer.nvfp4_e4m3_max,
    }


def _empty_scales(quantizer: Any, shape: tuple[int, int], number: int, *, columnwise: bool, both: bool) -> torch.Tensor:
    """The scales of all groups; both: rows and columns vary."""
    kind = kind_of(quantizer)
    if kind in ("delayed", "current"):
        return torch.ones(number)
    if kind == "mxfp8" and both:
        return torch.zeros(math.prod(shape) // 32, dtype=torch.uint8)
    size = math.prod(quantizer.get_scale_shape(shape, columnwise))
    if kind != "block":
        return torch.zeros(size, dtype=torch.uint8)
    if columnwise and quantizer.block_scaling_dim == 2:  # each group's padding to four blocks
        size += -(-shape[1] // 128) * 4 * (number - 1)
    return torch.zeros(size)
