"""Loss scaling: checks the scaler against the policy, and its scale against the update rule from step to step."""

from __future__ import annotations

from typing import Any

from mpbridge.backend.megatron.inside_optimizer import parts
from mpbridge.precision.policy import LossScale


def scaler_of(engine: Any) -> Any:
    """The scaler whose scale multiplies the loss; None if there is none."""
    optimizer = engine.optimizer
    for one in (optimizer, *parts(optimizer)):
        scaler = getattr(one, "grad_scaler", None)
        if scaler is not None:
            return scaler
    return None


def scaler_faults(engine: Any, promised: LossScale | None) -> list[str]:
    """What is not as promised about the scaler."""
    scaler, scale = scaler_of(engine), float(engine.optimizer.get_loss_scale())
    if promised is None:
        return [] if scale == 1.0 else [f"loss scale: promised none, found {scale:g}"]
    faults = []
    if not getattr(engine.configs.model, "grad_scale_func", None):
        faults.append("loss scale: the loss is not multiplied by it (model.grad_scale_func is not set)")
    if not promised.dynamic:
        return faults + (
            [] if scale == promised.static else [f"loss scale: promised {promised.static:g}, found {scale:g}"]
        )
    if scaler is None:
        return [*faults, "loss scale: promised dynamic, found none"]
    for name, wanted in (
        ("growth_interval", promised.window),
        ("hysteresis", promised.hysteresis),
        ("min_scale", promised.minimum),
    ):
        found = getattr(scaler, name, None)
        if found is not None and float(found) != float(wanted):
            faults.append(f"loss scale: promised {name} {wanted:g}, found {float(found):g}")
    if scale < promised.minimum:
        faults.append(f"loss scale: {scale:g} is below its minimum {promised.minimum:g}")
    return faults


class ScaleRule:
    """A reference of dynamic loss scaling, stepped alongside the run's own scaler: halved when overflows use up the hysteresis, doubled after a window of
    good steps (megatron-core's grad_scaler.py)."""

    def __init__(self, engine: Any, promised: LossScale) -> None:
        scaler = scaler_of(engine)
        self.rule = promised
        self.scale = float(engine.optimizer.get_loss_scale())
        self.good = int(getattr(scaler, "_growth_tracker", 0))
        self.patience = int(getattr(scaler, "_hysteresis_tracker", promised.hysteresis))

    def next(self, engine: Any, *, applied: bool, used: float) -> str:
        """The fault of the scale before or after a step; '' if there is none."""
        if used != self.scale:
            return f"the step used scale {used:g}, its rule gives {self.scale:g}"
        after = float(engine.optimizer.get_loss_scale())
        if applied:
            self._went_well()
        elif self._overflowed(after):
            pass
        if after != self.scale:
            return f"the scale went from {used:g} to {after:g}, its rule gives {self.scale:g}"
        return ""

    def _went_well(self) -> None:
        self.good += 1
        if self.good == self.rule.window:
            self.good, self.patience, self.scale = 0, self.rule.hysteresis, self.scale * 2.0

    def _overflowed(self, after: float) -> bool:
        good, patience, scale = 0, self.patience - 1, self.scale
        if patience <= 0:
            scale = max(scale * 0.5, self.rule.minimum)
        # to the scaler, an update skipped only for its norm, with finite gradients, is not an overflow
        if after != scale and after == self.scale:
            self._went_well()
            return False
        self.good, self.patience, self.scale = good, patience, scale
        return True
