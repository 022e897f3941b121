"""Live tensors: how they are stored, and summaries in a few bytes: digests that depend on every bit, low bits that a narrower dtype would have lost, samples."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import dtype

_PARTS = (
    "_data", "_transpose", "_rowwise_data", "_columnwise_data", "_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv",
)  # fmt: skip
"""Inner tensors of Transformer Engine's quantized tensors (tensor/storage/*.py of 2.11); their .dtype is only nominal."""


def local(tensor: Any) -> Any:
    """This rank's shard of a DTensor; the tensor itself otherwise."""
    inner = getattr(tensor, "_local_tensor", None)
    return tensor if inner is None else inner


def _parts(tensor: Any) -> list[torch.Tensor]:
    found = [getattr(tensor, name, None) for name in _PARTS]
    return [part for part in found if isinstance(part, torch.Tensor)]


def operand(tensor: Any) -> Any:
    """A GEMM's operand as a plain tensor: torchao's float8 tensors are dequantized; any other operand is returned as is."""
    widen = getattr(tensor, "to_original_precision", None)
    return tensor if widen is None else widen().to(tensor.dtype)  # (exact: its scales are powers of two)


def plain_moment(tensor: Any) -> torch.Tensor | None:
    """This rank's part of an optimizer state; None for FP16 and 8-bit ones, which are codes whose scale is elsewhere (fused_adam.py)."""
    inner = local(tensor)
    plain = type(inner) in (torch.Tensor, torch.nn.Parameter)
    return inner.detach() if plain and inner.dtype in (torch.float32, torch.bfloat16, torch.float64) else None


def storage(tensor: Any) -> str:
    """Short dtype name ('bf16', 'int16'), or the class name of a quantized tensor ('Float8Tensor')."""
    inner = local(tensor)
    if _parts(inner):
        return type(inner).__name__
    try:
        return dtype(inner.dtype).short
    except BadValue:
        return str(inner.dtype).removeprefix("torch.")


def elements(tensor: Any) -> int:
    """Elements of this rank's part."""
    return int(local(tensor).numel())


def size(tensor: Any) -> int:
    """Bytes of this rank's part, scales and transposed copies of a quantized tensor included."""
    inner = local(tensor)
    return sum(int(part.numel()) * int(part.element_size()) for part in _parts(inner) or [inner])


_COLUMNS = 4096
"""Number of elements that share a row of the digest's weights."""
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio in 64 bits, as a signed number: Knuth's multiplicative hashing."""
_PORTION = 1 << 20
"""Number of elements widened to 64 bits at a time."""
SAMPLES = 48
"""Number of elements of a weight whose gradient is followed from the GEMM to the optimizer."""
_ENOUGH = 32
"""Nonzero elements below which low bits prove nothing: fewer than 32 FP32 numbers can all be BF16 numbers by chance."""
_DISTINCT = 8
"""Distinct values below which they prove nothing either: a tensor may be filled with one value of few bits."""
_TEN_BITS = (1 << 13) - 1
"""The bits of FP32's 23-bit mantissa that TF32 and FP16, with ten, do not have; BF16 and narrower formats lack more."""

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(tensor: Any) -> torch.Tensor:
    """The values of this rank's part as an ordinary tensor; quantized weights are dequantized."""
    inner: Any = local(tensor).detach()
    quantized = hasattr(inner, "_scale_inv") or hasattr(inner, "_rowwise_scale_inv")
    values: torch.Tensor = inner.dequantize() if quantized else inner
    return values


def _weights(device: torch.device) -> torch.Tensor:
    # odd numbers: multiplication by them is invertible modulo 2**64
    steps = torch.arange(1, _COLUMNS + 1, dtype=torch.int64, device=device)
    return steps.mul_(_SPREAD).bitwise_or_(1)


@torch.no_grad()
def digest(tensor: Any) -> int:
    """64 bits that depend on every bit of this rank's part and on its position; equal tensors of one dtype have equal digests on every rank."""
    flat = plain(tensor).contiguous().view(-1)
    if not flat.numel():
        return 0
    bits = flat.view(_WHOLE[flat.element_size()])
    column, total = _weights(bits.device), 0
    for start in range(0, bits.numel(), _PORTION):
        part = bits[start : start + _PORTION].to(torch.int64)
        whole = part.numel() // _COLUMNS * _COLUMNS
        rows = (part[:whole].view(-1, _COLUMNS) * column).sum(1)
        row_weights = torch.arange(1, rows.numel() + 1, dtype=torch.int64, device=bits.device).mul_(2).add_(1)
        rest = (part[whole:] * column[: part.numel() - whole]).sum()
        here = int((rows * row_weights).sum() + rest)
        total = (total * 1099511628211 + here) & 0xFFFFFFFFFFFFFFFF
    return total


def has_more_bits_than_bf16(number: float) -> bool:
    """Whether FP32 `number` has bits that BF16 lacks."""
    return bool(int(torch.tensor([number], dtype=torch.float32).view(torch.int32)) & 0xFFFF)


def has_bits(words: torch.Tensor, mask: int) -> bool:
    """Whether one of the integers, of which there is at least one, has a bit of the mask, which is positive. `any` of integers takes several times as long on a CPU."""
    return int((words & mask).amax()) != 0


def power_below(values: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not above each element's magnitude, 0 for zeros and subnormal numbers. values: FP32 or FP64; quicker than frexp."""
    integers, exponent = {4: (torch.int32, 0x7F800000), 8: (torch.int64, 0x7FF0000000000000)}[values.element_size()]
    return (values.contiguous().view(integers) & exponent).view(values.dtype)


def is_narrow(values: torch.Tensor, enough: int = _ENOUGH) -> bool | None:
    """Whether FP32 `values` all have 10 or fewer mantissa bits (TF32, FP16, BF16, FP8 numbers), as in a tensor that was rounded earlier. None if
    that proves nothing (fewer than `enough` nonzero or few distinct values)."""
    if values.dtype is not torch.float32 or not values.numel() or hasattr(values, "_quantizer"):
        return None  # Transformer Engine's FP8 moments report FP32 as their dtype
    bits = values.detach().contiguous().view(torch.int32)
    if int(torch.count_nonzero(bits)) < enough:
        return None
    if has_bits(bits, _TEN_BITS):
        return False
    return None if torch.unique(bits.view(-1)[:65536]).numel() < _DISTINCT else True


def is_coarse(values: torch.Tensor) -> bool:
    """Whether the first 2,048 values all have 3 or fewer mantissa bits, as after a cast to an 8-bit format and back; False if they are too few to tell."""
    if type(values) is not torch.Tensor or values.element_size() < 2:
        return False
    bits = values.detach().reshape(-1)[:2048].float().view(torch.int32)
    if int(torch.count_nonzero(bits)) < _ENOUGH or has_bits(bits, 0xFFFFF):
        return False
    return int(torch.unique(bits).numel()) >= _DISTINCT


@lru_cache(maxsize=4096)
def positions(count: int) -> torch.Tensor:
    """The sampled positions among `count` elements: spread evenly, without repeats. One tensor for all callers: read only."""
    number = min(count, SAMPLES)
    return (torch.arange(number, dtype=torch.int64) * count + count // 2) // max(number, 1)


def sample(flat: torch.Tensor, start: int, count: int) -> dict[int, float]:
    """Position in the whole tensor -> value, for the sampled positions within this part (from `start` on) of a tensor of `count` elements."""
    where = positions(count)
    mine = where[(where >= start) & (where < start + flat.numel())]
    values = flat.detach().reshape(-1)[(mine - start).to(flat.device)].double().tolist()
    return dict(zip(mine.tolist(), values, strict=True))


@torch.no_grad()
def factors(before: torch.Tensor, after: torch.Tensor) -> list[tuple[float, float]]:
    """(quotient of the two, what two roundings may have changed of it, both relative) at sampled elements where the first is not zero and the second is normal, or too small for any factor above a millionth."""
    where = positions(before.numel()).to(before.device)
    low, out = before.reshape(-1)[where].double(), after.reshape(-1)[where].double()
    coarse = max((before.dtype, after.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    least = torch.finfo(coarse).smallest_normal
    shows = (low != 0) & ((out.abs() > least) | (low.abs() > least * 2**20))
    return [(one, 2 * torch.finfo(coarse).eps) for one in (out / low)[shows].tolist()]
