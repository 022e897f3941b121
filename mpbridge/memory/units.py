"""One unit for all byte figures in an output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ByteUnit:
    """A binary multiple of bytes."""

    name: str
    size: int
    digits: int
    """Number of decimals shown."""

    def of(self, amount: float) -> str:
        """An amount of bytes in this unit, without the unit's name."""
        return f"{amount / self.size:,.{self.digits}f}"


MIB, GIB = ByteUnit("MiB", 2**20, 1), ByteUnit("GiB", 2**30, 2)


def unit_for(largest: int) -> ByteUnit:
    """The unit for an output whose largest figure is `largest` bytes."""
    return GIB if largest >= GIB.size else MIB


def count(number: int) -> str:
    """A number of parameters in short form: '8.03e9', '4.36e6', '82,112'."""
    for power in (9, 6):
        if number >= 10**power:
            return f"{number / 10**power:.2f}e{power}"
    return f"{number:,}"
