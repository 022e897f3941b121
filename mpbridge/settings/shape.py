"""The model section as a ModelShape, with the values that megatron-core itself would derive."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import PARTS, SIZES, ModelShape, Parallel
from mpbridge.settings.huggingface.tokenizers import BYTE, is_factory, tokenizer_files
from mpbridge.settings.sections import GPT, LORA, LORA_TARGETS, YARN

BYTE_VOCABULARY = 259
"""The built-in tokenizer's: 256 bytes, end of document, padding, begin of sequence."""
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def vocabulary(data: Mapping[str, Any]) -> int:
    """Number of tokens of the data section's tokenizer, from its files. Raises BadValue with the cure if it is not known here."""
    name = data["tokenizer"]
    if name == BYTE:
        return BYTE_VOCABULARY
    if is_factory(name):
        raise BadValue(
            f"model.vocab_size is missing: data.tokenizer={name!r} is code, which is not run to find its size: give model.vocab_size"
        )
    return tokenizer_files(name, data["end_of_text"]).size


def padded_vocabulary(size: int, step: int) -> int:
    """Rows of the embedding for `size` tokens: the next multiple of `step`."""
    return -(-size // step) * step


def shape_faults(model: Mapping[str, Any]) -> list[str]:
    """Missing or indivisible sizes in a model section with its defaults filled in."""
    faults = [f"model.{name} is missing" for name in _REQUIRED if not model.get(name)]
    if faults:
        return faults
    hidden, heads, groups = model["hidden_size"], model["num_attention_heads"], model["num_query_groups"]
    if model["kv_channels"] is None and hidden % heads:
        faults.append(
            f"model.hidden_size={hidden} cannot be divided into {heads} attention heads: change one of them or give model.kv_channels"
        )
    if groups is not None and heads % groups:
        faults.append(
            f"model.num_attention_heads={heads} is not a multiple of model.num_query_groups={groups}: use a divisor of {heads}"
        )
    width = model["kv_channels"] or hidden // heads
    if (
        model["position_embedding_type"] in ("rope", "yarn")
        and not model["multi_latent_attention"]
        and width % 2
        and model["rotary_percent"] == 1
    ):
        faults.append(
            f"model.position_embedding_type={model['position_embedding_type']} rotates pairs of channels, and a head has {width}: change model.kv_channels or the number of heads"
        )
    if model["multi_latent_attention"] and model["qk_pos_emb_head_dim"] % 2:
        faults.append(
            f"model.qk_pos_emb_head_dim={model['qk_pos_emb_head_dim']}: rotary embeddings rotate pairs of channels: expected an even number"
        )
    skipped = model.get("window_attn_skip_freq")
    if isinstance(skipped, list) and len(skipped) != model["num_layers"]:
        faults.append(
            f"model.window_attn_skip_freq has {len(skipped)} entries for {model['num_layers']} layers: give one for each, or one number"
        )
    if model["window_size"] is not None and len(model["window_size"]) != 2:
        faults.append(
            f"model.window_size={model['window_size']}: expected two numbers, the tokens seen to the left and to the right"
        )
    faults += [*_hybrid_faults(model), *_lora_faults(model)]
    faults += _yarn_faults(model)
    faults += _expert_faults(model)
    return faults


def pattern_of(model: Mapping[str, Any]) -> str:
    """A hybrid's pattern of layers; empty if the section describes none."""
    return model.get("hybrid_override_pattern") or ""


def _lora_faults(model: Mapping[str, Any]) -> list[str]:
    given = [f"model.{name}={model[name]}" for name in LORA if model[name] is not None]
    if given and not model["lora_rank"]:
        return [f"{', '.join(given)}: only read with a rank: model.lora_rank=8"]
    return [f"model.lora_rank={model['lora_rank']}: expected at least 1"] if (model["lora_rank"] or 1) < 1 else []


def sizes_of(model: Mapping[str, Any]) -> dict[str, int]:
    """SIZES of the parts in a hybrid's pattern, with the number of heads that megatron-core derives from twice the hidden size (ssm/mamba_mixer.py)."""
    names = [name for symbol in dict.fromkeys(pattern_of(model)) for name in SIZES.get(PARTS[symbol], ())]
    given = model["mamba_num_heads"] or 2 * model["hidden_size"] // model["mamba_head_dim"]
    return {name: int(given if name == "mamba_num_heads" else model[name]) for name in names}


def _hybrid_faults(model: Mapping[str, Any]) -> list[str]:
    pattern = pattern_of(model)
    if not pattern:
        return []
    name, faults = f"model.hybrid_override_pattern={pattern}", []
    unknown = sorted(set(pattern) - set(PARTS))
    if unknown:
        faults.append(
            f"{name} has {', '.join(map(repr, unknown))}: expected {', '.join(f'{s} ({part})' for s, part in PARTS.items())}"
        )
    if len(pattern) != model["num_layers"]:
        faults.append(
            f"{name} has {len(pattern)} symbols for model.num_layers={model['num_layers']}: give one for each layer"
        )
    if "E" in pattern and not model["num_moe_experts"]:
        faults.append(f"{name} has mixtures of experts (E): model.num_moe_experts is missing")
    for size in (name for part in SIZES.values() for name in part if name != "mamba_num_heads"):
        if not model[size] or model[size] < 1:
            faults.append(f"model.{size}={model[size]}: expected at least 1")
    if not faults and "M" in pattern:
        sizes = sizes_of(model)
        if sizes["mamba_num_heads"] < 1 or sizes["mamba_num_heads"] % sizes["mamba_num_groups"]:
            faults.append(
                f"model.mamba_num_heads={sizes['mamba_num_heads']} cannot be divided into model.mamba_num_groups={sizes['mamba_num_groups']}: change one of them"
            )
    return faults


_NOT_UNDER_YARN = {
    "rope_scaling": False, "seq_len_interpolation_factor": None, "rotary_percent": 1.0, "rotary_interleaved": False, "flash_decode": False,
    "fused_single_qkv_rope": False,
}  # fmt: skip
"""Settings that megatron-core's YarnRotaryEmbedding ignores or rejects, and the fused kernel that ignores its factor on sines and cosines."""


def _yarn_faults(model: Mapping[str, Any]) -> list[str]:
    if model["position_embedding_type"] != "yarn":
        plain = GPT()
        given = [f"model.{name}={model[name]}" for name in YARN if model[name] != getattr(plain, name)]
        return [f"{', '.join(given)}: only read with model.position_embedding_type=yarn"] if given else []
    if model["multi_latent_attention"]:
        return [
            "model.position_embedding_type=yarn does not apply to latent attention, which takes model.rope_type=yarn with rotary_scaling_factor,"
            " original_max_position_embeddings and the related settings"
        ]
    needed = ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings")
    faults = [f"model.{name} is missing" for name in needed if model[name] is None]
    faults += [
        f"model.{name}={model[name]}: megatron-core's YaRN does not support it: leave it at {plain}"
        for name, plain in _NOT_UNDER_YARN.items()
        if model[name] != plain
    ]
    if model["yarn_beta_fast"] <= model["yarn_beta_slow"]:
        faults.append(
            f"model.yarn_beta_fast={model['yarn_beta_fast']:g}: expected more than model.yarn_beta_slow={model['yarn_beta_slow']:g}"
        )
    return faults


def _expert_faults(model: Mapping[str, Any]) -> list[str]:
    if not model["num_moe_experts"]:
        return []
    layers, pattern, faults = model["num_layers"], model["moe_layer_freq"], []
    if model["moe_router_topk"] > model["num_moe_experts"]:
        faults.append(
            f"model.moe_router_topk={model['moe_router_topk']} experts per token, but model.num_moe_experts={model['num_moe_experts']}"
        )
    if isinstance(model["moe_aux_loss_coeff"], list) and not isinstance(model["moe_router_load_balancing_type"], list):
        faults.append(
            "model.moe_aux_loss_coeff is a list and model.moe_router_load_balancing_type is not: give one number, or one for each of a list of types"
        )
    if model["moe_apply_probs_on_input"] and model["moe_router_topk"] != 1:
        faults.append(f"model.moe_apply_probs_on_input needs model.moe_router_topk=1, found {model['moe_router_topk']}")
    if isinstance(pattern, list) and len(pattern) != layers:
        faults.append(
            f"model.moe_layer_freq has {len(pattern)} entries for {layers} layers: give one for each, or one number"
        )
    if isinstance(pattern, int) and pattern < 1:
        faults.append(f"model.moe_layer_freq={pattern}: expected at least 1 (every layer is a mixture of experts)")
    return faults


def model_shape(model: Mapping[str, Any], *, vocab_size: int, seq_length: int) -> ModelShape:
    """The shape of a model section with its defaults filled in, in which `shape_faults` found nothing."""
    layers, hidden, heads = model["num_layers"], model["hidden_size"], model["num_attention_heads"]
    ffn = model["ffn_hidden_size"] or 4 * hidden
    experts, pattern = model["num_moe_experts"], model["moe_layer_freq"]
    # megatron-core: layer i is a mixture of experts if i % frequency == 0, or according to the list (gpt_layer_specs.py)
    placed = pattern_of(model)
    mixture = (
        tuple(symbol == "E" for symbol in placed)
        if placed and experts
        else tuple(bool(pattern[i]) if isinstance(pattern, list) else i % pattern == 0 for i in range(layers))
        if experts
        else ()
    )
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn,
        num_query_groups=model["num_query_groups"] or heads,
        kv_channels=model["kv_channels"] or hidden // heads,
        vocab_size=vocab_size,
        seq_length=seq_length,
        gated=model["gated_linear_unit"],
        tied=model["share_embeddings_and_output_weights"],
        learned_positions=model["position_embedding_type"] == "learned_absolute",
        linear_bias=model["add_bias_linear"],
        qkv_bias=model["add_bias_linear"] or model["add_qkv_bias"],
        norm_bias=model["normalization"] == "LayerNorm",
        qk_layernorm=model["qk_layernorm"],
        experts=experts,
        expert_ffn_hidden_size=(model["moe_ffn_hidden_size"] or ffn) if experts else 0,
        expert_layers=mixture,
        expert_topk=model["moe_router_topk"] if experts else 0,
        shared_expert_size=model["moe_shared_expert_intermediate_size"] or 0,
        expert_bias=bool(experts) and model["moe_router_enable_expert_bias"],
        grouped_gemm=bool(experts) and model["moe_grouped_gemm"],
        latent_attention={name: model[name] or 0 for name in _LATENT} if model["multi_latent_attention"] else None,
        mtp_layers=model["mtp_num_layers"] or 0,
        hybrid=bool(pattern_of(model) or model.get("is_hybrid_model")),
        pattern=pattern_of(model),
        sizes=sizes_of(model) | ({"moe_latent_size": model["moe_latent_size"]} if model.get("moe_latent_size") else {}),
        sinks=str(model["softmax_type"]) == "learnable",
        lora_rank=model["lora_rank"] or 0,
        lora_targets=tuple(model["lora_targets"] or LORA_TARGETS) if model["lora_rank"] else (),
    )


def smallest_world(sizes: Mapping[str, Any]) -> int:
    """The fewest processes that the parallel sizes (defaults filled in) allow: one replica of the dense part, and of every expert."""
    tensor, pipeline, expert = (
        sizes["tensor_model_parallel_size"],
        sizes["pipeline_model_parallel_size"],
        sizes["expert_model_parallel_size"],
    )
    dense = tensor * pipeline * sizes["context_parallel_size"]
    return math.lcm(dense, (sizes["expert_tensor_parallel_size"] or tensor) * expert * pipeline)


def parallel_of(sizes: Mapping[str, Any], world_size: int) -> Parallel:
    """The parallel section (defaults filled in) in a world of that size. Raises BadValue if it does not fit."""
    return Parallel(
        world_size=world_size,
        tensor=sizes["tensor_model_parallel_size"],
        pipeline=sizes["pipeline_model_parallel_size"],
        virtual_pipeline=sizes["virtual_pipeline_model_parallel_size"],
        context=sizes["context_parallel_size"],
        expert=sizes["expert_model_parallel_size"],
        expert_tensor=sizes["expert_tensor_parallel_size"],
        sequence=sizes["sequence_parallel"],
    )
