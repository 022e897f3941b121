"""Rules about what is quantized, how, and with which library and hardware."""

from __future__ import annotations

from collections.abc import Sequence

from mpbridge.common.formats import DType
from mpbridge.common.versions import Window
from mpbridge.planning.memory.names import SHADOWED_CURE, beyond_the_model, foreign, idle, listed
from mpbridge.planning.rules.base import MODEL_CONFIG, PLAIN_WEIGHTS, Case, Rule, row, warning
from mpbridge.planning.rules.gemm_shapes import lint
from mpbridge.precision.megatron_spec.module_rules import QUANTIZERS, SINCE, unmixable
from mpbridge.precision.megatron_spec.versions import BEFORE_017, SINCE_017
from mpbridge.precision.policy import Quant
from mpbridge.precision.sync.unkept import STORING_CURE, storing_rules
from mpbridge.precision.wording import region_text, rule_words


def _ends(case: Case) -> str:
    first, last = case.policy.ends or (0, 0)
    return f"{first} first and {last} last layers"


def _stage_layers(case: Case) -> int:
    return case.run.shape.num_layers // case.run.parallel.pipeline


def _module_in_stored(case: Case) -> str:
    base = case.policy.quant
    if base is None or not base.stored:
        return ""
    rules = [(region.modules, region.quant) for region in case.policy.module_regions]
    odd = [name for name, own in rules if own is None or not own.stored or own.scaling != base.scaling]
    kept = f"differ from layers whose weights are stored as {base.scaling} {base.format}"
    return f"modules {', '.join(odd)} {kept}" if odd else ""


def _mixed_gemms(case: Case) -> str:
    old = f"with Transformer Engine {case.run.versions.transformer_engine}" if case.te_before(SINCE) else ""
    found = [(region, old or unmixable(region.rules)) for region in case.policy.regions if region.by_factory]
    return "; ".join(f"{region_text(region)}: {rule_words(region.rules)}, {why}" for region, why in found if why)


def _beyond_the_model(case: Case) -> str:
    return "; ".join(beyond_the_model(case.policy, case.run.shape.num_layers))


def _dead_modules(case: Case) -> str:
    dead = idle(case.policy, case.run.shape)[0]
    return f"no linear of this model matches {'; '.join(dead)} (linears: {listed(case.run.shape)})" if dead else ""


def _sizes(case: Case) -> str:
    wrong = [finding for finding in lint(case.policy, case.run) if finding.level == "required"]
    words = [f"{f.module} {f.dimension} {f.value} (multiple of {f.multiple}: {f.cure})" for f in wrong]
    return "; ".join(words[:4]) + (f"; and {len(words) - 4} more" if len(words) > 4 else "")


def _inert(case: Case) -> str:
    given = [
        name
        for quant in case.policy.quants
        if not quant.row.history
        for name, is_set in (
            ("fp8_margin", quant.margin != 0),
            ("fp8_amax_history_len", quant.amax_history != 1),
            ("fp8_amax_compute_algo", quant.amax_algo != "most_recent"),
            ("fp8_wgrad", not quant.wgrad),
        )
        if is_set
    ]
    return f"{', '.join(dict.fromkeys(given))} with {case.scalings[0]} scaling" if given else ""


def _attention_of(quants: Sequence[Quant]) -> str:
    odd = [quant for quant in quants if quant.attention != "none" and quant.attention not in quant.row.attention]
    return f"fp8_{odd[0].attention}_attention with {odd[0].scaling} scaling" if odd else ""


def _recompute(case: Case) -> tuple[str, ...]:
    if case.model("recompute_granularity") != "selective" or case.policy.fp8 is None:
        return ()
    return tuple(module for module in case.model("recompute_modules", ()) if module in ("moe_act", "layernorm"))


RULES: tuple[Rule, ...] = (
    row("edge-layers-with-delayed-scaling", "first_last_layers_bf16 with delayed scaling",
        "no BF16 edge layers: delayed scaling updates its scales once for the whole block of layers",
        "mixed_precision.first_last_layers_bf16=false, or mixed_precision.fp8_recipe=tensorwise", f"{MODEL_CONFIG}; fp8_utils.py get_fp8_context",
        about="delayed", when=lambda c: c.policy.ends is not None and c.history),
    row("edge-layers-beyond-a-stage", lambda c: f"{_ends(c)} in {c.policy.compute.short}, with {_stage_layers(c)} layers per pipeline stage",
        "at each end at most num_layers // pipeline_model_parallel_size",
        "fewer edge layers (mixed_precision.num_layers_at_start_in_bf16, num_layers_at_end_in_bf16) or fewer stages",
        about="edges", when=lambda c: c.policy.ends and c.policy.fp8 and max(c.policy.ends) > _stage_layers(c)),
    row("edge-layers-leave-nothing", lambda c: f"{_ends(c)} stay in {c.policy.compute.short}, and the model has {c.run.shape.num_layers}: nothing is quantized",
        "at least one quantized layer",
        "fewer edge layers, or a 16-bit recipe under its own name", "megatron-core 0.16.1 fp4_utils.py get_fp4_context accepts it silently",
        about="edges", when=lambda c: c.policy.ends and sum(c.policy.ends) >= c.run.shape.num_layers and c.policy.quantized),
    row("module-rule-in-stored-layer", _module_in_stored,
        "the same storage format throughout a layer: fp8_model_init stores the weights of all its linears in low precision",
        f"{PLAIN_WEIGHTS}, or drop the module's rule", "megatron-core 0.16.1 transformer_layer.py, fp8_utils.py get_fp8_context(is_init=True); NeMo-RL#3566, #3654",
        about="stored", emulated="warning"),
    row("module-rule-stores-weights", lambda c: storing_rules(c.policy, c.run.versions.megatron_core),
        "weights stored as the layer's own setting says: before 0.17 a rule by module has no storage and they would stay in 16 bits; since then the optimizer "
        "quantizes either FP8 or FP4 weights anew, not both",
        STORING_CURE,
        "megatron-core 0.16.1 extensions/transformer_engine.py TEQuantizationRecipe; Megatron-LM core/optimizer/distrib_optimizer.py (d98e8a64)",
        about="quantized", emulated="warning"),
    row("gemms-of-one-linear-in-several-formats", _mixed_gemms,
        f"one rule without such options for all three GEMMs of a linear: Transformer Engine mixes formats in one linear since {SINCE}, by "
        f"quantizers of {', '.join(QUANTIZERS)} scaling with their defaults and weights in 16 bits",
        "one rule for the linear, or emulate=true",
        "Transformer Engine bce8162f (2.19) pytorch/tensor/hybrid_tensor.py, pytorch/custom_recipes; megatron-core 0.16.1 extensions/transformer_engine.py "
        "TEQuantizationRecipe custom_recipe_factory",
        about="quantized", emulated="silent"),
    # layers beyond the model are another rule's
    row("module-rule-matches-nothing", _dead_modules,
        "each glob under `modules`, with its layers, to match a linear of the model",
        "correct the glob or the layers", "Megatron-LM#6745: matchers that were never applied",
        when=lambda c: not _beyond_the_model(c)),
    warning("module-rule-of-another-model", lambda c: "; ".join(foreign(c.policy, c.run.shape)),
        "rules on linears that the model has: these match only Mamba layers, latent experts or multi-token prediction, which it lacks, and change nothing",
        "drop them, or a recipe for this kind of model", "mpbridge/planning/memory/names.py any_gpt",
        when=lambda c: not _beyond_the_model(c)),
    row("module-rule-never-decides", lambda c: "; ".join(idle(c.policy, c.run.shape)[1]),
        "each rule under `modules` to decide for at least one linear",
        SHADOWED_CURE, "mpbridge/planning/memory/names.py; megatron-core 0.16.1 quantization/quant_config.py RecipeConfig: the first match wins"),
    row("module-rule-beyond-the-model", _beyond_the_model,
        "layers that the model has",
        "correct `layers` under `modules` (a recipe for a deeper model does not fit a shallower one)", "mpbridge/precision/regions.py outside"),
    row("gemm-sizes", _sizes,
        "multiples that Transformer Engine asserts for this recipe",
        "see each size (mpbridge check lists them all, including those that only cost speed)",
        "Transformer Engine 2.11 pytorch/utils.py, csrc/quantizer.cpp, common/gemm/cublaslt_gemm.cu",
        about="quantized", emulated="warning"),
    warning("inert-outside-delayed-scaling", _inert,
        "nothing: only delayed scaling reads them",
        "drop them, or mixed_precision.fp8_recipe=delayed", "megatron-core 0.16.1 fp8_utils.py get_fp8_recipe",
        about="quantized", cure_here=lambda c: "drop them" if c.policy.ends else "drop them, or mixed_precision.fp8_recipe=delayed"),
    warning("settings-without-effect", lambda c: ", ".join(c.run.inert),
        "only settings that take effect",
        "drop them, or set what they need", "mpbridge/precision/inert.py: the policy is the same without them"),
    warning("wgrad-switch-has-no-effect", "fp8_wgrad=false",
        "true: the weight gradient's GEMM runs in FP8 regardless",
        "mixed_precision.fp8_wgrad=true, or another recipe", "Transformer Engine 2.9 to 2.12 common/recipe/__init__.py DelayedScaling drops override_linear_precision",
        about="delayed", when=lambda c: any(q.row.history and not q.wgrad for q in c.policy.quants), holds=(Window(package="transformer_engine", since="2.9"),)),
    warning("attention-switch-has-no-effect", lambda c: _attention_of(c.policy.quants),
        "FP8 dot product attention with delayed or tensorwise scaling, multi-head with delayed only; elsewhere it stays in 16 bits",
        "drop the switch", "megatron-core 0.16.1 fp8_utils.py get_fp8_recipe, extensions/transformer_engine.py TEDelayedScaling",
        about="fp8", holds=(BEFORE_017,)),
    # since 0.17 MXFP8 accepts the switch for dot product attention
    warning("attention-switch-has-no-effect-since-017", lambda c: _attention_of([q for q in c.policy.quants if (q.scaling, q.attention) != ("mxfp8", "dot_product")]),
        "FP8 dot product attention with delayed, tensorwise or MXFP8 scaling, multi-head with delayed only; elsewhere it stays in 16 bits",
        "drop the switch", "Megatron-LM core/fp8_utils.py get_fp8_recipe (d98e8a64)",
        about="fp8", holds=(SINCE_017,)),
    warning("mxfp8-with-e5m2-gradients", "fp8='hybrid' with mxfp8: E5M2 gradients",
        "fp8='e4m3': the hybrid recipe diverged and was withdrawn",
        "mixed_precision.fp8=e4m3", "Megatron-Bridge#638",
        about="mxfp8", when=lambda c: any(q.scaling == "mxfp8" and q.format == "hybrid" for q in c.policy.quants)),
    row("nvfp4-around-fp16", "NVFP4 with {c.policy.compute.short} compute",
        "BF16: the Hadamard transform and stochastic rounding accept BF16 only, and the GEMM has no FP16 output",
        "a bf16_with_nvfp4 recipe", "Transformer Engine 2.11 csrc/quantizer.cpp, common/gemm/cublaslt_gemm.cu",
        about="nvfp4", when=lambda c: "nvfp4" in c.scalings and c.policy.compute is not DType.BF16),
    row("fp4-weights-stored", "fp4_param_gather=true",
        "false for weights that train: 0.16 has no FP4 field in its DDP config and sizes the parameter buffer wrongly (a frozen base is in no buffer)",
        "mixed_precision.fp4_param_gather=false, or mixed_precision.frozen=['*'] with adapters, or megatron-core 0.17 or later",
        "megatron-core 0.16.1 distributed_data_parallel_config.py, param_and_grad_buffer.py",
        about="nvfp4", when=lambda c: any(q.bits == 4 for q in c.stored) and not c.policy.all_frozen, holds=(BEFORE_017,), emulated="warning"),
    warning("fp4-weights-unproven", "fp4_param_gather=true",
        "false: megatron-core has had the field since 0.17, but it is untested with mpbridge",
        "mixed_precision.fp4_param_gather=false", "Megatron-LM core/distributed/distributed_data_parallel_config.py (d98e8a64)",
        about="nvfp4", when=lambda c: any(q.bits == 4 for q in c.stored), holds=(SINCE_017,), emulated="silent"),
    row("delayed-scaling-with-selective-recompute", lambda c: f"recompute_modules has {', '.join(_recompute(c))}",
        "neither moe_act nor layernorm under delayed scaling",
        "remove them from model.recompute_modules, or mixed_precision.fp8_recipe=tensorwise",
        about="delayed", when=lambda c: c.history and _recompute(c)),
    row("fp8-recompute-needs-newer-engine", lambda c: f"recompute of {', '.join(_recompute(c))} with Transformer Engine {c.run.versions.transformer_engine}",
        "Transformer Engine 2.6 or later",
        "upgrade it, or remove them from model.recompute_modules",
        about="fp8", when=lambda c: _recompute(c) and c.te_before("2.6"), emulated="silent"),
    row("nvfp4-recompute-needs-newer-engine", "full recomputation with Transformer Engine {c.run.versions.transformer_engine}",
        "Transformer Engine 2.12 or later: earlier versions reuse the weight that was quantized without gradients, which has no columnwise copy, in the recomputed forward pass",
        "upgrade it, or model.recompute_granularity=null", "Transformer Engine 2.11 and 2.12 pytorch/module/base.py get_weight_workspace; seen in a run over 2.11",
        about="nvfp4", when=lambda c: "nvfp4" in c.scalings and c.te_before("2.12") and c.model("recompute_granularity") == "full", emulated="silent"),
    warning("interval-has-no-effect", lambda c: f"fp8_interval={c.model('fp8_interval')}",
        "1: Transformer Engine ignores it",
        "drop it", "Transformer Engine 2.11 common/recipe/__init__.py",
        about="fp8", when=lambda c: c.policy.fp8 is not None and c.model("fp8_interval", 1) != 1),
    warning("amax-group-has-no-effect", "tp_only_amax_red=true",
        "delayed scaling: the other scalings do not reduce over that group",
        "drop it", "megatron-core 0.16.1 fp8_utils.py; Transformer Engine 2.11 pytorch/quantization.py",
        about="quantized", when=lambda c: c.policy.quantized and not c.history and c.model("tp_only_amax_red")),
)  # fmt: skip
