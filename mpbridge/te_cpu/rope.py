"""Rotary position embedding, alone and on a packed QKV tensor. Source: common/fused_rope/fused_rope.cu."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.te_cpu.registry import KERNELS, kernel

CHUNK = 1 << 18
"""Elements turned at a time: with the products in FP32 they fit the caches, so that memory is read and written once."""


def _turn(
    out: torch.Tensor, x: torch.Tensor, angles: torch.Tensor, interleaved: bool, backward: bool, axis: int
) -> None:
    """Writes x [..., d] rotated by angles [..., d2] into out, in FP32, with d2 <= d; elements beyond d2 are copied. `axis`: that of the positions."""
    width = angles.shape[-1]
    cosine, sine = angles.cos(), angles.sin()
    if not backward:  # the product with the sine that an element receives is that of its partner; backward, the partner's own angle counts
        sine = _joined(*_pair(sine, interleaved)[::-1], interleaved)
    if width < x.shape[-1]:
        out[..., width:].copy_(x[..., width:])
    step = max(1, CHUNK * x.shape[axis] // x.numel()) if x.numel() else 1
    for begin in range(0, x.shape[axis], step):
        size = min(step, x.shape[axis] - begin)
        part, into, cosines, sines = (
            t.narrow(axis, begin, size) for t in (x[..., :width], out[..., :width], cosine, sine)
        )
        wide = part.float()  # once, not in both products
        turned, partners = wide * cosines, wide * sines
        first, second = _pair(turned, interleaved)
        to_second, to_first = _pair(partners, interleaved)
        first.sub_(to_first, alpha=-1 if backward else 1)
        second.sub_(to_second, alpha=1 if backward else -1)
        into.copy_(turned)


def _pair(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements that are turned together, as views: neighbours, or the two halves."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _joined(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x rotated, in `out` or in a new contiguous tensor. The axes after batch and sequence, all but the last, share their angles."""
    x, table = x.detach(), freqs.detach().float().reshape(freqs.shape[0], -1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    name = getattr(layout, "name", str(layout))
    if "THD" in name:
        assert cu_seqlens is not None  # THD has no other lengths
        bounds = [int(value) // cp_size for value in cu_seqlens.tolist()]
        for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
            at = _positions(end - begin, int(starts[i]) if starts is not None else 0, cp_size, cp_rank)
            _turn(out[begin:end], x[begin:end], table[at].unsqueeze(1), interleaved, backward, 0)
        return out
    axis = 0 if "SBHD" in name else 1
    length = x.shape[axis]
    offsets = [0] if starts is None else [int(start) for start in starts]
    angles = torch.stack([table[_positions(length, start, cp_size, cp_rank)] for start in offsets], 1 - axis)
    angles = angles.reshape(*angles.shape[:2], *[1] * (x.dim() - 3), angles.shape[-1])
    _turn(out, x, angles, interleaved, backward, axis)
    return out


KERNELS["fused_rope_forward"] = functools.partial(_rotate, backward=False)
KERNELS["fused_rope_backward"] = functools.partial(_rotate, backward=True)


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
    q = q.reshape(*q.shape[:3], -1, k.shape[-1])
    common = (start_positions, qkv_format, interleaved, None, cp_size, cp_rank)
    return _rotate(q, q_freqs, *common, False).flatten(2, 3), _rotate(k, k_freqs, *common, False), v.contiguous()


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
    common = (None, qkv_format, interleaved, None, cp_size, cp_rank, True)
    sizes = [int(size) for size in qkv_split_arg_list]
    out = q_grad_out.new_empty(*k_grad_out.shape[:3], sum(sizes))
    dq, dk, dv = torch.split(out, sizes, -1)
    q_heads = q_grad_out.reshape(*k_grad_out.shape[:3], -1, k_grad_out.shape[-1])
    _rotate(q_heads, q_freqs, *common, dq.view(q_heads.shape))
    _rotate(k_grad_out, k_freqs, *common, dk)
    dv.copy_(v_grad_out.detach())
    return out
