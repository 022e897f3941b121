"""NeMo AutoModel: a recipe as the model, optimizer, distributed and fp8 sections of its YAML.

Read at 36044ad3: components/distributed/config.py, components/quantization/fp8.py, components/models/common (te_fp8), shared/utils.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.sharded_torch import (
    SPELL,
    environment,
    output_layer,
    regions_there,
    torch_meaning,
    with_main,
)
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant, Region

NAME = "automodel"
VERSIONS = {"main": "36044ad3"}
DEFAULT_VERSION = "main"
TE_FP8 = {
    "block": Quant(format="e4m3", scaling="blockwise"),
    "mxfp8": Quant(format="e4m3", scaling="mxfp8"),
    "current": Quant(format="hybrid", scaling="tensorwise"),
}
"""Value of model.backend.te_fp8.recipe -> Transformer Engine's recipe with its defaults; every linear is converted, including the output layer."""
TORCHAO = {
    "tensorwise": Quant(format="hybrid", scaling="tensorwise"),
    "rowwise": Quant(format="e4m3", scaling="rowwise"),
    "rowwise_with_gw_hp": Quant(format="e4m3", scaling="rowwise_gw_hp"),
}
"""Value of fp8.recipe_name -> torchao's quantization; fp8.filter_fqns excludes modules."""
FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
EXPERTS = "neither te_fp8 with model.backend.linear nor fp8 covers them; model.backend.experts decides their GEMMs"
"""What happens to the experts of a mixture."""
COSTS = {
    "quantization": "te_fp8.recipe: mxfp8, or BF16",
    "modules": "fp8.filter_fqns excludes modules by substrings of the model's own names",
    "edge layers": "fp8.filter_fqns needs the numbers of the last layers: pass --config, whose depth is then used",
    "loss_scale": "it has no loss scaler: small FP16 gradients vanish",
    "keep_fp32": "a module keeps the dtype of its checkpoint: store them in FP32 there",
    "logits": "its loss upcasts them afterwards",
    "residual_fp32": "the blocks' inputs are cast to param_dtype",
    "softmax_fp32": "the attention backend decides",
    "pipeline": "distributed.pipeline derives it",
    "accumulator": "the reduced gradient accumulates in the parameter's dtype",
    "autocast": "distributed.autocast_dtype exists, but no language-model recipe reads it",
}
"""Row -> what a difference costs, or the nearest equivalent there."""


def export(request: Request) -> Export:
    """The sections, and the lines for what they do differently."""
    import yaml

    policy = request.policy
    by_torchao = {quant.scaling: quant for quant in TORCHAO.values()}
    by_te = {quant.scaling: quant for quant in TE_FP8.values() if quant.scaling not in by_torchao}
    theirs = torch_meaning(policy, fused_adam=True, hands_on=True, regions=regions_there(policy, by_te | by_torchao))
    if request.main_weights == "wrapper":
        theirs = _megatron_fsdp_meaning(policy, theirs)
    quant = theirs.regions[-1].quant
    theirs = dataclasses.replace(theirs, router=policy.router)
    left: list[str] = []
    costs = dict(COSTS)
    if quant is not None and quant.scaling in by_torchao:
        ends, left = _left_out(policy, request)
        theirs = dataclasses.replace(theirs, regions=(*ends, Region(quant=quant)))
    elif quant is not None:
        costs["edge layers"] = "te_fp8 converts every layer"
        quant = dataclasses.replace(quant, options=policy.quant.options if policy.quant else ())
        theirs = dataclasses.replace(theirs, regions=(Region(quant=quant),))
    lines = [*output_layer(quant if quant is not None and quant.scaling in by_te else None, "te_fp8")]
    if theirs.router is not None:
        text = "model.backend.gate_precision is read by AutoModel's own implementations of models, not by those of transformers"
        lines.append(Line(fidelity="exact", fact="router", text=text))
    lines += compared(request.ours, theirs, with_main(costs, theirs))
    text = yaml.safe_dump(_sections(request, theirs, left), sort_keys=False).rstrip()
    pieces = (Fragment(name="recipe.yaml", text=text), *environment([quant] if quant else ()))
    return Export(stack=NAME, version=request.version, pieces=pieces, meaning=theirs, lines=tuple(lines))


def _left_out(policy: PrecisionPolicy, request: Request) -> tuple[tuple[Region, ...], list[str]]:
    """What fp8.filter_fqns excludes: as a region, and as substrings with dots around each layer's number ('layers.1' would also match 'layers.10')."""
    first, last = policy.ends or (0, 0)
    depth = None if request.run is None else request.run.facts.shape.num_layers
    numbers = [*range(first), *(range(max(depth - last, first), depth) if depth is not None else ())]
    words = ["lm_head", *(f"layers.{number}." for number in numbers)]
    if policy.ends is None or not numbers:
        return (), words
    return (Region(first=first, last=last if depth is not None else 0),), words


def _sections(request: Request, theirs: Meaning, left: list[str]) -> dict[str, Any]:
    sections: dict[str, Any] = {"model": {"torch_dtype": SPELL[theirs.storage]}, "optimizer": _optimizer(theirs)}
    if request.main_weights == "wrapper":
        sections["distributed"] = {"strategy": "megatron_fsdp", "grad_reduce_in_fp32": theirs.wire is DType.FP32}
        sections["distributed"]["preserve_fp32_weights"] = True
    else:
        # all four keys are written: a policy that names some of them replaces the whole default
        sections["distributed"] = {
            "strategy": "fsdp2",
            "mp_policy": {
                "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
                "param_dtype": SPELL[theirs.compute],
                "reduce_dtype": SPELL[theirs.wire],
                "output_dtype": SPELL[theirs.output or theirs.compute],
                "cast_forward_inputs": True,
            },
        }
    quant = theirs.regions[-1].quant
    if quant is not None and left:
        word = next(word for word, one in TORCHAO.items() if one.scaling == quant.scaling)
        sections["fp8"] = {"enabled": True, "recipe_name": word, "filter_fqns": left}
    elif quant is not None:
        word = next(word for word, one in TE_FP8.items() if one.scaling == quant.scaling)
        sections["model"]["backend"] = {"linear": "te", "te_fp8": {"recipe": word}}
    if theirs.router is not None:
        sections["model"].setdefault("backend", {})["gate_precision"] = theirs.router.value
    return sections


def _optimizer(theirs: Meaning) -> dict[str, Any]:
    if theirs.main is None:
        return {"_target_": "torch.optim.AdamW"}
    return {
        "_target_": FUSED_ADAM,
        "master_weights": True,
        "store_param_remainders": theirs.remainders,
        "exp_avg_dtype": theirs.exp_avg.value,
        "exp_avg_sq_dtype": theirs.exp_avg_sq.value,
        "adam_w_mode": True,
    }


def _megatron_fsdp_meaning(policy: PrecisionPolicy, theirs: Meaning) -> Meaning:
    settled = policy.settled()
    return Meaning(
        storage=settled.params, compute=settled.compute, main=DType.FP32 if settled.mixed else None, wire=settled.reduce,
        accumulator=settled.reduce, sharded="everything", regions=theirs.regions,
    )  # fmt: skip
