"""Rounding outside of the linears: attention's output in BF16 (arXiv 2510.04212), log-probabilities computed in two ways (arXiv 2510.26788)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from mpbridge.planning.certificates.row import Row

ROWS, KEYS, HEAD = 1024, 64, 64
LAYERS, HIDDEN, VOCABULARY = 4, 256, 512


def attention_bias(
    kind: torch.dtype, *, maxima: int = 2, gap: float = 12.0, divided: bool = False, sign: float = 1.0, rows: int = ROWS
) -> tuple[float, float]:
    """(mean, standard error) of the output's error away from zero, in last places of `kind`.

    maxima: equal largest scores of a row, the others `gap` below. divided: the weighted sum is divided by the row's sum of exponentials before it is
    rounded to `kind`, not after. sign: of the mean of V. Several rounded exponentials are exactly 1, so the sum's rounding is that of a sum of BF16 values
    of one sign: a carry into the next binade rounds ties away.
    """
    generator = torch.Generator().manual_seed(0)
    top = torch.rand(rows, 1, generator=generator, dtype=torch.float64) * 2 + 2
    scores = torch.randn(rows, KEYS, generator=generator, dtype=torch.float64) * 0.5 + top - gap
    scores[:, :maxima] = top
    v = _round(torch.randn(rows, KEYS, HEAD, generator=generator, dtype=torch.float64) * 0.3 + 2.0 * sign, kind)
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = p.sum(-1, keepdim=True)
    exact = (p[:, None] @ v)[:, 0] / total
    summed = (_round(p, kind)[:, None].float() @ v.float())[:, 0].double()
    out = _round(summed / total, kind) if divided else _round(summed, kind) / total
    place = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(1e-30))) - _mantissa(kind))
    error = ((out - exact) * exact.sign() / place).mean(-1)
    return float(error.mean()), float(error.std()) / math.sqrt(rows)


def mismatch(kind: torch.dtype, seed: int = 0) -> float:
    """Mean |difference| of log-probabilities between whole GEMMs and GEMMs summed from two rounded halves, through a stack of random residual layers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(128, HIDDEN, generator=generator)
    weights = [torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5 for _ in range(LAYERS)]
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator) * 2 / HIDDEN**0.5
    target = torch.randint(0, VOCABULARY, (128, 1), generator=generator)
    whole, split = (_log_probabilities(x, weights, head, kind, halves).gather(1, target) for halves in (False, True))
    return float((whole - split).abs().double().mean())


def _log_probabilities(
    x: torch.Tensor, weights: list[torch.Tensor], head: torch.Tensor, kind: torch.dtype, halves: bool
) -> torch.Tensor:
    def linear(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, w = a.to(kind), w.to(kind)
        if not halves:
            return (a.float() @ w.float().T).to(kind).float()
        k = a.shape[1] // 2
        parts = [(a[:, s].float() @ w[:, s].float().T).to(kind).float() for s in (slice(k), slice(k, None))]
        return (parts[0] + parts[1]).to(kind).float()

    for w in weights:
        x = (x + torch.nn.functional.gelu(linear(torch.nn.functional.rms_norm(x, (HIDDEN,)), w))).to(kind).float()
    return torch.log_softmax(linear(torch.nn.functional.rms_norm(x, (HIDDEN,)), head), -1)


def attention_rows(kind: torch.dtype) -> Iterator[Row]:
    """For that compute dtype."""
    if kind is torch.float32:
        return
    name = "BF16" if kind is torch.bfloat16 else "FP16"
    for divided, word in ((False, "rounded, then divided"), (True, "divided, then rounded")):
        value, error = attention_bias(kind, divided=divided)
        yield Row(part="attention", where=f"{name} output, {word}", quantity="bias in last places", value=value, ci95=1.96 * error, bound=0.25 if not divided else None,
                  condition="two equal maxima in a row, the other scores 12 below; V of one sign")  # fmt: skip
    seeds = torch.tensor([mismatch(kind, seed) for seed in range(4)], dtype=torch.float64)
    yield Row(part="attention", where=f"{name} log-probabilities", quantity="|difference|", value=float(seeds.mean()), ci95=3.182 * float(seeds.std()) / 2,
              condition="whole GEMMs against GEMMs summed from two rounded halves, four random layers")  # fmt: skip


def _mantissa(kind: torch.dtype) -> int:
    return round(-math.log2(torch.finfo(kind).eps))


def _round(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x.float().to(kind).double()


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration (Keller Jordan, 2024), and megatron-core's (`muon_coefficient_type`)."""


def tf32(x: torch.Tensor) -> torch.Tensor:
    """FP32 rounded to nearest even in the ten mantissa bits of TF32."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


PRODUCTS: Mapping[str, tuple[torch.dtype, Callable[[torch.Tensor], torch.Tensor]]] = {
    "BF16 throughout": (torch.bfloat16, lambda x: x),
    "FP32, products of BF16 (medium)": (torch.float32, lambda x: x.bfloat16().float()),
    "FP32, products of TF32 (high)": (torch.float32, tf32),
    "FP32 (highest)": (torch.float32, lambda x: x),
}
"""In what Muon iterates -> dtype of its matrices, how a product's operands are rounded. In brackets: megatron-core's `muon_fp32_matmul_prec`."""


def newton_schulz(
    matrix: torch.Tensor, kind: torch.dtype, rounded: Callable[[torch.Tensor], torch.Tensor], steps: int = 5
) -> torch.Tensor:
    """Muon's orthogonalization of a [rows, columns] matrix, rows <= columns; FP64 result."""
    a, b, c = NEWTON_SCHULZ
    x = (matrix / (matrix.norm() + 1e-7)).to(kind)
    for _ in range(steps):
        square = rounded(x) @ rounded(x).T
        x = a * x + rounded(b * square + c * (rounded(square) @ rounded(square))) @ rounded(x)
    found: torch.Tensor = x.double()
    return found


def newton_schulz_rows(side: int = 128) -> Iterator[Row]:
    """Error of Newton-Schulz against FP64, on a random matrix."""
    matrix = torch.randn(side, 2 * side, generator=torch.Generator().manual_seed(0))
    reference = newton_schulz(matrix.double(), torch.float64, lambda x: x)
    for name, how in PRODUCTS.items():
        error = newton_schulz(matrix, *how) - reference
        value = -0.5 * math.log2(float(error.square().sum() / reference.square().sum()))
        yield Row(part="optimizer", where=f"Newton-Schulz in {name}", quantity="bits", value=value, condition=f"a random matrix of {side} by {2 * side}, five steps")  # fmt: skip
