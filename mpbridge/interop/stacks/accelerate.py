"""Hugging Face accelerate: a recipe as an Accelerator with FSDP2.

Read at 1.15.0: accelerator.py, utils/dataclasses.py, utils/fsdp_utils.py. Its autocast stays on with FSDP1, but not with FSDP2 (observed by scripts/evidence/witness_stacks.py). Its
YAML cannot name a reduction dtype, so the policy is Python.
"""

from __future__ import annotations

import dataclasses

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Fragment, Request, exported
from mpbridge.interop.stacks.data_comment import commented
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.sharded_torch import (
    SPELL,
    TORCHAO,
    environment,
    filter_lines,
    noted,
    output_layer,
    regions_there,
    scaler_arguments,
    torch_meaning,
    torch_scaler,
)
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant

NAME = "accelerate"
VERSIONS = {"1.15": "1.15.0"}
DEFAULT_VERSION = "1.15"
SCALINGS = {"delayed": "TERecipeKwargs", "mxfp8": "TERecipeKwargs", "tensorwise": "AORecipeKwargs"}
EXPERTS = "only torch.nn.Linear is converted, which can include the router; experts in 3-D parameters stay as they are"
"""What happens to the experts of a mixture."""
DELAYED = "most_recent cannot be set: it is accelerate's default, which accelerate drops, and Transformer Engine's default is max; the rest are TE's defaults"


def export(request: Request) -> Export:
    """Python that creates the Accelerator; the model is loaded in FP32 unless the recipe keeps no FP32 weights."""
    policy = request.policy
    theirs = _meaning(policy)
    quant = theirs.regions[-1].quant
    by_te = quant is not None and SCALINGS[quant.scaling] == "TERecipeKwargs"
    lines = output_layer(quant if by_te else None, "accelerate's convert_model")
    theirs = noted(theirs, lines)
    more = {"quantization": DELAYED} if quant is not None and quant.row.history else {}
    code = Fragment(name="python", text=commented(NAME, theirs, _python(policy, theirs)))
    return exported(request, NAME, theirs, [code, *environment([quant] if quant else ())], lines, more)


def _meaning(policy: PrecisionPolicy) -> Meaning:
    quant = policy.quant
    words = {"tensorwise": TORCHAO["tensorwise"]}
    if quant is not None and quant.scaling == "mxfp8":
        words["mxfp8"] = Quant(format="e4m3", scaling="mxfp8", options=quant.options)
    if quant is not None and quant.scaling == "delayed":
        words["delayed"] = as_run(quant)
    regions = regions_there(policy, words, edges=quant is not None and quant.scaling == "tensorwise")
    theirs = torch_meaning(policy, hands_on=True, regions=regions)
    if _by_ddp(policy):
        theirs = torch_meaning(policy, autocast=True)
        theirs = dataclasses.replace(theirs, wire=theirs.storage, sharded="nothing")
    if _mode(theirs) != "fp16":
        return theirs
    return dataclasses.replace(theirs, loss_scale=torch_scaler(policy.loss_scale, policy))


def _by_ddp(policy: PrecisionPolicy) -> bool:
    """Whether data parallelism is torch's DDP, which is needed for autocast over parameters that are their own main weights: FSDP2 has none."""
    settled = policy.settled()
    own = settled.params is DType.FP32 or settled.main_params is settled.params
    return settled.autocast is not None and own and policy.quant is None


def as_run(quant: Quant) -> Quant:
    """Delayed scaling as TERecipeKwargs passes it on: a value equal to accelerate's own default is dropped, and Transformer Engine's applies.

    The defaults agree (hybrid, 1024, margin 0) except for the algorithm: most_recent is dropped, and max is used.
    """
    return dataclasses.replace(quant, stored=False, amax_algo="max", attention="none")


def _mode(theirs: Meaning) -> str:
    """The value of mixed_precision: 'no' for a module that is not FP32, or computes only in FP32."""
    if theirs.regions[-1].quant is not None:
        return "fp8"
    full = (theirs.storage is not DType.FP32 and theirs.autocast is None) or theirs.compute is DType.FP32
    return "no" if full else theirs.compute.short


def _python(policy: PrecisionPolicy, theirs: Meaning) -> str:
    quant, scale, sharded = theirs.regions[-1].quant, theirs.loss_scale, theirs.sharded != "nothing"
    used = () if quant is None else (SCALINGS[quant.scaling],)
    handlers = [] if quant is None else [_handler(quant)]
    handlers += [] if scale is None else [f"GradScalerKwargs({scaler_arguments(scale)})"]
    ao = used == ("AORecipeKwargs",)
    plugin = [
        "plugin = FullyShardedDataParallelPlugin(", "    fsdp_version=2,", "    mixed_precision_policy=MixedPrecisionPolicy(",
        f"        param_dtype=torch.{SPELL[theirs.compute]}, reduce_dtype=torch.{SPELL[theirs.wire]},"
        f" output_dtype=torch.{SPELL[theirs.output or theirs.compute]},", "    ),", ")",
    ]  # fmt: skip
    arguments = [f'mixed_precision="{_mode(theirs)}"', *(["fsdp_plugin=plugin"] if sharded else ())]
    arguments += [f"kwargs_handlers=[{', '.join(handlers)}]"] if handlers else []
    return "\n".join([
        "import torch", "from accelerate import Accelerator" + (", FullyShardedDataParallelPlugin" if sharded else ""),
        *(["from torch.distributed.fsdp import MixedPrecisionPolicy"] if sharded else ()),
        *(f"from accelerate.utils import {name}" for name in used), *(["from torchao.float8 import Float8LinearConfig"] if ao else ()),
        *(["from accelerate.utils import GradScalerKwargs"] if scale is not None else ()), "",
        *(filter_lines(policy, "model.config.num_hidden_layers") if ao else ()),
        f"model.to(torch.{SPELL[theirs.storage]})", *(plugin if sharded else ()), f"accelerator = Accelerator({', '.join(arguments)})",
    ])  # fmt: skip


def _handler(quant: Quant) -> str:
    if quant.scaling == "tensorwise":
        config = 'Float8LinearConfig.from_recipe_name("tensorwise")'
        return f"AORecipeKwargs(config={config}, module_filter_func=quantized)"
    if quant.scaling == "mxfp8":
        return 'TERecipeKwargs(fp8_format="E4M3", use_mxfp8_block_scaling=True)'
    margin = f", margin={quant.margin}" if quant.margin else ""
    margin += "" if quant.wgrad else ", override_linear_precision=(False, False, True)"
    return (
        f'TERecipeKwargs(fp8_format="{quant.format.upper()}", amax_history_len={quant.amax_history},'
        f' amax_compute_algo="{quant.amax_algo}"{margin})'
    )
