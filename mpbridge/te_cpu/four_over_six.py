"""NVFP4's Four Over Six (from release 2.17): each block maps its largest value to 6 or to 4, whichever gives the smaller error."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from mpbridge.numerics.kernels import four_over_six


@dataclass(frozen=True, slots=True)
class FourOverSix:
    """The quantizer's settings for it."""

    bound: float
    """Largest block scale: 448 or 256."""
    squared: bool
    """Whether blocks compare the sum of squared errors, not of their magnitudes."""
    fast: bool
    """Whether errors are those of the scaled tensor: NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH, which the extension reads at every cast."""

    @classmethod
    def of(cls, quantizer: Any) -> FourOverSix | None:
        """The quantizer's settings; None if it does not use Four Over Six."""
        if not getattr(quantizer, "nvfp4_use_4over6", False):
            return None
        fast = os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "0") == "1"
        return cls(float(quantizer.nvfp4_e4m3_max), quantizer.nvfp4_4over6_err_mode == "MSE", fast)

    def factors(
        self, x: torch.Tensor, peak: torch.Tensor, amax: torch.Tensor, square: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(multiplier, block scale) of [rows, columns], each [rows, columns/16] as `peak`, the blocks' amaxes.

        amax: of the whole tensor, or per row. square: 16 rows share a choice.
        """
        rows, columns = x.shape
        if square:  # the lines of a block are on the last axis
            view = x.t().reshape(columns // 16, 16, rows)
            overall = amax.float().reshape(())
            found = four_over_six(view, peak.t().unsqueeze(1), overall, self.bound, self.squared, True, fast=self.fast)
            multiplier, scale = (part.expand(columns // 16, 1, rows).squeeze(1).t() for part in found)
            return multiplier, scale
        lines = amax.float().reshape(-1, 1)
        if lines.shape[0] > 1:
            lines = lines.repeat_interleave(columns // 16, 0)
        blocks, peaks = x.reshape(-1, 16), peak.reshape(-1, 1)
        found = four_over_six(blocks, peaks, lines, self.bound, self.squared, False, fast=self.fast)
        multiplier, scale = (part.reshape(rows, columns // 16) for part in found)
        return multiplier, scale
