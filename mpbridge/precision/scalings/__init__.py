"""One table of quantization scalings: formats, blocks, stored form, hardware, GEMM sizes, libraries. Imports no framework.

A new scaling is a row of `SCALINGS`, its arithmetic in `mpbridge.numerics`, and a recipe that names it. Everything that depends on a scaling
(resolve, capability, GEMM sizes, memory, rules, emulation, audit, tables) reads that row; a scaling without a row cannot be resolved."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mpbridge.common.errors import UnknownName
from mpbridge.common.machines import Arch
from mpbridge.precision.scalings.row import (
    ELEMENTS,
    Block,
    Hardware,
    Library,
    Need,
    Option,
    Scaling,
    Sizes,
    StoredForm,
    bits_of,
    needs_transpose,
)
from mpbridge.precision.scalings.rows import ROWS

SCALINGS: Mapping[str, Scaling] = MappingProxyType({row.name: row for row in ROWS})
"""Every scaling by name."""
DEFAULTS: Mapping[int, str] = MappingProxyType({8: "tensorwise", 4: "nvfp4"})
"""Bits per element -> the scaling of a recipe that names only a format."""


def scaling(name: str) -> Scaling:
    """The row of that name. Raises UnknownName."""
    if name not in SCALINGS:
        raise UnknownName("scaling", name, SCALINGS)
    return SCALINGS[name]


def choices(bits: int) -> tuple[str, ...]:
    """Names of the scalings with elements of that many bits: the legal values of fp8_recipe and fp4_recipe."""
    return tuple(row.name for row in ROWS if any(bits_of(format) == bits for format in row.formats))


def formats(bits: int) -> tuple[str, ...]:
    """The formats of that many bits that an author can choose: the legal values of fp8 and fp4."""
    return tuple(format for format in ELEMENTS if bits_of(format) == bits)


def scaling_of_recipe(class_name: str) -> str | None:
    """The scaling of a library's recipe class; None: not in the table."""
    return next((row.name for row in ROWS if any(name == class_name for _, name in row.recipes)), None)


__all__ = [
    "DEFAULTS", "ELEMENTS", "SCALINGS", "Arch", "Block", "Hardware", "Library", "Need", "Option", "Scaling", "Sizes", "StoredForm", "bits_of", "choices",
    "formats", "needs_transpose", "scaling", "scaling_of_recipe",
]  # fmt: skip
