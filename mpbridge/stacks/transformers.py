"""Hugging Face transformers: a recipe as TrainingArguments and the dtype that the model is loaded in.

Read at 5.23.0: training_args.py hands bf16 and fp16 to accelerate; `from_pretrained` keeps the checkpoint's dtype unless told otherwise.
"""

from __future__ import annotations

import dataclasses

from mpbridge.formats import DType
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.stacks.meaning import Meaning, of_policy
from mpbridge.stacks.sharded_torch import SPELL, missing_scalings, torch_meaning

NAME = "transformers"
VERSIONS = {"5.23": "5.23.0"}
DEFAULT_VERSION = "5.23"


def export(request: Request) -> Export:
    """Python with the two settings that decide: the loaded dtype, and the arguments. Data parallelism is torch's DDP."""
    policy = request.policy
    theirs = _meaning(policy)
    lines = list(missing_scalings(policy, {}, "accelerate launch --mixed_precision fp8, which decides by its own file"))
    if policy.loss_scale is not None:
        text = "its GradScaler starts at 2**16, grows every 2000 steps and has no hysteresis"
        lines.append(Line(fidelity="different", fact="loss scale", text=text))
    costs = {"autocast": "norms, softmax and loss run in FP32, in more memory"}
    lines += compared(of_policy(policy, engine=request.engine), theirs, costs, ignore=("loss_scale",))
    piece = Fragment(name="python", text=_python(theirs))
    return Export(stack=NAME, version=request.version, pieces=(piece,), meaning=theirs, lines=tuple(lines))


def _meaning(policy: PrecisionPolicy) -> Meaning:
    full = torch_meaning(policy, autocast=True)
    storage = full.storage
    mixed = storage is DType.FP32 and full.compute is not DType.FP32
    return dataclasses.replace(
        full,
        # under autocast the stored FP32 weights are cast op by op: they are what the forward pass is given
        compute=full.compute,
        autocast=full.compute if mixed else None,
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
            "# without a dtype the model keeps that of its checkpoint, and with BF16 weights there are no FP32 ones at all",
            f'model = AutoModelForCausalLM.from_pretrained("MODEL", dtype=torch.{SPELL[theirs.storage]})',
            f'arguments = TrainingArguments(output_dir="out", optim="adamw_torch"{flag})',
        ]
    )
