"""A linear layer under emulation: its forward pass, the norm before it, and high precision that reports the three products to a listener."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from mpbridge.numerics.gemm import Plug, QuantizedLinear, check_shapes

if TYPE_CHECKING:
    from mpbridge.precision.policy import Quant


class Pausable:
    """What assigns rules to the linears of a model, and can suspend them."""

    is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """High precision in the block; nothing is observed or counted."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


# --- high precision: a listener can compute what a format would do to the products, one linear at a time --------------------------------------
class Listener(Protocol):
    """Receives a linear's products in the backward pass."""

    def hear(
        self,
        slot: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        dy: torch.Tensor,
        dx: torch.Tensor | None,
        dw: torch.Tensor | None,
        *,
        expert: bool,
    ) -> None:
        """slot: the linear's global name. x [tokens, in], weight [out, in], dy [tokens, out]; dx and dw from the high-precision GEMMs, None if
        not needed. Valid until the call returns.
        """


class HeardLinear(torch.autograd.Function):
    """Y = X Wt + b in high precision; the listener is called as soon as dX and dW exist, so nothing outlives the linear's backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        slot: str,
        expert: bool,
        listener: Listener,
    ) -> torch.Tensor:
        """x: [..., in]; expert: token counts vary, as in an expert's linear."""
        ctx.save_for_backward(x, weight)
        ctx.slot, ctx.expert, ctx.listener, ctx.has_bias = slot, expert, listener, bias is not None
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        dy, flat = grad.reshape(-1, grad.shape[-1]).contiguous(), x.reshape(-1, x.shape[-1])
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        dw = (dy.t() @ flat).to(weight.dtype) if ctx.needs_input_grad[1] else None
        ctx.listener.hear(ctx.slot, flat, weight, dy, dx, dw, expert=ctx.expert)
        db = dy.float().sum(0).to(grad.dtype) if ctx.has_bias else None
        return None if dx is None else dx.view(x.shape), dw, db, None, None, None


# --- norms in FP32, as Transformer Engine's kernels compute them: the result that delayed scaling quantizes, before it is rounded to 16 bits --
# Under delayed scaling its norm kernel itself casts to FP8; under every other scaling the norm's 16-bit output is quantized
# (`rmsnorm_fwd` in Transformer Engine's pytorch/csrc/extensions/normalization.cpp: FULLY_FUSED, FUSED_NORM_AMAX, UNFUSED).
def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP32 result, reciprocal root mean square of each row) of FP32 [..., columns]."""
    inverse = torch.rsqrt(x.square().mean(-1) + eps)
    return x * inverse.unsqueeze(-1) * gain, inverse


def layer_norm(
    x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(FP32 result, mean, reciprocal standard deviation of each row) of FP32 [..., columns]."""
    return torch.native_layer_norm(x, [x.shape[-1]], gain, shift, eps)


@torch.no_grad()
def unrounded(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """The FP32 output of the module `norm` (torch's RMSNorm or LayerNorm) for `x`."""
    with torch._C.DisableTorchFunction():
        source, gain = x.detach().float(), norm.weight.detach().float()
        if isinstance(norm, torch.nn.RMSNorm):
            eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
            return rms_norm(source, gain, eps)[0]
        shift = None if norm.bias is None else norm.bias.detach().float()
        return layer_norm(source, gain, shift, norm.eps)[0]


# --- emulated --------------------------------------------------------------------------------------------------------------------------------
def apply(
    plug: Plug,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    expert: bool = False,
    recompute: bool = False,
    high: torch.Tensor | None = None,
) -> torch.Tensor:
    """x Wt + b through quantized GEMMs; x: [..., in features]. Raises BadValue for sizes that Transformer Engine refuses.

    expert: token counts vary, so they are padded with zeros as megatron-core does; recompute: this forward pass may be run again in
    backward. high: x in FP32, before the preceding norm rounded it, for a scaling that quantizes the unrounded value.
    """
    emulation = plug.emulation
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if emulation.is_paused or x.numel() == 0:
        if emulation.listener is not None and x.numel():
            heard: torch.Tensor = HeardLinear.apply(x, weight, bias, plug.slot, expert, emulation.listener)  # type: ignore[no-untyped-call]
            return heard
        # an expert without tokens: Transformer Engine runs no GEMM, and its amaxes stay 0
        return F.linear(x, weight.to(x.dtype), bias)
    tokens = x.numel() // x.shape[-1]
    filled = x
    if expert:
        filled = padded(x.reshape(tokens, -1), *plug.gemms.distinct)
    for quant in plug.gemms.distinct:
        check_shapes(plug.slot, quant.row, filled.numel() // filled.shape[-1], weight.shape)
    wanted = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    first, replay = _run(plug, recompute, wanted)
    y: torch.Tensor = QuantizedLinear.apply(filled, weight, bias, plug, first, replay, high)  # type: ignore[no-untyped-call]
    return y[:tokens].view(*x.shape[:-1], -1) if expert else y


def padded(x: torch.Tensor, *quants: Quant) -> torch.Tensor:
    """An expert's tokens [tokens, features], padded with zero rows as those rules require."""
    return F.pad(x, (0, 0, 0, -x.shape[0] % math.lcm(*(quant.row.sizes.expert for quant in quants))))


def _run(plug: Plug, recompute: bool, wanted: bool) -> tuple[bool, bool]:
    """(this run opened its context, this run repeats an earlier one). wanted: a backward pass will reach this linear."""
    grad = torch.is_grad_enabled()
    if grad and plug.waiting:
        return plug.waiting.popleft(), True
    # without gradients no backward pass seems to follow, though a recomputation may
    first = plug.emulation.opens() if (wanted if grad else recompute) else False
    if recompute and not grad:
        plug.waiting.append(first)
        plug.quantizer.stash(plug.slot)
    return first, False


class EmulatedLinear(torch.nn.Linear):
    """A `torch.nn.Linear` whose forward goes through a plug; same parameters, same state dict."""

    plug: Plug

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input Wt + b with quantized operands."""
        return apply(self.plug, input, self.weight, self.bias)
