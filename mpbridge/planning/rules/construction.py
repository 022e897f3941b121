"""What megatron-core rejects about mixtures of experts, and recomputed, offloaded and graph-captured layers, when the config is constructed or a layer is built."""

from __future__ import annotations

import contextlib

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import say
from mpbridge.common.versions import at_least
from mpbridge.planning.memory.ranks import stage_chunks
from mpbridge.planning.rules.base import MODEL_CONFIG, NEWER_MODEL_CONFIG, NO_EXPERT_OVERLAP, Case, Rule, faults, row
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.megatron_spec.versions import BEFORE_017, SINCE_017

_BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def _experts_without(case: Case) -> str:
    ranks, settings = case.run.parallel.expert, ("moe_ffn_hidden_size", "moe_router_group_topk")
    given = [(f"{name}={case.model(name)}", case.model(name)) for name in settings]
    found = faults("", (f"expert_model_parallel_size={ranks}", ranks > 1), *given)
    return f"{found} without experts" if found else ""


def _groups(case: Case) -> str | None:
    limited, top = case.model("moe_router_topk_limited_devices"), case.model("moe_router_group_topk")
    groups = case.model("moe_router_num_groups")
    experts, ranks = case.run.shape.experts or 0, case.run.parallel.expert
    if top and limited:
        return "moe_router_group_topk together with moe_router_topk_limited_devices"
    if limited and experts:
        # the older setting, whose groups are the expert-parallel ranks
        words = f"moe_router_topk_limited_devices={limited} of {ranks} expert-parallel ranks"
        return words if limited > ranks else None
    if not (top and experts):
        return None
    if not groups:
        return f"moe_router_group_topk={top} without moe_router_num_groups"
    wrong = experts % groups or top > groups
    return f"{top} of {groups} groups of {experts} experts" if wrong else None


def _group_share(case: Case) -> str | None:
    """Sizes that group-limited top-k cannot handle: it takes topk / group_topk experts from each group."""
    limited, top = case.model("moe_router_topk_limited_devices"), case.model("moe_router_group_topk")
    experts, topk = case.run.shape.experts or 0, case.model("moe_router_topk", 2)
    chosen = top or limited
    groups = case.model("moe_router_num_groups") if top else case.run.parallel.expert
    if not (chosen and groups and experts) or experts % groups or chosen > groups:
        return None
    if topk % chosen or topk // chosen > experts // groups:
        return f"moe_router_topk={topk} from {chosen} of {groups} groups of {experts // groups} experts"
    return None


def _dispatcher(case: Case) -> str:
    kind, backend, deep = case.run.dispatcher, *map(case.model, ("moe_flex_dispatcher_backend", "moe_enable_deepep"))
    padded = kind == "flex" and case.model("moe_pad_expert_input_to_capacity") and backend == "deepep"
    return faults(
        "",
        (f"moe_enable_deepep with dispatcher {kind}", deep and kind != "flex"),
        ("moe_enable_deepep with backend hybridep", deep and backend == "hybridep"),
        ("moe_pad_expert_input_to_capacity with DeepEP", padded),
        ("variable_seq_lengths with dispatcher allgather", kind == "allgather" and case.model("variable_seq_lengths")),
    )


def _shared_overlap(case: Case, kinds: tuple[str, ...]) -> str:
    on = case.model("moe_shared_expert_overlap") and case.model("moe_shared_expert_intermediate_size")
    kind = case.run.dispatcher
    return f"moe_shared_expert_overlap with dispatcher {kind}" if on and kind not in kinds else ""


def _balancing(case: Case) -> str | None:
    kinds, weight = case.model("moe_router_load_balancing_type", "aux_loss"), case.model("moe_aux_loss_coeff", 0.0)
    several = isinstance(kinds, (list, tuple))
    if several and not (isinstance(weight, (list, tuple)) and len(weight) == len(kinds)):
        return f"{len(kinds)} kinds of load balancing with moe_aux_loss_coeff={say(weight)}"
    if not several and isinstance(weight, (list, tuple)):
        return f"one kind of load balancing with moe_aux_loss_coeff={say(weight)}"
    if not several and kinds == "sinkhorn" and weight:
        return f"sinkhorn with moe_aux_loss_coeff={weight}"
    return None


def _capacity(case: Case) -> str | None:
    factor = case.model("moe_expert_capacity_factor")
    if case.model("moe_pad_expert_input_to_capacity") and (factor is None or factor < 0):
        return f"moe_pad_expert_input_to_capacity with moe_expert_capacity_factor={say(factor)}"
    kinds = case.words("moe_router_load_balancing_type") or ("aux_loss",)
    odd = [kind for kind in kinds if kind not in _BALANCED]
    return f"moe_expert_capacity_factor={factor} with {', '.join(odd)}" if factor is not None and odd else None


def _load_bias(case: Case, scores: tuple[str, ...]) -> str:
    kind = case.model("moe_router_score_function", "softmax")
    wrong = case.model("moe_router_enable_expert_bias") and kind not in scores
    return f"moe_router_enable_expert_bias with {kind} scores" if wrong else ""


def _expert_overlap(case: Case) -> str:
    after = [name for name in ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release") if case.model(name)]
    if not case.model("overlap_moe_expert_parallel_comm"):
        return f"{', '.join(after)} without overlap_moe_expert_parallel_comm" if after else ""
    sizes, ahead, torch = case.run.parallel, case.model("mtp_num_layers"), case.run.versions.torch
    return faults(
        "overlap_moe_expert_parallel_comm with ",
        ("expert_model_parallel_size=1", sizes.expert <= 1),
        ("stages that do not interleave", sizes.pipeline > 1 and sizes.virtual_pipeline is None),
        ("dispatcher allgather", case.run.dispatcher not in ("alltoall", "flex")),
        ("full recomputation", case.model("recompute_granularity") == "full"),
        ("recompute_method", case.model("recompute_method") is not None),
        ("recompute_num_layers", case.model("recompute_num_layers") is not None),
        ("moe_shared_expert_overlap", case.model("moe_shared_expert_overlap")),
        (f"torch {torch} (before 2.6 it hangs)", torch is not None and not at_least(torch, "2.6")),
        (f"mtp_num_layers={ahead}", ahead is not None and (ahead != 1 or sizes.pipeline == 1)),
        ("moe_use_legacy_grouped_gemm", "delay_wgrad_compute" in after and case.model("moe_use_legacy_grouped_gemm")),
    )


_EXPERTS: tuple[Rule, ...] = (
    row("expert-settings-without-experts", _experts_without, "model.num_moe_experts", "drop them, or set model.num_moe_experts", when=lambda c: not c.run.shape.experts),
    row("top-one-before-softmax", "moe_router_topk=1 with the softmax after the selection", "the softmax before the selection: over one expert it is 1, and its gradient 0",
         "model.moe_router_pre_softmax=true",
         when=lambda c: c.model("moe_router_topk") == 1 and c.model("moe_router_score_function", "softmax") == "softmax" and not c.model("moe_router_pre_softmax")
         and c.model("moe_router_load_balancing_type") != "sinkhorn"),
    row("router-groups", _groups, "a number of groups that divides the experts, and no more selected groups than there are",
         "model.moe_router_num_groups, a divisor of num_moe_experts and at least moe_router_group_topk"),
    row("router-group-share", _group_share, "moe_router_topk to be a multiple of the selected groups, and no more experts per group than a group has",
         "another model.moe_router_topk or moe_router_group_topk", "megatron-core 0.16.1 transformer/moe/moe_utils.py group_limited_topk"),
    row("token-dispatcher", _dispatcher, "DeepEP only with dispatcher flex and without padding to capacity; fixed lengths with allgather",
         "model.moe_token_dispatcher_type=alltoall model.moe_enable_deepep=false"),
    row("flex-dispatcher-alone", "dispatcher flex without tensor- or expert-parallel ranks", "more than one tensor x expert parallel rank", "model.moe_token_dispatcher_type=alltoall",
         "megatron-core 0.16.1 transformer/moe/token_dispatcher.py MoEFlexTokenDispatcher.__init__",
         when=lambda c: c.run.shape.experts and c.run.dispatcher == "flex" and c.run.parallel.expert_width * c.run.parallel.expert <= 1),
    row("shared-expert-overlap", lambda c: _shared_overlap(c, ("alltoall",)), "dispatcher alltoall", "model.moe_shared_expert_overlap=false", holds=(BEFORE_017,)),
    row("shared-expert-overlap-by-dispatcher", lambda c: _shared_overlap(c, ("alltoall", "flex")), "dispatcher alltoall or flex", "model.moe_shared_expert_overlap=false",
         NEWER_MODEL_CONFIG, holds=(SINCE_017,)),
    row("load-balancing-weights", _balancing, "one coefficient per kind, and none with sinkhorn", "model.moe_aux_loss_coeff in the same form as moe_router_load_balancing_type",
         f"{MODEL_CONFIG}; transformer/moe/router.py sinkhorn_load_balancing"),
    row("expert-capacity", _capacity, "a capacity factor of 0 or more if input is padded to it, and load balancing by auxiliary losses or none", "model.moe_expert_capacity_factor=1.0, or drop both"),
    row("biased-experts-under-tensor-parallelism", "experts with biases split over {c.run.parallel.expert_width} tensor-parallel ranks",
         "experts without biases, or experts that are not split over ranks", "model.add_bias_linear=false, or parallel.expert_tensor_parallel_size=1",
         when=lambda c: c.run.shape.experts and c.model("add_bias_linear", True) and c.run.parallel.expert_width != 1),
    row("expert-bias-scores", lambda c: _load_bias(c, ("sigmoid",)), "sigmoid scores", "model.moe_router_score_function=sigmoid", holds=(BEFORE_017,)),
    row("expert-bias-by-score", lambda c: _load_bias(c, ("sigmoid", "sqrtsoftplus")), "sigmoid or sqrtsoftplus scores", "model.moe_router_score_function=sigmoid",
         NEWER_MODEL_CONFIG, holds=(SINCE_017,)),
    row("expert-overlap", _expert_overlap, "expert-parallel ranks with alltoall or flex, no full recomputation, interleaved stages, at most one MTP layer",
         NO_EXPERT_OVERLAP),
)  # fmt: skip

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
        ("CUDA graphs", case.run.cuda_graphs.on),
        ("fine-grained offloading", case.model("fine_grained_activation_offloading")),
    )


def _recomputation(case: Case) -> str:
    how, layers = case.model("recompute_granularity"), case.model("recompute_num_layers")
    full, selective = how == "full", how == "selective"
    lacks = [name for name in ("recompute_method", "recompute_num_layers") if case.model(name) is None]
    uniform, held = full and case.model("recompute_method") == "uniform" and layers, set[int]()
    with contextlib.suppress(BadValue):  # layers-do-not-divide says it
        held = {len(chunk.layers) for stage in stage_chunks(case.run) for chunk in stage}
    uneven = [count for count in held if uniform and count % layers]
    spread = how and case.model("distribute_saved_activations") and case.run.parallel.sequence
    return faults(
        "",
        (f"full recomputation without {' and '.join(lacks)}", full and lacks),
        (f"uniform recomputation of {layers} layers at once where a model chunk has {min(uneven, default=0)}", uneven),
        (
            f"uniform recomputation of {layers} prediction layers at once",
            uniform and layers > 1 and case.run.shape.mtp_layers,
        ),
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
    alone = "attn_proj" in names and "core_attn" not in names
    return "offload_modules has attn_proj without core_attn" if alone else ""


def _graph_switches(case: Case) -> str | None:
    old = [name for name in ("enable_cuda_graph", "external_cuda_graph") if case.model(name)]
    if len(old) == 2:
        return " and ".join(old)
    implementation = case.model("cuda_graph_impl", "none")
    return f"{old[0]} together with cuda_graph_impl={implementation}" if old and implementation != "none" else None


def _graph_words(case: Case) -> str | None:
    known = records("model", version=case.run.versions.megatron_core)
    old, new = case.run.model.get("cuda_graph_scope"), case.run.model.get("cuda_graph_modules")
    if "cuda_graph_modules" in known and old is not None and new not in ("full", None, []):
        return "cuda_graph_scope together with cuda_graph_modules, its new name"
    legal = (known.get("cuda_graph_modules") or known["cuda_graph_scope"])["choices"]
    odd = [name for name in case.run.cuda_graphs.parts if name not in (*legal, case.run.cuda_graphs.implementation)]
    return f"cuda_graph_scope has {', '.join(map(repr, odd))} (known: {', '.join(legal)})" if odd else None


def _graph_scope(case: Case) -> str:
    implementation, parts = case.run.cuda_graphs.implementation, set(case.run.cuda_graphs.parts)
    experts = (case.run.shape.experts or 0) > 1
    limited = case.model("moe_expert_capacity_factor") is not None
    open_ended = experts and not (limited and case.model("moe_pad_expert_input_to_capacity"))
    waits = case.run.dispatcher == "alltoall" and (limited or case.model("moe_router_padding_for_fp8"))
    every = case.model("moe_layer_freq", 1)
    all_have = every == 1 or (isinstance(every, (list, tuple)) and 0 not in every)
    return faults(
        "captured: ",
        (
            "full_iteration with transformer_engine",
            implementation == "transformer_engine" and "full_iteration" in parts,
        ),
        ("the full iteration together with parts of a layer", implementation == "full_iteration" and len(parts) > 1),
        ("moe together with moe_router", {"moe", "moe_router"} <= parts),
        ("moe_preprocess without moe_router", "moe_preprocess" in parts and "moe_router" not in parts),
        ("moe parts without experts", not experts and parts & {"moe", "moe_router"}),
        ("mlp where every layer has experts", experts and all_have and "mlp" in parts),
        ("moe without padding to capacity", open_ended and "moe" in parts),
        ("moe_preprocess that synchronises", "moe_preprocess" in parts and open_ended and waits),
    )


def _graph_recompute(case: Case) -> str:
    graphs, how = case.run.cuda_graphs, case.model("recompute_granularity")
    names = case.words("recompute_modules") or ("core_attn",)
    if case.model("moe_layer_recompute"):
        how, names = "selective", (*names, "moe")  # its new spelling
    if not how:
        return ""
    if how == "full":
        return "" if graphs.parts == ("full_iteration",) else "full recomputation without capturing the full iteration"
    around = graphs.implementation == "transformer_engine" and "moe" in names and "moe_router" in graphs.parts
    random = (
        ("attention_dropout", "attn", "core_attn", case.model("attention_dropout", 0.0) != 0.0),
        ("hidden_dropout", "mlp", "mlp", case.model("hidden_dropout", 0.0) != 0.0),
        ("hidden_dropout", "moe", "moe", case.model("hidden_dropout", 0.0) != 0.0),
        ("moe_input_jitter_eps", "moe", "moe", case.model("moe_input_jitter_eps") is not None),
    )
    seen = [
        (source, again, on and (graphs.whole_step or graphs.inside_layers(part)))
        for source, part, again, on in random
        if again in names
    ]
    return faults(
        "",
        *((f"{source} in a captured and recomputed {again}", wrong) for source, again, wrong in seen),
        ("recomputed moe around a captured moe_router", around),
    )


def _autocast(case: Case) -> str:
    how = case.model("recompute_granularity") or (case.model("moe_layer_recompute") and "selective")
    # Transformer Engine's own checkpointing, which megatron-core takes for whole layers in FP8 and FP4, keeps autocast
    kept = how == "full" and case.native and (case.policy.fp8 or case.policy.fp4)
    return f"{how} recomputation under autocast_enabled=true" if how and not kept else ""


def _graph_overlap(case: Case) -> str:
    graphs = case.run.cuda_graphs
    if graphs.implementation == "transformer_engine" and not {"moe", "mlp"} & set(graphs.parts):
        return ""
    captured = ", ".join(graphs.parts) or "whole layers"
    return f"overlap_moe_expert_parallel_comm with CUDA graphs by {graphs.implementation} of {captured}"


RULES: tuple[Rule, ...] = (
    *_EXPERTS,
    row("cpu-offloading", _cpu_offloading, "fewer layers than the model has, one pipeline stage, no recomputation and no CUDA graphs", "model.cpu_offloading=false",
         when=lambda c: c.model("cpu_offloading")),
    row("recomputation", _recomputation, "full: a method and a number of layers, which divides those of each model chunk where it is uniform, and is 1 with prediction layers; selective: no number of layers", "model.recompute_method=uniform model.recompute_num_layers=1, or model.recompute_granularity=selective"),
    row("recomputed-modules", _recomputed, "modules that the model has and that can be recomputed", "correct model.recompute_modules",
         when=lambda c: c.model("recompute_granularity") == "selective"),
    row("offloaded-modules", _offloaded, "a list of known modules", "correct model.offload_modules", when=lambda c: c.model("fine_grained_activation_offloading")),
    row("graph-switches", _graph_switches, "one of them", "model.cuda_graph_impl alone"),
    row("graph-scope-words", _graph_words, "parts of a layer that can be captured", "correct model.cuda_graph_scope (since 0.18 cuda_graph_modules)"),
    row("graph-scope", _graph_scope, "parts that the model has and that neither overlap nor synchronise", "correct model.cuda_graph_scope (since 0.18 cuda_graph_modules)", when=lambda c: c.run.cuda_graphs.on),
    row("graph-with-recomputation", _graph_recompute, "no random numbers in a captured part that is recomputed", "model.cuda_graph_impl=none, or model.recompute_granularity=null",
         when=lambda c: c.run.cuda_graphs.on),
    row("recompute-outside-autocast", _autocast, "neither: autocast is around the forward pass alone, so what backward recomputes is computed in other dtypes",
        "model.recompute_granularity=null model.moe_layer_recompute=null, or mixed_precision.autocast_enabled=false",
        "megatron-core 0.16.1 pipeline_parallel/schedules.py forward_step, tensor_parallel/random.py CheckpointFunction", when=lambda c: c.policy.autocast is not None),
    row("graph-with-expert-overlap", _graph_overlap, "graphs by transformer_engine, of other parts", "model.cuda_graph_impl=none",
         when=lambda c: c.run.cuda_graphs.on and c.model("overlap_moe_expert_parallel_comm")),
)  # fmt: skip
