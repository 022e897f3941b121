"""Linears in high precision that report their three products to a listener, which can compute what a format would do to them, one linear at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F


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
