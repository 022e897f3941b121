"""Which quantization a linear actually has: Transformer Engine's recipe and weight class, or the emulation's rule."""

from __future__ import annotations

from typing import Any

from mpbridge.precision.policy import Gemms
from mpbridge.precision.words import HIGH, rule_words
from mpbridge.scalings import scaling_of_recipe


def rule_of(module: Any, emulated: bool, *, ran: bool) -> str:
    """The rule that `module` applies, as `words.rule_words` puts it; ran: a forward has been seen, so Transformer Engine's modules know their recipe."""
    # an emulated linear (mpbridge.emulation) carries a plug, and the plug the rules of its GEMMs
    own = getattr(getattr(module, "plug", None), "gemms", None)
    if isinstance(own, Gemms):
        by_emulation = getattr(module.plug, "emulated", True)
        return rule_words(own) + ("" if emulated is by_emulation else " (emulated)" if by_emulation else " (native)")
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict):
        return HIGH
    if not (getattr(module, "fp8", False) if ran else getattr(module, "primary_weights_in_fp8", False)):
        return HIGH
    recipe = meta.get("recipe")
    # Transformer Engine's NVFP4 recipe has both attributes: fp8_format is that of its scales
    format_name = str(getattr(getattr(recipe, "fp4_format", None) or getattr(recipe, "fp8_format", None), "name", ""))
    # by its bases too: megatron-core's recipe of delayed scaling is a subclass (TEDelayedScaling)
    made_by = [base.__name__ for base in type(recipe).__mro__]
    known = next((scaling for name in made_by if (scaling := scaling_of_recipe(name))), made_by[0])
    # Transformer Engine's Format has our names in capitals (common/recipe/__init__.py)
    return f"{format_name.lower()} {known}"
