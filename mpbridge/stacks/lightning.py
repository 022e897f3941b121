"""Lightning: a recipe as a Trainer's strategy and precision.

Read at 2.6.6: plugins/precision/{amp,half,fsdp}.py, strategies/fsdp.py. 'bf16-mixed' under FSDP reduces in BF16 unless the strategy is given a policy.
"""

from __future__ import annotations

import dataclasses

from mpbridge.formats import DType
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.stacks.accelerate import as_run
from mpbridge.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.stacks.meaning import Meaning, of_policy
from mpbridge.stacks.sharded_torch import SPELL, missing_scalings, torch_meaning

NAME = "lightning"
VERSIONS = {"2.6": "2.6.6"}
DEFAULT_VERSION = "2.6"
SCALINGS = {"delayed": "TransformerEnginePrecision"}


def export(request: Request) -> Export:
    """Python that makes the Trainer."""
    policy = request.policy
    theirs = _meaning(policy)
    lines = list(missing_scalings(policy, SCALINGS, "TransformerEnginePrecision with DelayedScaling"))
    if policy.loss_scale is not None:
        text = "its GradScaler starts at 2**16, grows every 2000 steps and has no hysteresis"
        lines.append(Line(fidelity="different", fact="loss scale", text=text))
    if policy.keep_fp32:
        lines.append(Line(fidelity="impossible", fact="keep_fp32", text="one dtype for every parameter"))
    costs = {"autocast": "norms, softmax and loss run in FP32, in more memory"}
    lines += compared(of_policy(policy, engine=request.engine), theirs, costs, ignore=("loss_scale",))
    piece = Fragment(name="python", text=_python(policy, theirs))
    return Export(stack=NAME, version=request.version, pieces=(piece,), meaning=theirs, lines=tuple(lines))


def _meaning(policy: PrecisionPolicy) -> Meaning:
    theirs = torch_meaning(policy, autocast=True, scalings=tuple(SCALINGS))
    if theirs.storage is not DType.FP32:
        # "bf16-true": gradients and moments follow the module's dtype, and so does the reduction
        return dataclasses.replace(theirs, autocast=None, wire=theirs.storage)
    regions = tuple(as_run(region) for region in theirs.regions if region.first is None)
    quantized = any(region.quant is not None for region in regions)
    return dataclasses.replace(theirs, regions=regions, sharded="nothing" if quantized else "everything")


def _python(policy: PrecisionPolicy, theirs: Meaning) -> str:
    quant = policy.quant
    if quant is not None and quant.scaling in SCALINGS:
        return "\n".join(
            [
                "import torch",
                "from lightning.pytorch import Trainer",
                "from lightning.pytorch.plugins.precision import TransformerEnginePrecision",
                "",
                f'recipe = {{"amax_history_len": {quant.amax_history}, "amax_compute_algo": "{quant.amax_algo}", "margin": {quant.margin}}}',
                f"plugin = TransformerEnginePrecision(weights_dtype=torch.{SPELL[theirs.compute]}, recipe=recipe)",
                "trainer = Trainer(plugins=[plugin])",
            ]
        )
    if theirs.compute is DType.FP32:
        return 'from lightning.pytorch import Trainer\n\ntrainer = Trainer(precision="32-true")'
    base = "16" if theirs.compute is DType.FP16 else "bf16"
    lines = [
        "import torch",
        "from lightning.pytorch import Trainer",
        "from lightning.pytorch.strategies import FSDPStrategy",
    ]
    if theirs.storage is not DType.FP32:
        return "\n".join([*lines, "", f'trainer = Trainer(strategy=FSDPStrategy(), precision="{base}-true")'])
    return "\n".join(
        [
            *lines,
            "from torch.distributed.fsdp import MixedPrecision",
            "",
            "# without this policy the precision below would reduce gradients in 16 bits",
            f"mixed = MixedPrecision(param_dtype=torch.{SPELL[theirs.compute]}, reduce_dtype=torch.{SPELL[theirs.wire]},"
            f" buffer_dtype=torch.{SPELL[theirs.compute]})",
            f'trainer = Trainer(strategy=FSDPStrategy(mixed_precision=mixed), precision="{base}-mixed")',
        ]
    )
