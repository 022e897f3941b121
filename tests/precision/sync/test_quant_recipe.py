"""Module rules as megatron-core matches them: by stage-local layer numbers."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.quantization.quant_config import MatchContext, RecipeConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from sync_kit import POLICIES, applied, built, live

from mpbridge.backend.megatron import quant_recipe
from mpbridge.common.errors import BadValue, Refused
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.precision_field import ModuleRules
from mpbridge.precision.policy import Gemms, PrecisionPolicy, Quant, Region
from mpbridge.precision.resolve import resolve
from mpbridge.precision.sync.apply import commit
from mpbridge.precision.sync.plan import plan
from tests.worlds import start

MODULES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
MXFP8 = Quant(format="e4m3", scaling="mxfp8")
BASE = Quant(format="hybrid", scaling="tensorwise")
SHAPES = {
    "fp8 around, one module in BF16": (Region(modules="mlp.linear_fc2"), Region(quant=BASE)),
    "edges before rules": (Region(first=1, last=2), Region(modules="mlp.*", quant=MXFP8), Region(quant=BASE)),
    "a rule for some layers": (Region(modules="*.linear_fc1", first=3, quant=MXFP8), Region(modules="mlp.*"), Region(quant=BASE)),
    "16 bits around, one module in FP8": (Region(modules="mlp.linear_fc1", quant=MXFP8), Region()),
    "a layer with a rule of its own": (Region(first=1, quant=MXFP8), Region(modules="mlp.*"), Region(quant=BASE)),
    "some layers by number": (Region(modules="mlp.*", layers=((2, 3), (-2, -1))), Region(modules="*.linear_qkv", layers=((0, 0),), quant=MXFP8), Region(quant=BASE)),
    "whole paths": (Region(modules="decoder.layers.[25].mlp.*", quant=MXFP8), Region(modules="*.6.*.linear_qkv"), Region(modules="decoder.*.linear_proj", layers=((1, 4),)), Region(quant=BASE)),
    "edge layers, 16 bits around": (Region(first=1, last=1), Region(modules="mlp.*", quant=MXFP8), Region()),
    "a layer in 16 bits": (Region(layers=((3, 3),)), Region(modules="mlp.*", quant=MXFP8), Region(quant=BASE)),
    "FP4 around": (Region(modules="self_attention.*", quant=BASE), Region(quant=Quant(format="e2m1", scaling="nvfp4"))),
}  # fmt: skip


def seen(recipe: RecipeConfig, policy: PrecisionPolicy, path: str, layer: int, layers: int) -> tuple[Any, ...]:
    """(FP8 recipe, format, FP4 recipe) that a module runs in: its own parameters if they take effect, else the block's."""
    return within(recipe, path, None if layer in policy.bf16_layers(layers) else policy.quant)


def within(recipe: RecipeConfig, path: str, around: Quant | None) -> tuple[Any, ...]:
    """The same of a module whose block runs in `around`."""
    found = recipe.match(MatchContext(path, None))
    own = {} if found is None else found.config["training_recipe"]
    # TEQuantizationRecipe: a module overrides a quantized block by default, and a block in high precision only if it says so
    if found is None or (around is None and not own.get("override_nonquantized_autocast", False)):
        return spell(around)
    return own.get("fp8_quantization_recipe"), own.get("fp8_format"), own.get("fp4_quantization_recipe")


def spell(quant: Quant | None) -> tuple[Any, ...]:
    if quant is None:
        return None, None, None
    return (quant.scaling, quant.format, None) if quant.bits == 8 else (None, None, quant.scaling)


def two_stages() -> TransformerConfig:
    return TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16)  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("regions", SHAPES.values(), ids=SHAPES)
def test_every_module_of_every_stage_gets_the_rule_that_the_policy_gives_it(
    regions: tuple[Region, ...], stages: int
) -> None:
    policy = dataclasses.replace(POLICIES["bf16_mixed"], regions=regions)
    layers, per_stage = 8, 8 // stages
    for stage in range(stages):
        chunk = range(stage * per_stage, (stage + 1) * per_stage)
        recipe = RecipeConfig.from_config_dict(quant_recipe.as_dict(ModuleRules(regions=regions), chunk, layers))
        for local, layer in enumerate(chunk):
            for module in MODULES:
                found = seen(recipe, policy, f"decoder.layers.{local}.{module}", layer, layers)
                assert found == spell(policy.at(module, layer, layers)), (stage, layer, module)
        assert recipe.match(MatchContext("output_layer", None)) is None


@pytest.mark.parametrize("base", [BASE, Quant(format="e2m1", scaling="nvfp4"), None], ids=["fp8", "fp4", "bf16"])
def test_multi_token_prediction_is_matched_by_the_same_rules(base: Quant | None) -> None:
    regions = (
        Region(first=1), Region(modules="mtp.*.linear_fc2"), Region(modules="mlp.*", quant=MXFP8),
        Region(modules="self_attention.*", layers=((3, 3),), quant=MXFP8), Region(modules="eh_proj"), Region(quant=base),
    )  # fmt: skip
    policy = dataclasses.replace(POLICIES["bf16_mixed"], regions=regions)
    recipe = RecipeConfig.from_config_dict(quant_recipe.as_dict(ModuleRules(regions=regions), range(4), 4, ahead=2))
    for depth in range(2):
        names = [*(f"transformer_layer.{module}" for module in MODULES), "eh_proj"]
        for path in (f"mtp.layers.{depth}.{name}" for name in names):
            # megatron-core opens a context of eight bits there, and none of four
            around = None if base is None or base.bits == 4 else base
            assert within(recipe, path, around) == spell(policy.of_path(path, 4).fprop), path


def test_a_whole_path_is_looked_for_in_its_own_layer_only() -> None:
    queries = Region(modules="decoder.layers.1.self_attention.linear_qkv", quant=MXFP8)
    rules = ModuleRules(regions=(queries, Region(modules="mtp.*.linear_fc2"), Region(quant=BASE)))
    first, second = quant_recipe.as_dict(rules, range(2), 4), quant_recipe.as_dict(rules, range(2, 4), 4, ahead=1)
    patterns = [[matcher["pattern"] for matcher in made["matchers"].values()] for made in (first, second)]
    assert patterns[0] == ["decoder.layers.1.self_attention.linear_qkv"]
    inner = itertools.product(("transformer_layer", "mtp_model_layer"), ("*.", ""))
    assert patterns[1] == [f"mtp.layers.0.{layer}.{rest}linear_fc2" for layer, rest in inner]
    for made in (first, second):
        assert set(made["configs"]) == {matcher["config"] for matcher in made["matchers"].values()}
        RecipeConfig.from_config_dict(made)


NVFP4 = Quant(format="e2m1", scaling="nvfp4")


@pytest.mark.parametrize("base", [BASE, None])
def test_formats_that_differ_by_gemm_are_a_quantizer_factory_that_megatron_core_imports(base: Quant | None) -> None:
    from megatron.core.fp8_utils import _resolve_callable_from_python_import_path

    rules = Gemms(fprop=MXFP8, dgrad=NVFP4, wgrad=None)
    regions = (Region(modules="mlp.*", quant=MXFP8, gemms=rules), Region(quant=base))
    made = quant_recipe.as_dict(ModuleRules(regions=regions), range(4), 4)
    params = RecipeConfig.from_config_dict(made).match(MatchContext("decoder.layers.3.mlp.linear_fc1", None)).config
    recipe = params["training_recipe"]
    assert recipe["fp8_quantization_recipe"] == "custom"
    assert recipe.get("override_nonquantized_autocast", False) is (base is None)
    assert recipe["custom_recipe_factory"].endswith(".fprop_mxfp8_e4m3__dgrad_nvfp4_e2m1__wgrad_high")
    assert _resolve_callable_from_python_import_path(recipe["custom_recipe_factory"]).gemms == rules


@pytest.mark.parametrize("name", ["fprop_mxfp8_e4m3", "x__y__z", "fprop_delayed_e4m3__dgrad_high__wgrad_high", "fprop_high__wgrad_high__dgrad_high"])  # fmt: skip
def test_another_name_is_no_factory(name: str) -> None:
    from mpbridge.backend.megatron import gemm_factories

    with pytest.raises(AttributeError, match=name):
        getattr(gemm_factories, name)


def test_rules_of_one_linear_that_no_quantizer_factory_knows_are_refused() -> None:
    given = Quant(format="e2m1", scaling="nvfp4", options=(("hadamard", False),))
    regions = (Region(modules="mlp.*", quant=given, gemms=Gemms(fprop=given, dgrad=None, wgrad=None)), Region(quant=BASE))  # fmt: skip
    with pytest.raises(Refused, match="options of its own"):
        quant_recipe.as_dict(ModuleRules(regions=regions), range(4), 4)


def test_transformer_engine_params_are_what_megatron_core_parses() -> None:
    from megatron.core.extensions import transformer_engine as te

    if not hasattr(te, "TEQuantizationParams"):
        pytest.skip("this megatron-core defines them only with Transformer Engine")
    rules = ModuleRules(regions=SHAPES["edges before rules"])
    recipe = RecipeConfig.from_config_dict(quant_recipe.as_dict(rules, range(8), 8))
    found = recipe.match(MatchContext("decoder.layers.3.mlp.linear_fc1", None))
    params = te.TEQuantizationParams.parse_from_config(found)
    assert params.training_recipe.fp8_quantization_recipe == "mxfp8"


@pytest.mark.usefixtures("core")
def test_module_rules_reach_the_config_and_leave_it_again() -> None:
    inputs = {"model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}, "optimizer": {}, "ddp": {}}
    made = built(inputs, POLICIES["module_rules"]).model.quant_recipe
    assert made.match(MatchContext("decoder.layers.1.mlp.linear_fc2", None)).config["training_recipe"] == {}
    objects = live(inputs)
    theirs = objects.model.quant_recipe = RecipeConfig.from_config_dict({})
    receipt = applied(objects, POLICIES["module_rules"])
    assert objects.model.quant_recipe == made
    receipt = applied(objects, POLICIES["bf16_mixed"], receipt)
    assert objects.model.quant_recipe is None
    applied(objects, None, receipt)
    assert objects.model.quant_recipe is theirs


def test_rules_for_a_pipeline_do_not_answer_before_the_stage_is_known() -> None:
    recipe = quant_recipe.compile_rules(ModuleRules(regions=SHAPES["edges before rules"]), two_stages())
    assert not recipe.compiled
    with pytest.raises(Refused, match="enter_chunk"):
        recipe.match(MatchContext("decoder.layers.0.mlp.linear_fc1", None))
    assert copy.deepcopy(recipe) == recipe


def test_rules_for_a_pipeline_are_compiled_when_ranks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = ModuleRules(regions=(Region(first=3), Region(modules="mlp.*"), Region(quant=BASE)))
    recipe = quant_recipe.compile_rules(rules, two_stages())
    monkeypatch.setattr(quant_recipe.parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(quant_recipe.parallel_state, "get_pipeline_model_parallel_rank", lambda: 1)
    found = [recipe.match(MatchContext(f"decoder.layers.{local}.mlp.linear_fc1", None)) for local in (0, 1)]
    assert [one is not None for one in found] == [False, True]


def test_writing_module_rules_without_somebody_who_spells_them_is_refused() -> None:
    policy = resolve(MixedPrecisionConfig(bf16=True, fp8="hybrid", modules={"mlp.*": "bf16"}))
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4)
    with pytest.raises(BadValue, match=r"mpbridge\.apply"):
        commit(plan(policy, model=config))
    assert (config.bf16, config.fp8, config.quant_recipe) == (False, None, None)


@pytest.mark.parametrize("chunks", [1, 2], ids=["plain", "interleaved"])
def test_two_stages_of_a_real_model_get_their_own_layers_rules(chunks: int) -> None:
    said = start(2, str(Path(__file__).with_name("pipeline_worker.py")), str(chunks))
    # two processes write to one pipe: their lines may meet
    assert all(f"stage {n}: 16 linears as the policy says" in said for n in (0, 1))
