"""Lightning: a recipe as a Trainer's strategy and precision.

Read at 2.6.6: plugins/precision/{amp,half,fsdp}.py, strategies/fsdp.py. 'bf16-mixed' under FSDP reduces in BF16 unless the strategy has a policy.
"""

from __future__ import annotations

import dataclasses

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Fragment, Request, compared
from mpbridge.interop.stacks.data_comment import commented
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.sharded_torch import (
    SPELL,
    TORCH_SCALER,
    environment,
    noted,
    output_layer,
    regions_there,
    torch_meaning,
)
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant

NAME = "lightning"
VERSIONS = {"2.6": "2.6.6"}
DEFAULT_VERSION = "2.6"
SCALINGS = {"delayed": "TransformerEnginePrecision"}
EXPERTS = "only torch.nn.Linear is replaced, which can include the router; experts in 3-D parameters stay as they are"
"""What happens to the experts of a mixture."""


def export(request: Request) -> Export:
    """Python that creates the Trainer."""
    policy = request.policy
    theirs = _meaning(policy)
    quant = theirs.regions[-1].quant
    lines = [*output_layer(quant, "the plugin")]
    theirs = noted(theirs, lines)
    lines += compared(request.ours, theirs, NAME)
    pieces = (
        Fragment(name="python", text=commented(NAME, theirs, _python(theirs))),
        *environment([quant] if quant else ()),
    )
    return Export(stack=NAME, version=request.version, pieces=pieces, meaning=theirs, lines=tuple(lines))


def _meaning(policy: PrecisionPolicy) -> Meaning:
    quant = policy.quant
    delayed = quant is not None and quant.scaling in SCALINGS
    words = {quant.scaling: dataclasses.replace(quant, stored=False)} if quant is not None and delayed else {}
    # FSDP gathers parameters in the compute dtype; the FP8 plugin's data parallelism is DDP
    theirs = torch_meaning(policy, autocast=True, regions=regions_there(policy, words))
    if delayed:
        # its fallback autocast is always on; torch DDP reduces gradients in the weights' dtype
        return dataclasses.replace(theirs, wire=theirs.storage, sharded="nothing")
    if theirs.storage is not DType.FP32:
        # "bf16-true": gradients and moments follow the module's dtype, and so does the reduction
        return dataclasses.replace(theirs, autocast=None, wire=theirs.storage)
    if theirs.compute is DType.FP32:
        return dataclasses.replace(theirs, wire=DType.FP32, sharded="nothing")
    return dataclasses.replace(theirs, loss_scale=TORCH_SCALER if theirs.compute is DType.FP16 else None)


def _plugin(quant: Quant, theirs: Meaning) -> str:
    recipe: dict[str, object] = {
        "fp8_format": quant.format.upper(),
        "amax_history_len": quant.amax_history,
        "amax_compute_algo": quant.amax_algo,
        "margin": quant.margin,
    }
    recipe |= {} if quant.wgrad else {"override_linear_precision": (False, False, True)}
    recipe |= {} if quant.attention == "none" else {"fp8_dpa": True}
    recipe |= {"fp8_mha": True} if quant.attention == "multi_head" else {}
    return "\n".join(
        [
            "import torch",
            "from lightning.pytorch import Trainer",
            "from lightning.pytorch.plugins.precision import TransformerEnginePrecision",
            "",
            "recipe = {",
            *(f'    "{name}": {value!r},'.replace("'", '"') for name, value in recipe.items()),
            "}",
            "# weights_dtype is what the optimizer updates: there are no main weights beside it",
            "plugin = TransformerEnginePrecision(",
            f"    weights_dtype=torch.{SPELL[theirs.storage]}, fallback_compute_dtype=torch.{SPELL[theirs.compute]}, recipe=recipe,",
            ")",
            "trainer = Trainer(plugins=[plugin])",
        ]
    )


def _python(theirs: Meaning) -> str:
    quant = theirs.regions[-1].quant
    if quant is not None:
        return _plugin(quant, theirs)
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
