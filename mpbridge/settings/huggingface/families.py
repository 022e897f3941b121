"""The model families whose folders are read and written: one row per model_type, with what its config.json omits and how its tensors are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One value of model_type."""

    name: str
    architecture: str
    """Class of its causal language model in transformers."""
    qkv_bias: bool = False
    """Queries, keys and values have biases, regardless of config.json."""
    qk_norm: bool = False
    """Queries and keys are normalised per head."""
    latent: bool = False
    """Multi-latent attention."""
    window: Literal["sliding_window", "use_sliding_window", ""] = ""
    """The field that switches a sliding window on."""
    experts: str = ""
    """Field with the number of experts; '': none."""
    expert_width: str = "moe_intermediate_size"
    """Field with an expert's width."""
    mixture: str = "mlp"
    """Module of a layer that holds its experts and router."""
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """An expert's linears: gate, up, down."""
    shared: str = ""
    """Module of shared experts; '': none."""
    outside: tuple[str, str] = ("model.embed_tokens", "model.norm")
    """The embedding and the last norm; layers stand beside them."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Of a hybrid with Mamba layers: setting of the model section -> field of config.json."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' values for omitted fields."""


_EPSILON = MappingProxyType({"rms_norm_eps": 1e-6})


def _and(**more: Any) -> Mapping[str, Any]:
    return MappingProxyType({**_EPSILON, **more})


_MAMBA_NAMES = ("backbone.embeddings", "backbone.norm_f")
_MAMBA_SIZES = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "mamba_num_groups": "n_groups"}


FAMILIES: Mapping[str, Family] = MappingProxyType({
    family.name: family
    for family in (
        Family(name="llama", architecture="LlamaForCausalLM", defaults=_EPSILON),
        Family(name="mistral", architecture="MistralForCausalLM", window="sliding_window", defaults=_and(num_key_value_heads=8, sliding_window=4096)),
        Family(
            name="mixtral", architecture="MixtralForCausalLM", window="sliding_window", experts="num_local_experts", expert_width="intermediate_size",
            mixture="block_sparse_moe", expert_parts=("w1", "w3", "w2"), defaults=_and(rms_norm_eps=1e-5, rope_theta=1e6, num_key_value_heads=8),
        ),
        Family(name="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=True, window="use_sliding_window", defaults=_and(num_key_value_heads=32)),
        Family(
            name="qwen2_moe", architecture="Qwen2MoeForCausalLM", qkv_bias=True, window="use_sliding_window", experts="num_experts",
            shared="shared_expert", defaults=_and(num_key_value_heads=16),
        ),
        Family(name="qwen3", architecture="Qwen3ForCausalLM", qk_norm=True, window="use_sliding_window", defaults=_and(head_dim=128, num_key_value_heads=32)),
        Family(
            name="qwen3_moe", architecture="Qwen3MoeForCausalLM", qk_norm=True, window="use_sliding_window", experts="num_experts",
            defaults=_and(num_key_value_heads=4),
        ),
        Family(
            name="deepseek_v3", architecture="DeepseekV3ForCausalLM", latent=True, experts="n_routed_experts", shared="shared_experts",
            defaults=_and(routed_scaling_factor=2.5),
        ),
        Family(
            name="nemotron_h", architecture="NemotronHForCausalLM", experts="n_routed_experts", mixture="mixer", shared="shared_experts",
            outside=_MAMBA_NAMES,
            sizes=_MAMBA_SIZES | {
                "mamba_num_heads": "mamba_num_heads", "mamba_head_dim": "mamba_head_dim", "mamba_state_dim": "ssm_state_size",
                "num_attention_heads": "num_attention_heads", "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim",
                "ffn_hidden_size": "intermediate_size", "max_sequence_length": "max_position_embeddings",
            },
            defaults=MappingProxyType({"num_key_value_heads": 8, "head_dim": 128, "n_group": 1, "topk_group": 1, "n_groups": 8, "n_shared_experts": 1}),
        ),
        Family(
            name="mamba2", architecture="Mamba2ForCausalLM", mixture="mixer", outside=_MAMBA_NAMES,
            sizes=_MAMBA_SIZES | {"mamba_num_heads": "num_heads", "mamba_head_dim": "head_dim", "mamba_state_dim": "state_size"},
            defaults=MappingProxyType({"n_groups": 8, "expand": 2, "initializer_range": 0.1}),
        ),
    )
})  # fmt: skip
"""model_type -> its row. Sources: the configuration and modeling modules of transformers 5.23 for the same model_type."""
