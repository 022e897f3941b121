"""The mean second moment of a run: saved with it, and held against what the first step after a resume leaves.

Adam's second moment cannot fall faster than by beta2 a step (v' = beta2 v + (1 - beta2) g^2, and g^2 is never negative), so states that were lost on the way
from the file to the optimizer show in one number, whatever the loss does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.audit.stored import local

LOST = 0.5
"""Share of what must be left at least below which states are called lost. Parameters that several ranks hold count once on each: on another layout the
mean is another by a few percent."""
_PLAIN = (torch.float32, torch.bfloat16, torch.float64)
"""What a second moment is stored in as it is: FP16 and 8-bit ones are codes with a scale beside them."""


def mean_second(engine: Any) -> float | None:
    """Mean of all second moments on all ranks; None where there are none, or none that can be read as they are. Every rank calls it."""
    device = "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
    total, count, coded = 0.0, 0, 0
    for one in engine.tensors():
        if one.role == "exp_avg_sq":
            tensor = local(one.tensor)
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype in _PLAIN
            coded += not plain
            total += float(tensor.detach().sum(dtype=torch.float64)) if plain else 0.0
            count += tensor.numel()
    box = torch.tensor([total, count, coded], dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(box)
    total, count, coded = box.tolist()
    return total / count if count and not coded and math.isfinite(total) else None


def lost(saved: float | None, found: float | None, beta2: float) -> str:
    """A sentence where less is found after one step than a step leaves of what was saved; '' where not, or where either is unknown."""
    if saved is None or found is None or not 0 < saved < math.inf or found >= LOST * beta2 * saved:
        return ""
    return (
        f"the optimizer's second moments are {found / saved:.2g} times those of the checkpoint (mean {found:.3g}, saved {saved:.3g}), and a step leaves "
        f"{beta2:g} of them at least: states were lost between the file and the first step"
    )
