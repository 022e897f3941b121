"""Faults that leave every dtype, flag and hook in place, or hide in one corner of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.observe.audit import faults as f
from tests.observe.audit.compute_faults import replaced


# --- weights and states --------------------------------------------------------------------------------------------------------------------
def narrowed(wide: torch.Tensor, bits: int) -> torch.Tensor:
    """FP32 numbers with so many bits of mantissa."""
    drop, whole = 23 - bits, wide.detach().contiguous().view(torch.int32)
    return (((whole + (1 << (drop - 1))) >> drop) << drop).view(torch.float32)


@f.given
def states_with(engine: Any, bits: int, name: str) -> None:
    def act() -> None:
        for state in f.states(engine):
            state[name].copy_(narrowed(state[name], bits))

    f.stepping(engine, act)


@f.given
def main_weights_with(engine: Any, bits: int) -> None:
    def act() -> None:
        for own in f.updated(engine):
            own.data.copy_(narrowed(own.data, bits))

    f.stepping(engine, act)


def frozen_while_nobody_looks(engine: Any) -> None:
    """The inner optimizer takes its steps under a dispatch mode only."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

    f.instead(f.inner(engine), "step", lambda real, *args, **kwargs: real(*args, **kwargs) if modes() else None)


def update_in_bf16(engine: Any) -> None:
    """The update is rounded to BF16 before it is added to FP32 weights."""

    def enters() -> Callable[[], None]:
        kept = [(p, p.detach().clone()) for p in f.updated(engine)]

        def leaves() -> None:
            for p, old in kept:
                p.data.copy_(old + f.narrow(p.detach() - old))

        return leaves

    f.around(f.inner(engine), "step", enters)


# --- gradients -----------------------------------------------------------------------------------------------------------------------------
def gradients_kept(engine: Any) -> None:
    """The last step's gradients are still there when the next ones are added."""
    for chunk in engine.model:
        chunk.zero_grad_buffer = f.nothing


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounded to E4M3 under a scale of the whole tensor."""
    factor = 448.0 / values.abs().amax().clamp_min(1e-30).float()
    return ((values.float() * factor).to(torch.float8_e4m3fn).float() / factor).to(values.dtype)


class _Backward(torch.autograd.Function):
    """A linear whose backward pass is changed: what it reads of dy, and of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dy: Any, w: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ways = dy, w
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        change_dy, change_w = ctx.ways
        flat = change_dy(grad.reshape(-1, grad.shape[-1]))
        read = change_w(weight)
        dx = (flat.to(read.dtype) @ read).to(x.dtype).view(x.shape)
        dw = flat.t() @ x.reshape(-1, x.shape[-1]).to(flat.dtype)
        return dx, dw.to(weight.dtype), None, None


@f.given
def backward_reads(engine: Any, *, dy: Any = lambda t: t, w: Any = lambda t: t) -> None:
    f.linear(engine)._forward_impl = lambda input, weight, *args, **kwargs: _Backward.apply(input, weight, dy, w)


# --- compute -------------------------------------------------------------------------------------------------------------------------------
def tf32_allowed(engine: Any) -> None:
    replaced(engine, _Precision(), "value", "high")


class _Precision:
    @property
    def value(self) -> str:
        return torch.get_float32_matmul_precision()

    @value.setter
    def value(self, name: str) -> None:
        torch.set_float32_matmul_precision(name)


def norm_in_bf16(engine: Any) -> None:
    norm = f.gpt(engine).decoder.layers[1].input_layernorm

    def forward(real: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.bfloat16()
        centred = wide - wide.mean(-1, keepdim=True)
        scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
        out = centred * scale * norm.weight.bfloat16()
        bias = getattr(norm, "bias", None)
        return (out if bias is None else out + bias.bfloat16()).to(real(x).dtype)

    f.instead(norm, "forward", forward)


def norm_in_bf16_without_a_root(engine: Any) -> None:
    """The same by other operations: nothing of it is a norm's kernel or a reciprocal root."""
    norm = f.gpt(engine).decoder.layers[1].input_layernorm

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.bfloat16()
        centred = wide - wide.mean(-1, keepdim=True)
        out = centred / ((centred * centred).mean(-1, keepdim=True) + 1e-5).sqrt()
        return (out * norm.weight.bfloat16() + norm.bias.bfloat16()).to(x.dtype)

    norm.forward = forward


def output_gradients_rounded(engine: Any) -> None:
    """What a linear's backward pass is given is rounded to BF16 on its way."""
    f.linear(engine).register_full_backward_pre_hook(lambda module, grads: f.narrow(grads))


def linear_by_a_batched_product(engine: Any) -> None:
    """A linear in FP16, whose product has three dimensions."""

    def forward(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        turned = weight.half().t().expand(input.shape[0], *weight.shape[::-1])
        return torch.bmm(input.half(), turned).to(input.dtype)

    f.linear(engine)._forward_impl = forward


def linear_without_a_product(engine: Any) -> None:
    """A linear that multiplies and adds element by element, in FP16."""

    def forward(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (input.half().unsqueeze(-2) * weight.half()).sum(-1).to(input.dtype)

    f.linear(engine)._forward_impl = forward


def attention_without_a_product(engine: Any) -> None:
    """Core attention hands its values on, by no product at all."""
    attention = f.linear(engine, "self_attention.core_attention")
    attention.forward = lambda query, key, value, *args, **kwargs: value.reshape(*value.shape[:2], -1).clone()


def angles_rounded_on_their_way(engine: Any) -> None:
    f.changed(f.gpt(engine).rotary_pos_emb, "forward", f.narrow)


def logits_rounded(engine: Any) -> None:
    f.changed(f.gpt(engine).output_layer, "forward", f.narrow)


# --- quantization --------------------------------------------------------------------------------------------------------------------------
@f.given
def operands_of(engine: Any, role: str, of: str, change: Callable[..., Any]) -> None:
    """change(real, x, gemm, side, more) makes one operand of every quantized linear."""

    def make(real: Any, x: Any, *, gemm: Any, side: Any, **more: Any) -> Any:
        made = partial(change, real) if (gemm, side) == (role, of) else real
        return made(x, gemm=gemm, side=side, **more)

    for quantizer in engine.emulation.quantizers.values():
        f.instead(quantizer, "operand", make)
        quantizer.shares_copies = lambda side: False


def squeezed(real: Any, x: torch.Tensor, **how: Any) -> Any:
    """Quantized as if the largest value were a thousand times as large: most of the range is lost to underflow."""
    wide = x.detach().clone()
    wide.view(-1)[0] = wide.abs().amax() * 1024
    return real(wide, **how)


def coarse(real: Any, x: torch.Tensor, **how: Any) -> Any:
    """Rounded to two bits of mantissa before it is quantized by its rule."""
    return real(narrowed(x.float(), 2).to(x.dtype), **how)


def halved(real: Any, x: torch.Tensor, **how: Any) -> Any:
    """Half of the rows are left out."""
    wide = x.detach().clone()
    wide[::2] = 0
    return real(wide, **how)


def stale() -> Callable[..., Any]:
    """The first copy of every weight is read for good."""
    kept: dict[Any, Any] = {}

    def make(real: Any, x: torch.Tensor, **how: Any) -> Any:
        key = real, how["slot"]
        if key not in kept:
            kept[key] = real(x, **how)
        return kept[key]

    return make


def through_e4m3(real: Any, x: torch.Tensor, **how: Any) -> Any:
    """Rounded to E4M3 before it is quantized by its rule."""
    return real(to_e4m3(x.detach()), **how)
