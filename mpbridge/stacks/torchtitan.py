"""torchtitan: a recipe as arguments, plus a config_registry function if linears are quantized.

Read at b5bcd76c: config/configs.py, components/quantization/{float8,mx,nvfp4}.py.
"""

from __future__ import annotations

import dataclasses

from mpbridge.formats import DType
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant
from mpbridge.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.stacks.meaning import Meaning
from mpbridge.stacks.sharded_torch import SPELL, regions_there, torch_meaning

NAME = "torchtitan"
VERSIONS = {"main": "b5bcd76c"}
DEFAULT_VERSION = "main"
SCALINGS = {
    "mxfp8": "MXFP8LinearConverter",
    "nvfp4": "NVFP4LinearConverter",
    "rowwise": "Float8LinearConverter",
    "rowwise_gw_hp": "Float8LinearConverter",
}
CONVERTED = {
    "mxfp8": Quant(format="e4m3", scaling="mxfp8"),
    "nvfp4": Quant(format="e2m1", scaling="nvfp4"),
    "rowwise": Quant(format="e4m3", scaling="rowwise"),
    "rowwise_gw_hp": Quant(format="e4m3", scaling="rowwise_gw_hp"),
}
"""Scaling -> what its converter runs."""
COSTS = {
    "quantization": "Float8LinearConverter with recipe_name='rowwise'",
    "modules": "several converters, whose fqns and filter_fqns are substrings of the model's own names",
    "wire": "mixed_precision_reduce takes float32 only",
    "accumulator": "the reduced gradient accumulates in the parameter's dtype",
    "keep_fp32": "one dtype for every parameter",
    "router": "its router computes in FP32",
    "residual_fp32": "blocks compute in mixed_precision_param",
    "logits": "its loss upcasts them afterwards",
    "softmax_fp32": "the attention kernel decides",
    "output": "as computed",
    "pipeline": "stages send what they computed",
    "loss_scale": "it has no loss scaler",
}
EXPERTS = "this converter covers only Linear, the router's gate among them; the experts need a GroupedExpertsConverter beside it, and the gate (router.gate) a place outside of its names"
"""What happens to the experts of a mixture."""
_IMPORTS = "from torchtitan.components.quantization import {converter}"


def export(request: Request) -> Export:
    """Arguments, and Python for converters, since quantization has no command-line options."""
    policy = request.policy
    lines = []
    if policy.compute is DType.FP16:
        text = (
            "training.dtype and mixed_precision_param accept only bfloat16 and float32; nearest: BF16, as written here"
        )
        lines.append(Line(fidelity="impossible", fact="fp16", text=text))
        # its parser does not accept float16: the nearest dtype is written
        policy = dataclasses.replace(policy, compute=DType.BF16, params=DType.FP32, main_params=DType.FP32)
    theirs = _meaning(policy)
    moments = policy.settled()
    low = DType.BF16 in (moments.exp_avg, moments.exp_avg_sq) and theirs.storage is DType.FP32
    if low:
        theirs = dataclasses.replace(theirs, exp_avg=DType.BF16, exp_avg_sq=DType.BF16)
    words = [f"--training.dtype {SPELL[theirs.storage]}", f"--training.mixed_precision_param {SPELL[theirs.compute]}"]
    words += ["--training.mixed_precision_reduce float32"]
    words += ["--optimizer.implementation fused_opt_states_bf16"] if low else []
    pieces = [Fragment(name="arguments", text=" \\\n".join(words))]
    if theirs.regions[-1].quant is not None:
        pieces.append(Fragment(name="config_registry.py", text=_python(policy)))
    lines += compared(request.ours, theirs, COSTS)
    return Export(stack=NAME, version=request.version, pieces=tuple(pieces), meaning=theirs, lines=tuple(lines))


def _meaning(policy: PrecisionPolicy) -> Meaning:
    # mixed_precision_reduce takes float32 only
    found = torch_meaning(policy, wire=DType.FP32, regions=regions_there(policy, CONVERTED, edges=True))
    return dataclasses.replace(found, router=DType.FP32)


def _python(policy: PrecisionPolicy) -> str:
    """A function for a model's config_registry; layers are substrings there, so each name ends with a dot."""
    quant = policy.quant
    assert quant is not None  # called only for quantized recipes
    converter = SCALINGS[quant.scaling]
    first, last = policy.ends or (0, 0)
    depth = "len(config.model_spec.model.layers)"
    inner = f'[f"layers.{{i}}." for i in range({first}, {depth} - {last})]'
    chosen = f"fqns={inner}" if policy.ends else 'fqns=["layers"]'
    if converter == "Float8LinearConverter":
        name = "rowwise" if quant.scaling == "rowwise" else "rowwise_with_gw_hp"
        outer = f'*(f"layers.{{i}}." for i in (*range({first}), *range({depth} - {last}, {depth})))'
        left = f'["lm_head", {outer}]' if policy.ends else '["lm_head"]'
        chosen = f'recipe_name="{name}", filter_fqns={left}'
    return "\n".join(
        [
            _IMPORTS.format(converter=converter),
            "",
            "",
            "def quantized(config, registry, flavor):",
            f"    converters = [{converter}.Config({chosen}, model_compile_enabled=config.compile.enable)]",
            "    config.model_spec = registry(flavor, converters=converters)",
            "    return config",
        ]
    )
