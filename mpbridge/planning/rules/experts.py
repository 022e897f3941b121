"""What megatron-core rejects about mixtures of experts when the config is constructed or a layer is built."""

from __future__ import annotations

from mpbridge.common.formats import say
from mpbridge.planning.rules.base import MODEL_CONFIG, NEWER_MODEL_CONFIG, Case, Rule, faults, row
from mpbridge.precision.megatron_spec.versions import BEFORE_017, SINCE_017

_BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def _experts_without(case: Case) -> str:
    ranks, settings = case.run.parallel.expert, ("moe_ffn_hidden_size", "moe_router_group_topk")
    given = [(f"{name}={case.model(name)}", case.model(name)) for name in settings]
    found = faults("", (f"expert_model_parallel_size={ranks}", ranks > 1), *given)
    return f"{found} without experts" if found else ""


def _groups(case: Case) -> str | None:
    limited, top, groups = (
        case.model(f"moe_router_{name}") for name in ("topk_limited_devices", "group_topk", "num_groups")
    )
    experts, ranks = case.run.shape.experts or 0, case.run.parallel.expert
    if top and limited:
        return "moe_router_group_topk together with moe_router_topk_limited_devices"
    if limited and experts:
        # the older setting, whose groups are the expert-parallel ranks
        return (
            f"moe_router_topk_limited_devices={limited} of {ranks} expert-parallel ranks" if limited > ranks else None
        )
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


def _kind(case: Case) -> str:
    return str(case.model("moe_token_dispatcher_type", "allgather"))


def _dispatcher(case: Case) -> str:
    kind, backend, deep = _kind(case), case.model("moe_flex_dispatcher_backend"), case.model("moe_enable_deepep")
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
    return f"moe_shared_expert_overlap with dispatcher {_kind(case)}" if on and _kind(case) not in kinds else ""


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
    sizes, ahead = case.run.parallel, case.model("mtp_num_layers")
    return faults(
        "overlap_moe_expert_parallel_comm with ",
        ("expert_model_parallel_size=1", sizes.expert <= 1),
        ("stages that do not interleave", sizes.pipeline > 1 and sizes.virtual_pipeline is None),
        ("dispatcher allgather", _kind(case) not in ("alltoall", "flex")),
        ("full recomputation", case.model("recompute_granularity") == "full"),
        ("recompute_method", case.model("recompute_method") is not None),
        ("recompute_num_layers", case.model("recompute_num_layers") is not None),
        ("moe_shared_expert_overlap", case.model("moe_shared_expert_overlap")),
        (f"mtp_num_layers={ahead}", ahead is not None and (ahead != 1 or sizes.pipeline == 1)),
        ("moe_use_legacy_grouped_gemm", "delay_wgrad_compute" in after and case.model("moe_use_legacy_grouped_gemm")),
    )


RULES: tuple[Rule, ...] = (
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
         when=lambda c: c.run.shape.experts and _kind(c) == "flex" and c.run.parallel.expert_width * c.run.parallel.expert <= 1),
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
         "model.overlap_moe_expert_parallel_comm=false model.delay_wgrad_compute=false model.ep_overlap_early_attn_memory_release=false"),
)  # fmt: skip
