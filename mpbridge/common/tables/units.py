"""Bytes and counts as text: the only formatter."""

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


GIB = ByteUnit("GiB", 2**30, 2)
_UNITS = (GIB, ByteUnit("MiB", 2**20, 1), ByteUnit("KiB", 2**10, 1), ByteUnit("B", 1, 0))


def unit_for(largest: float) -> ByteUnit:
    """The unit for figures of which `largest` bytes is the largest."""
    return next((unit for unit in _UNITS if abs(largest) >= unit.size), _UNITS[-1])


def size(amount: float) -> str:
    """An amount of bytes in its own unit, as in '79.65 GiB'."""
    unit = unit_for(amount)
    return f"{unit.of(amount)} {unit.name}"


def count(number: int) -> str:
    """A number of parameters in short form: '8.03e9', '4.36e6', '82,112'."""
    for power in (9, 6):
        if number >= 10**power:
            return f"{number / 10**power:.2f}e{power}"
    return f"{number:,}"


def processes(number: int) -> str:
    """'1 process', '2 processes'."""
    return f"{number} process{'es' if number > 1 else ''}"
