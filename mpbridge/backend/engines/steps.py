"""One forward pass of a micro-batch and one update, as shared by all engines on megatron-core's schedules; in full BF16 too, which megatron-core's optimizer refuses in part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from mpbridge.backend.engines.contract import Batch
from mpbridge.backend.megatron.inside_optimizer import gradients, gradients_for_norm, parts, set_moment_dtypes
from mpbridge.common.formats import DType
from mpbridge.precision.policy import PrecisionPolicy


def token_mean(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean loss over the tokens of `mask`, for backward; the same value for reporting), from per-token losses in nats."""
    mask = mask.view(-1).float()
    loss = torch.sum(losses.float().view(-1) * mask) / mask.sum().clamp(min=1.0)
    # the schedule divides this tensor in place, so the reported value needs its own memory
    return loss, loss.detach().clone()


def token_sum(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(summed loss for backward, its number of tokens, mean loss for reporting), as calculate_per_token_loss expects: gradients are divided by
    all tokens of all ranks at the end. Given a mean, megatron-core would add up the ranks' means."""
    mean, report = token_mean(mask, losses)
    tokens = mask.sum()
    return mean * tokens.clamp(min=1.0), tokens.int(), report


def forward_step(
    device: torch.device, batches: Iterator[Batch], model: Any, *, per_token: bool = False
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """megatron-core's forward_step_func: the model's output for the next micro-batch, and its loss function.

    per_token: the config's calculate_per_token_loss.
    """
    batch = next(batches)
    tokens, positions, labels, mask = (
        batch[key].to(device, non_blocking=True) for key in ("tokens", "position_ids", "labels", "loss_mask")
    )
    return model(tokens, positions, None, labels=labels), partial(token_sum if per_token else token_mean, mask)


def update(optimizer: Any) -> tuple[bool, float | None]:
    """(applied, global gradient norm before clipping or None): megatron-core's step, except that weights are never updated with non-finite gradients.

    megatron-core skips such steps only with a loss scaler (FP16); in BF16 and FP32 its own step would write NaN into every parameter.
    """
    if optimizer.prepare_grads():
        return False, None
    norm = grad_norm(optimizer)
    if not math.isfinite(norm):
        return False, None
    for part in parts(optimizer):
        if part.config.clip_grad > 0.0:
            clip(part, norm)
    stepped = bool(optimizer.step_with_ready_grads())
    if hasattr(optimizer, "allgather_params"):
        optimizer.allgather_params()  # dist_muon's, in its own step()
    return stepped, norm


def learning_rate(optimizer: Any) -> float:
    """The rate of the first group that follows the schedule (`default_config`: without its own multiplier)."""
    groups = optimizer.param_groups
    followers = [group for group in groups if group.get("default_config", True) and group["params"]] or groups
    return float(followers[0]["lr"]) if followers else 0.0


def keep_moments(optimizer: Any, policy: PrecisionPolicy) -> None:
    """Makes FusedAdam keep its moments in the policy's dtypes: megatron-core passes them on only with its precision-aware optimizer."""
    if not policy.narrow_alone:
        return
    for part in parts(optimizer):
        set_moment_dtypes(
            part, {role: (getattr(policy, role) or DType.FP32).torch() for role in ("exp_avg", "exp_avg_sq")}
        )


def grad_norm(optimizer: Any) -> float:
    """Global L2 norm of the gradients that megatron-core's optimizers are about to read, accumulated in FP32 regardless of their dtype.

    Without Transformer Engine and Apex, megatron-core computes each tensor's norm in the tensor's dtype: three digits in BF16.
    """
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    found = {id(part): gradients_for_norm(part) for part in parts(optimizer)}
    if all(grad.dtype is torch.float32 for grads in found.values() for grad in grads):
        return float(optimizer.get_grad_norm())
    total = 0.0
    for part in parts(optimizer):
        # the norm of the norms is the global norm: one FP32 number per tensor, no FP32 copy of the gradients
        grads = [torch.linalg.vector_norm(grad, dtype=torch.float32).view(1) for grad in found.get(id(part), [])]
        total += get_grad_norm_fp32(grads, grad_stats_parallel_group=part.get_grad_stats_parallel_group()) ** 2
    return math.sqrt(total)


def clip(part: Any, norm: float) -> None:
    """Scales the gradients of one of megatron-core's optimizers in place by clip_grad / `norm`, in any dtype, if `norm` exceeds `clip_grad`.

    megatron-core's own function asserts FP32 gradients (clip_grads.py:167 of 0.16.1).
    """
    factor = part.config.clip_grad / (norm + 1.0e-6)
    if factor < 1.0:
        for grad in gradients(part):
            grad.mul_(factor)
