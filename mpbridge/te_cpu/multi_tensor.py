"""Operations on lists of tensors: scaling, norms, scales from amaxes, FusedAdam and FusedSGD in every mode. The argument `chunk_size` has no effect on a CPU."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch

from mpbridge.common.formats import E4M3
from mpbridge.numerics.codes import encode_fp8
from mpbridge.numerics.kernels import amax_of
from mpbridge.numerics.optimizers import Scalars, join, split, update
from mpbridge.numerics.scales import mxfp8_exponent, scale_from_amax
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.played import KERNELS, kernel

TensorLists = Sequence[Sequence[torch.Tensor]]


@kernel
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Second list = first list times `scale`; the flag is set to 1 if any value is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        scaled = source.detach().float() * scale
        if not bool(torch.isfinite(scaled).all()):
            noop_flag.fill_(1)
        target.copy_(scaled)


@kernel
def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: TensorLists, scale: torch.Tensor
) -> None:
    """As `multi_tensor_scale` with the scale in a tensor."""
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, float(scale))


@kernel
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor_python: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of all, norms of each or an empty tensor)."""
    return multi_tensor_unscale_l2norm(chunk_size, noop_flag, tensor_lists, 1.0, per_tensor_python)


@kernel
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    inv_scale: torch.Tensor | float,
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `multi_tensor_l2norm`, for the tensors times `inv_scale`."""
    each = [(tensor.detach().float() * float(inv_scale)).norm() for tensor in tensor_lists[0]]
    norms = torch.stack(each) if each else torch.zeros(0)
    return norms.norm().reshape(1), norms if per_tensor_python else torch.empty(0)


@kernel
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    max_fp8: float,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """Lists of amaxes, scales and inverse scales: the latter two from the first."""
    for amax, scale, inverse in zip(*tensor_lists, strict=True):
        least = amax.float().clamp_min(amax_epsilon) if amax_epsilon else amax.float()
        made = scale_from_amax(least, max_fp8, power_of_two=force_pow_2_scales)
        scale.copy_(made.reshape(scale.shape))
        inverse.copy_((1.0 / made).reshape(inverse.shape))


@kernel
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: TensorLists
) -> None:
    """Lists of bf16 amaxes and E8M0 bytes: MXFP8's scales in E4M3."""
    for amax, scale in zip(*tensor_lists, strict=True):
        if amax.dtype is not torch.bfloat16:
            raise RuntimeError("amax should be bf16")
        scale.copy_(mxfp8_exponent(amax.float(), E4M3).reshape(scale.shape))


# --- optimizers: FP32 arithmetic, moments and weights in their own dtypes (common/multi_tensor/{adam,sgd}.cu) --------------------------------
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
        rule = Scalars(
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


def _plain(rule: Scalars, tensor_lists: TensorLists) -> None:
    for grad, weight, m, v, *main in zip(*tensor_lists, strict=True):
        new = _new(rule, grad, main[0] if main else weight, m, v)
        for kept in (weight, *main):
            kept.copy_(new)


@_adam
def multi_tensor_adam(rule: Scalars, tensor_lists: TensorLists) -> None:
    """Lists: gradients, weights, first and second moments, and main weights if there are any."""
    _plain(rule, tensor_lists)


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
    for grad in tensor_lists[0]:
        grad.copy_(grad.float() * inv_scale.float())
    _plain(rule, tensor_lists)


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
