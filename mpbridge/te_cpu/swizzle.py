"""Block scales in the order in which tensor cores read them: tiles of 128 rows by 4 columns, 512 bytes each.

Source: NVIDIA's cuBLAS documentation, "1D block scaling factors layout"; Transformer Engine's common/swizzle/swizzle.cu.
"""

from __future__ import annotations

import torch


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
