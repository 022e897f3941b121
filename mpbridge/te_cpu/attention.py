"""What attention needs besides its products: rotary positions, softmaxes, packed sequences, dropout."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mpbridge.te_cpu.operands import is_quantized
from mpbridge.te_cpu.played import KERNELS, kernel
from mpbridge.te_cpu.quantize import plain

# --- rotary position embedding, alone and on a packed QKV tensor (common/fused_rope/fused_rope.cu) ------------------------------------------
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
        for i, (begin, end) in enumerate(_sequences(cu_seqlens // cp_size)):
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


# --- softmaxes of unfused attention --------------------------------------------------------------------------------------------------------
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


def _softmax_backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float) -> torch.Tensor:
    grad, result = output_grads.detach().float(), softmax_results.detach().float()
    return ((grad - (grad * result).sum(-1, keepdim=True)) * result * float(scale_factor)).to(softmax_results.dtype)


KERNELS["scaled_upper_triang_masked_softmax_forward"] = scaled_aligned_causal_masked_softmax_forward
for _name in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
    KERNELS[f"{_name}_softmax_backward"] = _softmax_backward


# --- packed sequences and dropout ----------------------------------------------------------------------------------------------------------
def _sequences(cu_seqlens: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Where each sequence begins and ends."""
    return itertools.pairwise(int(bound) for bound in cu_seqlens.tolist())


@kernel
def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """[tokens, heads, size] as [batch, length, heads, size], zero beyond each sequence."""
    out = torch.zeros(b, max_seq_len, *tensor.shape[1:], dtype=tensor.dtype)
    for row, (begin, end) in zip(out, _sequences(cu_seqlens), strict=True):
        row[: end - begin] = tensor.detach()[begin:end]
    return out


@kernel
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """The inverse of `convert_thd_to_bshd`: t tokens."""
    out = torch.zeros(t, *tensor.shape[2:], dtype=tensor.dtype)
    for row, (begin, end) in zip(tensor.detach(), _sequences(cu_seqlens), strict=True):
        out[begin:end] = row[: end - begin]
    return out


@kernel
def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """A context-parallel rank's share of the tokens: from every sequence, one chunk from the front and its mirror image from the back. Raises RuntimeError
    for what the GPU's host code refuses.

    A sequence whose length is no multiple of twice the ranks is cut where the kernel's whole numbers cut it (context_parallel.cu, whose assertion a release
    build leaves out): every rank gets as many tokens as the others; some tokens go to several ranks, some to none.
    """
    bounded = cu_seqlens.dim() == 1 and cu_seqlens.dtype is torch.int32 and len(cu_seqlens) > 1
    if not bounded or not 0 <= rank < world_size or total_tokens <= 0 or total_tokens % (2 * world_size):
        raise RuntimeError(
            f"Assertion failed: {total_tokens} tokens with {cu_seqlens.dtype} bounds of shape {tuple(cu_seqlens.shape)} for rank {rank} of {world_size}, expected one axis of two int32 bounds at least, and tokens that are a multiple of twice the ranks"
        )
    bounds = cu_seqlens.long() // world_size
    token = torch.arange(total_tokens // world_size)
    sequence = torch.bucketize(token, bounds[1:-1], right=True)
    begin, half = bounds[sequence], bounds.diff()[sequence] // 2
    chunk = torch.where(token - begin < half, rank, 2 * (world_size - 1) - rank)
    return (token + (world_size - 1) * begin + half * chunk).int()


@kernel
def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int) -> torch.Tensor:
    """The first or the second half of every sequence; tokens are the third dimension from the end."""
    axis, halves = 0 if tensor.dim() == 3 else 1, [(b, (e - b) // 2) for b, e in _sequences(cu_seqlens)]
    return torch.cat([tensor.detach().narrow(axis, begin + half_idx * half, half) for begin, half in halves], axis)


_MASK_BITS = 8


@kernel
def dropout_fwd(input: Any, dropout_probability: float, out: torch.Tensor | None = None) -> list[torch.Tensor]:
    """[the kept elements, scaled by 1 / (1 - p); the mask, one bit per element]. Draws eight random bits per element, like the kernel."""
    x = plain(input) if is_quantized(input) else input.detach()
    random = torch.randint(0, 256, x.shape, dtype=torch.int32)
    keep = random >= int(dropout_probability * 256)
    kept = (x.float() * keep / (1.0 - dropout_probability)).to(x.dtype)
    kept = kept if out is None else out.copy_(kept)
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
    return found if grad_input is None else grad_input.copy_(found)
