"""The gradients that autograd delivers to parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpbridge.numerics.observation.tensors import sample


class Arrivals:
    """Samples of the gradient that autograd delivers to each parameter in the observed step, summed over micro-batches."""

    def __init__(self) -> None:
        self.gradients: dict[str, dict[int, float]] = {}
        """Parameter -> position in it -> sum."""
        self._asked: dict[str, Any] = {}
        self._handles: list[Any] = []

    def ask(self, name: str, parameter: Any) -> None:
        """Starts recording this parameter's gradients; a later forward pass that reads the same tensor adds no second hook."""
        if not (parameter.requires_grad and torch.is_grad_enabled()) or self._asked.get(name) is parameter:
            return
        self._asked[name] = parameter
        self._handles.append(parameter.register_hook(self._look(name, parameter.shape)))

    def _look(self, name: str, shape: torch.Size) -> Callable[[torch.Tensor], None]:
        def look(gradient: torch.Tensor) -> None:
            if gradient.shape != shape or gradient.is_sparse:
                return
            found = self.gradients.setdefault(name, {})
            for where, value in sample(gradient, 0, gradient.numel()).items():
                found[where] = found.get(where, 0.0) + value

        return look

    def forget(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._asked.clear()
