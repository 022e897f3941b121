"""Rules for individual modules in the format of megatron-core's RecipeConfig, which a plan writes and Megatron-LM reads from a file. Loads no framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpbridge.common.errors import Refused
from mpbridge.precision.globs import DECODER, MTP, MTP_PROJECTION, matches, within
from mpbridge.precision.megatron_spec.precision_field import ModuleRules
from mpbridge.precision.megatron_spec.versions import SINCE_017, current
from mpbridge.precision.policy import Gemms, Quant, Region
from mpbridge.precision.regions import GEMMS
from mpbridge.precision.scalings.rows import ROWS
from mpbridge.precision.wording import rule_words


def as_dict(
    rules: ModuleRules, chunk: Sequence[int], layers: int, *, ahead: int = 0, core: str | None = None
) -> dict[str, Any]:
    """The input of RecipeConfig.from_config_dict: matchers for each (layer of the chunk, rule); the first match wins.

    chunk: global numbers of the chunk's layers, in order; the n-th is 'decoder.layers.n' there. layers: depth of the whole model. ahead: number of
    multi-token prediction depths. core: version of megatron-core; None: the installed one. Edge layers and the default are left to the block's own autocast (first_last_layers_bf16, fp8, fp4).
    """
    base = rules.regions[-1].quant
    configs: dict[str, Any] = {}
    matchers: dict[str, Any] = {}
    for local, layer in enumerate(chunk):
        stem, theirs = DECODER.format(local), DECODER.format(layer)
        for index, region in _asked(rules.regions, layer, layers):
            key = _config(configs, index, region, outside=base is None, core=core)
            # a full path has the model's layer number, megatron-core matches the stage's
            for number, glob in enumerate(within(region.modules, theirs)):
                _add(matchers, f"layer{local}_rule{index}_{number}", f"{stem}{glob}", key)
    for depth in range(ahead):
        # megatron-core opens no FP4 context there
        outside = base is None or base.bits == 4
        for index, region in _asked(rules.regions, None, layers):
            key = _config(configs, index, region, outside=outside, core=core)
            for number, pattern in enumerate(_ahead(region.modules, depth)):
                _add(matchers, f"mtp{depth}_rule{index}_{number}", pattern, key)
    used = {matcher["config"] for matcher in matchers.values()}
    return {"configs": {key: configs[key] for key in configs if key in used}, "matchers": matchers}


def _asked(regions: tuple[Region, ...], layer: int | None, layers: int) -> Iterator[tuple[int, Region]]:
    """(position, region) of the regions that apply to a layer, up to the one that the block around it handles itself."""
    base = regions[-1].quant
    for index, region in enumerate(regions):
        if region.about(layer, layers):
            if region.modules == "*" and not region.by_factory and (region.quant == base or region.ends):
                return
            yield index, region


def _ahead(glob: str, depth: int) -> Iterator[str]:
    """Patterns for the linears of one multi-token prediction depth."""
    for stem in MTP:
        own = stem.format(depth)
        yield from (f"{own}{rest}" for rest in within(glob, own))
    projection = f"mtp.layers.{depth}.{MTP_PROJECTION}"
    if matches(glob, MTP_PROJECTION, projection):
        yield projection


def _config(configs: dict[str, Any], index: int, region: Region, *, outside: bool, core: str | None) -> str:
    key = f"rule{index}" + ("_outside" if outside else "")
    configs[key] = params(region.quant, outside=outside, core=core)
    if region.by_factory:
        why = unmixable(region.rules)
        if why:
            raise Refused(
                f"the rule of {region.modules} needs quantizers of its own ({rule_words(region.rules)}), {why}; emulate=true can"
            )
        recipe = configs[key]["training_recipe"]
        beside = {name: value for name, value in recipe.items() if name.startswith("override")}
        path = f"{FACTORIES}.{factory_name(region.rules)}"
        configs[key]["training_recipe"] = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": path, **beside}
    return key


FACTORIES = "mpbridge.backend.megatron.gemm_factories"
"""The module in which Transformer Engine's quantizer factories are found by the names below."""
QUANTIZERS: Mapping[str, str] = {row.name: row.made_by for row in ROWS if row.made_by}
"""Scaling -> factory of Transformer Engine's quantizers."""
SINCE = "2.19"
"""Release of Transformer Engine whose hybrid quantizers mix formats in one linear."""
_HIGH = "high"


def unmixable(gemms: Gemms) -> str:
    """Why Transformer Engine's own classes cannot run these rules in one linear; '' if they can."""
    for quant in gemms.distinct:
        if quant.scaling not in QUANTIZERS:
            return f"and Transformer Engine's hybrid quantizers have no {quant.scaling} scaling"
        if quant.stored or any(quant.row.option(name).variable for name, _ in quant.options):
            return f"with {'stored weights' if quant.stored else 'options of its own'}, which a quantizer factory does not know"
    return ""


def factory_name(gemms: Gemms) -> str:
    """A Python name that says all: 'fprop_mxfp8_e4m3__dgrad_nvfp4_e2m1__wgrad_high'; switches without a variable stand at a rule's end."""
    rules = (
        _HIGH
        if quant is None
        else "_".join([quant.scaling, quant.format, *(name for name, value in quant.options if value)])
        for quant in gemms
    )
    return "__".join(f"{gemm}_{rule}" for gemm, rule in zip(GEMMS, rules, strict=True))


def gemms_named(name: str) -> Gemms | None:
    """The rules of such a name; None: it is none."""
    found: dict[str, Quant | None] = {}
    for gemm, part in zip(GEMMS, name.split("__"), strict=False):
        given, _, rule = part.partition("_")
        scaling, _, rest = rule.partition("_")
        format_, _, switch = rest.partition("_")
        if given != gemm or (rule != _HIGH and scaling not in QUANTIZERS):
            return None
        found[gemm] = (
            None
            if rule == _HIGH
            else Quant(format=format_, scaling=scaling, options=((switch, True),) if switch else ())
        )
    return Gemms(**found) if len(found) == len(GEMMS) else None


def _add(matchers: dict[str, Any], name: str, pattern: str, key: str) -> None:
    matchers[name] = {"type": "glob", "enabled": True, "pattern": pattern, "config": key}


def params(quant: Quant | None, *, outside: bool, core: str | None = None) -> dict[str, Any]:
    """megatron-core's per-module parameters (extensions/transformer_engine.py, TEQuantizationRecipe); none means high precision."""
    recipe: dict[str, Any] = {}
    if quant is not None:
        recipe[f"fp{quant.bits}_quantization_recipe"] = quant.row.core
        if quant.bits == 8:
            recipe["fp8_format"] = quant.format
        if quant.row.factory:
            recipe["custom_recipe_factory"] = quant.factory
        if quant.stored and SINCE_017.holds(core or current()):
            # since 0.17 a module's own rule also decides how its weight is stored
            recipe[f"fp{quant.bits}_param"] = True
        if outside:
            # the block around it opens no autocast, so the module must open its own
            recipe["override_nonquantized_autocast"] = True
    return {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}
