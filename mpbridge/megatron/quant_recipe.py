"""Rules for single modules, compiled to megatron-core's RecipeConfig: for each pipeline stage its own, because megatron-core counts layers per stage."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mpbridge.errors import Refused
from mpbridge.megatron_spec.places import ModuleRules
from mpbridge.megatron_spec.versions import SINCE_017, current
from mpbridge.precision.globs import DECODER, MTP, MTP_PROJECTION, below, matches
from mpbridge.precision.policy import Quant, Region
from mpbridge.precision.words import rule_words


class StageRecipe(RecipeConfig):  # type: ignore[misc]  # megatron-core is not typed
    """megatron-core's recipe of one model chunk; `rules` says what it was made from.

    Configs are usually made before ranks are known: then it is compiled when megatron-core first asks.
    """

    def __init__(self, rules: ModuleRules, config: Any, vp_stage: int | None = None) -> None:
        super().__init__([], {})
        self.rules, self.compiled = rules, False
        self._config, self._vp_stage = config, vp_stage
        self._compile()

    def _compile(self) -> None:
        chunk = chunk_layers(self._config, self._vp_stage)
        if chunk is not None:
            plain = RecipeConfig.from_config_dict(
                as_dict(self.rules, chunk, self._config.num_layers, ahead=self._config.mtp_num_layers or 0)
            )
            self.matchers, self.configs, self.compiled = plain.matchers, plain.configs, True

    def match(self, operator_context: Any) -> Any:
        """The quantization of a module, or None where the block around it decides. Raises Refused when the chunk is still not known."""
        if not self.compiled:
            self._compile()
        if not self.compiled:
            raise Refused(
                "module rules under an interleaved pipeline belong to one model chunk: "
                "call mpbridge.megatron.quant_recipe.enter_chunk(config, vp_stage) before each GPTModel"
            )
        return super().match(operator_context)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StageRecipe) and self.rules == other.rules

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> StageRecipe:
        # it is never changed, and megatron-core deep-copies configs
        return copy.copy(self)


def compile_rules(rules: ModuleRules, config: Any, vp_stage: int | None = None) -> StageRecipe:
    """`rules` for the model chunk that this rank builds from `config`; left open where the chunk is not known yet."""
    return StageRecipe(rules, config, vp_stage)


def enter_chunk(config: Any, vp_stage: int | None = None) -> None:
    """Makes `config.quant_recipe` that of one chunk; call it before each GPTModel of an interleaved pipeline. Nothing happens without module rules."""
    recipe = getattr(config, "quant_recipe", None)
    if isinstance(recipe, StageRecipe):
        config.quant_recipe = compile_rules(recipe.rules, config, vp_stage)


def chunk_layers(config: Any, vp_stage: int | None = None) -> tuple[int, ...] | None:
    """Global 0-based numbers of the layers of this rank's chunk, in order; None where ranks or chunk are not known."""
    if config.pipeline_model_parallel_size == 1:
        return tuple(range(config.num_layers))
    interleaved = (config.virtual_pipeline_model_parallel_size or 1) > 1
    if not parallel_state.model_parallel_is_initialized() or (interleaved and vp_stage is None):
        return None
    rank = parallel_state.get_pipeline_model_parallel_rank()
    offset, count = (
        get_transformer_layer_offset(config, vp_stage, rank),
        get_num_layers_to_build(config, vp_stage, rank),
    )
    return tuple(range(offset, offset + count))


def as_dict(rules: ModuleRules, chunk: Sequence[int], layers: int, *, ahead: int = 0) -> dict[str, Any]:
    """What RecipeConfig.from_config_dict takes: matchers for each (layer of the chunk, rule), first match wins.

    chunk: global numbers of the chunk's layers, in order; the n-th is 'decoder.layers.n' there. layers: of the whole model. ahead: depths of
    multi-token prediction. Edge layers and the default are left to the block's own autocast (first_last_layers_bf16, fp8, fp4).
    """
    base = rules.regions[-1].quant
    configs: dict[str, Any] = {}
    matchers: dict[str, Any] = {}
    for local, layer in enumerate(chunk):
        stem, theirs = DECODER.format(local), DECODER.format(layer)
        for index, region in _asked(rules.regions, layer, layers):
            key = _config(configs, index, region, outside=base is None)
            # a whole path has the model's layer number, megatron-core matches the stage's
            for number, glob in enumerate(dict.fromkeys((region.modules, *below(region.modules, theirs)))):
                _add(matchers, f"layer{local}_rule{index}_{number}", f"{stem}{glob}", key)
    for depth in range(ahead):
        # megatron-core opens no FP4 context there
        outside = base is None or base.bits == 4
        for index, region in _asked(rules.regions, None, layers):
            key = _config(configs, index, region, outside=outside)
            for number, pattern in enumerate(_ahead(region.modules, depth)):
                _add(matchers, f"mtp{depth}_rule{index}_{number}", pattern, key)
    return {"configs": configs, "matchers": matchers}


def _asked(regions: tuple[Region, ...], layer: int | None, layers: int) -> Iterator[tuple[int, Region]]:
    """The regions that speak of a layer before the block around it does."""
    base = regions[-1].quant
    for index, region in enumerate(regions):
        if region.about(layer, layers):
            if region.modules == "*" and region.rules.one and (region.quant == base or region.ends):
                return
            yield index, region


def _ahead(glob: str, depth: int) -> Iterator[str]:
    """Patterns for the linears of a depth of multi-token prediction."""
    for stem in MTP:
        own = stem.format(depth)
        yield from (f"{own}{rest}" for rest in dict.fromkeys((glob, *below(glob, own))))
    projection = f"mtp.layers.{depth}.{MTP_PROJECTION}"
    if matches(glob, MTP_PROJECTION, projection):
        yield projection


def _config(configs: dict[str, Any], index: int, region: Region, *, outside: bool) -> str:
    if region.gemms is not None:
        raise Refused(
            f"the rule of {region.modules} mixes formats in one linear ({rule_words(region.gemms)}): Transformer Engine does that from 2.19 on only, and "
            "megatron-core's quant_recipe has no word for it; emulate=true can"
        )
    key = f"rule{index}" + ("_outside" if outside else "")
    configs[key] = _params(region.quant, outside=outside)
    return key


def _add(matchers: dict[str, Any], name: str, pattern: str, key: str) -> None:
    matchers[name] = {"type": "glob", "enabled": True, "pattern": pattern, "config": key}


def _params(quant: Quant | None, *, outside: bool) -> dict[str, Any]:
    """megatron-core's per-module parameters (extensions/transformer_engine.py, TEQuantizationRecipe); nothing named means high precision."""
    recipe: dict[str, Any] = {}
    if quant is not None:
        recipe[f"fp{quant.bits}_quantization_recipe"] = quant.row.core
        if quant.bits == 8:
            recipe["fp8_format"] = quant.format
        if quant.row.factory:
            recipe["custom_recipe_factory"] = quant.factory
        if quant.stored and SINCE_017.holds(current()):
            # since then a module's own rule also decides how its weight rests
            recipe[f"fp{quant.bits}_param"] = True
        if outside:
            # the block around it opens no autocast, so the module must open its own
            recipe["override_nonquantized_autocast"] = True
    return {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}
