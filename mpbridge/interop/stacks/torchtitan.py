"""torchtitan: a recipe as arguments, plus a config_registry function if linears are quantized.

Read at b5bcd76c: config/configs.py, components/quantization/{float8,mx,nvfp4}.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Fragment, Line, Request, exported
from mpbridge.interop.stacks.data_comment import commented
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.sharded_torch import SPELL, regions_there, torch_meaning
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant

NAME = "torchtitan"
VERSIONS = {"main": "b5bcd76c"}
DEFAULT_VERSION = "main"


@dataclass(frozen=True, slots=True)
class Converters:
    """What quantizes to one scaling there."""

    linears: str
    quant: Quant
    """What it runs."""
    experts: str = ""
    """What quantizes the grouped GEMMs of experts likewise, which finds nothing in a dense model; '' for none."""
    lacks: str = ""
    """Why none."""


CONVERTERS: Mapping[str, Converters] = MappingProxyType({
    "mxfp8": Converters("MXFP8LinearConverter", Quant(format="e4m3", scaling="mxfp8"), "MXFP8GroupedExpertsConverter"),
    "nvfp4": Converters("NVFP4LinearConverter", Quant(format="e2m1", scaling="nvfp4"), lacks="it has no converter of experts to NVFP4"),
    "rowwise": Converters("Float8LinearConverter", Quant(format="e4m3", scaling="rowwise"), "Float8GroupedExpertsConverter"),
    "rowwise_gw_hp": Converters(
        "Float8LinearConverter", Quant(format="e4m3", scaling="rowwise_gw_hp"), lacks="its Float8GroupedExpertsConverter quantizes the weight gradients' GEMM too"
    ),
})  # fmt: skip
"""Scaling -> its converters, of those with one name the default first; written and read."""
GATE = "router.gate"
"""The experts' router in its models: a Linear, which no recipe quantizes."""
PARTS = ("attention", "feed_forward", "moe.shared_experts.w")
"""Substrings of its names for every Linear of a layer but the router and the gate of shared experts."""


def experts(policy: PrecisionPolicy) -> str:
    """What happens there to the experts of a mixture, if it is not what happens here; '' if it is."""
    quant = policy.quant
    assert quant is not None  # called only for quantized recipes
    row = CONVERTERS[quant.scaling]
    if not row.experts:
        return f"in {policy.compute.short.upper()} there: {row.lacks}"
    if policy.ends is None:
        return ""
    first, last = policy.ends
    return (
        f"except in the first {first} and the last {last} layers, in every layer there: {row.experts} selects no layers"
    )


def export(request: Request) -> Export:
    """Arguments, and Python for converters, since quantization has no command-line options."""
    policy = request.policy
    lines = []
    if policy.compute is DType.FP16:  # its parser does not accept float16: the nearest dtype is written
        text = (
            "training.dtype and mixed_precision_param accept only bfloat16 and float32; nearest: BF16, as written here"
        )
        lines.append(Line(fidelity="impossible", fact="fp16", text=text))
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
        if policy.ends is not None and CONVERTERS[theirs.regions[-1].quant.scaling].experts:
            theirs = dataclasses.replace(theirs, note=f"experts: {experts(policy)}")
        pieces.append(Fragment(name="config_registry.py", text=commented(NAME, theirs, _python(policy))))
    return exported(request, NAME, theirs, pieces, lines)


_QUANTS = {scaling: row.quant for scaling, row in CONVERTERS.items()}


def _meaning(policy: PrecisionPolicy) -> Meaning:
    # mixed_precision_reduce takes float32 only
    found = torch_meaning(policy, wire=DType.FP32, regions=regions_there(policy, _QUANTS, edges=True))
    return dataclasses.replace(found, router=DType.FP32)


def _python(policy: PrecisionPolicy) -> str:
    """A function for a model's config_registry: a converter of linears, which are chosen by substrings of their names, and one of experts."""
    quant = policy.quant
    assert quant is not None  # called only for quantized recipes
    row = CONVERTERS[quant.scaling]
    given = {row.linears: _chosen(quant, policy.ends)}
    if row.experts:  # 128 rows per expert: what its kernel needs on SM100
        given[row.experts] = ["pad_multiple=128"] if quant.scaling == "mxfp8" else []
    lines: list[str] = []
    for converter, arguments in given.items():
        written = [f"            {one}," for one in (*arguments, "model_compile_enabled=config.compile.enable")]
        lines += [f"        {converter}.Config(", *written, "        ),"]
    return "\n".join([
        f"from torchtitan.components.quantization import {', '.join(sorted(given))}", "", "",
        "def quantized(config, registry, flavor):", "    converters = [", *lines, "    ]",
        "    config.model_spec = registry(flavor, converters=converters)", "    return config",
    ])  # fmt: skip


def _chosen(quant: Quant, ends: tuple[int, int] | None) -> list[str]:
    """The arguments of a converter that choose its recipe and its linears. ends: layers at the start and end that it leaves out."""
    first, last = ends or (0, 0)
    depth = "len(config.model_spec.model.layers)"
    if quant.scaling in ("rowwise", "rowwise_gw_hp"):
        name = "rowwise" if quant.scaling == "rowwise" else "rowwise_with_gw_hp"
        outer = f', *(f"layers.{{i}}." for i in (*range({first}), *range({depth} - {last}, {depth})))' if ends else ""
        return [f'recipe_name="{name}"', f'filter_fqns=["lm_head", "{GATE}"{outer}]']
    parts = ", ".join(f'"{part}"' for part in PARTS)
    if not ends:
        return [f"fqns=[{parts}]"]
    # the dot behind a number keeps layers.1 from covering layers 10 to 19
    covered = f'f"layers.{{i}}.{{part}}" for i in range({first}, {depth} - {last}) for part in ({parts})'
    return [f"fqns=[{covered}]"]
