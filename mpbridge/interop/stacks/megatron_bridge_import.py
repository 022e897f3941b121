"""Interprets Megatron Bridge's run_config.yaml, or overrides on its command line.

mixed_precision takes precedence over the same fields of model, optimizer and ddp; `_target_` and `_call_` entries are read as names, never imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import BadValue, DataError, UnknownName, brief, cut, nearest
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Imported, engine_with, updated_by
from mpbridge.interop.stacks.described import described
from mpbridge.interop.stacks.known_keys import unknown_of, with_rest
from mpbridge.interop.stacks.meaning import Sharded
from mpbridge.interop.stacks.megatron_bridge_fields import CORE, DIFFERS, FIELDS, NAME, TARGET
from mpbridge.interop.stacks.python_values import SourceObject, Unknown, plain, without_unknown
from mpbridge.interop.stacks.reading import Reader, raise_faults
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.precision_field import Target
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.registry import get_mixed_precision_config, key, recipes

_DTYPES = ("params_dtype", "pipeline_dtype", "autocast_dtype")
_OPTIMIZER = (
    "use_precision_aware_optimizer", "main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders",
)  # fmt: skip
_MODEL = (
    "moe_router_dtype", "fp32_residual_connection", "attention_softmax_in_fp32", "fp8_quantizer_factory", "fp4_quantizer_factory",
)  # fmt: skip


def read(words: Iterable[str], *, version: str) -> Imported:
    """The meaning of `section.key=value` overrides; options of the script beside them are named. Raises BadValue for any other word."""
    import yaml

    tree: dict[str, Any] = {}
    overrides, options = _apart(words)
    for word in overrides:
        path, equals, value = word.lstrip("+-").partition("=")
        if not equals:
            raise BadValue(f"{brief(word)} is not an override: expected section.key=value")
        at = tree
        *sections, last = path.split(".")
        for section in sections:
            inner = at.setdefault(section, {})
            if not isinstance(inner, dict):
                raise BadValue(
                    f"{brief(word)}: {section} is the text {brief(inner)} already, which has no keys: Bridge raises OverridesError"
                )
            at = inner
        at[last] = yaml.safe_load(value)
    found = read_data(tree, version=version)
    said = f"{', '.join(options)}: options of the script, which are not read; a recipe that they name decides the rest"
    return dataclasses.replace(found, assumed=(said, *found.assumed)) if options else found


def _apart(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Overrides, and options of the script that takes them, with their values."""
    overrides: list[str] = []
    options: list[str] = []
    open_ = False
    for word in words:
        if word.startswith("--") and "=" not in word:
            options.append(cut(word))
        elif open_ and "=" not in word:
            options[-1] += f" {cut(word)}"
        else:
            overrides.append(word)
        open_ = word.startswith("--") and "=" not in word
    return overrides, options


def read_data(data: Any, *, version: str) -> Imported:
    """The sections' meaning. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    if not isinstance(data, Mapping):
        raise DataError(f"a run_config.yaml is a mapping, found {type(data).__name__}")
    read_, notes = Reader(data), _Notes()
    fields = _precision(read_, notes)
    _optimizer(read_, fields, notes)
    for name in _MODEL:
        value = read_.at(f"model.{name}")
        if name == "moe_router_dtype" and value not in (None, "fp32", "fp64"):
            read_.whole.add(f"model.{name}")
            notes.inert.append(
                f"model.{name}={cut(value)}: megatron-core compares it with the words fp32 and fp64: the router runs in the model's dtype"
            )
        elif value is not None and value != records("model", version=CORE)[name]["default"]:
            fields[name] = value
    fsdp = read_.flag("ddp.use_megatron_fsdp") or read_.flag("dist.use_megatron_fsdp")
    if fsdp:
        _megatron_fsdp(read_, fields, notes)
    _overridden(read_, fields, notes)
    if read_.at("model.quant_recipe") is not None:
        read_.whole.add("model.quant_recipe")
        notes.cannot.append("model.quant_recipe: rules by module stand in it; the linears that it matches run by them")
    raise_faults(read_.faults, "this run_config.yaml")
    engine = engine_with("wrapper") if fsdp else DEFAULT
    distributed = read_.at("ddp.use_distributed_optimizer", read_.at("optimizer.use_distributed_optimizer"))
    if distributed is None and not fsdp:
        distributed = True
        read_.default("ddp.use_distributed_optimizer", distributed)
    sharded: Sharded = "everything" if fsdp else "optimizer" if distributed else "nothing"
    meaning = described(fields, notes.contradicts, engine=engine, sharded=sharded)
    found = Imported(
        stack=NAME, version=version, fields=fields, engine=engine, meaning=meaning,
        inert=tuple(notes.inert), contradicts=tuple(notes.contradicts), cannot_express=tuple(notes.cannot),
        unknown=tuple(notes.unknown), assumed=tuple(notes.assumed), undecided=tuple(notes.undecided),
    )  # fmt: skip
    kind, momentum = read_.text("optimizer.optimizer", "adam"), read_.at("optimizer.sgd_momentum", 0.9)
    found = updated_by(found, kind, "optimizer.optimizer", momentum=momentum)
    return with_rest(found, read_)


OPAQUE = frozenset({"get_mixed_precision_config"})
"""Functions of which the arguments are read, not the body."""
_SECTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "mixed_precision": frozenset(FIELDS),
        "optimizer": frozenset({*_OPTIMIZER, "use_distributed_optimizer", "optimizer", "sgd_momentum"}),
        "ddp": frozenset({
            "grad_reduce_in_fp32", "use_distributed_optimizer", "use_megatron_fsdp", "megatron_fsdp_main_params_dtype",
            "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype",
        }),
        "model": frozenset({
            *_MODEL, "bf16", "fp16", "fp8", "fp8_param", "fp8_recipe", "fp4", "first_last_layers_bf16",
        }),
        "dist": frozenset({"use_megatron_fsdp"}),
    }
)  # fmt: skip
"""The fields that are read from a recipe function's sections."""


def read_made(made: Any, notes: Iterable[str], *, name: str, version: str) -> Imported:
    """The meaning of the ConfigContainer that a recipe function returns, from the function's text. Raises DataError if the text does not determine its precision."""
    if not isinstance(made, SourceObject) or "mixed_precision" not in made.attributes:
        raise DataError(f"{name}: its text does not determine the mixed_precision of what it returns")
    data: dict[str, Any] = {}
    not_known: list[str] = []
    unknown: list[str] = []
    for section, wanted in _SECTIONS.items():
        value = made.attributes.get(section)
        if section == "mixed_precision":
            value = _named_recipe(value, name)
        if isinstance(value, SourceObject):
            unknown += unknown_of(NAME, section, value.attributes)
            kept = {field: plain(inner) for field, inner in value.attributes.items() if field in wanted}
            data[section] = without_unknown(kept, not_known, section)
        elif isinstance(value, str):
            data[section] = value
    found = read_data(data, version=version)
    assumed = [f"{one}: known only at run time; left at its default" for one in not_known]
    low = found.meaning.quantization
    # three of recipes/nemotronh/h100: nemotronh_47b and 56b, nemotron_nano_12b_v2
    misnamed = (
        [f"{name} says BF16, and its GEMMs are quantized: {low}"] if "_bf16_config" in name and low != "none" else []
    )
    return dataclasses.replace(
        found,
        unknown=(*found.unknown, *unknown),
        contradicts=(*found.contradicts, *misnamed),
        assumed=(*found.assumed, *assumed, *dict.fromkeys(notes)),
    )


def _named_recipe(value: Any, name: str) -> Any:
    """mixed_precision as a recipe's name, or as an object created by a call, with the attributes set on it since."""
    if isinstance(value, Unknown):
        raise DataError(f"{name}: mixed_precision = {value.text}: known only at run time")
    if not isinstance(value, SourceObject) or value.callee.endswith("MixedPrecisionConfig"):
        return value
    last = value.callee.rpartition(".")[2]
    asked = value.arguments[0] if last in OPAQUE and value.arguments else last
    if not isinstance(asked, str) or key(asked) not in recipes:
        raise DataError(
            f"{name}: mixed_precision = {value.callee}(...): no recipe has that name, and its source is not in this checkout"
        )
    said = get_mixed_precision_config(key(asked)).derive(**DIFFERS.get(key(asked), {})).stored()
    base = {field: said[field].short if isinstance(said[field], DType) else said[field] for field in FIELDS}
    set_since = value.attributes
    return SourceObject(callee=TARGET, attributes={**{n: v for n, v in base.items() if v is not None}, **set_since})


class _Notes:
    """Notes in addition to the fields."""

    def __init__(self) -> None:
        self.inert: list[str] = []
        self.contradicts: list[str] = []
        self.cannot: list[str] = []
        self.unknown: list[str] = []
        self.assumed: list[str] = []
        self.undecided: list[str] = []


def _precision(read_: Reader, notes: _Notes) -> dict[str, Any]:
    section = read_.at("mixed_precision")
    read_.whole.add("mixed_precision")
    if section is None:
        notes.assumed.append("no mixed_precision section: model, optimizer and ddp are read directly")
        return _without_section(read_, notes)
    if isinstance(section, str):
        name = key(section)
        if name not in recipes:
            raise UnknownName("recipe", section, recipes)
        return get_mixed_precision_config(name).derive(**DIFFERS.get(name, {})).as_data()
    if not isinstance(section, Mapping):
        read_.faults.append(f"mixed_precision={brief(section)}: expected a recipe's name or a mapping")
        return {}
    values: dict[str, Any] = {}
    for name, value in section.items():
        if name == "_target_" and str(value).rpartition(".")[2] != TARGET.rpartition(".")[2]:
            notes.contradicts.append(
                f"mixed_precision._target_={cut(value)}: not Bridge's class ({TARGET}); described as if it were"
            )
        if name in ("_target_", "_call_"):
            continue
        if name not in FIELDS:
            near = nearest(str(name), FIELDS, most=1)
            notes.unknown.append(f"mixed_precision.{name}" + (f" (nearest: {near[0]})" if near else ""))
            continue
        dtype = read_.dtype(f"mixed_precision.{name}") if name in _DTYPES else None
        values[name] = dtype.short if dtype is not None else None if name in _DTYPES else value
    for name in _read_beside(values):
        if values.get(name) is None:
            read_.default(f"mixed_precision.{name}", FIELDS[name])
    return _settled(values, notes)


def _read_beside(values: Mapping[str, Any]) -> Iterator[str]:
    """Fields of Bridge's object whose defaults decide something beside the values given."""
    yield "grad_reduce_in_fp32"
    if values.get("fp8"):
        yield "fp8_recipe"
        if values.get("fp8_recipe") == "delayed":
            yield from ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad")
    if values.get("fp4"):
        yield "fp4_recipe"
    if values.get("first_last_layers_bf16"):
        yield from ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if values.get("fp16") and not values.get("loss_scale"):
        yield from ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def _settled(values: dict[str, Any], notes: _Notes) -> dict[str, Any]:
    """Bridge's object as ours: duplicate fields by its rule (the gather spelling wins), inert values dropped, its defaults written where ours differ."""
    for low in ("fp8", "fp4"):
        pair = values.get(f"{low}_param"), values.get(f"{low}_param_gather")
        if None not in pair and pair[0] != pair[1]:
            notes.contradicts.append(
                f"{low}_param={pair[0]} and {low}_param_gather={pair[1]}: the gather spelling wins there, silently"
            )
        stored = bool(values.pop(f"{low}_param", False) if pair[1] is None else pair[1])
        values.pop(f"{low}_param", None)
        values.pop(f"{low}_param_gather", None)
        if values.get(low):
            values[f"{low}_param_gather"] = stored
        elif values.pop(f"{low}_recipe", None) not in (None, FIELDS[f"{low}_recipe"]):
            notes.inert.append(f"{low}_recipe without {low}")
    if values.get("fp8") and values.get("fp8_recipe") is None:
        values["fp8_recipe"] = "tensorwise"
    edges = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if values.get("first_last_layers_bf16"):
        values |= {name: values.get(name, 0) for name in edges}
    elif any(values.get(name) for name in edges):
        notes.inert.append("num_layers_at_*_in_bf16 without first_last_layers_bf16")
        values = {name: value for name, value in values.items() if name not in edges}
    if values.pop("autocast_enabled", False):
        notes.inert.append("autocast_enabled: has no effect on megatron-core there (its name is enable_autocast)")
    defaults = MixedPrecisionConfig().stored()
    return {name: value for name, value in values.items() if value is not None and value != defaults[name]} | {
        "grad_reduce_in_fp32": bool(values.get("grad_reduce_in_fp32", True))
    }


_OF_MODEL = (
    "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "fp8_dot_product_attention",
    "fp8_multi_head_attention", "fp8_param", "fp4", "fp4_recipe", "fp4_param", "first_last_layers_bf16", "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)  # fmt: skip
_OF_OPTIMIZER = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_OF_DDP = ("grad_reduce_in_fp32", "fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")
_SECTIONED: tuple[tuple[Target, tuple[str, ...]], ...] = (
    ("model", _OF_MODEL),
    ("optimizer", _OF_OPTIMIZER),
    ("ddp", _OF_DDP),
)
_WITHOUT: Mapping[str, Target] = MappingProxyType({name: section for section, names in _SECTIONED for name in names})
"""Field -> the section whose value acts without a mixed_precision, with megatron-core's default instead of Bridge's."""


def _without_section(read_: Reader, notes: _Notes) -> dict[str, Any]:
    """What megatron-core's own configurations say."""
    base = "bf16" if read_.flag("model.bf16") else "fp16" if read_.flag("model.fp16") else "fp32"
    if read_.at("model.bf16") is None and read_.at("model.fp16") is None:
        text = "neither a mixed_precision section nor model.bf16 and model.fp16: the recipe that this file overrides decides: pass its run_config.yaml"
        notes.undecided.append(text)
    values: dict[str, Any] = {base: True}
    for name, section in _WITHOUT.items():
        path, default = f"{section}.{name}", records(section, version=CORE)[name]["default"]
        # the gather spelling stands in ddp and says nothing of what is stored
        if name.endswith("_param_gather"):
            read_.at(path)
        elif name in ("grad_reduce_in_fp32", "fp8_param", "fp4_param", "first_last_layers_bf16"):
            said = name == "grad_reduce_in_fp32" or read_.at(path) is not None
            values[name] = read_.flag(path, bool(default)) if said else bool(default)
        else:
            values[name] = read_.at(path)
    for name in _read_beside(values):
        section = _WITHOUT[name]
        if values[name] is None:
            values[name] = records(section, version=CORE)[name]["default"]
            read_.default(f"{section}.{name}", values[name])
    if base != "fp16":
        values = {name: value for name, value in values.items() if name not in _OF_OPTIMIZER}
    pipeline, stored = read_.dtype("model.pipeline_dtype"), read_.dtype("model.params_dtype")
    values["pipeline_dtype"] = None if pipeline is None else pipeline.short
    # under bf16 and fp16 its Float16Module casts every parameter
    values["params_dtype"] = None if stored is None or base != "fp32" else stored.short
    fields = _settled(values, notes)
    if read_.flag("model.enable_autocast"):
        cast = read_.dtype("model.autocast_dtype")
        fields |= {"autocast_enabled": True} | ({} if cast is None else {"autocast_dtype": cast.short})
    return fields


def _optimizer(read_: Reader, fields: dict[str, Any], notes: _Notes) -> None:
    aware = read_.flag("optimizer.use_precision_aware_optimizer")
    for name in _OPTIMIZER:
        path = f"optimizer.{name}"
        if read_.at(path) is None or not aware:
            continue
        if name.endswith("_dtype"):
            dtype = read_.dtype(path)
            if dtype is not None:
                fields[name] = "fp8" if dtype is DType.UINT8 else dtype.short
        else:
            fields[name] = read_.flag(path)
    if fields.get("main_grads_dtype") == "fp32":
        del fields["main_grads_dtype"]
    if not aware and any(
        read_.dtype(f"optimizer.{name}", DType.FP32) is not DType.FP32 for name in _OPTIMIZER if name.endswith("_dtype")
    ):
        notes.contradicts.append(
            "16-bit optimizer states without use_precision_aware_optimizer: megatron-core refuses them"
        )
    leaks = aware and not fields.get("fp8") and read_.at("mixed_precision") is not None
    if (
        leaks
        and fields.get("main_params_dtype", "fp32") == "fp32"
        and fields.get("store_param_remainders") is not False
    ):
        fields["store_param_remainders"] = False
        notes.inert.append(
            "optimizer.store_param_remainders: its setup() copies fp8_recipe to the optimizer though FP8 is off: whole FP32 main weights are megatron-core's, not FusedAdam's"
        )


def _megatron_fsdp(read_: Reader, fields: dict[str, Any], notes: _Notes) -> None:
    base = DType.BF16 if fields.get("bf16") else DType.FP16 if fields.get("fp16") else DType.FP32
    grads = read_.dtype("ddp.megatron_fsdp_main_grads_dtype", base) or base
    wire = read_.dtype("ddp.megatron_fsdp_grad_comm_dtype", grads) or grads
    if fields.get("grad_reduce_in_fp32") and wire is not DType.FP32:
        notes.inert.append("grad_reduce_in_fp32: this engine does not read it; gradients are reduced in " + wire.short)
    fields["grad_reduce_in_fp32"] = wire is DType.FP32
    if wire is not grads:
        fields["grad_accumulation_dtype"] = grads.short
    if fields.pop("reuse_grad_buf_for_mxfp8_param_ag", False):
        notes.inert.append(
            "reuse_grad_buf_for_mxfp8_param_ag: Bridge switches it off under Megatron-FSDP (training/config.py)"
        )
    main = read_.dtype("ddp.megatron_fsdp_main_params_dtype", DType.FP32) or DType.FP32
    if base is not DType.FP32 and main is not DType.FP32:
        fields["main_params_dtype"] = main.short


_SCALING = ("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")


def _overridden(read_: Reader, fields: Mapping[str, Any], notes: _Notes) -> None:
    """Settings of other sections that mixed_precision overrides."""
    if read_.at("mixed_precision") is None:
        return
    asked = read_.at("ddp.grad_reduce_in_fp32")
    if (
        asked is not None
        and read_.flag("ddp.grad_reduce_in_fp32") != bool(fields.get("grad_reduce_in_fp32", True))
        and not read_.flag("ddp.use_megatron_fsdp")
    ):
        notes.inert.append(f"ddp.grad_reduce_in_fp32={asked}: mixed_precision takes precedence")
    ours = MixedPrecisionConfig().stored()
    for name in ("fp8", "fp8_param", "fp4", "first_last_layers_bf16", *(_SCALING if fields.get("fp8") else ())):
        asked = read_.at(f"model.{name}")
        kept = fields.get(name, fields.get(f"{name}_gather", ours[name]))
        if asked is not None and (asked or kept) and asked != kept:
            notes.inert.append(f"model.{name}={asked}: mixed_precision takes precedence")
