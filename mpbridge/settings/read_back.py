"""Sections given as megatron-core's config objects (or our dataclasses), read back as a mapping that their author could have written."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.megatron_spec.schema import CLASSES, LATENT, REPLACED
from mpbridge.settings.schema import Setting, fit, settings
from mpbridge.settings.sections import OWN


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
    known = settings(section, latent=latent)
    out: dict[str, Any] = {"multi_latent_attention": True} if latent else {}
    foreign = []
    for field in dataclasses.fields(value):
        if field.name.startswith("_"):
            continue
        now = getattr(value, field.name, None)
        if field.name not in known:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            foreign += [field.name] if now is not None and now != default else []
        elif not _equal(known[field.name], now) and not _made_by_core(now):
            out[field.name] = now
    if foreign:
        faults.append(
            f"{section} is a {type(value).__name__} with settings that megatron-core's own class lacks ({', '.join(foreign)}): "
            "keep your object and use mpbridge.apply(mpbridge.plan(...)) on it, or give a mapping"
        )
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
    if not isinstance(value, functools.partial):
        return False
    return str(getattr(value.func, "__module__", "")) == "torch.nn.init" and set(value.keywords) == {"mean", "std"}
