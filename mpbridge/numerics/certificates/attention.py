"""Rounding outside of the linears: attention's output in BF16 (arXiv 2510.04212), log-probabilities computed in two ways (arXiv 2510.26788)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from mpbridge.numerics.certificates.figures import bits
from mpbridge.numerics.newton_schulz import newton_schulz
from mpbridge.planning.certificates import Row

ROWS, KEYS, HEAD = 1024, 64, 64
LAYERS, HIDDEN, VOCABULARY = 4, 256, 512


def attention_bias(
    kind: torch.dtype, *, divided: bool = False, sign: float = 1.0, rows: int = ROWS
) -> tuple[float, float]:
    """(mean, standard error) of the output's error away from zero, in last places of `kind`.

    Two equal largest scores in a row, the others 12 below. divided: the weighted sum is divided by the row's sum of exponentials before it is
    rounded to `kind`, not after. sign: of the mean of V. Several rounded exponentials are exactly 1, so the sum's rounding is that of a sum of BF16 values
    of one sign: a carry into the next binade rounds ties away.
    """
    generator = torch.Generator().manual_seed(0)
    top = torch.rand(rows, 1, generator=generator, dtype=torch.float64) * 2 + 2
    scores = torch.randn(rows, KEYS, generator=generator, dtype=torch.float64) * 0.5 + top - 12
    scores[:, :2] = top
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


@functools.cache
def attention_rows(kind: torch.dtype) -> tuple[Row, ...]:
    """For that compute dtype; the same for every recipe."""
    if kind is torch.float32:
        return ()
    name, rows = "BF16" if kind is torch.bfloat16 else "FP16", []
    for divided, word in ((False, "rounded, then divided"), (True, "divided, then rounded")):
        value, error = attention_bias(kind, divided=divided)
        rows.append(Row(part="attention", where=f"{name} output, {word}", quantity="bias in last places", value=value, ci95=1.96 * error, bound=0.25 if not divided else None,
                        condition="two equal maxima in a row, the other scores 12 below; V of one sign"))  # fmt: skip
    seeds = torch.tensor([mismatch(kind, seed) for seed in range(4)], dtype=torch.float64)
    rows.append(Row(part="attention", where=f"{name} log-probabilities", quantity="|difference|", value=float(seeds.mean()), ci95=3.182 * float(seeds.std()) / 2,
                    condition="whole GEMMs against GEMMs summed from two rounded halves, four random layers"))  # fmt: skip
    return tuple(rows)


def _mantissa(kind: torch.dtype) -> int:
    return round(-math.log2(torch.finfo(kind).eps))


def _round(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x.float().to(kind).double()


PRODUCTS = {"BF16 throughout": "bf16", "FP32, products of BF16 (medium)": "bf16 products", "FP32, products of TF32 (high)": "tf32", "FP32 (highest)": "fp32"}  # fmt: skip
"""In what Muon iterates -> its name in `newton_schulz`. In brackets: megatron-core's `muon_fp32_matmul_prec`."""


def newton_schulz_rows(side: int = 128) -> Iterator[Row]:
    """Error of Newton-Schulz against FP64, on a random matrix."""
    matrix = torch.randn(side, 2 * side, generator=torch.Generator().manual_seed(0))
    reference = newton_schulz(matrix, "fp64")
    for name, kind in PRODUCTS.items():
        error = newton_schulz(matrix, kind) - reference
        yield Row(part="optimizer", where=f"Newton-Schulz in {name}", quantity="bits", value=bits(float(error.square().sum() / reference.square().sum())),
                  derivation="exact", condition=f"a random matrix of {side} by {2 * side}, five steps")  # fmt: skip
