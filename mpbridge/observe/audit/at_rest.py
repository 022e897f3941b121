"""Whether a weight stored in FP8 is its main weight, rounded. Uses a bound on the rounding error, so each rank can check its own shard."""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.common.formats import E4M3

_ROOM = 1.0 + 2.0**-7
"""Margin for the rounding of the FP32 scales."""


def is_quantized(stored: Any) -> bool:
    """Whether the tensor is one of Transformer Engine's quantized tensors."""
    return hasattr(stored, "_scale_inv") or hasattr(stored, "_rowwise_scale_inv")


@torch.no_grad()
def is_rounded(stored: Any, main: torch.Tensor, begin: int) -> bool:
    """Whether the elements of the flattened quantized weight `stored`, from `begin` on, match the FP32 numbers `main` to within half a step of E4M3.

    With a scale s, an element w becomes a code with 3 bits after the leading one: the code is within a relative 2**-4 of s w, and below the normal range
    within half of the smallest subnormal, 2**-10. A block's scale is above half of 448 / (the whole weight's amax), since rounding a scale to a power of two loses
    a factor below 2. With one scale for the whole tensor, values beyond its range saturate.
    """
    whole = stored.dequantize(dtype=torch.float32).reshape(-1)
    found, wanted = whole[begin : begin + main.numel()], main.float()
    if found.numel() != main.numel():
        return False
    inverse = getattr(stored, "_scale_inv", None)
    if isinstance(inverse, torch.Tensor) and inverse.numel() == 1:
        step = float(inverse)
        wanted = wanted.clamp(-E4M3.largest * step, E4M3.largest * step)
    else:
        # the largest element was itself rounded, by at most 2**-4
        step = 2.0 * (1.0 + 2.0**-3) * float(whole.abs().amax() if whole.numel() else 0.0) / E4M3.largest
    bound = wanted.abs() * 2.0 ** -(E4M3.mantissa + 1) + E4M3.smallest / 2 * step
    return bool(((found - wanted).abs() <= bound * _ROOM).all())
