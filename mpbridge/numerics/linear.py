"""The forward pass of a linear layer under emulation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mpbridge.numerics.gemm import Plug, QuantizedLinear, check_shapes
from mpbridge.numerics.listening import HeardLinear

if TYPE_CHECKING:
    from mpbridge.precision.policy import Quant


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

    @property
    def quant(self) -> Quant:
        """The rule that this linear's GEMMs run under."""
        return self.plug.quantizer.quant

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input Wt + b with quantized operands."""
        return apply(self.plug, input, self.weight, self.bias)
