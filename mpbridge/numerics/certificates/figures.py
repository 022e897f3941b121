"""Figures of operands and GEMMs from expected operands."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from mpbridge.common.formats import E2M1, E4M3
from mpbridge.numerics.certificates.expected import Expected, Operands
from mpbridge.numerics.operands import Side
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
    fixed = _unbiased(found, bias)
    errors = {"MSE": (fixed + float(found.variance.sum())) / energy, "alignment": float((bias * found.source).sum()) / energy, "floor bits": bits(fixed / energy)}  # fmt: skip
    if found.draws is not None:
        return errors
    nonzero = max(int((found.source != 0).sum()), 1)
    return {
        **errors,
        "clipped": float(found.clipped.double().mean()),
        "largest loss": _largest_loss(found),
        "flushed": float(found.zero.sum()) / nonzero,
    }


def _largest_loss(found: Expected) -> float:
    """Largest relative loss of a clipped element of an otherwise representable block."""
    lost = 1 - (found.mean / found.source).abs()
    kept = found.clipped & (found.mean != 0)
    return float(lost[kept].amax()) if bool(kept.any()) else 0.0


def _unbiased(found: Expected, bias: torch.Tensor) -> float:
    """The squared error of the expectation; of draws, less what their number leaves in it."""
    extra = 0.0 if found.draws is None else float(found.variance.sum()) / found.draws.shape[0]
    return max(float(bias.square().sum()) - extra, 0.0)


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
        if operands.changed_on(side):
            return {"clipped": (0.0, "no block's maximum exceeds 6")}
        worst = clipping(E4M3).worst
        reach = E2M1.largest / (1 - worst)
        return {"largest loss": (worst, f"a scale rounded down by at most 16/17 puts a block's maximum at {reach:g}, clipped to 6")}  # fmt: skip
    number = E4M3 if made is None else made.format_of(side)
    worst = relative_error(number.mantissa)
    # a code below the normal numbers errs by half the smallest; a block has at most as many as it has elements, and a maximum of half the largest
    why = f"a normal number of {number.name.upper()} is rounded by at most {worst:.4f} of itself"
    return {"MSE": (worst**2 * 1.01, why), "clipped": (0.0, "the scale maps the amax to the largest code or below")}
