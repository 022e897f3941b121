"""Rotary position embedding, alone and on a packed QKV tensor. Source: common/fused_rope/fused_rope.cu."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.te_cpu.registry import kernel


def _turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    """x [..., d] in FP32 rotated by angles [..., d2], d2 <= d; elements beyond d2 are unchanged."""
    width = angles.shape[-1]
    part, rest = x[..., :width].float(), x[..., width:]
    cosine, sine = angles.cos(), angles.sin()
    if backward:
        turned = part * cosine - _half_turn(part * sine, interleaved)
    else:
        turned = part * cosine + _half_turn(part, interleaved) * sine
    return torch.cat([turned.to(x.dtype), rest], -1) if rest.shape[-1] else turned.to(x.dtype)


def _half_turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _positions(length: int, start: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Positions of a rank's tokens: under context parallelism one chunk from the front and its mirror image from the back."""
    at = torch.arange(length)
    if cp_size > 1:
        half = length // 2
        at = torch.where(at < half, at + cp_rank * half, at + length * cp_size - (cp_rank + 1) * half - half)
    return at + start


def _rotate(
    x: torch.Tensor,
    freqs: torch.Tensor,
    starts: torch.Tensor | None,
    layout: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
    backward: bool,
) -> torch.Tensor:
    x, table = x.detach(), freqs.detach().float().reshape(freqs.shape[0], -1)
    name = getattr(layout, "name", str(layout))
    if "THD" in name:
        assert cu_seqlens is not None  # THD has no other lengths
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        bounds = [int(value) // cp_size for value in cu_seqlens.tolist()]
        for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
            at = _positions(end - begin, int(starts[i]) if starts is not None else 0, cp_size, cp_rank)
            out[begin:end] = _turned(x[begin:end], table[at].unsqueeze(1), interleaved, backward)
        return out
    axis = 0 if "SBHD" in name else 1
    length, batch = x.shape[axis], x.shape[1 - axis]
    if starts is None:
        angles = table[_positions(length, 0, cp_size, cp_rank)].unsqueeze(1)
    else:
        angles = torch.stack([table[_positions(length, int(start), cp_size, cp_rank)] for start in starts], 1)
    angles = angles if axis == 0 else angles.transpose(0, 1)
    if axis == 1 and starts is None:
        angles = angles.expand(1, length, -1)
    del batch
    return _turned(x, angles.unsqueeze(2), interleaved, backward).contiguous()


@kernel
def fused_rope_forward(
    input: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: Any,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Rotated input, contiguous."""
    return _rotate(input, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank, False)


@kernel
def fused_rope_backward(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: Any,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Gradient of the input."""
    return _rotate(output_grads, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank, True)


@kernel
def fused_qkv_rope_forward(
    qkv_input: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    start_positions: Any,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rotated Q, rotated K, V) of a packed [.., .., heads, q + k + v] tensor."""
    q, k, v = torch.split(qkv_input.detach(), [int(size) for size in qkv_split_arg_list], -1)
    q = q.reshape(*q.shape[:2], -1, k.shape[-1])
    common = (start_positions, qkv_format, interleaved, None, cp_size, cp_rank)
    return _rotate(q, q_freqs, *common, False), _rotate(k, k_freqs, *common, False), v.contiguous()


@kernel
def fused_qkv_rope_backward(
    q_grad_out: torch.Tensor,
    k_grad_out: torch.Tensor,
    v_grad_out: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Gradient of the packed tensor."""
    common = (None, qkv_format, interleaved, None, cp_size, cp_rank)
    dq = _rotate(q_grad_out, q_freqs, *common, True).reshape(*k_grad_out.shape[:3], int(qkv_split_arg_list[0]))
    return torch.cat([dq, _rotate(k_grad_out, k_freqs, *common, True), v_grad_out.detach()], -1)
