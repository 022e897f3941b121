"""plan(): which fields a policy would write, and why. Pure: reads its targets, changes nothing, framework-independent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from mpbridge.common.errors import BadValue, UnknownName
from mpbridge.common.facts import Realization
from mpbridge.common.formats import DType, dtype, say
from mpbridge.common.formats import plain as plain_data
from mpbridge.common.tables import Table, table
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.classes import PROCESS_WIDE, USERS_OWN
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.megatron_spec.precision_field import (
    ALWAYS,
    KEEP,
    UNSET,
    Facts,
    ModuleRules,
    PrecisionField,
    Target,
)
from mpbridge.precision.megatron_spec.schema import REPLACED
from mpbridge.precision.megatron_spec.versions import current, nearest
from mpbridge.precision.policy import PrecisionPolicy, Region
from mpbridge.precision.registry import resolve
from mpbridge.precision.sync.targets import class_default, has, holder, is_inputs, normal, read, same

SCHEMA = 1
"""Schema of Plan.as_data."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One field that changes."""

    target: Target
    field: str
    before: Any
    """The value found; UNSET if inputs do not name the field."""
    after: Any
    """dtypes as DType; module rules as ModuleRules; a restored value as it was found."""
    why: str
    set_by: str
    """Who had set it: 'nobody', 'derived', 'an earlier recipe', 'the optimizer section', 'command line', 'somebody' (a live value that is not the default)."""
    conflict: bool = False
    """Whether an author's value is overridden."""
    keep: str | None = None
    """The line that would keep the author's value; None if only another recipe does."""

    @property
    def name(self) -> str:
        """'optimizer.bf16'."""
        return f"{self.target}.{self.field}"

    def __str__(self) -> str:
        if not self.conflict:
            before, after = show(self.before), show(self.after)
            # another spelling of the same value: only the raw value shows the difference
            return f"{self.name}: {str(self.before) if before == after else before} -> {after}  ({self.why})"
        # inputs record who wrote them; a live value is only known not to be the class's default
        source = "was not the default" if self.set_by == "somebody" else f"set by {self.set_by}"
        cure = f"to keep it: {self.keep}" if self.keep else "another recipe keeps it: mpbridge list"
        return f"{self.name}: was {show(self.before)}, becomes {show(self.after)}  ({self.why}; {source}; {cure})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A precision field that the user set and that no policy decides."""

    target: str
    field: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.target}.{self.field}: {show(self.value)}  ({self.why})"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What recipes have written so far onto live objects; pass it to the next plan."""

    fields: Mapping[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    """(target, field) -> (value before any recipe, value written)."""
    unchecked: tuple[str, ...] = ()
    """Targets whose own validation already failed before anything was written, with the error: nothing was checked there."""

    def before(self, target: str, name: str, now: Any) -> Any:
        """The value before any recipe: what an earlier recipe found, unless the field was changed since."""
        found, written = self.fields.get((target, name), (now, now))
        return found if same(now, written) else now

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        values = [(".".join(key), *map(show, pair)) for key, pair in self.fields.items()]
        note = "not checked: " + "; ".join(self.unchecked) if self.unchecked else ""
        return table("written so far", ("field", "before any recipe", "written"), values, note=note).html()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that would change, and nothing else."""

    policy: PrecisionPolicy | None
    """None: restore everything."""
    realization: Realization = "native"
    writes: tuple[Write, ...] = ()
    kept: tuple[Kept, ...] = ()
    targets: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The mappings or live objects that were read."""
    after: Receipt = field(default_factory=Receipt, repr=False)

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        return self.table().filled().html()

    def table(self) -> Table:
        """One row per write: field, before, after, why, who had set it, and the line that would keep it; overridden values are marked."""
        rows = []
        for write in self.writes:
            keep = (write.keep or "another recipe: mpbridge list") if write.conflict else ""
            who = "" if write.set_by == "nobody" else write.set_by
            rows.append((write.name, show(write.before), show(write.after), write.why, who, keep))
        rows += [(f"{one.target}.{one.field}", show(one.value), "left alone", one.why, "", "") for one in self.kept]
        tones = [*("warn" if write.conflict else "" for write in self.writes), *("dim" for _ in self.kept)]
        columns = ("field", "before", "after", "why", "had been set by", "to keep it")
        return table("what the recipe decides", columns, rows, whole=("field", "to keep it"), tones=tones)

    @property
    def conflicts(self) -> tuple[Write, ...]:
        """The writes that override an author's value."""
        return tuple(write for write in self.writes if write.conflict)

    def of(self, target: str) -> dict[str, Any]:
        """field -> value for one target."""
        return {write.field: write.after for write in self.writes if write.target == target}

    def as_data(self) -> dict[str, Any]:
        """The plan as JSON types, for precision.json."""

        def rows(found: Iterable[Write | Kept]) -> list[dict[str, Any]]:
            return [{f.name: plain(getattr(one, f.name)) for f in dataclasses.fields(one)} for one in found]

        return {
            "schema": SCHEMA,
            "realization": self.realization,
            "policy": None if self.policy is None else self.policy.as_data(),
            "fingerprint": None if self.policy is None else self.policy.fingerprint(),
            "writes": rows(self.writes),
            "kept": rows(self.kept),
        }

    def __str__(self) -> str:
        lines = [str(write) for write in self.writes] or ["nothing to write"]
        return "\n".join([*lines, *(f"left alone  {kept}" for kept in self.kept)])


def plan(
    policy: str | Path | MixedPrecisionConfig | PrecisionPolicy | None,
    *,
    model: Any = None,
    optimizer: Any = None,
    ddp: Any = None,
    origin: Mapping[str, str] = _NOTHING,
    after: Receipt | None = None,
    realization: Realization = "native",
    core: str | None = None,
) -> Plan:
    """What `policy` would write onto the given targets, each a mapping of inputs or a live object; targets not given are omitted.

    policy: also a recipe's name or config, which is resolved; None restores everything that was written according to `after`, the receipt of the last apply.
    origin: 'ddp.grad_reduce_in_fp32' -> who wrote it ('command line', 'run.yaml'), if the caller knows.
    realization: 'emulated' keeps the quantization from megatron-core's model and wrapper; mpbridge.numerics then reads the policy.
    core: megatron-core's version, which decides which fields a mapping may name; None: the installed one. A live object's class determines it itself.
    Raises UnknownName if a live target lacks a field that the policy decides, BadValue for an invalid policy or realization."""
    if realization not in get_args(Realization):
        raise BadValue(f"realization={realization!r}: expected {' or '.join(map(repr, get_args(Realization)))}")
    if isinstance(policy, (str, Path, MixedPrecisionConfig)):
        policy = resolve(policy)
    if not isinstance(policy, PrecisionPolicy | None):
        raise BadValue(
            f"plan() got a {type(policy).__name__}, expected a recipe's name, its config, or the PrecisionPolicy that resolve() makes of it"
        )
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "ddp": ddp}
    targets = {name: target for name, target in given.items() if target is not None}
    reading = _Reading(targets=targets, origin=origin, after=after or Receipt(), core=nearest(core or current()))
    facts = None
    if policy is not None:
        facts = Facts(policy=_spoken(policy, realization), fp8=policy.fp8, own=reading.own, core=reading.core)
    writes = tuple(write for row in TABLE if row.target in reading.targets for write in reading.writes(row, facts))
    kept = tuple(reading.kept())
    return Plan(policy=policy, realization=realization, writes=writes, kept=kept, targets=targets, after=reading.after)


def _spoken(policy: PrecisionPolicy, realization: Realization) -> PrecisionPolicy:
    """The policy as written to megatron-core."""
    # a scaling that megatron-core cannot express is computed in mpbridge's linears
    if realization == "native" and all(quant.row.core for quant in policy.quants):
        return policy
    return dataclasses.replace(policy, regions=(Region(),), reuse_grad_buffer=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The targets, and who set what as far as known."""

    targets: dict[str, Any]
    origin: Mapping[str, str]
    after: Receipt
    core: str

    def own(self, target: Target, name: str, default: Any) -> Any:
        """The target's value before any recipe, or else the default."""
        if target not in self.targets:
            return default
        value = self.after.before(target, name, read(self.targets[target], name))
        return default if value is UNSET or value is None else value

    def writes(self, row: PrecisionField, facts: Facts | None) -> Iterator[Write]:
        target = self.targets[row.target]
        if not self._asked(row, facts):
            return
        now = normal(row, read(target, row.field))
        wanted = KEEP if facts is None else row.value(facts)
        new = self.after.before(row.target, row.field, now) if wanted is KEEP else wanted
        # megatron-core fills fields missing from inputs with its defaults
        if same(row.default if now is UNSET else now, new) or new is UNSET:
            return
        set_by, conflict = self._set_by(row, now)
        why = "as it was before the earlier recipe" if wanted is KEEP else row.why
        if row.compared_as_text and now not in (UNSET, None) and _means(now) == new:
            why = f"megatron-core compares with the strings {row.compared_as_text}: {now} has no effect there"
            conflict = False
        yield Write(
            target=row.target,
            field=row.field,
            before=now,
            after=new,
            why=why,
            set_by=set_by,
            conflict=conflict,
            keep=_keep(row, facts, now) if conflict else None,
        )

    def _asked(self, row: PrecisionField, facts: Facts | None) -> bool:
        """Whether the row's field exists. Raises UnknownName if the policy needs a missing field."""
        target = self.targets[row.target]
        told = row.required and facts is not None and not same(row.value(facts), row.default)
        if is_inputs(target) and not row.holds.holds(self.core) and not told:
            return False
        if has(target, row.field):
            return True
        elsewhere = (row.holds is not ALWAYS and not told) or row.kind == "cleared"
        if elsewhere or facts is None or row.value(facts) is KEEP:
            return False
        raise UnknownName(f"field of {type(target).__name__}", row.field, getattr(target, "__dict__", {}))

    def _set_by(self, row: PrecisionField, now: Any) -> tuple[str, bool]:
        target, name = self.targets[row.target], f"{row.target}.{row.field}"
        if now is UNSET or (now is None and row.none_derives):
            return "nobody", False
        receipt = self.after.fields.get((row.target, row.field))
        if receipt is not None and same(now, receipt[1]):
            return "an earlier recipe", False
        if name in self.origin:
            return self.origin[name], True
        if is_inputs(target):
            return f"the {row.target} section", True
        if same(now, class_default(target, row.field)):
            return "nobody", False
        return ("derived", False) if self._derived(row, now) else ("somebody", True)

    def _derived(self, row: PrecisionField, now: Any) -> bool:
        """Whether megatron-core's own post-init explains the value."""
        owner = holder(self.targets[row.target], row.field)
        sources = [row.follows, *(old for old, new in REPLACED.items() if new == row.field)]
        return any(same(now, getattr(owner, source, UNSET)) for source in sources if source)

    def kept(self) -> Iterator[Kept]:
        for (name, field_name), why in (*USERS_OWN.items(), *PROCESS_WIDE.items()):
            target = self.targets.get(name)
            if target is None or not has(target, field_name):
                continue
            value = read(target, field_name)
            usual = UNSET if is_inputs(target) else class_default(target, field_name)
            if not same(value, usual):
                yield Kept(target=name, field=field_name, value=value, why=why)


def _keep(row: PrecisionField, facts: Facts | None, now: Any) -> str | None:
    """The line that keeps the author's value; None if only another recipe does."""
    turns = row.knob is not None and facts is not None and row.turns(facts, now)
    return f"mixed_precision.{row.knob}={_yaml(now)}" if turns else None


def show(value: Any) -> str:
    """A value as displayed."""
    if value is UNSET:
        return "not given"
    if isinstance(value, ModuleRules):
        named = dict.fromkeys(region.modules for region in value.regions if region.modules != "*")
        return f"rules for {', '.join(named)}"
    return say(value)


def plain(value: Any) -> Any:
    """A value as JSON types."""
    if value is UNSET:
        return None
    if isinstance(value, ModuleRules):
        return [plain_data(region) for region in value.regions]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return say(value)


def _means(value: Any) -> str | None:
    try:
        return dtype(value).short
    except BadValue:
        return None


def _yaml(value: Any) -> str:
    """A value as an override on the command line."""
    if isinstance(value, DType) or str(value).startswith("torch."):
        return dtype(value).short
    return json.dumps(value) if value is None or isinstance(value, (bool, int, float)) else str(value)
