"""Which quantization a linear really has: Transformer Engine's recipe and weight class, or the emulation's rule."""

from __future__ import annotations

from typing import Any

from mpbridge.precision.policy import Quant
from mpbridge.scalings import scaling_of_recipe

HIGH = "high precision"


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
    made_by = type(recipe).__name__
    # Transformer Engine's Format has our names in capitals (common/recipe/__init__.py)
    return f"{format_name.lower()} {scaling_of_recipe(made_by) or made_by}"
