"""Activations times one factor per row (a token's routing probability), from release 2.19 on: FP32 throughout, rounded once.

Source: common/activation/scaled_activation.h, scaled_swiglu.cu, scaled_srelu.cu.
"""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.te_cpu.activations import FUNCTIONS, Map, clamped_gate, situ_gate
from mpbridge.te_cpu.quantize import quantized
from mpbridge.te_cpu.registry import kernel


def _unwoven(function: Map, size: int) -> Map:
    """A gated function whose input alternates `size` columns of the gate with `size` of the linear part; 0: all of the gate, then all of the linear part."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        if size:
            x = x.reshape(*x.shape[:-1], -1, 2, size).transpose(-3, -2).flatten(-3)
        return function(x)

    return gate


def _forward(function: Map, input: torch.Tensor, scales: torch.Tensor, quantizer: Any) -> Any:
    rows = input.detach().float().reshape(-1, input.shape[-1])
    found = function(rows) * scales.detach().float().reshape(-1, 1)
    return quantized(found.to(input.dtype).reshape(*input.shape[:-1], -1), quantizer)


def _backward(
    function: Map, grad: torch.Tensor, input: torch.Tensor, scales: torch.Tensor, quantizer: Any, wanted: bool
) -> tuple[Any, torch.Tensor | None]:
    """The input's gradient, and that of the scales if `wanted`."""
    with torch.enable_grad():
        rows = input.detach().float().reshape(-1, input.shape[-1]).requires_grad_()
        found = function(rows)
        of_rows = grad.detach().float().reshape(found.shape)
        (dx,) = torch.autograd.grad(found, rows, of_rows * scales.detach().float().reshape(-1, 1))
    of_scales = (found.detach() * of_rows).sum(-1).to(scales.dtype).reshape(scales.shape) if wanted else None
    return quantized(dx.to(input.dtype).reshape(input.shape), quantizer), of_scales


@kernel
def scaled_swiglu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any, glu_interleave_size: int = 0) -> Any:
    """SwiGLU times a row's factor."""
    return _forward(_unwoven(FUNCTIONS["swiglu"], glu_interleave_size), input, act_scales, quantizer)


@kernel
def scaled_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, torch.Tensor | None]:
    """Gradients of `scaled_swiglu`."""
    function = _unwoven(FUNCTIONS["swiglu"], glu_interleave_size)
    return _backward(function, grad, fwd_input, act_scales, quantizer, compute_scale_grad)


@kernel
def scaled_situglu(
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
) -> Any:
    """SiTU-GLU times a row's factor."""
    return _forward(_unwoven(situ_gate(beta1, beta2), glu_interleave_size), input, act_scales, quantizer)


@kernel
def scaled_dsituglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, torch.Tensor | None]:
    """Gradients of `scaled_situglu`."""
    function = _unwoven(situ_gate(beta1, beta2), glu_interleave_size)
    return _backward(function, grad, fwd_input, act_scales, quantizer, compute_scale_grad)


@kernel
def scaled_clamped_swiglu(
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
) -> Any:
    """The clamped SwiGLU times a row's factor."""
    function = _unwoven(clamped_gate(limit, alpha, glu_linear_offset), glu_interleave_size)
    return _forward(function, input, act_scales, quantizer)


@kernel
def scaled_clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, torch.Tensor | None]:
    """Gradients of `scaled_clamped_swiglu`."""
    function = _unwoven(clamped_gate(limit, alpha, glu_linear_offset), glu_interleave_size)
    return _backward(function, grad, fwd_input, act_scales, quantizer, compute_scale_grad)


@kernel
def scaled_srelu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any) -> Any:
    """Squared ReLU times a row's factor."""
    return _forward(FUNCTIONS["srelu"], input, act_scales, quantizer)


@kernel
def scaled_dsrelu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    compute_scale_grad: bool = True,
) -> tuple[Any, torch.Tensor | None]:
    """Gradients of `scaled_srelu`."""
    return _backward(FUNCTIONS["srelu"], grad, fwd_input, act_scales, quantizer, compute_scale_grad)
