"""Products of FP32 factors: whether a policy promises full precision for them, what torch's process-wide settings do to them, and how full precision is enforced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpbridge.common.formats import DType

if TYPE_CHECKING:
    from mpbridge.precision.policy import PrecisionPolicy

log = logging.getLogger("mpbridge")

PLACES = ("cuda", "mkldnn")
"""torch.backends.PLACE.matmul: GPU and CPU products. Convolutions have a separate setting, which no module here uses."""


class _Held:
    """How many engines hold full precision, and torch's settings before: several engines may exist at once, and the last one restores the settings."""

    holders = 0
    before: tuple[str | None, dict[str, str]] | None = None


def promised(policy: PrecisionPolicy) -> bool:
    """Whether any product of `policy` has FP32 factors."""
    return DType.FP32 in {policy.compute, policy.router, policy.logits} or bool(policy.keep_fp32)


def reduced(policy: PrecisionPolicy) -> dict[str, str]:
    """{'cuda': 'tf32', ...}: the settings of torch that round factors which `policy` promises to multiply in FP32; empty if it promises none."""
    if not promised(policy):
        return {}
    # 'none' and 'ieee' are full precision
    return {place: found for place, found in _settings().items() if found in ("tf32", "bf16")}


def hold(policy: PrecisionPolicy) -> Callable[[], None] | None:
    """Sets products of FP32 factors to IEEE FP32 if `policy` promises them and torch rounds them, and logs this on rank 0.

    Returns a function that restores torch's settings, to be called once; None if the policy promises no such product. torch's settings are process-wide, not per model. NVIDIA's containers allow TF32 through TORCH_ALLOW_TF32_CUBLAS_OVERRIDE.
    """
    if not promised(policy):
        return None
    if found := reduced(policy):
        if _Held.before is None:
            _Held.before = _legacy(), _settings()
        _say(found)
        torch.set_float32_matmul_precision("highest")
    _Held.holders += 1
    return _give_back


def _give_back() -> None:
    _Held.holders -= 1
    if _Held.holders or _Held.before is None:
        return
    (legacy, settings), _Held.before = _Held.before, None
    if legacy is not None:
        torch.set_float32_matmul_precision(legacy)
    for place, value in settings.items():
        if hasattr(_matmul(place), "fp32_precision"):
            _matmul(place).fp32_precision = value


def _say(found: dict[str, str]) -> None:
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    there = ", ".join(f"{place} {value}" for place, value in found.items())
    log.warning(
        "the recipe promises products in FP32, but torch's settings allow less (%s): set to IEEE FP32 until this engine is closed",
        there,
    )


def _settings() -> dict[str, str]:
    found = {}
    for place in PLACES:
        value = getattr(_matmul(place), "fp32_precision", None)
        if value is None and getattr(_matmul(place), "allow_tf32", False):  # torch before 2.9
            value = "tf32"
        if value is not None:
            found[place] = str(value)
    return found


def _matmul(place: str) -> Any:
    return getattr(getattr(torch.backends, place), "matmul", None)


def _legacy() -> str | None:
    """torch's older name of the same setting; None if only the newer one was used, since reading this one is then an error."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
