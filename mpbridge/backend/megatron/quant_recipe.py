"""Rules for individual modules, compiled to megatron-core's RecipeConfig: one per pipeline stage, because megatron-core counts layers per stage."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core import parallel_state
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mpbridge.common.errors import Refused
from mpbridge.precision.megatron_spec.module_rules import as_dict
from mpbridge.precision.megatron_spec.precision_field import ModuleRules


class StageRecipe(RecipeConfig):  # type: ignore[misc]  # megatron-core is not typed
    """megatron-core's recipe for one model chunk, made from `rules`.

    Configs are usually constructed before ranks are known; in that case it is compiled on first use.
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
        """The quantization of a module, or None if the block around it decides. Raises Refused if the chunk is still unknown."""
        if not self.compiled:
            self._compile()
        if not self.compiled:
            raise Refused(
                "module rules under an interleaved pipeline belong to one model chunk: "
                "call mpbridge.backend.megatron.quant_recipe.enter_chunk(config, vp_stage) before each GPTModel"
            )
        return super().match(operator_context)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StageRecipe) and self.rules == other.rules

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> StageRecipe:
        # it is immutable, and megatron-core deep-copies configs
        return copy.copy(self)


def compile_rules(rules: ModuleRules, config: Any, vp_stage: int | None = None) -> StageRecipe:
    """`rules` for the model chunk that this rank builds from `config`; not compiled yet if the chunk is unknown."""
    return StageRecipe(rules, config, vp_stage)


def enter_chunk(config: Any, vp_stage: int | None = None) -> None:
    """Sets `config.quant_recipe` to that of one chunk; call it before each GPTModel of an interleaved pipeline. Does nothing without module rules."""
    recipe = getattr(config, "quant_recipe", None)
    if isinstance(recipe, StageRecipe):
        config.quant_recipe = compile_rules(recipe.rules, config, vp_stage)


def chunk_layers(config: Any, vp_stage: int | None = None) -> tuple[int, ...] | None:
    """Global 0-based numbers of the layers of this rank's chunk, in order; None if ranks or chunk are unknown."""
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
