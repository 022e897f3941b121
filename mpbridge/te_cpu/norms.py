"""LayerNorm and RMSNorm: statistics and gradients in FP32."""

from typing import Any

import torch

from mpbridge.numerics.linear import layer_norm, rms_norm
from mpbridge.te_cpu.casts import fill
from mpbridge.te_cpu.enums import torch_dtype
from mpbridge.te_cpu.played import kernel
from mpbridge.te_cpu.quantize import buffers, quantized


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.detach().float() + 1.0 if zero_centered else weight.detach().float()


def _output(y: torch.Tensor, out: Any, quantizer: Any, otype: Any) -> Any:
    """Delayed scaling casts the FP32 result (its kernel is fully fused); every other recipe quantizes the rounded one."""
    if type(quantizer).__name__ == "Float8Quantizer":
        return fill(quantizer, y, buffers(y.shape, torch_dtype(otype), quantizer, out))
    return quantized(y.to(torch_dtype(otype)), quantizer, out)


@kernel
def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[output, mean, reciprocal standard deviation] of [rows, columns]."""
    x = input.detach().float()
    shift = bias.detach().float() if bias is not None else None
    y, mean, inverse = layer_norm(x, _gain(weight, zero_centered_gamma), shift, eps)
    return [_output(y, ln_out, quantizer, otype), mean.reshape(-1), inverse.reshape(-1)]


@kernel
def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int = 0,
    zero_centered_gamma: bool = False,
) -> list[torch.Tensor]:
    """[gradient of the input, of the weight, of the bias]."""
    grad, source, gain = dz.detach().float().reshape(x.shape), x.detach().float(), _gain(gamma, zero_centered_gamma)
    mean, inverse = (of.reshape(*x.shape[:-1], 1) for of in (mu, rsigma))
    backward = torch.ops.aten.native_layer_norm_backward
    dx, dw, db = backward(grad, source, [x.shape[-1]], mean, inverse, gain, torch.zeros_like(gain), [True] * 3)
    return [dx.to(x.dtype), dw.to(gamma.dtype), db.to(gamma.dtype)]


@kernel
def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[output, None, reciprocal root mean square]."""
    x = input.detach().float()
    y, inverse = rms_norm(x, _gain(weight, zero_centered_gamma), eps)
    return [_output(y, ln_out, quantizer, otype), None, inverse.reshape(-1)]


@kernel
def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor | None,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int = 0,
    zero_centered_gamma: bool = False,
) -> list[torch.Tensor]:
    """[gradient of the input, of the weight], with `add` added to the former before it is rounded."""
    inverse = rsigma.reshape(*x.shape[:-1], 1)
    normal = x.detach().float() * inverse
    grad = dz.detach().float().reshape(x.shape)
    scaled = grad * _gain(gamma, zero_centered_gamma)
    dx = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    dw = (grad * normal).reshape(-1, x.shape[-1]).sum(0)
    return [(dx if add is None else dx + add.detach().float().reshape(dx.shape)).to(x.dtype), dw.to(gamma.dtype)]


@kernel
def rmsnorm_bwd(dz: torch.Tensor, x: torch.Tensor, *rest: Any, **named: Any) -> list[torch.Tensor]:
    """As `rmsnorm_bwd_add`, with nothing to add."""
    return rmsnorm_bwd_add(dz, x, None, *rest, **named)
