"""Lightning: a recipe as a Trainer's strategy and precision.

Read at 2.6.6: plugins/precision/{amp,half,fsdp}.py, strategies/fsdp.py. 'bf16-mixed' under FSDP reduces in BF16 unless the strategy has a policy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Fragment, Request, exported
from mpbridge.interop.stacks.data_comment import commented
from mpbridge.interop.stacks.lightning_import import NAME, read_data
from mpbridge.interop.stacks.sharded_torch import SPELL, environment, noted, output_layer, torch_meaning
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant, Region

VERSIONS = {"2.6": "2.6.6"}
DEFAULT_VERSION = "2.6"
SCALINGS = {"delayed": "TransformerEnginePrecision"}
EXPERTS = "only torch.nn.Linear is replaced, which can include the router; experts in 3-D parameters stay as they are"
"""What happens to the experts of a mixture."""
_CLASSES = {
    "TransformerEnginePrecision": "lightning.pytorch.plugins.precision",
    "FSDPStrategy": "lightning.pytorch.strategies",
    "MixedPrecision": "torch.distributed.fsdp",
}
"""Class -> the module that it is imported from."""


def export(request: Request) -> Export:
    """Python that creates the Trainer."""
    policy = request.policy
    said = _trainer(policy)
    theirs = read_data({"trainer": said}, version=request.version).meaning
    if "plugins" in said and policy.quant is not None:  # options that only the environment tells
        theirs = dataclasses.replace(theirs, regions=(Region(quant=dataclasses.replace(policy.quant, stored=False)),))
    quant = theirs.regions[-1].quant
    lines = output_layer(quant, "the plugin")
    theirs = noted(theirs, lines)
    code = Fragment(name="python", text=commented(NAME, theirs, _code(said)))
    return exported(request, NAME, theirs, [code, *environment([quant] if quant else ())], lines)


def _trainer(policy: PrecisionPolicy) -> dict[str, Any]:
    """The trainer's arguments as its YAML has them. FSDP gathers parameters in the compute dtype; the FP8 plugin's data parallelism is torch's DDP."""
    full, quant = torch_meaning(policy), policy.quant
    storage, compute, wire = (f"torch.{SPELL[one]}" for one in (full.storage, full.compute, full.wire))
    if quant is not None and quant.scaling in SCALINGS:
        plugin = {"weights_dtype": storage, "fallback_compute_dtype": compute, "recipe": _recipe(quant)}
        return {"plugins": [_object(SCALINGS[quant.scaling], plugin)]}
    if full.compute is DType.FP32:
        return {"precision": "32-true"}
    base = "16" if full.compute is DType.FP16 else "bf16"
    if full.storage is not DType.FP32:
        return {"strategy": _object("FSDPStrategy", {}), "precision": f"{base}-true"}
    # without this policy the precision would reduce gradients in 16 bits
    mixed = _object("MixedPrecision", {"param_dtype": compute, "reduce_dtype": wire, "buffer_dtype": compute})
    return {"strategy": _object("FSDPStrategy", {"mixed_precision": mixed}), "precision": f"{base}-mixed"}


def _object(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"class_path": f"{_CLASSES[name]}.{name}", "init_args": arguments}


def _recipe(quant: Quant) -> dict[str, Any]:
    recipe: dict[str, Any] = {"fp8_format": quant.format.upper(), "amax_history_len": quant.amax_history}
    recipe |= {"amax_compute_algo": quant.amax_algo, "margin": quant.margin}
    recipe |= {} if quant.wgrad else {"override_linear_precision": (False, False, True)}
    recipe |= {} if quant.attention == "none" else {"fp8_dpa": True}
    return recipe | ({"fp8_mha": True} if quant.attention == "multi_head" else {})


def _code(said: dict[str, Any]) -> str:
    """The Python that creates a Trainer with these arguments."""
    arguments = [f"    {name}={_text(value, 1)}," for name, value in said.items()]
    body = ["trainer = Trainer(", *arguments, ")"]
    used = {name: source for name, source in _CLASSES.items() if any(f"{name}(" in line for line in body)}
    imports = [f"from {source} import {name}" for name, source in used.items()]
    torch = ["import torch"] if used else []
    return "\n".join([*torch, "from lightning.pytorch import Trainer", *imports, "", *body])


def _text(value: Any, depth: int) -> str:
    """A value as Python: a class with its arguments, a list, a mapping, a dtype or a word."""
    if isinstance(value, list):
        return f"[{', '.join(_text(one, depth) for one in value)}]"
    if isinstance(value, dict) and "class_path" in value:
        name, inner = value["class_path"].rpartition(".")[2], "    " * depth
        lines = [f"{inner}    {key}={_text(one, depth + 1)}," for key, one in value["init_args"].items()]
        return "\n".join([f"{name}(", *lines, f"{inner})"]) if lines else f"{name}()"
    return value if isinstance(value, str) and value.startswith("torch.") else repr(value).replace("'", '"')
