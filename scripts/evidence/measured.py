"""Megatron-LM's test cases with measured memory as mpbridge Runs. Shared by the script that checks memory and its tests."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs in a checkout without installation

from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED
from mpbridge.settings.container import ConfigContainer, Run

_VOCABULARIES = {
    "gpt3_15b": 256000,
    "mixtral_8x22b": 32000,
    "deepseekv3_proxy": 256000,
    "deepseek_proxy": 131072,
    "nemotron3": 131072,
}
"""Vocabulary sizes of cases that do not use GPT-2's 50,257 (from their tokenizers), by name of the case."""
_APART = (
    ("grpo", "reinforcement learning keeps an inference engine"), ("fsdp2", "Megatron-FSDP of a later megatron-core"), ("zp_z3", "Megatron-FSDP of a later megatron-core"),
    ("muon", "the Muon optimizer"), ("frozen", ""), ("reruns", "fault injection with other tensors in memory"), ("nemotron3", "hybrid"), ("local_sgd", ""),
)  # fmt: skip


@cache
def rows() -> list[dict[str, Any]]:
    """Every measured row."""
    data: list[dict[str, Any]] = json.loads((ROOT / "scripts/evidence/data/measured_memory.json").read_text())["rows"]
    return data


def apart(row: dict[str, Any]) -> str:
    """Why a row is not compared; empty if it is."""
    family = row["case"].partition("/")[0]
    if family not in ("gpt", "moe", "mixtral"):
        return f"{family}: another architecture"
    args = row["args"]
    if any(key.startswith("hybrid") for key in args) or "hybrid" in str(args.get("spec", "")):
        return "hybrid layers"
    if not args.get("num-layers"):
        return "model not described"
    if row["case"].endswith("15b_8t_release_sm_gb200") and row["machine"] == "h100":
        return "an A100's file under an H100's name (its step times are those of golden_values_lts_dgx_a100.json)"
    return next((why for word, why in _APART if why and word in row["case"]), "")


def world(row: dict[str, Any]) -> int:
    """Number of processes: 8 per case, more if its parallel sizes require it; one node of four for GB200."""
    args = row["args"]
    tensor, pipeline = args.get("tensor-model-parallel-size", 1), args.get("pipeline-model-parallel-size", 1)
    if "1node" in row["case"]:
        return 4
    nodes = {
        "gpt3_15b_8t_release": 256,  # 384 x 4,096 tokens in 1.44 s: 128 H100 would run at 88 % of their peak
        "mixtral_8x22b": 128,
        "deepseekv3_proxy_flex_tp1pp4": 64,
        "deepseekv3_proxy_flex_tp2pp2": 32,
    }
    found = next((size for word, size in nodes.items() if word in row["case"]), 8)
    expert = args.get("expert-model-parallel-size", 1) * args.get("expert-tensor-parallel-size", tensor) * pipeline
    return max(found, tensor * pipeline * args.get("context-parallel-size", 1), expert)


def run_of(row: dict[str, Any]) -> Run:
    """The case as an mpbridge Run, on the measured machine."""
    args = row["args"]
    return ConfigContainer(**_sections(row, args)).resolved(
        world(row), machine=machine(row["machine"]), versions=ASSUMED, training=False
    )


def _sections(row: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    tensor, pipeline = args.get("tensor-model-parallel-size", 1), args.get("pipeline-model-parallel-size", 1)
    step = args.get("make-vocab-size-divisible-by", 128) * tensor
    words = args.get("vocab-size") or next((size for word, size in _VOCABULARIES.items() if word in row["case"]), 50257)
    seq = args.get("seq-length", 1024)
    batch = args.get("global-batch-size") or int(
        str(args.get("step-batch-size-schedule", "0:128")).split(":")[1].split()[0]
    )
    ranks = world(row) // (tensor * pipeline * args.get("context-parallel-size", 1))
    micro = args.get("micro-batch-size", 1)
    distributed = bool(args.get("use-distributed-optimizer"))
    return {
        "mixed_precision": _precision(args),
        "model": _model(row, args, -(-words // step) * step, pipeline),
        "optimizer": {"lr": 1e-4, "use_distributed_optimizer": distributed},
        "ddp": {
            "use_distributed_optimizer": distributed,
            "overlap_grad_reduce": bool(args.get("overlap-grad-reduce")),
            "overlap_param_gather": bool(args.get("overlap-param-gather")),
            "num_distributed_optimizer_instances": args.get("num-distributed-optimizer-instances", 1),
        },
        "parallel": {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "virtual_pipeline_model_parallel_size": _virtual(args, pipeline),
            "context_parallel_size": args.get("context-parallel-size", 1),
            "expert_model_parallel_size": args.get("expert-model-parallel-size", 1),
            "expert_tensor_parallel_size": args.get("expert-tensor-parallel-size"),
            "sequence_parallel": bool(args.get("sequence-parallel")) and tensor > 1,
        },
        "train": {
            "micro_batch_size": micro,
            "global_batch_size": max(1, batch // (micro * ranks)) * micro * ranks,
            "train_iters": 50,
        },
        "data": {"seq_length": seq},
    }


def _virtual(args: dict[str, Any], pipeline: int) -> int | None:
    if pipeline == 1:
        return None
    if args.get("num-virtual-stages-per-pipeline-rank"):
        return int(args["num-virtual-stages-per-pipeline-rank"])
    layout = args.get("pipeline-model-parallel-layout")
    if layout:
        from mpbridge.planning.memory.ranks import virtual_stages

        return virtual_stages(layout, pipeline)
    each = args.get("num-layers-per-virtual-pipeline-stage")
    return args["num-layers"] // pipeline // each if each else None


def _precision(args: dict[str, Any]) -> dict[str, Any]:
    if args.get("fp8-format"):
        names = {
            "tensorwise": "bf16_with_fp8_current_scaling_mixed",
            "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
            "mxfp8": "bf16_with_mxfp8_mixed",
        }
        gather = bool(args.get("fp8-param-gather"))
        found = {
            "recipe": names.get(args.get("fp8-recipe", "delayed"), "bf16_with_fp8_delayed_scaling_mixed"),
            "fp8": args["fp8-format"],
            "fp8_param_gather": gather,
            "fp8_param": gather,
        }
        if args.get("fp8-recipe") == "mxfp8":
            found["reuse_grad_buf_for_mxfp8_param_ag"] = bool(args.get("reuse-grad-buf-for-mxfp8-param-ag"))
        if args.get("fp8-recipe") == "tensorwise":
            found["first_last_layers_bf16"] = bool(args.get("first-last-layers-bf16"))
        return found
    if args.get("bf16"):
        return {"recipe": "bf16_mixed"} | ({"grad_reduce_in_fp32": False} if args.get("grad-reduce-in-bf16") else {})
    return {"recipe": "fp16_mixed" if args.get("fp16") else "fp32"}


_PLAIN = {
    "num-layers": "num_layers", "hidden-size": "hidden_size", "num-attention-heads": "num_attention_heads", "ffn-hidden-size": "ffn_hidden_size",
    "kv-channels": "kv_channels", "max-position-embeddings": "max_sequence_length", "position-embedding-type": "position_embedding_type", "normalization": "normalization",
    "num-experts": "num_moe_experts", "moe-ffn-hidden-size": "moe_ffn_hidden_size", "moe-router-topk": "moe_router_topk",
    "moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size", "moe-token-dispatcher-type": "moe_token_dispatcher_type",
    "moe-flex-dispatcher-backend": "moe_flex_dispatcher_backend", "qk-layernorm": "qk_layernorm", "multi-latent-attention": "multi_latent_attention",
    "q-lora-rank": "q_lora_rank", "kv-lora-rank": "kv_lora_rank", "qk-head-dim": "qk_head_dim", "qk-pos-emb-head-dim": "qk_pos_emb_head_dim", "v-head-dim": "v_head_dim",
    "mtp-num-layers": "mtp_num_layers", "recompute-granularity": "recompute_granularity", "recompute-method": "recompute_method",
    "recompute-num-layers": "recompute_num_layers", "transformer-impl": "transformer_impl", "attention-backend": "attention_backend",
    "moe-grouped-gemm": "moe_grouped_gemm", "swiglu": "gated_linear_unit", "moe-router-enable-expert-bias": "moe_router_enable_expert_bias",
    "moe-router-score-function": "moe_router_score_function", "moe-router-pre-softmax": "moe_router_pre_softmax", "moe-router-dtype": "moe_router_dtype",
    "cross-entropy-loss-fusion": "cross_entropy_loss_fusion", "cross-entropy-fusion-impl": "cross_entropy_fusion_impl",
    "defer-embedding-wgrad-compute": "defer_embedding_wgrad_compute", "wgrad-deferral-limit": "wgrad_deferral_limit", "calculate-per-token-loss": "calculate_per_token_loss",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage", "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "account-for-embedding-in-pipeline-split": "account_for_embedding_in_pipeline_split", "account-for-loss-in-pipeline-split": "account_for_loss_in_pipeline_split",
    "overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm", "pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
    "cuda-graph-impl": "cuda_graph_impl", "hidden-dropout": "hidden_dropout", "attention-dropout": "attention_dropout", "tp-comm-overlap": "tp_comm_overlap",
    "moe-router-num-groups": "moe_router_num_groups", "moe-router-group-topk": "moe_router_group_topk", "moe-permute-fusion": "moe_permute_fusion",
    "rotary-percent": "rotary_percent", "mamba-num-heads": "mamba_num_heads", "mamba-head-dim": "mamba_head_dim", "moe-latent-size": "moe_latent_size",
    "use-fused-weighted-squared-relu": "use_fused_weighted_squared_relu",
}  # fmt: skip


def _model(row: dict[str, Any], args: dict[str, Any], vocabulary: int, pipeline: int) -> dict[str, Any]:
    found = {ours: args[theirs] for theirs, ours in _PLAIN.items() if theirs in args and args[theirs] not in ("auto",)}
    found |= {
        "vocab_size": vocabulary,
        "hidden_dropout": float(args.get("hidden-dropout", 0.1)),
        "attention_dropout": float(args.get("attention-dropout", 0.1)),
        "add_bias_linear": not args.get("disable-bias-linear"),
        "share_embeddings_and_output_weights": not args.get("untie-embeddings-and-output-weights"),
        "activation_func": "silu" if args.get("swiglu") else "squared_relu" if args.get("squared-relu") else "gelu",
        "bias_activation_fusion": bool(args.get("swiglu")) and not args.get("no-bias-swiglu-fusion"),
        "moe_token_dispatcher_type": args.get("moe-token-dispatcher-type", "allgather"),
        "gradient_accumulation_fusion": not args.get("no-gradient-accumulation-fusion"),
        "deterministic_mode": bool(args.get("deterministic-mode")),
    }
    if args.get("hybrid-layer-pattern"):
        found |= _hybrid(args)
    if args.get("group-query-attention"):
        found["num_query_groups"] = args.get("num-query-groups", 1)
    if args.get("swiglu") and not args.get("ffn-hidden-size"):
        found["ffn_hidden_size"] = int((4 * args["hidden-size"] * 2 / 3) / 64) * 64
    if args.get("moe-layer-freq"):
        found["moe_layer_freq"] = _frequency(str(args["moe-layer-freq"]))
    if args.get("recompute-modules"):
        found["recompute_modules"] = re.findall(r"\w+", args["recompute-modules"])
    if args.get("fine-grained-activation-offloading"):
        found |= {
            "fine_grained_activation_offloading": True,
            "offload_modules": re.findall(r"\w+", args["offload-modules"]),
        }
    if args.get("cuda-graph-modules"):
        found["cuda_graph_scope"] = re.findall(r"\w+", args["cuda-graph-modules"])
    if args.get("spec") == "local":
        found["transformer_impl"] = "local"
    if args.get("use-flash-attn"):
        found["attention_backend"] = "flash"
    if "account_for_embedding_loss" in row["case"]:
        found |= {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    return found


def _hybrid(args: dict[str, Any]) -> dict[str, Any]:
    """A pattern without its bars between stages; layers for further tokens, which megatron-core 0.16.1's hybrid does not have, as more layers of the stack."""
    layers, *ahead = args["hybrid-layer-pattern"].replace("|", "").split("/")
    return {
        "hybrid_override_pattern": layers + "".join(ahead),
        "num_layers": len(layers + "".join(ahead)),
        "mtp_num_layers": None,
    }


def hybrids() -> list[dict[str, Any]]:
    """Rows of hybrids with Mamba layers."""
    return [row for row in rows() if row["args"].get("hybrid-layer-pattern")]


def _frequency(text: str) -> Any:
    """'([0]*3+[1]*11)' as a list."""
    parts = re.findall(r"\[(\d)\]\*(\d+)", text)
    return [int(value) for value, count in parts for _ in range(int(count))] if parts else int(text)
