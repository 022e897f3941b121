"""Folders that transformers itself writes: the model that is built here computes the same logits from them, and gives the same bits back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.serving import folders

transformers = pytest.importorskip("transformers", reason="transformers makes the models (pip install -e '.[hf]')")

BASE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
DENSE_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
MAMBA2 = {
    "vocab_size": 128, "hidden_size": 64, "num_heads": 16, "head_dim": 8, "state_size": 16, "n_groups": 2,
    "chunk_size": 16,
}  # fmt: skip
NEMOTRON_H = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "mamba_num_heads": 16, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16, "max_position_embeddings": 256,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "time_step_min": 1e-30,  # transformers raises smaller step sizes to it, megatron-core does not
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, tied, linear rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, yarn, factor of one": ("Llama", {"rope_parameters": DENSE_YARN | {"attention_factor": 1.0, "beta_fast": 16, "beta_slow": 2}}),
    "mistral, yarn, not rounded": ("Mistral", {"sliding_window": None, "rope_parameters": DENSE_YARN | {"truncate": False}}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": DENSE_YARN}),
    "qwen3_moe, yarn, two scales": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "rope_parameters": DENSE_YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}),
    "mistral with a window": ("Mistral", {"sliding_window": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "rope_parameters": YARN}),
    "deepseek_v3, whole queries": ("DeepseekV3", {**LATENT, "q_lora_rank": None}),
    "mamba2": ("Mamba2", {**MAMBA2, "num_hidden_layers": 2}),
    "mamba2, tied": ("Mamba2", {**MAMBA2, "num_hidden_layers": 1, "n_groups": 4, "tie_word_embeddings": True}),
    "nemotron_h": ("NemotronH", NEMOTRON_H),
    "nemotron_h, experts": ("NemotronH", {**NEMOTRON_H, **ROUTED, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}),
}  # fmt: skip


def written(kind: str, settings: dict[str, Any], place: Path) -> Any:
    """The model, its weights moved off their even start (norms of 1, biases of 0), saved by transformers."""
    config = getattr(transformers, f"{kind}Config")(**(settings if "chunk_size" in settings else BASE | settings))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    moved = [*model.parameters(), *(b for name, b in model.named_buffers() if "correction_bias" in name)]
    with torch.no_grad():
        for tensor in moved:
            tensor.add_(torch.randn_like(tensor) * (0.2 if tensor.ndim == 1 else 0.05))
    model.save_pretrained(place)
    return model.eval()


@pytest.mark.parametrize(("kind", "settings"), MODELS.values(), ids=MODELS)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_logits_are_those_of_transformers_and_the_way_back_is_exact(
    layer: None, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    from safetensors.torch import load_file

    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.training.serving.convert import to_folder

    model = written(kind, settings, tmp_path / "hf")
    taken = folders.convert(tmp_path / "hf", tmp_path / "checkpoint")
    tokens = torch.randint(0, 128, (2, 48), generator=torch.Generator().manual_seed(1))
    routed = "Moe" in kind or kind in ("Mixtral", "DeepseekV3") or "n_routed_experts" in settings
    moe = ("model.moe_grouped_gemm=false",) if routed else ()
    engine = build_engine(folders.run_of(tmp_path / "hf", "mixed_precision=fp32", "data.seq_length=48", *moe))
    try:
        folders.load(engine, taken.path)
        engine.model[0].eval()
        with torch.no_grad():
            ours, theirs = engine.model[0](tokens, torch.arange(48).expand(2, 48), None), model(tokens).logits
    finally:
        engine.close()
    # experts' outputs are summed in another order: a few units in the last place of FP32
    assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()
    to_folder(taken.path, tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "back" / "config.json").read_text().split() == (
        tmp_path / "hf" / "config.json"
    ).read_text().split()
