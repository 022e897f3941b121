"""What quantization does to each tensor: errors, underflow and saturation, amaxes and stale scales, collected while a model runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.common.formats import NumberFormat
from mpbridge.numerics.kernels import amax_of
from mpbridge.numerics.operands import COPY_OF, Operand, Side
from mpbridge.numerics.quantizer import Quantizer
from mpbridge.numerics.scales import FP32_LARGEST
from mpbridge.precision.regions import Gemm

BINS = (-32, 16)
"""First and last power of two of the histograms of row amaxes in units of the codes; values outside are counted in the end bins."""
ELEMENTS, MINIMUM = 1 << 16, 64
"""Elements of a tensor that one sample looks at, in evenly spaced rows, but at least MINIMUM rows: enough for a median, and cheap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Statistics of one operand at one step. Shares are of the nonzero elements, errors of the finite ones."""

    relative_error: float
    """|q - x| / |x|, Frobenius norms."""
    row_error: float
    """Median over rows of the same: an outlier cannot hide the error that it causes in other rows."""
    flushed: float
    """Share of nonzero elements that became zero."""
    saturated: float
    """Share of elements beyond the format's largest value after scaling, excluding flushed ones."""
    sqnr: float
    """Signal to quantization noise in dB: -20 log10(relative_error)."""
    amax: float
    scale: float
    """The multiplier before the cast; with blocks, the median one."""
    nonfinite: int
    """Infinities and NaN among the elements."""
    staleness: float | None
    """Delayed scaling: log2 of (the scale for this amax / the stored scale); 0 is fresh, below 0 saturates, above 0 wastes range."""
    ranges: tuple[int, ...]
    """Rows by floor(log2) of their amax in units of the codes, from BINS[0] to BINS[1]; rows of zeros are excluded."""


@dataclass(slots=True, kw_only=True)
class Track:
    """All samples of one operand."""

    slot: str
    side: Side
    copy: str
    gemms: list[Gemm] = field(default_factory=list)
    format: str
    scaling: str
    steps: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def summary(self, *, warmup: int = 0) -> dict[str, Any]:
        """Plain data: means over the samples after the first `warmup` steps (all of them if there are no others), and the series."""
        late = [s for step, s in zip(self.steps, self.samples, strict=True) if step > warmup] or self.samples
        stale = [s.staleness for s in late if s.staleness is not None]
        named = {name: getattr(self, name) for name in ("slot", "side", "copy", "gemms", "format", "scaling")}
        means = ("relative_error", "row_error", "flushed", "saturated", "sqnr")
        return {
            "tensor": f"{self.slot}.{self.side}",
            **named,
            "samples": len(late),
            **{name: _mean(getattr(s, name) for s in late) for name in means},
            "nonfinite": sum(s.nonfinite for s in late),
            "staleness": max(stale, key=abs) if stale else None,
            "amax": [[step, sample.amax] for step, sample in zip(self.steps, self.samples, strict=True)],
            "ranges": [sum(column) for column in zip(*(s.ranges for s in late), strict=True)],
        }


def _mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


class Statistics:
    """An observer of an Emulation that samples operands at some steps.

    every: samples one step in `every`, and only its first micro-batch; call `step` with the step's number before each. elements: see ELEMENTS.
    """

    def __init__(self, *, every: int = 1, elements: int = ELEMENTS) -> None:
        self.every, self.elements, self.now = every, elements, 0
        self.tracks: dict[tuple[str, Side, str], Track] = {}
        self._seen: set[tuple[str, Side, str]] = set()

    def step(self, number: int) -> None:
        """Sets the step (counted from 1) that the following operands belong to."""
        self.now = number
        self._seen.clear()

    def drop(self) -> None:
        """Forgets what was sampled of this step."""
        for key in self._seen:
            track = self.tracks[key]
            del track.steps[-1], track.samples[-1]
            if not track.samples:
                del self.tracks[key]

    @property
    def active(self) -> bool:
        """Whether operands of this step are sampled."""
        return self.now % self.every == 1 % self.every or self.every == 1

    def see(
        self, slot: str, gemm: Gemm, side: Side, high: torch.Tensor, operand: Operand, quantizer: Quantizer
    ) -> None:
        """Samples one operand, once per step."""
        copy = COPY_OF[gemm, side]
        key = (slot, side, copy)
        if not self.active or key in self._seen or high.numel() == 0:
            return
        self._seen.add(key)
        track = self.tracks.get(key)
        if track is None:
            number = quantizer.format_of(side)
            gemms = [g for (g, s), c in COPY_OF.items() if s == side and (c == copy or quantizer.shares_copies(side))]
            facts: dict[str, Any] = {"format": number.name, "scaling": quantizer.quant.scaling}
            track = self.tracks[key] = Track(slot=slot, side=side, copy=copy, gemms=gemms, **facts)
        track.steps.append(self.now)
        track.samples.append(look(high, operand, quantizer, gemm=gemm, side=side, elements=self.elements))

    def summary(self, *, warmup: int = 0) -> list[dict[str, Any]]:
        """`Track.summary` of every operand, in the order in which they were first seen."""
        return [track.summary(warmup=warmup) for track in self.tracks.values()]


def look(
    high: torch.Tensor, operand: Operand, quantizer: Quantizer, *, gemm: Gemm, side: Side, elements: int = ELEMENTS
) -> Sample:
    """Statistics of one operand, from about `elements` of it in whole rows; the amax is that of the whole tensor.

    Column copies are sampled along their blocks, so a "row" is then a column of the tensor.
    """
    column = COPY_OF[gemm, side] == "column" and not quantizer.quant.row.per_tensor
    lines, length = (high.shape[1], high.shape[0]) if column else (high.shape[0], high.shape[1])
    # square blocks span lines, so the whole weight is sampled
    whole = side == "w" and quantizer.shares_copies("w") and not quantizer.quant.row.per_tensor
    picked = torch.arange(lines) if whole else spread(lines, max(MINIMUM, elements // max(length, 1)), high.device)
    x, multiplier = quantizer.explain(high[:, picked] if column else high[picked], operand, gemm=gemm, side=side)
    q = (operand.values[:, picked] if column else operand.values[picked]).float()
    q = q if operand.alpha is None else q * _of_lines(operand.alpha, picked)
    if column:
        x, q, multiplier = x.t(), q.t(), multiplier.t()
    peak = high.abs().amax().float()
    amax = amax_of(high) if peak.isnan() else peak
    finite = x.isfinite()
    # of the whole tensor: a single element may be in a row that is not sampled
    nonfinite = 0 if peak.isfinite() else int((~high.isfinite()).sum())
    x, q = torch.where(finite, x, 0.0), torch.where(finite & q.isfinite(), q, 0.0)
    scaled = (x * multiplier).abs()
    number = quantizer.format_of(side)
    count, relative, row, flushed = errors(x, q)
    return Sample(
        relative_error=relative,
        row_error=row,
        flushed=flushed,
        # a block whose scale vanished is flushed, regardless of how large its codes would be
        saturated=int(((scaled > number.largest * (1 + 2.0**-20)) & (q != 0)).sum()) / count,
        sqnr=-20 * math.log10(relative) if relative else math.inf,
        amax=float(amax),
        scale=float(multiplier.median()),
        nonfinite=nonfinite,
        staleness=_staleness(quantizer, number, float(amax), multiplier),
        ranges=_ranges(scaled.amax(1)),
    )


def errors(x: torch.Tensor, q: torch.Tensor) -> tuple[int, float, float, float]:
    """(nonzero elements of x, at least 1; |q - x| / |x|; the median over rows of the same; share of those elements that are zero in q), both finite."""
    nonzero = x != 0
    count = max(int(nonzero.sum()), 1)
    # double precision: squares of gradients exceed fp32's range
    signal, noise = x.double().square().sum(1), (q.double() - x.double()).square().sum(1)
    relative = math.sqrt(float(noise.sum() / signal.sum())) if float(signal.sum()) else 0.0
    each = (noise / signal)[signal > 0].sqrt()
    return count, relative, float(each.median()) if each.numel() else 0.0, int((nonzero & (q == 0)).sum()) / count


def _of_lines(alpha: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """A scalar factor, or the factors of the picked lines."""
    if alpha.dim() < 2:
        return alpha
    return alpha[:, picked] if alpha.shape[0] == 1 else alpha[picked]


def spread(count: int, wanted: int, device: torch.device) -> torch.Tensor:
    """Up to `wanted` positions, evenly spaced over `count`."""
    return torch.linspace(0, count - 1, min(count, wanted), device=device).round().long()


def _ranges(amaxes: torch.Tensor) -> tuple[int, ...]:
    low, high = BINS
    positive = amaxes[(amaxes > 0) & amaxes.isfinite()]
    powers = torch.frexp(positive).exponent - 1
    return tuple(torch.bincount((powers.clamp(low, high) - low).long(), minlength=high - low + 1).tolist())


def _staleness(quantizer: Quantizer, number: NumberFormat, amax: float, multiplier: torch.Tensor) -> float | None:
    if not quantizer.quant.row.history or not (amax > 0 and math.isfinite(amax)):
        return None
    wanted = number.largest * 2.0**-quantizer.quant.margin / amax
    # a scale is at most fp32's largest number, even for a vanishing amax
    return math.log2(min(wanted, FP32_LARGEST) / min(float(multiplier), FP32_LARGEST))
