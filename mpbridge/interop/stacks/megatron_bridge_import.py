"""Interprets Megatron Bridge's run_config.yaml, or overrides on its command line; the fields of its MixedPrecisionConfig, and its values of recipes that
mpbridge states otherwise. Read at 067f987d.

mixed_precision takes precedence over the same fields of model, optimizer and ddp; `_target_` and `_call_` entries are read as names, never imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mpbridge.common.errors import BadValue, UnknownName, brief, cut, nearest
from mpbridge.common.facts import BESIDE_ADAM
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Imported, engine_with
from mpbridge.interop.stacks.meaning import Sharded, described
from mpbridge.interop.stacks.optimizers import NO_DTYPES, OFFLOADED, Trained, host_settings, settings
from mpbridge.interop.stacks.reading import Reader, imported, raise_faults, state_word
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.precision_field import Target
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.registry import get_mixed_precision_config, key, recipes

if TYPE_CHECKING:
    import torch

NAME = "megatron-bridge"
CORE = "0.20.0"
"""The megatron-core that it belongs to."""
TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"


@dataclass(kw_only=True)
class BridgeFields:
    """The fields of Bridge's MixedPrecisionConfig, with its defaults; a script compares them with Bridge's source."""

    fp32: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype | None = None
    pipeline_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    autocast_enabled: bool = False
    grad_reduce_in_fp32: bool = True
    fp8: str | None = None
    fp8_recipe: str = "tensorwise"
    first_last_layers_bf16: bool = False
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: str = "most_recent"
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    fp8_param: bool | None = None
    fp8_param_gather: bool = False
    fp4: str | None = None
    fp4_recipe: str = "nvfp4"
    fp4_param: bool | None = None
    fp4_param_gather: bool = False
    loss_scale: float | None = None
    initial_loss_scale: float | None = 4294967296
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    reuse_grad_buf_for_mxfp8_param_ag: bool = False


FIELDS: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(BridgeFields)}

DIFFERS: dict[str, dict[str, Any]] = {
    "bf16_with_nvfp4_mixed": {"fp4_param_gather": True},
    "nemotron_3_super_bf16_with_nvfp4_mixed": {"fp4_param_gather": True, "modules": None},
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": {"fp4_param_gather": True},
}
"""Its values of recipes with the same name but different values in mpbridge; scripts/evidence/stacks/bridge_exports.py compares all of them."""
_DTYPES = ("params_dtype", "pipeline_dtype", "autocast_dtype")
OPTIMIZER = (
    "use_precision_aware_optimizer", "main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders",
)  # fmt: skip
MODEL = (
    "moe_router_dtype", "fp32_residual_connection", "attention_softmax_in_fp32", "fp8_quantizer_factory", "fp4_quantizer_factory",
)  # fmt: skip


def read(words: Iterable[str], *, version: str) -> Imported:
    """The meaning of `section.key=value` overrides; options of the script beside them are named. Raises BadValue for any other word."""
    import yaml

    tree, options, open_ = dict[str, Any](), list[str](), False
    for word in words:
        before, open_ = open_, word.startswith("--") and "=" not in word
        path, equals, value = word.lstrip("+-").partition("=")
        if open_:
            options.append(cut(word))
        elif before and not equals:
            options[-1] += f" {cut(word)}"
        elif not equals:
            raise BadValue(f"{brief(word)} is not an override: expected section.key=value")
        else:
            at = tree
            *sections, last = path.split(".")
            for section in sections:
                inner = at.setdefault(section, {})
                if not isinstance(inner, dict):
                    text = f"{section} is the text {brief(inner)} already, which has no keys"
                    raise BadValue(f"{brief(word)}: {text}: Bridge raises OverridesError")
                at = inner
            at[last] = yaml.safe_load(value)
    found = read_data(tree, version=version)
    said = f"{', '.join(options)}: options of the script, which are not read; a recipe that they name decides the rest"
    return dataclasses.replace(found, assumed=(said, *found.assumed)) if options else found


_BEYOND = {
    "peft": "only adapters are trained",
    "model.quant_recipe": "rules by module stand in it; the linears that it matches run by them",
}


def read_data(data: Any, *, version: str) -> Imported:
    """The sections' meaning. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    read_ = Reader.of(data, "a run_config.yaml")
    fields = _precision(read_)
    _optimizer(read_, fields)
    for name in MODEL:
        value = read_.at(f"model.{name}")
        if name == "moe_router_dtype" and value not in (None, "fp32", "fp64"):
            read_.whole.add(f"model.{name}")
            why = "megatron-core compares it with the words fp32 and fp64: the router runs in the model's dtype"
            read_.note("inert", f"model.{name}={cut(value)}: {why}")
        elif value is not None and value != records("model", version=CORE)[name]["default"]:
            fields[name] = value
    fsdp = read_.flag("ddp.use_megatron_fsdp") or read_.flag("dist.use_megatron_fsdp")
    if fsdp:
        _megatron_fsdp(read_, fields)
    _overridden(read_, fields)
    for path, text in _BEYOND.items():
        if read_.at(path) is not None:
            read_.whole.add(path)
            read_.cannot(f"{path}: {text}")
    engine = engine_with("wrapper") if fsdp else DEFAULT
    distributed = read_.at("ddp.use_distributed_optimizer", read_.at("optimizer.use_distributed_optimizer"))
    if distributed is None and not fsdp:
        distributed = True
        read_.default("ddp.use_distributed_optimizer", distributed)
    trained = _trained(read_, bool(distributed))
    sharded: Sharded = "everything" if fsdp else "optimizer" if trained.divided else "nothing"
    raise_faults(read_.faults, "this run_config.yaml")
    meaning = described(fields, read_.notes["contradicts"], engine=engine, sharded=sharded)
    return imported(
        read_, NAME, version, meaning, fields, engine=engine, optimizer=trained.name, where="optimizer.optimizer", momentum=trained["sgd_momentum"],
        trained=trained,
    )  # fmt: skip


def _trained(read_: Reader, distributed: bool) -> Trained:
    """What trains the run, with its settings as they stand; those that it reads and does not say are noted as in force."""
    there, name = settings(CORE), read_.text("optimizer.optimizer", "adam")
    paths = {field: f"optimizer.{field}" for field in there}
    given: dict[str, Any] = {}
    for field in (one for one, path in paths.items() if read_.at(path) is not None):
        usual = there[field].default
        of = read_.flag if isinstance(usual, bool) else read_.text if isinstance(usual, str) else read_.number
        given[field] = of(paths[field], usual)
    switch = "optimizer.use_layer_wise_distributed_optimizer"
    layered = (read_.at(switch) is not None and read_.flag(switch)) or name.startswith("dist_")
    alone = name.removeprefix("dist_") in BESIDE_ADAM
    text = f"ddp.use_distributed_optimizer=true with optimizer={cut(name)}: that divides Adam's states; these are divided by layer (dist_{cut(name)})"
    said = "ddp.use_distributed_optimizer" not in read_.silent
    read_.note("contradicts", text, alone and distributed and said and not layered)
    asked = layered if alone else distributed
    trained = Trained(name=name, core=CORE, distributed=asked, there=there, given=given)
    read_.note_rows(*trained.notes("optimizer.optimizer"))
    for one in (one for one in trained.read if one.name not in given):
        read_.default(paths[one.name], one.default)
    return trained


def _precision(read_: Reader) -> dict[str, Any]:
    section = read_.at("mixed_precision")
    read_.whole.add("mixed_precision")
    if section is None:
        read_.note("assumed", "no mixed_precision section: model, optimizer and ddp are read directly")
        return _without_section(read_)
    if isinstance(section, str):
        name = key(section)
        if name not in recipes:
            raise UnknownName("recipe", section, recipes)
        return get_mixed_precision_config(name).derive(**DIFFERS.get(name, {})).as_data()
    if not isinstance(section, Mapping):
        read_.faults.append(f"mixed_precision={brief(section)}: expected a recipe's name or a mapping")
        return {}
    values = {name: value for name, value in section.items() if name in FIELDS}
    for name in (one for one in _DTYPES if one in values):
        dtype = read_.dtype(f"mixed_precision.{name}")
        values[name] = dtype and dtype.short
    for name in (one for one in section if one not in FIELDS and one not in ("_target_", "_call_")):
        near = nearest(str(name), FIELDS, most=1)
        read_.note("unknown", f"mixed_precision.{name}" + (f" (nearest: {near[0]})" if near else ""))
    target = section.get("_target_", TARGET)
    text = f"mixed_precision._target_={cut(target)}: not Bridge's class ({TARGET}); described as if it were"
    read_.note("contradicts", text, str(target).rpartition(".")[2] != TARGET.rpartition(".")[2])
    for name in _read_beside(values):
        if values.get(name) is None:
            read_.default(f"mixed_precision.{name}", FIELDS[name])
    return _settled(values, read_)


_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad")
_EDGES = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def _read_beside(values: Mapping[str, Any]) -> Iterator[str]:
    """Fields of Bridge's object whose defaults decide something beside the values given."""
    fp8, rows = values.get("fp8"), values.get("fp16") and not values.get("loss_scale")
    yield "grad_reduce_in_fp32"
    yield from ("fp8_recipe",) if fp8 else ()
    yield from _DELAYED if fp8 and values.get("fp8_recipe") == "delayed" else ()
    yield from ("fp4_recipe",) if values.get("fp4") else ()
    yield from _EDGES if values.get("first_last_layers_bf16") else ()
    yield from _SCALE if rows else ()


def _settled(values: dict[str, Any], read_: Reader) -> dict[str, Any]:
    """Bridge's object as ours: duplicate fields by its rule (the gather spelling wins), inert values dropped, its defaults written where ours differ."""
    for low in ("fp8", "fp4"):
        stored, gather = values.pop(f"{low}_param", None), values.pop(f"{low}_param_gather", None)
        text = f"{low}_param={stored} and {low}_param_gather={gather}: the gather spelling wins there, silently"
        read_.note("contradicts", text, None not in (stored, gather) and stored != gather)
        if values.get(low):
            values[f"{low}_param_gather"] = bool(stored if gather is None else gather)
        else:
            alone = values.pop(f"{low}_recipe", None) not in (None, FIELDS[f"{low}_recipe"])
            read_.note("inert", f"{low}_recipe without {low}", alone)
    if values.get("fp8") and values.get("fp8_recipe") is None:
        values["fp8_recipe"] = "tensorwise"
    edges = {name: values.pop(name, None) for name in _EDGES}
    if values.get("first_last_layers_bf16"):
        values |= {name: 0 if value is None else value for name, value in edges.items()}
    cast = values.pop("autocast_enabled", False)
    read_.note_rows(
        ("inert", any(edges.values()) and not values.get("first_last_layers_bf16"), "num_layers_at_*_in_bf16 without first_last_layers_bf16"),
        ("inert", cast, "autocast_enabled: has no effect on megatron-core there (its name is enable_autocast)"),
    )  # fmt: skip
    defaults, wide = MixedPrecisionConfig().stored(), bool(values.get("grad_reduce_in_fp32", True))
    said = {name: value for name, value in values.items() if value is not None and value != defaults[name]}
    return said | {"grad_reduce_in_fp32": wide}


_WITHOUT: Mapping[str, Target] = MappingProxyType({
    **dict.fromkeys((
        "fp8", "fp8_recipe", *_DELAYED, "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_param", "fp4", "fp4_recipe", "fp4_param",
        "first_last_layers_bf16", *_EDGES), "model"),
    **dict.fromkeys(("loss_scale", *_SCALE), "optimizer"),
    **dict.fromkeys(("grad_reduce_in_fp32", "fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"), "ddp"),
})  # fmt: skip
"""Field -> the section whose value acts without a mixed_precision, with megatron-core's default instead of Bridge's."""


def _without_section(read_: Reader) -> dict[str, Any]:
    """What megatron-core's own configurations say."""
    base = "bf16" if read_.flag("model.bf16") else "fp16" if read_.flag("model.fp16") else "fp32"
    if read_.at("model.bf16") is None and read_.at("model.fp16") is None:
        text = "neither a mixed_precision section nor model.bf16 and model.fp16: the recipe that this file overrides decides: pass its run_config.yaml"
        read_.note("undecided", text)
    values: dict[str, Any] = {base: True}
    defaults = {name: records(section, version=CORE)[name]["default"] for name, section in _WITHOUT.items()}
    for name, section in _WITHOUT.items():
        path, default = f"{section}.{name}", defaults[name]
        # the gather spelling stands in ddp and says nothing of what is stored
        if name.endswith("_param_gather"):
            read_.at(path)
        elif name in ("grad_reduce_in_fp32", "fp8_param", "fp4_param", "first_last_layers_bf16"):
            said = name == "grad_reduce_in_fp32" or read_.at(path) is not None
            values[name] = read_.flag(path, bool(default)) if said else bool(default)
        else:
            values[name] = read_.at(path)
    for name in _read_beside(values):
        if values[name] is None:
            values[name] = defaults[name]
            read_.default(f"{_WITHOUT[name]}.{name}", values[name])
    if base != "fp16":
        values = {name: value for name, value in values.items() if _WITHOUT.get(name) != "optimizer"}
    pipeline, stored = read_.dtype("model.pipeline_dtype"), read_.dtype("model.params_dtype")
    values["pipeline_dtype"] = pipeline and pipeline.short
    # under bf16 and fp16 its Float16Module casts every parameter
    values["params_dtype"] = None if stored is None or base != "fp32" else stored.short
    fields = _settled(values, read_)
    if read_.flag("model.enable_autocast"):
        cast = read_.dtype("model.autocast_dtype")
        fields |= {"autocast_enabled": True} | ({} if cast is None else {"autocast_dtype": cast.short})
    return fields


def _optimizer(read_: Reader, fields: dict[str, Any]) -> None:
    aware = read_.flag("optimizer.use_precision_aware_optimizer")
    given = {name: f"optimizer.{name}" for name in OPTIMIZER if read_.at(f"optimizer.{name}") is not None}
    dtypes = {name: read_.dtype(path) for name, path in given.items() if name.endswith("_dtype")}
    for name in (one for one in OPTIMIZER if aware and one.endswith("_dtype") and one not in given):
        read_.default(f"optimizer.{name}", DType.FP32)
    if aware:
        fields |= {name: read_.flag(path) for name, path in given.items() if name not in dtypes}
        fields |= {name: state_word(one) for name, one in dtypes.items() if one is not None}
    path = "optimizer.optimizer_cpu_offload"
    offload = read_.at(path) is not None and read_.flag(path)  # off decides nothing, and is not listed
    share = read_.at("optimizer.optimizer_offload_fraction", 0.0)
    if aware and offload:
        fields |= OFFLOADED
    if fields.get("main_grads_dtype") == "fp32":
        del fields["main_grads_dtype"]
    whole = fields.get("main_params_dtype", "fp32") == "fp32" and fields.get("store_param_remainders") is not False
    leaks = aware and whole and not fields.get("fp8") and read_.at("mixed_precision") is not None
    unread = any(dtypes.get(name) not in (None, DType.FP32) for name in OFFLOADED)
    read_.note_rows(
        ("inert", aware and offload and unread, f"16-bit optimizer states with optimizer.optimizer_cpu_offload: {NO_DTYPES}"),
        ("cannot_express", offload, f"optimizer.optimizer_cpu_offload: {host_settings(brief(share))}"),
        ("contradicts", not aware and any(one not in (None, DType.FP32) for one in dtypes.values()),
         "16-bit optimizer states without use_precision_aware_optimizer: megatron-core refuses them"),
        ("inert", leaks, "optimizer.store_param_remainders: its setup() copies fp8_recipe to the optimizer though FP8 is off: whole FP32 main weights are megatron-core's, not FusedAdam's"),
    )  # fmt: skip
    if leaks:
        fields["store_param_remainders"] = False


def _megatron_fsdp(read_: Reader, fields: dict[str, Any]) -> None:
    base = DType.BF16 if fields.get("bf16") else DType.FP16 if fields.get("fp16") else DType.FP32
    grads = read_.dtype("ddp.megatron_fsdp_main_grads_dtype", base) or base
    wire = read_.dtype("ddp.megatron_fsdp_grad_comm_dtype", grads) or grads
    main = read_.dtype("ddp.megatron_fsdp_main_params_dtype", DType.FP32) or DType.FP32
    reuse, narrow = fields.pop("reuse_grad_buf_for_mxfp8_param_ag", False), wire is not DType.FP32
    read_.note_rows(
        ("inert", fields.get("grad_reduce_in_fp32") and narrow, f"grad_reduce_in_fp32: this engine does not read it; gradients are reduced in {wire.short}"),
        ("inert", reuse, "reuse_grad_buf_for_mxfp8_param_ag: Bridge switches it off under Megatron-FSDP (training/config.py)"),
    )  # fmt: skip
    fields["grad_reduce_in_fp32"] = not narrow
    if wire is not grads:
        fields["grad_accumulation_dtype"] = grads.short
    if base is not DType.FP32 and main is not DType.FP32:
        fields["main_params_dtype"] = main.short


def _overridden(read_: Reader, fields: Mapping[str, Any]) -> None:
    """Settings of other sections that mixed_precision overrides."""
    if read_.at("mixed_precision") is None:
        return
    asked, ours = read_.at("ddp.grad_reduce_in_fp32"), MixedPrecisionConfig().stored()
    reduces = asked is not None and read_.flag("ddp.grad_reduce_in_fp32")
    other = asked is not None and reduces != bool(fields.get("grad_reduce_in_fp32", True))
    text = f"ddp.grad_reduce_in_fp32={asked}: mixed_precision takes precedence"
    read_.note("inert", text, other and not read_.flag("ddp.use_megatron_fsdp"))
    scaling = ("fp8_recipe", *_DELAYED[:3]) if fields.get("fp8") else ()
    for name in ("fp8", "fp8_param", "fp4", "first_last_layers_bf16", *scaling):
        asked = read_.at(f"model.{name}")
        kept = fields.get(name, fields.get(f"{name}_gather", ours[name]))
        text = f"model.{name}={asked}: mixed_precision takes precedence"
        read_.note("inert", text, asked is not None and (asked or kept) and asked != kept)
