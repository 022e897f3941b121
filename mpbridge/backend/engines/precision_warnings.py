"""Warnings about optimizer states; FusedAdam's arguments without a second copy of FP32 parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("mpbridge")

_warned: set[str] = set()


def _torch_adam(optimizer: Any) -> bool:
    many = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return any(isinstance(one, (torch.optim.Adam, torch.optim.AdamW)) for one in many)


def warn_bf16_adam(optimizer: Any, parameters: Iterable[torch.Tensor], *, context: str = "optim") -> bool:
    """Warns, once per process and on rank 0 only, when torch's Adam or AdamW trains BF16 parameters in full; returns whether it warned.

    Silent for frozen BF16 parameters and for other optimizers: SGD has no such states, and FusedAdam keeps them in FP32.
    """
    if context in _warned or not _torch_adam(optimizer) or (dist.is_initialized() and dist.get_rank() != 0):
        return False
    if not any(p.requires_grad and p.dtype is torch.bfloat16 for p in parameters):
        return False
    _warned.add(context)
    log.warning(
        "torch's Adam keeps both moments in the parameters' dtype, BF16 here: the second moment stalls and small updates are lost "
        "(scripts/evidence/show_bf16_adam.py). Store parameters in FP32 (recipe fp32_params_bf16_compute), or let FusedAdam keep FP32 states "
        "(recipe bf16_params_fp32_states)"
    )
    return True


def without_duplicate(parameters: Iterable[torch.Tensor], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """FusedAdam's arguments for parameters of one dtype, without main weights if they would be an unused copy.

    For FP32 parameters FusedAdam updates the parameter and never reads its main weights (fused_adam.py, the FP32 branch of step): 4 bytes per
    parameter wasted.
    """
    if arguments.get("master_weights") and all(p.dtype is torch.float32 for p in parameters):
        if "duplicate" not in _warned and not (dist.is_initialized() and dist.get_rank() != 0):
            _warned.add("duplicate")
            log.warning(
                "FusedAdam's main weights are off for FP32 parameters: they are their own main copy (saves 4 bytes per parameter)"
            )
        return dict(arguments) | {"master_weights": False, "store_param_remainders": False}
    return dict(arguments)
