"""Rules about engines and devices: what a wrapper or a CPU cannot do. They can be checked anywhere; an engine checks them again before it builds (rules/table.py)."""

from __future__ import annotations

from mpbridge.common.formats import say
from mpbridge.common.traits import DEFAULT, traits
from mpbridge.planning.rules.base import ARGUMENTS, PLAIN_WEIGHTS, Case, Rule, faults, row, warning
from mpbridge.precision.recipe import able

_CUDA_MODEL = (
    "masked_softmax_fusion", "gradient_accumulation_fusion", "persist_layer_norm", "memory_efficient_layer_norm", "layernorm_zero_centered_gamma",
    "apply_rope_fusion", "fused_single_qkv_rope", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "tp_comm_overlap", "cpu_offloading",
    "enable_cuda_graph", "external_cuda_graph",
)  # fmt: skip
"""Model settings that need a CUDA kernel, stream or communicator; megatron-core's defaults leave them off."""

_MEGATRON_FSDP = {
    "data_parallel_sharding_strategy": "no_shard", "outer_dp_sharding_strategy": "no_shard", "preserve_fp32_weights": True,
    "keep_fp8_transpose_cache": False, "fsdp_double_buffer": False, "fsdp_manual_registration": False,
}  # fmt: skip
"""Settings of the ddp section that no other wrapper reads -> their defaults."""


def _not_parallel(case: Case) -> str:
    sizes = {name: getattr(case.run.parallel, name) for name in ("tensor", "pipeline", "context", "expert")}
    able = case.traits.parallelisms
    wide = ", ".join(f"{name} {size}" for name, size in sizes.items() if name not in able and size > 1)
    return f"{wide} parallelism on {case.run.engine}" if wide else ""


def _cuda_only(case: Case) -> str:
    context = case.run.parallel.context
    return faults(
        "",
        *((f"model.{name}=true", case.model(name)) for name in _CUDA_MODEL),
        ("model.transformer_impl=inference_optimized", case.model("transformer_impl") == "inference_optimized"),
        ("optimizer.optimizer_cpu_offload=true", case.run.optimizer.cpu_offload),
        ("ddp.nccl_ub=true", case.ddp("nccl_ub")),
        (f"parallel.context_parallel_size={context}", context > 1),
    )


def _fsdp_settings(case: Case) -> str:
    given = {name: case.ddp(name, off) for name, off in _MEGATRON_FSDP.items() if not case.traits.ddp_switch}
    found = faults(
        "",
        ("ddp.use_custom_fsdp=true", case.ddp("use_custom_fsdp")),
        *((f"ddp.{name}={say(value)}", value != _MEGATRON_FSDP[name]) for name, value in given.items()),
    )
    return f"{found} on engine {case.run.engine}" if found else ""


def _refused(case: Case) -> str:
    asked = [(name, why) for name, why in case.traits.refuses.items() if case.model(name)]
    return "; ".join(f"model.{name}=true on {case.traits.full_name}: {why}" for name, why in asked)


def _local(case: Case) -> bool:
    return case.gpu is False or not case.native or case.model("transformer_impl") == "local"


def _optimizer(case: Case) -> str:
    return str(case.opt("optimizer") or case.run.optimizer.name)


RULES: tuple[Rule, ...] = (
    # its cure: megatron-core has no FP32 storage under 16-bit compute
    row("sharded-engines-do-data-parallelism", _not_parallel,
        "data parallelism only on this engine",
        "engine=mcore, or parallel sizes of 1", "EngineTraits.parallelisms",
        cure_here=lambda c: "engine=mcore, or parallel sizes of 1" if able(c.policy, traits(DEFAULT)) else "parallel sizes of 1"),
    row("switch-that-the-engine-cannot-use", _refused,
        "false on this engine",
        "drop it, or engine=mcore", "EngineTraits.refuses"),
    row("optimizer-that-the-engine-does-not-build", lambda c: f"optimizer={_optimizer(c)} on {c.traits.full_name}",
        "an optimizer that the engine builds (muon: torch's on FSDP2, megatron-core's own on mcore)",
        "optimizer.optimizer=adam", "EngineTraits.optimizers",
        when=lambda c: _optimizer(c) not in c.traits.optimizers),
    row("stored-weights-under-sharded-engines", "fp8_param_gather=true on {c.run.engine}",
        "false: on this engine the wrapper shards 16- and 32-bit parameters only",
        f"{PLAIN_WEIGHTS}, or engine=mcore", f"mpbridge/backend/engines/fsdp2.py, megatron_fsdp.py; {ARGUMENTS} for FSDP2",
        about="stored", when=lambda c: not c.traits.stored_weights and c.stored),
    warning("megatron-fsdp-settings-elsewhere", _fsdp_settings,
        "engine=megatron_fsdp, the only engine that reads them (nothing reads use_custom_fsdp)",
        "drop them, or engine=megatron_fsdp", "megatron-core 0.16.1 distributed_data_parallel_config.py"),
    row("biased-experts-on-local-layers", "experts with add_bias_linear=true on megatron-core's local layers",
        "experts without biases: the local layers add them in place to a view, which autograd rejects",
        "model.add_bias_linear=false", "megatron-core 0.16.1 transformer/mlp.py MLP.forward",
        when=lambda c: c.run.shape.experts and c.run.shape.linear_bias and _local(c)),
    row("emulation-without-fused-accumulation", "gradient_accumulation_fusion=true with emulated linears",
        "false: the fused kernel would multiply unquantized operands",
        "model.gradient_accumulation_fusion=false", "mpbridge/backend/megatron/emulated_linears.py",
        about="quantized", when=lambda c: c.policy.quantized and not c.native and c.model("gradient_accumulation_fusion")),
    row("per-token-loss-on-sharded-engines", "calculate_per_token_loss on {c.run.engine}",
        "false: only the mcore engine divides by the tokens of all ranks",
        "model.calculate_per_token_loss=false, or engine=mcore", "mpbridge/backend/engines/base.py; megatron-core 0.16.1 megatron_fsdp.py adds up gradients under it",
        when=lambda c: not c.traits.per_token_loss and c.model("calculate_per_token_loss")),
    row("latent-attention-softmax-on-a-cpu", "attention_softmax_in_fp32=false with latent attention on a CPU",
        "the softmax in FP32: megatron-core's local attention does not support latent attention, and mpbridge's computes the softmax in FP32",
        "model.attention_softmax_in_fp32=true", "mpbridge/backend/models/local_spec.py",
        when=lambda c: c.gpu is False and c.run.shape.latent_attention and c.model("attention_softmax_in_fp32") is False),
    row("needs-cuda", _cuda_only,
        "a GPU: these need CUDA kernels, streams or Transformer Engine's attention",
        "drop them for a CPU run", "mpbridge/backend/megatron/targets.py",
        when=lambda c: c.gpu is False),
)  # fmt: skip
