"""Converts config.json to a model section: every field is mapped, known to have no effect, or refused by name; all faults at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpbridge.common.errors import Contradiction
from mpbridge.common.formats import say
from mpbridge.settings.huggingface.conversions import hybrid_pattern, rope_section
from mpbridge.settings.huggingface.families import BOOKKEEPING, FAMILIES, ConfigFields, Family
from mpbridge.settings.huggingface.folder import CONFIG, folder_of, read_config, tensors

SEQUENCE = 4096
"""Default sequence length for such a folder: the model's maximum number of positions, but at most this."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""Files that show that a folder has a tokenizer."""


def tree(reference: str) -> dict[str, Any]:
    """The content of a configuration file for 'hf:DIR': the model section, the recipe bf16_mixed, one sample at a time, its length, the folder's tokenizer.

    Raises BadValue, and Contradiction with everything in config.json that is not mapped.
    """
    folder = folder_of(reference)
    model = model_section(folder)
    data: dict[str, Any] = {"seq_length": min(model["max_sequence_length"], SEQUENCE)}
    if any((folder / name).is_file() for name in TOKENIZERS):
        data["tokenizer"] = str(folder)
    return {"mixed_precision": "bf16_mixed", "model": model, "train": {"micro_batch_size": 1}, "data": data}


def model_section(folder: Path) -> dict[str, Any]:
    """The model section of the folder's config.json; the weights' headers show whether there are multi-token prediction layers."""
    data, held = read_config(folder), tensors(folder)
    ahead = sum(name.endswith(".eh_proj.weight") for name in held) if held else None
    return section(data, ahead=ahead, name=str(folder / CONFIG))


def family_of(data: Mapping[str, Any], name: str = CONFIG) -> Family:
    """The row of config.json's model_type. Raises Contradiction."""
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        given = f"={kind!r}" if "model_type" in data else " is missing"
        fault = f"model_type{given}: expected one of {', '.join(FAMILIES)}"
        raise Contradiction([fault], subject=f"{name} cannot be used")
    return FAMILIES[kind]


def section(data: Mapping[str, Any], *, ahead: int | None = None, name: str = CONFIG) -> dict[str, Any]:
    """The model section that config.json describes.

    ahead: number of multi-token prediction layers in the weights; None: as config.json says. Raises Contradiction.
    """
    family, faults = family_of(data, name), list[str]()
    fields = ConfigFields(data, faults, family.defaults)
    fields.must("architectures", ([family.architecture],), f"the language model class of model_type={family.name}")
    _quantized(fields)
    if family.hybrid:
        out = _hybrid(fields, family)
    else:
        out = _dense(fields, family)
        out |= _latent(fields) if family.latent else _attention(fields, family)
        out |= rope_section(fields, latent=family.latent)
    if family.experts and "E" in out.get("hybrid_override_pattern", "E"):
        out |= _experts(fields, family, out.get("num_layers"))
    if family.latent:
        said = fields.raw("num_nextn_predict_layers") or fields.raw("num_mtp_layers") or 0
        fields.raw("num_mtp_layers")
        layers = said if ahead is None else ahead
        out |= {"mtp_num_layers": layers, "mtp_loss_scaling_factor": 0.1} if layers else {}
    cure = "remove it if the model does not depend on it; otherwise this model cannot be built here"
    for left in (one for one in fields.left() if one not in BOOKKEEPING):
        fields.fault(f"{left}={data[left]!r} is not mapped: {cure}")
    if not faults:
        return out
    faults, end = list(dict.fromkeys(faults)), " is missing"
    missing = [fault.removesuffix(end) for fault in faults if fault.endswith(end)]
    if len(missing) > 1:
        faults = [f"{', '.join(missing)} are missing", *(fault for fault in faults if not fault.endswith(end))]
    raise Contradiction(faults, subject=f"{name} ({family.name}) cannot be used")


def _dense(fields: ConfigFields, family: Family) -> dict[str, Any]:
    fields.must("hidden_act", ("silu",), f"the activation of {family.name}'s gated layers here")
    fields.must("use_mrope", (False,), "text positions are single numbers")
    fields.must("mlp_bias", (False,), "megatron-core's linears have biases everywhere or nowhere")
    return _common(fields, family)


def _hybrid(fields: ConfigFields, family: Family) -> dict[str, Any]:
    """A hybrid's section without its experts."""
    out = {"hybrid_override_pattern": hybrid_pattern(fields)} | _common(fields, family)
    heads, width, expand = out["mamba_num_heads"], out["mamba_head_dim"], fields.raw("expand")
    if "num_attention_heads" not in out:
        # no layer has attention, but megatron-core's config has heads
        out |= {"num_attention_heads": heads, "kv_channels": width, "max_sequence_length": SEQUENCE}
        if not isinstance(expand, (int, float)) or out["hidden_size"] * expand != heads * width:
            fields.fault(f"hidden_size times expand={say(expand)} is not {heads} heads of {width} channels")
    else:
        fields.must("attention_head_dim", (out["kv_channels"],), "head_dim's older name")
    return out


def _common(fields: ConfigFields, family: Family) -> dict[str, Any]:
    hybrid = family.hybrid
    return {
        **{name: fields.size(theirs) for name, theirs in family.sizes.items()},
        **({"position_embedding_type": "none"} if hybrid else {}),
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5 if hybrid else fields.number("rms_norm_eps", 1e-6),
        "gated_linear_unit": not hybrid,
        "activation_func": "squared_relu" if hybrid else "silu",
        "add_bias_linear": False,
        "hidden_dropout": fields.number("hidden_dropout") if hybrid else 0.0,
        "attention_dropout": fields.number("attention_dropout"),
        "init_method_std": fields.number("initializer_range", 0.02),
        "share_embeddings_and_output_weights": fields.flag("tie_word_embeddings"),
    }


def _attention(fields: ConfigFields, family: Family) -> dict[str, Any]:
    fields.must("attention_bias", (False,), "megatron-core cannot have biases on attention's linears only")
    if family.qkv_bias:
        fields.must("qkv_bias", (True,), f"{family.name} has it")
    heads = fields.size("num_attention_heads")
    groups = heads if fields.raw("num_key_value_heads") is None else fields.size("num_key_value_heads")
    if heads % groups:
        fields.fault(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
    out: dict[str, Any] = {"num_query_groups": groups}
    if fields.raw("head_dim") is not None:
        out["kv_channels"] = fields.size("head_dim")
    elif fields.size("hidden_size") % heads:
        cure = "correct one of them, or give head_dim"
        fields.fault(f"hidden_size is not a multiple of num_attention_heads={heads}: {cure}")
    else:
        out["kv_channels"] = fields.size("hidden_size") // heads
    own = {"add_qkv_bias": family.qkv_bias, "qk_layernorm": family.qk_norm}
    return out | {name: True for name, has in own.items() if has} | _window(fields, family)


def _window(fields: ConfigFields, family: Family) -> dict[str, Any]:
    """A sliding window of w tokens, including the token itself, is w - 1 to the left in megatron-core."""
    kinds, width, _ = (fields.raw(name) for name in ("layer_types", "sliding_window", "max_window_layers"))
    on = bool(width) if family.window == "sliding_window" else bool(family.window) and fields.flag("use_sliding_window")
    wanted = "sliding_attention" if on else "full_attention"
    # families whose switch is a flag use layer_types to say which layers have a window; without layer_types only some have one
    silent = kinds is None and (not on or family.window == "sliding_window")
    if not silent and (not isinstance(kinds, list) or any(kind != wanted for kind in kinds)):
        why = "megatron-core has one window for all layers"
        fields.fault(f"layer_types={kinds!r}: expected {wanted} for every layer: {why}")
    return {"window_size": [fields.size("sliding_window") - 1, 0]} if on else {}


def _latent(fields: ConfigFields) -> dict[str, Any]:
    why = "megatron-core has no such latent attention"
    fields.must("attention_bias", (False,), why)
    fields.must("rope_interleave", (True,), why)
    epsilon = "transformers' norms of latent queries and keys use it regardless of config.json"
    fields.must("rms_norm_eps", (1e-6,), epsilon)
    fields.must("num_key_value_heads", (fields.size("num_attention_heads"),), "every head has its own keys")
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    fields.must("head_dim", (rope,), "the rotary embeddings' dimension")
    fields.must("qk_head_dim", (nope + rope,), "qk_nope_head_dim + qk_rope_head_dim")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": fields.size_or("q_lora_rank", None),
        **{name: fields.size(name) for name in ("kv_lora_rank", "v_head_dim")},
        "qk_head_dim": nope,
        "qk_pos_emb_head_dim": rope,
        "qk_layernorm": True,
    }


def _experts(fields: ConfigFields, family: Family, layers: int | None) -> dict[str, Any]:
    """layers: None: a pattern says which of them have experts."""
    # transformers 5 uses another name for the same number
    named = next((n for n in (family.experts, "num_local_experts", "num_experts") if fields.has(n)), family.experts)
    experts, topk = fields.size(named), fields.size("num_experts_per_tok")
    if topk > experts:
        fields.fault(f"num_experts_per_tok={topk} of {named}={experts}")
    out: dict[str, Any] = {
        "num_moe_experts": experts, "moe_ffn_hidden_size": fields.size(family.expert_width), "moe_router_topk": topk,
        "moe_router_dtype": "fp32", "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
    }  # fmt: skip
    fields.must("router_jitter_noise", (0.0, 0), "megatron-core's jitter is different")
    if layers is None:
        shared, latent = fields.size("moe_shared_expert_intermediate_size"), fields.size_or("moe_latent_size", None)
        fields.must("n_shared_experts", (1,), "transformers builds one, of moe_shared_expert_intermediate_size")
        router = _sigmoid_router(fields, experts, topk)
        return out | router | {"moe_shared_expert_intermediate_size": shared, "moe_latent_size": latent}
    out["moe_layer_freq"] = _mixtures(fields, family, layers)
    return out | (_sigmoid_router(fields, experts, topk) if family.latent else _softmax_router(fields, family))


def _mixtures(fields: ConfigFields, family: Family, layers: int) -> int | list[int]:
    """1 if every layer is an MoE layer, else a 0 or 1 per layer."""
    if family.latent:
        first = fields.size_or("first_k_dense_replace", 3, least=0)
        fields.must("moe_layer_freq", (1,), "every layer after the dense ones is an MoE layer")
        kinds = [int(layer >= first) for layer in range(layers)]
    elif family.name == "mixtral":
        return 1
    else:
        dense = set(fields.whole_numbers("mlp_only_layers"))
        step = fields.size_or("decoder_sparse_step", 1)
        kinds = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    return 1 if all(kinds) else kinds


def _softmax_router(fields: ConfigFields, family: Family) -> dict[str, Any]:
    loss = fields.number("router_aux_loss_coef", 0.001)
    out: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": loss}
    # a softmax over all experts, normalised over the chosen ones, equals a softmax over the chosen ones
    if family.name != "mixtral" and not fields.flag("norm_topk_prob"):
        out["moe_router_pre_softmax"] = True
    if family.shared:
        out["moe_shared_expert_intermediate_size"] = fields.size("shared_expert_intermediate_size")
        out["moe_shared_expert_gate"] = True
    return out


def _sigmoid_router(fields: ConfigFields, experts: int, topk: int) -> dict[str, Any]:
    for name, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        fields.must(name, (only,), "the router of deepseek_v3")
    if topk > 1:
        fields.must("norm_topk_prob", (True,), "megatron-core normalises sigmoid scores")
    groups, chosen = fields.size("n_group"), fields.size("topk_group")
    if experts % groups or chosen > groups:
        fields.fault(f"n_group={groups} and topk_group={chosen} do not fit n_routed_experts={experts}")
    out: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": fields.number("routed_scaling_factor", 1.0),
    }
    if groups > 1 and chosen < groups:
        if topk // chosen != 2:
            why = f"megatron-core scores a group by its best {topk // chosen} experts, the model by its best 2"
            cure = "expected twice as many experts per token as groups"
            fields.fault(f"num_experts_per_tok={topk} and topk_group={chosen}: {why}: {cure}")
        out |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    loss, kind = fields.number("aux_loss_alpha"), "seq_aux_loss" if fields.flag("seq_aux", True) else "aux_loss"
    out |= {"moe_router_load_balancing_type": kind if loss else "none", "moe_aux_loss_coeff": loss}
    if shared := fields.size_or("n_shared_experts", 0, least=0):
        out["moe_shared_expert_intermediate_size"] = shared * fields.size("moe_intermediate_size")
    return out


def _quantized(fields: ConfigFields) -> None:
    """Block-wise FP8 is widened when weights are read; any other quantization is refused."""
    given = fields.raw("quantization_config")
    if not isinstance(given, dict):
        if given is not None:
            fields.fault("quantization_config: expected a mapping")
        return
    inner = ConfigFields(given, fields.faults, {}, within="quantization_config.")
    why = "only block-wise FP8, as in DeepSeek-V3, can be widened"
    for name, only in (("quant_method", "fp8"), ("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        inner.must(name, (only,), why)
    block = inner.whole_numbers("weight_block_size")
    if len(block) != 2 or not all(block):
        inner.fault("weight_block_size: expected two numbers, rows and columns of a block")
    inner.raw("modules_to_not_convert")
    for left in inner.left():
        inner.fault(f"{left}={given[left]!r} is not mapped")
