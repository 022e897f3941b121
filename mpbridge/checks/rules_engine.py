"""Rules about engines and devices: what a wrapper, or a CPU, does not do. The engines refuse the same; here a laptop says it before anything is built."""

from __future__ import annotations

from mpbridge.checks.rules import Case, Rule
from mpbridge.formats import DType, say

_SHARDED = ("fsdp2", "megatron_fsdp")
_CUDA_MODEL = (
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "memory_efficient_layer_norm",
    "layernorm_zero_centered_gamma",
    "apply_rope_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "tp_comm_overlap",
    "cpu_offloading",
    "enable_cuda_graph",
    "external_cuda_graph",
)
"""Model settings that need a CUDA kernel, stream or communicator; megatron-core's defaults leave them off."""


def _only_data(case: Case) -> str | None:
    if case.run.engine not in _SHARDED:
        return None
    sizes = case.run.parallel
    wide = [f"{name} {getattr(sizes, name)}" for name in ("tensor", "pipeline", "context", "expert") if getattr(sizes, name) > 1]
    return f"{', '.join(wide)} parallelism on {case.run.engine}" if wide else None


def _on_cpu(case: Case) -> bool:
    return case.run.machine is not None and not case.run.machine.gpu


def _cuda_only(case: Case) -> str | None:
    if not _on_cpu(case):
        return None
    found = [f"model.{name}=true" for name in _CUDA_MODEL if case.model(name)]
    found += ["model.transformer_impl=inference_optimized"] if case.model("transformer_impl") == "inference_optimized" else []
    found += ["optimizer.optimizer_cpu_offload=true"] if case.run.optimizer.cpu_offload else []
    found += ["ddp.nccl_ub=true"] if case.ddp("nccl_ub") else []
    found += [f"parallel.context_parallel_size={case.run.parallel.context}"] if case.run.parallel.context > 1 else []
    return ", ".join(found) or None


def _main_grads(case: Case) -> str | None:
    policy = case.policy
    wanted = DType.FP32 if policy.main_params_owner != "params" else policy.reduce
    wrong = case.run.engine == "megatron_fsdp" and policy.main_grads not in (None, wanted)
    return f"main_grads_dtype={say(policy.main_grads)} on Megatron-FSDP, whose optimizer reads {wanted.short}" if wrong else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="sharded-engines-do-data-parallelism",
        found=_only_data,
        expected="data parallelism alone on this engine",
        cure="engine=mcore, or parallel sizes of 1",
        source="mpbridge/engines/fsdp2.py, megatron_fsdp_rules.py",
    ),
    Rule(
        id="fsdp2-shards-by-itself",
        about="fsdp2",
        found=lambda c: c.run.engine == "fsdp2" and c.run.optimizer.distributed and "ddp.use_distributed_optimizer=true on torch FSDP2",
        expected="no distributed optimizer beside it",
        cure="ddp.use_distributed_optimizer=false",
        source="mpbridge/engines/fsdp2.py",
    ),
    Rule(
        id="fsdp2-casts-by-itself",
        about="fsdp2",
        found=lambda c: c.run.engine == "fsdp2" and c.policy.autocast is not None and "autocast_enabled=true on torch FSDP2",
        expected="FSDP2's own casts alone",
        cure="mixed_precision.autocast_enabled=false",
        source="mpbridge/engines/fsdp2.py",
    ),
    Rule(
        id="stored-weights-under-sharded-engines",
        about="stored",
        found=lambda c: c.run.engine in _SHARDED and c.stored and f"fp8_param_gather=true on {c.run.engine}",
        expected="false: these wrappers shard 16- and 32-bit parameters here",
        cure="mixed_precision.fp8_param_gather=false, or engine=mcore",
        source="mpbridge/engines/fsdp2.py, megatron_fsdp_rules.py; Megatron-LM training/arguments.py validate_args (d98e8a64) for FSDP2",
    ),
    Rule(
        id="megatron-fsdp-strategy",
        about="megatron_fsdp",
        found=lambda c: (
            c.run.engine == "megatron_fsdp"
            and c.ddp("data_parallel_sharding_strategy") == "optim"
            and "data_parallel_sharding_strategy=optim"
        ),
        expected="optim_grads or optim_grads_params: with optim, buckets are reduced twice",
        cure="ddp.data_parallel_sharding_strategy=optim_grads_params",
        source="megatron-core 0.16.1 megatron_fsdp/param_and_grad_buffer.py, measured on gloo",
    ),
    Rule(
        id="megatron-fsdp-instances",
        about="megatron_fsdp",
        found=lambda c: (
            c.run.engine == "megatron_fsdp"
            and c.ddp("num_distributed_optimizer_instances", 1) > 1
            and "hybrid sharding (num_distributed_optimizer_instances above 1)"
        ),
        expected="one instance",
        cure="ddp.num_distributed_optimizer_instances=1",
        source="mpbridge/engines/megatron_fsdp_rules.py",
    ),
    Rule(
        id="megatron-fsdp-keeps-one-dtype",
        about="megatron_fsdp",
        found=lambda c: c.run.engine == "megatron_fsdp" and c.policy.keep_fp32 and "keep_fp32 on Megatron-FSDP",
        expected="one dtype in a parameter group",
        cure="engine=fsdp2, or drop keep_fp32",
        source="mpbridge/engines/megatron_fsdp_rules.py",
    ),
    Rule(
        id="megatron-fsdp-main-gradients",
        about="megatron_fsdp",
        found=_main_grads,
        expected="gradients in the dtype of the weights that the optimizer updates",
        cure="mixed_precision.main_grads_dtype=null",
        source="mpbridge/engines/megatron_fsdp_rules.py; megatron-core 0.16.1 megatron_fsdp",
    ),
    Rule(
        id="emulation-without-fused-accumulation",
        about="quantized",
        found=lambda c: (
            c.policy.quantized
            and not c.native
            and c.model("gradient_accumulation_fusion")
            and "gradient_accumulation_fusion=true with emulated linears"
        ),
        expected="false: the fused kernel would multiply unquantized operands",
        cure="model.gradient_accumulation_fusion=false",
        source="mpbridge/emulation/mcore.py",
    ),
    Rule(
        id="per-token-loss-on-sharded-engines",
        found=lambda c: c.run.engine in _SHARDED and c.model("calculate_per_token_loss") and f"calculate_per_token_loss on {c.run.engine}",
        expected="false: only the mcore engine divides by the tokens of all ranks",
        cure="model.calculate_per_token_loss=false, or engine=mcore",
        source="mpbridge/engines/steps.py; megatron-core 0.16.1 megatron_fsdp.py adds up gradients under it",
    ),
    Rule(
        id="needs-cuda",
        found=_cuda_only,
        expected="a GPU: these are CUDA kernels, streams or Transformer Engine's attention",
        cure="drop them for a CPU run",
        source="mpbridge/engines/configs.py",
    ),
)
