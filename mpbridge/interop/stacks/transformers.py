"""Hugging Face transformers: a recipe as TrainingArguments and the model's loading dtype.

Read at 5.23.0: training_args.py passes bf16 and fp16 to accelerate; `from_pretrained` keeps the checkpoint's dtype unless it is set.
"""

from __future__ import annotations

import dataclasses

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Fragment, Request, compared
from mpbridge.interop.stacks.data_comment import commented
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.sharded_torch import SCALER_COST, SPELL, TORCH_SCALER, torch_meaning, with_main
from mpbridge.precision.policy import PrecisionPolicy

NAME = "transformers"
VERSIONS = {"5.23": "5.23.0"}
DEFAULT_VERSION = "5.23"
COSTS = {
    "quantization": "accelerate launch --mixed_precision fp8, which decides by its own file",
    "modules": "accelerate's own file of FP8 settings",
    "autocast": "norms, softmax and loss run in FP32, in more memory",
    "loss_scale": f"no argument of it reaches the scaler; {SCALER_COST}",
    "keep_fp32": "the model's own _keep_in_fp32_modules",
    "logits": "its loss upcasts them afterwards",
    "router": "the model's code decides",
    "residual_fp32": "the model is in one dtype",
    "softmax_fp32": "attn_implementation decides",
    "output": "the model returns what it computed",
    "pipeline": "it has no pipeline",
}
"""Row -> what a difference costs, or the nearest equivalent there."""


def export(request: Request) -> Export:
    """Python with the two deciding settings: the loading dtype and the arguments. Data parallelism is torch's DDP."""
    policy = request.policy
    theirs = _meaning(policy)
    lines = compared(request.ours, theirs, with_main(COSTS, theirs))
    piece = Fragment(name="python", text=commented(NAME, theirs, _python(theirs)))
    return Export(stack=NAME, version=request.version, pieces=(piece,), meaning=theirs, lines=lines)


def _meaning(policy: PrecisionPolicy) -> Meaning:
    full = torch_meaning(policy, autocast=True)
    storage = full.storage
    mixed = storage is DType.FP32 and full.compute is not DType.FP32
    scaler = TORCH_SCALER if mixed and full.compute is DType.FP16 else None
    return dataclasses.replace(
        full,
        loss_scale=scaler,
        # under autocast the stored FP32 weights are cast per operation, so the forward pass receives FP32
        compute=full.compute,
        autocast=full.compute if mixed else policy.settled().autocast,
        wire=storage,
        accumulator=storage,
        sharded="nothing",
    )


def _python(theirs: Meaning) -> str:
    flag = "" if theirs.autocast is None else f", {theirs.autocast.short}=True"
    return "\n".join(
        [
            "import torch",
            "from transformers import AutoModelForCausalLM, TrainingArguments",
            "",
            "# without a dtype the model keeps that of its checkpoint, and with BF16 weights no FP32 copy exists",
            f'model = AutoModelForCausalLM.from_pretrained("MODEL", dtype=torch.{SPELL[theirs.storage]})',
            f'arguments = TrainingArguments(output_dir="out", optim="adamw_torch"{flag})',
        ]
    )
