"""Rules about the model: residual, logits, router, mixture of experts, schedules."""

from __future__ import annotations

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType, say
from mpbridge.common.versions import Window
from mpbridge.planning.memory.ranks import stage_chunks, undivided
from mpbridge.planning.rules.base import ARGUMENTS, MODEL_CONFIG, NEWER_MODEL_CONFIG, Case, Rule, row, warning

_OTHER_MODELS = (
    "heterogeneous_block_specs", "hybrid_context_parallel", "experimental_attention_variant", "use_kitchen", "use_kitchen_attention", "cache_mla_latents",
)  # fmt: skip


def _padding(case: Case) -> str:
    names = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
    return next((name for name in names if case.model(name)), "")


def _router(case: Case) -> str:
    value = case.model("moe_router_dtype")
    known = value is None or (isinstance(value, str) and value in ("fp32", "fp64"))
    return "" if known else f"moe_router_dtype={say(value)} (a {type(value).__name__})"


def _router_of_none(case: Case) -> str:
    """A legal router dtype on a model without a router."""
    value = case.model("moe_router_dtype") or (case.policy.router and case.policy.router.short)
    return f"moe_router_dtype={value} on a dense model" if value is not None and not _router(case) else ""


def _quantized_experts(case: Case) -> bool:
    return bool(case.run.shape.experts and case.policy.quantized)


def _silu(case: Case) -> bool:
    function = case.model("activation_func")
    return str(getattr(function, "__name__", function or "")).rpartition(".")[2] == "silu"


def _residual(case: Case) -> bool:
    own = case.policy.residual_fp32
    return bool(case.model("fp32_residual_connection")) if own is None else own


def _sent(case: Case) -> DType:
    return DType.FP32 if _residual(case) else case.policy.compute


def _unstaged(case: Case) -> str | None:
    try:
        stage_chunks(case.run)
    except BadValue as error:
        return str(error)
    return None


def _staged(virtual: object) -> str:
    """The cure for layers that do not divide; virtual: whether the run has virtual stages."""
    more = " or parallel.virtual_pipeline_model_parallel_size" if virtual else ""
    return f"another parallel.pipeline_model_parallel_size{more}, or model.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"


RULES: tuple[Rule, ...] = (
    row("sizes-do-not-divide", lambda c: undivided(c.run),
        "every size to be a multiple of the number of ranks that it is split over",
        "another parallel size, or another model size", f"{MODEL_CONFIG}; transformer/moe/moe_layer.py BaseMoELayer.__init__ for experts"),
    row("layers-do-not-divide", _unstaged,
        "each pipeline stage to get whole layers",
        _staged(virtual=True), "megatron-core 0.16.1 transformer_block.py get_num_layers_to_build",
        cure_here=lambda c: _staged(c.run.parallel.virtual_pipeline)),
    row("other-models-are-not-built", lambda c: ", ".join(f"model.{name}={say(c.model(name))}" for name in _OTHER_MODELS if c.model(name)),
        "none of them: mpbridge builds one kind of GPT layer, for training; these would be ignored silently",
        "drop them", "mpbridge/backend/models/gpt.py; megatron-core 0.16.1 gpt_layer_specs.py takes them as arguments"),
    row("router-dtype-is-ignored", _router,
        "'fp32', 'fp64' or null: megatron-core compares with these strings; anything else leaves the router in 16 bits",
        "mixed_precision.moe_router_dtype=fp32", "megatron-core 0.16.1 transformer/moe/router.py"),
    warning("router-dtype-without-experts", _router_of_none,
        "a mixture of experts: a dense model has no router",
        "mixed_precision.moe_router_dtype=null, or model.moe_router_dtype=null", "megatron-core 0.16.1 transformer/moe/router.py",
        when=lambda c: not c.run.shape.experts, cure_here=lambda c: f"{'model' if c.policy.router is None else 'mixed_precision'}.moe_router_dtype=null"),
    warning("many-experts-route-in-16-bits", "{c.run.shape.experts} experts, router in {c.policy.compute.short}",
        "an FP32 router with 32 or more experts",
        "mixed_precision.moe_router_dtype=fp32",
        about="sixteen", when=lambda c: (c.run.shape.experts or 0) >= 32 and c.policy.mixed and c.policy.router is None and c.model("moe_router_dtype") is None),
    # megatron-core sees no quantization if none is requested, or if it is emulated
    row("router-padding-without-quantization", lambda c: f"{_padding(c)}=true {'while the quantization is emulated' if c.policy.quant else 'without fp8 or fp4'}",
        "fp8 or fp4 on for the whole model: megatron-core does not look at rules for single modules",
        "model.moe_router_padding_for_quantization=false",
        when=lambda c: _padding(c) and not (c.policy.quant and c.native)),
    row("router-padding-dispatcher", lambda c: f"{_padding(c)} with dispatcher {c.run.dispatcher}",
        "alltoall or flex",
        "model.moe_token_dispatcher_type=alltoall",
        about="quantized", when=lambda c: _padding(c) and c.run.dispatcher in ("allgather", "alltoall_seq")),
    row("router-padding-in-a-graph", "moe_router_padding_for_fp8 with a captured moe_preprocess",
        "no synchronising copies in a captured step",
        "remove moe_preprocess from model.cuda_graph_scope (since 0.18 cuda_graph_modules)",
        when=lambda c: c.model("moe_router_padding_for_fp8") and c.run.cuda_graphs.on and "moe_preprocess" in c.run.cuda_graphs.parts),
    row("nan-check-in-a-graph", "check_for_nan_in_grad with a captured iteration",
        "no host-side check inside a captured iteration",
        "ddp.check_for_nan_in_grad=false", ARGUMENTS,
        when=lambda c: c.ddp("check_for_nan_in_grad") and c.run.cuda_graphs.whole_step),
    row("experts-in-fp8-need-newer-engine", "FP8 experts with Transformer Engine {c.run.versions.transformer_engine}",
        "1.7 or later, with grouped GEMM 1.11",
        "upgrade Transformer Engine",
        about="fp8", when=lambda c: c.run.shape.experts and c.policy.fp8 and c.te_before("1.11" if c.run.shape.grouped_gemm else "1.7"), emulated="silent"),
    row("experts-under-tensor-parallelism-need-sequence-parallelism",
        "{c.run.shape.experts} experts with tensor_model_parallel_size={c.run.parallel.tensor} and sequence_parallel=false",
        "sequence parallelism too: without it megatron-core raises in the first forward pass",
        "parallel.sequence_parallel=true", "megatron-core 0.16.1 transformer/moe/moe_layer.py MoELayer.forward",
        when=lambda c: c.run.shape.experts and c.run.parallel.tensor > 1 and not c.run.parallel.sequence),
    row("expert-overlap-needs-16-bits", "overlap_moe_expert_parallel_comm in fp32",
        "bf16 or fp16",
        "a 16-bit recipe, or model.overlap_moe_expert_parallel_comm=false",
        when=lambda c: c.model("overlap_moe_expert_parallel_comm") and not c.policy.mixed),
    row("pipeline-dtype-is-what-is-sent", lambda c: f"pipeline_dtype={c.policy.pipeline.short}, while stages send {_sent(c).short}",
        "the dtype of the residual stream: fp32 under fp32_residual_connection, else the compute dtype. Receivers allocate their buffers by this field only; a "
        "mismatch silently fills them with garbage",
        "set mixed_precision.pipeline_dtype to the dtype that is sent",
        "megatron-core 0.16.1 pipeline_parallel/p2p_communication.py, measured on gloo; Megatron-LM transformer_config.py (d98e8a64) forces fp32 residuals",
        when=lambda c: c.run.parallel.pipeline > 1 and c.policy.pipeline is not _sent(c)),
    # what a stage sends is also said by output_dtype, where a recipe has no pipeline_dtype
    row("nothing-casts-what-is-returned", "output_dtype={c.policy.output.short} with {c.policy.compute.short} compute on {c.traits.full_name}",
        "the compute dtype: the engine does not cast what a layer returns", "mixed_precision.output_dtype=null",
        "megatron-core 0.16.1 transformer/module.py: Float16Module casts what the first stage takes and, to FP32, what the last one returns",
        when=lambda c: not c.traits.casts_outputs and not c.policy.returned(c.run.parallel.pipeline, _residual(c))),
    row("fp32-residual-in-fp32", "fp32_residual_connection in an FP32 run",
        "bf16 or fp16 compute",
        "mixed_precision.fp32_residual_connection=false", ARGUMENTS,
        when=lambda c: _residual(c) and not c.policy.mixed),
    row("fp16-cross-entropy", "fp16_lm_cross_entropy with {c.policy.compute.short} compute",
        "an FP16 recipe",
        "model.fp16_lm_cross_entropy=false", ARGUMENTS,
        about="fp16", when=lambda c: c.model("fp16_lm_cross_entropy") and c.policy.compute is not DType.FP16),
    warning("fused-cross-entropy-by-engine", "cross_entropy_fusion_impl='te'",
        "'native': Megatron-LM's argument parser refuses 'te', for stability; Megatron Bridge's performance recipes set it",
        "model.cross_entropy_fusion_impl=native", ARGUMENTS,
        when=lambda c: c.model("cross_entropy_loss_fusion") and c.model("cross_entropy_fusion_impl", "native") == "te"),
    warning("softmax-under-layer-scaling", "attention_softmax_in_fp32=false with apply_query_key_layer_scaling",
        "true: megatron-core sets it silently",
        "mixed_precision.attention_softmax_in_fp32=null",
        when=lambda c: c.model("apply_query_key_layer_scaling") and c.policy.softmax_fp32 is False),
    row("activation-store-needs-swiglu", "activation_func_fp8_input_store without SwiGLU",
        "SwiGLU (gated_linear_unit with silu)",
        "model.activation_func_fp8_input_store=false",
        when=lambda c: c.model("activation_func_fp8_input_store") and not (c.run.shape.gated and _silu(c))),
    row("batch-invariance-needs-bf16",
        lambda c: f"batch_invariant_mode with {c.policy.params.short} parameters{' and quantized experts' if _quantized_experts(c) else ''}",
        "BF16 parameters, experts not quantized",
        "model.batch_invariant_mode=false", NEWER_MODEL_CONFIG,
        about="fp16", when=lambda c: c.model("batch_invariant_mode") and (c.policy.params is not DType.BF16 or _quantized_experts(c)),
        holds=(Window(package="megatron_core", since="0.17"),)),
    warning("reduced-precision-switch-is-process-wide", "disable_bf16_reduced_precision_matmul=true",
        "no other run in this process: megatron-core sets torch's process-wide switch and never restores it",
        "restart the process before another run (mpbridge's device layer restores it)",
        when=lambda c: c.policy.compute is DType.BF16 and c.model("disable_bf16_reduced_precision_matmul")),
    row("interleaved-pipeline-on-gloo", "{c.run.parallel.virtual_pipeline} virtual stages with batched point-to-point communication on gloo",
        "overlap_p2p_comm=true batch_p2p_comm=false: with batched communication the run diverges silently",
        "model.overlap_p2p_comm=true model.batch_p2p_comm=false", "measured on megatron-core 0.16.1 with gloo: gradient norms of 6e4",
        when=lambda c: (c.gpu is False or c.run.played) and (c.run.parallel.virtual_pipeline or 1) > 1 and (c.model("batch_p2p_comm", True) or not c.model("overlap_p2p_comm", False))),
)  # fmt: skip
