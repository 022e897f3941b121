"""DeepSpeed: a recipe as its JSON configuration.

Read at 0.19.8: runtime/config.py, runtime/engine.py, runtime/precision_config.py. The wire and the accumulator have separate settings.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.precision.policy import LossScale, PrecisionPolicy

NAME = "deepspeed"
VERSIONS = {"0.19": "0.19.8"}
DEFAULT_VERSION = "0.19"
OVERFLOW = (
    "check_grad_overflow is also on for bf16: such a step is skipped, as in mpbridge; Megatron-LM's own loop stops"
)
"""The default reaction to overflowing gradients (mpbridge's is train.faults.Nonfinite)."""
COSTS = {
    "quantization": "16-bit GEMMs",
    "modules": "16-bit GEMMs",
    "keep_fp32": "data_types.keep_in_fp32_modules keeps buffers of named modules, no parameters",
    "autocast": "torch_autocast, with FP32 storage, instead of bf16.enabled",
    "output": "the whole model is in one dtype",
    "pipeline": "its pipeline engine sends what a stage returns",
    "residual_fp32": "the whole model is in one dtype",
    "logits": "the whole model is in one dtype",
    "router": "its TopKGate computes in FP32 where the model uses deepspeed.moe, else the model's code decides",
    "softmax_fp32": "the attention kernel decides",
    "sharded": "written for ZeRO 1, whose accumulator can be FP32; imported, it becomes a recipe of the megatron-core engine",
    "loss_scale": "only fp16 has a loss scale; its initial value is a power of two, its window and minimum are whole numbers above 0",
}
"""Row -> the nearest equivalent there."""


def export(request: Request) -> Export:
    """The JSON on ZeRO 1, whose accumulator can be FP32."""
    policy = request.policy.settled()
    theirs = _meaning(policy)
    lines = []
    low = {policy.exp_avg, policy.exp_avg_sq} - {None, DType.FP32}
    if low and theirs.exp_avg is DType.FP32:
        text = "bf16_optimizer_states requires bf16_master_weights_and_grads: BF16 moments imply BF16 weights"
        lines.append(Line(fidelity="different", fact="moments", text=text))
    if theirs.autocast is not None:
        text = "torch_autocast reduces in its own dtype regardless of communication_data_type"
        lines.append(Line(fidelity="exact", fact="wire", text=text))
    if policy.mixed and theirs.main is DType.FP32 and policy.loss_scale is None:
        lines.append(Line(fidelity="exact", fact="non-finite gradients", text=OVERFLOW))
    lines += compared(request.ours, theirs, COSTS)
    piece = Fragment(name="ds_config.json", text=json.dumps(_config(policy, theirs), indent=2))
    return Export(stack=NAME, version=request.version, pieces=(piece,), meaning=theirs, lines=tuple(lines))


def _own(policy: PrecisionPolicy) -> bool:
    return (policy.main_params or DType.FP32) is policy.params and policy.params is DType.BF16


def _autocast(policy: PrecisionPolicy) -> bool:
    """Whether torch_autocast expresses it: FP32 parameters, cast per operation."""
    return policy.autocast is not None and policy.params is DType.FP32 and policy.loss_scale is None


def _meaning(policy: PrecisionPolicy) -> Meaning:
    base, accumulator = policy.compute, policy.accumulate or policy.reduce
    if _autocast(policy):  # gradients are reduced in the autocast dtype there, and accumulate in the parameters'
        return Meaning(
            storage=DType.FP32, compute=base, autocast=base, main=DType.FP32, wire=base, accumulator=DType.FP32, sharded="optimizer",
        )  # fmt: skip
    own = _own(policy)
    return Meaning(
        storage=base,
        compute=base,
        main=None if own else DType.FP32,
        wire=policy.reduce,
        accumulator=accumulator,
        optimizer_reads=DType.FP32 if not own and accumulator is not DType.FP32 else None,
        exp_avg=DType.BF16 if own else DType.FP32,
        exp_avg_sq=DType.BF16 if own else DType.FP32,
        sharded="optimizer",
        loss_scale=_scale(policy),
    )


def _scale(policy: PrecisionPolicy) -> LossScale | None:
    """The loss scale as its JSON can express it: only under FP16, an initial scale that is a power of two, a window and a minimum that are whole and above 0."""
    scale = policy.loss_scale
    if scale is None or policy.compute is not DType.FP16:
        return None
    if scale.static is not None:
        return scale
    return dataclasses.replace(
        scale,
        initial=2.0 ** round(math.log2(scale.initial)),
        window=max(1, round(scale.window)),
        minimum=max(1, round(scale.minimum)),
    )


def _config(policy: PrecisionPolicy, theirs: Meaning) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if _autocast(policy):
        return {
            "torch_autocast": {"enabled": True, "dtype": policy.compute.value},
            "zero_optimization": {"stage": 1},
        }
    if policy.compute is DType.BF16:
        config["bf16"] = {"enabled": True}
        if theirs.main is None:
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    elif policy.compute is DType.FP16:
        config["fp16"] = _fp16(theirs.loss_scale)
    config["zero_optimization"] = {"stage": 1}
    if policy.mixed:
        config["communication_data_type"] = theirs.wire.short
        config["data_types"] = {"grad_accum_dtype": theirs.accumulator.short}
    return config


def _fp16(scale: LossScale | None) -> dict[str, Any]:
    found: dict[str, Any] = {"enabled": True}
    if scale is None:
        return found
    if scale.static is not None:
        return found | {"loss_scale": scale.static}
    return found | {
        "loss_scale": 0,
        "initial_scale_power": round(math.log2(scale.initial)),
        "loss_scale_window": scale.window,
        "hysteresis": scale.hysteresis,
        "min_loss_scale": scale.minimum,
    }
