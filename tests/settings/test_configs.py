"""The shipped configurations and recipe files: legal here, and legal to the real megatron-core."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpbridge.backend.megatron.targets import build
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.settings.container import ConfigContainer

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
PARAMETERS = {
    "gpt_tiny": (4.3e6, 4.4e6), "gpt_125m": (1.6e8, 1.7e8), "llama3_8b": (8.02e9, 8.04e9), "moe_tiny": (1.9e6, 2.1e6), "nemotron_h_tiny": (1.2e6, 1.3e6),
    "nemotron_h_8b": (8.05e9, 8.15e9), "nemotron_nano_v2_12b": (12.3e9, 12.32e9), "nemotron_3_nano": (31.5e9, 31.65e9), "nemotron_3_super": (120.5e9, 120.8e9),
}  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_builds_megatron_cores_configs(path):
    c = ConfigContainer.load(path, ["mixed_precision=bf16_mixed"])
    run = c.resolved(c.smallest_world() * 2)
    made = build(run.inputs, run.plan)
    shape, distributed = run.facts.shape, run.facts.optimizer.distributed
    assert (made.model.num_layers, made.model.ffn_hidden_size) == (shape.num_layers, shape.ffn_hidden_size)
    assert made.ddp.use_distributed_optimizer == distributed == made.optimizer.use_distributed_optimizer
    assert made.gpt["vocab_size"] == shape.vocab_size


def parameters(shape) -> int:
    """Of a dense or mixture-of-experts GPT, or of a hybrid with MLPs that are not gated, without learned positions and biases."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    attention = hidden * shape.kv_channels * (heads + 2 * shape.num_query_groups) + heads * shape.kv_channels * hidden
    count = 2 * shape.vocab_size * hidden + hidden
    for kind in shape.pattern:
        # z, x, B, C and dt; the convolution of x, B and C over four tokens with its bias; three values per head; two norms
        heads, sizes = shape.sizes["mamba_num_heads"], shape.sizes
        inner, states = heads * sizes["mamba_head_dim"], 2 * sizes["mamba_num_groups"] * sizes["mamba_state_dim"]
        mamba = hidden * (2 * inner + states + heads) + 5 * (inner + states) + 3 * heads + inner + inner * hidden
        # experts, their router, and one that all tokens share
        latent = shape.sizes.get("moe_latent_size", 0)
        routed = (shape.experts or 0) * shape.expert_ffn_hidden_size
        mixture = 2 * (latent or hidden) * routed + 2 * hidden * (shape.shared_expert_size + latent)
        mixture += hidden * (shape.experts or 0)
        count += hidden + {"M": mamba, "*": attention, "-": 2 * hidden * shape.ffn_hidden_size, "E": mixture}[kind]
    for layer in range(0 if shape.pattern else shape.num_layers):
        mixture = shape.is_expert_layer(layer)
        routed = shape.experts * (3 * shape.expert_ffn_hidden_size + 1) if mixture else 0
        every = shape.shared_expert_size if mixture else shape.ffn_hidden_size
        count += attention + hidden * (2 + routed + 3 * every)
    return count


@pytest.mark.parametrize("name", PARAMETERS)
def test_shipped_models_have_the_size_that_they_are_called_by(name):
    c = ConfigContainer.load(ROOT / "configs" / f"{name}.yaml")
    low, high = PARAMETERS[name]
    assert low <= parameters(c.resolved(c.smallest_world(), training=False).facts.shape) <= high


def test_deepseek_has_the_depth_and_experts_of_its_report():
    c = ConfigContainer.load(ROOT / "configs" / "deepseek_v3_671b.yaml")
    run = c.resolved(c.smallest_world())
    shape = run.facts.shape
    assert shape.expert_layers.count(False) == 3
    routed = shape.expert_layers.count(True) * shape.experts * 3 * shape.hidden_size * shape.expert_ffn_hidden_size
    assert 6.5e11 < routed < 6.6e11
    ends = (run.inputs["model"][f"num_layers_in_{end}_pipeline_stage"] for end in ("first", "last"))
    assert sum(ends) + 6 * 8 == 61


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_file_resolves(path):
    ours, plain = (resolve(get_mixed_precision_config(name), layers=8) for name in (path, "bf16_mixed"))
    assert ours != plain


def test_the_recipe_files_mean_what_their_comments_say():
    def policy(name):
        return resolve(get_mixed_precision_config(ROOT / "configs" / "recipes" / f"{name}.yaml"), layers=8)

    assert policy("bf16_grads").reduce.short == "bf16"
    assert policy("fp8_current_two_edges").bf16_layers(8) == (0, 1, 6, 7)
    assert not policy("fp8_current_two_edges").stored
    assert policy("fp8_mlp_only").at("mlp.linear_fc1", 3, 8).format == "hybrid"
    assert policy("fp8_mlp_only").at("self_attention.linear_qkv", 3, 8) is None
    assert [getattr(policy("bf16_small_states"), role).bytes for role in ("exp_avg", "exp_avg_sq")] == [1, 2]
