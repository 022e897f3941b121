"""FusedAdam and FusedSGD in every mode: FP32 arithmetic, moments and weights in their own dtypes. Source: common/multi_tensor/{adam,sgd}.cu."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from mpbridge.numerics.adam import Scalars, join, split, update
from mpbridge.numerics.codes import encode_fp8
from mpbridge.numerics.kernels import amax_of
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.multi_tensor import TensorLists
from mpbridge.te_cpu.registry import KERNELS, kernel

_DECOUPLED = 1


def _new(rule: Scalars, grad: torch.Tensor, weight: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The updated weight in FP32; m and v are updated in place."""
    new, exp_avg, exp_avg_sq = (one.detach().to(torch.float32, copy=True).reshape(-1) for one in (weight, m, v))
    update(new, grad.detach().float().reshape(-1), exp_avg, exp_avg_sq, rule)
    m.copy_(exp_avg.view(m.shape))
    v.copy_(exp_avg_sq.view(v.shape))
    return new.view(weight.shape)


def _adam(function: Callable[..., None]) -> Callable[..., None]:
    """Registers `function(rule, tensor_lists, *more)` with the arguments of the extension's Adams, of which each has `more` of its own."""

    def call(
        chunk_size: int,
        noop_flag: Any,
        tensor_lists: TensorLists,
        lr: Any,
        beta1: float,
        beta2: float,
        eps: float,
        step: Any,
        mode: int,
        bias_correction: int,
        weight_decay: float,
        *more: Any,
    ) -> None:
        rule = Scalars.of(
            lr=float(lr),
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            step=int(step) if bias_correction else None,
            decoupled=mode == _DECOUPLED,
        )
        with torch.no_grad():
            # infinities are not caught, and the flag is read only where the arguments are tensors
            function(rule, tensor_lists, *more, *([noop_flag] if "noop_flag" in signature(function).parameters else []))

    call.__name__ = function.__name__
    return kernel(call)


@_adam
def multi_tensor_adam(rule: Scalars, tensor_lists: TensorLists) -> None:
    """Lists: gradients, weights, first and second moments, and main weights if there are any."""
    for grad, weight, m, v, *main in zip(*tensor_lists, strict=True):
        new = _new(rule, grad, main[0] if main else weight, m, v)
        weight.copy_(new)
        if main:
            main[0].copy_(new)


@_adam
def multi_tensor_adam_fp8(rule: Scalars, tensor_lists: TensorLists, fp8_dtype: Any) -> None:
    """Lists: gradients, FP8 codes of the weights, moments, main weights, scales, amaxes, inverse scales; FP32 from the moments on."""
    for name, tensors in zip(
        ("exp_avg", "exp_avg_sq", "main weight", "scale", "amax", "inverse scale"), tensor_lists[2:], strict=True
    ):
        wrong = next((tensor for tensor in tensors if tensor.dtype is not torch.float32), None)
        if wrong is not None:
            raise RuntimeError(f"multi_tensor_adam_fp8: {name} has dtype {wrong.dtype}, but expected torch.float32")
    number = number_format(fp8_dtype)
    for grad, codes, m, v, main, scale, amax, inverse in zip(*tensor_lists, strict=True):
        new = _new(rule, grad, main, m, v)
        main.copy_(new)
        codes.copy_(encode_fp8(new * scale.reshape(()), number).view(codes.dtype).view(codes.shape))
        amax.copy_(torch.fmax(amax, amax_of(new).reshape(amax.shape)))
        inverse.copy_((1.0 / scale).reshape(inverse.shape))


@_adam
def multi_tensor_adam_param_remainder(rule: Scalars, tensor_lists: TensorLists) -> None:
    """Lists: gradients, bf16 weights, moments, int16 remainders: weight and remainder together are the FP32 main weight."""
    for grad, weight, m, v, remainder in zip(*tensor_lists, strict=True):
        split(_new(rule, grad, join(weight.detach(), remainder), m, v), weight.detach(), remainder)


@_adam
def multi_tensor_adam_capturable(
    rule: Scalars, tensor_lists: TensorLists, inv_scale: torch.Tensor, noop_flag: torch.Tensor | None
) -> None:
    """As `multi_tensor_adam` with learning rate, step and inverse loss scale in tensors; gradients are unscaled in place. A flag of 1 skips the step."""
    if noop_flag is not None and int(noop_flag.reshape(-1)[0]) == 1:
        return
    for grad, weight, m, v, *main in zip(*tensor_lists, strict=True):
        grad.copy_(grad.float() * inv_scale.float())
        new = _new(rule, grad, main[0] if main else weight, m, v)
        weight.copy_(new)
        if main:
            main[0].copy_(new)


KERNELS["multi_tensor_adam_capturable_master"] = KERNELS["multi_tensor_adam_capturable"]


@kernel
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Lists: gradients, weights, momentum buffers, and 16-bit copies of the weights if there are any. A flag of 1 skips the step."""
    if noop_flag is not None and int(noop_flag.reshape(-1)[0]) == 1:
        return
    with torch.no_grad():
        for grad, weight, buffer, *copy in zip(*tensor_lists, strict=True):
            w, g = weight.float(), grad.float() * scale
            if wd and not wd_after_momentum:
                g = g + wd * w
            if momentum:
                moment = g.clone() if first_run else buffer.float() * momentum + (1 - dampening) * g
                buffer.copy_(moment)
                g = g + momentum * moment if nesterov else moment
            if wd and wd_after_momentum:
                g = g + wd * w
            # sgd.cu adds the update to the stored weight: an FP16 weight gets an update that is rounded to FP16 first
            weight.add_((-lr * g).to(weight.dtype))
            if copy:
                copy[0].copy_(weight)
