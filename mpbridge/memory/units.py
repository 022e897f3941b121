"""One unit for everything that an answer says about bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ByteUnit:
    """A binary multiple of bytes."""

    name: str
    size: int
    digits: int
    """Decimals that are shown."""

    def of(self, amount: float) -> str:
        """Bytes in this unit, without its name."""
        return f"{amount / self.size:,.{self.digits}f}"


MIB, GIB = ByteUnit("MiB", 2**20, 1), ByteUnit("GiB", 2**30, 2)


def unit_for(largest: int) -> ByteUnit:
    """The unit in which an answer is given whose largest figure is that many bytes."""
    return GIB if largest >= GIB.size else MIB


def count(number: int) -> str:
    """Parameters in short: '8.03e9', '4.36e6', '82,112'."""
    for power in (9, 6):
        if number >= 10**power:
            return f"{number / 10**power:.2f}e{power}"
    return f"{number:,}"
