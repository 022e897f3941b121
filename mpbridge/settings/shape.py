"""The model section as a ModelShape, with the values that megatron-core itself would derive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import PARTS, ModelShape, Parallel
from mpbridge.settings.huggingface.tokenizers import BYTE, is_factory, tokenizer_files
from mpbridge.settings.sections import GPT, LORA, LORA_TARGETS, YARN

BYTE_VOCABULARY = 259
"""The built-in tokenizer's: 256 bytes, end of document, padding, begin of sequence."""
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
_MAMBA = ("mamba_head_dim", "mamba_num_groups", "mamba_state_dim")
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


def shape_faults(model: Mapping[str, Any]) -> Iterator[str]:
    """Missing or indivisible sizes in a model section with its defaults filled in."""
    missing = [f"model.{name} is missing" for name in _REQUIRED if not model.get(name)]
    if missing:
        yield from missing
        return
    hidden, heads, groups = model["hidden_size"], model["num_attention_heads"], model["num_query_groups"]
    if model["kv_channels"] is None and hidden % heads:
        yield f"model.hidden_size={hidden} cannot be divided into {heads} attention heads: change one of them or give model.kv_channels"
    if groups is not None and heads % groups:
        yield f"model.num_attention_heads={heads} is not a multiple of model.num_query_groups={groups}: use a divisor of {heads}"
    width, positions, latent = (
        model["kv_channels"] or hidden // heads,
        model["position_embedding_type"],
        model["multi_latent_attention"],
    )
    if positions in ("rope", "yarn") and not latent and width % 2 and model["rotary_percent"] == 1:
        yield f"model.position_embedding_type={positions} rotates pairs of channels, and a head has {width}: change model.kv_channels or the number of heads"
    if latent and model["qk_pos_emb_head_dim"] % 2:
        yield f"model.qk_pos_emb_head_dim={model['qk_pos_emb_head_dim']}: rotary embeddings rotate pairs of channels: expected an even number"
    skipped, window = model.get("window_attn_skip_freq"), model["window_size"]
    if isinstance(skipped, list) and len(skipped) != model["num_layers"]:
        yield f"model.window_attn_skip_freq has {len(skipped)} entries for {model['num_layers']} layers: give one for each, or one number"
    if window is not None and len(window) != 2:
        yield f"model.window_size={window}: expected two numbers, the tokens seen to the left and to the right"
    for find in (_hybrid_faults, _lora_faults, _yarn_faults, _expert_faults):
        yield from find(model)


def pattern_of(model: Mapping[str, Any]) -> str:
    """A hybrid's pattern of layers; empty if the section describes none."""
    return model.get("hybrid_override_pattern") or ""


def _lora_faults(model: Mapping[str, Any]) -> Iterator[str]:
    given = [f"model.{name}={model[name]}" for name in LORA if model[name] is not None]
    if given and not model["lora_rank"]:
        yield f"{', '.join(given)}: only read with a rank: model.lora_rank=8"
    elif (model["lora_rank"] or 1) < 1:
        yield f"model.lora_rank={model['lora_rank']}: expected at least 1"


def mamba_sizes(model: Mapping[str, Any], hidden: int) -> dict[str, int]:
    """Sizes of a Mamba layer, with the number of heads that megatron-core derives from twice the hidden size (ssm/mamba_mixer.py)."""
    sizes = {name: int(model[name]) for name in _MAMBA}
    return sizes | {"mamba_num_heads": int(model["mamba_num_heads"] or 2 * hidden // sizes["mamba_head_dim"])}


def _hybrid_faults(model: Mapping[str, Any]) -> Iterator[str]:
    pattern = pattern_of(model)
    if not pattern:
        return
    wrong = list(_pattern_faults(pattern, model))
    yield from wrong
    sizes = {} if wrong else mamba_sizes(model, model["hidden_size"])
    heads, groups = sizes.get("mamba_num_heads", 1), sizes.get("mamba_num_groups", 1)
    if heads < 1 or heads % groups:
        yield f"model.mamba_num_heads={heads} cannot be divided into model.mamba_num_groups={groups}: change one of them"


def _pattern_faults(pattern: str, model: Mapping[str, Any]) -> Iterator[str]:
    name, unknown = f"model.hybrid_override_pattern={pattern}", sorted(set(pattern) - set(PARTS))
    if unknown:
        known = ", ".join(f"{symbol} ({part})" for symbol, part in PARTS.items())
        yield f"{name} has {', '.join(map(repr, unknown))}: expected {known}"
    if len(pattern) != model["num_layers"]:
        yield f"{name} has {len(pattern)} symbols for model.num_layers={model['num_layers']}: give one for each layer"
    if "E" in pattern and not model["num_moe_experts"]:
        yield f"{name} has mixtures of experts (E): model.num_moe_experts is missing"
    for size in _MAMBA:
        if not model[size] or model[size] < 1:
            yield f"model.{size}={model[size]}: expected at least 1"


_NOT_UNDER_YARN = {
    "rope_scaling": False, "seq_len_interpolation_factor": None, "rotary_percent": 1.0, "rotary_interleaved": False, "flash_decode": False,
    "fused_single_qkv_rope": False,
}  # fmt: skip
"""Settings that megatron-core's YarnRotaryEmbedding ignores or rejects, and the fused kernel that ignores its factor on sines and cosines."""


def _yarn_faults(model: Mapping[str, Any]) -> Iterator[str]:
    if model["position_embedding_type"] != "yarn":
        plain = GPT()
        given = [f"model.{name}={model[name]}" for name in YARN if model[name] != getattr(plain, name)]
        if given:
            yield f"{', '.join(given)}: only read with model.position_embedding_type=yarn"
        return
    if model["multi_latent_attention"]:
        yield (
            "model.position_embedding_type=yarn does not apply to latent attention, which takes model.rope_type=yarn with rotary_scaling_factor,"
            " original_max_position_embeddings and the related settings"
        )
        return
    needed = ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings")
    yield from (f"model.{name} is missing" for name in needed if model[name] is None)
    for name, usual in _NOT_UNDER_YARN.items():
        if model[name] != usual:
            yield f"model.{name}={model[name]}: megatron-core's YaRN does not support it: leave it at {usual}"
    fast, slow = model["yarn_beta_fast"], model["yarn_beta_slow"]
    if fast <= slow:
        yield f"model.yarn_beta_fast={fast:g}: expected more than model.yarn_beta_slow={slow:g}"


def _expert_faults(model: Mapping[str, Any]) -> Iterator[str]:
    experts, topk, pattern = model["num_moe_experts"], model["moe_router_topk"], model["moe_layer_freq"]
    if not experts:
        return
    if topk > experts:
        yield f"model.moe_router_topk={topk} experts per token, but model.num_moe_experts={experts}"
    if isinstance(model["moe_aux_loss_coeff"], list) and not isinstance(model["moe_router_load_balancing_type"], list):
        yield "model.moe_aux_loss_coeff is a list and model.moe_router_load_balancing_type is not: give one number, or one for each of a list of types"
    if model["moe_apply_probs_on_input"] and topk != 1:
        yield f"model.moe_apply_probs_on_input needs model.moe_router_topk=1, found {topk}"
    if isinstance(pattern, list) and len(pattern) != model["num_layers"]:
        yield f"model.moe_layer_freq has {len(pattern)} entries for {model['num_layers']} layers: give one for each, or one number"
    if isinstance(pattern, int) and pattern < 1:
        yield f"model.moe_layer_freq={pattern}: expected at least 1 (every layer is a mixture of experts)"


def mixtures(frequency: int | list[int], layers: int) -> list[bool]:
    """Whether each layer is a mixture of experts, by moe_layer_freq."""
    return [bool(frequency[i]) if isinstance(frequency, list) else i % frequency == 0 for i in range(layers)]


def model_shape(model: Mapping[str, Any], *, vocab_size: int, seq_length: int) -> ModelShape:
    """The shape of a model section with its defaults filled in, in which `shape_faults` found nothing."""
    layers, hidden, heads = model["num_layers"], model["hidden_size"], model["num_attention_heads"]
    ffn = model["ffn_hidden_size"] or 4 * hidden
    experts, pattern = model["num_moe_experts"], model["moe_layer_freq"]
    # megatron-core: layer i is a mixture of experts if i % frequency == 0, or according to the list (gpt_layer_specs.py)
    placed = pattern_of(model)
    mixture: tuple[bool, ...] = ()
    if experts:
        mixture = tuple(symbol == "E" for symbol in placed) if placed else tuple(mixtures(pattern, layers))
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
        hybrid=bool(placed or model.get("is_hybrid_model")),
        pattern=placed,
        mamba=mamba_sizes(model, hidden) if placed else None,
        sinks=str(model["softmax_type"]) == "learnable",
        lora_rank=model["lora_rank"] or 0,
        lora_targets=tuple(model["lora_targets"] or LORA_TARGETS) if model["lora_rank"] else (),
    )


def smallest_world(sizes: Mapping[str, Any]) -> int:
    """The fewest processes that the parallel sizes (defaults filled in) allow: one replica of the dense part, and of every expert."""
    tensor, pipeline, expert = (sizes[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline", "expert"))
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
