"""NeMo AutoModel: the model, optimizer, distributed and fp8 sections of its YAML, written and read; `_target_` entries are names, never imported.

Read at 36044ad3: components/distributed/config.py, components/quantization/fp8.py, components/models/common (te_fp8), shared/utils.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import brief, cut
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks import sharded_torch as native
from mpbridge.interop.stacks.base import Export, Fragment, Imported, Line, Request, engine_with, exported
from mpbridge.interop.stacks.meaning import Meaning, updated_itself, with_quant
from mpbridge.interop.stacks.reading import Reader, imported
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant, Region

NAME = "automodel"
VERSIONS = {"main": "36044ad3"}
TE_FP8 = {
    "block": Quant(format="e4m3", scaling="blockwise"), "mxfp8": Quant(format="e4m3", scaling="mxfp8"), "current": Quant(format="hybrid", scaling="tensorwise"),
}  # fmt: skip
"""Value of model.backend.te_fp8.recipe -> Transformer Engine's recipe with its defaults; every linear is converted, including the output layer."""
FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
EXPERTS = "neither te_fp8 with model.backend.linear nor fp8 covers them; model.backend.experts decides their GEMMs"


def export(request: Request) -> Export:
    """The sections, and the lines for what they do differently."""
    import yaml

    policy = request.policy
    by_torchao = {quant.scaling: quant for quant in native.TORCHAO.values()}  # fp8.recipe_name
    by_te = {quant.scaling: quant for quant in TE_FP8.values() if quant.scaling not in by_torchao}
    regions = native.regions_there(policy, by_te | by_torchao)
    theirs = native.torch_meaning(policy, fused_adam=True, hands_on=True, regions=regions)
    if request.main_weights == "wrapper":  # which keeps whole FP32 weights itself
        whole, main = policy.settled(), DType.FP32 if policy.settled().mixed else None
        theirs = Meaning(storage=whole.params, compute=whole.compute, main=main, wire=whole.reduce, accumulator=whole.reduce, regions=regions)  # fmt: skip
    quant, left, more = theirs.regions[-1].quant, list[str](), dict[str, str]()
    theirs = dataclasses.replace(theirs, router=policy.router)
    if quant is not None and quant.scaling in by_torchao:
        ends, left = _left_out(policy, request)
        theirs = dataclasses.replace(theirs, regions=(*ends, Region(quant=quant)))
    elif quant is not None:
        more["edge layers"] = "te_fp8 converts every layer"
        quant = dataclasses.replace(quant, options=policy.quant.options if policy.quant else ())
        theirs = dataclasses.replace(theirs, regions=(Region(quant=quant),))
    sections = _sections(request, theirs, left)
    theirs = dataclasses.replace(read_data(sections, version=request.version).meaning, regions=theirs.regions)
    lines = [*native.output_layer(quant if quant is not None and quant.scaling in by_te else None, "te_fp8")]
    if theirs.router is not None:
        text = "model.backend.gate_precision is read by AutoModel's own implementations of models, not by those of transformers"
        lines.append(Line(fidelity="exact", fact="router", text=text))
    piece = Fragment(name="recipe.yaml", text=yaml.safe_dump(sections, sort_keys=False).rstrip())
    return exported(request, NAME, theirs, [piece, *native.environment([quant] if quant else ())], lines, more)


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
    storage = {"torch_dtype": theirs.storage.value}
    sections: dict[str, Any] = {"model": storage, "optimizer": _optimizer_section(request, theirs)}
    if request.main_weights == "wrapper":
        held = {"grad_reduce_in_fp32": theirs.wire is DType.FP32, "preserve_fp32_weights": True}
        sections["distributed"] = {"strategy": "megatron_fsdp", **held}
    else:  # all four keys are written: a policy that names some of them replaces the whole default
        policy = {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "param_dtype": theirs.compute.value, "reduce_dtype": theirs.wire.value,
            "output_dtype": (theirs.output or theirs.compute).value, "cast_forward_inputs": True,
        }  # fmt: skip
        sections["distributed"] = {"strategy": "fsdp2", "mp_policy": policy}
    quant = theirs.regions[-1].quant
    if quant is not None and left:
        sections["fp8"] = {"enabled": True, "recipe_name": native.BY_TORCHAO[quant.scaling][0], "filter_fqns": left}
    elif quant is not None:
        word = next(word for word, one in TE_FP8.items() if one.scaling == quant.scaling)
        sections["model"]["backend"] = {"linear": "te", "te_fp8": {"recipe": word}}
    if theirs.router is not None:
        sections["model"].setdefault("backend", {})["gate_precision"] = theirs.router.value
    return sections


def _optimizer_section(request: Request, theirs: Meaning) -> dict[str, Any]:
    if request.optimizer == "sgd":
        return {"_target_": "torch.optim.SGD", "momentum": request.updates["sgd_momentum"]}
    if theirs.main is None:
        return {"_target_": "torch.optim.AdamW"}
    return {
        "_target_": FUSED_ADAM, "master_weights": True, "store_param_remainders": theirs.remainders, "exp_avg_dtype": theirs.exp_avg.value,
        "exp_avg_sq_dtype": theirs.exp_avg_sq.value, "adam_w_mode": True,
    }  # fmt: skip


def read_data(data: Any, *, version: str) -> Imported:
    """The sections' meaning. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    read = Reader.of(data, "an AutoModel configuration")
    if _DIFFUSION & data.keys() and "distributed" not in data:
        strategy = "ddp" if "ddp" in data else "diffusion"
        read.whole |= {"ddp", "fsdp", "flow_matching"}
    else:
        strategy = read.text("distributed.strategy", "fsdp2").lower()
    other = read.at("model") is None and read.at("recipe_args") is not None
    text = "recipe_args without a model: their recipe loads the models, in dtypes that this file does not say"
    read.note("undecided", text, other)
    storage, quant, gate = _storage(read), _quant(read), read.dtype("model.backend.gate_precision")
    _backend(read)
    ends = None if quant is None else _ends(read)
    described = strategy if strategy in _MEANINGS else "ddp"
    ignored = described in ("megatron_fsdp", "ddp") and read.at("distributed.mp_policy") is not None
    read.note("contradicts", f"distributed.mp_policy under strategy {described}: AutoModel raises ValueError", ignored)
    meaning = _MEANINGS[strategy](read, storage) if strategy in _MEANINGS else updated_itself(storage)
    meaning = with_quant(_with_optimizer(read, meaning), quant, ends)
    cast = read.dtype("distributed.autocast_dtype")
    wrapped = cast if "dllm" in data else None  # recipes/dllm wraps the forward pass in it
    meaning = dataclasses.replace(meaning, router=gate, autocast=wrapped)
    read.note_rows(
        ("contradicts", described != strategy, f"distributed.strategy={strategy}: AutoModel has fsdp2, megatron_fsdp, ddp; described as ddp"),
        ("inert", cast is not None and wrapped is None, "distributed.autocast_dtype: no recipe of an autoregressive language model reads it"),
        ("cannot_express", "peft" in data, "peft: only adapters are trained"),
    )  # fmt: skip
    fields = native.fields_of(meaning, read)
    if fields and gate is not None:
        fields["moe_router_dtype"] = gate.short
    return imported(
        read, NAME, version, meaning, fields, optimizer=_optimizer(read), momentum=read.at("optimizer.momentum"),
        engine=DEFAULT if strategy == "ddp" else engine_with("wrapper" if "megatron" in strategy else "optimizer"),
    )  # fmt: skip


def _backend(read: Reader) -> None:
    """What model.backend says of the linears and of the experts, apart from each other."""
    linear, experts = (str(read.at(f"model.backend.{name}") or "") for name in ("linear", "experts"))
    replaced = experts in ("te", "gmm") and read.at("model.backend.dispatcher") == "torch"
    text = f"model.backend.experts={experts} with dispatcher=torch: AutoModel runs them with torch_mm"
    read.note("inert", text, replaced)
    experts = "torch_mm" if replaced else experts
    there = read.at("model.backend.te_fp8") is not None
    named = f"model.backend.te_fp8 with linear={cut(linear)}"
    read.note_rows(
        ("cannot_express", experts == "torch_mm_mxfp8", "model.backend.experts=torch_mm_mxfp8: the experts' grouped GEMMs run in MXFP8, the linears do not"),
        ("contradicts", there and linear not in ("", "te") and experts != "te",
         f"{named}: AutoModel raises ValueError without linear=te or experts=te; described as linear=te"),
        ("cannot_express", there and linear not in ("", "te") and experts == "te", f"{named}: only the experts are quantized there"),
        ("cannot_express", there and linear in ("", "te") and experts not in ("", "te"),
         f"model.backend.te_fp8 with experts={cut(experts)}: experts of a mixture are not quantized there"),
    )  # fmt: skip


def _storage(read: Reader) -> DType:
    found = read.at("model.torch_dtype", read.at("model.dtype", read.at("model.config.torch_dtype")))
    text = "model.torch_dtype comes from the checkpoint: assumed to be bfloat16"
    read.note("assumed", text, found in (None, "auto"))
    if found in (None, "auto") or not isinstance(found, str):
        return DType.BF16  # its dtype_from_str reads any value that is not a string as bfloat16
    words = {"bf16": DType.BF16, "bfloat16": DType.BF16, "float32": DType.FP32, "half": DType.FP16, "float16": DType.FP16}  # fmt: skip
    word = found.lower().removeprefix("torch.")
    if word not in words:
        read.faults.append(f"model.torch_dtype={brief(found)}: AutoModel accepts {', '.join(words)}")
    return words.get(word, DType.BF16)


def _fsdp2(read: Reader, storage: DType) -> Meaning:
    param, reduce, output = DType.BF16, DType.FP32, DType.BF16
    if not isinstance(read.at("distributed.mp_policy"), Mapping):
        for name, dtype in (("param", param), ("reduce", reduce), ("output", output)):
            read.default(f"distributed.mp_policy.{name}_dtype", dtype)
    else:
        # a policy that names some of the keys replaces the whole default: the others fall back to the gradient's and the parameter's dtype
        param = read.dtype("distributed.mp_policy.param_dtype", storage) or storage
        reduce = read.dtype("distributed.mp_policy.reduce_dtype", param) or param
        since = f"no reduce_dtype: gradients are reduced in param_dtype ({param.short}) before torch 2.15, and since then in the parameters' own dtype ({storage.short})"
        unsaid = param is not storage and read.at("distributed.mp_policy.reduce_dtype") is None
        read.note("assumed", f"distributed.mp_policy: {since}", unsaid)
        read.asked |= {"distributed.mp_policy._target_", "distributed.mp_policy.cast_forward_inputs"}
        output = read.dtype("distributed.mp_policy.output_dtype", param) or param
    handed = None if output is param else output
    return updated_itself(storage, param, reduce, sharded="everything", output=handed, pipeline=handed)


def _megatron_fsdp(read: Reader, storage: DType) -> Meaning:
    keeps = read.flag("distributed.preserve_fp32_weights")
    reduce = DType.FP32 if read.flag("distributed.grad_reduce_in_fp32") else storage
    state, main = DType.FP32 if keeps else storage, DType.FP32 if keeps and storage is not DType.FP32 else None
    found = updated_itself(storage, wire=reduce, main=main, exp_avg=state, exp_avg_sq=state, sharded="everything")
    return dataclasses.replace(found, accumulator=reduce)


def _diffusion(read: Reader, storage: DType) -> Meaning:
    """FSDP2 as recipes/diffusion/train.py sets it up, from the sections model and fsdp; with adapters nothing is cast when it is gathered."""
    compute = read.dtype("model.compute_dtype", DType.BF16) or DType.BF16
    wire = read.dtype("fsdp.reduce_dtype", DType.FP32) or DType.FP32
    whole = bool({"peft", "ddp"} & read.data.keys())
    text = f"model.compute_dtype={compute.short} with storage in {storage.short}: AutoModel raises ValueError"
    read.note("contradicts", text, whole and compute is not storage)
    return updated_itself(storage, storage if whole else compute, wire, sharded="everything")


_DIFFUSION = frozenset({"flow_matching", "fsdp"})
"""Sections that only its diffusion recipes read."""
_MEANINGS = {"fsdp2": _fsdp2, "megatron_fsdp": _megatron_fsdp, "diffusion": _diffusion}
"""Strategy -> what reads it; for any other than ddp it is described as that."""


def _optimizer(read: Reader) -> str:
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


def _ends(read: Reader) -> tuple[int, int] | None:
    """The part of the quantization that fp8.filter_fqns excludes; te_fp8 converts every linear."""
    if read.at("model.backend.te_fp8") is not None:
        read.cannot("model.backend.te_fp8: the output layer is quantized too; here it never is")
        return None
    return native.left_out(read.at("fp8.filter_fqns"), "fp8.filter_fqns", read)


def _quant(read: Reader) -> Quant | None:
    recipe = read.at("model.backend.te_fp8.recipe", "current" if read.at("model.backend.te_fp8") is not None else None)
    if recipe is not None:
        text = f"model.backend.te_fp8.recipe={brief(recipe)}: a recipe object of Transformer Engine"
        read.cannot(text, str(recipe) not in TE_FP8)
        return TE_FP8.get(str(recipe))
    if not read.flag("fp8.enabled"):
        read.note("inert", "fp8 without enabled: true", read.section("fp8"))
        return None
    name = read.at("fp8.recipe_name")
    ignored = ("emulate", "enable_fsdp_float8_all_gather", "force_recompute_fp8_weight_in_bwd")
    if name in ("rowwise", "rowwise_with_gw_hp"):
        for key in ignored:
            read.note("inert", f"fp8.{key}: ignored with recipe_name {name}", read.flag(f"fp8.{key}"))
        return native.TORCHAO[str(name)]
    known = f"fp8.recipe_name={name}: torchao has {', '.join([*native.TORCHAO][:-1])} and {[*native.TORCHAO][-1]}; described as tensorwise"
    read.cannot(known, name not in (None, "tensorwise"))
    gathers = read.flag("fp8.enable_fsdp_float8_all_gather")
    read.cannot("fp8.enable_fsdp_float8_all_gather: FP8 on the wire with 16 or 32-bit storage", gathers)
    return native.TORCHAO["tensorwise"]
