"""Which quantization a linear actually has: Transformer Engine's recipe and weight class, or the emulation's rule."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from mpbridge.common.formats import say
from mpbridge.precision.policy import Gemms, Quant
from mpbridge.precision.scalings import ELEMENTS, scaling_of_recipe
from mpbridge.precision.wording import HIGH, rule_words


def rule_of(module: Any, emulated: bool, *, ran: bool) -> str:
    """The rule that `module` applies, as worded by `words.rule_words`; ran: a forward pass has run, so Transformer Engine's modules know their recipe."""
    # an emulated linear (mpbridge.numerics) has a plug, which has the rules of its GEMMs
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
    # check base classes too: megatron-core's delayed scaling recipe is a subclass (TEDelayedScaling)
    made_by = [base.__name__ for base in type(recipe).__mro__]
    known = next((scaling for name in made_by if (scaling := scaling_of_recipe(name))), made_by[0])
    # Transformer Engine's Format uses our names in upper case (common/recipe/__init__.py)
    return f"{format_name.lower()} {known}"


def recipe_of(module: Any) -> Any:
    """The Transformer Engine recipe object of the module's last forward pass; None: it has none."""
    meta = getattr(module, "fp8_meta", None)
    return meta.get("recipe") if isinstance(meta, dict) else None


def details(module: Any, quant: Quant) -> tuple[str, str]:
    """(promised, found) in words, of a module's quantizers and of the details of its recipe object other than class and format; equal if they agree."""
    recipe = recipe_of(module)
    pairs = [(name, wanted, _DETAILS[attribute](recipe)) for name, wanted, attribute in _wanted(quant)]
    pairs += _elements(module, quant)
    wrong = dict.fromkeys((name, say(wanted), say(has)) for name, wanted, has in pairs if has not in (None, wanted))
    return ", ".join(f"{name} {wanted}" for name, wanted, _ in wrong), ", ".join(
        f"{name} {has}" for name, _, has in wrong
    )


def _elements(module: Any, quant: Quant) -> Iterator[tuple[str, str, str | None]]:
    """(operands, promised element format, the one that a quantizer writes).

    A module keeps the quantizers that it has made while the class of its recipe stays (module/base.py, 2.11 to 2.20: `set_meta_tensor`), so they can
    differ from the recipe object that it shows.
    """
    made = getattr(module, "quantizers", None) or {}
    states = (("scaling_fwd", "inputs and weights"), ("scaling_bwd", "gradients"))
    for (state, operands), wanted in zip(states, ELEMENTS[quant.format], strict=True):
        for quantizer in made.get(state) or ():
            yield operands, wanted, _ELEMENTS.get(getattr(getattr(quantizer, "dtype", None), "name", ""))


_ELEMENTS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2", "kFloat4E2M1": "e2m1"}
"""transformer_engine_torch.DType -> a key of formats.FORMATS."""


def _wanted(quant: Quant) -> Iterator[tuple[str, Any, str]]:
    """(name, value, row of _DETAILS) of what the policy specifies."""
    if quant.row.history:
        yield "margin", quant.margin, "margin"
        yield "amax history", quant.amax_history, "amax_history_len"
        yield "amax algorithm", quant.amax_algo, "amax_compute_algo"
    for option in quant.row.options:
        if option.name in _DETAILS:
            yield option.name, quant.option(option.name, os.environ), option.name


def _powers_of_two(recipe: Any) -> Any:
    parts = [getattr(recipe, f"fp8_quant_{part}", None) for part in ("fwd_inp", "fwd_weight", "bwd_grad")]
    found = [bool(part.power_2_scale) for part in parts if part is not None]
    if not found:
        return None
    return found[0] if len(set(found)) == 1 else "mixed"


def _attribute(name: str) -> Callable[[Any], Any]:
    return lambda recipe: getattr(recipe, name, None)


def _not(name: str) -> Callable[[Any], Any]:
    return lambda recipe: None if getattr(recipe, name, None) is None else not getattr(recipe, name)


_DETAILS: dict[str, Callable[[Any], Any]] = {
    "margin": _attribute("margin"),
    "amax_history_len": _attribute("amax_history_len"),
    "amax_compute_algo": _attribute("amax_compute_algo"),
    "power_of_two": _powers_of_two,
    "hadamard": _not("disable_rht"),
    "stochastic_rounding": _not("disable_stochastic_rounding"),
    "square_weights": _not("disable_2d_quantization"),
}
"""Field or option -> its value in a Transformer Engine recipe object (common/recipe/__init__.py); None: the object has no such field."""
