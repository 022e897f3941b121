"""What happens to the maximum of a block when its scale is rounded: clipping, and what a second pass moves.

The assumption, where one is needed: the logarithm of a block's amax is uniform over an octave, as that of any quantity spread over several octaves is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpbridge.common.formats import NumberFormat


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
    if v > m/position, and loses 1 - m/(v position). With log v uniform its density is 1/(v ln 2); the integrals over f are elementary.
    """
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
    the code is 3, so v' = d/2: a tie, which goes to zero.
    """
    d = scale.smallest
    third = code.largest / 2
    return d / 2, d * (third + 0.5) / code.largest


def relative_error(mantissa: int) -> float:
    """Largest relative error of rounding a normal number to nearest in that many bits: half a place over (1 + half a place)."""
    return 0.5 / float(2**mantissa + 0.5)
