"""For each rule about megatron-core's config classes: a run that breaks it, and its neighbour that does not."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpbridge.common.facts import ModelShape, OptimizerFacts, Parallel, Versions
from mpbridge.common.formats import DType
from mpbridge.common.machines import machine

SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=128, seq_length=32
)  # fmt: skip
MOE = dataclasses.replace(SHAPE, experts=4, expert_ffn_hidden_size=64, expert_layers=(True,) * 4, expert_topk=2)
NEWER = Versions(torch="2.11.0", megatron_core="0.20.0", transformer_engine="2.11.0", cuda="12.9")
BARE = Versions(torch="2.11.0", megatron_core="0.16.1", cuda="12.9")
TP2, PP2 = Parallel(world_size=2, tensor=2), Parallel(world_size=2, pipeline=2)
CP2, VPP2 = Parallel(world_size=2, context=2), Parallel(world_size=2, pipeline=2, virtual_pipeline=2)
STAGES = Parallel(world_size=4, pipeline=4, virtual_pipeline=2)
EP2 = Parallel(world_size=2, expert=2)
FLEX, ALLTOALL = {"moe_token_dispatcher_type": "flex"}, {"moe_token_dispatcher_type": "alltoall"}


def pair(breaks: dict[str, Any], holds: dict[str, Any], **both: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two runs that differ in some model settings."""
    return {"model": breaks, **both}, {"model": holds, **both}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence-parallel-alone": ({"parallel": Parallel(sequence=True)}, {"parallel": Parallel(world_size=2, tensor=2, sequence=True)}),
    "deferred-embedding-gradient": ({"model": {"defer_embedding_wgrad_compute": True, "gradient_accumulation_fusion": True}},
        {"model": {"defer_embedding_wgrad_compute": True, "gradient_accumulation_fusion": True}, "parallel": PP2}),
    "overlapped-warmup": pair({"overlap_p2p_comm_warmup_flush": True, "overlap_p2p_comm": True, "batch_p2p_comm": True},
                              {"overlap_p2p_comm_warmup_flush": True, "overlap_p2p_comm": True, "batch_p2p_comm": False}),
    "expert-settings-without-experts": ({"parallel": EP2}, {"parallel": EP2, "shape": MOE}),
    "top-one-before-softmax": pair({"moe_router_topk": 1}, {"moe_router_topk": 1, "moe_router_pre_softmax": True}, shape=MOE),
    "router-groups": pair({"moe_router_group_topk": 3, "moe_router_num_groups": 2}, {"moe_router_group_topk": 2, "moe_router_num_groups": 2}, shape=MOE),
    "router-group-share": pair({"moe_router_group_topk": 2, "moe_router_num_groups": 2, "moe_router_topk": 3},
                               {"moe_router_group_topk": 2, "moe_router_num_groups": 2, "moe_router_topk": 2}, shape=MOE),
    "token-dispatcher": pair({"moe_enable_deepep": True}, {"moe_enable_deepep": True, **FLEX}, shape=MOE, parallel=EP2),
    "flex-dispatcher-alone": ({"model": FLEX, "shape": MOE}, {"model": FLEX, "shape": MOE, "parallel": EP2}),
    "shared-expert-overlap": pair({"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 64, **FLEX},
                                  {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 64, **ALLTOALL}, shape=MOE, parallel=EP2),
    "shared-expert-overlap-by-dispatcher": pair({"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 64},
                                                {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 64, **FLEX},
                                                shape=MOE, parallel=EP2, versions=NEWER),
    "load-balancing-weights": pair({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": 0.1},
                                   {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]}, shape=MOE),
    "expert-capacity": pair({"moe_pad_expert_input_to_capacity": True}, {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0}, shape=MOE),
    "biased-experts-under-tensor-parallelism": pair({"add_bias_linear": True}, {"add_bias_linear": False}, shape=MOE, parallel=TP2),
    "expert-bias-scores": pair({"moe_router_enable_expert_bias": True}, {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}, shape=MOE),
    "expert-bias-by-score": pair({"moe_router_enable_expert_bias": True}, {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sqrtsoftplus"},
                                 shape=MOE, versions=NEWER),
    "expert-overlap": pair({"overlap_moe_expert_parallel_comm": True}, {"overlap_moe_expert_parallel_comm": True, **ALLTOALL}, shape=MOE, parallel=EP2),
    "cpu-offloading": pair({"cpu_offloading": True, "cpu_offloading_num_layers": 4}, {"cpu_offloading": True, "cpu_offloading_num_layers": 3}),
    "recomputation": pair({"recompute_granularity": "full"}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    "recomputed-modules": pair({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
    "offloaded-modules": pair({"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj"]},
                              {"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj", "core_attn"]}),
    "pipeline-split": pair({"num_layers_in_first_pipeline_stage": 4}, {"num_layers_in_first_pipeline_stage": 1}, parallel=PP2),
    "interleaving-alone": ({"parallel": Parallel(virtual_pipeline=2)}, {"parallel": Parallel(world_size=2, pipeline=2, virtual_pipeline=2)}),
    "interleaved-micro-batches": ({"parallel": STAGES, "global_batch_size": 6}, {"parallel": STAGES, "global_batch_size": 8}),
    "clamped-swiglu": pair({"activation_func_clamp_value": -1.0, "activation_func": "silu", "gated_linear_unit": True},
                           {"activation_func_clamp_value": 7.0, "activation_func": "silu", "gated_linear_unit": True}, shape=MOE, versions=NEWER),
    "fused-activation": pair({"bias_activation_fusion": True, "activation_func": "relu"}, {"bias_activation_fusion": True, "activation_func": "gelu"}),
    "rotary-embedding": pair({"multi_latent_attention": True, "apply_rope_fusion": True, "rope_type": "rope"},
                             {"multi_latent_attention": True, "apply_rope_fusion": True, "rope_type": "yarn"}),
    "l2-norm-on-latent-attention": pair({"multi_latent_attention": True, "qk_l2_norm": True}, {"multi_latent_attention": True, "qk_layernorm": True}),
    "symmetric-all-reduce": ({"model": {"symmetric_ar_type": "two_shot"}, "versions": dataclasses.replace(NEWER, torch="2.6.0", megatron_core="0.16.1")},
                             {"model": {"symmetric_ar_type": "two_shot"}, "versions": dataclasses.replace(NEWER, torch="2.7.0", megatron_core="0.16.1")}),
    "switch-without-transformer-engine": ({"model": {"apply_rope_fusion": True}, "versions": BARE}, {"model": {"apply_rope_fusion": True}}),
    "layers-without-rotation": pair({"no_rope_freq": 3}, {"no_rope_freq": 2}),
    "context-communication": pair({"cp_comm_type": ["p2p"]}, {"cp_comm_type": ["p2p"] * 4}, parallel=CP2, versions=NEWER),
    "context-parallel-attention": pair({"window_size": (8, 0)}, {"window_size": (8, 0), "cp_comm_type": "a2a"}, parallel=CP2),
    "interleaved-communication": pair({"overlap_p2p_comm": True}, {"overlap_p2p_comm": True, "batch_p2p_comm": False}, parallel=VPP2, global_batch_size=2),
    "average-in-collective-per-token": ({"model": {"calculate_per_token_loss": True}, "ddp": {"average_in_collective": True}},
                                        {"model": {"calculate_per_token_loss": True}}),
    "deterministic-attention": ({"model": {"deterministic_mode": True}},
                                {"model": {"deterministic_mode": True}, "environment": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}}),
    "inference-layers": pair({"inference_fuse_tp_communication": True}, {}),
    "batch-invariance-backend": pair({"batch_invariant_mode": True}, {"batch_invariant_mode": True, "attention_backend": "flash"}),
    "graph-switches": pair({"enable_cuda_graph": True, "external_cuda_graph": True}, {"enable_cuda_graph": True}),
    "graph-scope-words": pair({"cuda_graph_scope": "attention"}, {"cuda_graph_scope": "attn"}),
    "graph-scope": pair({"cuda_graph_impl": "local", "cuda_graph_scope": ["moe"]}, {"cuda_graph_impl": "local", "cuda_graph_scope": ["mlp"]}),
    "graph-with-recomputation": pair({"cuda_graph_impl": "local", "recompute_granularity": "selective", "attention_dropout": 0.1},
                                     {"cuda_graph_impl": "local", "recompute_granularity": "selective", "attention_dropout": 0.0}),
    "graph-with-expert-overlap": pair({"overlap_moe_expert_parallel_comm": True, "cuda_graph_impl": "local", **ALLTOALL},
                                      {"overlap_moe_expert_parallel_comm": True, "cuda_graph_impl": "transformer_engine", **ALLTOALL, "cuda_graph_scope": "attn"},
                                      shape=MOE, parallel=EP2),
    "attention-switch-has-no-effect-since-017": ({"recipe": "fp8_cs", "config": {"fp8_multi_head_attention": True, "fp8_dot_product_attention": True}, "versions": NEWER},
        {"recipe": "mxfp8", "config": {"fp8_dot_product_attention": True}, "versions": NEWER, "machine": machine("b200")}),
    "fp4-weights-unproven": ({"recipe": "nvfp4", "config": {"fp4_param": True}, "versions": NEWER, "machine": machine("b200")},
        {"recipe": "nvfp4", "versions": NEWER, "machine": machine("b200")}),
    "settings-without-effect": ({"inert": ("fp8_recipe=mxfp8 (read only with fp8)",)}, {}),
    "remainders-have-no-effect": ({"policy": {"precision_aware": True, "remainders": True, "main_params": DType.FP16}},
        {"policy": {"precision_aware": True, "remainders": True, "main_params": DType.FP32}}),
    "settings-not-known-here": pair({"mtp_hsm": True}, {}, versions=NEWER, optimizer=OptimizerFacts(distributed=True, settings={"muon_nesterov": True})),
}  # fmt: skip
