"""Rules about engines and devices: what a wrapper or a CPU cannot do. They can be checked anywhere; an engine checks them again before it builds (rules/admit.py)."""

from __future__ import annotations

from mpbridge.common.formats import say
from mpbridge.common.traits import DEFAULT, traits
from mpbridge.planning.rules.base import ARGUMENTS, PLAIN_WEIGHTS, Case, Rule
from mpbridge.precision.requirements import able

_CUDA_MODEL = (
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "memory_efficient_layer_norm",
    "layernorm_zero_centered_gamma",
    "apply_rope_fusion",
    "fused_single_qkv_rope",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "tp_comm_overlap",
    "cpu_offloading",
    "enable_cuda_graph",
    "external_cuda_graph",
)
"""Model settings that need a CUDA kernel, stream or communicator; megatron-core's defaults leave them off."""


_MEGATRON_FSDP = {
    "data_parallel_sharding_strategy": "no_shard",
    "outer_dp_sharding_strategy": "no_shard",
    "preserve_fp32_weights": True,
    "keep_fp8_transpose_cache": False,
    "fsdp_double_buffer": False,
    "fsdp_manual_registration": False,
}
"""Settings of the ddp section that no other wrapper reads -> their defaults."""


def _not_parallel(case: Case) -> str | None:
    sizes, able = case.run.parallel, case.traits.parallelisms
    wide = [
        f"{name} {getattr(sizes, name)}"
        for name in ("tensor", "pipeline", "context", "expert")
        if getattr(sizes, name) > 1 and name not in able
    ]
    return f"{', '.join(wide)} parallelism on {case.run.engine}" if wide else None


def _on_cpu(case: Case) -> bool:
    return case.run.machine is not None and not case.run.machine.gpu


def _cuda_only(case: Case) -> str | None:
    if not _on_cpu(case):
        return None
    found = [f"model.{name}=true" for name in _CUDA_MODEL if case.model(name)]
    found += (
        ["model.transformer_impl=inference_optimized"]
        if case.model("transformer_impl") == "inference_optimized"
        else []
    )
    found += ["optimizer.optimizer_cpu_offload=true"] if case.run.optimizer.cpu_offload else []
    found += ["ddp.nccl_ub=true"] if case.ddp("nccl_ub") else []
    found += [f"parallel.context_parallel_size={case.run.parallel.context}"] if case.run.parallel.context > 1 else []
    return ", ".join(found) or None


def _fsdp_settings(case: Case) -> str | None:
    found = ["ddp.use_custom_fsdp=true"] if case.ddp("use_custom_fsdp") else []
    if not case.traits.ddp_switch:
        found += [
            f"ddp.{name}={say(case.ddp(name))}" for name, off in _MEGATRON_FSDP.items() if case.ddp(name, off) != off
        ]
    return f"{', '.join(found)} on engine {case.run.engine}" if found else None


def _refused(case: Case) -> str | None:
    found = [
        f"model.{name}=true on {case.traits.full_name}: {why}"
        for name, why in case.traits.refuses.items()
        if case.model(name)
    ]
    return "; ".join(found) or None


def _other_optimizer(case: Case) -> str | None:
    asked = case.opt("optimizer") or case.run.optimizer.name
    return None if asked in case.traits.optimizers else f"optimizer={asked} on {case.traits.full_name}"


RULES: tuple[Rule, ...] = (
    Rule(
        id="sharded-engines-do-data-parallelism",
        found=_not_parallel,
        expected="data parallelism only on this engine",
        cure="engine=mcore, or parallel sizes of 1",
        # megatron-core has no FP32 storage under 16-bit compute
        cure_here=lambda c: (
            "engine=mcore, or parallel sizes of 1" if able(c.policy, traits(DEFAULT)) else "parallel sizes of 1"
        ),
        source="EngineTraits.parallelisms",
    ),
    Rule(
        id="switch-that-the-engine-cannot-use",
        found=_refused,
        expected="false on this engine",
        cure="drop it, or engine=mcore",
        source="EngineTraits.refuses",
    ),
    Rule(
        id="optimizer-that-the-engine-does-not-build",
        found=_other_optimizer,
        expected="an optimizer that the engine builds (muon: torch's on FSDP2, megatron-core's own on mcore)",
        cure="optimizer.optimizer=adam",
        source="EngineTraits.optimizers",
    ),
    Rule(
        id="stored-weights-under-sharded-engines",
        about="stored",
        found=lambda c: not c.traits.stored_weights and c.stored and f"fp8_param_gather=true on {c.run.engine}",
        expected="false: on this engine the wrapper shards 16- and 32-bit parameters only",
        cure=f"{PLAIN_WEIGHTS}, or engine=mcore",
        source=f"mpbridge/backend/engines/fsdp2.py, megatron_fsdp.py; {ARGUMENTS} for FSDP2",
    ),
    Rule(
        id="megatron-fsdp-settings-elsewhere",
        found=_fsdp_settings,
        expected="engine=megatron_fsdp, the only engine that reads them (nothing reads use_custom_fsdp)",
        cure="drop them, or engine=megatron_fsdp",
        source="megatron-core 0.16.1 distributed_data_parallel_config.py",
        severity="warning",
    ),
    Rule(
        id="biased-experts-on-local-layers",
        found=lambda c: (
            c.run.shape.experts
            and c.run.shape.linear_bias
            and (_on_cpu(c) or not c.native or c.model("transformer_impl") == "local")
            and "experts with add_bias_linear=true on megatron-core's local layers"
        ),
        expected="experts without biases: the local layers add them in place to a view, which autograd rejects",
        cure="model.add_bias_linear=false",
        source="megatron-core 0.16.1 transformer/mlp.py MLP.forward",
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
        source="mpbridge/backend/megatron/emulated_linears.py",
    ),
    Rule(
        id="per-token-loss-on-sharded-engines",
        found=lambda c: (
            not c.traits.per_token_loss
            and c.model("calculate_per_token_loss")
            and f"calculate_per_token_loss on {c.run.engine}"
        ),
        expected="false: only the mcore engine divides by the tokens of all ranks",
        cure="model.calculate_per_token_loss=false, or engine=mcore",
        source="mpbridge/backend/engines/steps.py; megatron-core 0.16.1 megatron_fsdp.py adds up gradients under it",
    ),
    Rule(
        id="latent-attention-softmax-on-a-cpu",
        found=lambda c: (
            _on_cpu(c)
            and c.run.shape.latent_attention
            and c.model("attention_softmax_in_fp32") is False
            and "attention_softmax_in_fp32=false with latent attention on a CPU"
        ),
        expected="the softmax in FP32: megatron-core's local attention does not support latent attention, and mpbridge's computes the softmax in FP32",
        cure="model.attention_softmax_in_fp32=true",
        source="mpbridge/backend/models/attention.py",
    ),
    Rule(
        id="needs-cuda",
        found=_cuda_only,
        expected="a GPU: these need CUDA kernels, streams or Transformer Engine's attention",
        cure="drop them for a CPU run",
        source="mpbridge/backend/megatron/configs.py",
    ),
)
