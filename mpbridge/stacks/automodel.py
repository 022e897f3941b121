"""NeMo AutoModel: a recipe as the model, optimizer, distributed and fp8 sections of its YAML.

Read at 36044ad3: components/distributed/config.py, components/quantization/fp8.py, components/models/common (te_fp8), shared/utils.py.
"""

from __future__ import annotations

from typing import Any

from mpbridge.formats import DType
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.stacks.meaning import Meaning, of_policy
from mpbridge.stacks.sharded_torch import SPELL, ends_text, missing_scalings, torch_meaning

NAME = "automodel"
VERSIONS = {"main": "36044ad3"}
DEFAULT_VERSION = "main"
SCALINGS = {
    "tensorwise": "current",
    "blockwise": "block",
    "mxfp8": "mxfp8",
    "rowwise": "rowwise",
    "rowwise_gw_hp": "rowwise_with_gw_hp",
}
_TORCHAO = ("rowwise", "rowwise_gw_hp")
FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"


def export(request: Request) -> Export:
    """The sections, and the lines for what they do otherwise."""
    import yaml

    policy = request.policy
    theirs = torch_meaning(policy, fused_adam=True, scalings=tuple(SCALINGS))
    if request.main_weights == "wrapper":
        theirs = _megatron_fsdp_meaning(policy)
    sections = _sections(request, theirs)
    lines = list(missing_scalings(policy, SCALINGS, "te_fp8.recipe: mxfp8, or BF16"))
    if policy.loss_scale is not None:
        lines.append(
            Line(fidelity="different", fact="loss scale", text="it has no loss scaler: small FP16 gradients vanish")
        )
    if policy.ends is not None and policy.quantized:
        text = f"name {ends_text(policy)} in fp8.filter_fqns as substrings ('layers.0.', 'layers.31.')"
        lines.append(Line(fidelity="exact", fact="edge layers", text=text))
    if policy.keep_fp32:
        text = "a module keeps the dtype that its checkpoint has: store them in FP32 there"
        lines.append(Line(fidelity="different", fact="keep_fp32", text=text))
    lines += compared(of_policy(policy, engine=request.engine), theirs, ignore=("loss_scale",))
    text = yaml.safe_dump(sections, sort_keys=False).rstrip()
    return Export(
        stack=NAME,
        version=request.version,
        pieces=(Fragment(name="recipe.yaml", text=text),),
        meaning=theirs,
        lines=tuple(lines),
    )


def _sections(request: Request, theirs: Meaning) -> dict[str, Any]:
    policy = request.policy
    sections: dict[str, Any] = {"model": {"torch_dtype": SPELL[theirs.storage]}, "optimizer": _optimizer(theirs)}
    if request.main_weights == "wrapper":
        sections["distributed"] = {"strategy": "megatron_fsdp", "grad_reduce_in_fp32": policy.reduce is DType.FP32}
        sections["distributed"]["preserve_fp32_weights"] = True
    else:
        # all four keys: a policy that names some of them replaces the whole default
        sections["distributed"] = {
            "strategy": "fsdp2",
            "mp_policy": {
                "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
                "param_dtype": SPELL[theirs.compute],
                "reduce_dtype": SPELL[theirs.wire],
                "output_dtype": SPELL[policy.output],
                "cast_forward_inputs": True,
            },
        }
    quant = policy.quant
    if quant is not None and quant.scaling in _TORCHAO:
        sections["fp8"] = {"enabled": True, "recipe_name": SCALINGS[quant.scaling], "filter_fqns": ["lm_head"]}
    elif quant is not None and quant.scaling in SCALINGS:
        sections["model"]["backend"] = {"linear": "te", "te_fp8": {"recipe": SCALINGS[quant.scaling]}}
    return sections


def _optimizer(theirs: Meaning) -> dict[str, Any]:
    if theirs.main is None:
        return {"_target_": "torch.optim.AdamW"}
    return {
        "_target_": FUSED_ADAM,
        "master_weights": True,
        "store_param_remainders": theirs.remainders,
        "exp_avg_dtype": SPELL[theirs.exp_avg],
        "exp_avg_sq_dtype": SPELL[theirs.exp_avg_sq],
        "adam_w_mode": True,
    }


def _megatron_fsdp_meaning(policy: PrecisionPolicy) -> Meaning:
    settled = policy.settled()
    return Meaning(
        storage=settled.params, compute=settled.compute, main=DType.FP32, wire=settled.reduce, accumulator=settled.reduce,
        sharded="everything",
    )  # fmt: skip
