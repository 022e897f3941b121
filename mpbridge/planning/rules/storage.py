"""Rules about weights stored in low precision, gradient buffers and communication between data-parallel ranks."""

from __future__ import annotations

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType, say
from mpbridge.common.traits import traits
from mpbridge.planning.memory.buckets import ALIGN
from mpbridge.planning.memory.keeps import is_frozen, kept_fp32
from mpbridge.planning.memory.layers import model_names, parameters
from mpbridge.planning.memory.ranks import Coordinates
from mpbridge.planning.rules.base import ARGUMENTS, PLAIN_WEIGHTS, Case, Rule, row, warning
from mpbridge.precision.globs import ADAPTERS, dead_patterns, is_adapter
from mpbridge.precision.megatron_spec.versions import BEFORE_017
from mpbridge.precision.policy import own_main
from mpbridge.precision.recipe import able


def _mxfp8_stored(case: Case) -> bool:
    return any(quant.row.stored.through_grads for quant in case.stored)


_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")


def _overlaps(case: Case) -> bool:
    return all(map(case.ddp, _OVERLAPS))


def _gathers_wide(case: Case) -> bool:
    base = case.policy.quant
    # with rules for individual modules, weights cannot be stored in MXFP8 at all
    wide = base is not None and base.row.stored.through_grads and not base.stored and not case.policy.module_regions
    return wide and case.core and case.run.optimizer.distributed


def _dead_names(case: Case) -> str | None:
    wide = tuple(glob for glob in case.policy.keep_fp32 if glob not in ADAPTERS)
    asked = {"keep_fp32": wide, "frozen": case.policy.frozen}
    names = model_names(case.run) if any(asked.values()) else ()
    base = [name for name in names if not is_adapter(name)]
    dead = {field: dead_patterns(globs, base if field == "frozen" else names) for field, globs in asked.items()}
    but = " (adapters always train)" if len(base) < len(names) and dead["frozen"] else ""
    found = (f"{field} {', '.join(map(repr, globs))} match no parameter" for field, globs in dead.items() if globs)
    return ", ".join(found) + but or None


def _undivided(case: Case) -> str | None:
    many = case.run.instances
    if not case.core or many == 1:
        return None
    if not case.run.optimizer.distributed:
        return f"{many} instances without a distributed optimizer"
    sizes = sorted({case.run.parallel.replicas(expert=expert) for expert in (False, True)})
    return next((f"{many} instances over {size} data-parallel ranks" for size in sizes if size % many), None)


def _misplaced(case: Case) -> str:
    """Parameters before others whose sizes are no multiple of the buffer's alignment: what follows one is gathered into the wrong place."""
    if not (case.core and case.native and case.policy.reuse_grad_buffer):
        return ""
    try:
        chunks = parameters(case.run, Coordinates.of(0, case.run.parallel))
    except BadValue:  # layers-do-not-divide says it
        return ""
    trained = [one for chunk in chunks for one in chunk if not is_frozen(case.policy, one.name)]
    found = list(dict.fromkeys(one.weight.path for one in trained if one.weight.elements % ALIGN))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    beside = f"{more} beside stored weights that are gathered through the gradient buffer"
    return f"{', '.join(found[:3])}{beside}" if found else ""


_FATAL = ("check_for_nan_in_grad", "check_for_large_grads")
"""Checks of megatron-core's DDP that end the run."""


_SHARDED = "engine=fsdp2"


def _shards_instead(case: Case) -> bool:
    """Whether _SHARDED is a cure: that engine can do what the run asks for besides."""
    there, sizes = traits(_SHARDED.removeprefix("engine=")), case.run.parallel
    refused = case.offloaded or any(map(case.model, ("calculate_per_token_loss", *there.refuses)))
    data_alone = sizes.data == sizes.world_size and sizes.expert == 1
    return data_alone and not refused and case.run.optimizer.name in there.optimizers and able(case.policy, there)


RULES: tuple[Rule, ...] = (
    row("accumulator-apart-from-the-wire",
        "grad_accumulation_dtype={c.policy.accumulate.short} with gradients reduced in {c.policy.reduce.short} on {c.traits.full_name}",
        "one dtype for both: micro-batches accumulate in the same buckets that are reduced",
        "mixed_precision.grad_accumulation_dtype=null, or engine=megatron_fsdp",
        "megatron-core 0.16.1 distributed/param_and_grad_buffer.py; torch 2.13 fsdp/_fully_shard/_fsdp_collectives.py",
        when=lambda c: c.policy.accumulate is not None and c.traits.main_weights != "wrapper",
        cure_here=lambda c: "mixed_precision.grad_accumulation_dtype=null" + ("" if BEFORE_017.holds(c.run.versions.megatron_core) else ", or engine=megatron_fsdp")),
    row("accumulator-before-its-field", "grad_accumulation_dtype={c.policy.accumulate.short} with gradients reduced in {c.policy.reduce.short}",
        "megatron-core 0.17 or later: ddp.megatron_fsdp_grad_comm_dtype does not exist in earlier versions",
        "mixed_precision.grad_accumulation_dtype=null, or a newer megatron-core", "megatron-core 0.16.1 and 0.20.0 distributed/distributed_data_parallel_config.py",
        when=lambda c: c.policy.accumulate is not None and c.traits.main_weights == "wrapper", holds=(BEFORE_017,)),
    warning("gather-misplaces-what-follows-odd-sizes", _misplaced,
        f"sizes that are multiples of {ALIGN} elements, to which the buffer aligns every parameter: a bucket's own table counts them as packed, "
        "so a script that gathers by it copies one parameter into another's place. mpbridge's engine and mpbridge.wrap correct the table",
        "megatron-core 0.17 or later, engine=mcore or mpbridge.wrap",
        "megatron-core 0.16.1 distributed/param_and_grad_buffer.py _ParamAndGradBucket.param_to_index; Megatron-LM#3007",
        about="stored", when=_mxfp8_stored, holds=(BEFORE_017,)),
    # the distributed optimizer is Adam's alone
    row("parameter-gather-without-distributed-optimizer", "fp8_param_gather=true with plain DDP",
        "a distributed optimizer, which keeps the high-precision copy",
        f"ddp.use_distributed_optimizer=true, or {PLAIN_WEIGHTS}", f"{ARGUMENTS}; megatron-core 0.16.1 accepts it silently",
        about="stored", when=lambda c: c.core and c.stored and not c.run.optimizer.distributed,
        cure_here=lambda c: PLAIN_WEIGHTS if c.run.optimizer.name != "adam" else f"ddp.use_distributed_optimizer=true, or {PLAIN_WEIGHTS}", emulated="warning"),
    row("mxfp8-gather-without-reused-buffer", "MXFP8 parameter gather with reuse_grad_buf_for_mxfp8_param_ag=false",
        "the gradient buffer reused for the gather",
        f"mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=true ddp.overlap_grad_reduce=true ddp.overlap_param_gather=true, or {PLAIN_WEIGHTS}",
        "Megatron-Bridge 067f987d training/config.py validate; Megatron-Bridge#450",
        about="mxfp8 stored", when=lambda c: c.core and _mxfp8_stored(c) and not c.policy.reuse_grad_buffer, emulated="warning"),
    row("mxfp8-gather-without-overlap-gives-nan", lambda c: ", ".join(f"{name}={str(bool(c.ddp(name))).lower()}" for name in _OVERLAPS),
        "both overlaps: without them the loss was NaN from the second step on",
        f"ddp.overlap_grad_reduce=true ddp.overlap_param_gather=true, or {PLAIN_WEIGHTS}", "Megatron-LM#2272, fixed by #4769",
        about="mxfp8 stored", when=lambda c: c.core and _mxfp8_stored(c) and c.policy.reuse_grad_buffer and not _overlaps(c), holds=(BEFORE_017,), emulated="silent"),
    warning("mxfp8-gather-evaluates-stale-weights", "evaluation between steps with an overlapped MXFP8 parameter gather",
        "evaluation on saved checkpoints in other people's scripts: during the run the gathered weights can be wrong. mpbridge's engine stages them first",
        f"train.eval_interval=null, or {PLAIN_WEIGHTS}", "Megatron-Bridge#3727, Megatron-LM#4562",
        about="mxfp8 stored", when=lambda c: c.core and _mxfp8_stored(c) and c.policy.reuse_grad_buffer and _overlaps(c), emulated="silent"),
    warning("mxfp8-without-gather-costs-memory", "MXFP8 with parameters stored in 16 bits",
        "fp8_param_gather with reuse_grad_buf_for_mxfp8_param_ag: otherwise both copies are kept, at two more bytes per parameter",
        "mixed_precision.fp8_param_gather=true mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=true ddp.overlap_grad_reduce=true "
        "ddp.overlap_param_gather=true, or accept the memory (mpbridge memory)",
        "megatron-core 0.16.1 optimizer_config.py __post_init__",
        about="mxfp8", when=_gathers_wide, emulated="silent"),
    row("reused-buffer-with-overlapped-step", "reuse_grad_buf_for_mxfp8_param_ag with overlap_param_gather_with_optimizer_step",
        "one of them: the step would overwrite gradients that are still being read",
        "optimizer.overlap_param_gather_with_optimizer_step=false", "Megatron-LM core/optimizer/optimizer_config.py (d98e8a64)",
        about="mxfp8 stored", when=lambda c: c.policy.reuse_grad_buffer and c.run.optimizer.overlap_param_gather_with_step, emulated="warning"),
    row("keep-fp32-matches-nothing", _dead_names,
        "globs over names such as 'decoder.layers.0.mlp.router.weight' or 'decoder.final_layernorm.weight'",
        "correct the glob ('*router.weight')", "OLMo-core float8: an exclusion that excludes nothing is an error"),
    row("keep-fp32-of-a-tied-embedding", "keep_fp32 names the word embeddings, which the output layer shares",
        "an untied embedding: a tied output layer would multiply 16-bit activations by FP32 weights",
        "model.share_embeddings_and_output_weights=false, or a narrower glob; for FP32 logits mixed_precision.logit_dtype=fp32", "mpbridge/backend/models/gpt.py",
        when=lambda c: c.run.shape.tied and kept_fp32(c.policy, "embedding.word_embeddings.weight")),
    row("fp32-storage-under-16-bit-compute", "params_dtype=fp32 with {c.policy.compute.short} compute on {c.run.engine}",
        "16-bit parameters with an FP32 main copy: megatron-core's Float16Module casts the whole model",
        f"{_SHARDED}, or mixed_precision.params_dtype=null", "megatron-core 0.16.1 transformer/module.py Float16Module",
        about="fp32_storage", when=lambda c: not c.traits.wide_storage and c.policy.params is DType.FP32 and c.policy.compute is not DType.FP32,
        cure_here=lambda c: "" if _shards_instead(c) else "mixed_precision.params_dtype=null"),
    row("fp16-parameters-alone", "main_params_dtype=fp16 without a precision-aware optimizer: FP16 parameters as their own main copy",
        "FP32 main weights, or FP16 ones kept by FusedAdam: otherwise updates below 2**-11 of a weight are lost, and small weights underflow",
        "mixed_precision.main_params_dtype=fp32", "arXiv 1710.03740, section 3.1",
        about="fp16", when=lambda c: c.policy.narrow_alone and c.policy.params is DType.FP16),
    row("full-16-bit-with-distributed-optimizer", "{c.policy.params.short} parameters as their own main copy, sharded",
        "plain DDP or FSDP2: the distributed optimizer silently creates FP32 main weights and moments regardless",
        "ddp.use_distributed_optimizer=false ddp.overlap_param_gather=false, or engine=fsdp2",
        "megatron-core 0.16.1 distrib_optimizer.py _build_model_and_main_param_groups; torchtitan#1646",
        about="own_copy", when=lambda c: c.core and c.policy.narrow_alone and c.run.optimizer.distributed, cure_here=lambda c: c.plain_ddp + (f", or {_SHARDED}" if _shards_instead(c) else "")),
    row("full-16-bit-with-fp32-reduction", "{c.policy.params.short} parameters as their own main copy with FP32 gradients",
        "gradients in the parameters' dtype: torch rejects any other dtype in .grad",
        "mixed_precision.grad_reduce_in_fp32=false", "torch 2.13: assigning .grad of another dtype raises",
        about="own_copy", when=lambda c: c.traits.main_weights != "optimizer" and c.policy.narrow_alone and c.policy.reduce is DType.FP32),
    warning("fp32-accumulation-has-no-effect", "reduce_scatter_with_fp32_accumulation=true with FP32 gradients",
        "16-bit gradients: FP32 ones accumulate in FP32 anyway",
        "ddp.reduce_scatter_with_fp32_accumulation=false, or mixed_precision.grad_reduce_in_fp32=false", ARGUMENTS,
        about="fp32_grads", when=lambda c: c.policy.reduce is DType.FP32 and c.ddp("reduce_scatter_with_fp32_accumulation")),
    row("fp32-accumulation-with-optimizer-instances",
        lambda c: f"reduce_scatter_with_fp32_accumulation with {c.run.instances} optimizer instances",
        "one instance",
        "ddp.num_distributed_optimizer_instances=1", "megatron-core 0.16.1 param_and_grad_buffer.py _ParamAndGradBucketGroup",
        when=lambda c: c.core and c.ddp("reduce_scatter_with_fp32_accumulation") and c.run.instances > 1),
    row("optimizer-instances-without-ranks", _undivided,
        "the distributed optimizer, and a number of instances that divides the data-parallel ranks, also those of experts",
        "ddp.num_distributed_optimizer_instances=1", "megatron-core 0.16.1 parallel_state.py initialize_model_parallel, distributed_data_parallel.py"),
    warning("loss-scale-is-not-read", lambda c: f"loss_scale={say(c.policy.loss_scale and c.policy.loss_scale.static)} with weights that are their own main copy",
        "none: megatron-core's plain optimizer of such weights does not scale the loss",
        "mixed_precision.loss_scale=null", "megatron-core 0.16.1 optimizer/__init__.py, optimizer.py FP32Optimizer",
        when=lambda c: c.core and c.policy.loss_scale is not None and own_main(c.policy) and not c.run.optimizer.distributed),
    row("fatal-nan-check-with-dynamic-loss-scale", lambda c: next((f"{name}=true with a dynamic loss scale" for name in _FATAL if c.ddp(name)), ""),
        "no fatal check: a dynamic scale finds its value by overflowing",
        "ddp.check_for_nan_in_grad=false ddp.check_for_large_grads=false (the recipe's plan does it)",
        f"megatron-core 0.16.1 param_and_grad_buffer.py check_grads; {ARGUMENTS}",
        about="fp16", when=lambda c: c.policy.compute is DType.FP16 and c.policy.loss_scale is not None and c.policy.loss_scale.dynamic),
)  # fmt: skip
