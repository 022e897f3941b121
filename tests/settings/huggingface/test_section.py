"""config.json of published models as a model section, beside the configurations that ship; what is refused, and by which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpbridge.common.errors import BadValue, Contradiction
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.draft import filled
from mpbridge.settings.huggingface.folder import tensors
from mpbridge.settings.huggingface.section import section, tree
from mpbridge.settings.huggingface.written import config_json
from tests.light import HEAVY, loaded_by
from tests.settings.huggingface import published

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
_HOW = frozenset({
        "bias_dropout_fusion", "bias_activation_fusion", "use_fused_weighted_squared_relu", "recompute_granularity", "recompute_modules", "cross_entropy_loss_fusion",
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
        # training's own: the paper's, where config.json says another number or none
        "max_sequence_length", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "init_method_std",
})  # fmt: skip
"""Settings of the shipped configurations that are about speed, memory or training."""


SHIPPED = {
    "llama3_8b": published.LLAMA_3_8B, "qwen3_30b_a3b": published.QWEN3_30B_A3B, "deepseek_v3_671b": published.DEEPSEEK_V3,
    "nemotron_3_nano": published.NEMOTRON_3_NANO, "nemotron_3_super": published.NEMOTRON_3_SUPER,
}  # fmt: skip


@pytest.mark.parametrize(("name", "config"), SHIPPED.items(), ids=SHIPPED)
def test_a_published_model_is_the_one_that_ships(name: str, config: dict[str, Any]) -> None:
    shipped = ConfigContainer.load(CONFIGS / f"{name}.yaml").model
    made = section(config)
    latent = bool(made.get("multi_latent_attention"))
    ours, theirs = filled("model", made), filled("model", dict(shipped))
    assert made.keys() - {"max_sequence_length"} <= filled("model", {"multi_latent_attention": latent}).keys()
    compared = (theirs.keys() & (shipped.keys() | made.keys())) - _HOW
    different = {key: (ours[key], theirs[key]) for key in compared if ours[key] != theirs[key]}
    # (ours says the width of a head, where the shipped file leaves it to hidden size and heads)
    assert different == ({} if name != "llama3_8b" else {"kv_channels": (128, None)})


def test_a_sliding_window_counts_its_own_token() -> None:
    assert section(published.MISTRAL_7B)["window_size"] == [4095, 0]
    assert "window_size" not in section(published.QWEN2_5_7B)


def _without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


@pytest.mark.parametrize(
    ("config", "key", "wanted", "of_null"),
    [
        # what transformers 5.23's configuration classes take for a field that is left out, and for null
        (published.LLAMA_3_8B, "num_key_value_heads", {"num_query_groups": 32}, {"num_query_groups": 32}),
        (published.MISTRAL_7B, "num_key_value_heads", {"num_query_groups": 8}, {"num_query_groups": 32}),
        (published.MIXTRAL_8X7B, "num_key_value_heads", {"num_query_groups": 8}, {"num_query_groups": 32}),
        (published.QWEN3_30B_A3B, "num_key_value_heads", {"num_query_groups": 4}, {"num_query_groups": 32}),
        (published.MISTRAL_7B, "sliding_window", {"window_size": [4095, 0]}, {"window_size": None}),
        (published.MIXTRAL_8X7B, "sliding_window", {"window_size": None}, {"window_size": None}),
        (published.DEEPSEEK_V3, "routed_scaling_factor", {"moe_router_topk_scaling_factor": 2.5}, {}),
    ],
)
def test_a_field_that_is_left_out_has_the_familys_default_and_null_has_none(config, key, wanted, of_null) -> None:
    left_out, null = section(_without(config, key)), section(config | {key: None})
    assert {name: left_out.get(name) for name in wanted} == wanted
    assert {name: null.get(name) for name in of_null} == of_null


def test_scaled_rotary_embeddings_keep_their_factors() -> None:
    made = section(published.LLAMA_3_1_8B)
    assert (made["rope_scaling"], made["rope_scaling_factor"], made["rotary_base"]) == (True, 8.0, 500000.0)
    linear = section(published.LLAMA_3_8B | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear["seq_len_interpolation_factor"] == 4.0
    parameters = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    new = section(_without(published.LLAMA_3_8B, "rope_theta") | parameters)
    assert new["rotary_base"] == 1e6


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""As the model cards of Qwen 2.5 and 3 give it."""


@pytest.mark.parametrize(
    ("more", "scales"),
    [
        ({}, (None, None)),
        ({"mscale": 0.7, "mscale_all_dim": 0.4}, (0.7, 0.4)),
        ({"mscale": 0.7}, (None, None)),
        ({"mscale_all_dim": 0.7}, (None, None)),
        ({"attention_factor": 1.1386294361119891, "mscale": 0.7, "mscale_all_dim": 0.4}, (None, None)),
        ({"attention_factor": 1.0}, (1.0, 1.0)),
    ],
)
def test_yarn_multiplies_sines_and_cosines_as_transformers_does(more, scales) -> None:
    made = section(published.QWEN2_5_7B | {"rope_scaling": YARN | more})
    assert made["position_embedding_type"] == "yarn"
    assert (made["yarn_rotary_scaling_factor"], made["yarn_original_max_position_embeddings"]) == (4.0, 32768)
    assert (made["yarn_beta_fast"], made["yarn_beta_slow"]) == (32.0, 1.0)
    assert (made["yarn_mscale"], made["yarn_mscale_all_dim"]) == scales
    back = config_json(filled("model", made), rows=152064, dtype="bfloat16")
    assert section(back) == made


def test_scales_of_latent_yarn_are_transformers() -> None:
    latent, scaling = published.DEEPSEEK_V3, published.DEEPSEEK_V3["rope_scaling"]
    cases = (({}, (1.0, 1.0)), ({"mscale": 0.7}, (0.7, 1.0)), ({"mscale": 0.7, "mscale_all_dim": 0}, (1.0, 0.0)))
    for given, found in cases:
        made = section(latent | {"rope_scaling": scaling | given})
        # transformers leaves mscale out of account unless mscale_all_dim is there
        assert (made["mscale"], made["mscale_all_dim"]) == found
    with pytest.raises(Contradiction, match="mscale_all_dim=1 without mscale"):
        section(latent | {"rope_scaling": _without(scaling, "mscale")})


LLAMA_3_8B, DEEPSEEK_V3, MAMBA2_370M = published.LLAMA_3_8B, published.DEEPSEEK_V3, published.MAMBA2_370M
ROPE = published.LLAMA_3_1_8B["rope_scaling"]
REFUSED = [
    (LLAMA_3_8B, {"model_type": "mamba"}, "model_type='mamba': expected one of llama"),
    (LLAMA_3_8B, {"logit_scale": 2.0}, "logit_scale=2.0 is not mapped"),
    (LLAMA_3_8B, {"hidden_act": "gelu"}, 'hidden_act="gelu": expected "silu"'),
    (LLAMA_3_8B, {"attention_bias": True}, "attention_bias=true: expected false"),
    (_without(LLAMA_3_8B, "num_hidden_layers"), {}, "num_hidden_layers is missing"),
    (LLAMA_3_8B, {"hidden_size": "wide"}, 'hidden_size="wide": expected a whole number'),
    (LLAMA_3_8B, {"hidden_size": 1 << 50}, "hidden_size="),
    (LLAMA_3_8B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic': expected default, linear, llama3 or yarn"),
    (DEEPSEEK_V3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear': expected default or yarn"),
    (LLAMA_3_8B, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (LLAMA_3_8B, {"rope_scaling": _without(ROPE, "factor")}, "rope_scaling.factor is missing"),
    (LLAMA_3_8B, {"rope_scaling": _without(YARN, "factor")}, "rope_scaling.factor is missing"),
    (LLAMA_3_8B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.original_max_position_embeddings is missing"),
    (LLAMA_3_8B, {"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor=0.5"),
    (LLAMA_3_8B, {"rope_scaling": YARN | {"factor": "4"}}, 'rope_scaling.factor="4"'),
    (LLAMA_3_8B, {"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 32}}, "rope_scaling.beta_fast=1: expected more than beta_slow=32"),
    (LLAMA_3_8B, {"rope_scaling": YARN | {"attention_factor": 1.5}}, "rope_scaling.attention_factor=1.5: expected 1, or 1.138"),
    (LLAMA_3_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: expected 1"),
    (LLAMA_3_8B, {"rope_scaling": ROPE, "rope_parameters": YARN}, "differ, and transformers uses the first"),
    (LLAMA_3_8B, {"rope_scaling": "yarn"}, "rope_scaling: expected one mapping"),
    (LLAMA_3_8B, {"rope_scaling": ROPE | {"low_freq_factor": 2.0}}, "rope_scaling.low_freq_factor=2: expected 1"),
    (LLAMA_3_8B, {"rope_scaling": ROPE | {"bend": 1}}, "rope_scaling.bend=1 is not mapped"),
    (LLAMA_3_8B, {"rope_parameters": {"full_attention": {}}}, "expected one mapping for all layers"),
    (LLAMA_3_8B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
    (LLAMA_3_8B, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, 'quant_method="gptq": expected "fp8"'),
    (DEEPSEEK_V3, {"topk_group": 2}, "expected twice as many experts per token as groups"),
    (DEEPSEEK_V3, {"rms_norm_eps": 1e-05}, "rms_norm_eps=1e-05: expected 1e-06"),
    (MAMBA2_370M, {"conv_kernel": 8}, "conv_kernel=8: expected 4"),
    (MAMBA2_370M, {"time_step_limit": [0.0, 0.1]}, "megatron-core does not limit step sizes"),
    (MAMBA2_370M, {"num_heads": 16}, "hidden_size times expand=2 is not 16 heads of 64 channels"),
    (_without(published.NEMOTRON_3_NANO, "hybrid_override_pattern"), {"layers_block_type": ["mamba", "rwkv"]}, "expected attention, full_attention"),
    (published.NEMOTRON_3_NANO, {"num_hidden_layers": 8}, "num_hidden_layers=8 for 52 layers"),
    (published.NEMOTRON_3_SUPER, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1: expected 0"),
    (published.MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: expected 0.0"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "change", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_is_not_mapped_is_refused_by_name(config: dict[str, Any], change: dict[str, Any], said: str) -> None:
    with pytest.raises(Contradiction) as refused:
        section(config | change)
    assert said in str(refused.value)


def test_every_fault_comes_at_once() -> None:
    with pytest.raises(Contradiction) as refused:
        section(published.LLAMA_3_8B | {"logit_scale": 2.0, "hidden_act": "gelu", "vocab_size": 0})
    assert len(refused.value.faults) == 3


@pytest.mark.parametrize(
    "config",
    [published.LLAMA_3_1_8B, published.MISTRAL_7B, published.MIXTRAL_8X7B, published.QWEN2_5_7B, published.QWEN3_30B_A3B, published.DEEPSEEK_V3,
     published.NEMOTRON_3_NANO, published.NEMOTRON_3_SUPER, published.MAMBA2_370M],
    ids=lambda config: f"{config['model_type']} {config['hidden_size']}",
)  # fmt: skip
def test_a_section_becomes_the_config_that_it_came_from(config: dict[str, Any]) -> None:
    made = section(config)
    back = config_json(filled("model", made), rows=config["vocab_size"], dtype=config["torch_dtype"])
    assert section(back) == made
    shared = back.keys() & config.keys() - {"sliding_window", "rope_scaling", "max_window_layers", "residual_in_fp32"}
    assert {key: back[key] for key in shared} == {key: config[key] for key in shared}


def test_a_model_that_no_family_has_is_refused_by_name() -> None:
    model = filled("model", section(published.LLAMA_3_8B) | {"normalization": "LayerNorm", "rotary_interleaved": True})
    with pytest.raises(Contradiction) as refused:
        config_json(model, rows=128256, dtype="bfloat16")
    assert "model.normalization=LayerNorm: config.json of llama says RMSNorm" in str(refused.value)
    assert "model.rotary_interleaved=True" in str(refused.value)


def folder(path: Path, config: Any, **files: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def test_a_folder_is_a_configuration(tmp_path: Path) -> None:
    place = folder(tmp_path / "model", published.LLAMA_3_1_8B, tokenizer__json=b"{}")
    run = ConfigContainer.load(f"hf:{place}", ["mixed_precision=fp8_cs"]).resolved(training=False)
    assert (run.recipe, run.facts.shape.seq_length) == ("bf16_with_fp8_current_scaling_mixed", 4096)
    assert run.origin["model.num_layers"] == f"hf:{place}"
    assert tree(f"hf:{place}")["data"]["tokenizer"] == str(place)


def header(entries: Any) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


FOLDERS = {
    "code": (published.LLAMA_3_8B | {"auto_map": {"AutoModel": "x.Y"}}, {}, "it names Python code to run"),
    "trusted code": (published.LLAMA_3_8B | {"trust_remote_code": True}, {}, "trust_remote_code=true"),
    "pickles": (published.LLAMA_3_8B, {"pytorch_model__bin": b"x"}, "pickled weights (pytorch_model.bin)"),
    "no JSON": ("{", {}, "config.json is not JSON"),
    "deep JSON": ("[" * 100_000, {}, "config.json is not JSON: nested too deeply"),
    "a list": ("[]", {}, "expected an object, got list"),
    "cut off": (published.LLAMA_3_8B, {"model__safetensors": b"\xff\x00"}, "is truncated"),
    "a huge header": (published.LLAMA_3_8B, {"model__safetensors": b"\xff" * 16}, "is truncated"),
    "data that is not there": (published.LLAMA_3_8B, {"model__safetensors": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})}, "which does not fit the file"),
    "an unknown dtype": (published.LLAMA_3_8B, {"model__safetensors": header({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 0]}})}, "which does not fit the file"),
    "an index that leads away": (published.LLAMA_3_8B, {"model__safetensors__index__json": json.dumps({"weight_map": {"a": "../x.safetensors"}}).encode()}, "expected safetensors files in the same folder"),
    "an index of pickles": (published.LLAMA_3_8B, {"model__safetensors__index__json": json.dumps({"weight_map": {"a": "x.bin"}}).encode()}, "expected safetensors files in the same folder"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "files", "said"), FOLDERS.values(), ids=FOLDERS)
def test_what_could_run_code_or_is_damaged_is_refused(tmp_path: Path, config: Any, files: dict[str, bytes], said: str) -> None:  # fmt: skip
    place = folder(tmp_path / "model", config, **files)
    with pytest.raises((BadValue, Contradiction)) as refused:
        tree(f"hf:{place}")
    assert said in str(refused.value)


def test_a_name_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    for name, said in ((tmp_path / "none", "no such folder"), (CONFIGS / "gpt_tiny.yaml", "a file, expected hf:DIR")):
        with pytest.raises(BadValue, match=said):
            tree(f"hf:{name}")


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert tensors(folder(tmp_path / "model", published.LLAMA_3_8B)) == {}


def test_verbs_that_think_answer_for_a_folder_without_any_library(tmp_path: Path, cli) -> None:
    vocabulary = json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}).encode()
    place = folder(tmp_path / "model", published.LLAMA_3_1_8B, tokenizer__json=vocabulary)
    words = f"memory --config hf:{place} --target b200 data.tokenizer={place} model.vocab_size=null"
    libraries = ("safetensors", "tokenizers", "transformers", "datasets", "huggingface_hub", "pyarrow")
    code = f"from mpbridge.cli.main import main\nassert main({words.split()}) == 0"
    assert loaded_by(code, (*HEAVY, *libraries)) == []
    assert "parameters on 1 GPU" in cli(words)
