"""Softmaxes of unfused attention."""

from __future__ import annotations

import torch

from mpbridge.te_cpu.registry import KERNELS, kernel

_MASKED = -10000.0
"""The value of a masked score in scaled_masked_softmax.cu."""


@kernel
def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax(scale * input) over the last axis."""
    return torch.softmax(input.detach().float() * float(scale_factor), -1).to(input.dtype)


@kernel
def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """As `scaled_softmax_forward`, but nearly zero where the mask is true; a fully masked row is zero."""
    hidden = mask.bool()
    scores = (input.detach().float() * float(scale_factor)).masked_fill(hidden, _MASKED)
    # the kernel's own test for a masked row; TE's path in plain torch, which takes the sizes that the kernel does not, gives the mean instead
    return torch.softmax(scores, -1).masked_fill(scores.amax(-1, keepdim=True) == _MASKED, 0.0).to(input.dtype)


@kernel
def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """Causal softmax, aligned to the bottom right corner."""
    queries, keys = input.shape[-2:]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    scores = (input.detach().float() * float(scale_factor)).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1).nan_to_num(0.0).to(input.dtype)


def _backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float) -> torch.Tensor:
    grad, result = output_grads.detach().float(), softmax_results.detach().float()
    return ((grad - (grad * result).sum(-1, keepdim=True)) * result * float(scale_factor)).to(softmax_results.dtype)


KERNELS["scaled_upper_triang_masked_softmax_forward"] = scaled_aligned_causal_masked_softmax_forward
for _name in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
    KERNELS[f"{_name}_softmax_backward"] = _backward
