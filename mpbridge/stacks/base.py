"""What every stack's exporter and importer hands back, and the scale of faithfulness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.stacks.meaning import Meaning, arithmetic_differs, differences
from mpbridge.traits import DEFAULT, MainWeights, engine_names, traits

Fidelity = Literal["exact", "layout", "different", "impossible"]
"""exact: the same facts; layout: the same arithmetic with tensors kept elsewhere or in another dtype; different: a step computes something
else; impossible: the stack has no words for it."""
ORDER: tuple[Fidelity, ...] = ("exact", "layout", "different", "impossible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One fact that does not arrive as it was meant."""

    fidelity: Fidelity
    fact: str
    text: str
    """What happens there instead, and what it costs."""

    def __str__(self) -> str:
        return f"{self.fidelity}: {self.fact}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One file or fragment to paste."""

    name: str
    """A file's name, or what kind of fragment it is ('arguments')."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be exported."""

    name: str
    config: MixedPrecisionConfig
    policy: PrecisionPolicy
    engine: str
    version: str
    """Of the stack."""
    run: Any = None
    """config.container.Run whose settings are exported; None: the recipe alone."""

    @property
    def main_weights(self) -> MainWeights:
        """Who holds main weights on the engine: megatron-core, the wrapper (Megatron-FSDP), or the optimizer (torch FSDP2)."""
        return traits(self.engine).main_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A recipe in a stack's words."""

    stack: str
    version: str
    pieces: tuple[Fragment, ...]
    meaning: Meaning
    """What the pieces mean there."""
    lines: tuple[Line, ...] = ()
    """Facts that differ, and notes that a reader must know."""

    @property
    def fidelity(self) -> Fidelity:
        """The worst of the lines; exact without any."""
        return max((line.fidelity for line in self.lines), key=ORDER.index, default="exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What a stack's configuration means."""

    stack: str
    version: str
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Values of MixedPrecisionConfig that say it; empty where ours has no words for it."""
    engine: str = DEFAULT
    meaning: Meaning
    inert: tuple[str, ...] = ()
    """Settings that are accepted there and have no effect."""
    contradicts: tuple[str, ...] = ()
    cannot_express: tuple[str, ...] = ()
    """What it says and mpbridge has no setting for."""
    unknown: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    """Known settings that are not about precision."""
    assumed: tuple[str, ...] = ()
    """What was taken for granted: a version, a default, a variable."""


def engine_with(main_weights: MainWeights) -> str:
    """The engine of ours whose main weights are held so."""
    return next(name for name in engine_names() if traits(name).main_weights == main_weights)


def compared(
    ours: Meaning, theirs: Meaning, costs: Mapping[str, str] = MappingProxyType({}), *, ignore: tuple[str, ...] = ()
) -> tuple[Line, ...]:
    """A Line for each row in which the exported meaning differs. costs: row -> what it means for bits or bytes. ignore: rows that the stack leaves open."""
    kind: Fidelity = "different" if arithmetic_differs(ours, theirs) else "layout"
    found = []
    for row, (mine, there) in differences(ours, theirs).items():
        if row in ignore or row == "bytes":
            continue
        fidelity: Fidelity = "layout" if row in ("storage", "main", "optimizer_reads", "stored") else kind
        if row in ("storage", "main") and ours.master is not theirs.master:
            fidelity = "different"
        if row == "sharded":  # who divides what is the layout's choice, not the recipe's
            fidelity = "exact"
        cost = costs.get(row, "")
        found.append(
            Line(fidelity=fidelity, fact=row, text=f"{mine} here, {there} there" + (f": {cost}" if cost else ""))
        )
    if found and ours.bytes != theirs.bytes and "bytes" not in ignore:
        worst = max((line.fidelity for line in found), key=ORDER.index)
        text = f"{ours.bytes_text} here, {theirs.bytes_text} there"
        found.append(Line(fidelity="exact" if worst == "exact" else "layout", fact="bytes per parameter", text=text))
    return tuple(found)
