"""Mixtures of experts, latent attention and multi-token prediction: whole sets of experts, routers and copies are in the right list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpbridge.settings.huggingface.kept import ENGINES
from mpbridge.settings.huggingface.section import family_of
from mpbridge.settings.huggingface.tensors import mapped
from mpbridge.training.serving.convert import to_checkpoint
from mpbridge.training.serving.folder import examine
from tests.training.serving import folders, models

COMMON: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128,
    "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 128, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip


def checkpoint(config: dict[str, Any], root: Path) -> Path:
    """Random weights of every tensor that the family's folder has."""
    (root / "empty").mkdir(parents=True)
    (root / "empty" / "config.json").write_text(json.dumps(config))
    run = folders.run_of(root / "empty", "model.moe_grouped_gemm=false")
    random = torch.Generator().manual_seed(1)
    made = {}
    for one in mapped(family_of(config), run.facts.shape, run.inputs["model"]):
        for name, size in one.parts:
            made[name] = (torch.randn(size, generator=random) * 0.05).to(torch.float32 if one.wide else torch.bfloat16)
    place = folders.write(root / "bf16", config, made)
    return to_checkpoint(place, root / "run", folders.run_of(place, "model.moe_grouped_gemm=false")).path


@pytest.mark.parametrize("scaling", ["mxfp8", "blockwise", "nvfp4"])
def test_experts_are_quantized_and_routers_are_listed(scaling: str, tmp_path: Path) -> None:
    path = checkpoint(QWEN3, tmp_path)
    for method in ("compressed-tensors", "modelopt"):
        folder = models.serve(path, tmp_path / method, method, models.RECIPES[scaling])
        kept = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
        assert kept == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
        report = examine(folder, path, recipe=models.RECIPES[scaling])
        assert (report.found, report.quantized, report.high) == ([], 2 * (4 + 3 * 4), 3)
        found = examine(folder, engines=ENGINES).found
        assert {one.kind for one in found} <= {"engine"}, found
        by_tensor = [one.text for one in found if one.name == "vllm"]
        assert by_tensor == (
            ["does not read modelopt FP8 by 128 x 128 blocks of experts"]
            if (method, scaling) == ("modelopt", "blockwise")
            else []
        )


def test_latent_attention_and_further_tokens(tmp_path: Path) -> None:
    path = checkpoint(DEEPSEEK, tmp_path)
    folder = models.serve(path, tmp_path / "fp8", "fp8", models.RECIPES["blockwise"])
    report = examine(folder, path, recipe=models.RECIPES["blockwise"], engines=ENGINES)
    assert report.found == []
    held = load_file(folder / "model.safetensors")
    (bias,) = (name for name in held if name.endswith("layers.1.mlp.gate.e_score_correction_bias"))
    held[bias] = held[bias].bfloat16()
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (one,) = examine(tmp_path, path, recipe=models.RECIPES["blockwise"]).found
    assert (one.name, one.text) == (bias, "is stored as BF16: 4 values are rounded")
    del held[bias]
    save_file(held, tmp_path / "model.safetensors")
    (one,) = examine(tmp_path, path, recipe=models.RECIPES["blockwise"]).found
    assert (one.name, one.kind) == (bias, "missing")
    kept = json.loads((folder / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.mlp.gate" in kept
    assert [name for name in kept if "proj" in name] == ["model.layers.2.eh_proj"]
    # training scales the two down projections apart, and engines fuse them under one second level
    with pytest.raises(
        Exception, match="q_a_proj: engines use one second-level scale for linears that training scales apart"
    ):
        models.serve(path, tmp_path / "nvfp4", "modelopt", models.RECIPES["nvfp4"])


def test_the_projection_of_further_tokens_is_served_as_engines_read_it(tmp_path: Path) -> None:
    path, name = checkpoint(DEEPSEEK, tmp_path), "model.layers.2.eh_proj"
    folder = models.serve(path, tmp_path / "fp8", "fp8", models.RECIPES["blockwise"])
    held, contract = load_file(folder / "model.safetensors"), json.loads((folder / "contract.json").read_text())
    plain = load_file(tmp_path / "bf16" / "model.safetensors")[f"{name}.weight"]
    # vLLM's and SGLang's loaders copy into the parameter of an nn.Linear, without a look at scales
    linear = torch.nn.Linear(512, 256, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(held[f"{name}.weight"])
    assert torch.equal(linear.weight, plain)
    assert name not in contract["modules"]
    (note,) = contract["notes"]
    assert note == f"{name}: trained in FP8 with blockwise scaling, served in high precision, as engines compute it"
    assert note in examine(folder, path, recipe=models.RECIPES["blockwise"]).notes
    (folder / "config.json").write_text((folder / "config.json").read_text().replace(f'"{name}",', ""))
    assert note in examine(folder).notes
    # as DeepSeek-V3 is published: in BF16, and in no list
    assert examine(folder, path, recipe=models.RECIPES["blockwise"], engines=ENGINES).found == []
    # another tool's folder: codes that no list makes an engine read
    scale = torch.exp2(torch.ceil(torch.log2(plain.float().abs().amax() / 448)))
    held[f"{name}.weight"] = (plain.float() / scale).to(torch.float8_e4m3fn)
    held[f"{name}.weight_scale_inv"] = scale.expand(2, 4).clone()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(held, tmp_path / "model.safetensors")
    for engines in ((), ENGINES):
        (one,) = examine(tmp_path, engines=engines).found
        assert (one.name, one.text) == (name, "is stored quantized, and no engine reads it so")
    (one,) = (one for one in examine(tmp_path, path, recipe=models.RECIPES["blockwise"]).found if one.kind == "bytes")
    assert one.text == "stored quantized; no engine reads it so"


@pytest.mark.parametrize(
    "changed",
    [{"num_experts_per_tok": 1}, {"routed_scaling_factor": 9.0}, {"norm_topk_prob": False}, {"rope_theta": 5.0}],
    ids=str,
)
def test_a_config_of_another_function_is_not_the_runs(changed: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoint(DEEPSEEK, tmp_path)
    folder = models.serve(path, tmp_path / "fp8", "fp8", models.RECIPES["blockwise"])
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    found = examine(folder, path, recipe=models.RECIPES["blockwise"]).found
    assert [(one.name, one.kind) for one in found] == [("config.json", "config")]
    assert str(next(iter(changed.values()))).lower() in found[0].text
