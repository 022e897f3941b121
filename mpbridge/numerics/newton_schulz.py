"""Muon's orthogonalization in each precision that its products can have."""

from __future__ import annotations

from collections.abc import Mapping

import torch

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
