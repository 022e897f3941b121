"""The file of --te-precision-config-file, read by megatron-core's own matcher: every linear gets the rule that the policy gives it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from mpbridge import ConfigContainer, MixedPrecisionConfig, resolve
from mpbridge.interop.stacks.base import Export
from mpbridge.interop.stacks.exporters import export
from mpbridge.precision.policy import PrecisionPolicy

LAYERS = 12
MODULES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
FP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
CASES: dict[str, Mapping[str, Any]] = {
    "bf16 exceptions in fp8": {**FP8, "modules": {"mlp.linear_fc2": "bf16"}},
    "fp8 in bf16": {"modules": {"mlp.*": FP8}},
    "layers from the start": {**FP8, "modules": {"mlp.*": {"layers": "1-3", "precision": "bf16"}}},
    "two rules": {**FP8, "modules": {"mlp.linear_fc1": "tensorwise", "mlp.*": "bf16"}},
    "edges and a rule": {**FP8, "first_last_layers_bf16": True, "modules": {"self_attention.linear_proj": "bf16"}},
}
BY_PATH: dict[str, Mapping[str, Any]] = {
    "a whole path and layers": {**FP8, "modules": {"decoder.*.linear_fc2": {"layers": "first 2", "precision": "bf16"}}},
    "a star and layers": {**FP8, "modules": {"*.linear_fc2": {"layers": "first 2", "precision": "bf16"}}},
    "a star": {**FP8, "modules": {"*.linear_fc2": "bf16"}},
    "below a layer": {**FP8, "modules": {"mlp.linear_fc2": "bf16"}},
    "multi-token prediction": {**FP8, "modules": {"mtp.*": "bf16"}},
}
LATE = {**FP8, "modules": {"mlp.*": {"layers": "last 2", "precision": "bf16"}}}


def rule(text: str, policy: PrecisionPolicy, path: str) -> str | None:
    """The scaling that a linear runs in: by the file, else by the autocast around its block."""
    from megatron.core.quantization.quant_config import MatchContext, RecipeConfig

    quant = policy.quant
    edges = tuple(f"decoder.layers.{layer}." for layer in policy.bf16_layers(LAYERS))
    opened = None if quant is None or path.startswith(edges) else quant.scaling
    context = MatchContext(path, None)
    found = RecipeConfig.from_config_dict(yaml.safe_load(text)).match(context)
    if found is None:
        return opened
    own = found.config["training_recipe"]
    if opened is None and not own.get("override_nonquantized_autocast", False):
        return None
    return own.get("fp8_quantization_recipe")  # type: ignore[no-any-return]


@pytest.mark.parametrize("fields", {**CASES, **BY_PATH}.values(), ids={**CASES, **BY_PATH})
def test_without_a_depth_the_patterns_hold_for_any(fields: Mapping[str, Any]) -> None:
    config = MixedPrecisionConfig(bf16=True, **fields)
    policy, made = resolve(config), export(config, "megatron-lm")
    assert not any(line.fact == "modules" and line.fidelity == "impossible" for line in made.lines)
    follows(made, policy)


def follows(made: Export, policy: PrecisionPolicy) -> None:
    text = next(piece.text for piece in made.pieces if piece.name == "precision.yaml")
    stems = [*(f"decoder.layers.{layer}." for layer in range(LAYERS)), "mtp.layers.0.transformer_layer."]
    for path in map("".join, itertools.product(stems, MODULES)):
        wanted = policy.of_path(path, LAYERS).first
        assert rule(text, policy, path) == (wanted and wanted.scaling), path


@pytest.mark.parametrize("fields", BY_PATH.values(), ids=BY_PATH)
def test_with_a_run_the_linears_of_multi_token_prediction_have_their_rules(fields: Mapping[str, Any]) -> None:
    model = {"num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "mtp_num_layers": 1}
    mine = ConfigContainer(mixed_precision={"recipe": "bf16_mixed", **fields}, model=model, data={"seq_length": 32})
    run = mine.resolved(1, training=False)
    follows(export("bf16_mixed", "megatron-lm", run=run), run.policy)


def test_layers_from_the_end_need_the_depth_and_are_in_the_file_where_a_run_gives_it() -> None:
    config = MixedPrecisionConfig(bf16=True, **LATE)
    assert any(line.fact == "modules" and line.fidelity == "impossible" for line in export(config, "megatron-lm").lines)
    model = {"num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    mine = ConfigContainer(mixed_precision={"recipe": "bf16_mixed", **LATE}, model=model, data={"seq_length": 32})
    run = mine.resolved(1, training=False)
    made = export("bf16_mixed", "megatron-lm", run=run)
    follows(made, run.policy)
    assert not any(line.fidelity == "impossible" for line in made.lines)
