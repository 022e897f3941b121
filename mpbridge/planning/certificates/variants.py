"""NVFP4 otherwise: what Transformer Engine can be told to do, and what only exists elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A change of a scaling that certificates compare with."""

    name: str
    words: str
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the scaling (precision/scalings/rows.py)."""
    rules: tuple[tuple[str, Any], ...] = ()
    """Fields of `scales.Rules` that no release has; for gradients only, since rounding to nearest needs no room above a block's maximum, and is
    biased upwards by it."""
    eden: str = ""
    """'fixed' or 'redrawn': gradients by MS-EDEN with such signs."""

    @property
    def offered(self) -> bool:
        """Whether Transformer Engine can do it."""
        return not self.rules and not self.eden


_OWN_ROTATION = (("hadamard", False),)
"""MS-EDEN rotates by itself, and its result is rotated back."""
VARIANTS: Mapping[str, Variant] = {
    one.name: one
    for one in (
        Variant(name="no-sr", words="gradients rounded to nearest", options=(("stochastic_rounding", False),)),
        Variant(name="no-rht", words="no Hadamard transform", options=(("hadamard", False),)),
        Variant(name="1d-weights", words="weights with one scale per 16 elements", options=(("square_weights", False),)),
        Variant(name="4over6", words="weights choose between 6 and 4", options=(("four_over_six", "weights"),)),
        Variant(name="scale-up", words="the gradients' block scales rounded up", rules=(("nvfp4_scale_up", True),)),
        Variant(name="headroom", words="the gradients' block maxima mapped to 6 * 16/17", rules=(("nvfp4_headroom", 17 / 16),)),
        Variant(name="ms-eden", words="gradients by MS-EDEN, signs redrawn at every step", options=_OWN_ROTATION, eden="redrawn"),
        Variant(name="ms-eden-fixed", words="gradients by MS-EDEN, one set of signs", options=_OWN_ROTATION, eden="fixed"),
    )
}  # fmt: skip
"""Name -> variant of NVFP4."""
NOT_OFFERED = "no stack offers this yet"
