"""Activations times one factor per row (a token's routing probability), from release 2.19 on: FP32 throughout, rounded once.

Source: common/activation/scaled_activation.h, scaled_swiglu.cu, scaled_srelu.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from mpbridge.te_cpu.activations import FUNCTIONS, Map, clamped_gate, situ_gate
from mpbridge.te_cpu.quantize import quantized
from mpbridge.te_cpu.registry import KERNELS

_MADE_BY: dict[str, Callable[..., Map]] = {
    "swiglu": lambda: FUNCTIONS["swiglu"],
    "situglu": situ_gate,
    "clamped_swiglu": clamped_gate,
    "srelu": lambda: FUNCTIONS["srelu"],
}
"""Activation -> what makes its function from its numbers. All but the squared ReLU are gated, and take `glu_interleave_size` after these numbers."""


def _unwoven(function: Map, size: int) -> Map:
    """A gated function whose input alternates `size` columns of the gate with `size` of the linear part; 0: all of the gate, then all of the linear part."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        if size:
            x = x.reshape(*x.shape[:-1], -1, 2, size).transpose(-3, -2).flatten(-3)
        return function(x)

    return gate


def _enter(name: str, made_by: Callable[..., Map]) -> None:
    numbers = [*signature(made_by).parameters, *(() if name == "srelu" else ("glu_interleave_size",))]

    def forward(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, *given: Any, **named: Any) -> Any:
        named |= dict(zip(numbers, given, strict=False))
        size = named.pop("glu_interleave_size", 0)
        rows = input.detach().float().reshape(-1, input.shape[-1])
        found = _unwoven(made_by(**named), size)(rows) * act_scales.detach().float().reshape(-1, 1)
        return quantized(found.to(input.dtype).reshape(*input.shape[:-1], -1), quantizer)

    def backward(
        grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, *given: Any, **named: Any
    ) -> tuple[Any, torch.Tensor | None]:
        """Gradients of the input and, unless `compute_scale_grad` is False, of the scales."""
        named |= dict(zip([*numbers, "compute_scale_grad"], given, strict=False))
        wanted, size = named.pop("compute_scale_grad", True), named.pop("glu_interleave_size", 0)
        with torch.enable_grad():
            rows = fwd_input.detach().float().reshape(-1, fwd_input.shape[-1]).requires_grad_()
            found = _unwoven(made_by(**named), size)(rows)
            of_rows = grad.detach().float().reshape(found.shape)
            (dx,) = torch.autograd.grad(found, rows, of_rows * act_scales.detach().float().reshape(-1, 1))
        of_scales = (found.detach() * of_rows).sum(-1).to(act_scales.dtype).reshape(act_scales.shape)
        return quantized(dx.to(fwd_input.dtype).reshape(fwd_input.shape), quantizer), of_scales if wanted else None

    first, _, last = name.rpartition("_")
    KERNELS[f"scaled_{name}"] = forward
    KERNELS["_".join(filter(None, ("scaled", first, f"d{last}")))] = backward


for _name, _made_by in _MADE_BY.items():
    _enter(_name, _made_by)
