"""The model families whose folders are read and written: one row per model_type, with what its config.json omits and how its tensors are named.

ConfigFields reads one config.json: fields are read by name and type, faults are collected, and fields that were not read are refused by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

_SIZES: Mapping[str, str] = MappingProxyType({
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads", "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size", "max_sequence_length": "max_position_embeddings",
})  # fmt: skip


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
    sizes: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    """Setting of the model section -> field of config.json."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' values for omitted fields."""

    @property
    def hybrid(self) -> bool:
        """Whether it has Mamba layers: a pattern then says which."""
        return "num_layers" not in self.sizes


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

BOOKKEEPING = frozenset({
        "model_type", "_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict", "torchscript",
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class", "prefix",
        "output_router_logits", "output_attentions", "output_hidden_states", "keys_to_ignore_at_inference", "task_specific_params", "problem_type",
        "id2label", "label2id", "pruned_heads", "finetuning_task", "chunk_size_feed_forward", "use_bfloat16", "tf_legacy_loss", "is_encoder_decoder",
        "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "_attn_implementation", "attn_implementation",
        "_attn_implementation_autoset", "pretraining_tp", "ep_size", "transformers.js_config", "unsloth_version", "unsloth_fixed",
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k",
        "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "auto_map", "trust_remote_code",
})  # fmt: skip
"""Fields that say nothing about what the model computes from its tensors: tokens and generation, housekeeping, parallel layout."""
LARGEST = 1 << 40
"""Upper bound of any size of a model."""


class ConfigFields:
    """The fields of config.json, or of a mapping in it; `faults` collects everything that is wrong."""

    def __init__(
        self, data: Mapping[str, Any], faults: list[str], defaults: Mapping[str, Any], within: str = ""
    ) -> None:
        self.data, self.faults, self.defaults, self.within = data, faults, defaults, within
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null; it then counts as read."""
        self._taken.add(name)
        return self.data.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it is; the family's default if the field is omitted; None for null, which replaces that default in transformers too."""
        self._taken.add(name)
        return self.data[name] if name in self.data else self.defaults.get(name)

    def size(self, name: str, *, least: int = 1) -> int:
        """A whole number from `least`; required."""
        value = self.raw(name)
        if value is None:
            self.fault(f"{name} is missing")
        elif type(value) is not int or not least <= value <= LARGEST:
            self._odd(name, value, f"a whole number from {least}")
        else:
            return value
        return least

    def size_or(self, name: str, default: Any, *, least: int = 1) -> Any:
        """`size`, or the default where the field is omitted or null."""
        return self.size(name, least=least) if self.has(name) else default

    def number(self, name: str, default: float = 0.0, *, least: float = 0.0) -> float:
        """A finite number from `least`."""
        value = self.raw(name)
        if value is None:
            return float(self.defaults.get(name, default))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= sys.float_info.max:
            self._odd(name, value, f"a number from {least:g}")
            return default
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._odd(name, value, "true or false")
        return bool(value)

    def whole_numbers(self, name: str) -> list[int]:
        """A list of whole numbers from 0, [] if there is none."""
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            self._odd(name, value, "a list of whole numbers")
            return []
        return value

    def must(self, name: str, allowed: Iterable[Any], why: str) -> None:
        """Refuses a value that is set but not in `allowed`."""
        value, words = self.raw(name), list(allowed)
        if value is not None and not any(value == one and type(value) is type(one) for one in words):
            shown = " or ".join(json.dumps(one) for one in words)
            self._odd(name, value, f"{shown}: {why}")

    def fault(self, text: str) -> None:
        """Adds a fault."""
        self.faults.append(f"{self.within}{text}")

    def left(self) -> list[str]:
        """Names of fields that were not read."""
        return sorted(self.data.keys() - self._taken)

    def _odd(self, name: str, value: Any, expected: str) -> None:
        text = json.dumps(value, default=str)
        self.fault(f"{name}={text if len(text) <= 60 else text[:57] + '...'}: expected {expected}")
