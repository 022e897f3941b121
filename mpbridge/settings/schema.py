"""The legal values of each setting: megatron-core's fields from the generated schema, ours from their dataclasses; a section whose settings are attributes
too, and one given as an object, read back as a mapping that its author could have written. Imports no framework."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, Union, get_args, get_origin

from mpbridge.common.errors import MOST_NAMED, BadValue, UnknownName
from mpbridge.common.formats import DType, dtype
from mpbridge.precision.field_values import yaml_kind
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.megatron_spec.schema import CLASSES, LATENT, REPLACED, records
from mpbridge.precision.megatron_spec.versions import current, nearest
from mpbridge.settings.sections import GPT, LIMITS, OWN, WORDS

SECTIONS = ("model", "optimizer", "scheduler", "ddp", "parallel", "train", "data", "checkpoint", "logger", "audit")
ACTIVATIONS: Mapping[str, str] = types.MappingProxyType({
    **{name: f"torch.nn.functional:{name}" for name in ("gelu", "silu", "relu")},
    "squared_relu": "megatron.core.activations:squared_relu", "quick_gelu": "megatron.core.fusions.fused_bias_geglu:quick_gelu",
})  # fmt: skip
"""Names for `activation_func` -> import path of the function; SwiGLU is silu with gated_linear_unit."""
NULL: Mapping[str, tuple[str, ...]] = types.MappingProxyType({"model.q_lora_rank": ("null",)})
"""Settings that may be null although megatron-core's annotation does not allow it: queries without a low-rank projection (multi_latent_attention.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field: the names of its legal types ("int", "list[str]", "choice", "dtype", "null" ...), its choices, its default as plain data."""

    types: tuple[str, ...]
    default: Any = None
    choices: tuple[str | int, ...] = ()

    def expected(self) -> str:
        """The legal values, as text."""
        choices = ", ".join(map(str, self.choices))
        words = {
            "choice": f"one of {choices}", "list[choice]": "a list of " + ("them" if "choice" in self.types else choices), "dtype": "a dtype",
            "bool": "true or false", "float": "a finite number", "int": "a whole number", "str": "text", "object": "an object given in Python",
            "activation": f"one of {', '.join(ACTIVATIONS)} or a function given in Python",
        }  # fmt: skip
        return " or ".join(words.get(name, name.replace("list[", "a list of ").rstrip("]")) for name in self.types)


def upstream_class(section: str, *, latent: bool = False, version: str | None = None) -> Mapping[str, Setting]:
    """field -> Setting of the megatron-core class behind a section; version: megatron-core's, None: the installed one."""
    return _upstream_class(section, latent, nearest(version or current()))


@functools.cache
def _upstream_class(section: str, latent: bool, version: str) -> Mapping[str, Setting]:
    fields = records(section, latent=latent, version=version)
    return types.MappingProxyType({field: _setting(f"{section}.{field}", record) for field, record in fields.items()})


def _setting(where: str, record: Mapping[str, Any]) -> Setting:
    """The Setting of a record in the generated file; a plain string with a known list of values becomes a choice."""
    kinds, words = tuple(record["types"]) + NULL.get(where, ()), WORDS.get(where)
    if words is not None:
        kinds = tuple({"str": "choice", "list[str]": "list[choice]"}.get(kind, kind) for kind in kinds)
    default = record["default"]
    if "float" in kinds and isinstance(default, str):
        default = float(default)  # 'inf', which JSON cannot represent
    return Setting(types=kinds, default=default, choices=words or tuple(record.get("choices", ())))


@functools.cache
def own_class(cls: type) -> Mapping[str, Setting]:
    """field -> Setting of one of our dataclasses."""
    hints = typing.get_type_hints(cls)
    out = {}
    for field in dataclasses.fields(cls):
        names, choices = _described(hints[field.name])
        out[field.name] = Setting(types=names, default=field.default, choices=choices)
    return types.MappingProxyType(out)


def settings(section: str, *, latent: bool = False, version: str | None = None) -> Mapping[str, Setting]:
    """field -> Setting of a section; latent: the model section with multi-latent attention; version: megatron-core's. Raises UnknownName."""
    if section == "model":
        # MLA's config class has its own rotary_base and rotary_percent with the same meaning: its record takes precedence
        return {**own_class(GPT), **upstream_class(section, latent=latent, version=version)}
    if section in CLASSES:
        return upstream_class(section, version=version)
    if section not in OWN:
        raise UnknownName("section", section, SECTIONS)
    return own_class(OWN[section])


def defaults(section: str, *, latent: bool = False) -> dict[str, Any]:
    """field -> default of a section, as plain data."""
    return {name: setting.default for name, setting in settings(section, latent=latent).items()}


def checked(section: str, values: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """`values` in canonical plain form; every unknown key and every illegal value is added to `faults`."""
    known = settings(section, latent=bool(values.get("multi_latent_attention")))
    out: dict[str, Any] = {}
    strange = 0
    for name, value in values.items():
        where = f"{section}.{name}"
        if name not in known:
            strange += 1
            if strange <= MOST_NAMED:
                faults.append(f"{where}={_short(value)}: {_unknown(section, str(name), known)}")
            continue
        try:
            plain, limit = fit(known[name], value), LIMITS.get(where)
        except BadValue as error:
            faults.append(f"{where}={error}")
            continue
        if limit is not None and isinstance(plain, (int, float)) and not limit.holds(plain):
            faults.append(f"{where}={value}: expected a number {limit}")
        else:
            out[name] = plain
    if strange > MOST_NAMED:
        faults.append(f"{section}: {strange - MOST_NAMED:,} further unknown settings")
    return out


def fit(setting: Setting, value: Any) -> Any:
    """`value` in canonical plain form (dtypes and enumeration members by name, numbers of the right type). Raises BadValue with found and expected."""
    if isinstance(value, float) and math.isinf(value) and value == setting.default:
        return value  # no limit, by megatron-core's own default
    for name in setting.types:
        fits, plain = _as(name, setting, value)
        if fits:
            return plain
    kind = f" (a {yaml_kind(value)})" if yaml_kind(value) else ""
    raise BadValue(f"{_short(value)}{kind}: expected {setting.expected()}")


def _as(name: str, setting: Setting, value: Any) -> tuple[bool, Any]:
    """(Whether `value` is a `name`, the value in canonical form)."""
    listed, number = isinstance(value, (list, tuple)), isinstance(value, (int, float)) and not isinstance(value, bool)
    match name:
        case "null" | "bool" | "str":
            return isinstance(value, {"null": type(None), "bool": bool, "str": str}[name]), value
        case "int":  # 1e6 and 2.0 are floats in YAML, and whole numbers to the author
            whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
            return whole or (number and isinstance(value, int)), int(value) if whole else value
        case "float":
            finite = number and -sys.float_info.max <= value <= sys.float_info.max
            return finite, float(value) if finite else value
        case "object":
            return value is not None and not listed and not isinstance(value, (str, int, float, dict)), value
        case "activation":
            return _activation(value)
        case "dtype":
            return _dtype(value)
        case "choice":
            return _choice(setting, value)
    if not listed or name == "list":
        return listed, list(value) if listed else value
    parts = [_as(name.removeprefix("list[").removesuffix("]"), setting, part) for part in value]
    return all(ok for ok, _ in parts), [plain for _, plain in parts]


def _dtype(value: Any) -> tuple[bool, Any]:
    try:
        return value is not None, dtype(value).short
    except BadValue:
        return False, value


def _choice(setting: Setting, value: Any) -> tuple[bool, Any]:
    # a megatron-core enumeration member is written by its name, and "float32" is accepted where the choices are fp32 and fp64
    name = value if isinstance(value, str) else getattr(value, "name", value)
    if name in setting.choices:
        return True, name
    is_dtype, short = _dtype(value)
    return is_dtype and short in setting.choices, short


def _activation(value: Any) -> tuple[bool, Any]:
    name = getattr(value, "__name__", None) if callable(value) else value
    if not isinstance(name, str) or name not in ACTIVATIONS:
        return callable(value), value
    # torch.nn.functional.gelu is a builtin that does not name its module
    builtin = type(value).__name__ == "builtin_function_or_method"
    librarys = builtin or str(getattr(value, "__module__", "")).startswith(("torch", "megatron"))
    return True, name if not callable(value) or librarys else value


def _unknown(section: str, name: str, known: Mapping[str, Setting]) -> str:
    elsewhere = [other for other in SECTIONS if other != section and name in settings(other, latent=True)]
    if elsewhere:
        return f"no such setting here; it is {' or '.join(f'{other}.{name}' for other in elsewhere)}"
    if section == "model" and name in upstream_class("model", latent=True):
        return "needs model.multi_latent_attention=true"
    error = UnknownName(f"setting in {section}", name, known)
    alone = f"no setting in {section} named {name!r}, and no similar name"  # listing a hundred does not help
    return str(error) if error.near or len(known) < 20 else alone


def _described(hint: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        parts = [_described(part) for part in get_args(hint)]
        return tuple(n for names, _ in parts for n in names), tuple(w for _, words in parts for w in words)
    if origin is Literal:
        return ("choice",), tuple(get_args(hint))
    if origin is list and get_origin(get_args(hint)[0]) is Literal:
        return ("list[choice]",), tuple(get_args(get_args(hint)[0]))
    if origin is list:
        return (f"list[{get_args(hint)[0].__name__}]",), ()
    return ("null" if hint is type(None) else str(hint.__name__),), ()


def _short(value: Any) -> str:
    if isinstance(value, DType):
        return value.short
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Section(dict[str, Any]):
    """The settings given for one section of ConfigContainer: `section["lr"]` and `section.lr` are the same setting; typed.pyi has their types for editors and mypy.

    Reading a setting that was not given returns its default and stores nothing. An attribute that is not a setting raises UnknownName with the
    nearest name; keys are checked by `ConfigContainer.faults`, all at once.
    """

    __slots__ = ("_section",)
    _section: str

    def __init__(self, section: str, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        object.__setattr__(self, "_section", section)

    if not TYPE_CHECKING:  # seen by mypy, these would accept any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # copy and pickle look up methods that a mapping does not have
                raise AttributeError(name)
            if name in self:
                return self[name]
            # a mutable default is copied, so the caller may change it
            return copy.copy(self._known(name).default)

        def __setattr__(self, name: str, value: Any) -> None:
            self._known(name)
            self[name] = value

        def __delattr__(self, name: str) -> None:
            self._known(name)
            self.pop(name, None)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *settings(self._section, latent=True)})

    def _ipython_key_completions_(self) -> list[str]:
        """The completions that a notebook offers after `section["`."""
        return sorted(settings(self._section, latent=True))

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        from mpbridge.common.tables import facts

        return facts(self._section, self).html()

    def __copy__(self) -> Self:
        return type(self)(self._section, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._section, dict(self))

    def _known(self, name: str) -> Any:
        known = settings(self._section, latent=True)
        if name not in known:
            raise UnknownName(f"setting in {self._section}", name, known)
        return known[name]


def as_mapping(section: str, value: Any, faults: list[str]) -> Mapping[str, Any]:
    """The settings of `section` in `value` (None, a mapping, a config object).

    From an object, the fields that differ from its class's defaults. That is not exactly what its author wrote: a value that was set explicitly to
    the default is not seen. It is not missed either, because the object built from the rest has it again.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    if section in OWN and isinstance(value, OWN[section]):
        fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(OWN[section])}
        return {name: now for name, (now, default) in fields.items() if now != default}
    names, cls = {cls.__name__ for cls in type(value).__mro__}, CLASSES.get(section) or OWN[section].__name__
    expected = (cls, LATENT) if section == "model" else (cls,)
    if not names & set(expected) or section in OWN:
        faults.append(f"{section} is a {type(value).__name__}: expected a mapping or a {' or '.join(expected)}")
        return {}
    return _written(section, value, faults, latent=LATENT in names)


def _written(section: str, value: Any, faults: list[str], *, latent: bool) -> dict[str, Any]:
    known, foreign = settings(section, latent=latent), list[str]()
    out: dict[str, Any] = {"multi_latent_attention": True} if latent else {}
    for field in (one for one in dataclasses.fields(value) if not one.name.startswith("_")):
        now = getattr(value, field.name, None)
        if field.name not in known:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            foreign += [field.name] if now is not None and now != default else []
        elif not _equal(known[field.name], now) and not _made_by_core(now):
            out[field.name] = now
    if foreign:
        what = f"settings that megatron-core's own class lacks ({', '.join(foreign)})"
        cure = "keep your object and use mpbridge.apply(mpbridge.plan(...)) on it, or give a mapping"
        faults.append(f"{section} is a {type(value).__name__} with {what}: {cure}")
    for old, new in REPLACED.items():
        if old in out and new in out:
            del out[old]
    for row in (row for row in TABLE if row.target == section and row.follows and row.field in out):
        if out[row.field] == getattr(value, str(row.follows), None):
            del out[row.field]  # megatron-core filled it
    return out


def _equal(setting: Setting, value: Any) -> bool:
    try:
        return bool(fit(setting, value) == setting.default)
    except BadValue:
        return False


def _made_by_core(value: Any) -> bool:
    """Whether a function is one of the initialisers that megatron-core creates from init_method_std."""
    home = str(getattr(value.func, "__module__", "")) if isinstance(value, functools.partial) else ""
    return home == "torch.nn.init" and set(value.keywords) == {"mean", "std"}
