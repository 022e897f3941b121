"""Block scales in the order in which tensor cores read them: tiles of 128 rows by 4 columns, 512 bytes each; offsets and addresses for grouped linears.

Source: NVIDIA's cuBLAS documentation, "1D block scaling factors layout"; Transformer Engine's common/swizzle/swizzle.cu.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.te_cpu.played import KERNELS, kernel
from mpbridge.te_cpu.storages import rows_of, storage_kind, up


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, columns], rows a multiple of 128 and columns of 4, in tile order, same shape."""
    rows, columns = scales.shape
    tiles = scales.view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def unswizzled(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `swizzled`."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def swizzled_columns(scales: torch.Tensor) -> torch.Tensor:
    """MXFP8's column scales [blocks, columns], blocks a multiple of 4 and columns of 128: swizzled as their transpose, in the same shape."""
    return swizzled(scales.t().contiguous()).view(scales.shape)


def unswizzled_columns(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `swizzled_columns`."""
    blocks, columns = scales.shape
    return unswizzled(scales.reshape(columns, blocks)).t()


_ALIGNMENT = 16
"""Bytes to which each tensor's scales are rounded up in their common buffer."""


@kernel
def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """[splits + 1] int64: where each split's elements begin, and their number."""
    return splits_to_offsets_multi(
        first_dims, first_dims.device, strides=[logical_last_dim], include_leading_zero=[True], dtypes=[torch.int64]
    )[1][0]


@kernel
def splits_to_offsets_multi(
    split_sizes: torch.Tensor,
    device: Any,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(sizes in int64, for each stride the cumulative sums of the sizes times that stride). Raises RuntimeError for lists of different lengths."""
    if not len(strides) == len(include_leading_zero) == len(dtypes):
        raise RuntimeError(
            f"strides, include_leading_zero, and dtypes must have matching lengths, but got {len(strides)}, {len(include_leading_zero)}, and {len(dtypes)}."
        )
    sizes = split_sizes.to(torch.int64)
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return sizes, [
        (ends if zero else ends[1:]).mul(stride).to(dtype)
        for stride, zero, dtype in zip(strides, include_leading_zero, dtypes, strict=True)
    ]


@kernel
def copy_data_ptrs_to_device(tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    """Addresses of the tensors' data, int64."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


# --- scales in tile order ------------------------------------------------------------------------------------------------------------------
_KINDS = {
    "mxfp8_rowwise": (swizzled, (1, 32)),
    "mxfp8_columnwise": (swizzled_columns, (32, 1)),
    "nvfp4": (swizzled, (1, 16)),
}
"""Copy of a quantized tensor -> how its scales are put in tile order, and rows and columns of a block."""


def tiles(scales: torch.Tensor, kind: str, rows: int, columns: int) -> torch.Tensor:
    """Padded scales of a [rows, columns] tensor in tile order, in the same shape; their padding is zero."""
    order, (block_rows, block_columns) = _KINDS[kind]
    high, wide = rows // block_rows, columns // block_columns
    clean = torch.zeros(scales.shape, dtype=torch.uint8)
    clean[:high, :wide] = scales.detach().view(torch.uint8)[:high, :wide]
    return order(clean)


@kernel
def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Puts the block scales of an MXFP8 or NVFP4 tensor in tile order, once; other tensors are not changed."""
    kind = storage_kind(tensor)
    if kind not in ("mxfp8", "nvfp4") or tensor._with_gemm_swizzled_scales:
        return
    shape = rows_of(tensor.size()), int(tensor.size()[-1])
    for copy in ("rowwise", "columnwise"):
        scales = getattr(tensor, f"_{copy}_scale_inv")
        if scales is not None:
            # NVFP4's column copy is the transpose's row copy
            of = shape[::-1] if (kind, copy) == ("nvfp4", "columnwise") else shape
            name = kind if kind == "nvfp4" else f"{kind}_{copy}"
            setattr(tensor, f"_{copy}_scale_inv", tiles(scales, name, *of))
    tensor._with_gemm_swizzled_scales = True


def _discrete(
    data_tensors: Sequence[torch.Tensor], scale_tensors: Sequence[torch.Tensor], swizzle_type: str, device: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(addresses of the data, addresses of the scales in tile order, the buffer that holds the scales), for weights of one shape in separate tensors.

    Source: pytorch/csrc/extensions/grouped_mlp_experimental.cpp. Raises RuntimeError, as the extension does.
    """
    if len(data_tensors) != len(scale_tensors):
        raise RuntimeError(
            f"Expected data_tensors and scale_tensors to have matching sizes, but got {len(data_tensors)} and {len(scale_tensors)}."
        )
    if swizzle_type not in _KINDS:
        raise RuntimeError(f"Unsupported swizzle type ({swizzle_type}). Expected one of: {', '.join(_KINDS)}.")
    stride = up(scale_tensors[0].numel(), _ALIGNMENT) if scale_tensors else 0
    buffer = torch.zeros(len(scale_tensors), stride, dtype=torch.uint8)
    for row, data, scales in zip(buffer, data_tensors, scale_tensors, strict=True):
        columns = data.shape[-1] * (2 if swizzle_type == "nvfp4" else 1)
        row[: scales.numel()] = tiles(scales, swizzle_type, rows_of(data.shape), columns).reshape(-1)
    data_at, scales_at = (copy_data_ptrs_to_device(of, device) for of in (data_tensors, list(buffer)))
    return data_at, scales_at, buffer.view(-1)


KERNELS["grouped_mlp_experimental.swizzle_scales_and_pack_ptrs_for_discrete_weights"] = _discrete
