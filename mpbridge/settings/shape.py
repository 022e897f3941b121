"""The model section as a ModelShape, with the values that megatron-core itself would derive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import MOST, PARTS, SIZES, ModelShape, Parallel
from mpbridge.planning.memory.ranks import virtual_stages
from mpbridge.settings.huggingface.tokenizers import BYTE, BYTE_VOCABULARY, is_factory, tokenizer_files
from mpbridge.settings.huggingface.written import mixtures
from mpbridge.settings.sections import GPT, LORA, LORA_TARGETS, YARN

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def vocabulary(data: Mapping[str, Any]) -> int:
    """Number of tokens of the data section's tokenizer, from its files. Raises BadValue with the cure if it is not known here."""
    name = data["tokenizer"]
    if name == BYTE:
        return BYTE_VOCABULARY
    if is_factory(name):
        code = f"data.tokenizer={name!r} is code, which is not run to find its size"
        raise BadValue(f"model.vocab_size is missing: {code}: give model.vocab_size")
    return tokenizer_files(name, data["end_of_text"]).size


def padded_vocabulary(size: int, step: int) -> int:
    """Rows of the embedding for `size` tokens: the next multiple of `step`."""
    return -(-size // step) * step


def shape_faults(model: Mapping[str, Any]) -> list[str]:
    """Missing or indivisible sizes in a model section with its defaults filled in."""
    missing = [f"model.{name} is missing" for name in _REQUIRED if not model.get(name)]
    if missing:
        return missing
    rules = (_attention, _hybrid, _lora, _yarn, _experts)
    return [text for rows in rules for broken, text in rows(model) if broken]


_Rows = Iterator[tuple[Any, str]]
"""(whether it is broken, the fault) of each rule."""


def _attention(model: Mapping[str, Any]) -> _Rows:
    _, hidden, heads, groups = (model[name] for name in (*_REQUIRED, "num_query_groups"))
    latent, window = model["multi_latent_attention"], model["window_size"]
    width, position = model["kv_channels"] or hidden // heads, model["position_embedding_type"]
    rotary = model["qk_pos_emb_head_dim"] if latent else 0
    rotated = position in ("rope", "yarn") and not latent and model["rotary_percent"] == 1
    yield from (
        (model["kv_channels"] is None and hidden % heads,
         f"model.hidden_size={hidden} cannot be divided into {heads} attention heads: change one of them or give model.kv_channels"),
        (groups is not None and heads % groups, f"model.num_attention_heads={heads} is not a multiple of model.num_query_groups={groups}: use a divisor of {heads}"),
        (rotated and width % 2,
         f"model.position_embedding_type={position} rotates pairs of channels, and a head has {width}: change model.kv_channels or the number of heads"),
        (rotary % 2, f"model.qk_pos_emb_head_dim={rotary}: rotary embeddings rotate pairs of channels: expected an even number"),
        _by_layer(model, "window_attn_skip_freq"),
        (window is not None and len(window) != 2, f"model.window_size={window}: expected two numbers, the tokens seen to the left and to the right"),
    )  # fmt: skip


def _by_layer(model: Mapping[str, Any], name: str) -> tuple[bool, str]:
    given, layers = model.get(name), model["num_layers"]
    many = len(given) if isinstance(given, list) else layers
    return many != layers, f"model.{name} has {many} entries for {layers} layers: give one for each, or one number"


def pattern_of(model: Mapping[str, Any]) -> str:
    """A hybrid's pattern of layers; empty if the section describes none."""
    return model.get("hybrid_override_pattern") or ""


def _lora(model: Mapping[str, Any]) -> _Rows:
    given, rank = [f"model.{name}={model[name]}" for name in LORA if model[name] is not None], model["lora_rank"]
    yield given and not rank, f"{', '.join(given)}: only read with a rank: model.lora_rank=8"
    yield not (given and not rank) and (rank or 1) < 1, f"model.lora_rank={rank}: expected at least 1"


def sizes_of(model: Mapping[str, Any]) -> dict[str, int]:
    """SIZES of the parts in a hybrid's pattern, with the number of heads that megatron-core derives from twice the hidden size (ssm/mamba_mixer.py)."""
    names = [name for symbol in dict.fromkeys(pattern_of(model)) for name in SIZES.get(PARTS[symbol], ())]
    given = model["mamba_num_heads"] or 2 * model["hidden_size"] // (model["mamba_head_dim"] or 1)
    return {name: int(given if name == "mamba_num_heads" else model[name]) for name in names}


def _hybrid(model: Mapping[str, Any]) -> _Rows:
    pattern, layers = pattern_of(model), model["num_layers"]
    if not pattern:
        return
    name, unknown = f"model.hybrid_override_pattern={pattern}", sorted(set(pattern) - set(PARTS))
    sizes = [name for part in SIZES.values() for name in part if name != "mamba_num_heads"]
    rows = [
        (bool(unknown), f"{name} has {', '.join(map(repr, unknown))}: expected {', '.join(f'{s} ({part})' for s, part in PARTS.items())}"),
        (len(pattern) != layers, f"{name} has {len(pattern)} symbols for model.num_layers={layers}: give one for each layer"),
        ("E" in pattern and not model["num_moe_experts"], f"{name} has mixtures of experts (E): model.num_moe_experts is missing"),
        *((not model[size] or model[size] < 1, f"model.{size}={model[size]}: expected at least 1") for size in sizes),
    ]  # fmt: skip
    yield from rows
    if "M" in pattern and not any(broken for broken, _ in rows):
        heads, groups = (sizes_of(model)[name] for name in ("mamba_num_heads", "mamba_num_groups"))
        text = f"model.mamba_num_heads={heads} cannot be divided into model.mamba_num_groups={groups}"
        yield heads < 1 or heads % groups, f"{text}: change one of them"


_NOT_UNDER_YARN = {
    "rope_scaling": False, "seq_len_interpolation_factor": None, "rotary_percent": 1.0, "rotary_interleaved": False, "flash_decode": False,
    "fused_single_qkv_rope": False,
}  # fmt: skip
"""Settings that megatron-core's YarnRotaryEmbedding ignores or rejects, and the fused kernel that ignores its factor on sines and cosines."""


def _yarn(model: Mapping[str, Any]) -> _Rows:
    plain, fast, slow = GPT(), model["yarn_beta_fast"], model["yarn_beta_slow"]
    on, latent = model["position_embedding_type"] == "yarn", model["multi_latent_attention"]
    given = [f"model.{name}={model[name]}" for name in YARN if not on and model[name] != getattr(plain, name)]
    yield given, f"{', '.join(given)}: only read with model.position_embedding_type=yarn"
    other = "model.rope_type=yarn with rotary_scaling_factor, original_max_position_embeddings and the related settings"
    text = f"model.position_embedding_type=yarn does not apply to latent attention, which takes {other}"
    yield on and latent, text
    if not on or latent:
        return
    for name in ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings"):
        yield model[name] is None, f"model.{name} is missing"
    for name, only in _NOT_UNDER_YARN.items():
        text = f"model.{name}={model[name]}: megatron-core's YaRN does not support it: leave it at {only}"
        yield model[name] != only, text
    yield fast <= slow, f"model.yarn_beta_fast={fast:g}: expected more than model.yarn_beta_slow={slow:g}"


def _experts(model: Mapping[str, Any]) -> _Rows:
    experts, topk, every = (model[name] for name in ("num_moe_experts", "moe_router_topk", "moe_layer_freq"))
    balanced, coefficient = model["moe_router_load_balancing_type"], model["moe_aux_loss_coeff"]
    if not experts:
        return
    yield from (
        (topk > experts, f"model.moe_router_topk={topk} experts per token, but model.num_moe_experts={experts}"),
        (isinstance(coefficient, list) and not isinstance(balanced, list),
         "model.moe_aux_loss_coeff is a list and model.moe_router_load_balancing_type is not: give one number, or one for each of a list of types"),
        (model["moe_apply_probs_on_input"] and topk != 1, f"model.moe_apply_probs_on_input needs model.moe_router_topk=1, found {topk}"),
        _by_layer(model, "moe_layer_freq"),
        (isinstance(every, int) and every < 1, f"model.moe_layer_freq={every}: expected at least 1 (every layer is a mixture of experts)"),
        (isinstance(every, list) and not {0, 1}.issuperset(every),
         f"model.moe_layer_freq={every}: expected 1 for each layer that is a mixture of experts, and 0 for each other"),
    )  # fmt: skip


def model_shape(model: Mapping[str, Any], *, vocab_size: int, seq_length: int) -> ModelShape:
    """The shape of a model section with its defaults filled in, in which `shape_faults` found nothing."""
    layers, hidden, heads = (model[name] for name in _REQUIRED)
    ffn, experts, pattern = model["ffn_hidden_size"] or 4 * hidden, model["num_moe_experts"], pattern_of(model)
    listed = min(layers, MOST + 1)  # ModelShape refuses more, and a list of them might not fit
    placed = [symbol == "E" for symbol in pattern] or (mixtures(model["moe_layer_freq"], listed) if experts else ())
    latent_size = {"moe_latent_size": model["moe_latent_size"]} if model.get("moe_latent_size") else {}
    return ModelShape(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, ffn_hidden_size=ffn, num_query_groups=model["num_query_groups"] or heads,
        kv_channels=model["kv_channels"] or hidden // heads, vocab_size=vocab_size, seq_length=seq_length, gated=model["gated_linear_unit"],
        tied=model["share_embeddings_and_output_weights"], learned_positions=model["position_embedding_type"] == "learned_absolute",
        # biases and norms
        linear_bias=model["add_bias_linear"], qkv_bias=model["add_bias_linear"] or model["add_qkv_bias"],
        norm_bias=model["normalization"] == "LayerNorm", qk_layernorm=model["qk_layernorm"],
        gated_attention=bool(model.get("attention_output_gate")),
        # mixtures of experts
        experts=experts, expert_ffn_hidden_size=(model["moe_ffn_hidden_size"] or ffn) if experts else 0,
        expert_layers=tuple(placed) if experts else (), expert_topk=model["moe_router_topk"] if experts else 0,
        shared_expert_size=model["moe_shared_expert_intermediate_size"] or 0,
        expert_bias=bool(experts) and model["moe_router_enable_expert_bias"], grouped_gemm=bool(experts) and model["moe_grouped_gemm"],
        # other kinds of layers
        latent_attention={name: model[name] or 0 for name in _LATENT} if model["multi_latent_attention"] else None,
        mtp_layers=model["mtp_num_layers"] or 0, hybrid=bool(pattern or model.get("is_hybrid_model")), pattern=pattern,
        sizes=sizes_of(model) | latent_size, sinks=str(model["softmax_type"]) == "learnable",
        lora_rank=model["lora_rank"] or 0, lora_targets=tuple(model["lora_targets"] or LORA_TARGETS) if model["lora_rank"] else (),
    )  # fmt: skip


def smallest_world(sizes: Mapping[str, Any]) -> int:
    """The fewest processes that the parallel sizes (defaults filled in) allow: one replica of the dense part, and of every expert."""
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model")
    tensor, pipeline, context, expert = (sizes[f"{kind}_parallel_size"] for kind in kinds)
    return math.lcm(tensor * pipeline * context, (sizes["expert_tensor_parallel_size"] or tensor) * expert * pipeline)


def parallel_of(sizes: Mapping[str, Any], world_size: int, layout: Any) -> Parallel:
    """The parallel section (defaults filled in) in a world of that size, and the virtual stages that the model's layout on stages implies where the section
    names none: groups must be made for them. Raises BadValue if it does not fit."""
    implied = virtual_stages(layout, sizes["pipeline_model_parallel_size"])
    return Parallel(
        world_size=world_size, tensor=sizes["tensor_model_parallel_size"], pipeline=sizes["pipeline_model_parallel_size"],
        virtual_pipeline=sizes["virtual_pipeline_model_parallel_size"] or implied, context=sizes["context_parallel_size"],
        expert=sizes["expert_model_parallel_size"], expert_tensor=sizes["expert_tensor_parallel_size"], sequence=sizes["sequence_parallel"],
    )  # fmt: skip


def live_parallel(config: Any, world_size: int) -> Parallel:
    """`parallel_of` a live TransformerConfig, or what will become one (Megatron Bridge's provider). Raises BadValue if it does not fit."""
    sizes = dict.fromkeys(
        (f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")), 1
    )
    others = ("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel")
    found = {name: getattr(config, name, None) or sizes.get(name) for name in (*sizes, *others)}
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    # a TransformerConfig that has read its layout keeps it as an object, and has set the virtual stages
    given = layout if isinstance(layout, (str, list)) else None
    return parallel_of(found | {"sequence_parallel": bool(found["sequence_parallel"])}, world_size, given)
