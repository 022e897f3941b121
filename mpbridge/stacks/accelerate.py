"""Hugging Face accelerate: a recipe as an Accelerator with FSDP2.

Read at 1.15.0: accelerator.py, utils/dataclasses.py, utils/fsdp_utils.py. Its autocast stays on over FSDP1, not over FSDP2 (seen live by scripts/witness_stacks.py). Its
YAML cannot name a reduction dtype, so the policy is Python.
"""

from __future__ import annotations

import dataclasses

from mpbridge.formats import DType
from mpbridge.precision.policy import PrecisionPolicy, Quant, Region
from mpbridge.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.stacks.meaning import Meaning, of_policy
from mpbridge.stacks.sharded_torch import SPELL, missing_scalings, torch_meaning

NAME = "accelerate"
VERSIONS = {"1.15": "1.15.0"}
DEFAULT_VERSION = "1.15"
SCALINGS = {"delayed": "TERecipeKwargs", "mxfp8": "TERecipeKwargs", "tensorwise": "AORecipeKwargs"}


def export(request: Request) -> Export:
    """Python that makes the Accelerator; the model is loaded in FP32 unless the recipe keeps no FP32 weights at all."""
    policy = request.policy
    lines = list(missing_scalings(policy, SCALINGS, "TERecipeKwargs(use_mxfp8_block_scaling=True)"))
    theirs = _meaning(policy)
    if policy.loss_scale is not None:
        text = "its GradScaler starts at 2**16, grows every 2000 steps and has no hysteresis"
        lines.append(Line(fidelity="different", fact="loss scale", text=text))
    if policy.keep_fp32:
        lines.append(
            Line(fidelity="different", fact="keep_fp32", text="pass them as ignored_params: neither cast nor sharded")
        )
    lines += compared(of_policy(policy, engine=request.engine), theirs, ignore=("loss_scale",))
    piece = Fragment(name="python", text=_python(request, theirs))
    return Export(stack=NAME, version=request.version, pieces=(piece,), meaning=theirs, lines=tuple(lines))


def _meaning(policy: PrecisionPolicy) -> Meaning:
    theirs = dataclasses.replace(torch_meaning(policy, scalings=tuple(SCALINGS)), autocast=None)
    if theirs.storage is not DType.FP32:  # a 16-bit module under mixed_precision="no"
        return theirs
    return dataclasses.replace(
        theirs, regions=tuple(as_run(region) for region in theirs.regions if region.first is None)
    )


def as_run(region: Region) -> Region:
    """TERecipeKwargs drops values that equal accelerate's own defaults, and Transformer Engine's apply: hybrid, a history of 1024, the maximum."""
    quant = region.quant
    if quant is None or quant.scaling != "delayed":
        return region
    run = dataclasses.replace(quant, format="hybrid", amax_history=1024, amax_algo="max", margin=0, wgrad=True)
    return dataclasses.replace(region, quant=run)


def _python(request: Request, theirs: Meaning) -> str:
    policy, quant = request.policy, request.policy.quant
    full = theirs.storage is not DType.FP32 or theirs.compute is DType.FP32
    known = quant is not None and quant.scaling in SCALINGS
    mode = "fp8" if known else "no" if full else theirs.compute.short
    lines = ["import torch", "from accelerate import Accelerator, FullyShardedDataParallelPlugin"]
    lines += ["from torch.distributed.fsdp import MixedPrecisionPolicy"]
    handlers = []
    if known and quant is not None:
        lines.append(f"from accelerate.utils import {SCALINGS[quant.scaling]}")
        handlers = [_handler(quant)]
        if SCALINGS[quant.scaling] == "AORecipeKwargs":
            lines.append("from torchao.float8 import Float8LinearConfig")
    lines += [
        "",
        f"model.to(torch.{SPELL[theirs.storage]})",
        "plugin = FullyShardedDataParallelPlugin(",
        "    fsdp_version=2,",
        "    mixed_precision_policy=MixedPrecisionPolicy(",
        f"        param_dtype=torch.{SPELL[theirs.compute]}, reduce_dtype=torch.{SPELL[theirs.wire]},"
        f" output_dtype=torch.{SPELL[policy.output]},",
        "    ),",
        ")",
        f'accelerator = Accelerator(mixed_precision="{mode}", fsdp_plugin=plugin'
        + (f", kwargs_handlers=[{handlers[0]}]" if handlers else "")
        + ")",
    ]
    return "\n".join(lines)


def _handler(quant: Quant) -> str:
    if quant.scaling == "tensorwise":
        return 'AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("tensorwise"))'
    if quant.scaling == "mxfp8":
        return 'TERecipeKwargs(fp8_format="E4M3", use_mxfp8_block_scaling=True)'
    return f'TERecipeKwargs(fp8_format="{quant.format.upper()}", amax_history_len={quant.amax_history}, amax_compute_algo="{quant.amax_algo}")'
