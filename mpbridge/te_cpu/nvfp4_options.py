"""NVFP4's options: those that exclude each other, by release, the arithmetic that only a GPU has, and Four Over Six.

Source: `NVFP4Quantizer` in Transformer Engine's pytorch/csrc/quantizer.cpp, and common/cast/dispatch/quantize.cuh.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpbridge.common.errors import Refused
from mpbridge.numerics.kernels import four_over_six
from mpbridge.te_cpu.played import now

_ROWS = "Row-scaled NVFP4 quantization"
_SIX = "NVFP4 4over6 quantization"


def by_rows(quantizer: Any) -> bool:
    """Whether an NVFP4 quantizer keeps an amax for each row."""
    return bool(getattr(quantizer, "row_scaled_nvfp4", False))


def _six(quantizer: Any) -> bool:
    return bool(getattr(quantizer, "nvfp4_use_4over6", False))


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the releases `since` <= release < `until` refuse, in the extension's words."""

    since: tuple[int, int]
    broken: Callable[[Any, torch.Tensor], bool]
    """Whether a quantizer may not cast a tensor."""
    message: str
    until: tuple[int, int] = (99, 0)


_RULES = (
    _Rule((2, 17), lambda q, x: _six(q) and q.with_rht, f"{_SIX} does not support RHT."),
    _Rule((2, 17), lambda q, x: _six(q) and q.stochastic_rounding, f"{_SIX} does not support stochastic rounding."),
    _Rule((2, 16), lambda q, x: by_rows(q) and q.with_rht, f"{_ROWS} does not support RHT."),
    _Rule((2, 16), lambda q, x: by_rows(q) and q.with_2d_quantization, f"{_ROWS} does not support 2D quantization."),
    _Rule((2, 16), lambda q, x: by_rows(q) and q.stochastic_rounding, f"{_ROWS} does not support stochastic rounding."),
    _Rule((2, 16), lambda q, x: by_rows(q) and q.with_amax_reduction, f"{_ROWS} does not support amax reduction."),
    _Rule((2, 9), lambda q, x: q.with_rht and x.dtype is not torch.bfloat16, "RHT is only supported for bfloat16 input"),
    _Rule((2, 9), lambda q, x: q.with_rht and not q.with_post_rht_amax, "Pre-RHT amax is not supported yet", (2, 14)),
    _Rule((2, 14), lambda q, x: q.with_rht and not q.with_post_rht_amax, "Pre-RHT amax is not supported yet. Use with_post_rht_amax=true instead."),
    _Rule((2, 17), lambda q, x: not _six(q) and q.nvfp4_e4m3_max != 448, "Non-4over6 NVFP4 quantization requires E4M3 max 448."),
    _Rule((2, 19), lambda q, x: by_rows(q) and q.columnwise_usage and _six(q),
          "Row-scaled NVFP4 transpose quantization is not supported with 4over6 mode. The 4over6 kernel does not consume the "
          "per-row/per-column amaxes, so the columnwise output would be incorrect."),
    _Rule((2, 19), lambda q, x: by_rows(q) and q.columnwise_usage and not _in_tiles_of_32(x),
          "Row-scaled NVFP4 transpose quantization requires BF16 input and dimensions that are multiples of 32."),
    _Rule((2, 17), lambda q, x: _six(q) and q.with_2d_quantization and not q.rowwise_usage,
          f"{_SIX.replace('quantization', '2D quantization')} requires rowwise output."),
    # the transform's column copy is made by a row-wise cast
    _Rule((2, 9), lambda q, x: q.with_2d_quantization and not q.rowwise_usage and not q.with_rht,
          "2D block quantization is only supported when return_identity is true.", (2, 17)),
)  # fmt: skip


def _in_tiles_of_32(x: torch.Tensor) -> bool:
    """Whether the optimized kernels take [rows, columns]."""
    return x.dtype is torch.bfloat16 and x.shape[0] % 32 == 0 and x.shape[1] % 32 == 0


def check(quantizer: Any, x: torch.Tensor) -> None:
    """Raises RuntimeError, with the extension's message, for options with which the release cannot cast [rows, columns]."""
    release = now().release
    for rule in _RULES:
        if rule.since <= release < rule.until and rule.broken(quantizer, x):
            raise RuntimeError(rule.message)


def check_usages(quantizer: Any) -> None:
    """Raises RuntimeError for copies that a row-scaled tensor cannot have."""
    if not by_rows(quantizer):
        return
    if not quantizer.rowwise_usage:
        raise RuntimeError(f"{_ROWS} requires rowwise usage.")
    if quantizer.columnwise_usage and now().release < (2, 19):
        raise RuntimeError(f"{_ROWS} does not support columnwise usage.")


def cast_together(quantizers: Sequence[Any], parts: Sequence[torch.Tensor]) -> bool:
    """Whether kernels cast all parts at once: those before release 2.14 are tried on any that share a buffer without gaps."""
    if any(map(by_rows, quantizers)):
        return False
    if now().release >= (2, 14):
        return parts[0].shape[-1] % 128 == 0
    return all(part.numel() % 512 == 0 for part in parts[:-1])  # a part begins at a multiple of 256 bytes


def check_split(quantizers: Sequence[Any], x: torch.Tensor) -> None:
    """Raises RuntimeError for what the kernels that cast all parts of [rows, columns] at once refuse."""
    first = quantizers[0]
    if first.with_2d_quantization:
        raise RuntimeError("NVFP4 split-quantize does not support 2D quantization")
    if first.with_amax_reduction:
        raise RuntimeError("NVFP4 split-quantize does not support amax reduction")
    if x.shape[-1] % 128:
        raise RuntimeError("NVFP4 multi-quantize requires inner dim to be multiple of 128.")
    if first.with_rht and not _six(first) and x.dtype is torch.bfloat16 and not first.with_post_rht_amax:
        raise RuntimeError("NVFP4 split-quantize does not yet support pre-RHT amax")


# --- fast math -----------------------------------------------------------------------------------------------------------------------------
_VARIABLE = "NVTE_USE_FAST_MATH"


def fast_math(quantizer: Any, since: tuple[int, int] = (2, 14)) -> bool:
    """Whether casts trade accuracy for speed: the extension reads NVTE_USE_FAST_MATH at every one, and ignores it for Four Over Six.

    Raises RuntimeError, as the extension does, for a value other than 0 and 1.
    """
    if now().release < since:
        return False
    value = os.environ.get(_VARIABLE, "").strip() or "0"
    if value not in ("0", "1"):
        raise RuntimeError(f"Invalid environment variable value ({_VARIABLE}={value}, expected 0 or 1)")
    return value == "1" and not _six(quantizer)


def refuse_approximations(quantizer: Any, *, fused: bool, since: tuple[int, int] = (2, 14)) -> None:
    """Raises Refused if fast math is on and the cast's kernel is fused with the Hadamard transform."""
    if fused and quantizer.with_rht and fast_math(quantizer, since):
        raise Refused(
            f"{_VARIABLE}={os.environ[_VARIABLE]}: NVFP4 casts that are fused with the Hadamard transform use the GPU's approximate "
            "reciprocal (rcp.approx.ftz), whose last bit is not documented: unset it, or run on a GPU"
        )


def rounds_multiplier(quantizer: Any, source: torch.Tensor) -> bool:
    """Whether fast math rounds the multipliers of a copy made of `source`, [lines, elements that share scales], to BF16.

    That is the kernel of one-dimensional blocks, which makes a row copy, alone or along with the column copy.
    """
    by_lines = not quantizer.with_2d_quantization and (quantizer.rowwise_usage or quantizer.with_rht)
    return by_lines and _in_tiles_of_32(source) and fast_math(quantizer)


# --- Four Over Six -------------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FourOverSix:
    """A quantizer's settings for it (from release 2.17): each block maps its largest value to 6 or to 4, whichever gives the smaller error."""

    bound: float
    """Largest block scale: 448 or 256."""
    squared: bool
    """Whether blocks compare the sum of squared errors, not of their magnitudes."""
    fast: bool
    """Whether errors are those of the scaled tensor: NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH, which the extension reads at every cast."""

    @classmethod
    def of(cls, quantizer: Any) -> FourOverSix | None:
        """The quantizer's settings; None if it does not use Four Over Six."""
        if not _six(quantizer):
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
            blocks, peaks = x.t().reshape(columns // 16, 16, rows), peak.t().unsqueeze(1)
            overall = amax.float().reshape(())
        else:
            blocks, peaks, overall = x.reshape(-1, 16), peak.reshape(-1, 1), amax.float().reshape(-1, 1)
            overall = overall.repeat_interleave(columns // 16, 0) if len(overall) > 1 else overall
        found = four_over_six(blocks, peaks, overall, self.bound, self.squared, square, fast=self.fast)
        multiplier, scale = (
            part.expand(peaks.shape).squeeze(1).t() if square else part.reshape(peak.shape) for part in found
        )
        return multiplier, scale
