"""A run whose steps do not change the weights. Returns a suspect, or None."""

from __future__ import annotations

from typing import Any

from mpbridge.observe.diagnose.evidence import FEWEST
from mpbridge.observe.diagnose.suspects import Suspect, Symptoms

LONG = 20
"""Number of idle steps at the end of a run that trained before from which on they count as a fault: a schedule may end at a rate of zero."""
_REASONS = {
    "skipped": (
        "every update was skipped",
        ["without a loss scale an update is skipped only if loss or gradients are not finite: the `nonfinite` events and the run's output show which"],
    ),
    "rate": (
        "the learning rate is 0",
        ["look at optimizer.lr, scheduler.lr_decay_iters and optimizer.min_lr: a schedule that has ended stays at its lowest rate", "after a resume: whether the schedule's position was restored"],
    ),
    "gradient": (
        "the gradient norm is 0",
        ["look for what disconnects the loss from the parameters: a detach, no_grad, frozen parameters, a loss mask of zeros", "operands flushed to zero do the same: logger.precision_every shows them"],
    ),
}  # fmt: skip
"""Why a step trains nothing -> the reason as a clause, and what to try."""


def no_update(case: Symptoms) -> Suspect | None:
    """No step of the run, or at least of its last quarter, can have changed a weight. Updates skipped because of NaN or by a loss scale belong to other causes."""
    # an overflow that a loss scale caught says nothing about rate and gradient: the schedule starts with the first update
    rows = [row for row in case.run.curves.rows if row.get("applied", True) or row.get("loss_scale", 1.0) == 1.0]
    known = case.onset("applied") is not None
    reasons = ["" if (why := _idle(row)) == "skipped" and known else why for row in rows]
    active = max((i for i, why in enumerate(reasons) if not why), default=-1)
    idle = reasons[active + 1 :]
    if len(idle) <= (FEWEST if active < 0 else max(LONG - 1, len(rows) // 4)):
        return None
    why = max(_REASONS, key=idle.count)
    clause, advice = _REASONS[why]
    first, last = rows[active + 1]["iteration"], rows[-1]["iteration"]
    return Suspect(
        cause="no-update", step=first, score=0.95,
        sentence=f"steps {first} to {last} train nothing: {clause}",
        evidence=[f"steps {first} to {last}: {clause} in {idle.count(why)} of {len(idle)}"],
        advice=advice,
    )  # fmt: skip


def _idle(row: dict[str, Any]) -> str:
    """Why a step cannot have changed a weight, a key of `_REASONS`; '' if it can, or if its numbers are unknown."""
    if not row.get("applied", True):
        return "skipped"
    if row.get("lr") == 0:
        return "rate"
    return "gradient" if row.get("grad_norm") == 0 else ""
