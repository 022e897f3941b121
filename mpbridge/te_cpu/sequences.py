"""Packed sequences and dropout: what attention needs besides its products."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mpbridge.te_cpu.operands import is_quantized
from mpbridge.te_cpu.quantize import plain
from mpbridge.te_cpu.registry import kernel


@kernel
def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """[tokens, heads, size] as [batch, length, heads, size], zero beyond each sequence."""
    out = torch.zeros(b, max_seq_len, *tensor.shape[1:], dtype=tensor.dtype)
    bounds = cu_seqlens.tolist()
    for i in range(b):
        out[i, : bounds[i + 1] - bounds[i]] = tensor.detach()[bounds[i] : bounds[i + 1]]
    return out


@kernel
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """The inverse of `convert_thd_to_bshd`: t tokens."""
    out = torch.zeros(t, *tensor.shape[2:], dtype=tensor.dtype)
    bounds = cu_seqlens.tolist()
    for i in range(len(bounds) - 1):
        out[bounds[i] : bounds[i + 1]] = tensor.detach()[i, : bounds[i + 1] - bounds[i]]
    return out


@kernel
def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """A context-parallel rank's tokens: from every sequence, one chunk from the front and its mirror image from the back."""
    parts = []
    bounds = [int(bound) for bound in cu_seqlens.tolist()]
    for begin, end in itertools.pairwise(bounds):
        chunk = (end - begin) // (2 * world_size)
        for number in (rank, 2 * world_size - 1 - rank):
            parts.append(torch.arange(begin + number * chunk, begin + (number + 1) * chunk, dtype=torch.int32))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int32)


@kernel
def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int) -> torch.Tensor:
    """The first or the second half of every sequence; tokens are the third dimension from the end."""
    axis = 0 if tensor.dim() == 3 else 1
    parts = []
    bounds = [int(bound) for bound in cu_seqlens.tolist()]
    for begin, end in itertools.pairwise(bounds):
        half = (end - begin) // 2
        parts.append(tensor.detach().narrow(axis, begin + half_idx * half, half))
    return torch.cat(parts, axis)


_MASK_BITS = 8


@kernel
def dropout_fwd(input: Any, dropout_probability: float, out: torch.Tensor | None = None) -> list[torch.Tensor]:
    """[the kept elements, scaled by 1 / (1 - p); the mask, one bit per element]. Draws eight random bits per element, like the kernel."""
    x = plain(input) if is_quantized(input) else input.detach()
    random = torch.randint(0, 256, x.shape, dtype=torch.int32)
    keep = random >= int(dropout_probability * 256)
    kept = (x.float() * keep / (1.0 - dropout_probability)).to(x.dtype)
    if out is not None:
        out.copy_(kept)
        kept = out
    bits = keep.reshape(-1, _MASK_BITS).to(torch.uint8) << torch.arange(_MASK_BITS, dtype=torch.uint8)
    return [kept, bits.sum(1).to(torch.uint8)]


@kernel
def dropout_bwd(
    grad_output: torch.Tensor, mask: torch.Tensor, dropout_probability: float, grad_input: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradient of the input."""
    bits = (mask.unsqueeze(1) >> torch.arange(_MASK_BITS, dtype=torch.uint8)) & 1
    keep = bits.reshape(-1)[: grad_output.numel()].view(grad_output.shape)
    found = (grad_output.detach().float() * keep / (1.0 - dropout_probability)).to(grad_output.dtype)
    if grad_input is None:
        return found
    grad_input.copy_(found)
    return grad_input
