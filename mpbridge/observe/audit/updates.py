"""Checks that an update is the one that its moments give: Adam's rule, element by element, on a sample of every parameter."""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.observe.audit.holdings import ADAMS, Held
from mpbridge.observe.audit.stored import local
from mpbridge.observe.audit.values import positions

_FEW = 8
"""Minimum number of sampled elements whose update is larger than rounding."""
_EXACT, _NARROW = 5e-4, 2e-2
"""Tolerated error relative to all sampled updates, for FP32 moments and for 16-bit moments: optimizers compute with values that they round afterwards.
An update that was rounded to BF16 is off by 1.1e-3."""

_WARMUP = 4.0
"""How far a group's rate may be from the step's rate and from its own rate for the next step: warm-up doubles it at first, and a group may have its own."""


@torch.no_grad()
def is_another(held: Held, trained: torch.Tensor, earlier: torch.Tensor | None, rate: float | None = None) -> bool:
    """Whether the sampled elements changed by anything other than one factor times Adam's update and its weight decay; False if that cannot be determined.

    trained: the tensor that the update changed, flat, as it is now. earlier: its elements at `values.positions` before the update. The factor is the rate, which a
    schedule may have changed since. Changes hidden by rounding to the stored dtype are ignored. rate: of the step; None: only the sign of the factor is checked.
    """
    update = None if earlier is None else _update(held, trained, earlier)
    if update is None or earlier is None:
        return False
    now = trained[positions(trained.numel()).to(trained.device)]
    changed = now.double() - earlier.double()
    room = half_ulp(earlier.double(), held.kept)
    exact = _is_wide(held) and trained.dtype is torch.float32
    told = update.abs() * float((held.group or {}).get("lr", 0.0)) > (2048 if exact else 64) * room
    if int(told.sum()) < _FEW:
        return False
    update, changed, room = update[told], changed[told], room[told]
    factor = float(update @ changed) / float(update @ update)
    error = ((changed - factor * update).abs() - 2 * room).clamp_min(0.0)
    tolerance = _EXACT if exact else _NARROW
    if rate is not None:
        rates = (rate, float((held.group or {}).get("lr", rate)))
        if not min(rates) / _WARMUP <= -factor <= max(rates) * _WARMUP:
            return True
    return factor >= 0.0 or float(error.norm()) > tolerance * abs(factor) * float(update.norm())


def _update(held: Held, trained: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor | None:
    """The update divided by the rate; None if the optimizer follows another rule."""
    group = held.group or {}
    if type(held.inner).__name__ not in ADAMS or group.get("amsgrad") or group.get("maximize") or "betas" not in group:
        return None
    first, second = held.moment("exp_avg"), held.moment("exp_avg_sq")
    if first is None or second is None or first.numel() != trained.numel():
        return None
    if any(hasattr(held.state.get(name), "_data") for name in ("exp_avg", "exp_avg_sq")):
        return None  # FP8 moments are too coarse
    where = positions(trained.numel()).to(trained.device)
    update = adam(held, first[where].double(), second[where].double())
    decay = float(group.get("weight_decay") or 0.0)
    return update + decay * earlier.double() if _is_decoupled(held, group) else update


def adam(held: Held, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Adam's update divided by the rate, without weight decay, in the dtype of its moments."""
    group = held.group or held.inner.param_groups[0]
    beta1, beta2 = group["betas"]
    step = float(held.state.get("step", group.get("step", 1)) or 1)
    low, high = (1 - beta1**step, 1 - beta2**step) if group.get("bias_correction", True) else (1.0, 1.0)
    return first / low / ((second / high).sqrt() + group["eps"])  # type: ignore[no-any-return]


def _is_decoupled(held: Held, group: dict[str, Any]) -> bool:
    """Whether weight decay is decoupled from the moments."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    return bool(getattr(held.inner, "adam_w_mode", type(held.inner).__name__ == "AdamW"))


def _is_wide(held: Held) -> bool:
    return all(local(held.state[name]).dtype is torch.float32 for name in ("exp_avg", "exp_avg_sq"))


def half_ulp(values: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of each element where numbers are kept in that dtype, in the dtype of `values`."""
    info = torch.finfo(kept)
    _, exponent = torch.frexp(values)
    return torch.ldexp(torch.full_like(values, info.eps / 4), exponent).clamp_min(info.tiny * info.eps / 2)
