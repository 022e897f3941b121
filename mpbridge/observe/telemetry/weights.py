"""Parameters, main weights and moments after an update: their magnitudes, and whether each weight equals its rounded main weight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from mpbridge.observe.audit.stored import local, plain_moment


def weight_rows(tensors: Iterable[Any]) -> list[list[Any]]:
    """Rows of records.WEIGHTS from an engine's live tensors (this rank's shards)."""
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for one in tensors:
        if one.parameter and one.role in ("params", "main_params", "exp_avg", "exp_avg_sq"):
            by_name.setdefault(one.parameter, {})[one.role] = local(one.tensor)
    rows = []
    for name, roles in by_name.items():
        weight = _numbers(roles.get("params"))
        # under full sharding this rank may hold no part of a parameter
        source = weight if weight is not None else _numbers(roles.get("main_params"))
        if source is None:
            continue
        peak, size = float(source.abs().amax()), _rms(source)
        first, second = (_moment(roles.get(role)) for role in ("exp_avg", "exp_avg_sq"))
        rows.append(
            [
                name,
                size,
                peak,
                0 if math.isfinite(peak) else int((~source.isfinite()).sum()),
                _gap(weight, roles.get("main_params")),
                None if first is None else _rms(first),
                None if second is None else float(second.float().mean()),
                peak * peak / (size * size * source.numel()) if 0 < peak < math.inf else None,
            ]
        )
    return rows


def _numbers(tensor: Any) -> torch.Tensor | None:
    """A tensor's values; None if it has none, or none that can be read directly."""
    if tensor is None or not tensor.numel():
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        widen = getattr(tensor, "dequantize", None)
        return None if widen is None else widen().detach()
    return tensor.detach() if tensor.is_floating_point() else None


def _moment(tensor: Any) -> torch.Tensor | None:
    return None if tensor is None or not tensor.numel() else plain_moment(tensor)


def _rms(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float32)) / math.sqrt(x.numel())


def _gap(weight: torch.Tensor | None, main: Any) -> float | None:
    """Share of elements that differ from the main weight rounded to the weight's dtype; None if the two cannot be compared."""
    high = _numbers(main)
    if weight is None or high is None or high.shape != weight.shape or weight.dtype.itemsize < 2:
        return None
    return float((high.to(weight.dtype) != weight).float().mean())
