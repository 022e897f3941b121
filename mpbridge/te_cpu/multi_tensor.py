"""Operations on lists of tensors: scaling, norms, scales from amaxes. The argument `chunk_size` has no effect on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpbridge.common.formats import E4M3
from mpbridge.numerics.scales import mxfp8_exponent, scale_from_amax
from mpbridge.te_cpu.registry import kernel

TensorLists = Sequence[Sequence[torch.Tensor]]


@kernel
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Second list = first list times `scale`; the flag is set to 1 if any value is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        scaled = source.detach().float() * scale
        if not bool(torch.isfinite(scaled).all()):
            noop_flag.fill_(1)
        target.copy_(scaled)


@kernel
def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: TensorLists, scale: torch.Tensor
) -> None:
    """As `multi_tensor_scale` with the scale in a tensor."""
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, float(scale))


def _norms(tensors: Sequence[torch.Tensor], factor: float, each: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    norms = (
        torch.stack([(tensor.detach().float() * factor).norm() for tensor in tensors]) if tensors else torch.zeros(0)
    )
    return norms.norm().reshape(1), norms if each else torch.empty(0)


@kernel
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor_python: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of all, norms of each or an empty tensor)."""
    return _norms(tensor_lists[0], 1.0, per_tensor_python)


@kernel
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    inv_scale: torch.Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `multi_tensor_l2norm`, for the tensors times `inv_scale`."""
    return _norms(tensor_lists[0], float(inv_scale), per_tensor_python)


@kernel
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    max_fp8: float,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """Lists of amaxes, scales and inverse scales: the latter two from the first."""
    for amax, scale, inverse in zip(*tensor_lists, strict=True):
        least = amax.float().clamp_min(amax_epsilon) if amax_epsilon else amax.float()
        made = scale_from_amax(least, max_fp8, power_of_two=force_pow_2_scales)
        scale.copy_(made.reshape(scale.shape))
        inverse.copy_((1.0 / made).reshape(inverse.shape))


@kernel
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: TensorLists
) -> None:
    """Lists of bf16 amaxes and E8M0 bytes: MXFP8's scales in E4M3."""
    for amax, scale in zip(*tensor_lists, strict=True):
        if amax.dtype is not torch.bfloat16:
            raise RuntimeError("amax should be bf16")
        scale.copy_(mxfp8_exponent(amax.float(), E4M3).reshape(scale.shape))
