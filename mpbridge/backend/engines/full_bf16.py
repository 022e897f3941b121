"""Full BF16 on megatron-core: FP32 only inside the arithmetic. Covers what megatron-core's optimizer refuses, omits or silently does differently."""

from __future__ import annotations

import math
from typing import Any

import torch

from mpbridge.backend.megatron.inside_optimizer import gradients, gradients_for_norm, parts, set_moment_dtypes
from mpbridge.common.formats import DType
from mpbridge.precision.policy import PrecisionPolicy


def prepare(optimizer: Any, policy: PrecisionPolicy) -> None:
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
