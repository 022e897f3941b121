"""Plain torch FSDP2: a recipe as the Python that shards a model with `fully_shard`."""

from __future__ import annotations

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.interop.stacks.data_comment import commented
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.sharded_torch import (
    SPELL,
    filter_lines,
    regions_there,
    scaler_arguments,
    torch_meaning,
    torch_scaler,
)
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant

NAME = "fsdp2"
VERSIONS = {"2.13": "torch 2.13, torchao 0.18"}
DEFAULT_VERSION = "2.13"
SCALINGS = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp", "mxfp8": "mxfp8"}
TORCHAO = {
    "tensorwise": Quant(format="hybrid", scaling="tensorwise"),
    "rowwise": Quant(format="e4m3", scaling="rowwise"),
    "rowwise_gw_hp": Quant(format="e4m3", scaling="rowwise_gw_hp"),
    "mxfp8": Quant(format="e4m3", scaling="mxfp8"),
}
"""Scaling -> what torchao 0.18 runs under its name for it (float8/config.py, prototype/moe_training)."""
EXPERTS = (
    "torchao converts only torch.nn.Linear, which can include the router; experts in 3-D parameters stay as they are"
)
"""What happens to the experts of a mixture."""


def export(request: Request) -> Export:
    """Python to paste around a model called `model` with blocks `model.layers`."""
    policy = request.policy
    theirs = torch_meaning(
        policy,
        fused_adam=True,
        autocast=policy.autocast is not None,
        hands_on=True,
        scaler=torch_scaler(policy.loss_scale, policy),
        regions=regions_there(policy, TORCHAO, edges=True),
    )
    lines = []
    if theirs.main is not None:
        lines.append(
            Line(fidelity="exact", fact="main weights", text="Transformer Engine's FusedAdam holds them, on CUDA only")
        )
    lines += compared(request.ours, theirs, NAME)
    piece = Fragment(name="python", text=commented(NAME, theirs, _python(policy, theirs)))
    return Export(stack=NAME, version=request.version, pieces=(piece,), meaning=theirs, lines=tuple(lines))


def _python(policy: PrecisionPolicy, theirs: Meaning) -> str:
    quant = theirs.regions[-1].quant
    lines = ["import torch", "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard", ""]
    lines += [f"model.to(torch.{SPELL[theirs.storage]})"]
    lines += _quantized(quant, policy) if quant is not None else []
    lines += [
        "policy = MixedPrecisionPolicy(",
        f"    param_dtype=torch.{SPELL[theirs.compute]},",
        f"    reduce_dtype=torch.{SPELL[theirs.wire]},",
        f"    output_dtype=torch.{SPELL[theirs.output or theirs.compute]},",
        "    cast_forward_inputs=False,",
        ")",
        "for block in model.layers:",
        "    fully_shard(block, mp_policy=policy)",
        "fully_shard(model, mp_policy=policy)",
        *_autocast(theirs),
        *_optimizer(theirs),
    ]
    if theirs.loss_scale is not None:
        lines += [
            "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler",
            f"scaler = ShardedGradScaler({scaler_arguments(theirs.loss_scale)})",
        ]
    return "\n".join(lines)


def _autocast(theirs: Meaning) -> list[str]:
    if theirs.autocast is None:
        return []
    return [
        f'model.forward = torch.autocast("cuda", dtype=torch.{SPELL[theirs.autocast]})(model.forward)',
    ]


def _quantized(quant: Quant, policy: PrecisionPolicy) -> list[str]:
    lines = filter_lines(policy, "len(model.layers)")
    if quant.scaling == "mxfp8":
        return [
            *lines,
            "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe",
            "from torchao.quantization import quantize_",
            "config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_RCEIL)",
            "quantize_(model, config, quantized)",
        ]
    return [
        *lines,
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
        f'config = Float8LinearConfig.from_recipe_name("{SCALINGS[quant.scaling]}")',
        "convert_to_float8_training(model, config=config, module_filter_fn=quantized)",
    ]


def _optimizer(theirs: Meaning) -> list[str]:
    if theirs.main is None:
        return ["optimizer = torch.optim.AdamW(model.parameters(), fused=True)"]
    moments = {DType.FP32: "float32", DType.BF16: "bfloat16", DType.FP16: "float16", DType.UINT8: "uint8"}
    return [
        "from transformer_engine.pytorch.optimizers import FusedAdam",
        "optimizer = FusedAdam(",
        "    model.parameters(), master_weights=True, store_param_remainders=True,",
        f"    exp_avg_dtype=torch.{moments[theirs.exp_avg]}, exp_avg_sq_dtype=torch.{moments[theirs.exp_avg_sq]},",
        ")",
    ]
