"""Full BF16 on megatron-core: no FP32 anywhere but in the arithmetic. What its own optimizer asserts away, forgets, or would silently not be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.errors import Refused
from mpbridge.formats import DType
from mpbridge.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from mpbridge.config.container import Run


def is_full(policy: PrecisionPolicy) -> bool:
    """Whether 16-bit parameters are what the optimizer updates: no main weights."""
    return policy.params is not DType.FP32 and policy.main_params_owner == "params"


def refuse(run: Run) -> None:
    """Raises Refused where megatron-core would run full BF16 as something else, or crash in the middle of a step."""
    policy = run.policy
    if not is_full(policy):
        return
    faults = []
    if run.inputs["ddp"].get("use_distributed_optimizer") or run.inputs["optimizer"].get("use_distributed_optimizer"):
        faults.append(
            "ddp.use_distributed_optimizer=true: megatron-core's distributed optimizer keeps FP32 main weights and moments whatever the recipe says, so "
            "this would silently not be full BF16; set it to false, or shard with engine=fsdp2"
        )
    if policy.reduce is DType.FP32:
        faults.append(
            "grad_reduce_in_fp32=true: FP32 gradients do not fit BF16 parameters without main weights between them; set it to false"
        )
    if policy.compute is DType.FP16:
        faults.append("FP16 parameters without main weights: small gradients vanish and the loss scale has nothing to protect; use bf16")
    if faults:
        raise Refused("\n".join(["full 16-bit training cannot go on megatron-core like this:", *(f"  - {fault}" for fault in faults)]))


def prepare(optimizer: Any, policy: PrecisionPolicy) -> None:
    """Makes FusedAdam keep its moments in the policy's dtypes: megatron-core passes these on only together with its precision-aware optimizer."""
    if not is_full(policy):
        return
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        dtypes = getattr(getattr(part, "optimizer", None), "name_to_dtype_map", None)
        if dtypes is not None:
            for role in ("exp_avg", "exp_avg_sq"):
                dtypes[role] = (getattr(policy, role) or DType.FP32).torch()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors made inside without a dtype have this one; what was before is back afterwards, also after an exception and when nested."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _gradients(part: Any) -> list[torch.Tensor]:
    decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    found = [getattr(p, "decoupled_grad" if decoupled else "grad", None) for p in part.get_parameters()]
    return [getattr(grad, "_local_tensor", grad) for grad in found if grad is not None]


def grad_norm(optimizer: Any) -> float:
    """Global L2 norm of the gradients that megatron-core's optimizers are about to read, accumulated in FP32 whatever their dtype.

    megatron-core's own takes each tensor's norm in the tensor's dtype where neither Transformer Engine nor Apex is installed: three digits in BF16.
    """
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    parts = {
        id(part): part.get_main_grads_for_grad_norm()
        for part in optimizer.chained_optimizers
        if not getattr(part, "is_stub_optimizer", False)
    }
    if all(grad.dtype is torch.float32 for grads in parts.values() for grad in grads):
        return float(optimizer.get_grad_norm())
    total = 0.0
    for part in optimizer.chained_optimizers:
        # norms of norms are the norm: one FP32 number a tensor, no FP32 copy of the gradients
        grads = [torch.linalg.vector_norm(grad, dtype=torch.float32).view(1) for grad in parts.get(id(part), [])]
        total += get_grad_norm_fp32(grads, grad_stats_parallel_group=part.get_grad_stats_parallel_group()) ** 2
    return math.sqrt(total)


def clip(part: Any, norm: float) -> None:
    """Scales the gradients of one of megatron-core's optimizers in place, so that a global norm of `norm` becomes `clip_grad`, in any dtype.

    megatron-core's own asserts FP32 gradients (clip_grads.py:167 of 0.16.1).
    """
    factor = part.config.clip_grad / (norm + 1.0e-6)
    if factor < 1.0:
        for grad in _gradients(part):
            grad.mul_(factor)
