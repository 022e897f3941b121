"""What megatron-core rejects about recomputed, offloaded and graph-captured layers when the config is constructed."""

from __future__ import annotations

from mpbridge.planning.rules.base import Case, Rule, faults, row
from mpbridge.precision.megatron_spec.schema import records

RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Valid entries of model.recompute_modules."""
OFFLOADED = ("core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear")
"""Valid entries of model.offload_modules."""


def _cpu_offloading(case: Case) -> str:
    layers, depth = case.model("cpu_offloading_num_layers", 0), case.run.shape.num_layers
    return faults(
        "cpu_offloading with ",
        (f"cpu_offloading_num_layers={layers} of {depth}", not 0 <= layers < depth),
        ("pipeline stages", case.run.parallel.pipeline > 1),
        ("recomputation", case.model("recompute_granularity")),
        ("CUDA graphs", _graphs(case) != "none"),
        ("fine-grained offloading", case.model("fine_grained_activation_offloading")),
    )


def _recomputation(case: Case) -> str:
    how, layers = case.model("recompute_granularity"), case.model("recompute_num_layers")
    full, selective = how == "full", how == "selective"
    lacks = [name for name in ("recompute_method", "recompute_num_layers") if case.model(name) is None]
    spread = how and case.model("distribute_saved_activations") and case.run.parallel.sequence
    return faults(
        "",
        (f"full recomputation without {' and '.join(lacks)}", full and lacks),
        ("full recomputation with moe_layer_recompute", full and case.model("moe_layer_recompute")),
        ("recompute_num_layers below 1", full and layers is not None and layers < 1),
        (f"selective recomputation with recompute_num_layers={layers}", selective and layers is not None),
        ("distribute_saved_activations with sequence parallelism", spread),
    )


def _recomputed(case: Case) -> str:
    names = case.words("recompute_modules")
    odd = [name for name in names if name not in RECOMPUTED]
    overlap = case.model("moe_shared_expert_intermediate_size") and case.model("moe_shared_expert_overlap")
    return faults(
        "recompute_modules has ",
        (f"{', '.join(odd)} (known: {', '.join(RECOMPUTED)})", odd),
        ("moe_act without moe_grouped_gemm", "moe_act" in names and not case.model("moe_grouped_gemm")),
        ("mla_up_proj without latent attention", "mla_up_proj" in names and not case.model("multi_latent_attention")),
        ("shared_experts with moe_shared_expert_overlap", "shared_experts" in names and overlap),
    )


def _offloaded(case: Case) -> str:
    names = case.words("offload_modules")
    odd = [name for name in names if name not in OFFLOADED]
    if not names:
        return "fine_grained_activation_offloading without offload_modules"
    if odd:
        return f"offload_modules has {', '.join(odd)} (known: {', '.join(OFFLOADED)})"
    return (
        "offload_modules has attn_proj without core_attn" if "attn_proj" in names and "core_attn" not in names else ""
    )


def _graphs(case: Case) -> str:
    """The CUDA graph implementation that the settings select."""
    if case.model("enable_cuda_graph"):
        return "local"
    return "transformer_engine" if case.model("external_cuda_graph") else str(case.model("cuda_graph_impl", "none"))


def _graph_switches(case: Case) -> str | None:
    old = [name for name in ("enable_cuda_graph", "external_cuda_graph") if case.model(name)]
    if len(old) == 2:
        return " and ".join(old)
    implementation = case.model("cuda_graph_impl", "none")
    return f"{old[0]} together with cuda_graph_impl={implementation}" if old and implementation != "none" else None


def scopes(case: Case) -> tuple[str, ...]:
    """The parts of a layer that CUDA graphs capture, as megatron-core reads the setting; () is the whole layer, also spelled 'full'."""
    # since 0.17 the setting is called cuda_graph_modules; the old name wins if it is set
    given = case.run.model.get("cuda_graph_scope") or case.run.model.get("cuda_graph_modules") or ()
    names = given.split(",") if isinstance(given, str) else [getattr(item, "name", item) for item in given]
    plain = tuple(str(name) for name in names)
    return () if plain == ("full",) else plain


def _graph_words(case: Case) -> str | None:
    known = records("model", version=case.run.versions.megatron_core)
    old, new = case.run.model.get("cuda_graph_scope"), case.run.model.get("cuda_graph_modules")
    if "cuda_graph_modules" in known and old is not None and new not in ("full", None, []):
        return "cuda_graph_scope together with cuda_graph_modules, its new name"
    legal = (known.get("cuda_graph_modules") or known["cuda_graph_scope"])["choices"]
    odd = [name for name in scopes(case) if name not in legal]
    return f"cuda_graph_scope has {', '.join(map(repr, odd))} (known: {', '.join(legal)})" if odd else None


def _graph_scope(case: Case) -> str:
    implementation, parts = _graphs(case), set(scopes(case))
    if implementation == "local" and parts & {"moe_router", "moe_preprocess"}:
        parts |= {"moe_router", "moe_preprocess"}
    experts = (case.run.shape.experts or 0) > 1
    open_ended = experts and not (
        case.model("moe_expert_capacity_factor") is not None and case.model("moe_pad_expert_input_to_capacity")
    )
    return faults(
        "captured: ",
        ("full_iteration with transformer_engine", implementation != "local" and "full_iteration" in parts),
        ("moe together with moe_router", {"moe", "moe_router"} <= parts),
        ("moe_preprocess without moe_router", "moe_preprocess" in parts and "moe_router" not in parts),
        ("moe parts without experts", not experts and parts & {"moe", "moe_router"}),
        ("mlp where every layer has experts", experts and _every_layer_has_experts(case) and "mlp" in parts),
        ("moe without padding to capacity", open_ended and "moe" in parts),
        ("moe_preprocess that synchronises", "moe_preprocess" in parts and open_ended and _synchronises(case)),
    )


def _every_layer_has_experts(case: Case) -> bool:
    every = case.model("moe_layer_freq", 1)
    return every == 1 or (isinstance(every, (list, tuple)) and 0 not in every)


def _synchronises(case: Case) -> bool:
    return case.model("moe_token_dispatcher_type") == "alltoall" and bool(
        case.model("moe_expert_capacity_factor") is not None or case.model("moe_router_padding_for_fp8")
    )


def _graph_recompute(case: Case) -> str:
    implementation, parts, how = _graphs(case), scopes(case), case.model("recompute_granularity")
    names = case.words("recompute_modules") or ("core_attn",)
    if case.model("moe_layer_recompute"):
        how, names = "selective", (*names, "moe")  # its new spelling
    if not how:
        return ""
    if how == "full":
        return "" if parts == ("full_iteration",) else "full recomputation without capturing the full iteration"
    whole = not parts or "full_iteration" in parts
    random = (
        ("attention_dropout", "attn", "core_attn", case.model("attention_dropout", 0.0) != 0.0),
        ("hidden_dropout", "mlp", "mlp", case.model("hidden_dropout", 0.0) != 0.0),
        ("hidden_dropout", "moe", "moe", case.model("hidden_dropout", 0.0) != 0.0),
        ("moe_input_jitter_eps", "moe", "moe", case.model("moe_input_jitter_eps") is not None),
    )
    return faults(
        "",
        *(
            (f"{source} in a captured and recomputed {again}", on and again in names and (whole or part in parts))
            for source, part, again, on in random
        ),
        (
            "recomputed moe around a captured moe_router",
            implementation == "transformer_engine" and "moe" in names and "moe_router" in parts,
        ),
    )


def _autocast(case: Case) -> str:
    how = case.model("recompute_granularity") or (case.model("moe_layer_recompute") and "selective")
    # Transformer Engine's own checkpointing, which megatron-core takes for whole layers in FP8 and FP4, keeps autocast
    kept = how == "full" and case.native and (case.policy.fp8 or case.policy.fp4)
    return f"{how} recomputation under autocast_enabled=true" if how and not kept else ""


def _graph_overlap(case: Case) -> str:
    implementation, parts = _graphs(case), scopes(case)
    if implementation == "transformer_engine" and not {"moe", "mlp"} & set(parts):
        return ""
    return (
        f"overlap_moe_expert_parallel_comm with CUDA graphs by {implementation} of {', '.join(parts) or 'whole layers'}"
    )


RULES: tuple[Rule, ...] = (
    row("cpu-offloading", _cpu_offloading, "fewer layers than the model has, one pipeline stage, no recomputation and no CUDA graphs", "model.cpu_offloading=false",
         when=lambda c: c.model("cpu_offloading")),
    row("recomputation", _recomputation, "full: a method and a number of layers; selective: no number of layers", "model.recompute_method=uniform model.recompute_num_layers=1, or model.recompute_granularity=selective"),
    row("recomputed-modules", _recomputed, "modules that the model has and that can be recomputed", "correct model.recompute_modules",
         when=lambda c: c.model("recompute_granularity") == "selective"),
    row("offloaded-modules", _offloaded, "a list of known modules", "correct model.offload_modules", when=lambda c: c.model("fine_grained_activation_offloading")),
    row("graph-switches", _graph_switches, "one of them", "model.cuda_graph_impl alone"),
    row("graph-scope-words", _graph_words, "parts of a layer that can be captured", "correct model.cuda_graph_scope"),
    row("graph-scope", _graph_scope, "parts that the model has and that neither overlap nor synchronise", "correct model.cuda_graph_scope", when=lambda c: _graphs(c) != "none"),
    row("graph-with-recomputation", _graph_recompute, "no random numbers in a captured part that is recomputed", "model.cuda_graph_impl=none, or model.recompute_granularity=null",
         when=lambda c: _graphs(c) != "none"),
    row("recompute-outside-autocast", _autocast, "neither: autocast is around the forward pass alone, so what backward recomputes is computed in other dtypes",
        "model.recompute_granularity=null model.moe_layer_recompute=null, or mixed_precision.autocast_enabled=false",
        "megatron-core 0.16.1 pipeline_parallel/schedules.py forward_step, tensor_parallel/random.py CheckpointFunction", when=lambda c: c.policy.autocast is not None),
    row("graph-with-expert-overlap", _graph_overlap, "graphs by transformer_engine, of other parts", "model.cuda_graph_impl=none",
         when=lambda c: _graphs(c) != "none" and c.model("overlap_moe_expert_parallel_comm")),
)  # fmt: skip
