"""What a choice is made among: the levels that linears may move up to, as far as the target's machine and stack can run and express them; and what each level of each unit
costs there (predicted seconds of its GEMMs and casts, or bytes on the fullest rank), under budgets (time=1.1, memory=40GB, gradient-error=0.3)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mpbridge.common.errors import BadValue, MpbridgeError, Refused
from mpbridge.common.facts import RunFacts, Versions
from mpbridge.common.machines import Machine, machine
from mpbridge.common.tables import size
from mpbridge.interop.stacks.base import ORDER
from mpbridge.interop.stacks.exporters import export, stack_module
from mpbridge.planning.capability import ASSUMED, quant_faults
from mpbridge.planning.estimate.constants import Constants, constants
from mpbridge.planning.estimate.linears import Basis, layer_seconds, linear_seconds
from mpbridge.planning.memory.by_role import memory
from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.modules import rule_of_word
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant, Region
from mpbridge.precision.resolve import resolve
from mpbridge.training.tune.choices import Costs, DecisionUnit

Levels = dict[str, Quant | None]
"""Words of `modules:` -> rule; the last is high precision, None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The target of the choice."""

    machine: Machine | None = None
    """None: the first GPU of the table that runs the recipe."""
    versions: Versions | None = None
    constants: Constants | None = None
    """From a --machine-file."""
    stack: str | None = None
    """The stack that the recipe will be exported to: only what it can express is proposed."""

    def priced(self, policy: PrecisionPolicy) -> Machine:
        """The machine that prices the choice."""
        lowest = max((quant.row.hardware.low for quant in policy.quants), default=(0, 0))
        return self.machine or machine("b200" if lowest >= (10, 0) else "h100")


def base_of(config: MixedPrecisionConfig) -> MixedPrecisionConfig:
    """The recipe without edge layers, which the choice replaces; the recipe's rules under `modules:` stay."""
    return config.derive(first_last_layers_bf16=False, num_layers_at_start_in_bf16=None, num_layers_at_end_in_bf16=None)


def prepared(config: MixedPrecisionConfig) -> tuple[MixedPrecisionConfig, PrecisionPolicy]:
    """(the config without edge layers, its policy). Raises Refused for a recipe that cannot be tuned."""
    base = base_of(config)
    policy = resolve(base)
    if policy.quant is None:
        raise Refused(
            "this recipe quantizes nothing, so there is nothing to choose: expected one that does, as in --recipe fp8_cs (mpbridge list)"
        )
    if policy.quant.row.history:
        raise Refused(
            f"{policy.quant.row.words} updates its scales around whole blocks, so no module can differ from its block: tune a recipe with another scaling"
        )
    return base, policy


def aimed(config: MixedPrecisionConfig, words: Sequence[str] | None, where: Where) -> tuple[Levels, list[str]]:
    """(the levels that run on the target, why others are not proposed). words: None: for four-bit recipes the nearest substitute in the table of
    scalings, for eight-bit ones none. Raises Refused, BadValue."""
    policy = prepared(config)[1]
    own = policy.quant
    assert own is not None
    default = own.row.substitutes[:1] if own.bits < 8 else ()
    return runnable(levels_of(default if words is None else words, policy), policy, where, asked=words is not None)


def levels_of(words: Sequence[str], policy: PrecisionPolicy) -> Levels:
    """The levels above the recipe's own. Raises BadValue, Refused."""
    found: Levels = {}
    own = policy.quant
    for word in words:
        try:
            quant = rule_of_word(word, policy.compute)
        except BadValue as error:
            raise BadValue(f"level{error}") from None
        if quant is not None and quant == own:
            raise BadValue(f"level {word} is the recipe's own: levels are what linears move up to")
        if quant is not None and own is not None and quant.bits < own.bits:
            raise BadValue(
                f"level {word} has {quant.bits} bits, the recipe's own format {own.bits}: levels are what linears move up to, so tune a recipe of "
                f"{word} with the wider format among --levels"
            )
        found[word] = quant
    found.pop(policy.compute.short, None)
    return {**found, policy.compute.short: None}


PROBE = "self_attention.linear_proj"
"""A linear that every layer of megatron-core's GPT has: a level is checked with a rule for it in one layer."""


def runnable(levels: Levels, policy: PrecisionPolicy, where: Where, *, asked: bool) -> tuple[Levels, list[str]]:
    """(the levels that run on the target's machine, why others are not proposed); all levels if no machine was given.

    policy: the recipe's, without edge layers. asked: the user named the levels, so one that does not run is refused. Raises Refused for that, and for a
    recipe that does not run there.
    """
    if (target := where.machine) is None:
        return levels, []
    versions = where.versions or ASSUMED
    own = [fault for quant in policy.quants for fault in quant_faults(quant, target, versions)]
    if own:
        raise Refused(
            f"the recipe does not run on {target.label}: {'; '.join(own)} (tune for another machine, or use a recipe that mpbridge recommend names for this one)"
        )
    faults = {word: quant_faults(quant, target, versions) for word, quant in levels.items() if quant is not None}
    lost = {word: f"does not run on {target.label}: {'; '.join(why)}" for word, why in faults.items() if why}
    return _kept(levels, lost, asked)


def expressible(
    levels: Levels, config: MixedPrecisionConfig, *, run: RunFacts | None, stack: str | None, asked: bool
) -> tuple[Levels, list[str]]:
    """(the levels that the target can express, why others are not proposed).

    config: the recipe without edge layers. run: the run on the target machine; None: no machine was given. stack: the stack to export to; None:
    none. asked: the user named the levels, so one that cannot be expressed is refused. Raises Refused for that, and if not even high precision can be set
    for a single linear, and UnknownName for a stack.
    """
    if stack is not None:
        stack_module(stack)
    reasons = {word: _why_not(word, config, run, stack) for word in levels}
    high = tuple(levels)[-1]
    if reasons[high]:
        raise Refused(
            f"linears cannot be set individually there, so there is nothing to choose: {reasons[high]} (tune for another target, or without one)"
        )
    return _kept(levels, {word: f"cannot be expressed: {why}" for word, why in reasons.items() if why}, asked)


def _kept(levels: Levels, lost: Mapping[str, str], asked: bool) -> tuple[Levels, list[str]]:
    """(the levels that are not lost, a note on each that is). lost: level -> why. Raises Refused if they were asked for."""
    if asked and lost:
        raise Refused("; ".join(f"level {word} {why}" for word, why in lost.items()) + ": leave it out of --levels")
    notes = [f"level {word} is not proposed: it {why}" for word, why in lost.items()]
    return {word: quant for word, quant in levels.items() if word not in lost}, notes


def _why_not(word: str, config: MixedPrecisionConfig, run: RunFacts | None, stack: str | None) -> str | None:
    one = config.derive(modules={**(config.modules or {}), PROBE: [{"layers": "0", "precision": word}]})
    if run is not None:
        native = dataclasses.replace(run, realization="native")
        known = {fault.rule for fault in broken(resolve(config), native)}
        for fault in broken(resolve(one), native):
            if fault.severity == "error" and fault.rule not in known:
                return f"{fault.found} (rule {fault.rule}; cure: {fault.cure})"
    if stack is None:
        return None
    try:
        lines = export(one, stack).lines
    except MpbridgeError as error:
        return f"{stack}: {error}"
    lost = [line for line in lines if line.fact == "modules" and ORDER.index(line.fidelity) >= ORDER.index("different")]
    return f"{stack}: {lost[0].text}" if lost else None


What = Literal["time", "memory", "gradient-error", "tail"]
_LEGAL = "expected time=1.1 (GEMM and quantization time over the all-low recipe's), memory=40GB (bytes on the fullest rank) or gradient-error=0.3"
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{kind}b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for kind, base in (("", 1000), ("i", 1024))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limit on the cost of the choice."""

    what: What = "tail"
    value: float = 0.0
    """A ratio, bytes, or an error; 'tail' has none."""

    def __str__(self) -> str:
        if self.what == "tail":
            return "the cost of the last 15 % of the layers in high precision"
        return f"{self.what}={self.value:.4g}" if self.what != "memory" else f"memory={size(self.value)}"


def budget_of(text: str | None) -> Budget:
    """The budget given as --budget. Raises BadValue."""
    if text is not None and not isinstance(text, str):
        raise BadValue(f"budget={text!r}: a {type(text).__name__} does not say what it limits; {_LEGAL}, as a string")
    if not text:
        return Budget()
    name, found, said = text.partition("=")
    name = name.strip().lower().replace("_", "-")
    if not found or name not in ("time", "memory", "gradient-error"):
        raise BadValue(f"--budget {text!r}: {_LEGAL}")
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?\d+)?)\s*([a-zA-Z]*)\s*", said)
    factor = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or factor is None or (match.group(2) and name != "memory"):
        raise BadValue(f"--budget {text!r}: {said.strip() or 'nothing'} is not such a value; {_LEGAL}")
    value = float(match.group(1)) * factor
    if value <= 0:
        raise BadValue(f"--budget {text!r}: must be above 0; {_LEGAL}")
    return Budget(what=name, value=value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """How seconds are estimated."""

    machine: Machine
    constants: Constants | None = None
    """From a --machine-file, measured on that machine; None: the shipped ones."""
    basis: Basis = "predicted"

    def words(self) -> str:
        """The description in the table and the recipe."""
        if self.basis == "peaks":
            return f"GEMMs at the peak of {self.machine.name}, without casts: a bound that no kernel reaches"
        kind = "measured rates of" if self.constants is not None else "predicted for"
        return f"GEMMs and quantization, {kind} {self.machine.name}"


def seconds(
    units: Sequence[DecisionUnit],
    levels: Mapping[str, Quant | None],
    policy: PrecisionPolicy,
    pricing: Pricing,
    run: RunFacts | None,
    shapes: Mapping[str, tuple[int, int, int]],
) -> Costs:
    """Seconds per micro-batch on one rank. run: priced by its list of operations; None: by the observed shapes (tokens, out, in).

    Raises BadValue for a machine without a rate for one of the levels.
    """
    using = pricing.constants or constants()
    if run is None:

        def spent(unit: DecisionUnit, quant: Quant | None) -> float:
            called = (shapes[slot] for slot in unit.slots if slot in shapes)
            on, basis = pricing.machine, pricing.basis
            return sum(linear_seconds(*shape, quant, policy.compute, on, using, basis) for shape in called)

        return [{name: spent(unit, quant) for name, quant in levels.items()} for unit in units]
    known: dict[tuple[int, str], Mapping[str, float]] = {}
    found: Costs = []
    for unit in units:
        cost = dict.fromkeys(levels, 0.0)
        for layer, glob in unit.places:
            for name, quant in levels.items():
                key = (layer, name)
                if key not in known:
                    known[key] = layer_seconds(policy, run, layer, quant, pricing.machine, using, pricing.basis)
                cost[name] += sum(value for where, value in known[key].items() if _is(where, glob))
        found.append(cost)
    return found


def _is(where: str, glob: str) -> bool:
    return where == glob or (glob.endswith(".*") and where.startswith(glob[:-1]))


def bytes_of(
    units: Sequence[DecisionUnit], levels: Mapping[str, Quant | None], policy: PrecisionPolicy, run: RunFacts
) -> tuple[Costs, float]:
    """(bytes that each level adds for each unit, bytes of the fullest rank with every unit at the first level).

    Computed for one unit of each kind and layer kind, changed alone, since bytes add up over linears. The sum is used for the fullest rank, so with several
    pipeline stages it is too large, never too small.
    """
    base = dataclasses.replace(policy, regions=(Region(quant=next(iter(levels.values()))),))
    whole = float(memory(base, run).needed)
    known: dict[tuple[str, tuple[str, ...], str], float] = {}
    found: Costs = []
    for unit in units:
        cost = {}
        for name, quant in levels.items():
            key = (unit.kind, run.shape.parts(unit.layer), name)
            if key not in known:
                own = (Region(modules=glob, layers=((layer, layer),), quant=quant) for layer, glob in unit.places)
                changed = dataclasses.replace(base, regions=(*own, *base.regions))
                known[key] = float(memory(changed, run).needed) - whole
            cost[name] = known[key]
        found.append(cost)
    return found, whole
