"""The arithmetic of optimizers: Adam's update, and Muon's orthogonalization in each precision that its products can have."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch

# --- Adam, as Transformer Engine's FusedAdam does it: for the optimizer that engines use on a CPU, and for the played kernels -----------------
# Source: Transformer Engine 2.11, common/multi_tensor/adam.cu. Its arguments are `const float`, so 1 - beta is taken in FP32.
BLOCK = 131072
"""Elements updated at a time when states need conversion, so that the ten passes over them stay in cache; the fastest measured from 16384 to 131072."""


def f32(value: float) -> float:
    """`value` rounded to FP32, like a kernel argument of type float."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


class Scalars:
    """The arguments of one update, as a user gave them, rounded as the CUDA kernel rounds them. step: None: no bias correction."""

    def __init__(
        self,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int | None,
        decoupled: bool,
    ) -> None:
        self.lr, self.eps, self.weight_decay = f32(lr), f32(eps), f32(weight_decay)
        self.step, self.decoupled = step, decoupled
        self.beta1, self.beta2 = beta1, beta2 = f32(betas[0]), f32(betas[1])
        self.keep1, self.keep2 = f32(1.0 - beta1), f32(1.0 - beta2)
        self.correction1 = 1.0 if step is None else f32(1.0 - beta1**step)
        self.correction2 = 1.0 if step is None else f32(1.0 - beta2**step)


def update(
    p: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    s: Scalars,
    scratch: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """One Adam update in place on flat FP32 `p`, `m`, `v`, by blocks through `scratch` (two of BLOCK elements); in the order of operations of adam.cu (Transformer Engine 2.11)."""
    scratch = scratch or (p.new_empty(BLOCK), p.new_empty(BLOCK))
    for start in range(0, p.numel(), BLOCK):
        end = min(start + BLOCK, p.numel())
        pb, gb, mb, vb = (t[start:end] for t in (p, g, m, v))
        denom, update = (t[: end - start] for t in scratch)
        if s.weight_decay and not s.decoupled:
            gb = torch.add(gb, pb, alpha=s.weight_decay)
        mb.mul_(s.beta1).add_(gb, alpha=s.keep1)
        vb.mul_(s.beta2).addcmul_(gb, gb, value=s.keep2)
        torch.div(vb, s.correction2, out=denom)
        denom.sqrt_().add_(s.eps)
        torch.div(mb, s.correction1, out=update)
        update.div_(denom)
        if s.weight_decay and s.decoupled:
            update.add_(pb, alpha=s.weight_decay)
        pb.add_(update, alpha=-s.lr)


def join(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """FP32 weights from BF16 parameters (rounded to nearest) and the int16 lower halves of their bits.

    A negative remainder means that the parameter was rounded up: its bits are decremented by one.
    """
    upper = high.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((upper << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def split(weights: torch.Tensor, high: torch.Tensor, remainder: torch.Tensor) -> None:
    """Writes FP32 `weights` into BF16 `high` (rounded, ties away from zero) and int16 `remainder`; `join` restores every bit."""
    bits = weights.view(torch.int32)
    remainder.copy_(bits.to(torch.int16))
    high.view(torch.int16).copy_(((bits >> 16) + (remainder < 0).to(torch.int32)).to(torch.int16))


# --- Newton-Schulz ---------------------------------------------------------------------------------------------------------------------------
A, B, C = 3.4445, -4.7750, 2.0315
"""Of the quintic a x + (b x xT + c (x xT)**2) x (Keller Jordan, 2024)."""
COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((A, B, C),),
    "quintic": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ),
}  # fmt: skip
"""Emerging-Optimizers' `coefficient_type` (v0.1.0 muon_utils.py) -> those of each step, over and over; megatron-core asks for "quintic", torch for "simple"."""


def newton_schulz(
    matrix: torch.Tensor, kind: str, steps: int = 5, *, coefficients: str = "simple", wide_norm: bool = False
) -> torch.Tensor:
    """The iteration on a [rows, columns] matrix, in FP32, FP64 or BF16.

    kind: of the products' operands, "fp32", "fp64", "tf32" or "bf16 products"; or "bf16", which rounds every result too, as torch.optim.Muon does. wide_norm: whether the matrix is divided by its norm in FP32 before
    that, as Emerging-Optimizers does.
    """
    inside = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(kind, torch.float32)
    x = matrix.to(torch.float32 if wide_norm and kind == "bf16" else inside)
    x = x.T if (tall := matrix.shape[0] > matrix.shape[1]) else x
    x = (x / x.norm().clamp(min=1e-7)).to(inside)
    sets = COEFFICIENTS[coefficients]
    for step in range(steps):
        a, b, c = sets[step % len(sets)]
        y = _narrow(x, kind)
        gram = y @ y.T
        narrow = _narrow(gram, kind)
        gram = torch.addmm(gram, narrow, narrow, beta=b, alpha=c)
        x = torch.addmm(x, _narrow(gram, kind), y, beta=a)
    return x.T if tall else x


def _narrow(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "tf32":  # ten explicit bits, ties away from zero: PTX cvt.rna.tf32
        return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return x.bfloat16().float() if kind == "bf16 products" else x
