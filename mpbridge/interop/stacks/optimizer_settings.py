"""Settings of megatron-core's optimizers beside Adam in both Megatrons: each one's field, Megatron-LM's option for it, and what decides where it is not said.

The fields are those of megatron-core's schema, the options those of Megatron-LM's parser: a new one of either is read and written without a row here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import cut
from mpbridge.common.facts import BESIDE_ADAM, OWN_SETTINGS, reads
from mpbridge.common.formats import say
from mpbridge.interop.stacks.megatron_lm_options import options
from mpbridge.planning.rules.muon import NEWTON_SCHULZ, WORDS
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.megatron_spec.versions import BEFORE_018, described

_PARSERS = {"muon_momentum": 0.9}
"""Defaults of Megatron-LM's parser that are not those of megatron-core's class (training/arguments.py, core_v0.16.1 and d98e8a64)."""
_PARSERS_WORDS = {"muon_fp32_matmul_prec": ("low", "medium", "high")}
"""Its choices where they are not what megatron-core understands: there is no "highest", and torch does not know "low"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of one of these optimizers in one stack."""

    name: str
    """Field of that megatron-core's OptimizerConfig."""
    default: Any
    """What decides where the stack's configuration says nothing."""
    option: str = ""
    """Megatron-LM's; '' where it has none, and in Bridge, whose configuration has the field."""
    words: tuple[str, ...] = ()
    """The words that are taken; empty: any, or a number."""

    def flags(self, value: Any) -> str:
        """The option that says it, '' where a switch has to be left out. A switch's value is given by its presence."""
        if isinstance(self.default, bool):
            return self.option if value is not self.default else ""
        return f"{self.option} {value}"

    def takes(self, value: Any) -> bool:
        """Whether the stack has a word for that value."""
        return not self.words or value in self.words

    def told(self, value: Any) -> str:
        """A value as the stack writes it."""
        return self.flags(value) or f"no {self.option}" if self.option else f"optimizer.{self.name}={say(value)}"

    def read(self, text: str) -> Any:
        """The value of an option's word. Raises ValueError for what is not a number."""
        return type(self.default)(text)

    @property
    def ours(self) -> str:
        """Its name in the megatron-core that is installed here; '' if that has none, or if rules, memory and audit know no other value than its default
        (rule settings-not-known-here)."""
        known, old = records("optimizer"), records("optimizer", version=described()[0])
        judged = any(one in old for one in spellings(self.name))
        return next((one for one in spellings(self.name) if judged and one in known), "")

    @property
    def usual(self) -> Any:
        """What decides here where nothing is said; the stack's default for a setting that the installed megatron-core lacks."""
        return records("optimizer")[self.ours]["default"] if self.ours else self.default


def spellings(name: str) -> tuple[str, ...]:
    """An optimizer's setting as releases of megatron-core call it: 0.16's muon_use_nesterov is muon_nesterov in 0.20."""
    stem = name.replace("_use_nesterov", "_nesterov")
    return name, stem, stem.replace("_nesterov", "_use_nesterov")


@functools.cache
def settings(core: str, parser: str = "") -> Mapping[str, Setting]:
    """Field -> its Setting in a megatron-core. parser: version of the Megatron-LM that reads them from options; '': they are fields of a file."""
    known, found = options(parser) if parser else {}, {}
    for name, record in records("optimizer", version=core).items():
        if name.startswith(OWN_SETTINGS):
            ways = [f"--{word.replace('_', '-')}" for word in (name, name.replace("muon_", "muon_no_", 1))]
            words, usual = WORDS.get(name, ()), record["default"]
            found[name] = Setting(
                name=name,
                default=_PARSERS.get(name, usual) if parser else usual,
                option=next((one for one in ways if one in known), ""),
                words=tuple(_PARSERS_WORDS.get(name, words) if parser else words),
            )
    return MappingProxyType(found)


def at_ours(there: Mapping[str, Setting], name: str) -> Setting | None:
    """A stack's setting by the name that it has here; None if the stack has none."""
    return next((there[one] for one in spellings(name) if one in there), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What trains a run of megatron-core's own optimizers, as one of the Megatrons says it."""

    name: str
    """The optimizer, by the stack's word."""
    core: str
    """The stack's megatron-core."""
    distributed: bool
    """Whether the distributed optimizer, or the layer-wise one, is asked for."""
    there: Mapping[str, Setting]
    given: Mapping[str, Any]
    """Field -> the value that stands in the configuration."""

    @property
    def plain(self) -> str:
        """The optimizer without the word for how its states are divided."""
        return self.name.removeprefix("dist_")

    @property
    def divided(self) -> bool:
        """Whether data-parallel ranks share its states: since 0.18 the distributed optimizer of what is neither Adam nor SGD is the layer-wise one."""
        return self.name != self.plain or (self.distributed and not self.refused)

    @property
    def refused(self) -> bool:
        """Whether that megatron-core raises for the optimizer beside the distributed one (validate_args)."""
        return self.distributed and self.plain in BESIDE_ADAM and BEFORE_018.holds(self.core)

    @property
    def ours(self) -> str:
        """The value of optimizer.optimizer that trains so; '' for Adam, which is the default, and for what mpbridge does not train."""
        if self.plain not in (*BESIDE_ADAM, "sgd"):
            return ""
        return "dist_muon" if self.plain == "muon" and self.divided else self.plain

    def __getitem__(self, name: str) -> Any:
        """The value in force of a field."""
        return self.given.get(name, self.there[name].default)

    @property
    def read(self) -> tuple[Setting, ...]:
        """The settings that this optimizer reads."""
        return tuple(one for one in self.there.values() if reads(self.plain, one.name, self.given))

    @property
    def here(self) -> dict[str, Any]:
        """Setting of the optimizer section -> value, wherever a run has to say it to be trained so; the name first."""
        said = [one for one in self.read if one.ours and one.takes(self[one.name])]
        told = {one.ours: self[one.name] for one in said if self[one.name] != one.usual}
        return {"optimizer": self.ours, **told} if self.ours else {}

    def notes(self, where: str) -> Iterator[tuple[str, Any, str]]:
        """(kind of note, whether it applies, text). where: the stack's setting that names the optimizer."""
        read, here = self.read, self.here
        for one, value in ((self.there[name], value) for name, value in self.given.items()):
            unread = f"{one.told(cut(value))}: only {_reader(one.name)} reads it, and the optimizer is {cut(self.name)}"
            refused = f"{one.told(cut(value))}: refused there, which takes {', '.join(one.words)}"
            yield ("contradicts", not one.takes(value), refused) if one in read else ("inert", True, unread)
        for one in read:
            value = self[one.name]
            lacks = f"{one.told(cut(value))}: rules, memory and audit here know {say(one.default)} only"
            yield "cannot_express", not one.ours and value != one.default, lacks
            if one.name == "muon_fp32_matmul_prec" and value in NEWTON_SCHULZ:
                text = f"Newton-Schulz multiplies in {NEWTON_SCHULZ[value]}: optimizer.{one.name}={value} here"
                yield "assumed", one.takes(value), text
            elif one.name == "muon_fp32_matmul_prec":
                known = f"torch knows only {', '.join(NEWTON_SCHULZ)}, warns, and Newton-Schulz multiplies in FP32"
                yield "contradicts", one.takes(value), f"{one.told(cut(value))}: {known}"
        for said, why in ((True, ""), (False, ": what is in force there where nothing is said")):
            told = [one for one in read if one.ours in here and (one.name in self.given) is said]
            words = " ".join(f"optimizer.{one.ours}={say(self[one.name])}" for one in told)
            yield "assumed", told, f"{words} here{why}"
        apart = self.divided and self.ours not in ("", "sgd", "dist_muon")
        yield "cannot_express", apart, f"{where}={self.name}: whole matrices are dealt to the ranks there; here every rank keeps all states of {self.plain}"  # fmt: skip
        yield "contradicts", self.refused, f"{where}={self.name} with the distributed optimizer: megatron-core {self.core} refuses both together"  # fmt: skip


def _reader(name: str) -> str:
    """What reads a setting of one optimizer, in words."""
    if name.startswith("lion_"):
        return "the Lion beside Muon (muon_scalar_optimizer)"
    return next((text for stem, text in _READERS.items() if name.startswith(stem)), "another optimizer")


_READERS = {"sgd_": "SGD", "muon_": "Muon", "soap_": "SOAP"}
