"""Whether an applied update moved the main weights: checksums before, checksums and stored low bits after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from mpbridge.audit.stored import local


class _Live(Protocol):
    role: str
    parameter: str
    tensor: Any


def _plain(tensor: Any) -> torch.Tensor:
    """The values as an ordinary tensor; quantized weights are dequantized."""
    inner: Any = local(tensor).detach()
    values: torch.Tensor = (
        inner.dequantize() if hasattr(inner, "_scale_inv") or hasattr(inner, "_rowwise_scale_inv") else inner
    )
    return values


def _checksum(tensor: Any) -> tuple[float, float]:
    """Two FP64 sums that any changed element changes: a position-blind one would miss two elements that swap, so the second is weighted."""
    values = _plain(tensor)
    if not values.numel():
        return 0.0, 0.0
    if not values.is_floating_point():
        values = values.to(torch.float32)
    flat = values.reshape(-1)
    half = flat.numel() // 2
    first = float(flat[:half].sum(dtype=torch.float64))
    second = float(flat[half:].sum(dtype=torch.float64))
    return first, second


class Motion:
    """Checksums of an engine's weights, taken once before the first update that can move them."""

    def __init__(self, tensors: Iterable[_Live]) -> None:
        self.before: dict[tuple[str, str], tuple[float, float]] = {}
        self.smallest: dict[str, float] = {}
        """Parameter -> smallest absolute value of this rank's part: the element that rounding holds back least."""
        for live in tensors:
            if live.role in ("params", "main_params") and live.parameter:
                self.before[live.role, live.parameter] = _checksum(live.tensor)
                if local(live.tensor).numel():
                    least = float(_plain(live.tensor).abs().min())
                    self.smallest[live.parameter] = min(least, self.smallest.get(live.parameter, least))

    def should_move(self, parameter: str, update: float, unit: float) -> bool:
        """Whether an update of that size changes some element; unit: relative rounding error of the main weights' dtype.

        In a warm-up from 0 it need not: 1e-8 added to a norm's weight of 1.0 is lost in FP32 as well.
        """
        return parameter in self.smallest and update / 2 > self.smallest[parameter] * unit

    def moved(self, tensors: Iterable[_Live]) -> dict[str, bool]:
        """Parameter -> whether this rank saw it move: the weights, or the main weights, differ from before.

        A main copy that did not exist before the update equals the parameter as long as nothing moved: then it has no bits below the parameter's.
        """
        moved: dict[str, bool] = {}
        widths: dict[str, torch.dtype] = {}
        for live in tensors:
            if live.role not in ("params", "main_params") or not live.parameter:
                continue
            if live.role == "params":
                widths[live.parameter] = local(live.tensor).dtype
            before = self.before.get((live.role, live.parameter))
            changed = (
                _has_low_bits(live.tensor, widths.get(live.parameter))
                if before is None
                else _checksum(live.tensor) != before
            )
            moved[live.parameter] = moved.get(live.parameter, False) or changed
        return moved


def _has_low_bits(main: Any, width: torch.dtype | None) -> bool:
    values = _plain(main)
    if not values.is_floating_point():  # 16-bit remainders: zero means exactly the parameter
        return bool(values.any())
    if width is None or width is values.dtype or not width.is_floating_point:
        return False
    return bool((values != values.to(width).to(values.dtype)).any())


def updates(tensors: Iterable[_Live], lr: float, *, sgd: bool) -> Callable[[str], float]:
    """Parameter -> the size of its first update: `lr` under Adam, whose first step is the gradient's sign; `lr` times the gradient's root mean square under SGD."""
    if not sgd:
        return lambda parameter: lr
    grads = {
        one.parameter: local(one.tensor).float() for one in tensors if one.role == "grads" and local(one.tensor).numel()
    }
    sizes = {name: lr * float(values.pow(2).mean().sqrt()) for name, values in grads.items()}
    return lambda parameter: sizes.get(parameter, 0.0)


def reached(tensors: Iterable[_Live]) -> dict[str, bool]:
    """Parameter -> whether its first moment holds anything but zero: whether a gradient arrived."""
    found: dict[str, bool] = {}
    for live in tensors:
        if live.role == "exp_avg" and live.parameter:
            found[live.parameter] = found.get(live.parameter, False) or bool(local(live.tensor).any())
    return found
