"""Rules for single modules, compiled to megatron-core's RecipeConfig: for each pipeline stage its own, because megatron-core counts layers per stage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mpbridge.errors import Refused
from mpbridge.megatron_spec.fields import ModuleRules
from mpbridge.precision.policy import Quant, Region


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
            plain = RecipeConfig.from_config_dict(as_dict(self.rules, chunk, self._config.num_layers))
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
        # nobody changes it, and megatron-core deep-copies configs
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


def as_dict(rules: ModuleRules, chunk: Sequence[int], layers: int) -> dict[str, Any]:
    """What RecipeConfig.from_config_dict takes: one matcher for each (layer of the chunk, rule), first match wins.

    chunk: global numbers of the chunk's layers, in order; the n-th is 'decoder.layers.n' there. layers: of the whole model.
    Edge layers and the default are left to the block's own autocast (first_last_layers_bf16, fp8, fp4).
    """
    base = rules.regions[-1].quant
    configs: dict[str, Any] = {}
    matchers: dict[str, Any] = {}
    for local, layer in enumerate(chunk):
        for index, region in enumerate(rules.regions):
            if not _about(region, layer, layers):
                continue
            if region.modules == "*" and region.quant in (None, base):
                break  # the rest of this layer is the block's business
            key = f"rule{index}"
            configs[key] = _params(region.quant, outside=base is None)
            pattern = f"decoder.layers.{local}.{region.modules}"
            matchers[f"layer{local}_{key}"] = {"type": "glob", "enabled": True, "pattern": pattern, "config": key}
    return {"configs": configs, "matchers": matchers}


def _about(region: Region, layer: int, layers: int) -> bool:
    """Whether the region says something about this layer, whatever the module."""
    return Region(first=region.first, last=region.last).covers("", layer, layers)


def _params(quant: Quant | None, *, outside: bool) -> dict[str, Any]:
    """megatron-core's per-module parameters (extensions/transformer_engine.py, TEQuantizationRecipe); nothing named means high precision."""
    recipe: dict[str, Any] = {}
    if quant is not None:
        recipe[f"fp{quant.bits}_quantization_recipe"] = quant.row.core
        if quant.bits == 8:
            recipe["fp8_format"] = quant.format
        if quant.row.factory:
            recipe["custom_recipe_factory"] = quant.factory
        if outside:
            # the block around it opens no autocast, so the module must open its own
            recipe["override_nonquantized_autocast"] = True
    return {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}
