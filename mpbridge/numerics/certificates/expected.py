"""Expectation and variance of a quantized operand: over stochastic rounding by the probabilities of its outcomes, not by draws."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpbridge.common.formats import E2M1, E4M3
from mpbridge.numerics.kernels import sylvester
from mpbridge.numerics.operands import COPY_OF, Operand, OperandCopy, Side
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.numerics.scales import DEFAULT_RELEASE, Release, peaks_over, scale_from_amax
from mpbridge.planning.certificates import Variant
from mpbridge.precision.policy import PrecisionPolicy, Quant
from mpbridge.precision.regions import Gemm

SLOT = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """An operand as its GEMM reads it, in FP64."""

    source: torch.Tensor
    """What was rounded: the tensor, or the tensor rotated by the Hadamard transform."""
    mean: torch.Tensor
    """E[q] of every element."""
    variance: torch.Tensor
    """Var[q] of every element; zero if rounding is deterministic."""
    zero: torch.Tensor
    """Probability that the element becomes zero."""
    clipped: torch.Tensor
    """Whether the element is beyond the largest code."""
    scale: torch.Tensor
    """Multiplier before the cast, of the source's shape or a scalar."""
    draws: torch.Tensor | None = None
    """Independent results, [draws, ...], if the elements of one result depend on each other (MS-EDEN); mean and variance are then theirs."""


_FOUR_OVER_SIX_SINCE = (2, 17)


class Operands:
    """Expected operands of one linear under one `Quant`.

    release: of Transformer Engine; variant: of NVFP4, or None. Raises what `Quantizer` raises.
    """

    def __init__(self, quant: Quant, *, release: Release = DEFAULT_RELEASE, variant: Variant | None = None) -> None:
        self.quant, self.variant = quant, variant
        if variant is not None:
            self.quant = _with(quant, variant)
            if "four_over_six" in dict(variant.options):
                release = max(release, _FOUR_OVER_SIX_SINCE)
        self._draws = None if variant is None or not variant.eden else Eden(variant)
        self.quantizer: Quantizer | None = None
        if quant.row.emulation == "torchao":
            return
        cpu = torch.device("cpu")
        how: dict[str, Any] = {"randomness": Randomness(0, cpu), "device": cpu, "release": release, "compiled": False}
        self.quantizer = Quantizer(self.quant, [SLOT], **how)
        if variant is not None:
            vary(self.quantizer, variant)

    def stochastic(self, side: Side) -> bool:
        """Whether that side is rounded stochastically, element by element."""
        made = self.quantizer
        sr = made is not None and made.rule == "e4m3_blocks" and made.options.get("stochastic_rounding", True)
        return bool(sr) and side == "dy"

    def expected(self, x: torch.Tensor, *, gemm: Gemm, side: Side) -> Expected:
        """The operand that `gemm` reads; x: [tokens, features] or a weight, in the compute dtype."""
        if gemm in self.quant.row.high:
            return exact(x)
        if self.quantizer is None:
            return self._rowwise(x, gemm, side)
        if self._draws is not None and side == "dy":
            # rotated back; the moments have no short closed form here: mean and variance over draws
            drawn = torch.stack([self._draws.drawn(x, COPY_OF[gemm, side]).double() for _ in range(EDEN_DRAWS)])
            return replace(exact(x), mean=drawn.mean(0), variance=drawn.var(0), draws=drawn)
        made, number = self.quantizer, self.quantizer.format_of(side)
        if self.quant.row.history:  # a steady state: the stored scale is that of this very tensor
            table, index = made._place(SLOT, side)
            table.scale[index] = number.largest / x.abs().amax().float()
        operand = made.operand(x, slot=SLOT, gemm=gemm, side=side)
        source, multiplier = made.explain(x, operand, gemm=gemm, side=side)
        drawn = operand.dequantized().double()
        scaled = source.double() * multiplier.double()
        clipped = scaled.abs() > number.largest * (1 + 2.0**-20)
        if not self.stochastic(side):
            return replace(exact(source), mean=drawn, zero=((drawn == 0) & (source != 0)).double(), clipped=clipped & (drawn != 0), scale=multiplier)  # fmt: skip
        mean, variance, zero = stochastic_e2m1(scaled)
        unit = 1.0 / multiplier.double()
        return Expected(source=source.double(), mean=mean * unit, variance=variance * unit**2, zero=zero * (source != 0), clipped=clipped, scale=multiplier)  # fmt: skip

    def _rowwise(self, x: torch.Tensor, gemm: Gemm, side: Side) -> Expected:
        """torchao's: one power-of-two scale per line of the contraction (float8_utils.py tensor_to_scale, 0.18)."""
        # x and w of fprop contract along their rows; w of dgrad and both operands of wgrad down their columns
        axis = 1 if COPY_OF[gemm, side] == "row" else 0
        amax = x.abs().amax(axis, keepdim=True).float().clamp_min(1e-12)
        multiplier = scale_from_amax(amax, E4M3.largest, power_of_two=True).expand(x.shape)
        codes = (x.float() * multiplier).clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)
        mean = codes.double() / multiplier.double()
        return replace(exact(x), mean=mean, zero=((mean == 0) & (x != 0)).double(), scale=multiplier)


def varied(policy: PrecisionPolicy, variant: Variant) -> PrecisionPolicy:
    """The policy with the variant's options in its NVFP4 regions of one rule; `vary` does the rest to an emulation's quantizers."""
    regions = (
        replace(one, quant=_with(one.quant, variant)) if one.quant is not None and one.quant.scaling == "nvfp4" else one
        for one in policy.regions
    )
    return replace(policy, regions=tuple(regions))


def _with(quant: Quant, variant: Variant) -> Quant:
    return replace(quant, options=tuple({**dict(quant.options), **dict(variant.options)}.items()))


def vary(quantizer: Quantizer, variant: Variant) -> None:
    """Applies the variant's rules to a quantizer, also one that trains (`Emulation.quantizers`): for gradients only, from now on."""
    plain, changed = quantizer.rules, replace(quantizer.rules, **dict(variant.rules))
    operand, eden = quantizer.operand, Eden(variant) if variant.eden else None

    def changing(x: torch.Tensor, *, gemm: Gemm, side: Side, **more: Any) -> Operand:
        if eden is not None and side == "dy":
            return Operand(eden.drawn(x, COPY_OF[gemm, side]))
        quantizer.rules = changed if side == "dy" else plain
        return operand(x, gemm=gemm, side=side, **more)

    quantizer.operand = changing  # type: ignore[method-assign]


def exact(x: torch.Tensor) -> Expected:
    """An operand that is not rounded."""
    value = x.double()
    no = torch.zeros_like(value)
    return Expected(source=value, mean=value, variance=no, zero=no, clipped=no > 0, scale=torch.ones(()))


def cast(x: torch.Tensor, kind: torch.dtype) -> Expected:
    """An operand that is only cast to the compute dtype. x: FP32."""
    found = exact(x)
    mean = x.to(kind).double()
    return replace(found, mean=mean, zero=((mean == 0) & (x != 0)).double(), clipped=~mean.isfinite())


def stochastic_e2m1(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(E, Var, P(0)) of `codes.round_stochastic`, over all 256 values of its random byte: up with floor(256 f)/256, f the part of a step."""
    size = scaled.abs().clamp_max(E2M1.largest)
    spacing = torch.where(size >= 4, 2.0, torch.where(size >= 2, 1.0, 0.5)).double()
    low = torch.floor(size / spacing)
    up = torch.floor((size / spacing - low) * 256) / 256
    mean = torch.copysign(((low + up) * spacing).clamp_max(E2M1.largest), scaled)
    return mean, up * (1 - up) * spacing**2, torch.where(low == 0, 1 - up, 0.0)


# --- MS-EDEN, arXiv 2601.22813, section 3 ------------------------------------------------------------------------------------------------
EDEN_DRAWS = 8
EDEN_ROTATION, EDEN_CLIP, EDEN_BOUND = 128, 0.93, 256.0
"""Length of the rotation, where the block maximum is put, and the largest block scale, which leaves the correction room."""


def ms_eden(
    x: torch.Tensor, generator: torch.Generator, *, signs: torch.Tensor | None = None, rotated: bool = False
) -> torch.Tensor:
    """x quantized along its rows: rotated, rounded to nearest, and scaled by <r, r>/<r, q> of each rotation, stochastically in E4M3.

    x: fp32 with a last axis of a multiple of 128. signs: of the rotation; None: drawn. rotated: leave the result rotated.
    """
    n = EDEN_ROTATION
    drawn = torch.randint(0, 2, (n,), generator=generator).float() * 2 - 1
    signs = drawn if signs is None else signs
    matrix = sylvester(n) / math.sqrt(n)
    rows = (x.reshape(-1, n) * signs) @ matrix
    blocks = rows.reshape(-1, 16)
    target = E2M1.largest * 16 / 17 / EDEN_CLIP
    encode = EDEN_BOUND * target / peaks_over(blocks)
    scale = (blocks.abs().amax(1, keepdim=True) / target * encode).to(torch.float8_e4m3fn).float()
    scaled = blocks * (encode / scale.clamp_min(1e-30))
    size = scaled.abs().clamp_max(E2M1.largest)
    spacing = torch.where(size >= 4, 2.0, torch.where(size >= 2, 1.0, 0.5))
    codes = torch.copysign((torch.round(size / spacing) * spacing).clamp_max(E2M1.largest), scaled)
    value = (codes * scale / encode).reshape(-1, n)
    correction = (rows * rows).sum(1) / (rows * value).sum(1).clamp_min(1e-30)
    wanted = scale * correction.repeat_interleave(n // 16)[:, None]
    random = torch.rand(wanted.shape, generator=generator)
    value = (codes * _stochastic_e4m3(wanted, random) / encode).reshape(-1, n)
    return (value if rotated else (value @ matrix.t()) * signs).reshape(x.shape)


class Eden:
    """Draws of MS-EDEN under one of its variants."""

    def __init__(self, variant: Variant) -> None:
        self._generator = torch.Generator().manual_seed(5)
        self._signs = torch.ones(EDEN_ROTATION) if variant.eden == "fixed" else None

    def drawn(self, x: torch.Tensor, copy: OperandCopy) -> torch.Tensor:
        """x, [tokens, features], in FP32, quantized along the features (row copy) or the tokens; both multiples of 128."""
        source = x.float() if copy == "row" else x.t().float()
        found = ms_eden(source, self._generator, signs=self._signs)
        return found if copy == "row" else found.t()


def _stochastic_e4m3(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    exponent = torch.frexp(value.clamp_min(2.0 ** (1 - E4M3.bias))).exponent - 1
    step = torch.exp2((exponent - E4M3.mantissa).float())
    return (torch.floor(value / step + random) * step).clamp_max(E4M3.largest)
