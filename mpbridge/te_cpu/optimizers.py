"""FusedAdam and FusedSGD in every mode: FP32 arithmetic, moments and weights in their own dtypes. Source: common/multi_tensor/{adam,sgd}.cu."""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.emulation.codes import encode_fp8
from mpbridge.emulation.kernels import amax_of
from mpbridge.te_cpu.enums import number_format
from mpbridge.te_cpu.multi_tensor import TensorLists
from mpbridge.te_cpu.registry import KERNELS, kernel

_L2, _DECOUPLED = 0, 1
_HALF = 1 << 15


class _Rule:
    """The constants of one Adam step."""

    def __init__(
        self, lr: float, beta1: float, beta2: float, eps: float, step: int, mode: int, correct: bool, decay: float
    ) -> None:
        self.lr, self.beta1, self.beta2, self.eps, self.mode, self.decay = lr, beta1, beta2, eps, mode, decay
        self.first = 1 - beta1**step if correct else 1.0
        self.second = 1 - beta2**step if correct else 1.0

    def new(self, grad: torch.Tensor, weight: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The updated weight in FP32; m and v are updated in place."""
        g, w = grad.detach().float(), weight.detach().float()
        if self.mode == _L2 and self.decay:
            g = g + self.decay * w
        exp_avg = m.float().mul(self.beta1).add_(g, alpha=1 - self.beta1)
        exp_avg_sq = v.float().mul(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        m.copy_(exp_avg)
        v.copy_(exp_avg_sq)
        update = (exp_avg / self.first).div_((exp_avg_sq / self.second).sqrt_().add_(self.eps))
        if self.mode == _DECOUPLED and self.decay:
            update.add_(w, alpha=self.decay)
        return w - self.lr * update


@kernel
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Lists: gradients, weights, first and second moments, and main weights if there are any. Infinities are not caught: the flag is not read."""
    rule = _Rule(lr, beta1, beta2, eps, step, mode, bool(bias_correction), weight_decay)
    with torch.no_grad():
        for grad, weight, m, v, *main in zip(*tensor_lists, strict=True):
            new = rule.new(grad, main[0] if main else weight, m, v)
            weight.copy_(new)
            if main:
                main[0].copy_(new)


@kernel
def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: Any,
) -> None:
    """Lists: gradients, FP8 codes of the weights, moments, main weights, scales, amaxes, inverse scales; FP32 from the moments on."""
    for name, tensors in zip(
        ("exp_avg", "exp_avg_sq", "main weight", "scale", "amax", "inverse scale"), tensor_lists[2:], strict=True
    ):
        wrong = next((tensor for tensor in tensors if tensor.dtype is not torch.float32), None)
        if wrong is not None:
            raise RuntimeError(f"multi_tensor_adam_fp8: {name} has dtype {wrong.dtype}, but expected torch.float32")
    rule = _Rule(lr, beta1, beta2, eps, step, mode, bool(bias_correction), weight_decay)
    number = number_format(fp8_dtype)
    with torch.no_grad():
        for grad, codes, m, v, main, scale, amax, inverse in zip(*tensor_lists, strict=True):
            new = rule.new(grad, main, m, v)
            main.copy_(new)
            codes.copy_(encode_fp8(new * scale.reshape(()), number).view(codes.dtype).view(codes.shape))
            amax.copy_(torch.fmax(amax, amax_of(new).reshape(amax.shape)))
            inverse.copy_((1.0 / scale).reshape(inverse.shape))


@kernel
def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Lists: gradients, bf16 weights, moments, int16 remainders: weight and remainder together are the FP32 main weight."""
    rule = _Rule(lr, beta1, beta2, eps, step, mode, bool(bias_correction), weight_decay)
    with torch.no_grad():
        for grad, weight, m, v, remainder in zip(*tensor_lists, strict=True):
            low = remainder.int()
            # the bf16 weight is the main weight rounded, so it was rounded up if the remainder's top bit is set
            high = weight.view(torch.int16).int() - (low < 0).int()
            main = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
            bits = rule.new(grad, main, m, v).contiguous().view(torch.int32)
            low = bits & 0xFFFF
            low = torch.where(low >= _HALF, low - 2 * _HALF, low)
            remainder.copy_(low.to(torch.int16))
            weight.view(torch.int16).copy_(((bits >> 16) + (low < 0).int()).to(torch.int16))


@kernel
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    step: Any,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """As `multi_tensor_adam` with learning rate, step and inverse loss scale in tensors; gradients are unscaled in place. A flag of 1 skips the step."""
    if noop_flag is not None and int(noop_flag.reshape(-1)[0]) == 1:
        return
    rule = _Rule(float(lr), beta1, beta2, eps, int(step), mode, bool(bias_correction), weight_decay)
    with torch.no_grad():
        for grad, weight, m, v, *main in zip(*tensor_lists, strict=True):
            grad.copy_(grad.float() * inv_scale.float())
            new = rule.new(grad, main[0] if main else weight, m, v)
            weight.copy_(new)
            if main:
                main[0].copy_(new)


KERNELS["multi_tensor_adam_capturable_master"] = multi_tensor_adam_capturable


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
