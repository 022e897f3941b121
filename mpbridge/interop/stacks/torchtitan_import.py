"""Interprets torchtitan's arguments, the TOML of earlier versions and the names of its configs. Read at b5bcd76c.

A config_registry function is never run: it is read as text (`read_made`), or only its name is used (`--config NAME`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import DataError, brief, cut
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Imported, engine_with, updated_by
from mpbridge.interop.stacks.known_keys import unknown_of, with_rest
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.python_values import SourceObject, Unknown, plain, without_unknown
from mpbridge.interop.stacks.reading import Reader, options_of, raise_faults
from mpbridge.interop.stacks.sharded_torch import fields_of, left_out, quant_fields
from mpbridge.interop.stacks.torchtitan import EXPERT_CONVERTERS, GATE, NAME
from mpbridge.precision.policy import Quant, Region

_OLD = ("float8", "mx", "quantize", "model.converters")
"""Sections of TOML files before converters moved into Python."""


def read(words: Iterable[str], *, version: str) -> Imported:
    """The meaning of `--section.key value` arguments, including `--config NAME`. Raises BadValue for stray words."""
    faults: list[str] = []
    data, strays = options_of(words)
    faults += [f"{brief(word)} is not an option: expected --section.key VALUE" for word in strays]
    faults += [f"--{name} has no value" for name in ("config", *_WORDS) if data.get(name) is True]
    raise_faults(faults, "these arguments of torchtitan")
    return read_data(data, version=version)


def read_data(data: Any, *, version: str) -> Imported:
    """The settings' meaning under FSDP2. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    if not isinstance(data, Mapping):
        raise DataError(f"a torchtitan configuration is a mapping, found {type(data).__name__}")
    read_ = Reader(data)
    cannot: list[str] = []
    inert: list[str] = []
    contradicts: list[str] = []
    assumed = [
        "FSDP2 installs the policy at every sharding degree, including 1 (its docstrings still mention autocast)"
    ]
    storage, compute, reduce = _dtypes(read_, contradicts)
    quant = _quant(read_, cannot, inert, assumed)
    states = storage
    if read_.at("optimizer.implementation") == "fused_opt_states_bf16":
        states = DType.BF16
    meaning = Meaning(
        storage=storage, compute=compute, wire=reduce, accumulator=storage, exp_avg=states, exp_avg_sq=states,
        sharded="nothing" if read_.number("parallelism.data_parallel_shard_degree", -1) == 1 else "everything",
    )  # fmt: skip
    ends = _filtered(read_, cannot, assumed) if quant is not None else None
    if quant is not None:
        edges = (Region(first=ends[0], last=ends[1]),) if ends is not None else ()
        meaning = dataclasses.replace(meaning, regions=(*edges, Region(quant=quant)))
    raise_faults(read_.faults, "this torchtitan configuration")
    fields = fields_of(meaning, cannot, quant, ends)
    if states is not storage:
        cannot.append("both moments in BF16 with FP32 parameters: its own optimizer, on CUDA")
    found = Imported(
        stack=NAME, version=version, fields=fields, engine=engine_with("optimizer"), meaning=meaning, inert=tuple(inert),
        contradicts=tuple(contradicts), cannot_express=tuple(cannot), assumed=tuple(assumed),
    )  # fmt: skip
    found = updated_by(found, read_.at("optimizer.name"), "optimizer.name")  # of versions before its groups
    return with_rest(found, read_)


def _dtypes(read_: Reader, contradicts: list[str]) -> tuple[DType, DType, DType]:
    """The stored, compute and reduction dtypes; what its parser would refuse is added to `contradicts`."""
    storage = read_.dtype("training.dtype", DType.FP32) or DType.FP32
    compute = read_.dtype("training.mixed_precision_param", DType.BF16) or DType.BF16
    reduce = read_.dtype("training.mixed_precision_reduce", DType.FP32) or DType.FP32
    if DType.FP16 in (storage, compute):
        contradicts.append("float16: training.dtype and mixed_precision_param accept only bfloat16 and float32")
    if reduce is not DType.FP32:
        contradicts.append(f"training.mixed_precision_reduce={reduce.value}: its parser takes float32 only")
    return storage, compute, DType.FP32


_WORDS = (
    "training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce", "optimizer.implementation",
)  # fmt: skip
"""Precision options that take a word."""
OPAQUE = frozenset({"model_registry", "nvfp4_bf16_tail_fqns"})
"""Functions of which the arguments are read, not the body."""
_CONVERTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Float8LinearConverter": ("e4m3", "rowwise"),
        "MXFP8LinearConverter": ("e4m3", "mxfp8"),
        "NVFP4LinearConverter": ("e2m1", "nvfp4"),
    }
)
"""Converter -> format and scaling."""
_OF_EXPERTS: Mapping[str, str] = MappingProxyType({word: scaling for scaling, word in EXPERT_CONVERTERS.items()})
"""Converter of experts -> the scaling of their grouped GEMMs."""


def read_made(made: Any, notes: Iterable[str], *, name: str, version: str) -> Imported:
    """The meaning of the Trainer.Config that a config_registry function returns, from the function's text. Raises DataError if it returns none."""
    if not isinstance(made, SourceObject) or not {"training", "model_spec"} & made.attributes.keys():
        raise DataError(f"{name}: no Trainer.Config can be determined from its text")
    not_known: list[str] = []
    data: dict[str, Any] = {}
    unknown: list[str] = []
    for section, wanted in (("training", _TRAINING), ("optimizer", ("implementation",))):
        value = made.attributes.get(section)
        inside = value.attributes if isinstance(value, SourceObject) else {}
        if isinstance(value, Unknown):
            not_known.append(f"{section} = {value.text}")
        unknown += unknown_of(NAME, section, inside)
        data[section] = without_unknown({n: plain(v) for n, v in inside.items() if n in wanted}, not_known, section)
    found = read_data(data, version=version)
    spec = made.attributes.get("model_spec")
    inner = spec.attributes.get("converters") if isinstance(spec, SourceObject) else None
    not_known += [
        f"{name} = {one.text}"
        for name, one in (("model_spec", spec), ("converters", inner))
        if isinstance(one, Unknown)
    ]
    converted = _converted(spec)
    quant = converted.quant
    fields, meaning = dict(found.fields), found.meaning
    if quant is not None:
        fields |= quant_fields(quant) if fields else {}
        meaning = dataclasses.replace(meaning, regions=(Region(quant=quant),))
    assumed = [f"{one}: known only at run time; left at its default" for one in not_known]
    found = updated_by(found, _updater(made.attributes.get("optimizer")), "optimizer.param_groups")
    return dataclasses.replace(
        found,
        fields=fields,
        meaning=dataclasses.replace(meaning, optimizer=found.meaning.optimizer),
        cannot_express=(*found.cannot_express, *converted.cannot),
        unknown=(*found.unknown, *unknown),
        assumed=(*found.assumed, *converted.assumed, *assumed, *dict.fromkeys(notes)),
    )


def _updater(optimizer: Any) -> str | None:
    """The optimizer of its param_groups: of several the one that is not Adam, since that one updates the matrices. None: the text tells none."""
    groups = optimizer.attributes.get("param_groups") if isinstance(optimizer, SourceObject) else None
    listed = groups if isinstance(groups, list) else []
    said = [one.attributes.get("optimizer_name") for one in listed if isinstance(one, SourceObject)]
    names = sorted((name for name in said if isinstance(name, str)), key=lambda name: name.startswith("Adam"))
    return names[0] if names else None


_TRAINING = ("dtype", "mixed_precision_param", "mixed_precision_reduce")


@dataclasses.dataclass(kw_only=True)
class _Converted:
    """What model_registry's converters do."""

    quant: Quant | None = None
    """Of the linears."""
    gate: str = ""
    """The converter whose linears include the router of experts."""
    experts: str = ""
    """The scaling of the experts' grouped GEMMs; '' if none covers them."""
    cannot: list[str] = dataclasses.field(default_factory=list)
    """What has no setting here."""

    @property
    def assumed(self) -> list[str]:
        """That the model is dense, if a mixture's experts would not be quantized."""
        alone = self.quant is not None and not self.experts
        return ["a dense model: no converter covers the experts of a mixture"] if alone else []


def _converted(spec: Any) -> _Converted:
    """What the converters of a model_registry do."""
    given = spec.attributes.get("converters") if isinstance(spec, SourceObject) else None
    found = _Converted()
    for converter in given if isinstance(given, list) else []:
        if not isinstance(converter, SourceObject):
            found.cannot.append(
                f"a converter that its text does not determine: {getattr(converter, 'text', converter)}"
            )
            continue
        word = converter.callee.removesuffix(".Config").rpartition(".")[2]
        if word in _OF_EXPERTS:
            found.experts = _OF_EXPERTS[word]
        elif word not in _CONVERTERS:
            found.cannot.append(f"{word}: no setting of a recipe")
        else:
            format, scaling = _CONVERTERS[word]
            said = converter.attributes
            if said.get("recipe_name") == "rowwise_with_gw_hp":
                scaling = "rowwise_gw_hp"
            found.quant = Quant(format=format, scaling=scaling)
            found.gate = word if _covers_gate(said) else ""
            found.cannot += _filters(word, said)
    _experts_apart(found)
    return found


def _covers_gate(said: Mapping[str, Any]) -> bool:
    """Whether a converter's substrings choose the router's gate."""
    covered, left = (
        [one for one in given if isinstance(one, str)] if isinstance(given, list) else given
        for given in map(said.get, ("fqns", "filter_fqns"))
    )
    name = f"layers.0.moe.{GATE}"
    if covered:
        return isinstance(covered, list) and any(one in name for one in covered)
    return not (isinstance(left, list) and any(one in name for one in left))


def _experts_apart(found: _Converted) -> None:
    """Notes what a mixture's experts and router have that a recipe cannot say: another scaling than the linears', or other layers."""
    linears = found.quant.scaling if found.quant is not None else "none"
    if found.experts and found.experts != linears:
        text = "the linears are not quantized" if found.quant is None else f"the linears have {linears}"
        found.cannot.append(
            f"{EXPERT_CONVERTERS[found.experts]}: the experts' grouped GEMMs run in {found.experts}; {text}"
        )
    if found.experts and found.gate:
        found.cannot.append(f"{found.gate}: the experts' router ({GATE}) is quantized too; here it never is")


def _every_linear(covered: Any) -> bool:
    """Whether substrings choose every linear of a layer: 'layers', or torchtitan.PARTS, also in the wording of its own configurations."""
    own = [str(one).removesuffix(".w").removeprefix("moe.") for one in covered] if isinstance(covered, list) else []
    return covered == ["layers"] or sorted(own) == ["attention", "feed_forward", "shared_experts"]


def _filters(word: str, said: Mapping[str, Any]) -> list[str]:
    """Notes on the modules that a converter covers; mpbridge covers the linears of the layers."""
    found = []
    if said.get("emulate") is True:
        found.append(f"{word}: emulate=True computes torchao's tensorwise default regardless of its recipe")
    covered, left = said.get("fqns"), said.get("filter_fqns")
    if isinstance(covered, (Unknown, SourceObject)):
        found.append(
            f"{word}: a fraction of the last layers stays in BF16; set the model's depth and num_layers_at_end_in_bf16"
        )
    elif covered and not _every_linear(covered):
        names = covered if isinstance(covered, list) else [covered]
        found.append(f"{word}: only linears whose names contain {', '.join(map(str, names))}")
    elif not covered and (not isinstance(left, list) or "lm_head" not in left):
        found.append(f"{word}: the output layer (lm_head) is quantized too; here it never is")
    others = [str(one) for one in left or [] if one not in ("lm_head", GATE)] if isinstance(left, list) else []
    if others:
        found.append(f"{word}: left out by substring: {', '.join(others)}")
    return found


def _converters(read_: Reader) -> list[str]:
    """The listed converters, separated by commas on a command line."""
    given = read_.at("model.converters")
    if isinstance(given, str):
        return [one.strip() for one in given.split(",")]
    return [str(one) for one in given] if isinstance(given, (list, tuple)) else []


def _filtered(read_: Reader, cannot: list[str], assumed: list[str]) -> tuple[int, int] | None:
    """Layers at the ends that a filter of versions with TOML leaves out of the converter; None without one."""
    where = next((path for path in _FILTERS if read_.at(path) is not None), None)
    if where is None and not _converters(read_):
        return None
    said = read_.at(where) if where is not None else []
    names = [one.strip() for one in said.split(",")] if isinstance(said, str) else said
    listed = names if isinstance(names, (list, tuple)) else []
    # its models call it `output`
    return left_out(
        ["lm_head" if one == "output" else one for one in listed], where or "model.converters", cannot, assumed
    )


_FILTERS = (
    "float8.filter_fqns",
    "mx.filter_fqns",
    "quantize.linear.float8.filter_fqns",
    "quantize.linear.mx.filter_fqns",
)


def _quant(read_: Reader, cannot: list[str], inert: list[str], assumed: list[str]) -> Quant | None:
    name = str(read_.at("config") or "")
    listed = _converters(read_)
    left = [one for one in listed if one not in ("float8", "mx")]
    cannot.extend(f"model.converters={cut(one)}: not a converter that is read here" for one in left)
    word = next((word for word in ("nvfp4", "mxfp8", "float8") if word in name), "")
    word = word or next((found for mark, found in (("mx", "mxfp8"), ("float8", "float8")) if mark in listed), "")
    if not word:
        inert.extend(
            f"{section} has no effect without a converter in model.converters"
            for section in _OLD[:3]
            if read_.section(section)
        )
        return None
    assumed.append(f"quantized linears are what {name or 'model.converters'} names: {word}")
    if "pct_layers" in name:
        cannot.append(
            f"{name}: a fraction of the last layers stays in BF16; set the model's depth and num_layers_at_end_in_bf16"
        )
    if word == "nvfp4":
        return Quant(format="e2m1", scaling="nvfp4")
    if word == "mxfp8":
        return Quant(format="e4m3", scaling="mxfp8")
    recipe = read_.at("float8.recipe_name", read_.at("quantize.linear.float8.recipe_name"))
    if recipe is None:
        recipe = "tensorwise" if listed else "rowwise"  # torchao's own, in versions with TOML; the converter's since
        read_.default("float8.recipe_name", recipe)
    if listed and recipe == "tensorwise":
        if read_.flag("float8.enable_fsdp_float8_all_gather"):
            cannot.append("float8.enable_fsdp_float8_all_gather: FP8 on the wire with 16 or 32-bit storage")
        return Quant(format="hybrid", scaling="tensorwise")
    return Quant(format="e4m3", scaling="rowwise_gw_hp" if recipe == "rowwise_with_gw_hp" else "rowwise")
