"""What a certificate measures: figures of operands and GEMMs from expected operands, rounding outside of the linears, and the tensors for both."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from mpbridge.common.formats import E2M1, E4M3
from mpbridge.numerics.certificates.expected import Expected, Operands
from mpbridge.numerics.operands import Side
from mpbridge.numerics.optimizers import newton_schulz
from mpbridge.planning.certificates import Row
from mpbridge.planning.closed_forms import clipping, relative_error
from mpbridge.precision.regions import Gemm

SIDES: Mapping[Gemm, tuple[Side, Side]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
"""GEMM -> its two operands."""
SIGNAL = 0.05
"""Size of the signal, relative to the tensor's RMS, whose gain is measured."""


def bits(square: float) -> float:
    """-log2 of the root of a relative squared error; infinite for none."""
    return -0.5 * math.log2(square) if square > 0 else math.inf


def operand_figures(found: Expected) -> dict[str, float]:
    """Error, alignment, clipping, flushing and floor of one operand; of draws, which are rotated back, no share of elements that clip or vanish."""
    energy = float(found.source.square().sum())
    bias = found.mean - found.source
    # the squared error of the expectation; of draws, less what their number leaves in it
    extra = 0.0 if found.draws is None else float(found.variance.sum()) / found.draws.shape[0]
    fixed = max(float(bias.square().sum()) - extra, 0.0)
    errors = {"MSE": (fixed + float(found.variance.sum())) / energy, "alignment": float((bias * found.source).sum()) / energy, "floor bits": bits(fixed / energy)}  # fmt: skip
    if found.draws is not None:
        return errors
    nonzero = max(int((found.source != 0).sum()), 1)
    # of a clipped element of an otherwise representable block
    lost = (1 - (found.mean / found.source).abs())[found.clipped & (found.mean != 0)]
    return {
        **errors,
        "clipped": float(found.clipped.double().mean()),
        "largest loss": float(lost.amax()) if lost.numel() else 0.0,
        "flushed": float(found.zero.sum()) / nonzero,
    }


def gain(operands: Operands, x: torch.Tensor, gemm: Gemm, seed: int) -> float:
    """Share of a small persistent signal s under x that reaches the mean of Q(x + s), less 1: <E Q(x+s) - E Q(x-s), s> / (2 <s, s>) - 1."""
    generator = torch.Generator().manual_seed(seed)
    size = float(x.float().square().mean().sqrt()) * SIGNAL
    up, down = ((x.float() + sign * size * torch.randn(x.shape, generator=generator.manual_seed(seed))).to(x.dtype) for sign in (1, -1))  # fmt: skip
    plus, minus = (operands.expected(one, gemm=gemm, side="dy") for one in (up, down))
    signal = plus.source - minus.source
    return float(((plus.mean - minus.mean) * signal).sum() / signal.square().sum()) - 1


def product(gemm: Gemm, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The GEMM's product of its operands: x Wt, dy W or dyt x."""
    return a @ b.T if gemm == "fprop" else a @ b if gemm == "dgrad" else a.T @ b


def gemm_figures(gemm: Gemm, a: Expected, b: Expected, exact: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Errors of a GEMM against the product of the unrounded operands.

    one step: expected error of one product; plateau: error of the mean over steps on the same tensors; the plateau with only one operand rounded
    shows which of them sets it.
    """
    reference = product(gemm, *exact)
    energy = float(reference.square().sum())
    error = product(gemm, a.mean, b.mean) - reference
    fixed = float(error.square().sum())
    second = product(gemm, a.source, b.mean) - reference
    if a.draws is None:
        noise = float(product(gemm, a.variance, b.mean.square() + b.variance).sum() + product(gemm, a.mean.square(), b.variance).sum())  # fmt: skip
        first = product(gemm, a.mean, b.source) - reference
        alone, left = {"plateau of the first alone": bits(float(first.square().sum()) / energy)}, fixed
    else:
        noise = sum(float(product(gemm, one - a.mean, b.mean).square().sum()) for one in a.draws) / len(a.draws)
        alone, left = {}, max(fixed - noise / (len(a.draws) - 1), 0.0)  # the mean of few draws keeps some noise
    return {
        "one step bits": bits((fixed + noise) / energy),
        "plateau bits": bits(left / energy),
        "alignment": float((error * reference).sum()) / energy,
        **alone,
        "plateau of the second alone": bits(float(second.square().sum()) / energy),
    }


def concentration(gemm_one: float, plateau: float, counts: tuple[int, ...]) -> list[tuple[int, float]]:
    """(number of steps averaged, bits) from the bits of one step and of the plateau: error(B)**2 = plateau**2 + (one**2 - plateau**2)/B."""
    one, floor = (0.0 if math.isinf(value) else 4.0**-value for value in (gemm_one, plateau))
    return [(count, bits(floor + max(one - floor, 0.0) / count)) for count in counts]


def bounds(operands: Operands | None, side: Side, compute: torch.dtype) -> dict[str, tuple[float, str]]:
    """Quantity -> (bound, why) that holds for every tensor whose scales are normal numbers. operands: None if it is only cast to the compute dtype."""
    if operands is None:
        worst = relative_error(round(-math.log2(torch.finfo(compute).eps)))
        return {} if compute is torch.float32 else {"MSE": (worst**2 * 1.01, f"a normal number is rounded by at most {worst:.2g} of itself")}  # fmt: skip
    made = operands.quantizer
    if made is not None and made.rule == "e4m3_blocks":
        if side == "dy" and operands.variant is not None and not operands.variant.offered:
            return {"clipped": (0.0, "no block's maximum exceeds 6")}
        worst = clipping(E4M3).worst
        reach = E2M1.largest / (1 - worst)
        return {"largest loss": (worst, f"a scale rounded down by at most 16/17 puts a block's maximum at {reach:g}, clipped to 6")}  # fmt: skip
    number = E4M3 if made is None else made.format_of(side)
    worst = relative_error(number.mantissa)
    # a code below the normal numbers errs by half the smallest; a block has at most as many as it has elements, and a maximum of half the largest
    why = f"a normal number of {number.name.upper()} is rounded by at most {worst:.4f} of itself"
    return {"MSE": (worst**2 * 1.01, why), "clipped": (0.0, "the scale maps the amax to the largest code or below")}


# --- outside of the linears: attention's output in BF16 (arXiv 2510.04212), log-probabilities computed in two ways (arXiv 2510.26788) --------
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
    place = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(1e-30)))) * torch.finfo(kind).eps
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


# --- tensors ---------------------------------------------------------------------------------------------------------------------------------
TOKENS, INNER, OUTER = 256, 256, 384
"""Multiples of the largest block, 128, and of the tiles of Transformer Engine's fused casts."""

Draw = Callable[[tuple[int, int], torch.Generator], torch.Tensor]


def _student(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Student's t with three degrees of freedom."""
    chi = torch.randn((*shape, 3), generator=generator).square().mean(-1)
    return torch.randn(shape, generator=generator) / chi.sqrt()


def _lognormal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """exp of N(0, 1.5) with random signs."""
    size, sign = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator).sign()
    return (1.5 * size).exp() * sign


def _sparse(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """5 % of the elements a hundred times as large as the others."""
    size = torch.where(torch.rand(shape, generator=generator) < 0.05, 30.0, 0.3)
    return torch.randn(shape, generator=generator) * size


KINDS: Mapping[str, Draw] = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "student-3": _student,
    "lognormal": _lognormal,
    "sparse": _sparse,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The operands of one linear, in FP32."""

    x: torch.Tensor
    """[tokens, inner]"""
    w: torch.Tensor
    """[outer, inner]"""
    dy: torch.Tensor
    """[tokens, outer]"""
    truth: torch.Tensor | None = None
    """[inner, outer]: dy = x truth + noise, so that the mean of dyt x over batches points along it."""


def drawn(kind: str, seed: int) -> Linear:
    """All three of that kind."""
    generator = torch.Generator().manual_seed(seed)
    x, w, dy = (KINDS[kind](shape, generator) for shape in ((TOKENS, INNER), (OUTER, INNER), (TOKENS, OUTER)))
    return Linear(x=x, w=0.02 * w, dy=dy)


def with_signal(linear: Linear, seed: int, size: float = 0.3) -> Linear:
    """The same with a gradient that has a part along x: what averaging over batches is to find."""
    generator = torch.Generator().manual_seed(1000 + seed)
    shape = (linear.x.shape[1], linear.dy.shape[1])
    truth = torch.randn(shape, generator=generator)
    part = linear.x @ truth
    # relative to the median: with outliers the signal is one of ordinary elements
    part = part * (size * linear.dy.abs().median() / part.abs().median())
    return Linear(x=linear.x, w=linear.w, dy=linear.dy + part, truth=truth)
