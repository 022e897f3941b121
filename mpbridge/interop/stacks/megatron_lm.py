"""Megatron-LM: a recipe as command-line flags.

Read at d98e8a64 (core 0.20.0) against its own parser: defaults of megatron/training/arguments.py and of TransformerConfig.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from mpbridge.common.facts import BESIDE_ADAM, EMERGING
from mpbridge.common.formats import DType
from mpbridge.interop.stacks import megatron_modules
from mpbridge.interop.stacks.base import Export, Fragment, Line, Request, exported
from mpbridge.interop.stacks.megatron_lm_arguments import CORE, NAME, own_settings, takes
from mpbridge.interop.stacks.megatron_lm_arguments import VERSIONS as VERSIONS
from mpbridge.interop.stacks.megatron_lm_import import read
from mpbridge.interop.stacks.optimizers import at_ours
from mpbridge.interop.stacks.reading import state_word
from mpbridge.interop.stacks.sharded_torch import environment, process_wide
from mpbridge.precision.megatron_spec.versions import BEFORE_017, BEFORE_018, SINCE_017
from mpbridge.precision.policy import PrecisionPolicy

_OPTION = re.compile(r" (?=--)")
Flags = Iterator[tuple[Any, str]]
"""(whether it applies, the words) of each flag."""


def export(request: Request) -> Export:
    """The precision part of a Megatron-LM command line."""
    policy, core = request.policy, CORE[request.version]
    # a rule under `modules` that matches megatron-core's linears needs the file
    rules = any(region not in request.unnamed for region in policy.module_regions)
    file = (rules, "--te-precision-config-file precision.yaml")
    flags = (*_flags(request, core), file, *_model(request, core), *_optimizer(request))
    # what the parser refuses is not written: the meaning of the rest says what is lost
    written = [
        [one for one in _OPTION.split(words) if takes(one, request.version)] for applies, words in flags if applies
    ]
    words = [" ".join(options) for options in written if options]
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
    policy, wrapped, scale = request.policy, _has_dtypes(request), request.policy.loss_scale
    compute, wide, quant = (
        policy.compute,
        policy.reduce is DType.FP32,
        megatron_modules.in_core(policy.quant, request, core),
    )
    yield from (
        (compute is not DType.FP32, f"--{compute.short}"),
        (wide and not wrapped, "--accumulate-allreduce-grads-in-fp32"),
        (not wide and not wrapped and compute is DType.BF16, "--grad-reduce-in-bf16"),
    )
    if scale is not None:
        dynamic = scale.static is None
        yield from (
            (not dynamic, f"--loss-scale {_number(scale.static or 0)}"), (dynamic, f"--initial-loss-scale {_number(scale.initial)}"),
            (dynamic, f"--min-loss-scale {_number(scale.minimum)}"), (dynamic, f"--loss-scale-window {_number(scale.window)}"),
            (dynamic, f"--hysteresis {scale.hysteresis}"),
        )  # fmt: skip
    if quant is not None:
        low, delayed, (first, last) = f"fp{quant.bits}", quant.scaling == "delayed", policy.ends or (0, 0)
        yield from (
            # the recipe is always written: alone, --fp8-format means delayed scaling here and tensorwise in Megatron Bridge
            (True, f"--{low}-format {quant.format} --{low}-recipe {quant.scaling}"),
            (quant.factory, f"--{low}-quantizer-factory {quant.factory}"),
            (delayed, f"--fp8-amax-history-len {quant.amax_history} --fp8-amax-compute-algo {quant.amax_algo}"),
            (delayed and quant.margin, f"--fp8-margin {quant.margin}"),
            (delayed and not quant.wgrad, "--no-fp8-wgrad"),
            (quant.stored, f"--{low}-param-gather"),
            (policy.reuse_grad_buffer, "--reuse-grad-buf-for-mxfp8-param-ag"),
            (policy.ends is not None, f"--first-last-layers-bf16 --num-layers-at-start-in-bf16 {first} --num-layers-at-end-in-bf16 {last}"),
        )  # fmt: skip


def _model(request: Request, core: str) -> Flags:
    policy, logits = request.policy, request.policy.logits if SINCE_017.holds(core) else None
    yield from (
        (policy.residual_fp32, "--fp32-residual-connection"),
        (megatron_modules.softmax_of(request, core=core), "--attention-softmax-in-fp32"),
        (policy.router, f"--moe-router-dtype {policy.router and policy.router.short}"),
        (logits, f"--output-logit-dtype {logits and logits.short}"),
    )


def _optimizer(request: Request) -> Flags:
    policy, wrapper, name, wide = request.policy, request.main_weights == "wrapper", request.optimizer, DType.FP32
    aware, later = policy.precision_aware, not BEFORE_018.holds(CORE[request.version])
    needed = aware or policy.stored or request.main_weights == "optimizer" or request.ours.sharded != "nothing"
    first, second = (state_word(state or wide) for state in (policy.exp_avg, policy.exp_avg_sq))
    named = name != "adam" and (later or name not in EMERGING)
    yield from (
        (needed and not wrapper and name not in BESIDE_ADAM, "--use-distributed-optimizer"),
        (aware, "--use-precision-aware-optimizer"),
        (aware, f"--main-grads-dtype {(policy.main_grads or wide).short}"),
        (aware, f"--main-params-dtype {'fp16' if _narrow_main(policy) else 'fp32'}"),
        (aware, f"--exp-avg-dtype {first} --exp-avg-sq-dtype {second}"),
        (wrapper, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"),
        (wrapper, "--ckpt-format fsdp_dtensor"),
        # since 0.18 the distributed optimizer of what is not Adam is the layer-wise one
        (named, f"--optimizer {'muon --use-distributed-optimizer' if name == 'dist_muon' and later else name}"),
        *((named and flag, flag) for flag in _updates(request).values()),
    )  # fmt: skip
    if _has_dtypes(request):
        reduce, add = policy.reduce.short, (policy.accumulate or policy.reduce).short
        yield True, f"--megatron-fsdp-main-params-dtype {(policy.main_params or wide).short}"
        yield True, f"--megatron-fsdp-main-grads-dtype {add} --megatron-fsdp-grad-comm-dtype {reduce}"


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
