"""The results of every stack's exporter and importer, and the scale of fidelity."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from mpbridge.common.errors import cut
from mpbridge.common.facts import ADAMS
from mpbridge.common.formats import say
from mpbridge.common.traits import DEFAULT, MainWeights, engine_names, traits
from mpbridge.interop.stacks.meaning import LAYOUT, OPEN, STATED, Meaning, arithmetic_of, differences, of_policy, stored
from mpbridge.interop.stacks.optimizers import MOMENTS, NOT_SAID, Trained, optimizer_named
from mpbridge.interop.stacks.reasons import cost, reasons
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Region
from mpbridge.precision.wording import quant_text, region_rule, region_text

Fidelity = Literal["exact", "layout", "different", "impossible"]
"""exact: the same facts; layout: the same arithmetic, tensors kept elsewhere or in another dtype; different: a step computes something else; or impossible."""
ORDER: tuple[Fidelity, ...] = ("exact", "layout", "different", "impossible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One fact that is not preserved."""

    fidelity: Fidelity
    fact: str
    text: str
    """What happens there instead, and its cost."""

    def __str__(self) -> str:
        return f"{self.fidelity}: {self.fact}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One file or fragment to paste."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to export."""

    name: str
    config: MixedPrecisionConfig
    policy: PrecisionPolicy
    engine: str
    version: str
    run: Any = None
    """settings.container.Run whose settings are exported; None: the recipe alone."""
    unnamed: tuple[Region, ...] = ()
    """Rules under `modules` for another model: they match no linear of megatron-core's models."""

    @property
    def main_weights(self) -> MainWeights:
        """Who owns the main weights on the engine: megatron-core, the wrapper (Megatron-FSDP), or the optimizer (torch FSDP2)."""
        return traits(self.engine).main_weights

    @property
    def ours(self) -> Meaning:
        """The meaning to express: the policy on its engine, with states sharded as in the run."""
        apart = self.run is not None and self.main_weights == "megatron_core"
        whole = apart and not (self.run.facts.optimizer.distributed or self.optimizer == "dist_muon")
        meaning = of_policy(self.policy, engine=self.engine, sharded="nothing" if whole else None)
        optimizer = optimizer_named(self.optimizer, momentum=bool(self.updates.get("sgd_momentum")))
        return dataclasses.replace(meaning, optimizer=optimizer)

    @property
    def optimizer(self) -> str:
        """The value of optimizer.optimizer that trains the run; "adam" for its kin, and for a recipe alone."""
        name = "adam" if self.run is None else self.run.facts.optimizer.name
        return "adam" if name in ADAMS else str(name)

    @property
    def updates(self) -> Mapping[str, Any]:
        """The settings that this optimizer alone reads."""
        return {} if self.run is None else self.run.facts.optimizer.own


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A recipe in a stack's configuration."""

    stack: str
    version: str
    pieces: tuple[Fragment, ...]
    meaning: Meaning
    lines: tuple[Line, ...] = ()
    """Facts that differ, and notes for the reader."""
    assumed: tuple[str, ...] = ()
    """Assumptions, such as the settings of a version other than the requested one."""

    @property
    def fidelity(self) -> Fidelity:
        """The worst fidelity of the lines; exact if there are none."""
        return max((line.fidelity for line in self.lines), key=ORDER.index, default="exact")


def exported(
    request: Request, stack: str, theirs: Meaning, pieces: Iterable[Fragment], lines: Iterable[Line] = (), more: Mapping[str, str] = MappingProxyType({}),
    said: Collection[str] = ("sgd_momentum",),
) -> Export:  # fmt: skip
    """The export of a request in a stack where the pieces mean `theirs`. lines: beside those of `compared`. more: see there. said: which of the optimizer's
    own settings are written, if the optimizer is."""
    ours, usual = request.ours, records("optimizer")
    lost = [name for name, value in request.updates.items() if name not in said and value != usual[name]["default"]]
    silent = [Line(fidelity="impossible", fact=name, text=f"{say(request.updates[name])} here, no word for it there") for name in lost if ours.optimizer == theirs.optimizer]  # fmt: skip
    found = (*lines, *silent, *compared(ours, theirs, stack, more))
    return Export(stack=stack, version=request.version, pieces=tuple(pieces), meaning=theirs, lines=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The meaning of a stack's configuration."""

    stack: str
    version: str
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The equivalent values of MixedPrecisionConfig; empty if it cannot be expressed."""
    engine: str = DEFAULT
    run: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Settings of a run's optimizer section that train as a Megatron's optimizer beside Adam does; empty for Adam, and where mpbridge has none."""
    meaning: Meaning
    inert: tuple[str, ...] = ()
    """Settings that are accepted there and have no effect."""
    contradicts: tuple[str, ...] = ()
    cannot_express: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    in_force: tuple[str, ...] = ()
    """'setting=value' of what it does not say and the stack's own default decides."""
    undecided: tuple[str, ...] = ()
    """Settings that decide the precision and stand elsewhere, each with what would tell; the meaning shown holds them at their defaults."""
    assumed: tuple[str, ...] = ()
    """Assumptions: a version, a default, a variable."""


_NONE = (None, "", 0, "0", "0.0")


def updated_by(
    found: Imported, name: Any, where: str = "", *, momentum: Any = None, trained: Trained | None = None
) -> Imported:
    """`found` with the states of the optimizer that its source names; Adam's, which is said, where it names none.

    name: as its setting has it, or None. where: that setting. momentum: of optimizers that keep none where it is 0 or not said.
    trained: a Megatron's, whose code trains here too.
    """
    if not name:
        return dataclasses.replace(found, assumed=(*found.assumed, NOT_SAID))
    optimizer, here = (
        optimizer_named(str(name), momentum=momentum not in _NONE),
        {} if trained is None else trained.here,
    )
    said, meaning = f"{where}={cut(name)}", dataclasses.replace(found.meaning, optimizer=optimizer)
    if here:
        text = f"{said}: the run's, not the recipe's: optimizer.optimizer={here['optimizer']} here"
        text += f"; {optimizer.note}" if optimizer.note else ""
        return dataclasses.replace(found, meaning=meaning, assumed=(*found.assumed, text), run=here)
    lines = (f"{said}: {optimizer.note}",) if optimizer.note else ()
    return dataclasses.replace(found, meaning=meaning, cannot_express=(*found.cannot_express, *lines))


def engine_with(main_weights: MainWeights) -> str:
    """The engine of mpbridge that keeps main weights in the same way."""
    return next(name for name in engine_names() if traits(name).main_weights == main_weights)


def compared(
    ours: Meaning, theirs: Meaning, stack: str, more: Mapping[str, str] = MappingProxyType({})
) -> tuple[Line, ...]:
    """A Line for each fact that the exported meaning does not preserve. Exports are judged only here.

    more: row -> a reason in place of the table's (stacks.reasons).
    """
    costs = reasons(stack, theirs) | dict(more)
    # what mpbridge leaves to the model is not a promise that another stack could break
    ignore = [name for name in OPEN if getattr(ours, name) is None]
    found = [*_regions_lost(ours, theirs, costs)]
    if ours.optimizer.name != theirs.optimizer.name:
        text = f"{ours.optimizer.name} here, {theirs.optimizer.name} there: {costs['optimizer']}"
        found.append(Line(fidelity="impossible", fact="optimizer", text=text))
        ignore += MOMENTS
    for row, (mine, there) in differences(ours, theirs).items():
        if row not in ("bytes", "quantization", "stored", *ignore):
            price, why = cost(row, ours, theirs), costs.get(row)
            text = f"{mine} here, {there} there" + (f" ({price})" if price else "") + (f": {why}" if why else "")
            fact = STATED[row][1] if row in STATED else "autocast_enabled" if row == "autocast" else row
            found.append(Line(fidelity=_fidelity(row, ours, theirs), fact=fact, text=text))
    if found and ours.bytes != theirs.bytes:
        worst = max((line.fidelity for line in found), key=ORDER.index)
        text = f"{ours.bytes_text} here, {theirs.bytes_text} there"
        found.append(Line(fidelity="exact" if worst == "exact" else "layout", fact="bytes per parameter", text=text))
    return tuple(found)


def _fidelity(row: str, ours: Meaning, theirs: Meaning) -> Fidelity:
    if (row in STATED and row not in LAYOUT) or (row == "autocast" and theirs.autocast is None):
        return "impossible"
    if row == "sharded":  # sharding belongs to the layout, not to the recipe
        return "exact"
    updated = row in ("storage", "main") and ours.master is not theirs.master
    return "layout" if row in LAYOUT and not updated else "different"


def _regions_lost(ours: Meaning, theirs: Meaning, costs: Mapping[str, str]) -> Iterator[Line]:
    """Rules by module, edge layers and the quantization of all other linears, as far as they differ there."""
    mine, there = arithmetic_of(ours.regions), arithmetic_of(theirs.regions)
    base, other = mine[-1], there[-1]
    for region in mine[:-1]:
        # without quantization there is nothing that layers at the ends could be left out of
        if region in there or (region.ends and not any(one.rules.distinct for one in there)):
            continue
        fact, kind = ("edge layers", "different") if region.ends else ("modules", "impossible")
        # what its linears get there: the rule of a narrower edge region, or of all linears
        ends = [one for one in there[:-1] if region.ends and one.ends]
        narrower = f"only {region_text(ends[0])}" if ends else region_rule(other)
        text = f"{region_text(region)}: {region_rule(region)} here, {narrower} there"
        yield Line(fidelity=kind, fact=fact, text=text + (f": {costs[fact]}" if fact in costs else ""))  # type: ignore[arg-type]
    if base.rules != other.rules:
        nearest, price = costs.get("quantization", ""), cost("quantization", ours, theirs)
        price = f" ({price})" if price else ""
        lacking = [quant for quant in ours.regions[-1].rules.distinct if not other.rules.distinct]
        for quant in lacking:
            text = f"{quant_text(quant)} is not available there{price}" + (f"; nearest: {nearest}" if nearest else "")
            yield Line(fidelity="impossible", fact=f"{quant.scaling} quantization", text=text)
        if not lacking:
            text = f"{region_rule(base)} here, {region_rule(other)} there{price}" + (f": {nearest}" if nearest else "")
            yield Line(fidelity="different", fact="quantization", text=text)
    if other.rules.distinct and stored(ours.regions) != stored(theirs.regions):
        text = f"{stored(ours.regions)} here, {stored(theirs.regions)} there ({cost('stored', ours, theirs)})"
        yield Line(fidelity="layout", fact="stored", text=text)
