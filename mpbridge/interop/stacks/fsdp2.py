"""Plain torch FSDP2: a recipe as the Python that shards a model with `fully_shard`."""

from __future__ import annotations

import dataclasses

from mpbridge.interop.stacks import sharded_torch as native
from mpbridge.interop.stacks.base import Export, Fragment, Line, Request, exported
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant

NAME = "fsdp2"
VERSIONS = {"2.13": "torch 2.13, torchao 0.18"}
_QUANTS = {quant.scaling: quant for quant in (*native.TORCHAO.values(), Quant(format="e4m3", scaling="mxfp8"))}
"""Scaling -> what torchao runs for it (float8/config.py, prototype/moe_training)."""
EXPERTS = "torchao converts only torch.nn.Linear, which can include the router; experts in 3-D parameters stay as they are"  # fmt: skip


def export(request: Request) -> Export:
    """Python to paste around a model called `model` with blocks `model.layers`."""
    policy = request.policy
    theirs = native.torch_meaning(
        policy, fused_adam=True, autocast=policy.autocast is not None, hands_on=True, scaler=native.torch_scaler(policy),
        regions=native.regions_there(policy, _QUANTS, edges=True),
    )  # fmt: skip
    momentum = request.updates.get("sgd_momentum", 0.0)
    if request.optimizer == "sgd":
        theirs = dataclasses.replace(theirs, optimizer=request.ours.optimizer)
    held = Line(fidelity="exact", fact="main weights", text="Transformer Engine's FusedAdam holds them, on CUDA only")
    piece = Fragment(name="python", text=native.commented(NAME, theirs, _python(policy, theirs, momentum)))
    return exported(request, NAME, theirs, [piece], [held] if theirs.main is not None else ())


def _python(policy: PrecisionPolicy, theirs: Meaning, momentum: float) -> str:
    quant, cast, scale = theirs.regions[-1].quant, theirs.autocast, theirs.loss_scale
    lines = [
        "import torch", "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard", "", f"model.to(torch.{theirs.storage.value})",
        *(_quantized(quant, policy) if quant is not None else ()),
        "policy = MixedPrecisionPolicy(", f"    param_dtype=torch.{theirs.compute.value},", f"    reduce_dtype=torch.{theirs.wire.value},",
        f"    output_dtype=torch.{(theirs.output or theirs.compute).value},", "    cast_forward_inputs=False,", ")",
        "for block in model.layers:", "    fully_shard(block, mp_policy=policy)", "fully_shard(model, mp_policy=policy)",
    ]  # fmt: skip
    if cast is not None:
        lines.append(f'model.forward = torch.autocast("cuda", dtype=torch.{cast.value})(model.forward)')
    lines += _optimizer(theirs, momentum)
    if scale is not None:
        lines.append("from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler")
        lines.append(f"scaler = ShardedGradScaler({native.scaler_arguments(scale)})")
    return "\n".join(lines)


def _quantized(quant: Quant, policy: PrecisionPolicy) -> list[str]:
    if quant.scaling == "mxfp8":
        code = [
            "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe", "from torchao.quantization import quantize_",
            "config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_RCEIL)", "quantize_(model, config, quantized)",
        ]  # fmt: skip
    else:
        recipe = native.BY_TORCHAO[quant.scaling][0]
        code = [
            "from torchao.float8 import Float8LinearConfig, convert_to_float8_training", f'config = Float8LinearConfig.from_recipe_name("{recipe}")',
            "convert_to_float8_training(model, config=config, module_filter_fn=quantized)",
        ]  # fmt: skip
    return [*native.filter_lines(policy, "len(model.layers)"), *code]


def _optimizer(theirs: Meaning, momentum: float) -> list[str]:
    if theirs.optimizer.name == "SGD":
        return [f"optimizer = torch.optim.SGD(model.parameters(), momentum={momentum})"]
    if theirs.main is None:
        return ["optimizer = torch.optim.AdamW(model.parameters(), fused=True)"]
    return [
        "from transformer_engine.pytorch.optimizers import FusedAdam", "optimizer = FusedAdam(",
        "    model.parameters(), master_weights=True, store_param_remainders=True,",
        f"    exp_avg_dtype=torch.{theirs.exp_avg.value}, exp_avg_sq_dtype=torch.{theirs.exp_avg_sq.value},", ")",
    ]  # fmt: skip
