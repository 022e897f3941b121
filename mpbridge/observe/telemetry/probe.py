"""Inputs and output gradients of a run's linears in one step, read by hooks on the modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from mpbridge.observe.audit.graph import tensors_in
from mpbridge.observe.audit.places import linears
from mpbridge.observe.telemetry.records import LINEARS


class Probe:
    """Statistics of the first micro-batch's inputs and output gradients, by linear; `rows` reads them after the step.

    Until then the numbers stay on their device, so that a GPU never waits.
    """

    def __init__(self) -> None:
        self.inside: str | None = None
        """The linear whose forward pass is running; None outside of one."""
        self.gradients: str | None = None
        """The linear whose backward pass started last; None during the forward pass."""
        self.source: Callable[[str, Any, str, torch.Tensor], None] | None = None
        """Called with (path, module, 'x' or 'dy', tensor) for each of them, before the linear's GEMMs run."""
        self._hooks: list[Any] = []
        self._found: dict[str, dict[str, torch.Tensor]] = {}
        self._seen: set[str] = set()

    def start(self, chunks: list[Any]) -> None:
        """Installs the hooks."""
        for path, module in linears(chunks).items():
            self._hooks.append(module.register_forward_pre_hook(self._enters(path)))
            self._hooks.append(module.register_forward_hook(self._leaves(path)))

    def stop(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.inside = self.gradients = None

    def _enters(self, path: str) -> Callable[..., None]:
        def look(module: Any, args: Any) -> None:
            self.inside, self.gradients = path, None
            tensor = next((one for one in tensors_in(args) if one.is_floating_point()), None)
            if tensor is None or not tensor.numel() or path in self._found:
                return
            # with activation recomputation the forward pass is repeated in backward; the first one counts
            self._found[path] = _input(tensor.detach())
            if self.source is not None:
                self.source(path, module, "x", tensor.detach())

        return look

    def _leaves(self, path: str) -> Callable[..., None]:
        def look(module: Any, args: Any, output: Any) -> None:
            self.inside = None
            made = next((one for one in tensors_in(output) if one.is_floating_point()), None)
            if made is None or not made.requires_grad:
                return

            def gradient(grad: torch.Tensor) -> None:
                self.gradients = path
                if path not in self._seen and grad.numel():
                    self._seen.add(path)
                    self._found.setdefault(path, {}).update(_gradient(grad.detach()))
                    if self.source is not None:
                        self.source(path, module, "dy", grad.detach())

            made.register_hook(gradient)  # type: ignore[no-untyped-call]

        return look

    def rows(self, noise: dict[str, float]) -> list[list[Any]]:
        """Rows of records.LINEARS; noise: linear -> grad_to_noise."""
        made = []
        for path in dict.fromkeys([*self._found, *noise]):
            numbers = {name: float(value) for name, value in self._found.get(path, {}).items()}
            bad = numbers.get("bad_x", 0) + numbers.get("bad_dy", 0)
            values = {
                **numbers,
                "linear": path,
                "x_channel": int(numbers["x_channel"]) if "x_channel" in numbers else None,
                "nonfinite": int(bad),
                "grad_to_noise": noise.get(path),
            }
            made.append([values.get(name) for name in LINEARS])
        return made


def _input(x: torch.Tensor) -> dict[str, torch.Tensor]:
    channels = x.abs().reshape(-1, x.shape[-1]).amax(0).float()
    top = channels.nan_to_num(math.inf).argmax()
    bulk = channels.median()
    # if most channels are zero for every token, there is no typical channel to compare with
    outlier = torch.where(bulk > 0, channels[top] / bulk, torch.ones_like(bulk))
    return {
        "x_amax": channels[top],
        "x_rms": _rms(x),
        "x_outlier": outlier,
        "x_channel": top,
        "bad_x": (~channels.isfinite()).sum(),
    }


def _gradient(dy: torch.Tensor) -> dict[str, torch.Tensor]:
    peak = dy.abs().amax().float()
    return {"dy_amax": peak, "dy_rms": _rms(dy), "bad_dy": (~peak.isfinite()).sum()}


def _rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square in FP32; the vector norm sums in FP32 without a copy of the tensor."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
    return norm / math.sqrt(x.numel())
