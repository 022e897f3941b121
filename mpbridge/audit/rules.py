"""Which quantization a linear really has: Transformer Engine's recipe and weight class, or the emulation's rule."""

from __future__ import annotations

from typing import Any

from mpbridge.precision.policy import Quant

HIGH = "high precision"

_SCALINGS = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "tensorwise",
    "Float8BlockScaling": "blockwise",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
    "CustomRecipe": "custom",
}
"""Class of a Transformer Engine recipe (common/recipe/__init__.py of 2.11) -> our word."""

_FORMATS = {"E4M3": "e4m3", "HYBRID": "hybrid", "E2M1": "e2m1"}


def rule_text(quant: Quant | None) -> str:
    """What of a rule two sides can be compared by: 'hybrid delayed'; HIGH for None."""
    return HIGH if quant is None else f"{quant.format} {quant.scaling}"


def rule_of(module: Any, emulated: bool, *, ran: bool) -> str:
    """The rule that `module` applies, as `rule_text` puts it; ran: a forward has been seen, so Transformer Engine's modules know their recipe."""
    # an emulated linear (mpbridge.emulation) carries a plug, and the plug its quantizer
    own = getattr(getattr(getattr(module, "plug", None), "quantizer", None), "quant", None)
    if isinstance(own, Quant):
        return rule_text(own) + ("" if emulated else " (emulated)")
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict):
        return HIGH
    if not (getattr(module, "fp8", False) if ran else getattr(module, "primary_weights_in_fp8", False)):
        return HIGH
    recipe = meta.get("recipe")
    format_name = str(getattr(getattr(recipe, "fp8_format", None) or getattr(recipe, "fp4_format", None), "name", ""))
    return f"{_FORMATS.get(format_name, format_name.lower())} {_SCALINGS.get(type(recipe).__name__, type(recipe).__name__)}"
