"""Activations and their gradients: computed in FP32, rounded to the input's dtype, then quantized if a quantizer is given.

From release 2.19 on some take one factor per row (a token's routing probability). Source: common/activation/scaled_activation.h,
scaled_swiglu.cu, scaled_srelu.cu.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from mpbridge.te_cpu.operands import is_quantized, values_of
from mpbridge.te_cpu.played import KERNELS
from mpbridge.te_cpu.quantize import quantized

Map = Callable[..., torch.Tensor]
"""Of a tensor, and of numbers that some activations have."""


def gelu_value(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def gelu_gradient(x: torch.Tensor) -> torch.Tensor:
    """Derivative of `gelu_value`."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(gelu_value(leaf).sum(), leaf)
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


def _clamped(x: torch.Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> torch.Tensor:
    """The clamped SwiGLU of GPT-OSS."""
    first, second = x.chunk(2, -1)
    first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return first * torch.sigmoid(alpha * first) * (second + glu_linear_offset)


def _situ(x: torch.Tensor, beta1: float = 4.0, beta2: float = 25.0) -> torch.Tensor:
    """SiTU-GLU: a saturating SwiGLU."""
    first, second = x.chunk(2, -1)
    return beta1 * torch.tanh(first / beta1) * torch.sigmoid(first) * beta2 * torch.tanh(second / beta2)


_PLAIN: dict[str, Map] = {
    "gelu": gelu_value, "relu": torch.relu, "silu": F.silu, "srelu": _squared_relu, "qgelu": _quick_gelu
}  # fmt: skip
_GATED: dict[str, Map] = {
    "geglu": gelu_value, "reglu": torch.relu, "swiglu": F.silu, "sreglu": _squared_relu, "qgeglu": _quick_gelu, "glu": torch.sigmoid
}  # fmt: skip
_NUMBERS = {"clamped_swiglu": ("limit", "alpha", "glu_linear_offset"), "situglu": ("beta1", "beta2")}
_FUNCTIONS: dict[str, Map] = {
    **_PLAIN, **{name: _gated(function) for name, function in _GATED.items()}, "clamped_swiglu": _clamped, "situglu": _situ
}  # fmt: skip
"""Kernel name -> function over the full last axis (twice as long for gated ones)."""


def _source(x: Any) -> torch.Tensor:
    return values_of(x, torch.float32) if is_quantized(x) else x.detach().float()


def _backward(function: Map, grad: torch.Tensor, x: Any, *given: float, **named: float) -> torch.Tensor:
    with torch.enable_grad():
        leaf = _source(x).requires_grad_()
        out = function(leaf, *given, **named)
        (found,) = torch.autograd.grad(out, leaf, _source(grad).reshape(out.shape))
    return found.to(grad.dtype)


def _gradient_of(name: str) -> str:
    """'dswiglu' for 'swiglu', 'clamped_dswiglu' for 'clamped_swiglu'."""
    family, underscore, last = name.rpartition("_")
    return f"{family}{underscore}d{last}"


def _enter(name: str) -> None:
    """Registers an activation and its gradient, which take its numbers last."""
    function = _FUNCTIONS[name]

    def forward(input: torch.Tensor, quantizer: Any = None, *given: float, **named: float) -> Any:
        return quantized(function(_source(input), *given, **named).to(input.dtype), quantizer)

    def backward(grad: torch.Tensor, fwd_input: Any, quantizer: Any = None, *given: float, **named: float) -> Any:
        return quantized(_backward(function, grad, fwd_input, *given, **named), quantizer)

    def with_bias(grad: torch.Tensor, fwd_input: Any, quantizer: Any = None) -> list[Any]:
        dx = _backward(function, grad, fwd_input)
        return [dx.reshape(-1, dx.shape[-1]).float().sum(0).to(dx.dtype), quantized(dx, quantizer)]

    KERNELS[name], KERNELS[_gradient_of(name)] = forward, backward
    if name in _PLAIN:
        KERNELS[f"dbias_d{name}"] = with_bias


# --- times one factor per row --------------------------------------------------------------------------------------------------------------
def _unwoven(x: torch.Tensor, size: int) -> torch.Tensor:
    """All of the gate, then all of the linear part, of an input that alternates `size` columns of each; 0: it does not."""
    return x.reshape(*x.shape[:-1], -1, 2, size).transpose(-3, -2).flatten(-3) if size else x


def _enter_scaled(name: str) -> None:
    """Registers an activation times factors, FP32 throughout and rounded once. All but the squared ReLU are gated, and take `glu_interleave_size` after their numbers."""
    function = _FUNCTIONS[name]
    numbers = [*_NUMBERS.get(name, ()), *(() if name == "srelu" else ("glu_interleave_size",))]

    def forward(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, *given: Any, **named: Any) -> Any:
        named |= dict(zip(numbers, given, strict=False))
        size = named.pop("glu_interleave_size", 0)
        rows = input.detach().float().reshape(-1, input.shape[-1])
        found = function(_unwoven(rows, size), **named) * act_scales.detach().float().reshape(-1, 1)
        return quantized(found.to(input.dtype).reshape(*input.shape[:-1], -1), quantizer)

    def backward(
        grad: torch.Tensor, fwd_input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, *given: Any, **named: Any
    ) -> tuple[Any, torch.Tensor | None]:
        """Gradients of the input and, unless `compute_scale_grad` is False, of the scales."""
        named |= dict(zip([*numbers, "compute_scale_grad"], given, strict=False))
        wanted, size = named.pop("compute_scale_grad", True), named.pop("glu_interleave_size", 0)
        with torch.enable_grad():
            rows = fwd_input.detach().float().reshape(-1, fwd_input.shape[-1]).requires_grad_()
            found = function(_unwoven(rows, size), **named)
            of_rows = grad.detach().float().reshape(found.shape)
            (dx,) = torch.autograd.grad(found, rows, of_rows * act_scales.detach().float().reshape(-1, 1))
        of_scales = (found.detach() * of_rows).sum(-1).to(act_scales.dtype).reshape(act_scales.shape)
        return quantized(dx.to(fwd_input.dtype).reshape(fwd_input.shape), quantizer), of_scales if wanted else None

    KERNELS[f"scaled_{name}"], KERNELS[f"scaled_{_gradient_of(name)}"] = forward, backward


for _name in _FUNCTIONS:
    _enter(_name)
for _name in ("swiglu", "situglu", "clamped_swiglu", "srelu"):
    _enter_scaled(_name)
