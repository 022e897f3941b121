"""The catalogue of planted faults: what each does, on which engines, and which row of the report has to name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.observe.audit import compute_faults as c
from tests.observe.audit import faults as f
from tests.observe.audit import hostile_faults as h
from tests.observe.audit import hybrid_faults as m
from tests.observe.audit import step_faults as s

SHARDED = {"use_distributed_optimizer": True}
AWARE = {"use_precision_aware_optimizer": True}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
HYBRID = {
    "num_layers": 3, "hybrid_override_pattern": "M*-", "normalization": "RMSNorm", "position_embedding_type": "none", "mamba_num_heads": 16, "mamba_head_dim": 8,
    "mamba_num_groups": 2, "mamba_state_dim": 28,
}  # fmt: skip
PLAIN = {"first_last_layers_bf16": False, "fp8_param": False}
SCALED = {"recipe": "fp16_mixed", "initial_loss_scale": 1024.0}

ENGINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": ("bf16", {}),
    "dist": ("bf16", {"ddp": SHARDED}),
    "aware": ("bf16", {"ddp": SHARDED, "optimizer": AWARE}),
    "fp32": ("fp32", {}),
    "fp16": (SCALED, {}),
    "sum of tokens": ("bf16", {"model": {"calculate_per_token_loss": True}}),
    "fp16 sum of tokens": (SCALED, {"model": {"calculate_per_token_loss": True}}),
    "moe": ({"recipe": "bf16_mixed", "moe_router_dtype": "fp32"}, {"model": MOE}),
    "wide softmax": ({"recipe": "bf16_mixed", "attention_softmax_in_fp32": True}, {"model": {"window_size": [15, 0]}}),
    "residual": ({"recipe": "bf16_mixed", "fp32_residual_connection": True}, {}),
    "logits": ({"recipe": "bf16_mixed", "logit_dtype": "fp32"}, {}),
    "autocast": ({"recipe": "bf16_mixed", "autocast_enabled": True}, {}),
    "norms kept": ({"recipe": "bf16_params_fp32_states", "keep_fp32": ["*layernorm*"]}, {"engine": "fsdp2"}),
    "hybrid": ("bf16", {"model": HYBRID}),
    "hybrid kept": ({"recipe": "bf16_mixed", "keep_fp32": ["*.A_log", "*.D", "*.dt_bias"]}, {"model": HYBRID}),
    "hybrid tensorwise": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **PLAIN}, {"emulate": True, "model": HYBRID}),
    "pipeline": ("bf16", {"parallel": {"pipeline_model_parallel_size": 2}}),
    "sequence parallel": ("bf16", {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
    "blockwise sequence parallel": ({"recipe": "bf16_with_fp8_subchannel_scaling_mixed", **PLAIN}, {"emulate": True, "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
    "experts apart": ({"recipe": "bf16_mixed", "moe_router_dtype": "fp32"}, {"model": MOE, "parallel": {"expert_model_parallel_size": 2}}),
    "fsdp2": ("fp32_params_bf16_compute", {"engine": "fsdp2"}),
    "fsdp2 a": ("bf16_params_fp32_states", {"engine": "fsdp2"}),
    "mfsdp": ("bf16_megatron_fsdp", {"engine": "megatron_fsdp"}),
    "tensorwise": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **PLAIN}, {"emulate": True}),
    "tensorwise ends": ("bf16_with_fp8_current_scaling_mixed", {"emulate": True, "model": {"num_layers": 3}}),
    "tensorwise fsdp2": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **PLAIN}, {"emulate": True, "engine": "fsdp2"}),
    "tensorwise mfsdp": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **PLAIN}, {"emulate": True, "engine": "megatron_fsdp"}),
    "delayed": ("bf16_with_fp8_delayed_scaling_mixed", {"emulate": True}),
    "mxfp8": ("bf16_with_mxfp8_mixed", {"emulate": True}),
    "nvfp4": ("bf16_with_nvfp4_mixed", {"emulate": True}),
}  # fmt: skip
ALL = ("ddp", "dist", "fsdp2", "mfsdp")
CORE = ("ddp", "dist")


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    plant: Callable[[Any], None]
    engines: tuple[str, ...]
    subjects: tuple[str, ...]
    """Rows of the report that may name it; one of them must."""
    offender: str = ""
    """Part of an offender's name."""
    quick: bool = False
    """Whether the default suite plants it, on the first of its engines: before the first step if it is early, after it otherwise."""
    early: bool = True
    """False: it means something after the first update only."""
    behind: int = 0
    """Steps until it has an effect: what goes stale is right until the next update."""
    once: bool = False
    """It changes a moment a single time, which the audit of the step that follows alone can see (docs/audit.md, limit 6)."""
    fatal: bool = False
    """The first step with it raises: torch multiplies no factors of two dtypes."""


ROUND = f.change_gradients(lambda grad: grad.bfloat16().float())
CATALOGUE = (
    Fault("model never refreshed", f.model_never_refreshed, (*CORE, "fp16", "moe", "mfsdp"), ("weights as read",), quick=True),
    Fault("one weight never refreshed", f.one_weight_never_refreshed, CORE, ("weights as read",), "linear_fc1.weight"),
    Fault("forward weight disturbed", f.weight_disturbed, CORE, ("weights as read",), "linear_fc1.weight"),
    Fault("optimizer frozen", f.optimizer_frozen, ("mfsdp", "fsdp2", "dist", "ddp", "fsdp2 a", "aware"), ("weights moved",), quick=True),
    Fault("one weight frozen", f.one_weight_frozen, ALL, ("weights moved",)),
    Fault("dropped from the optimizer", f.dropped_from_the_optimizer, ALL, ("optimizer holds", "invariants"), quick=True),
    Fault("a group's rate is 0", f.rate_of_a_group_zero, CORE, ("weights moved",)),
    Fault("requires_grad off", f.requires_grad_off, ("ddp", "fsdp2"), ("optimizer holds",), "linear_fc1.weight", quick=True),
    Fault("moment in BF16", f.cast_state("exp_avg", torch.bfloat16), (*ALL, "fsdp2 a"), ("exp_avg", "invariants")),
    Fault("second moment in FP16", f.cast_state("exp_avg_sq", torch.float16), ("fsdp2 a", *ALL), ("exp_avg_sq", "invariants"), quick=True),
    Fault("first moment rounded", h.states_with(7, "exp_avg"), ("ddp", "fsdp2", "aware"), ("bits of states",)),
    Fault("second moment rounded", h.states_with(7, "exp_avg_sq"), ("dist", "mfsdp"), ("bits of states",)),
    Fault("main weights rounded", h.main_weights_with(7), CORE, ("bits of states",)),
    Fault("remainders zeroed", f.remainders_zeroed, ("aware", "fsdp2 a"), ("bits of states", "weights moved"), quick=True),
    Fault("norms share their memory", f.parameters_alias, ("ddp", "dist", "fp32"), ("optimizer holds", "invariants"), "in the memory of", quick=True),
    Fault("a second master copy", f.second_copy, ("dist", "ddp", "fsdp2", "mfsdp"), ("main_params", "invariants"), quick=True),
    Fault("main weights in BF16", f.main_weights_cast, CORE, ("main_params", "invariants")),
    Fault("norm's weight in FP32", f.stored_as(torch.float32, "decoder", "layers", "0", "input_layernorm"), ("ddp",), ("params", "invariants"), "layernorm", fatal=True),
    Fault("linear's weight in FP32", f.stored_as(torch.float32, "decoder", "layers", "1", "mlp", "linear_fc1"), ("ddp",), ("params", "invariants"), "linear_fc1", fatal=True),
    Fault("embedding in FP32", f.stored_as(torch.float32, "embedding", "word_embeddings"), ("ddp",), ("params", "invariants"), "embedding", fatal=True),
    Fault("router's weight in FP32", f.stored_as(torch.float32, "decoder", "layers", "1", "mlp", "router"), ("moe",), ("params", "invariants"), "router"),
    Fault("norm that is kept in FP32 in BF16", f.stored_as(torch.bfloat16, "decoder", "layers", "0", "input_layernorm"), ("norms kept",), ("params", "invariants"), "layernorm", fatal=True),
    Fault("gradient doubled", f.change_gradients(lambda grad: grad * 2), (*CORE, "mfsdp"), ("gradients",), "linear_fc1.weight"),
    Fault("gradient lost", f.change_gradients(torch.zeros_like), CORE, ("gradients", "weights moved"), "linear_fc1.weight"),
    Fault("gradient rounded to BF16", ROUND, (*CORE, "mfsdp", "fp32"), ("gradients",), "linear_fc1.weight", quick=True),
    Fault("gradient's sign turned", f.change_gradients(torch.neg), ("ddp",), ("gradients",), "linear_fc1.weight"),
    Fault("gradient transposed within", f.change_gradients(lambda grad: grad.flip(0)), ("ddp",), ("gradients",), "linear_fc1.weight"),
    Fault("only the last micro-batch counts", f.last_microbatch_only, CORE, ("gradients",), quick=True),
    Fault("loss not scaled", f.loss_unscaled, ("fp16",), ("loss scale", "gradients"), quick=True),
    Fault("nothing scales the loss", f.no_scale_function, ("fp16",), ("derived flags", "loss scale")),
    Fault("gradients unscaled twice", f.unscaled_twice, ("fp16", "fp16 sum of tokens"), ("gradients",), quick=True),
    Fault("all gradients halved", f.change_gradients(lambda grad: grad * 0.5, ""), ("sum of tokens", "ddp", "dist"), ("gradients",), quick=True),
    Fault("all gradients tripled", f.change_gradients(lambda grad: grad * 3.0, ""), ("sum of tokens", "ddp"), ("gradients",)),
    Fault("scale of 1", f.scale_of_one, ("fp16",), ("loss scale", "loss scale adapts"), quick=True),
    Fault("scaler's window", f.scaler_window, ("fp16",), ("derived flags", "invariants")),
    Fault("scale drifts", f.scale_drifts, ("fp16",), ("loss scale adapts",)),
    Fault("bf16 flag off", f.flip("model", "bf16", False), ("ddp",), ("derived flags", "invariants"), "model.bf16: promised true, found false", quick=True),
    Fault("params_dtype", f.flip("model", "params_dtype", torch.float32), ("ddp", "fsdp2 a"), ("derived flags", "invariants")),
    Fault("reduction flag", f.flip("ddp", "grad_reduce_in_fp32", False), CORE, ("derived flags", "invariants")),
    Fault("softmax flag", f.flip("model", "attention_softmax_in_fp32", False), ("ddp", "fsdp2"), ("derived flags", "invariants"), quick=True),
    Fault("residual flag", f.flip("model", "fp32_residual_connection", True), ("ddp",), ("derived flags", "invariants")),
    Fault("optimizer's bf16 flag", f.flip("optimizer", "bf16", False), ("ddp",), ("derived flags", "invariants")),
    Fault("autocast flag", f.flip("model", "enable_autocast", True), ("ddp",), ("derived flags", "invariants")),
    Fault("FP8 flag", f.flip("model", "fp8", "hybrid"), ("ddp",), ("derived flags", "invariants")),
    Fault("linear in FP32", c.linear_in(torch.float32), ("ddp", "fsdp2", "mfsdp"), ("compute",), "linear_fc1", quick=True),
    Fault("linear in FP16", c.linear_in(torch.float16), ("ddp",), ("compute",), "linear_fc1"),
    Fault("attention in FP16", c.attention_in(torch.float16), ("ddp", "fsdp2"), ("attention",), "core_attention", quick=True),
    Fault("activation function in FP16", c.activation_in_fp16, ("ddp", "fsdp2"), ("compute",), "fp16 in", quick=True),
    Fault("router reads E5M2", c.router_reads_e5m2, ("moe",), ("compute",), "router", quick=True),
    Fault("embedding's output rounded", c.embedding_rounded, ("fp32",), ("residual stream",), "embedding", quick=True),
    Fault("attention in FP32", c.attention_in(torch.float32), ("ddp",), ("attention",), "core_attention"),
    Fault("router in BF16", c.router_in_bf16, ("moe",), ("router", "derived flags"), quick=True),
    Fault("router's logits rounded", c.router_logits_rounded, ("moe",), ("router",), "router"),
    Fault("routed in BF16", c.routed_in_bf16, ("moe",), ("router",), "router", quick=True),
    Fault("routing probabilities rounded", c.probabilities_rounded, ("moe",), ("router",), "probabilities", quick=True),
    Fault("attention's softmax in BF16", c.softmax_flag_off, ("wide softmax",), ("softmax",), "scale_mask_softmax"),
    Fault("one layer's softmax by hand, in BF16", c.softmax_by_hand, ("wide softmax",), ("softmax",), "core_attention", quick=True),
    Fault("attention reads E5M2 inside", c.attention_reads_e5m2, ("ddp", "fsdp2"), ("compute",), "float8_e5m2 in", quick=True),
    Fault("residual stream rounded", c.stream_rounded, ("residual", "fp32"), ("residual stream",), quick=True),
    Fault("residual stream rounded before a norm", c.stream_rounded_before_norm, ("fp32",), ("residual stream",)),
    Fault("cross entropy in BF16", c.loss_in_bf16, ("ddp", "fsdp2"), ("loss",), quick=True),
    Fault("loss rounded after the cross entropy", c.loss_rounded_afterwards, ("ddp", "fp32", "fsdp2"), ("loss",), quick=True),
    Fault("logits narrow", c.logits_narrow, ("logits",), ("logits",), "output_layer", quick=True),
    Fault("rotary angles in BF16", c.angles_in_bf16, ("ddp", "fp32"), ("rotary angles",), "inv_freq", quick=True),
    Fault("rotary angles rounded", c.angles_rounded, ("ddp",), ("rotary angles",), "inv_freq"),
    Fault("weights rounded in forward", c.weights_rounded_in_forward, ("fp32",), ("compute",), "linear_fc1", quick=True),
    Fault("tied weight rounded", c.tied_weight(lambda weight: weight.bfloat16().float()), ("fp32",), ("compute",), "output_layer", quick=True),
    Fault("tied weight rounded to 4 bits", c.tied_weight(lambda weight: weight.to(torch.float8_e4m3fn).to(weight.dtype)), ALL, ("compute",), "output_layer"),
    Fault("tied weight stale", c.stale_tied_weight, ("ddp", "fsdp2"), ("compute",), "output_layer", early=False, behind=1),
    Fault("tied weight detached", c.tied_weight(torch.Tensor.detach), ("fsdp2", "ddp", "dist", "mfsdp"), ("compute",), "output_layer", quick=True),
    Fault("another layer's weight", c.another_layers_weight, ("ddp",), ("compute", "gradients", "weights moved"), "linear_fc1"),
    Fault("activations rounded", c.activations_rounded, ("fp32",), ("residual stream",), "linear_fc2"),
    Fault("autocast on", c.autocast_on, ("ddp", "fp32"), ("autocast",), quick=True),
    Fault("autocast off", c.autocast_off, ("autocast",), ("autocast",)),
    Fault("edge layer quantized", c.edge_quantized, ("tensorwise ends",), ("linears", "invariants", "quantized GEMMs"), "linear_fc1"),
    Fault("MXFP8 becomes tensorwise", c.another_scaling("tensorwise"), ("mxfp8",), ("linears", "invariants", "quantized GEMMs")),
    Fault("tensorwise becomes MXFP8", c.another_scaling("mxfp8"), ("tensorwise",), ("linears", "invariants", "quantized GEMMs")),
    Fault("emulation paused", c.paused, ("tensorwise fsdp2", "tensorwise", "nvfp4"), ("quantized GEMMs",), quick=True),
    Fault("linear unplugged", c.unplugged, ("tensorwise mfsdp", "tensorwise", "tensorwise fsdp2"), ("linears", "invariants"), "linear_fc1", quick=True),
    Fault("all linears unplugged", c.all_unplugged, ("tensorwise", "delayed"), ("linears", "invariants")),
    Fault("linear's forward swapped", c.forward_swapped, ("mxfp8", "tensorwise"), ("quantized GEMMs",), "linear_fc1", quick=True),
    Fault("linear's class swapped", c.class_swapped, ("tensorwise",), ("quantized GEMMs", "linears"), "linear_fc1"),
    Fault("E4M3 for E5M2 gradients", c.wrong_format("e4m3", gradient=True), ("tensorwise", "delayed"), ("quantized GEMMs",), "dy", quick=True),
    Fault("E5M2 for E4M3 forward", c.wrong_format("e5m2", gradient=False), ("tensorwise", "mxfp8"), ("quantized GEMMs",), "fprop"),
    Fault("wgrad's gradient unquantized", h.operands_of("wgrad", "dy", c.unquantized), ("tensorwise", "mxfp8", "nvfp4"), ("quantized GEMMs",), "wgrad dy", quick=True),
    Fault("wgrad's input unquantized", h.operands_of("wgrad", "x", c.unquantized), ("mxfp8", "nvfp4"), ("quantized GEMMs",), "wgrad x"),
    Fault("dgrad's gradient unquantized", h.operands_of("dgrad", "dy", c.unquantized), ("mxfp8",), ("quantized GEMMs",), "dgrad dy"),
    Fault("dgrad's weight unquantized", h.operands_of("dgrad", "w", c.unquantized), ("mxfp8",), ("quantized GEMMs",), "dgrad w"),
    Fault("fprop's weight unquantized", h.operands_of("fprop", "w", c.unquantized), ("tensorwise", "nvfp4"), ("quantized GEMMs",), "fprop w"),
    Fault("fprop's input unquantized", h.operands_of("fprop", "x", c.unquantized), ("tensorwise", "mxfp8"), ("quantized GEMMs",), "fprop x"),
    Fault("delayed scales frozen", c.scales_frozen, ("delayed",), ("delayed scales",), quick=True),
    Fault("margin", c.detail(margin=2), ("delayed",), ("delayed scales",)),
    Fault("amax algorithm", c.detail(amax_algo="most_recent"), ("delayed",), ("delayed scales", "linears"), early=False),
    Fault("history cut short", c.history_cut, ("delayed",), ("delayed scales",)),
    Fault("no Hadamard transform", c.not_rotated, ("nvfp4",), ("quantized GEMMs",), "Hadamard", quick=True),
    Fault("rounded to nearest", c.rounded_to_nearest, ("nvfp4",), ("quantized GEMMs",), "stochastic", quick=True),
    Fault("rounded upwards", c.rounded_upwards, ("nvfp4",), ("quantized GEMMs",), "zero on average", quick=True),
    Fault("every step draws the same bytes", c.bytes_of_one_step, ("nvfp4",), ("quantized GEMMs",), "random bytes", quick=True),
    # every dtype, flag and hook is in place
    Fault("first moment with FP16's bits", h.states_with(10, "exp_avg"), ("ddp", "fsdp2", "mfsdp", "aware"), ("bits of states",)),
    Fault("main weights with TF32's bits", h.main_weights_with(10), ("ddp", "dist", "mfsdp", "fp32"), ("bits of states", "weights moved"), quick=True),
    Fault("half of a weight frozen", f.half_of_a_weight_frozen, ("aware", *ALL, "fsdp2 a"), ("weights moved",), "update does not follow from its moments", quick=True),
    Fault("updates rounded to BF16", h.update_in_bf16, ("ddp", "dist", "mfsdp"), ("weights moved",)),
    Fault("frozen while nobody looks", h.frozen_while_nobody_looks, (*ALL, "fsdp2 a", "aware"), ("invariants",), "were applied", quick=True, early=False, behind=1),
    Fault("last step's gradients kept", h.gradients_kept, ("ddp", "dist", "mfsdp"), ("gradients",), early=False),
    Fault("a norm's gradient doubled", f.change_gradients(lambda grad: grad * 2, "input_layernorm.weight"), ALL, ("gradients",), "layernorm", quick=True),
    Fault("a gradient through FP16 in a hook", c.hook_on_gradients(torch.float16), ("ddp", "dist", "fp32"), ("compute",), "fp16 in", quick=True),
    Fault("every gradient through E5M2 in a hook", c.hook_on_gradients(torch.float8_e5m2, ""), ("ddp", "fp32"), ("compute",), "float8_e5m2 in"),
    Fault("a gradient of activations through BF16", c.output_gradient_rounded, ("fp32",), ("compute",), "backward of embedding: bf16 in", quick=True),
    Fault("the embedding's gradient doubled", f.change_gradients(lambda grad: grad * 2, "word_embeddings.weight"), ALL, ("gradients",), "embeddings"),
    Fault("an expert's gradient doubled", f.change_gradients(lambda grad: grad * 2, "local_experts.1.linear_fc1.weight"), ("moe",), ("gradients",), "experts.1", quick=True),
    Fault("the router's gradient doubled", f.change_gradients(lambda grad: grad * 2, "router.weight"), ("moe",), ("gradients",), "router"),
    Fault("gradient rounded to E4M3", f.change_gradients(h.to_e4m3), ("ddp", "fsdp2", "fsdp2 a", "mfsdp"), ("gradients",), "linear_fc1"),
    Fault("input gradients in FP16", h.backward_reads(dy=torch.Tensor.half, w=torch.Tensor.half), CORE, ("compute", "gradients"), "linear_fc1"),
    Fault("input gradients by a rounded weight", h.backward_reads(w=h.to_e4m3), ("ddp", "fp32"), ("gradients",), "linear"),
    Fault("TF32 allowed", h.tf32_allowed, ("fp32", "moe"), ("derived flags", "invariants"), "tf32", quick=True),
    Fault("norm computes in BF16", h.norm_in_bf16, ("fp32",), ("norms", "residual stream"), "layernorm"),
    Fault("norm computes in BF16, otherwise", h.norm_in_bf16_without_a_root, ("fp32", "ddp", "norms kept"), ("norms",), "layernorm", quick=True),
    Fault("norm's variance in BF16", h.norm_in_bf16, ("ddp", "residual", "norms kept", "fsdp2"), ("norms",), "layernorm"),
    Fault("output gradients rounded", h.output_gradients_rounded, ("fp32",), ("compute",), "linear_fc1", quick=True),
    Fault("linear in FP16 by a batched product", h.linear_by_a_batched_product, ("ddp", "fp32", "fsdp2"), ("compute", "residual stream"), "linear_fc1"),
    Fault("linear without a product", h.linear_without_a_product, ("ddp", "mfsdp"), ("compute",), "linear_fc1"),
    Fault("attention without a product", h.attention_without_a_product, ("ddp",), ("attention",), "core_attention"),
    Fault("rotary angles rounded on their way", h.angles_rounded_on_their_way, ("fp32", "ddp", "fsdp2"), ("rotary angles",), "rotary", quick=True),
    Fault("logits rounded on their way", h.logits_rounded, ("logits", "fp32"), ("logits",), "output layer"),
    Fault("range of a scale wasted", h.operands_of("fprop", "x", h.squeezed), ("tensorwise", "mxfp8", "nvfp4"), ("quantized GEMMs",), "fprop x", quick=True),
    Fault("quantized after another rounding", h.operands_of("fprop", "x", h.coarse), ("tensorwise", "mxfp8", "delayed"), ("quantized GEMMs",), "fprop x"),
    Fault("rounded twice to E2M1", h.operands_of("fprop", "x", h.coarse), ("nvfp4",), ("quantized GEMMs",), "fprop x"),
    Fault("rounded to E4M3 before E2M1", h.operands_of("fprop", "x", h.through_e4m3), ("nvfp4",), ("quantized GEMMs",), "fprop x", quick=True),
    Fault("weights rounded to E4M3 before E2M1", h.operands_of("fprop", "w", h.through_e4m3), ("nvfp4",), ("quantized GEMMs",), "fprop w"),
    Fault("rotated inputs rounded to E4M3 before E2M1", h.operands_of("wgrad", "x", h.through_e4m3), ("nvfp4",), ("quantized GEMMs",), "wgrad x"),
    Fault("gradients by way of E4M3", h.operands_of("dgrad", "dy", h.through_e4m3), ("tensorwise", "delayed"), ("quantized GEMMs",), "dgrad dy", quick=True),
    Fault("gradients by way of E4M3 to their weights", h.operands_of("wgrad", "dy", h.through_e4m3), ("tensorwise", "delayed"), ("quantized GEMMs",), "wgrad dy"),
    Fault("half of the gradient's rows lost", h.operands_of("wgrad", "dy", h.halved), ("tensorwise", "mxfp8", "delayed", "nvfp4"), ("quantized GEMMs",), "wgrad dy", quick=True),
    Fault("quantized copy of an old weight", h.operands_of("fprop", "w", h.stale()), ("tensorwise", "mxfp8", "delayed", "nvfp4", "tensorwise fsdp2"), ("quantized GEMMs",), "fprop w", behind=1),
    Fault("quantized copy of an old weight in dgrad", h.operands_of("dgrad", "w", h.stale()), ("tensorwise", "mxfp8", "delayed", "nvfp4"), ("quantized GEMMs",), "dgrad w", quick=True, behind=1),
    # Mamba layers
    Fault("scan in BF16", m.scan_in_bf16, ("hybrid", "hybrid kept", "hybrid tensorwise"), ("scan",), "mixer", quick=True),
    Fault("decays in BF16", m.decays_in_bf16, ("hybrid", "hybrid kept"), ("scan",), "mixer"),
    Fault("step sizes in BF16", m.steps_in_bf16, ("hybrid",), ("scan",), "mixer"),
    Fault("a mixer's norm in BF16", m.norm_in_bf16, ("hybrid", "hybrid tensorwise"), ("norms",), "mixer.norm", quick=True),
    Fault("convolution stored in FP16", m.cast(m.CONVOLUTION, torch.float16), ("hybrid", "hybrid tensorwise"), ("params",), m.CONVOLUTION, quick=True),
    Fault("step sizes no longer trained", m.no_longer_trained("dt_bias"), ("hybrid", "hybrid kept"), ("optimizer holds", "weights moved"), "dt_bias", quick=True),
    Fault("the decays' gradient doubled", f.change_gradients(lambda grad: grad * 2, "mixer.A_log"), ("hybrid", "hybrid kept"), ("gradients",), "A_log", quick=True),
    Fault("the convolution's gradient doubled", f.change_gradients(lambda grad: grad * 2, m.CONVOLUTION), ("hybrid",), ("gradients",), "conv1d"),
    Fault("a Mamba projection unquantized", m.projection_unquantized, ("hybrid tensorwise",), ("quantized GEMMs",), "mixer.in_proj", quick=True),
    Fault("a Mamba projection in FP16", m.projection_in_fp16, ("hybrid",), ("compute",), "mixer.in_proj", quick=True),
    # the optimizer's step
    Fault("moments zeroed before every step", s.moments_zeroed_before_every_step, (*ALL, "aware"), ("optimizer step",), "does not follow", early=False, quick=True),
    Fault("half of every second moment zeroed once", s.moments_times(0.0, "exp_avg_sq"), ("ddp", "dist", "mfsdp"), ("bits of states",), "exp_avg_sq", early=False, quick=True),
    Fault("half of every second moment halved once", s.moments_times(0.5, "exp_avg_sq"), ("ddp", "dist"), ("bits of states",), "exp_avg_sq", early=False),
    Fault("first moment of 12 bits", h.states_with(12, "exp_avg"), ("ddp", "fsdp2", "mfsdp"), ("optimizer step",), "exp_avg", quick=True),
    Fault("rates doubled inside the step", s.rates_doubled_inside, (*ALL, "aware", "fp32"), ("optimizer step",), "are not what the update makes", quick=True),
    Fault("weight decay of 0", s.setting(weight_decay=0.0), ALL, ("optimizer step",), "weight decay 0, declared", quick=True),
    Fault("weight decay of 10", s.setting(weight_decay=10.0), CORE, ("optimizer step",), "weight decay 10, declared"),
    Fault("beta1 of 0", s.setting(betas=(0.0, 0.999)), ALL, ("optimizer step",), "beta1 0, declared"),
    Fault("beta2 of 0.5", s.setting(betas=(0.9, 0.5)), ("ddp", "mfsdp"), ("optimizer step",), "beta2 0.5, declared"),
    Fault("eps of 0.01", s.setting(eps=0.01), ("ddp", "fsdp2"), ("optimizer step",), "eps 0.01, declared"),
    Fault("weight decay through the moments", s.decay_in_the_moments, ("ddp", "aware"), ("optimizer step",), "through the moments", quick=True),
    Fault("no bias correction", s.setting(bias_correction=False), ("ddp", "aware"), ("optimizer step",), "no bias correction"),
    Fault("gradients never clipped", s.never_clipped, ("ddp",), ("gradients", "gradient norm as clipped"), quick=True),
    Fault("norm halved", s.norm_times(0.5), CORE, ("gradient norm as clipped",), quick=True),
    Fault("norm in BF16", s.norm_in_bf16, ("ddp",), ("gradient norm as clipped",)),
)  # fmt: skip
