"""NVFP4's operands: two levels of scales, the Hadamard transform, stochastic rounding, Four Over Six, and row scaling."""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.common.formats import E2M1, E4M3
from mpbridge.numerics.kernels import four_over_six, nvfp4_scales, peaks, rotate, values, values_stochastic
from mpbridge.numerics.operands import Operand, OperandCopy, Side, spread, square_peaks, view_of
from mpbridge.numerics.scales import Options, Rules, nvfp4_block, nvfp4_fast_multiplier, nvfp4_global

Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(multiplier before the cast, block scale, amax of the second level)."""


class Nvfp4:
    """Mixed into Quantizer, and uses its fields."""

    rules: Rules
    options: Options
    out: torch.dtype
    _hadamard: bool
    _randomness: Any
    _kernel: Any
    block: Any

    def four_over_six(self, side: Side) -> bool:
        """Whether that side's blocks choose between 6 and 4 for their largest value."""
        scope = {"x": "activations", "w": "weights"}.get(side)
        return scope is not None and self.options.get("four_over_six", "none") in (scope, "all")

    def row_scaled(self, side: Side) -> bool:
        """Whether that side has a second-level scale for each line of its GEMM."""
        return side == "x" and bool(self.options.get("row_scaled_activations", False))

    def _nvfp4(self, x: torch.Tensor, slot: str, side: Side, copy: OperandCopy) -> Operand:
        source, view, across = self._nvfp4_view(x, side, copy)
        multiplier, factor, overall = self._nvfp4_factors(x, view, side, copy)
        if side == "dy" and self.options.get("stochastic_rounding", True):
            random = self._randomness.bytes(view.shape, f"{slot}.{copy}")
            out = self._kernel(values_stochastic, view, self.out)(view, multiplier, factor, random)
        else:
            out = self._kernel(values, view, E2M1, self.out)(view, multiplier, factor)
        out = out.view(source.shape)
        target = E2M1.largest / self.rules.nvfp4_headroom
        return Operand(out.t() if across else out, overall, target * self._largest_scale(side))

    def _nvfp4_view(self, x: torch.Tensor, side: Side, copy: OperandCopy) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """(the tensor that is rounded, the kernels' view of it, whether it is x transposed)."""
        along = self.block(side).along
        if side == "w":
            square = self.block("w").square
            across = square and copy == "row" and self.four_over_six("w")
            source = x.t().contiguous() if across else x
            return source, view_of(source, along, "column" if square else copy), across
        if copy == "column" and self._hadamard:
            # fast math: the fused kernel casts the transform's fp32 result
            x = rotate(x, rounded=not (self.options.get("fast_math") and _fused(x)))
        return x, view_of(x, along, copy), False

    def _nvfp4_factors(
        self, x: torch.Tensor, view: torch.Tensor, side: Side, copy: OperandCopy, overall: torch.Tensor | None = None
    ) -> Factors:
        """(multiplier before the cast, block scale, amax of the second level) of a view. overall: the tensor's amax, if the view is only part of it."""
        multiplier, factor, overall = self._exact_factors(x, view, side, copy, overall)
        if self._rounds_multiplier(x, side):
            multiplier = nvfp4_fast_multiplier(factor, nvfp4_global(self._lines(overall, view, side, copy)))
        return multiplier, factor, overall

    def _rounds_multiplier(self, x: torch.Tensor, side: Side) -> bool:
        """Whether fast math rounds multipliers to BF16: in the kernel of one-dimensional blocks, where it is not fused with the transform."""
        if not self.options.get("fast_math") or self.four_over_six(side) or (side == "w" and self.block("w").square):
            return False
        in_tiles = x.dtype is torch.bfloat16 and x.shape[0] % 32 == 0 and x.shape[1] % 32 == 0
        return in_tiles and not (side != "w" and self._hadamard and _fused(x))

    def _lines(self, overall: torch.Tensor, view: torch.Tensor, side: Side, copy: OperandCopy) -> torch.Tensor:
        """The second level's amax for every block of a view."""
        if self.row_scaled(side) and copy == "row":
            return overall.repeat_interleave(view.shape[0] // overall.shape[0], 0)
        return overall

    def _exact_factors(
        self, x: torch.Tensor, view: torch.Tensor, side: Side, copy: OperandCopy, overall: torch.Tensor | None
    ) -> Factors:
        """`_nvfp4_factors` without fast math."""
        square = side == "w" and self.block("w").square
        if overall is None and not square and not self.four_over_six(side) and not self.row_scaled(side):
            # the kernel fused with the transform makes the rotated copy and, from 2.14 on, also the row copy; its block amaxes propagate NaN
            fused = side != "w" and self._hadamard and _fused(x) and (copy == "column" or self.rules.nvfp4_fused_rows)
            scales: Factors = self._kernel(nvfp4_scales, view, self.rules, fused)(view)
            return scales
        amax = self._kernel(peaks, view)(view)
        if square:
            return self._square_factors(view, amax, side, overall)
        overall = self._line_peaks(x, amax, side, copy) if overall is None else overall
        lines = self._lines(overall, view, side, copy)
        if self.four_over_six(side):
            return (*self._four_or_six(view, amax, lines, side, square=False), overall)
        return (*nvfp4_block(amax, nvfp4_global(lines), self.rules), overall)

    def _square_factors(
        self, view: torch.Tensor, amax: torch.Tensor, side: Side, overall: torch.Tensor | None
    ) -> Factors:
        along = self.block(side).along
        blocks = square_peaks(amax, along)
        if not self.four_over_six(side):
            lines = blocks.amax() if overall is None else overall
            multiplier, factor = nvfp4_block(blocks, nvfp4_global(lines), self.rules)
            return spread(multiplier, along), spread(factor, along), lines
        amax = spread(blocks, along)
        lines = amax.amax() if overall is None else overall
        return (*self._four_or_six(view, amax, lines, side, square=True), lines)

    def _line_peaks(self, x: torch.Tensor, amax: torch.Tensor, side: Side, copy: OperandCopy) -> torch.Tensor:
        """The amax that sets the second-level scale: one for the tensor, or one for each line of x under row scaling."""
        if not self.row_scaled(side):
            return amax.amax()
        return amax.reshape(x.shape[0], -1).amax(1, keepdim=True) if copy == "row" else amax.amax((0, 1))[None]

    def _four_or_six(
        self, view: torch.Tensor, amax: torch.Tensor, lines: torch.Tensor, side: Side, *, square: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        squared = self.options.get("four_over_six_error") == "MSE"
        # eager: unrolling the one-by-one sums takes the compiler minutes
        fast = bool(self.options.get("four_over_six_fast_error", False))
        return four_over_six(view, amax, lines, self._largest_scale(side), squared, square, fast=fast)

    def _largest_scale(self, side: Side) -> float:
        scope = {"x": "activations", "w": "weights"}.get(side)
        below = self.four_over_six(side) and self.options.get("four_over_six_256", "all") in (scope, "all")
        return 256.0 if below else E4M3.largest

    def _explain_nvfp4(
        self, x: torch.Tensor, operand: Operand, side: Side, copy: OperandCopy
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source, view, across = self._nvfp4_view(x, side, copy)
        # under row scaling the scales are recomputed from the lines themselves
        overall = None if self.row_scaled(side) else operand.factor
        multiplier = self._nvfp4_factors(x, view, side, copy, overall)[0].expand(view.shape).reshape(source.shape)
        return (source.t().float(), multiplier.t()) if across else (source.float(), multiplier)


def _fused(x: torch.Tensor) -> bool:
    """Whether Transformer Engine casts x in a kernel that is fused with the Hadamard transform (pytorch/csrc/quantizer.cpp)."""
    return x.dtype is torch.bfloat16 and x.shape[0] % 64 == 0 and x.shape[1] % 128 == 0
