"""Closed forms of what rounding does to scales (clipping, and what a second pass moves), updates and optimizer states. Pure arithmetic.

Of scales, where an assumption is needed: the logarithm of a block's amax is uniform over an octave, as that of any quantity spread over several octaves is.
Of updates, from the run's learning rate and weight scale: Adam's m/sqrt(v) under pure gradient noise is normal with standard deviation sqrt((1 - b1)/(1 + b1)); weights are normal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpbridge.common.formats import E4M3, DType, NumberFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """What the largest elements lose if scales are rounded to nearest and codes saturate."""

    share: float
    """Of the elements: their scale was rounded down, so that they exceed the largest code."""
    mean: float
    """Relative loss, mean over all of them."""
    square: float
    """Mean of its square."""
    worst: float
    """Largest relative loss of an element, if the scale is a normal number."""


def clipping(scale: NumberFormat, position: float = 1.0) -> Clipping:
    """For block scales in that format, rounded to nearest. position: |x| / amax of the elements in question, above 1 - `worst`.

    A scale v = m + f (in units of its last place; m from 2**p to 2**(p+1) - 1) is rounded to m for f < 1/2; an element then exceeds the largest code
    if v > m/position, and loses 1 - m/(v position). With log v uniform its density is 1/(v ln 2); the integrals over f are elementary."""
    share = mean = square = 0.0
    for m in range(2**scale.mantissa, 2 ** (scale.mantissa + 1)):
        kept, top = m / position, m + 0.5
        if kept >= top:
            continue
        first, second = 1 / kept - 1 / top, 1 / kept**2 - 1 / top**2
        part = math.log2(top / kept)
        share += part
        mean += part - kept * first / math.log(2)
        square += part - 2 * kept * first / math.log(2) + kept * kept * second / (2 * math.log(2))
    return Clipping(share=share, mean=mean, square=square, worst=0.5 / (2**scale.mantissa + 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondPass:
    """Blocks whose power-of-two scale, rounded up, halves when the dequantized block is quantized again."""

    low: float
    """amax/scale above this (half of the largest code) ..."""
    high: float
    """... up to this: the maximum is rounded to `low`, which the next smaller scale can hold."""
    closed: bool
    """Whether `high` itself belongs to them: a tie that goes to the even code `low`."""

    @property
    def share(self) -> float:
        """Of blocks, with log amax uniform."""
        return math.log2(self.high / self.low)

    @property
    def condition(self) -> str:
        """The interval in words."""
        return f"amax/scale in ({self.low:g}, {self.high:g}{']' if self.closed else ')'}"


def second_pass(number: NumberFormat) -> SecondPass:
    """For elements in that format."""
    low = number.largest / 2
    spacing = 2.0 ** (math.floor(math.log2(low)) - number.mantissa)
    return SecondPass(low=low, high=low + spacing / 2, closed=round(low / spacing) % 2 == 0)


def nvfp4_second_pass(code: NumberFormat, scale: NumberFormat) -> tuple[float, float]:
    """(low, high] of v = S amax / 6 for which a block that one pass keeps becomes zero on the second; v is at most `high` in the subnormals.

    The smallest scale d holds v in (d/2, d]; the maximum's code is that of 6 v/d, and the second pass computes v' = code d / 6. At 3 <= 6 v/d <= 3.5
    the code is 3, so v' = d/2: a tie, which goes to zero."""
    d = scale.smallest
    third = code.largest / 2
    return d / 2, d * (third + 0.5) / code.largest


def relative_error(mantissa: int) -> float:
    """Largest relative error of rounding a normal number to nearest in that many bits: half a place over (1 + half a place)."""
    return 0.5 / float(2**mantissa + 0.5)


_ROOT2 = math.sqrt(2.0)
_SMALLEST_EXPONENT = {DType.FP16: -14, DType.BF16: -126, DType.FP32: -126}
_OCTAVE = tuple(2 ** ((i + 0.5) / 64) for i in range(64))
"""Mantissas of numbers whose logarithm is uniform."""
_STORED = {DType.FP16: 32752.0, DType.UINT8: E4M3.largest}
"""Moment dtype -> the value to which Transformer Engine's FusedAdam scales the tensor's amax (2.11 pytorch/optimizers/fused_adam.py)."""
_FLUSHED = {DType.FP16: 2.0**-25, DType.UINT8: E4M3.smallest / 2}
"""Moment dtype -> scaled values up to this become zero (a tie goes to even)."""


def mantissa_of(kind: DType) -> int:
    """Stored mantissa bits; FP8 moments are E4M3."""
    return E4M3.mantissa if kind is DType.UINT8 else kind.mantissa or 0


def ratio_of(beta1: float, step: int | None = None) -> float:
    """Standard deviation of m/sqrt(v) under pure noise, both without bias: 1 at step 1, and after many steps, or without one, sqrt((1 - b1)/(1 + b1))."""
    left = 0.0 if step is None else beta1**step
    return math.sqrt((1 - beta1) * (1 + left) / ((1 + beta1) * (1 - left)))


def half_gap(exponent: int, kind: DType) -> float:
    """Half the distance to the next larger number from numbers of that binary exponent: smaller changes are lost."""
    return 2.0 ** (max(exponent, _SMALLEST_EXPONENT.get(kind, -126)) - mantissa_of(kind) - 1)


def lost_updates(lr: float, sigma: float, kind: DType, *, beta1: float = 0.9) -> float:
    """Share of updates that leave a weight stored in `kind` where it is. sigma: standard deviation of the weights.

    Exact under the model: |w| is in an octave with a probability of two error functions, and there the update is lost below half a gap."""
    if lr <= 0 or sigma <= 0:
        return 1.0 if lr <= 0 else 0.0
    return sum(share * math.erf(gap / (_ROOT2 * ratio_of(beta1) * lr)) for share, gap in _octaves(sigma, kind))


def movement_kept(lr: float, sigma: float, kind: DType, *, beta1: float = 0.9) -> float:
    """E[stored movement * intended movement] / E[intended movement squared]; 1 if nothing is lost on average."""
    if lr <= 0 or sigma <= 0:
        return 0.0
    return sum(share * _kept(gap / (ratio_of(beta1) * lr)) for share, gap in _octaves(sigma, kind))


def _octaves(sigma: float, kind: DType) -> Iterable[tuple[float, float]]:
    """(share of normal weights in an octave, half the gap there), down to 2**-40 sigma."""
    top = math.floor(math.log2(sigma)) + 4
    for exponent in range(top, top - 44, -1):
        share = math.erf(2.0 ** (exponent + 1) / (sigma * _ROOT2)) - math.erf(2.0**exponent / (sigma * _ROOT2))
        yield share, half_gap(exponent, kind)


def _kept(gap: float) -> float:
    """`movement_kept` on one grid of spacing 2 gap, in units of the update's standard deviation."""
    if gap < 0.05:
        return 1.0
    density = (math.exp(-(((2 * k + 1) * gap) ** 2) / 2) for k in range(math.ceil(9 / gap)))
    return 4 * gap * sum(density) / math.sqrt(2 * math.pi)


def rate_for(share: float, sigma: float, kind: DType, *, beta1: float = 0.9) -> float:
    """The learning rate at which that share of updates is lost."""
    low, high = sigma * 2.0**-40, sigma * 2.0**10
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if lost_updates(middle, sigma, kind, beta1=beta1) > share else (low, middle)
    return high


def first_moment_stalls(kind: DType, beta1: float) -> float:
    """Probability that a step leaves a first moment stored in `kind` where it is, gradients being noise around it."""
    total = 0.0
    for root_v in _OCTAVE:
        sigma = ratio_of(beta1) * root_v
        total += sum(share * math.erf(gap / ((1 - beta1) * root_v * _ROOT2)) for share, gap in _octaves(sigma, kind))
    return total / len(_OCTAVE)


def second_moment_stalls(kind: DType, beta2: float) -> float:
    """Probability that a step leaves a second moment v stored in `kind` where it is: |g*g/v - 1| < half a gap / (v (1 - b2)), g*g/v chi-square."""
    total = 0.0
    for mantissa in _OCTAVE:
        reach = 2.0 ** -(mantissa_of(kind) + 1) / (mantissa * (1 - beta2))
        total += math.erf(math.sqrt((1 + reach) / 2)) - math.erf(math.sqrt(max(0.0, 1 - reach) / 2))
    return total / len(_OCTAVE)


def second_moment_can_fall(kind: DType, beta2: float) -> bool:
    """Whether a second moment falls when its gradient is zero: not if (1 - b2) v is below half a gap for every mantissa."""
    return 1 - beta2 > 2.0 ** -(mantissa_of(kind) + 2)


def flush_ratio(kind: DType) -> float | None:
    """|g| below the tensor's largest over this loses its second moment (one scale per tensor); None: never."""
    return math.sqrt(_STORED[kind] / _FLUSHED[kind]) if kind in _STORED else None


def mean_square_rounding(kind: DType) -> float:
    """Mean squared relative error of rounding to nearest, with log |x| uniform: h*h/3 * E[1/t**2], t the mantissa, h half a place."""
    return 2.0 ** (-2 * (mantissa_of(kind) + 1)) / 3 * (3 / 8) / math.log(2)


def accumulation_bits(kind: DType, count: int) -> float:
    """-log2 of the relative error of a sum of `count` zero-mean gradients in a buffer of that dtype; infinite for one."""
    error = mean_square_rounding(kind) * sum(range(2, count + 1)) / count
    return -0.5 * math.log2(error) if error else math.inf


def accumulation_stops_at(kind: DType) -> int:
    """Number of equal gradients from which on adding one more no longer changes the sum: half a gap of the sum exceeds it."""
    return int(2 ** (mantissa_of(kind) + 1))


def warning(lr: float, sigma: float, kind: DType, *, beta1: float = 0.9) -> str:
    """What a run with such weights loses, in one sentence."""
    lost, kept = (call(lr, sigma, kind, beta1=beta1) for call in (lost_updates, movement_kept))
    half = rate_for(0.5, sigma, kind, beta1=beta1)
    return (
        f"at lr {lr:.3g} {lost:.0%} of updates of {kind.short.upper()} weights (standard deviation {sigma:.3g}) are lost, and {kept:.0%} of the "
        f"intended movement is kept; half are lost at lr {half:.2g}"
    )
