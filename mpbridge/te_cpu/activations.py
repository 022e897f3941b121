"""Activations and their gradients: computed in FP32, rounded to the input's dtype, then quantized if a quantizer is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from mpbridge.te_cpu.operands import is_quantized, values_of
from mpbridge.te_cpu.quantize import quantized
from mpbridge.te_cpu.registry import KERNELS

Map = Callable[[torch.Tensor], torch.Tensor]


def gelu_value(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def gelu_gradient(x: torch.Tensor) -> torch.Tensor:
    """Derivative of `gelu_value`."""
    return _derivative(gelu_value, x)


def _derivative(function: Map, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf).sum(), leaf)
    return found


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


def _gated(function: Map) -> Map:
    def gate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return function(first) * second

    return gate


_PLAIN: dict[str, Map] = {
    "gelu": gelu_value,
    "relu": torch.relu,
    "silu": F.silu,
    "srelu": _squared_relu,
    "qgelu": _quick_gelu,
}
_GATED: dict[str, Map] = {
    "geglu": gelu_value, "reglu": torch.relu, "swiglu": F.silu, "sreglu": _squared_relu, "qgeglu": _quick_gelu, "glu": torch.sigmoid
}  # fmt: skip
FUNCTIONS: dict[str, Map] = _PLAIN | {name: _gated(function) for name, function in _GATED.items()}
"""Kernel name -> function over the full last axis (twice as long for gated ones)."""


def _source(x: Any) -> torch.Tensor:
    return values_of(x, torch.float32) if is_quantized(x) else x.detach().float()


def _backward(function: Map, grad: torch.Tensor, x: Any) -> torch.Tensor:
    with torch.enable_grad():
        leaf = _source(x).requires_grad_()
        (found,) = torch.autograd.grad(function(leaf), leaf, _source(grad).reshape(function(leaf).shape))
    return found.to(grad.dtype)


def clamped_gate(limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Map:
    """The clamped SwiGLU of GPT-OSS."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        first, second = first.clamp(max=limit), second.clamp(-limit, limit)
        return first * torch.sigmoid(alpha * first) * (second + glu_linear_offset)

    return gate


def situ_gate(beta1: float = 4.0, beta2: float = 25.0) -> Map:
    """SiTU-GLU: a saturating SwiGLU."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return beta1 * torch.tanh(first / beta1) * torch.sigmoid(first) * beta2 * torch.tanh(second / beta2)

    return gate


def _enter(name: str, gradient: str, made_by: Callable[..., Map]) -> None:
    """Registers an activation and its gradient, which take the numbers of `made_by` last."""

    def forward(input: torch.Tensor, quantizer: Any = None, *given: float, **named: float) -> Any:
        return quantized(made_by(*given, **named)(_source(input)).to(input.dtype), quantizer)

    def backward(grad: torch.Tensor, fwd_input: Any, quantizer: Any = None, *given: float, **named: float) -> Any:
        return quantized(_backward(made_by(*given, **named), grad, fwd_input), quantizer)

    def with_bias(grad: torch.Tensor, fwd_input: Any, quantizer: Any = None) -> list[Any]:
        dx = _backward(made_by(), grad, fwd_input)
        return [dx.reshape(-1, dx.shape[-1]).float().sum(0).to(dx.dtype), quantized(dx, quantizer)]

    KERNELS[name], KERNELS[gradient] = forward, backward
    if name in _PLAIN:
        KERNELS[f"dbias_d{name}"] = with_bias


for _name, _function in FUNCTIONS.items():
    _enter(_name, f"d{_name}", lambda function=_function: function)
_enter("clamped_swiglu", "clamped_dswiglu", clamped_gate)
_enter("situglu", "dsituglu", situ_gate)
