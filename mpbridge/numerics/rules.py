"""The rules by which one Quant is emulated: those of a Transformer Engine release, and the options set by a recipe or the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.formats import say
from mpbridge.numerics.scales import DEFAULT_RELEASE, Rules, rules_for
from mpbridge.precision.regions import Quant

Release = tuple[int, int]


def release_of(text: str | Release | None) -> Release:
    """(major, minor) of '2.14', '2.14.1' or a pair; None: the newest that megatron-core 0.16.1 accepts. Raises BadValue."""
    if text is None:
        return DEFAULT_RELEASE
    if isinstance(text, tuple):
        return text[0], text[1]
    parts = str(text).split("+")[0].split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise BadValue(f"{text!r} is not a Transformer Engine release (expected one such as '2.14')")
    return int(parts[0]), int(parts[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one Quant, each with its value."""

    values: Mapping[str, Any]
    notes: tuple[str, ...]
    """Options that differ from the scaling's defaults with who set them, and settings without effect: one sentence each."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option; `default` if the scaling has no such option."""
        return self.values.get(name, default)


def options_of(quant: Quant, release: Release, environment: Mapping[str, str]) -> Options:
    """The options of `quant` under `release`: the recipe's value, else the environment's, else the default.

    Raises Refused for an option that the recipe sets but the release does not have, and for options that exclude each other; BadValue for a value
    that Transformer Engine refuses.
    """
    values: dict[str, Any] = {}
    notes, faults, named = [], [], ".".join(map(str, release))
    stated = dict(quant.options)
    for option in quant.row.options:
        known = release_of(option.since) <= release
        values[option.name] = option.default
        outside = option.read(environment)
        if option.name in stated:
            values[option.name] = stated[option.name]
            if not known and stated[option.name] != option.default:
                needs = f"{option.name}={say(stated[option.name])} needs Transformer Engine {option.since} or later"
                faults.append(f"{needs}, but the rules of {named} are emulated (--te {option.since})")
            elif stated[option.name] != option.default:
                notes.append(f"{quant.scaling}: {option.name}={say(values[option.name])} (the recipe)")
        elif outside != option.default and known:
            values[option.name] = outside
            notes.append(f"{quant.scaling}: {option.name}={say(outside)} ({option.variable})")
        elif outside != option.default:
            notes.append(f"{option.variable} is set but has no effect before Transformer Engine {option.since}")
    faults += quant.row.clashes(values, named)
    if faults:
        raise Refused(f"{quant.scaling} scaling cannot be emulated like this: {'; '.join(faults)}")
    return Options(values=MappingProxyType(values), notes=tuple(notes))


__all__ = ["Options", "Release", "Rules", "options_of", "release_of", "rules_for"]
