"""Norms in FP32, as Transformer Engine's kernels compute them: the result that delayed scaling quantizes, before it is rounded to 16 bits.

Under delayed scaling its norm kernel itself casts to FP8; under every other scaling the norm's 16-bit output is quantized
(`rmsnorm_fwd` in Transformer Engine's pytorch/csrc/extensions/normalization.cpp: FULLY_FUSED, FUSED_NORM_AMAX, UNFUSED).
"""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP32 result, reciprocal root mean square of each row) of FP32 [..., columns]."""
    inverse = torch.rsqrt(x.square().mean(-1) + eps)
    return x * inverse.unsqueeze(-1) * gain, inverse


def layer_norm(
    x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(FP32 result, mean, reciprocal standard deviation of each row) of FP32 [..., columns]."""
    return torch.native_layer_norm(x, [x.shape[-1]], gain, shift, eps)


@torch.no_grad()
def unrounded(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """The FP32 output of the module `norm` (torch's RMSNorm or LayerNorm) for `x`."""
    with torch._C.DisableTorchFunction():
        source, gain = x.detach().float(), norm.weight.detach().float()
        if isinstance(norm, torch.nn.RMSNorm):
            eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
            return rms_norm(source, gain, eps)[0]
        shift = None if norm.bias is None else norm.bias.detach().float()
        return layer_norm(source, gain, shift, norm.eps)[0]
