"""NeMo AutoModel: the model, optimizer, distributed and fp8 sections of its YAML, written and read; `_target_` entries are names, never imported.

Read at 36044ad3: components/distributed/config.py, components/quantization/fp8.py, components/models/common (te_fp8), shared/utils.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import DataError, brief, cut
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Export, Fragment, Imported, Line, Request, compared, engine_with, updated_by
from mpbridge.interop.stacks.known_keys import with_rest
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.reading import Reader, raise_faults
from mpbridge.interop.stacks.sharded_torch import (
    SPELL,
    environment,
    fields_of,
    left_out,
    output_layer,
    regions_there,
    torch_meaning,
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


def export(request: Request) -> Export:
    """The sections, and the lines for what they do differently."""
    import yaml

    policy = request.policy
    by_torchao = {quant.scaling: quant for quant in TORCHAO.values()}
    by_te = {quant.scaling: quant for quant in TE_FP8.values() if quant.scaling not in by_torchao}
    theirs = torch_meaning(policy, fused_adam=True, hands_on=True, regions=regions_there(policy, by_te | by_torchao))
    if request.main_weights == "wrapper":  # which keeps whole FP32 weights itself
        settled = policy.settled()
        main = DType.FP32 if settled.mixed else None
        theirs = Meaning(
            storage=settled.params, compute=settled.compute, main=main, wire=settled.reduce, accumulator=settled.reduce, regions=theirs.regions
        )  # fmt: skip
    quant = theirs.regions[-1].quant
    theirs = dataclasses.replace(theirs, router=policy.router)
    left: list[str] = []
    more = {}
    if quant is not None and quant.scaling in by_torchao:
        ends, left = _left_out(policy, request)
        theirs = dataclasses.replace(theirs, regions=(*ends, Region(quant=quant)))
    elif quant is not None:
        more["edge layers"] = "te_fp8 converts every layer"
        quant = dataclasses.replace(quant, options=policy.quant.options if policy.quant else ())
        theirs = dataclasses.replace(theirs, regions=(Region(quant=quant),))
    sections = _sections(request, theirs, left)
    theirs = dataclasses.replace(read_data(sections, version=request.version).meaning, regions=theirs.regions)
    lines = [*output_layer(quant if quant is not None and quant.scaling in by_te else None, "te_fp8")]
    if theirs.router is not None:
        text = "model.backend.gate_precision is read by AutoModel's own implementations of models, not by those of transformers"
        lines.append(Line(fidelity="exact", fact="router", text=text))
    lines += compared(request.ours, theirs, NAME, more)
    text = yaml.safe_dump(sections, sort_keys=False).rstrip()
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
    sections: dict[str, Any] = {
        "model": {"torch_dtype": SPELL[theirs.storage]},
        "optimizer": _optimizer_section(theirs),
    }
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


def _optimizer_section(theirs: Meaning) -> dict[str, Any]:
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


def read_data(data: Any, *, version: str) -> Imported:
    """The sections' meaning. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    if not isinstance(data, Mapping):
        raise DataError(f"an AutoModel configuration is a mapping, found {type(data).__name__}")
    read = Reader(data)
    inert: list[str] = []
    cannot: list[str] = []
    contradicts: list[str] = []
    assumed: list[str] = []
    if _DIFFUSION & data.keys() and "distributed" not in data:
        strategy = "ddp" if "ddp" in data else "diffusion"
        read.whole |= {"ddp", "fsdp", "flow_matching"}
    else:
        strategy = read.text("distributed.strategy", "fsdp2").lower()
    if strategy not in _MEANINGS:
        contradicts.append(
            f"distributed.strategy={strategy}: AutoModel has fsdp2, megatron_fsdp, ddp; described as ddp"
        )
    storage = _storage(read, assumed)
    quant = _quant(read, inert, cannot)
    _backend(read, inert, cannot, contradicts)
    gate = read.dtype("model.backend.gate_precision")
    meaning = _MEANINGS.get(strategy, _ddp)(read, storage, contradicts)
    meaning, ends = dataclasses.replace(_with_optimizer(read, meaning), router=gate), None
    if quant is not None:
        ends = _ends(read, cannot, assumed)
        first = (Region(first=ends[0], last=ends[1]),) if ends is not None else ()
        meaning = dataclasses.replace(meaning, regions=(*first, Region(quant=quant)))
    cast = read.dtype("distributed.autocast_dtype")
    if cast is not None and "dllm" in data:  # recipes/dllm wraps the forward pass in it
        meaning = dataclasses.replace(meaning, autocast=cast)
    elif cast is not None:
        inert.append("distributed.autocast_dtype: no recipe of an autoregressive language model reads it")
    if "peft" in data:
        cannot.append("peft: only adapters are trained")
    raise_faults(read.faults, "this AutoModel configuration")
    engine = DEFAULT if strategy == "ddp" else engine_with("wrapper" if "megatron" in strategy else "optimizer")
    fields = fields_of(meaning, cannot, quant, ends)
    if fields and gate is not None:
        fields["moe_router_dtype"] = gate.short
    found = Imported(
        stack=NAME, version=version, fields=fields, engine=engine, meaning=meaning, inert=tuple(inert),
        contradicts=tuple(contradicts), cannot_express=tuple(cannot), assumed=tuple(assumed),
    )  # fmt: skip
    found = updated_by(found, _optimizer(read), "optimizer", momentum=read.at("optimizer.momentum"))
    return with_rest(found, read)


def _backend(read: Reader, inert: list[str], cannot: list[str], contradicts: list[str]) -> None:
    """What model.backend says of the linears and of the experts, apart from each other."""
    linear, experts = (str(read.at(f"model.backend.{name}") or "") for name in ("linear", "experts"))
    if experts in ("te", "gmm") and read.at("model.backend.dispatcher") == "torch":
        inert.append(f"model.backend.experts={experts} with dispatcher=torch: AutoModel runs them with torch_mm")
        experts = "torch_mm"
    if experts == "torch_mm_mxfp8":
        cannot.append(
            "model.backend.experts=torch_mm_mxfp8: the experts' grouped GEMMs run in MXFP8, the linears do not"
        )
    if read.at("model.backend.te_fp8") is None:
        return
    if linear not in ("", "te") and experts != "te":
        contradicts.append(
            f"model.backend.te_fp8 with linear={cut(linear)}: AutoModel raises ValueError without linear=te or experts=te; described as linear=te"
        )
    elif linear not in ("", "te"):
        cannot.append(f"model.backend.te_fp8 with linear={cut(linear)}: only the experts are quantized there")
    elif experts not in ("", "te"):
        cannot.append(f"model.backend.te_fp8 with experts={cut(experts)}: experts of a mixture are not quantized there")


def _storage(read: Reader, assumed: list[str]) -> DType:
    found = read.at("model.torch_dtype", read.at("model.dtype", read.at("model.config.torch_dtype")))
    if found in (None, "auto"):
        assumed.append("model.torch_dtype comes from the checkpoint: assumed to be bfloat16")
        return DType.BF16
    # its dtype_from_str reads any value that is not a string as bfloat16
    if not isinstance(found, str):
        return DType.BF16
    words = {"bf16": "bf16", "bfloat16": "bf16", "float32": "fp32", "half": "fp16", "float16": "fp16"}
    word = found.lower().removeprefix("torch.")
    if word not in words:
        read.faults.append(f"model.torch_dtype={brief(found)}: AutoModel accepts {', '.join(words)}")
    return {"bf16": DType.BF16, "fp32": DType.FP32, "fp16": DType.FP16}[words.get(word, "bf16")]


def _fsdp2(read: Reader, storage: DType, contradicts: list[str]) -> Meaning:
    policy = read.at("distributed.mp_policy")
    if not isinstance(policy, Mapping):
        param, reduce, output = DType.BF16, DType.FP32, DType.BF16
        for name, dtype in (("param", param), ("reduce", reduce), ("output", output)):
            read.default(f"distributed.mp_policy.{name}_dtype", dtype)
    else:
        # a policy that names some of the keys replaces the whole default: the others fall back to the gradient's and the parameter's dtype
        param = read.dtype("distributed.mp_policy.param_dtype", storage) or storage
        reduce = read.dtype("distributed.mp_policy.reduce_dtype", param) or param
        read.asked |= {"distributed.mp_policy._target_", "distributed.mp_policy.cast_forward_inputs"}
        output = read.dtype("distributed.mp_policy.output_dtype", param) or param
    return Meaning(
        storage=storage,
        compute=param,
        wire=reduce,
        accumulator=storage,
        exp_avg=storage,
        exp_avg_sq=storage,
        sharded="everything",
        output=None if output is param else output,
        pipeline=None if output is param else output,
    )


def _megatron_fsdp(read: Reader, storage: DType, contradicts: list[str]) -> Meaning:
    _no_policy(read, contradicts, "megatron_fsdp")
    keeps = read.flag("distributed.preserve_fp32_weights")
    reduce = DType.FP32 if read.flag("distributed.grad_reduce_in_fp32") else storage
    state = DType.FP32 if keeps else storage
    return Meaning(
        storage=storage, compute=storage, main=DType.FP32 if keeps and storage is not DType.FP32 else None, wire=reduce,
        accumulator=reduce, exp_avg=state, exp_avg_sq=state, sharded="everything",
    )  # fmt: skip


def _ddp(read: Reader, storage: DType, contradicts: list[str]) -> Meaning:
    _no_policy(read, contradicts, "ddp")
    return Meaning(
        storage=storage, compute=storage, wire=storage, accumulator=storage, exp_avg=storage, exp_avg_sq=storage
    )


def _diffusion(read: Reader, storage: DType, contradicts: list[str]) -> Meaning:
    """FSDP2 as recipes/diffusion/train.py sets it up, from the sections model and fsdp; with adapters nothing is cast when it is gathered."""
    compute = read.dtype("model.compute_dtype", DType.BF16) or DType.BF16
    wire = read.dtype("fsdp.reduce_dtype", DType.FP32) or DType.FP32
    if "peft" in read.data or "ddp" in read.data:
        if compute is not storage:
            contradicts.append(
                f"model.compute_dtype={compute.short} with storage in {storage.short}: AutoModel raises ValueError"
            )
        compute = storage
    return Meaning(
        storage=storage,
        compute=compute,
        wire=wire,
        accumulator=storage,
        exp_avg=storage,
        exp_avg_sq=storage,
        sharded="everything",
    )


_DIFFUSION = frozenset({"flow_matching", "fsdp"})
"""Sections that only its diffusion recipes read."""
_MEANINGS = {"fsdp2": _fsdp2, "megatron_fsdp": _megatron_fsdp, "ddp": _ddp, "diffusion": _diffusion}


def _no_policy(read: Reader, contradicts: list[str], strategy: str) -> None:
    if read.at("distributed.mp_policy") is not None:
        contradicts.append(f"distributed.mp_policy under strategy {strategy}: AutoModel raises ValueError")


def _optimizer(read: Reader) -> str:
    """Its class or name; '' where none is said."""
    return str(read.at("optimizer._target_") or read.at("optimizer.name") or "")


def _with_optimizer(read: Reader, meaning: Meaning) -> Meaning:
    """FusedAdam with master weights keeps FP32 weights in addition to 16-bit parameters; by default it has none."""
    if _optimizer(read).rpartition(".")[2] != "FusedAdam":
        return meaning
    first = read.dtype("optimizer.exp_avg_dtype", DType.FP32) or DType.FP32
    second = read.dtype("optimizer.exp_avg_sq_dtype", DType.FP32) or DType.FP32
    kept = dataclasses.replace(meaning, exp_avg=first, exp_avg_sq=second)
    if not read.flag("optimizer.master_weights") or meaning.storage is DType.FP32:
        return kept
    return dataclasses.replace(kept, main=DType.FP32, remainders=read.flag("optimizer.store_param_remainders"))


def _ends(read: Reader, cannot: list[str], assumed: list[str]) -> tuple[int, int] | None:
    """The part of the quantization that fp8.filter_fqns excludes; te_fp8 converts every linear."""
    if read.at("model.backend.te_fp8") is not None:
        cannot.append("model.backend.te_fp8: the output layer is quantized too; here it never is")
        return None
    return left_out(read.at("fp8.filter_fqns"), "fp8.filter_fqns", cannot, assumed)


def _quant(read: Reader, inert: list[str], cannot: list[str]) -> Quant | None:
    recipe = read.at("model.backend.te_fp8.recipe", "current" if read.at("model.backend.te_fp8") is not None else None)
    if recipe is not None:
        if recipe not in TE_FP8:
            cannot.append(f"model.backend.te_fp8.recipe={brief(recipe)}: a recipe object of Transformer Engine")
            return None
        return TE_FP8[str(recipe)]
    if not read.flag("fp8.enabled"):
        if read.section("fp8"):
            inert.append("fp8 without enabled: true")
        return None
    name = read.at("fp8.recipe_name")
    if name not in (None, "tensorwise", "rowwise", "rowwise_with_gw_hp"):
        cannot.append(
            f"fp8.recipe_name={name}: torchao has tensorwise, rowwise and rowwise_with_gw_hp; described as tensorwise"
        )
    ignored = ("emulate", "enable_fsdp_float8_all_gather", "force_recompute_fp8_weight_in_bwd")
    if name in ("rowwise", "rowwise_with_gw_hp"):
        inert += [f"fp8.{key}: ignored with recipe_name {name}" for key in ignored if read.flag(f"fp8.{key}")]
        return Quant(format="e4m3", scaling="rowwise_gw_hp" if name.endswith("_gw_hp") else "rowwise")
    if read.flag("fp8.enable_fsdp_float8_all_gather"):
        cannot.append("fp8.enable_fsdp_float8_all_gather: FP8 on the wire with 16 or 32-bit storage")
    return Quant(format="hybrid", scaling="tensorwise")
