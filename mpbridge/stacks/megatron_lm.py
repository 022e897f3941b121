"""Megatron-LM: a recipe as command-line flags.

Read at d98e8a64 (core 0.20.0) against its own parser: defaults of megatron/training/arguments.py and of TransformerConfig.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mpbridge.formats import DType
from mpbridge.megatron_spec.versions import SINCE_017
from mpbridge.precision.policy import PrecisionPolicy, Quant
from mpbridge.stacks import megatron_modules
from mpbridge.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.stacks.meaning import Meaning, of_policy
from mpbridge.stacks.sharded_torch import environment, process_wide
from mpbridge.traits import DEFAULT

NAME = "megatron-lm"
VERSIONS = {"0.16": "release core_v0.16", "0.20": "main, d98e8a64"}
"""What was read of it; the first is what the released megatron-core belongs to."""
DEFAULT_VERSION = "0.20"

CORE = {"0.16": "0.16.1", "0.20": "0.20.0"}
"""Version -> the megatron-core that belongs to it."""

Flags = Iterator[str]


def export(request: Request) -> Export:
    """The precision part of a Megatron-LM command line."""
    policy, lines = request.policy, list(_unsayable(request))
    fsdp = request.main_weights == "wrapper"
    softmax = megatron_modules.softmax_of(request, core=_core(request))
    words = [
        *_base(policy),
        *_gradients(policy, fsdp),
        *_scale(policy),
        *_quantization(policy),
        *_model(policy, softmax),
    ]
    words += [*_optimizer(policy, request), *(_megatron_fsdp(policy) if fsdp else ())]
    pieces = [Fragment(name="arguments", text=_wrapped(words))]
    if policy.module_regions:
        pieces.append(Fragment(name="precision.yaml", text=megatron_modules.rules_file(request, core=_core(request))))
        lines += megatron_modules.notes(request)
    pieces += environment(policy.quants)
    lines += process_wide(policy.quants)
    theirs = _meaning(request)
    lines += compared(of_policy(policy, engine=request.engine), theirs, _COSTS)
    return Export(stack=NAME, version=request.version, pieces=tuple(pieces), meaning=theirs, lines=tuple(lines))


_COSTS = {
    "main": "main weights of Megatron-LM start from the 16-bit rounded parameters",
    "storage": "checkpoints hold 16-bit parameters and FP32 main weights",
    "autocast": "no flag; weights and activations are cast by the model instead",
    "accumulator": "one flag is about both; the three --megatron-fsdp-*-dtype flags alone tell them apart (--engine megatron_fsdp)",
    "keep_fp32": "no flag keeps parameters in FP32",
    "output": "no flag",
    "pipeline": "no flag; FP32 under --fp32-residual-connection, else the parameters' dtype",
    "logits": "the flag exists from core 0.20 on",
    "quantization": "--fp8-recipe tensorwise",
    "modules": "--te-precision-config-file names a scaling and a format for whole linears, of layers counted from the start; give --config for its depth",
    "reuse_grad_buffer": "the switch acts beside --fp8-format alone",
}
"""What a difference costs, or the nearest thing there."""


def _core(request: Request) -> str:
    return CORE[request.version]


def _meaning(request: Request) -> Meaning:
    """What the flags amount to in Megatron-LM: sharded FP32 main weights wherever parameters have 16 bits."""
    policy = said(request)
    wide = policy.params is not policy.compute
    policy = on_megatron(policy) if wide or request.main_weights == "optimizer" else policy
    return of_policy(policy, engine=DEFAULT if request.main_weights == "optimizer" else request.engine)


def said(request: Request) -> PrecisionPolicy:
    """The policy that the flags say. What has no flag is as Megatron-LM has it whatever the recipe states."""
    policy, new = request.policy.settled(), SINCE_017.holds(_core(request))
    wide = DType.FP32 if policy.residual_fp32 else policy.compute
    return dataclasses.replace(
        policy,
        accumulate=policy.accumulate if request.main_weights == "wrapper" and new else None,
        autocast=None,
        keep_fp32=(),
        output=policy.compute,
        pipeline=wide,
        logits=policy.logits if new else None,
        remainders=True,
        regions=tuple(megatron_modules.regions_said(request, core=_core(request))),
    )


def on_megatron(policy: PrecisionPolicy) -> PrecisionPolicy:
    """A policy of an FSDP2 recipe in megatron-core's layout: parameters in the compute dtype, main weights beside them."""
    return dataclasses.replace(policy, params=policy.compute, gather=None, main_params=policy.main_params or DType.FP32)


def _base(policy: PrecisionPolicy) -> Flags:
    if policy.compute is not DType.FP32:
        yield f"--{policy.compute.short}"


def _gradients(policy: PrecisionPolicy, fsdp: bool) -> Flags:
    if policy.reduce is DType.FP32:
        yield "--accumulate-allreduce-grads-in-fp32"
    elif policy.compute is DType.BF16 and not fsdp:
        yield "--grad-reduce-in-bf16"


def _scale(policy: PrecisionPolicy) -> Flags:
    scale = policy.loss_scale
    if scale is None:
        return
    if scale.static is not None:
        yield f"--loss-scale {number(scale.static)}"
        return
    yield f"--initial-loss-scale {number(scale.initial)}"
    yield f"--min-loss-scale {number(scale.minimum)}"
    yield f"--loss-scale-window {number(scale.window)}"
    yield f"--hysteresis {scale.hysteresis}"


def _quantization(policy: PrecisionPolicy) -> Flags:
    quant = megatron_modules.in_core(policy.quant)
    if quant is not None:
        yield from _one(quant)
        if policy.reuse_grad_buffer:
            yield "--reuse-grad-buf-for-mxfp8-param-ag"
        if policy.ends is not None:
            first, last = policy.ends
            yield f"--first-last-layers-bf16 --num-layers-at-start-in-bf16 {first} --num-layers-at-end-in-bf16 {last}"
    if policy.module_regions:
        yield "--te-precision-config-file precision.yaml"


def _one(quant: Quant) -> Flags:
    low = "fp4" if quant.bits == 4 else "fp8"
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


def _model(policy: PrecisionPolicy, softmax: bool) -> Flags:
    if policy.residual_fp32:
        yield "--fp32-residual-connection"
    if softmax:
        yield "--attention-softmax-in-fp32"
    if policy.router is not None:
        yield f"--moe-router-dtype {policy.router.short}"
    if policy.logits is not None:
        yield f"--output-logit-dtype {policy.logits.short}"


def _optimizer(policy: PrecisionPolicy, request: Request) -> Flags:
    aware = bool(policy.precision_aware)
    if request.main_weights == "wrapper":
        pass  # its own flags
    elif (
        aware
        or policy.stored
        or (request.run is not None and request.run.facts.optimizer.distributed)
        or request.main_weights == "optimizer"
    ):
        yield "--use-distributed-optimizer"
    if aware:
        yield "--use-precision-aware-optimizer"
        yield f"--main-grads-dtype {(policy.main_grads or DType.FP32).short}"
        yield f"--main-params-dtype {(policy.main_params or DType.FP32).short}"
        yield f"--exp-avg-dtype {_state(policy.exp_avg)} --exp-avg-sq-dtype {_state(policy.exp_avg_sq)}"


def _state(dtype: DType | None) -> str:
    return "fp8" if dtype is DType.UINT8 else (dtype or DType.FP32).short


def _megatron_fsdp(policy: PrecisionPolicy) -> Flags:
    yield "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"
    yield "--ckpt-format fsdp_dtensor"
    reduce, add = policy.reduce.short, (policy.accumulate or policy.reduce).short
    # --accumulate-allreduce-grads-in-fp32 reaches a field that this engine does not read
    yield f"--megatron-fsdp-main-params-dtype {(policy.main_params or DType.FP32).short}"
    yield f"--megatron-fsdp-main-grads-dtype {add} --megatron-fsdp-grad-comm-dtype {reduce}"


def _unsayable(request: Request) -> Iterator[Line]:
    """Facts that no flag of Megatron-LM says."""
    policy = request.policy
    own = policy.settled().main_params is policy.params
    if own and policy.params is not DType.FP32:
        yield _impossible(
            "main_params_dtype",
            f"--{policy.compute.short} always makes FP32 main weights, and --main-params-dtype has no {policy.params.short};"
            " nearest: --use-precision-aware-optimizer with BF16 moments, 6 bytes per parameter more than asked for (unsharded)",
        )
    if policy.remainders is False and policy.precision_aware:
        yield _impossible(
            "store_param_remainders", "no flag, it is on: the same FP32 value in 2 bytes less per parameter"
        )
    new = SINCE_017.holds(_core(request))
    for quant in policy.quants:
        if quant.attention != "none":
            yield _impossible("fp8_dot_product_attention", "no flag; attention stays in 16 bits")
        if quant.bits == 4 and quant.stored and not new:
            yield _impossible("fp4_param_gather", "the flag exists from core 0.20 on; weights are gathered in 16 bits")
    if request.main_weights == "wrapper" and not new:
        yield _impossible("grad_reduce_in_fp32", "the three --megatron-fsdp-*-dtype flags exist from core 0.20 on")


def _impossible(fact: str, text: str) -> Line:
    return Line(fidelity="impossible", fact=fact, text=text)


def number(value: float) -> str:
    """A number in full: 4294967296, 0.5."""
    return str(int(value)) if value == int(value) else repr(value)


def _wrapped(words: list[str]) -> str:
    return " \\\n".join(words)
