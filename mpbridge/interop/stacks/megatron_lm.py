"""Megatron-LM: a recipe as command-line flags.

Read at d98e8a64 (core 0.20.0) against its own parser: defaults of megatron/training/arguments.py and of TransformerConfig.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping

from mpbridge.common.facts import BESIDE_ADAM, EMERGING
from mpbridge.common.formats import DType
from mpbridge.interop.stacks import megatron_modules
from mpbridge.interop.stacks.base import Export, Fragment, Line, Request, exported
from mpbridge.interop.stacks.megatron_lm_arguments import CORE, NAME, own_settings
from mpbridge.interop.stacks.megatron_lm_arguments import VERSIONS as VERSIONS
from mpbridge.interop.stacks.megatron_lm_import import read
from mpbridge.interop.stacks.optimizers import at_ours
from mpbridge.interop.stacks.reading import state_word
from mpbridge.interop.stacks.sharded_torch import environment, process_wide
from mpbridge.precision.megatron_spec.versions import BEFORE_017, BEFORE_018, SINCE_017
from mpbridge.precision.policy import PrecisionPolicy, Quant

Flags = Iterator[str]


def export(request: Request) -> Export:
    """The precision part of a Megatron-LM command line."""
    policy, core = request.policy, CORE[request.version]
    # a rule under `modules` that matches megatron-core's linears needs the file
    rules = any(region not in request.unnamed for region in policy.module_regions)
    words = [*_flags(request, core), *(("--te-precision-config-file precision.yaml",) if rules else ()), *_model(request, core), *_optimizer(request)]  # fmt: skip
    pieces = [Fragment(name="arguments", text=" \\\n".join(words))]
    if rules:
        pieces.append(Fragment(name="precision.yaml", text=megatron_modules.rules_file(request, core=core)))
    lines = [*_unsayable(request), *(megatron_modules.notes(request) if rules else ()), *process_wide(policy.quants)]
    # the flags' meaning, with the rules of the file beside them, and the softmax of an implementation that reads its flag
    theirs = read(shlex.split(" ".join(words)), version=request.version).meaning
    regions = tuple(megatron_modules.regions_said(request, core=core))
    theirs = dataclasses.replace(theirs, regions=regions, softmax_fp32=policy.softmax_fp32)
    pieces += environment(policy.quants)
    why = megatron_modules.reasons(request, core)
    made = exported(request, NAME, theirs, pieces, lines, why, said=[*_updates(request)])
    unknown = request.run is None and BEFORE_017.holds(core) and any(quant.bits == 4 for quant in policy.quants)
    text = f"a model without Mamba layers: a hybrid of megatron-core {core} never enters the FP4 context (--config FILE: judged for that model)"
    return dataclasses.replace(made, assumed=(text,)) if unknown else made


def _has_dtypes(request: Request) -> bool:
    """Whether Megatron-FSDP shards and its three dtype flags exist: it reads neither of the two about the reduction."""
    return request.main_weights == "wrapper" and SINCE_017.holds(CORE[request.version])


def _narrow_main(policy: PrecisionPolicy) -> bool:
    """Whether --main-params-dtype sets the main weights' dtype: only fp16, and only with a precision-aware optimizer."""
    return bool(policy.precision_aware) and policy.main_params is DType.FP16


def _flags(request: Request, core: str) -> Flags:
    policy, wrapped = request.policy, _has_dtypes(request)
    if policy.compute is not DType.FP32:
        yield f"--{policy.compute.short}"
    if policy.reduce is DType.FP32 and not wrapped:
        yield "--accumulate-allreduce-grads-in-fp32"
    elif policy.compute is DType.BF16 and not wrapped:
        yield "--grad-reduce-in-bf16"
    scale = policy.loss_scale
    if scale is not None and scale.static is not None:
        yield f"--loss-scale {_number(scale.static)}"
    elif scale is not None:
        yield f"--initial-loss-scale {_number(scale.initial)}"
        yield f"--min-loss-scale {_number(scale.minimum)}"
        yield f"--loss-scale-window {_number(scale.window)}"
        yield f"--hysteresis {scale.hysteresis}"
    quant = megatron_modules.in_core(policy.quant, request, core)
    if quant is not None:
        yield from _quantization(quant)
        if policy.reuse_grad_buffer:
            yield "--reuse-grad-buf-for-mxfp8-param-ag"
        if policy.ends is not None:
            first, last = policy.ends
            yield f"--first-last-layers-bf16 --num-layers-at-start-in-bf16 {first} --num-layers-at-end-in-bf16 {last}"


def _quantization(quant: Quant) -> Flags:
    low = f"fp{quant.bits}"
    # the recipe is always written: alone, --fp8-format means delayed scaling here and tensorwise in Megatron Bridge
    yield f"--{low}-format {quant.format} --{low}-recipe {quant.scaling}"
    if quant.factory:
        yield f"--{low}-quantizer-factory {quant.factory}"
    if quant.scaling == "delayed":
        yield f"--fp8-amax-history-len {quant.amax_history} --fp8-amax-compute-algo {quant.amax_algo}"
        if quant.margin:
            yield f"--fp8-margin {quant.margin}"
        if not quant.wgrad:
            yield "--no-fp8-wgrad"
    if quant.stored:
        yield f"--{low}-param-gather"


def _model(request: Request, core: str) -> Flags:
    policy = request.policy
    if policy.residual_fp32:
        yield "--fp32-residual-connection"
    if megatron_modules.softmax_of(request, core=core):
        yield "--attention-softmax-in-fp32"
    if policy.router is not None:
        yield f"--moe-router-dtype {policy.router.short}"
    if policy.logits is not None and SINCE_017.holds(core):
        yield f"--output-logit-dtype {policy.logits.short}"


def _optimizer(request: Request) -> Flags:
    policy, wrapper = request.policy, request.main_weights == "wrapper"
    needed = policy.precision_aware or policy.stored or request.main_weights == "optimizer"
    if not wrapper and request.optimizer not in BESIDE_ADAM and (needed or request.ours.sharded != "nothing"):
        yield "--use-distributed-optimizer"
    if policy.precision_aware:
        yield "--use-precision-aware-optimizer"
        yield f"--main-grads-dtype {(policy.main_grads or DType.FP32).short}"
        yield f"--main-params-dtype {'fp16' if _narrow_main(policy) else 'fp32'}"
        first, second = (state_word(state or DType.FP32) for state in (policy.exp_avg, policy.exp_avg_sq))
        yield f"--exp-avg-dtype {first} --exp-avg-sq-dtype {second}"
    if wrapper:
        yield "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"
        yield "--ckpt-format fsdp_dtensor"
    unknown = request.optimizer in EMERGING and BEFORE_018.holds(CORE[request.version])
    if request.optimizer != "adam" and not unknown:
        # since 0.18 the distributed optimizer of what is not Adam is the layer-wise one
        layered = request.optimizer == "dist_muon" and not BEFORE_018.holds(CORE[request.version])
        yield f"--optimizer {'muon --use-distributed-optimizer' if layered else request.optimizer}"
        yield from filter(None, _updates(request).values())
    if _has_dtypes(request):
        reduce, add = policy.reduce.short, (policy.accumulate or policy.reduce).short
        yield f"--megatron-fsdp-main-params-dtype {(policy.main_params or DType.FP32).short}"
        yield f"--megatron-fsdp-main-grads-dtype {add} --megatron-fsdp-grad-comm-dtype {reduce}"


def _updates(request: Request) -> Mapping[str, str]:
    """The optimizer's own settings that can be said -> the flags that say them, '' where none has to."""
    there = own_settings(request.version)
    said = ((name, at_ours(there, name), value) for name, value in request.updates.items())
    return {name: one.flags(value) for name, one, value in said if one and one.option and one.takes(value)}


def _unsayable(request: Request) -> Iterator[Line]:
    policy = request.policy
    main = policy.settled().main_params
    attention = any(quant.attention != "none" for quant in policy.quants)
    other = main not in (None, DType.FP32) and not _has_dtypes(request) and not _narrow_main(policy)
    rows = (
        (other, "main_params_dtype", f"--{policy.compute.short} always creates FP32 main weights; {_NEAREST.get(main or DType.FP32)}"),
        (policy.remainders is False and policy.precision_aware and main is DType.FP32,
         "store_param_remainders", "no flag, it is always on: the same FP32 value in 2 bytes less per parameter"),
        (attention, "fp8_dot_product_attention", "no flag; attention stays in 16 bits"),
    )  # fmt: skip
    yield from (Line(fidelity="impossible", fact=fact, text=text) for applies, fact, text in rows if applies)


_NEAREST = {
    DType.BF16: "--main-params-dtype has no bf16; nearest: --use-precision-aware-optimizer with BF16 moments, 6 bytes per parameter more than requested"
    " for (unsharded)",
    DType.FP16: "nearest: --use-precision-aware-optimizer --main-params-dtype fp16, a separate copy of the parameters",
}
"""Main weights that no flag expresses -> the nearest alternative."""


def _number(value: float) -> str:
    """In full: 4294967296, 0.5."""
    return str(int(value)) if value == int(value) else repr(value)
