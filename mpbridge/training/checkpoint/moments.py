"""The mean second moment of a run: saved with it, and held against what the first step after a resume leaves.

Adam's second moment cannot fall faster than by beta2 a step (v' = beta2 v + (1 - beta2) g^2, and g^2 is never negative), so states that were lost on the way
from the file to the optimizer show in one number, whatever the loss does.
"""

from __future__ import annotations

import math
from typing import Any

from mpbridge.common.facts import least_left

LOST = 0.5
"""Share of what must be left at least below which states are called lost. Parameters that several ranks hold count once on each: on another layout the
mean is another by a few percent."""


def mean_second(engine: Any) -> float | None:
    """Mean of all second moments on all ranks; None where there are none, or none that can be read as they are. Every rank calls it."""
    import torch

    from mpbridge.backend.devices.together import summed
    from mpbridge.numerics.observation.tensors import plain_moment
    from mpbridge.observe.audit.invariants import resting

    total, count, coded = 0.0, 0.0, 0.0
    for one in resting(engine):
        if one.role == "exp_avg_sq":
            values = plain_moment(one.tensor)
            if values is None:
                coded += 1
            else:
                total += float(values.sum(dtype=torch.float64))
                count += values.numel()
    total, count, coded = summed((total, count, coded))
    return total / count if count and not coded and math.isfinite(total) else None


def lost(saved: float | None, found: float | None, beta2: float) -> str:
    """A sentence where less is found after one step than a step leaves of what was saved; '' where not, or where either is unknown."""
    left = least_left(beta2)
    if saved is None or found is None or not 0 < saved < math.inf or found >= LOST * left * saved:
        return ""
    return (
        f"the optimizer's second moments are {found / saved:.2g} times those of the checkpoint (mean {found:.3g}, saved {saved:.3g}), and one step reduces "
        f"them to no less than {left:g} times: states were lost between the file and the first step"
    )
