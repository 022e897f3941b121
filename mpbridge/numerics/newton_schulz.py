"""Muon's orthogonalization in each precision that its products can have."""

from __future__ import annotations

import torch

A, B, C = 3.4445, -4.7750, 2.0315
"""Of the quintic a x + (b x xT + c (x xT)**2) x (Keller Jordan, 2024; megatron-core's `muon_coefficient_type`)."""


def newton_schulz(matrix: torch.Tensor, kind: str, steps: int = 5) -> torch.Tensor:
    """The iteration on a [rows, columns] matrix, in FP32, FP64 or BF16.

    kind: of the products' operands, "fp32", "fp64", "tf32" or "bf16 products"; or "bf16", which rounds every result too, as torch.optim.Muon does.
    """
    x = matrix.to({"bf16": torch.bfloat16, "fp64": torch.float64}.get(kind, torch.float32))
    x = x.T if (tall := matrix.shape[0] > matrix.shape[1]) else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        y = _narrow(x, kind)
        gram = y @ y.T
        narrow = _narrow(gram, kind)
        gram = torch.addmm(gram, narrow, narrow, beta=B, alpha=C)
        x = torch.addmm(x, _narrow(gram, kind), y, beta=A)
    return x.T if tall else x


def _narrow(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "tf32":  # ten explicit bits, ties away from zero: PTX cvt.rna.tf32
        return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return x.bfloat16().float() if kind == "bf16 products" else x
