"""torch FSDP2 alone: a recipe as the Python that shards a model with `fully_shard`."""

from __future__ import annotations

from mpbridge.formats import DType
from mpbridge.precision.policy import Quant
from mpbridge.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.stacks.meaning import Meaning, of_policy
from mpbridge.stacks.sharded_torch import SPELL, ends_text, missing_scalings, torch_meaning

NAME = "fsdp2"
VERSIONS = {"2.13": "torch 2.13, torchao 0.18"}
DEFAULT_VERSION = "2.13"
SCALINGS = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp", "mxfp8": "mxfp8"}


def export(request: Request) -> Export:
    """Python to paste around a model called `model` with blocks `model.layers`."""
    policy = request.policy
    theirs = torch_meaning(policy, fused_adam=True, scalings=tuple(SCALINGS))
    lines = list(missing_scalings(policy, SCALINGS, "torchao's rowwise or mxfp8"))
    if policy.loss_scale is not None:
        text = "use torch.distributed.fsdp's ShardedGradScaler, which starts at 2**16 and has no hysteresis"
        lines.append(Line(fidelity="different", fact="loss scale", text=text))
    if policy.keep_fp32:
        text = "pass those parameters to fully_shard(ignored_params=...): they are neither cast nor sharded"
        lines.append(Line(fidelity="different", fact="keep_fp32", text=text))
    if theirs.main is not None:
        lines.append(
            Line(fidelity="exact", fact="main weights", text="Transformer Engine's FusedAdam holds them, on CUDA only")
        )
    lines += compared(of_policy(policy, engine=request.engine), theirs, ignore=("loss_scale",))
    piece = Fragment(name="python", text=_python(request, theirs))
    return Export(stack=NAME, version=request.version, pieces=(piece,), meaning=theirs, lines=tuple(lines))


def _python(request: Request, theirs: Meaning) -> str:
    policy, quant = request.policy, request.policy.quant
    lines = ["import torch", "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard", ""]
    lines += [f"model.to(torch.{SPELL[theirs.storage]})"]
    lines += _quantized(quant, ends_text(policy)) if quant is not None and quant.scaling in SCALINGS else []
    lines += [
        "policy = MixedPrecisionPolicy(",
        f"    param_dtype=torch.{SPELL[theirs.compute]},",
        f"    reduce_dtype=torch.{SPELL[theirs.wire]},",
        f"    output_dtype=torch.{SPELL[policy.output]},",
        "    cast_forward_inputs=False,",
        ")",
        "for block in model.layers:",
        "    fully_shard(block, mp_policy=policy)",
        "fully_shard(model, mp_policy=policy)",
    ]
    return "\n".join([*lines, *_optimizer(theirs)])


def _quantized(quant: Quant, ends: str) -> list[str]:
    keep = f"  # leave out the output layer{f', and {ends}' if ends else ''}"
    if quant.scaling == "mxfp8":
        return [
            "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe",
            "from torchao.quantization import quantize_",
            "config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_RCEIL)",
            "quantize_(model.layers, config, lambda module, name: isinstance(module, torch.nn.Linear))" + keep,
        ]
    return [
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
        f'config = Float8LinearConfig.from_recipe_name("{SCALINGS[quant.scaling]}")',
        "convert_to_float8_training(model.layers, config=config)" + keep,
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
