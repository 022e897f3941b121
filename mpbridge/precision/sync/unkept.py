"""What a plan says and no field of megatron-core does: refused before anything is written."""

from __future__ import annotations

from mpbridge.common.errors import Refused
from mpbridge.common.formats import DType, say
from mpbridge.precision.megatron_spec.precision_field import UNSET
from mpbridge.precision.megatron_spec.versions import BEFORE_017, SINCE_017, current
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.sync.plan import Plan
from mpbridge.precision.sync.targets import read

STORING_CURE = (
    "the rules without fp8_param_gather and fp4_param_gather, or megatron-core 0.17 or later and one of the two"
)

_LEAVE_A_STAGE_EMPTY = ("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split")


def refuse_unkept(plan: Plan, core: str | None = None) -> None:
    """Raises Refused for what no field of megatron-core says and neither its modules, wrappers and optimizers nor `wrap` would do as the plan's policy says.

    core: megatron-core's version; None: the installed one. What a config decides that the plan was not given is not judged."""
    policy = plan.policy
    if policy is None:
        return
    fsdp, sharded = _says(plan, "ddp", "use_megatron_fsdp"), _says(plan, "ddp", "use_distributed_optimizer")
    sharded, core = sharded or _says(plan, "optimizer", "use_distributed_optimizer"), core or current()
    stated = policy.precision_aware
    aware = _says(plan, "optimizer", "use_precision_aware_optimizer") if stated is None else stated
    model = plan.targets.get("model")
    stages = 2 if model is None else read(model, "pipeline_model_parallel_size")
    stages = stages if isinstance(stages, int) else 1
    residual = policy.residual_fp32 if model is None else _says(plan, "model", "fp32_residual_connection")
    # before 0.17 the stream is rounded in its first addition (fused_bias_dropout.py); a first stage without layers sends it as it is
    wide = SINCE_017.holds(core) and residual is not False
    layers_first = model is not None and all(read(model, name) in (UNSET, None, False) for name in _LEAVE_A_STAGE_EMPTY)
    low, alone = policy.compute.short, policy.narrow_alone
    rules = storing_rules(policy, core) if plan.realization == "native" else ""
    rows = (
        (policy.mixed and policy.params is DType.FP32,
         f"params_dtype=fp32 with {low} compute: megatron-core's Float16Module casts the whole model, and its optimizer would then update 16-bit weights"
         " without main weights; engine=fsdp2 of mpbridge trains it, or mixed_precision.params_dtype=null"),
        (alone and sharded and fsdp is False,
         f"{policy.params.short} parameters as their own main copy: the distributed optimizer silently creates FP32 main weights and moments;"
         " use_distributed_optimizer=False keeps them"),
        (alone and policy.params is DType.FP16 and aware is False,
         "main_params_dtype=fp16: megatron-core's optimizer of FP16 parameters always creates FP32 main weights; mixed_precision.main_params_dtype=fp32"),
        (policy.main_grads not in (None, DType.FP32) and not alone and aware is False and fsdp is False,
         f"main_grads_dtype={say(policy.main_grads)}: only a precision-aware optimizer reads such gradients; mixed_precision.main_grads_dtype=null"),
        (policy.accumulate is not None and (SINCE_017.holds(core) and fsdp) is False,
         f"grad_accumulation_dtype={say(policy.accumulate)} with gradients reduced in {policy.reduce.short}: only Megatron-FSDP since megatron-core 0.17"
         " tells the two apart; mixed_precision.grad_accumulation_dtype=null"),
        (rules,
         f"{rules}: megatron-core before 0.17 would keep them in 16 bits, a later one quantizes either FP8 or FP4 anew; {STORING_CURE}"),
        (not policy.returned(stages, wide),
         f"output_dtype={policy.output.short} with {low} compute: only engine=fsdp2 of mpbridge casts what a module returns; mixed_precision.output_dtype=null"),
        (layers_first and stages > 1 and not wide and policy.pipeline not in (policy.compute, policy.output),
         f"pipeline_dtype={policy.pipeline.short} on {stages} stages: megatron-core's layers send {low}{', also of an FP32 stream before 0.17' if residual else ''};"
         " mixed_precision.pipeline_dtype=null"),
        (policy.logits is not None,
         f"logit_dtype={say(policy.logits)}: an argument of models, no field; mpbridge's engines build the output layer that way; mixed_precision.logit_dtype=null"),
    )  # fmt: skip
    if faults := [text for applies, text in rows if applies]:
        raise Refused("; ".join(faults))


def _says(plan: Plan, target: str, field: str) -> bool | None:
    """A config's switch once the plan is written; None: that config was not given."""
    config = plan.targets.get(target)
    return None if config is None else plan.of(target).get(field, read(config, field)) is True


def storing_rules(policy: PrecisionPolicy, core: str | None) -> str:
    """The rules under `modules` whose weights megatron-core would not keep as they say, in words."""
    base, pairs = policy.quant, [(region.modules, region.quant) for region in policy.module_regions]
    own = {modules: f"fp{quant.bits}" for modules, quant in pairs if quant is not None and quant.stored}
    widths = sorted(set(own.values()))
    apart = BEFORE_017.holds(core) or len(widths) > 1
    if not own or not apart or (base is not None and base.stored):
        return ""
    return f"modules {', '.join(own)} store weights in {', '.join(widths)}, layers in {policy.compute.short}"
