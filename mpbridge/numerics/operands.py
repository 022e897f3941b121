"""Operands of the three GEMMs, which copy each of them reads, and the kernels' views of a tensor in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from mpbridge.precision.regions import Gemm

Side = Literal["x", "w", "dy"]
OperandCopy = Literal["row", "column"]
COPY_OF: Mapping[tuple[Gemm, Side], OperandCopy] = {
    ("fprop", "x"): "row",
    ("fprop", "w"): "row",
    ("dgrad", "dy"): "row",
    ("dgrad", "w"): "column",
    ("wgrad", "dy"): "column",
    ("wgrad", "x"): "column",
}


@dataclass(frozen=True, slots=True)
class Operand:
    """A quantized GEMM operand: its value is `values * alpha`."""

    values: torch.Tensor
    """In bf16 if that is exact, else in fp32."""
    factor: torch.Tensor | None = None
    """fp32 factor for the epilogue: a scalar, or one for each line, [rows, 1] or [1, columns]; None: 1. NVFP4: the amax."""
    divisor: float = 1.0
    """Constant by which the factor is divided. NVFP4: the largest code times the largest block scale."""

    @property
    def alpha(self) -> torch.Tensor | None:
        """The factor divided by the constant."""
        return self.factor if self.factor is None or self.divisor == 1.0 else self.factor / self.divisor

    def turned(self) -> Operand:
        """The transpose of an operand with one factor."""
        return Operand(self.values.t(), self.factor, self.divisor)

    def dequantized(self) -> torch.Tensor:
        """The operand's value in fp32, for statistics and tests."""
        return self.values.float() if self.alpha is None else self.values.float() * self.alpha


def view_of(x: torch.Tensor, along: int, copy: OperandCopy) -> torch.Tensor:
    """The kernels' view of [rows, columns] with blocks of `along` elements in a row or down a column."""
    return x.reshape(-1, along) if copy == "row" else x.reshape(x.shape[0] // along, along, x.shape[1])


def square_peaks(down: torch.Tensor, side: int) -> torch.Tensor:
    """Amax of square blocks, [row blocks, column blocks], from the amaxes down their columns, [row blocks, 1, columns]."""
    return down.reshape(down.shape[0], -1, side).amax(2)


def spread(factor: torch.Tensor, side: int) -> torch.Tensor:
    """A factor of square blocks repeated along the columns, so that the column kernels apply it."""
    return factor.repeat_interleave(side, 1).unsqueeze(1)


def padded_to_blocks(x: torch.Tensor, across: int, along: int, copy: OperandCopy) -> torch.Tensor:
    """x padded with zeros to whole blocks, which changes no amax."""
    rows, columns = (across, along) if copy == "row" else (along, across)
    if across > 1:
        rows = columns = along
    more_rows, more_columns = -x.shape[0] % rows, -x.shape[1] % columns
    return torch.nn.functional.pad(x, (0, more_columns, 0, more_rows)) if more_rows or more_columns else x


def cropped(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """x without the padding of `padded_to_blocks`."""
    return x if x.shape == shape else x[: shape[0], : shape[1]].contiguous()
