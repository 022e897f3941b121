"""Whether a weight at rest in FP8 is its main weight, rounded: by a bound on the rounding, so that each rank can look at its own shard."""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.formats import E4M3

_ROOM = 1.0 + 2.0**-7
"""The scales are FP32 numbers."""


def is_quantized(stored: Any) -> bool:
    """Whether it is one of Transformer Engine's quantized tensors."""
    return hasattr(stored, "_scale_inv") or hasattr(stored, "_rowwise_scale_inv")


@torch.no_grad()
def is_rounded(stored: Any, main: torch.Tensor, begin: int) -> bool:
    """Whether elements `begin` and on of the quantized weight `stored`, flat, are the FP32 numbers `main` to within half a step of E4M3.

    With a scale s an element w becomes a code with 3 bits after the leading one: s w is met to within 2**-4 of itself, and below the normal numbers to
    within half of the smallest one, 2**-10. A block's scale is above half of 448 / (the whole weight's amax), since a scale that is a power of two loses
    a factor below 2. With one scale for the tensor, numbers beyond its range saturate.
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
        # the largest element was itself rounded, by 2**-4 at most
        step = 2.0 * (1.0 + 2.0**-3) * float(whole.abs().amax() if whole.numel() else 0.0) / E4M3.largest
    bound = wanted.abs() * 2.0 ** -(E4M3.mantissa + 1) + E4M3.smallest / 2 * step
    return bool(((found - wanted).abs() <= bound * _ROOM).all())
