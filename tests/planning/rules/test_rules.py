"""Each rule fires on one case and is silent on its neighbour; versions retire rows."""

from __future__ import annotations

import dataclasses

import pytest

from mpbridge.common.errors import Refused
from mpbridge.common.facts import OptimizerFacts, Parallel, RunFacts, Versions
from mpbridge.common.formats import DType
from mpbridge.common.machines import machine
from mpbridge.common.probe import installed
from mpbridge.planning.memory.ranks import undivided
from mpbridge.planning.rules.table import broken, require, rules
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.policy import Region
from mpbridge.precision.registry import recipes
from mpbridge.precision.resolve import resolve
from tests.planning.rules.config_cases import CASES, MOE, SHAPE

LATENT = dataclasses.replace(
    SHAPE, latent_attention={"q_lora_rank": 0, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
)  # fmt: skip
MANY = dataclasses.replace(MOE, experts=32)
NOW = Versions(torch="2.11.0", megatron_core="0.16.1", transformer_engine="2.11.0", torchao="0.18.0", cuda="12.9")
NEWER = dataclasses.replace(NOW, megatron_core="0.20.0")
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SHARDED = OptimizerFacts(distributed=True)
CPU = machine("cpu")


def case(recipe="bf16", config=None, policy=None, **run):
    """(policy, facts): recipe with changed config fields, then changed policy fields; run fields over a small H100 run."""
    made = resolve(recipes[recipe].make().derive(**(config or {})))
    facts = RunFacts(**({"shape": SHAPE, "machine": machine("h100"), "versions": NOW, "optimizer": SHARDED} | run))
    return dataclasses.replace(made, **(policy or {})), facts


def te(version, **more):
    return dataclasses.replace(NOW, transformer_engine=version, **more)


def opt(**changes):
    return dataclasses.replace(SHARDED, **changes)


B200 = {"machine": machine("b200")}
MX = {"recipe": "mxfp8", **B200}
HYBRID = {"is_hybrid_model": True}
MAMBA = {"mamba_num_heads": 64, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128}
MIXED = dataclasses.replace(SHAPE, hybrid=True, pattern="M-*M", sizes=MAMBA)
PATTERN = {"model": {**HYBRID, "hybrid_override_pattern": "M-*M"}, "shape": MIXED}
FEW = PATTERN | {"shape": dataclasses.replace(MIXED, sizes=MAMBA | {"mamba_num_heads": 16})}
LORA = dataclasses.replace(SHAPE, lora_rank=8, lora_targets=("mlp.linear_fc1",))
NANO = {**PATTERN, "parallel": Parallel(world_size=4, tensor=4)}
AWARE = {"use_precision_aware_optimizer": True}
PP2 = Parallel(world_size=2, pipeline=2)
CUSTOM = {"fp8": "hybrid", "fp8_recipe": "custom", "fp8_quantizer_factory": "a.b"}
WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
PADDED = {"moe_router_padding_for_quantization": True, "moe_token_dispatcher_type": "alltoall"}
GRAPH = {
    "moe_router_padding_for_fp8": True, "moe_token_dispatcher_type": "alltoall", "cuda_graph_impl": "transformer_engine",
    "cuda_graph_scope": ["moe_router", "moe_preprocess"],
}  # fmt: skip
VPP = Parallel(world_size=2, pipeline=2, virtual_pipeline=2)

# id -> (a case that breaks it, the neighbour that does not)
TABLE = {
    "quantization-without-transformer-engine": ({"recipe": "fp8_cs", "versions": te(None)}, {"recipe": "bf16", "versions": te(None)}),
    "quantization-with-local-layers": ({"recipe": "fp8_cs", "model": {"transformer_impl": "local"}}, {"recipe": "fp8_cs", "model": {"transformer_impl": "transformer_engine"}}),
    "scaling-of-a-library-that-the-engine-does-not-use": ({"recipe": "fp8_rowwise"}, {"recipe": "fp8_rowwise", "engine": "fsdp2", "optimizer": OptimizerFacts()}),
    "machine-cannot-run-it": ({"recipe": "mxfp8"}, MX),
    "transformer-engine-too-old": ({"recipe": "fp8_sc", "machine": None, "versions": te("2.2")}, {"recipe": "fp8_sc", "machine": None, "versions": te("2.3")}),
    "transformer-engine-untested": ({"recipe": "fp8_cs", "versions": te("2.21.0")}, {"recipe": "fp8_cs", "versions": te("2.20.2")}),
    "fp32-products-in-tf32": ({"recipe": "fp32"}, {"recipe": "fp32", "environment": {"NVIDIA_TF32_OVERRIDE": "0"}}),
    "edge-layers-with-delayed-scaling": ({"recipe": "fp8_ds", "config": {"first_last_layers_bf16": True}}, {"recipe": "fp8_cs", "config": {"first_last_layers_bf16": True}}),
    "edge-layers-beyond-a-stage": ({"recipe": "fp8_cs", "config": {"num_layers_at_start_in_bf16": 3, "num_layers_at_end_in_bf16": 0}, "parallel": PP2},
        {"recipe": "fp8_cs", "config": {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 0}, "parallel": PP2}),
    "edge-layers-leave-nothing": ({"recipe": "nemotron_3_super_bf16_with_nvfp4_mixed", **B200}, {"recipe": "nvfp4", **B200}),
    "module-rule-in-stored-layer": ({"recipe": "fp8_cs", "config": {"modules": {"mlp.linear_fc2": "bf16"}}},
        {"recipe": "fp8_cs", "config": {"modules": {"mlp.linear_fc2": "bf16"}, "fp8_param_gather": False}}),
    "module-rule-stores-weights": ({"config": {"modules": {"mlp.linear_fc2": {"fp8": "hybrid", "fp8_param_gather": True}}}},
        {"config": {"modules": {"mlp.linear_fc2": {"fp8": "hybrid", "fp8_param_gather": True}}}, "versions": dataclasses.replace(NOW, megatron_core="0.20.0")}),
    "loss-scale-is-not-read": ({"recipe": "fp32", "config": {"loss_scale": 8.0}, "optimizer": OptimizerFacts()}, {"recipe": "fp32", "config": {"loss_scale": 8.0}}),
    "module-rule-matches-nothing": ({"recipe": "fp8_sc", "config": {"modules": {"mlp.linear_fc3": "bf16"}}},
        {"recipe": "fp8_sc", "config": {"modules": {"mlp.linear_fc*": "bf16"}}}),
    "module-rule-of-another-model": ({"recipe": "fp8_sc", "config": {"modules": {"*mixer.out_proj": "mxfp8"}}},
        {"recipe": "fp8_sc", "config": {"modules": {"*mixer.out_proj": "mxfp8"}}, "shape": dataclasses.replace(SHAPE, hybrid=True)}),
    "module-rule-never-decides": ({"recipe": "fp8_sc", "config": {"modules": {"mlp.*": "bf16", "mlp.linear_fc1": "tensorwise"}}},
        {"recipe": "fp8_sc", "config": {"modules": {"mlp.linear_fc1": "tensorwise", "mlp.*": "bf16"}}}),
    "module-rule-beyond-the-model": ({"recipe": "fp8_sc", "config": {"modules": {"mlp.*": {"layers": "2-29", "precision": "bf16"}}}},
        {"recipe": "fp8_sc", "config": {"modules": {"mlp.*": {"layers": "2-3", "precision": "bf16"}}}}),
    "gemms-of-one-linear-in-several-formats": ({"config": {"modules": {"mlp.*": {"fprop": "tensorwise", "dgrad": "tensorwise", "wgrad": "bf16"}}}},
        {"config": {"modules": {"mlp.*": {"fprop": "tensorwise", "dgrad": "tensorwise", "wgrad": "tensorwise"}}}}),
    "gemm-sizes": ({"recipe": "fp8_ds", "shape": dataclasses.replace(SHAPE, ffn_hidden_size=260)}, {"recipe": "fp8_ds"}),
    "inert-outside-delayed-scaling": ({"recipe": "fp8_cs", "config": {"fp8_amax_history_len": 16}}, {"recipe": "fp8_ds", "config": {"fp8_amax_history_len": 16}}),
    "wgrad-switch-has-no-effect": ({"recipe": "fp8_ds", "config": {"fp8_wgrad": False}}, {"recipe": "fp8_ds"}),
    "attention-switch-has-no-effect": ({"recipe": "fp8_sc", "config": {"fp8_dot_product_attention": True}}, {"recipe": "fp8_cs", "config": {"fp8_dot_product_attention": True}}),
    "mxfp8-with-e5m2-gradients": ({**MX, "config": {"fp8": "hybrid"}}, MX),
    "nvfp4-around-fp16": ({"recipe": "fp16", "config": {"fp4": "e2m1"}, **B200}, {"recipe": "nvfp4", **B200}),
    "fp4-weights-stored": ({"recipe": "nvfp4", "config": {"fp4_param_gather": True}, **B200},
        {"recipe": "nvfp4", "config": {"fp4_param_gather": True, "frozen": ["*"]}, "shape": LORA, **B200}),
    "delayed-scaling-with-selective-recompute": ({"recipe": "fp8_ds", "model": SELECTIVE}, {"recipe": "fp8_cs", "model": SELECTIVE}),
    "fp8-recompute-needs-newer-engine": ({"recipe": "fp8_cs", "model": SELECTIVE, "versions": te("2.5")}, {"recipe": "fp8_cs", "model": SELECTIVE, "versions": te("2.6")}),
    "nvfp4-recompute-needs-newer-engine": ({"recipe": "nvfp4", **B200, "model": WHOLE, "versions": te("2.11")}, {"recipe": "nvfp4", **B200, "model": WHOLE, "versions": te("2.12")}),
    "recompute-outside-autocast": ({"config": {"autocast_enabled": True}, "model": WHOLE}, {"config": {"autocast_enabled": True}}),
    "interval-has-no-effect": ({"recipe": "fp8_cs", "model": {"fp8_interval": 4}}, {"recipe": "fp8_cs", "model": {"fp8_interval": 1}}),
    "amax-group-has-no-effect": ({"recipe": "fp8_cs", "model": {"tp_only_amax_red": True}}, {"recipe": "fp8_ds", "model": {"tp_only_amax_red": True}}),
    "parameter-gather-without-distributed-optimizer": ({"recipe": "fp8_ds", "optimizer": OptimizerFacts()}, {"recipe": "fp8_ds"}),
    "mxfp8-gather-without-reused-buffer": ({**MX, "config": {"reuse_grad_buf_for_mxfp8_param_ag": False}}, MX),
    "mxfp8-gather-without-overlap-gives-nan": (MX, {**MX, "ddp": OVERLAP}),
    "mxfp8-gather-evaluates-stale-weights": ({**MX, "ddp": OVERLAP}, {**MX, "ddp": OVERLAP, "config": {"fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False}}),
    "mxfp8-without-gather-costs-memory": ({**MX, "config": {"fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False}}, MX),
    "reused-buffer-with-overlapped-step": ({**MX, "optimizer": opt(overlap_param_gather_with_step=True)}, MX),
    "reused-buffer-under-megatron-fsdp": ({**MX, "engine": "megatron_fsdp"}, MX),
    "sharded-engines-do-data-parallelism": ({"engine": "fsdp2", "parallel": PP2, "optimizer": OptimizerFacts()}, {"engine": "mcore", "parallel": PP2}),
    "fsdp2-shards-by-itself": ({"engine": "fsdp2"}, {"engine": "fsdp2", "optimizer": OptimizerFacts()}),
    "fsdp2-casts-by-itself": ({"engine": "fsdp2", "config": {"autocast_enabled": True}}, {"engine": "mcore", "config": {"autocast_enabled": True}}),
    "stored-weights-under-sharded-engines": ({"recipe": "fp8_ds", "engine": "megatron_fsdp"}, {"recipe": "fp8_ds", "config": {"fp8_param_gather": False}, "engine": "fsdp2"}),
    "megatron-fsdp-unsharded": ({"engine": "megatron_fsdp", "ddp": {"data_parallel_sharding_strategy": "no_shard"}}, {"engine": "megatron_fsdp", "ddp": {"data_parallel_sharding_strategy": "optim"}}),
    "fsdp2-storage-under-wider-compute": ({"engine": "fsdp2", "policy": {"compute": DType.FP32}, "optimizer": OptimizerFacts()},
        {"engine": "fsdp2", "policy": {"params": DType.FP32}, "optimizer": OptimizerFacts()}),
    "latent-attention-softmax-on-a-cpu": ({"machine": CPU, "shape": LATENT, "model": {"attention_softmax_in_fp32": False}},
        {"shape": LATENT, "model": {"attention_softmax_in_fp32": False}}),
    "megatron-fsdp-instances": ({"engine": "megatron_fsdp", "ddp": {"num_distributed_optimizer_instances": 2}}, {"engine": "mcore", "ddp": {"num_distributed_optimizer_instances": 2}}),
    "megatron-fsdp-keeps-one-dtype": ({"engine": "megatron_fsdp", "config": {"keep_fp32": ["*layernorm*"]}}, {"engine": "fsdp2", "config": {"keep_fp32": ["*layernorm*"]}}),
    "accumulator-apart-from-the-wire": ({"policy": {"accumulate": DType.BF16}}, {"policy": {"accumulate": None}}),
    "accumulator-before-its-field": ({"engine": "megatron_fsdp", "policy": {"accumulate": DType.BF16}},
        {"engine": "megatron_fsdp", "policy": {"accumulate": DType.BF16}, "versions": NEWER}),
    "megatron-fsdp-main-gradients": ({"engine": "megatron_fsdp", "policy": {"main_grads": DType.BF16}}, {"engine": "megatron_fsdp", "policy": {"main_grads": DType.FP32}}),
    "other-models-are-not-built": ({"model": {"heterogeneous_block_specs": True, "use_kitchen": True}}, {"model": {"heterogeneous_block_specs": False}}),
    "megatron-fsdp-settings-elsewhere": ({"ddp": {"data_parallel_sharding_strategy": "optim_grads"}}, {"engine": "megatron_fsdp", "ddp": {"data_parallel_sharding_strategy": "optim_grads"}}),
    "biased-experts-on-local-layers": ({"shape": MOE, "machine": CPU}, {"shape": MOE}),
    "experts-under-tensor-parallelism-need-sequence-parallelism": ({"shape": MOE, "parallel": Parallel(world_size=2, tensor=2)},
        {"shape": MOE, "parallel": Parallel(world_size=2, tensor=2, sequence=True)}),
    "overlapped-step-needs-interleaving": ({"optimizer": opt(overlap_param_gather_with_step=True), "ddp": OVERLAP},
        {"optimizer": opt(overlap_param_gather_with_step=True), "ddp": OVERLAP, "parallel": VPP}),
    "library-versions-untested": ({"versions": dataclasses.replace(NOW, torch="2.3", megatron_core="0.12.0")}, {}),
    "optimizer-that-the-engine-does-not-build": ({"engine": "megatron_fsdp", "optimizer": opt(name="muon")}, {"engine": "megatron_fsdp", "optimizer": opt(name="sgd")}),
    "switch-that-the-engine-cannot-use": ({"engine": "fsdp2", "model": {"gradient_accumulation_fusion": True}, "optimizer": OptimizerFacts()},
        {"model": {"gradient_accumulation_fusion": True}}),
    "fused-adam-keeps-no-bf16-main-weights": ({**MX, "config": AWARE | {"main_params_dtype": "bf16"}}, {**MX, "config": AWARE | {"main_params_dtype": "fp16"}}),
    "emulation-without-fused-accumulation": ({"recipe": "fp8_cs", "realization": "emulated", "model": {"gradient_accumulation_fusion": True}},
        {"recipe": "fp8_cs", "model": {"gradient_accumulation_fusion": True}}),
    "per-token-loss-on-sharded-engines": ({"engine": "fsdp2", "model": {"calculate_per_token_loss": True}}, {"model": {"calculate_per_token_loss": True}}),
    "needs-cuda": ({"machine": CPU, "model": {"gradient_accumulation_fusion": True}}, {"machine": machine("h100"), "model": {"gradient_accumulation_fusion": True}}),
    "keep-fp32-matches-nothing": ({"config": {"keep_fp32": ["*routre*"]}}, {"config": {"keep_fp32": ["*layernorm*"]}}),
    "keep-fp32-of-a-tied-embedding": ({"config": {"keep_fp32": ["embedding.*"]}}, {"config": {"keep_fp32": ["embedding.*"]}, "shape": dataclasses.replace(SHAPE, tied=False)}),
    "fp32-storage-under-16-bit-compute": ({"recipe": "fsdp_adamw"}, {"recipe": "fsdp_adamw", "engine": "fsdp2"}),
    "nothing-casts-what-is-returned": ({"config": {"output_dtype": "fp32"}}, {"config": {"output_dtype": "fp32"}, "engine": "fsdp2", "optimizer": OptimizerFacts()}),
    "fp16-parameters-alone": ({"recipe": "fp16", "config": {"main_params_dtype": "fp16"}}, {"recipe": "full_bf16"}),
    "full-16-bit-with-distributed-optimizer": ({"recipe": "full_bf16"}, {"recipe": "full_bf16", "optimizer": OptimizerFacts()}),
    "full-16-bit-with-fp32-reduction": ({"recipe": "full_bf16", "policy": {"reduce": DType.FP32}, "optimizer": OptimizerFacts()},
        {"recipe": "full_bf16", "optimizer": OptimizerFacts()}),
    "fp32-accumulation-has-no-effect": ({"ddp": {"reduce_scatter_with_fp32_accumulation": True}},
        {"ddp": {"reduce_scatter_with_fp32_accumulation": True}, "config": {"grad_reduce_in_fp32": False}}),
    "fp32-accumulation-with-optimizer-instances": ({"ddp": {"reduce_scatter_with_fp32_accumulation": True, "num_distributed_optimizer_instances": 2}},
        {"ddp": {"reduce_scatter_with_fp32_accumulation": True}}),
    "optimizer-instances-without-ranks": ({"ddp": {"num_distributed_optimizer_instances": 2}, "parallel": Parallel(world_size=6, tensor=2)},
        {"ddp": {"num_distributed_optimizer_instances": 2}, "parallel": Parallel(world_size=8, tensor=2)}),
    "fatal-nan-check-with-dynamic-loss-scale": ({"recipe": "fp16", "ddp": {"check_for_nan_in_grad": True}}, {"recipe": "fp16", "config": {"loss_scale": 1024.0}, "ddp": {"check_for_nan_in_grad": True}}),
    "precision-aware-needs-adam": ({"config": AWARE, "optimizer": opt(name="sgd")}, {"config": AWARE}),
    "precision-aware-needs-distributed-optimizer": ({"config": AWARE, "optimizer": OptimizerFacts()}, {"config": AWARE}),
    "precision-aware-needs-fused-adam": ({"config": AWARE, "versions": te(None)}, {"config": AWARE, "versions": te(None), "machine": CPU}),
    "states-need-precision-aware": ({"policy": {"exp_avg": DType.BF16, "precision_aware": False}}, {"policy": {"exp_avg": DType.BF16, "precision_aware": True}}),
    "optimizer-section-states-need-precision-aware": ({"optimizer": opt(settings={"exp_avg_sq_dtype": "bf16"})},
        {"optimizer": opt(settings={"exp_avg_sq_dtype": "bf16", "use_precision_aware_optimizer": True})}),
    "precision-aware-with-fp8": ({"recipe": "fp8_cs", "config": AWARE | {"exp_avg_dtype": "bf16"}}, {"recipe": "fp8_ds", "config": AWARE}),
    "precision-aware-does-nothing": ({"recipe": "fp8_cs", "config": AWARE}, {"recipe": "fp8_cs", "config": AWARE | {"exp_avg_dtype": "bf16"}}),
    "fp8-recipe-leaks-into-the-optimizer": ({"config": AWARE, "optimizer": opt(settings={"fp8_recipe": "tensorwise"})},
        {"config": AWARE, "optimizer": opt(settings={"fp8_recipe": "delayed"})}),
    "main-gradients-that-nothing-reads": ({"config": AWARE, "policy": {"main_grads": DType.BF16, "reduce": DType.FP32}},
        {"config": AWARE, "policy": {"main_grads": DType.BF16, "reduce": DType.BF16}}),
    "remainders-of-fp8-weights": ({"recipe": "fp8_ds", "config": AWARE}, {"recipe": "fp8_ds", "config": AWARE | {"store_param_remainders": False}}),
    "remainders-need-newer-engine": ({"config": AWARE | {"store_param_remainders": True}, "versions": te("2.0")}, {"config": AWARE | {"store_param_remainders": True}}),
    "duplicate-main-weights": ({"recipe": "fp32", "config": AWARE}, {"recipe": "fp32", "config": AWARE, "engine": "fsdp2", "optimizer": OptimizerFacts()}),
    "moments-follow-16-bit-parameters": ({"engine": "fsdp2", "optimizer": OptimizerFacts(name="torch_adamw")},
        {"recipe": "fsdp_adamw", "engine": "fsdp2", "optimizer": OptimizerFacts(name="torch_adamw")}),
    "torch-optimizer-keeps-no-main-weights": ({"engine": "fsdp2", "optimizer": OptimizerFacts(name="sgd")},
        {"recipe": "fsdp_adamw", "engine": "fsdp2", "optimizer": OptimizerFacts(name="sgd")}),
    "torch-adamw-cannot-keep-states": ({"engine": "fsdp2", "optimizer": OptimizerFacts(name="torch_adamw", settings={"optimizer": "torch_adamw"})},
        {"recipe": "fsdp_adamw", "engine": "fsdp2", "optimizer": OptimizerFacts(name="torch_adamw", settings={"optimizer": "torch_adamw"})}),
    "offload-needs-precision-aware": ({"optimizer": opt(cpu_offload=True)}, {"optimizer": opt(cpu_offload=True), "config": AWARE}),
    "offload-on-a-sharded-engine": ({"recipe": "megatron_fsdp_bf16_mixed", "engine": "megatron_fsdp", "optimizer": opt(cpu_offload=True)},
        {"optimizer": opt(cpu_offload=True), "config": AWARE}),
    "offload-keeps-fp32-states": ({"optimizer": opt(cpu_offload=True), "config": AWARE | {"exp_avg_sq_dtype": "bf16"}},
        {"optimizer": opt(), "config": AWARE | {"exp_avg_sq_dtype": "bf16"}}),
    "offload-stores-no-remainders": ({"optimizer": opt(cpu_offload=True), "config": AWARE},
        {"optimizer": opt(cpu_offload=True), "config": AWARE | {"store_param_remainders": False}}),
    "offload-moves-nothing": ({"optimizer": opt(cpu_offload=True), "config": AWARE},
        {"optimizer": opt(cpu_offload=True, settings={"optimizer_offload_fraction": 0.5}), "config": AWARE}),
    "offload-with-fp32-parameters": ({"optimizer": opt(cpu_offload=True), "config": AWARE | {"keep_fp32": ["*layernorm*"]}},
        {"optimizer": opt(), "config": AWARE | {"keep_fp32": ["*layernorm*"]}}),
    "offload-with-stored-weights": ({"recipe": "fp8_cs", "config": AWARE, "optimizer": opt(cpu_offload=True)},
        {"recipe": "fp8_ds", "config": AWARE, "optimizer": opt(cpu_offload=True)}),
    "distributed-optimizer-is-adam-only": ({"optimizer": opt(name="sgd")}, {"optimizer": OptimizerFacts(name="sgd")}),
    "overlapped-gather-needs-distributed-optimizer": ({"ddp": {"overlap_param_gather": True}, "optimizer": OptimizerFacts()},
        {"ddp": {"overlap_param_gather": True}, "optimizer": opt()}),
    "megatron-fsdp-main-weights": ({"engine": "megatron_fsdp", "policy": {"main_params": DType.FP16}}, {"engine": "megatron_fsdp", "policy": {"main_params": DType.FP32}}),
    "fp4-on-a-hybrid": ({"recipe": "nvfp4", **B200, "model": HYBRID}, {"recipe": "nvfp4", **B200, "model": HYBRID, "versions": NEWER}),
    # Nemotron 3 Nano's mixer: 2 x 64 x 64 + 2 x 8 x 128 + 64 = 10,304 rows, 2,576 = 161 x 16 on each of four ranks: enough for FP8, not for MXFP8
    "mamba-projection-rows": ({**MX, **NANO}, {"recipe": "fp8_cs", **NANO}),
    "hybrid-without-a-pattern": ({"model": HYBRID}, PATTERN),
    "hybrids-do-not-follow": ({**PATTERN, "model": {**PATTERN["model"], **WHOLE}}, {**PATTERN, "model": {**PATTERN["model"], **SELECTIVE}}),
    "nothing-is-trained": ({"config": {"frozen": ["*"]}}, {"config": {"frozen": ["*"]}, "shape": LORA}),
    "adapters-do-not-follow": ({"config": {"frozen": ["*"]}, "shape": LORA, "parallel": Parallel(world_size=2, tensor=2)},
        {"config": {"frozen": ["*"]}, "shape": LORA, "parallel": PP2}),
    "frozen-tied-embedding-on-two-stages": ({"config": {"frozen": ["embedding.*"]}, "parallel": PP2}, {"config": {"frozen": ["*"]}, "shape": LORA, "parallel": PP2}),
    "frozen-on-one-engine": ({"config": {"frozen": ["*"]}, "shape": LORA, "engine": "fsdp2", "optimizer": OptimizerFacts()}, {"config": {"frozen": ["*"]}, "shape": LORA}),
    "fp32-parameters-in-a-reused-buffer": ({**MX, "config": {"frozen": ["*"], "lora_dtype": "fp32"}, "shape": LORA}, {**MX, "config": {"frozen": ["*"]}, "shape": LORA}),
    "adapters-dtype-without-adapters": ({"config": {"lora_dtype": "fp32"}}, {"config": {"lora_dtype": "fp32"}, "shape": LORA}),
    "adapters-beside-a-trained-base": ({"config": {"frozen": ["*.adapter.*"]}, "shape": LORA}, {"config": {"frozen": ["*"]}, "shape": LORA}),
    "stored-base-is-kept-twice": ({"recipe": "fp8_cs", "config": {"frozen": ["embedding.*"]}}, {"recipe": "fp8_cs", "config": {"frozen": ["embedding.*"]}, **B200}),
    "hybrids-on-one-engine": ({**PATTERN, "engine": "fsdp2", "optimizer": OptimizerFacts()}, PATTERN),
    "mamba-states-dtype-unread": ({**PATTERN, "model": {**PATTERN["model"], "mamba_training_ssm_states_dtype": "fp32"}, "versions": NEWER}, {**PATTERN, "versions": NEWER}),
    "hybrid-in-fp16": ({"recipe": "fp16", "model": HYBRID}, {"recipe": "bf16", "model": HYBRID}),
    "muon-cannot": ({"recipe": "fp16", "optimizer": OptimizerFacts(name="muon")}, {"optimizer": OptimizerFacts(name="muon")}),
    "torch-muon-keeps-no-main-weights": ({"engine": "fsdp2", "optimizer": OptimizerFacts(name="muon")}, {"recipe": "fsdp_adamw", "engine": "fsdp2", "optimizer": OptimizerFacts(name="muon")}),
    "torch-muon-cannot": ({"recipe": "fsdp_adamw", "engine": "fsdp2", "optimizer": OptimizerFacts(name="muon", settings={"muon_fp32_matmul_prec": "highest"})},
        {"recipe": "fsdp_adamw", "engine": "fsdp2", "optimizer": OptimizerFacts(name="muon", settings={"muon_fp32_matmul_prec": "medium"})}),
    "muon-gathers-one-dtype": ({"config": {"keep_fp32": ["*layernorm*"]}, "optimizer": OptimizerFacts(name="dist_muon")},
        {"config": {"keep_fp32": ["*layernorm*"]}, "optimizer": OptimizerFacts(name="muon")}),
    "newton-schulz-precision-unknown": ({"optimizer": OptimizerFacts(name="muon", settings={"muon_fp32_matmul_prec": "low"})},
        {"optimizer": OptimizerFacts(name="muon", settings={"muon_fp32_matmul_prec": "highest"})}),
    "weight-decay-of-two-kinds": ({"optimizer": OptimizerFacts(name="muon", settings={"decoupled_weight_decay": False})},
        {"optimizer": OptimizerFacts(name="adam", settings={"decoupled_weight_decay": False})}),
    "muon-settings-unknown": ({"optimizer": OptimizerFacts(name="muon", settings={"muon_momentum": 1.5})},
        {"optimizer": OptimizerFacts(name="muon", settings={"muon_momentum": 0.0})}),
    "muon-from-stored-weights": ({"recipe": "fp8_cs", "optimizer": OptimizerFacts(name="muon")}, {"recipe": "fp8_cs", "config": {"fp8_param_gather": False}, "optimizer": OptimizerFacts(name="muon")}),
    # 'duplicated' can only be told from silence where it is not the default of the installed release, or that of the one asked about
    "muon-by-tensor-parallel-blocks": ({"parallel": Parallel(world_size=2, tensor=2), "optimizer": OptimizerFacts(name="muon", settings={"muon_tp_mode": "blockwise"}),
        "versions": dataclasses.replace(NOW, megatron_core=installed().megatron_core)},
        {"parallel": Parallel(world_size=2, tensor=2), "optimizer": OptimizerFacts(name="muon", settings={"muon_tp_mode": "distributed"})}),
    "second-moment-in-fp8": ({"config": AWARE | {"exp_avg_sq_dtype": "fp8"}}, {"config": AWARE | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16"}}),
    # dt_bias, A_log and D of 16 heads: 16 elements each, in a buffer aligned to 64
    "gather-misplaces-what-follows-odd-sizes": ({**MX, **FEW}, {**MX, **PATTERN}),
    "soap-by-tensor-parallel-blocks": ({"parallel": Parallel(world_size=2, tensor=2), "optimizer": OptimizerFacts(name="soap"), "versions": NEWER},
        {"optimizer": OptimizerFacts(name="soap"), "versions": NEWER}),
    "optimizer-newer-than-megatron-core": ({"optimizer": OptimizerFacts(name="soap")}, {"optimizer": OptimizerFacts(name="soap"), "versions": NEWER}),
    "optimizer-settings-unread": ({"optimizer": OptimizerFacts(name="lion", settings={"lion_beta1": 0.9}), "versions": NEWER},
        {"optimizer": OptimizerFacts(name="lion", settings={"lion_beta1": 0.95}), "versions": NEWER}),
    "muon-under-mxfp8": ({**MX, "optimizer": OptimizerFacts(name="muon")}, {"optimizer": OptimizerFacts(name="muon")}),
    "moments-with-custom-scale-need-newer-engine": ({"config": AWARE | {"exp_avg_dtype": "fp8"}, "versions": te("1.13")}, {"config": AWARE | {"exp_avg_dtype": "fp8"}}),
    "sizes-do-not-divide": ({"parallel": Parallel(world_size=3, tensor=3)}, {"parallel": Parallel(world_size=4, tensor=4)}),
    "layers-do-not-divide": ({"parallel": Parallel(world_size=3, pipeline=3)}, {"parallel": PP2}),
    "router-dtype-is-ignored": ({"shape": MOE, "model": {"moe_router_dtype": "bf16"}}, {"shape": MOE, "model": {"moe_router_dtype": "fp32"}}),
    "router-dtype-without-experts": ({"config": {"moe_router_dtype": "fp32"}}, {"shape": MOE, "config": {"moe_router_dtype": "fp32"}}),
    "many-experts-route-in-16-bits": ({"shape": MANY}, {"shape": MANY, "config": {"moe_router_dtype": "fp32"}}),
    "router-padding-without-quantization": ({"config": {"modules": {"mlp.*": "tensorwise"}}, "shape": MOE, "model": PADDED}, {"recipe": "fp8_cs", "shape": MOE, "model": PADDED}),
    "router-padding-dispatcher": ({"recipe": "fp8_cs", "shape": MOE, "model": PADDED | {"moe_token_dispatcher_type": "allgather"}}, {"recipe": "fp8_cs", "shape": MOE, "model": PADDED}),
    "router-padding-in-a-graph": ({"recipe": "fp8_cs", "shape": MOE, "model": GRAPH}, {"recipe": "fp8_cs", "shape": MOE, "model": GRAPH | {"cuda_graph_scope": ["moe_router"]}}),
    "nan-check-in-a-graph": ({"model": {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "ddp": {"check_for_nan_in_grad": True}},
        {"model": {"cuda_graph_scope": "full_iteration"}, "ddp": {"check_for_nan_in_grad": True}}),  # a scope alone captures nothing
    "experts-in-fp8-need-newer-engine": ({"recipe": "fp8_ds", "shape": dataclasses.replace(MOE, grouped_gemm=True), "versions": te("1.10")},
        {"recipe": "fp8_ds", "shape": MOE, "versions": te("1.10")}),
    "expert-overlap-needs-16-bits": ({"recipe": "fp32", "model": {"overlap_moe_expert_parallel_comm": True}}, {"model": {"overlap_moe_expert_parallel_comm": True}}),
    "pipeline-dtype-is-what-is-sent": ({"config": {"fp32_residual_connection": True}, "parallel": PP2},
        {"config": {"fp32_residual_connection": True, "pipeline_dtype": "fp32"}, "parallel": PP2}),
    "fp32-residual-in-fp32": ({"recipe": "fp32", "model": {"fp32_residual_connection": True}}, {"model": {"fp32_residual_connection": True}}),
    "fp16-cross-entropy": ({"model": {"fp16_lm_cross_entropy": True}}, {"recipe": "fp16", "model": {"fp16_lm_cross_entropy": True}}),
    "fused-cross-entropy-by-engine": ({"model": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}},
        {"model": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}}),
    "softmax-under-layer-scaling": ({"config": {"attention_softmax_in_fp32": False}, "model": {"apply_query_key_layer_scaling": True}},
        {"model": {"apply_query_key_layer_scaling": True}}),
    "activation-store-needs-swiglu": ({"model": {"activation_func_fp8_input_store": True, "activation_func": "gelu"}},
        {"shape": dataclasses.replace(SHAPE, gated=True), "model": {"activation_func_fp8_input_store": True, "activation_func": "torch.nn.functional.silu"}}),
    "batch-invariance-needs-bf16": ({"recipe": "fp16", "model": {"batch_invariant_mode": True}, "versions": dataclasses.replace(NOW, megatron_core="0.17.0")},
        {"model": {"batch_invariant_mode": True}, "versions": dataclasses.replace(NOW, megatron_core="0.17.0")}),
    "reduced-precision-switch-is-process-wide": ({"model": {"disable_bf16_reduced_precision_matmul": True}}, {"recipe": "fp16", "model": {"disable_bf16_reduced_precision_matmul": True}}),
    "interleaved-pipeline-on-gloo": ({"machine": CPU, "parallel": VPP}, {"machine": CPU, "parallel": VPP, "model": {"overlap_p2p_comm": True, "batch_p2p_comm": False}}),
    "fp32-block-scales-on-blackwell": ({"recipe": "fp8_sc", **B200, "environment": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}},
        {"recipe": "fp8_sc", **B200, "environment": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}}),
    "fp32-block-scales-elsewhere": ({"recipe": "fp8_sc", "environment": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}},
        {"recipe": "bf16", "environment": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}}),
    "nvfp4-switched-off-from-outside": ({"recipe": "nvfp4", **B200, "environment": {"NVTE_NVFP4_DISABLE_RHT": "1"}},
        {"recipe": "nvfp4", "machine": machine("rtx5090"), "environment": {"NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1"}}),
    "scaling-switched-from-outside": ({"recipe": "nvfp4", "environment": {"NVTE_BACKWARD_OVERRIDE": "dequantized"}},
        {"recipe": "bf16", "environment": {"NVTE_BACKWARD_OVERRIDE": "dequantized"}}),
    "option-not-in-the-environment": ({"recipe": "nvfp4", "config": {"fp4_options": {"four_over_six": "weights"}}},
        {"recipe": "nvfp4", "config": {"fp4_options": {"four_over_six": "weights"}}, "environment": {"NVTE_NVFP4_4OVER6": "weights"}}),
    "options-exclude-each-other": ({"recipe": "nvfp4", "config": {"fp4_options": {"four_over_six": "all"}}, "versions": te("2.20.2")},
        {"recipe": "nvfp4", "config": {"fp4_options": {"four_over_six": "all", "hadamard": False}}, "versions": te("2.20.2")}),
    "power-of-two-current-scales": ({"recipe": "fp8_cs", "environment": {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}},
        {"recipe": "fp8_ds", "environment": {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}}),
    "unfused-scale-update": ({"recipe": "fp8_ds", "environment": {"NVTE_UNFUSED_FP8_UPDATE": "1"}}, {"recipe": "fp8_cs", "environment": {"NVTE_UNFUSED_FP8_UPDATE": "1"}}),
    "fp8-attention-without-its-backend": ({"recipe": "fp8_ds", "config": {"fp8_dot_product_attention": True}, "environment": {"NVTE_FUSED_ATTN": "0"}},
        {"recipe": "fp8_ds", "environment": {"NVTE_FUSED_ATTN": "0"}}),
    "attention-recipe-without-fp8-attention": ({"recipe": "fp8_ds", "environment": {"NVTE_DPA_FP8_RECIPE": "F16"}},
        {"recipe": "fp8_ds", "config": {"fp8_dot_product_attention": True}, "environment": {"NVTE_DPA_FP8_RECIPE": "F16"}}),
    "megatron-fsdp-connections": ({"engine": "megatron_fsdp", "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}, {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}),
    "user-buffers-with-expandable-segments": ({"ddp": {"nccl_ub": True}, "environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        {"ddp": {"nccl_ub": True}, "environment": {}}),
}  # fmt: skip
TABLE |= CASES


def ids(found):
    return {violation.rule for violation in found}


def test_every_rule_has_its_two_cases_and_its_papers():
    known = [rule.id for rule in rules()]
    assert len(known) == len(set(known))
    assert set(TABLE) == set(known)
    assert all(rule.expected and rule.cure and rule.source for rule in rules())


@pytest.mark.parametrize("name", TABLE)
def test_rule_fires_on_its_case_and_not_on_the_neighbour(name):
    breaks, holds = (case(**one) for one in TABLE[name])
    found = [violation for violation in broken(*breaks) if violation.rule == name]
    assert len(found) == 1
    assert found[0].found
    assert name not in ids(broken(*holds))


@pytest.mark.parametrize(("engine", "optimizer", "recipe", "said"), [
    ("fsdp2", "torch_adamw", "full_bf16", True), ("fsdp2", "muon", "full_bf16", True), ("fsdp2", "muon", "fsdp_adamw", False), ("fsdp2", "sgd", "full_bf16", False),
    ("megatron_fsdp", "adam", "full_bf16", True), ("megatron_fsdp", "adam", "bf16", False),
])  # fmt: skip
def test_torchs_adam_is_warned_of_wherever_what_it_updates_is_narrow(engine, optimizer, recipe, said):
    found = ids(broken(*case(recipe, engine=engine, optimizer=OptimizerFacts(name=optimizer))))
    assert ("moments-follow-16-bit-parameters" in found) is said


@pytest.mark.parametrize("name", ["qk_layernorm", "qk_l2_norm"])
def test_norms_of_queries_that_a_hybrid_does_not_build_are_refused(name):
    run = {**PATTERN, "model": {**PATTERN["model"], name: True}}
    assert [one.found for one in broken(*case(**run)) if one.rule == "hybrids-do-not-follow" and name in one.found]


@pytest.mark.parametrize("played", [True, False])
def test_processes_of_a_played_gpu_talk_by_gloo(played):
    assert ("interleaved-pipeline-on-gloo" in ids(broken(*case(parallel=VPP, played=played)))) is played


def test_scopes_of_graphs_are_read_in_their_new_spelling_too():
    settings = {name: value for name, value in GRAPH.items() if name != "cuda_graph_scope"}
    run = {"shape": MOE, "model": settings | {"cuda_graph_modules": ["moe_preprocess"]}, "versions": NEWER}
    assert "router-padding-in-a-graph" in ids(broken(*case("fp8_cs", **run)))


def test_globs_that_freeze_adapters_alone_freeze_nothing():
    found = broken(*case(config={"frozen": ["*", "*.adapter.*"]}, shape=LORA))
    said = [one.found for one in found if one.rule == "keep-fp32-matches-nothing"]
    assert said == ["frozen '*.adapter.*' match no parameter (adapters always train)"]


def test_targets_that_match_no_linear_are_one_fault():
    none = dataclasses.replace(LORA, lora_targets=("mpl.*",))
    found = broken(*case(config={"frozen": ["*"], "lora_dtype": "fp32"}, shape=none))
    assert [one.rule for one in found if one.severity == "error"] == ["adapters-do-not-follow"]


@pytest.mark.parametrize(
    ("name", "value"), [("muon_scale_mode", "foo"), ("muon_tp_mode", "foo"), ("muon_scalar_optimizer", "sgd"), ("muon_num_ns_steps", 0), ("muon_momentum", 1.0), ("muon_extra_scale_factor", 0)]
)  # fmt: skip
def test_each_setting_of_muon_that_its_code_does_not_know_is_named(name, value):
    found = broken(*case(optimizer=OptimizerFacts(name="muon", settings={name: value})))
    assert next(one.found for one in found if one.rule == "muon-settings-unknown").startswith(f"{name}={value} (")


@pytest.mark.parametrize(
    ("name", "given", "unread"),
    [
        ("adam", {"muon_momentum": 0.9}, "muon_momentum=0.9"), ("sgd", {"muon_momentum": 0.9, "sgd_momentum": 0.8}, "muon_momentum=0.9"),
        ("muon", {"sgd_momentum": 0.8}, "sgd_momentum=0.8"), ("muon", {"lion_beta1": 0.9, "muon_scalar_optimizer": "lion"}, ""),
        ("muon", {"lion_beta1": 0.9}, "lion_beta1=0.9"), ("soap", {"soap_shampoo_beta": 0.9}, ""), ("adam", {"muon_momentum": 0.95}, ""),
    ],
)  # fmt: skip
def test_a_setting_that_the_optimizer_does_not_read_is_named(name, given, unread):
    run = case(optimizer=OptimizerFacts(name=name, settings=given), versions=NEWER)
    found = [one.found for one in broken(*run) if one.rule == "optimizer-settings-unread"]
    assert found == ([f"optimizer={name} with {unread}"] if unread else [])


@pytest.mark.parametrize("name", ["muon", "dist_muon", "soap"])
def test_an_optimizer_beside_adam_with_the_distributed_one_has_one_error(name):
    run = case(optimizer=opt(name=name), versions=NEWER)
    assert [one.rule for one in broken(*run) if one.severity == "error"] == ["muon-cannot"]


def test_muons_default_is_that_of_the_core_that_is_asked_about():
    own = records("optimizer")["muon_tp_mode"]["default"]  # which a run that says nothing has
    for core, fires in (("0.16.1", True), ("0.20.0", False)):
        versions, muon = dataclasses.replace(NOW, megatron_core=core), {"muon_tp_mode": own}
        sizes, optimizer = Parallel(world_size=2, tensor=2), OptimizerFacts(name="muon", settings=muon)
        run = case(optimizer=optimizer, parallel=sizes, versions=versions)
        assert ("muon-by-tensor-parallel-blocks" in ids(broken(*run))) is fires


@pytest.mark.parametrize(
    ("model", "more", "found"),
    [
        ({"softmax_type": "learnable"}, {}, "softmax_type=learnable by p2p"), ({"softmax_type": "learnable", "cp_comm_type": "a2a"}, {}, ""),
        ({"window_size": (8, 0), "cp_comm_type": "all_gather"}, {}, ""), ({"window_size": (8, 0), "window_attn_skip_freq": 1}, {}, ""),
        ({"softmax_type": "learnable", "window_size": (8, 0), "cp_comm_type": "all_gather"}, {}, "softmax_type=learnable by all_gather"),
        ({}, {"shape": LATENT}, ""), ({"cp_comm_type": "a2a"}, {"shape": LATENT}, "latent attention by a2a"),
        ({"cp_comm_type": "a2a"}, {"shape": LATENT, "versions": te("2.20.0")}, ""),
        ({"cp_comm_type": "a2a+p2p"}, {}, "hierarchical groups"), ({"cp_comm_type": "foo"}, {}, "cp_comm_type=foo"),
        ({"cp_comm_type": ["p2p"] * 4}, {}, "a list in cp_comm_type"), ({"cp_comm_type": ["p2p"] * 4}, {"versions": NEWER}, ""),
        ({"cp_comm_type": "a2a"}, {"shape": dataclasses.replace(SHAPE, num_query_groups=1)}, "a2a with 4 query and 1 key heads"),
        ({"transformer_impl": "local"}, {}, "megatron-core's own attention"), ({}, {"realization": "emulated"}, "megatron-core's own attention"),
    ],
)  # fmt: skip
def test_attention_over_context_parallel_ranks_is_what_transformer_engine_can_do(model, more, found):
    sizes = Parallel(world_size=2, context=2)
    said = [
        one.found
        for one in broken(*case(model=model, parallel=sizes, **more))
        if one.rule == "context-parallel-attention"
    ]
    assert len(said) == bool(found)
    assert all(found in one for one in said)


@pytest.mark.parametrize(
    ("count", "sizes", "ahead", "wrong"),
    [(2, {}, 0, False), (3, {}, 0, True), (8, {}, 0, True), (2, {"pipeline": 2}, 0, False), (4, {"pipeline": 2}, 0, True), (2, {}, 1, True), (1, {}, 1, False)],
)  # fmt: skip
def test_uniform_recomputation_takes_layers_that_a_chunk_has(count, sizes, ahead, wrong):
    """megatron-core 0.16.1 transformer_block.py custom_forward indexes the layers from the first to the first + count, beyond a chunk's last;
    multi_token_prediction.py _checkpointed_forward asserts a count of 1."""
    shape = dataclasses.replace(SHAPE, mtp_layers=ahead)
    run = case(model=WHOLE | {"recompute_num_layers": count}, parallel=Parallel(world_size=2, **sizes), shape=shape)
    assert ("recomputation" in ids(broken(*run))) is wrong


@pytest.mark.parametrize(
    ("model", "versions", "rule"),
    [
        ({"moe_permute_fusion": True}, te("2.0"), "switch-without-transformer-engine"), ({"moe_permute_fusion": True}, te("2.1"), ""),
        ({"symmetric_ar_type": "two_shot"}, te("2.2"), "switch-without-transformer-engine"),
        ({"softmax_type": "learnable"}, te("2.7"), "switch-without-transformer-engine"), ({"softmax_type": "learnable"}, te("2.8"), ""),
        ({"delay_wgrad_compute": True, "cuda_graph_impl": "transformer_engine"}, te("2.9"), "switch-without-transformer-engine"),
        ({"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "alltoall"}, te("2.11", torch="2.5.1"), "expert-overlap"),
        ({"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "alltoall"}, te("2.11", torch="2.6.0"), ""),
    ],
)  # fmt: skip
def test_a_switch_before_the_release_that_brought_it_is_refused(model, versions, rule):
    found = ids(broken(*case(model=model, versions=versions, shape=MOE, parallel=Parallel(world_size=2, expert=2))))
    assert {rule} - {""} == found & {"switch-without-transformer-engine", "expert-overlap"} - (
        {"expert-overlap"} if "delay_wgrad_compute" in model else set()
    )


@pytest.mark.parametrize(
    ("shape", "parallel", "found"),
    [
        ({"seq_length": 250}, {"tensor": 4, "sequence": True}, "seq_length 250 by context x tensor 4"),
        ({"seq_length": 250}, {"tensor": 4}, ""),
        ({"seq_length": 24}, {"tensor": 4, "context": 4, "sequence": True}, "seq_length 24 by context x tensor 16"),
        ({"ffn_hidden_size": 250}, {"tensor": 4}, "ffn_hidden_size 250 by tensor 4"),
        # nothing is built of that size where every layer is a mixture
        ({"ffn_hidden_size": 250, "experts": 4, "expert_ffn_hidden_size": 64, "expert_layers": (True,) * 4}, {"tensor": 4, "sequence": True}, ""),
    ],
)  # fmt: skip
def test_sizes_are_divided_where_something_is_built_of_them(shape, parallel, found):
    world = parallel["tensor"] * parallel.get("context", 1)
    _, run = case(shape=dataclasses.replace(SHAPE, **shape), parallel=Parallel(world_size=world, **parallel))
    assert undivided(run) == found


@pytest.mark.parametrize("virtual", [None, 2])
def test_virtual_stages_are_a_cure_only_of_a_run_that_has_them(virtual):
    sizes = Parallel(world_size=3, pipeline=3, virtual_pipeline=virtual)
    (found,) = broken(*case(parallel=sizes), among={"layers-do-not-divide"})
    assert ("virtual" in found.cure) is (virtual is not None)


RETIRING = [rule for rule in rules() if rule.holds]


@pytest.mark.parametrize("rule", RETIRING, ids=lambda rule: rule.id)
def test_a_rule_with_an_end_is_silent_on_a_version_outside(rule):
    policy, run = case(**TABLE[rule.id][0])
    window = rule.holds[0]
    versions = dataclasses.replace(run.versions, **{window.package: window.until or "0.1"})
    assert rule.id in ids(broken(policy, run))
    assert rule.id not in ids(broken(policy, dataclasses.replace(run, versions=versions)))


def test_an_unknown_version_keeps_the_row():
    policy, run = case(**MX, versions=dataclasses.replace(NOW, megatron_core=None))
    assert "mxfp8-gather-without-overlap-gives-nan" in ids(broken(policy, run))


def test_errors_come_first_and_all_at_once():
    policy, run = case("mxfp8", {"fp8": "hybrid"}, optimizer=OptimizerFacts(), model={"transformer_impl": "local"})
    found = broken(policy, run)
    kinds = [violation.severity for violation in found]
    assert kinds == sorted(kinds, key=lambda kind: kind != "error")
    without = {"parameter-gather-without-distributed-optimizer", "quantization-with-local-layers"}
    assert without | {"machine-cannot-run-it", "mxfp8-with-e5m2-gradients"} <= ids(found)
    assert found[0].versions == "" or "megatron core" in found[0].versions


def test_emulation_hears_warnings_where_only_the_native_path_would_break():
    policy, run = case("fp8_ds", optimizer=OptimizerFacts(), versions=te(None), machine=CPU)
    assert {"quantization-without-transformer-engine", "machine-cannot-run-it"} <= ids(broken(policy, run))
    emulated = broken(policy, dataclasses.replace(run, realization="emulated"))
    assert [violation.severity for violation in emulated] == ["warning"] * len(emulated)
    assert "parameter-gather-without-distributed-optimizer" in ids(emulated)


def test_a_rule_of_the_recipe_itself_also_binds_its_emulation():
    policy, run = case("fp8_ds", {"first_last_layers_bf16": True}, realization="emulated", machine=CPU)
    assert [v.severity for v in broken(policy, run) if v.rule == "edge-layers-with-delayed-scaling"] == ["error"]


def test_require_refuses_with_every_error_and_returns_the_warnings():
    policy, run = case("mxfp8", optimizer=OptimizerFacts())
    with pytest.raises(Refused) as refused:
        require(policy, run)
    for name in ("machine-cannot-run-it", "parameter-gather-without-distributed-optimizer"):
        assert name in str(refused.value)
    policy, run = case("fp8_cs", {"fp8_margin": 1})
    assert ids(require(policy, run)) == {"inert-outside-delayed-scaling"}


class Untouchable(dict):
    """Settings that nobody may write to."""

    def _refuse(self, *_, **__):
        raise AssertionError("a rule writes to a setting")

    __setitem__ = __delitem__ = __ior__ = pop = popitem = setdefault = update = clear = _refuse


@pytest.mark.parametrize("name", recipes)
def test_checking_writes_to_no_setting_and_answers_the_same_again(name):
    settings = {"ddp": OVERLAP, "model": {"recompute_granularity": "selective"}, "environment": {"NVTE_FLASH_ATTN": "1"}}  # fmt: skip
    engine, optimizer = recipes[name].engine or "mcore", opt(settings=Untouchable(AWARE))
    sections = {section: Untouchable(values) for section, values in settings.items()}
    policy, run = case(name, {"fp8_margin": 1}, engine=engine, optimizer=optimizer, **sections)
    before, first = policy.fingerprint(), broken(policy, run)
    assert broken(policy, run) == first
    assert policy.fingerprint() == before
    assert {section: getattr(run, section) for section in settings} == settings


@pytest.mark.parametrize("name", recipes)
def test_every_recipe_on_its_engine_breaks_only_what_the_machine_forbids(name):
    engine = recipes[name].engine or "mcore"
    shape = dataclasses.replace(SHAPE, num_layers=32)
    adam = "torch_adamw" if name == "fp32_params_bf16_compute" else "adam"
    optimizer = OptimizerFacts(distributed=engine != "fsdp2" and name != "full_bf16", name=adam)
    ddp = OVERLAP if optimizer.distributed else OVERLAP | {"overlap_param_gather": False}
    for gpu, allowed in {"h100": {"machine-cannot-run-it"}, "b200": set(), "cpu": {"machine-cannot-run-it"}}.items():
        policy, run = case(name, engine=engine, shape=shape, machine=machine(gpu), ddp=ddp, optimizer=optimizer)
        assert {v.rule for v in broken(policy, run) if v.severity == "error"} <= allowed, gpu


def test_custom_regions_of_one_policy_are_all_asked():
    policy, run = case("fp8_cs", {"fp8_param_gather": False})
    blocks = Region(modules="mlp.*", quant=resolve(recipes["mxfp8"].make()).quant)
    mixed = dataclasses.replace(policy, regions=(blocks, *policy.regions))
    assert "machine-cannot-run-it" in ids(broken(mixed, run))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"torch": "2.15.3+cpu"}, None),
        ({"torch": "2.16.0"}, "torch 2.16.0 has not been tried with mpbridge 0.1.0; the newest that was is 2.15"),
        ({"torch": "2.5.1"}, "torch 2.5.1 has not been tried with mpbridge 0.1.0; the oldest that was is 2.6"),
        ({"megatron_core": "0.18.1"}, "megatron-core 0.18.1 has not been tried with mpbridge 0.1.0; the newest that was is 0.20"),
    ],
)  # fmt: skip
def test_a_release_that_was_never_tried_is_named_and_not_refused(found, words):
    every = broken(*case(versions=dataclasses.replace(NOW, **found)))
    said = [one for one in every if one.rule == "library-versions-untested"]
    assert [(one.severity, one.found) for one in said] == ([("warning", words)] if words else [])


def test_the_dispatcher_of_a_run_that_names_none_is_megatron_cores():
    for said in ({}, {"moe_token_dispatcher_type": None}):
        assert case(model=said)[1].dispatcher == records("model")["moe_token_dispatcher_type"]["default"] == "allgather"
    assert case(model={"moe_token_dispatcher_type": "flex"})[1].dispatcher == "flex"
