"""Writes a plan onto live objects: checked on copies first, all or nothing, with a receipt. Framework-independent: the caller passes how to spell values.

`mpbridge.backend.megatron.targets.apply` is the public function: it checks the machine first and spells values for megatron-core."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from mpbridge.common.errors import BadValue, Conflict, StalePlan, UpstreamRefused
from mpbridge.common.formats import DType
from mpbridge.common.shipped import install
from mpbridge.precision.megatron_spec.classes import FILLED, MARK
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.megatron_spec.precision_field import TARGETS, UNSET, ModuleRules
from mpbridge.precision.sync.plan import Plan, Receipt, show
from mpbridge.precision.sync.targets import holder, is_inputs, read, same

Spell = Callable[[ModuleRules, Any], Any]
"""(rules, the live model config) -> megatron-core's quant_recipe."""

_FIELDS = frozenset((row.target, row.field) for row in TABLE)


def commit(plan: Plan, *, on_conflict: Literal["warn", "error"] = "warn", spell: Spell | None = None) -> Receipt:
    """Writes `plan` onto its live objects, completely or not at all; returns the receipt that the next plan needs.

    on_conflict: "error" refuses to override an author's value; "warn" leaves that to the caller, who has plan.conflicts.
    Raises Conflict, StalePlan, UpstreamRefused (megatron-core's own validation fails), BadValue (a mapping: use build instead)."""
    if on_conflict not in ("warn", "error"):
        raise BadValue(f"on_conflict={on_conflict!r}: expected 'warn' or 'error'")
    if plan.conflicts and on_conflict == "error":
        lines = (f"\n  - {write}" for write in plan.conflicts)
        raise Conflict("".join(["the recipe overrides values that were set:", *lines]))
    for name, target in plan.targets.items():
        if is_inputs(target):
            raise BadValue(
                f"the {name} target is a mapping of inputs: build() constructs megatron-core's config from it, apply() is for live objects"
            )
    _refuse_stale(plan)
    held = {name: holder(target, MARK[name]) for name, target in plan.targets.items()}
    configs = {name: config for name, config in held.items() if config is not None}
    failing_before = {name: _check(config)[1] for name, config in configs.items()}
    saved = _write(plan, spell)
    unchecked, twins = [], {}
    for name, config in configs.items():
        twins[name], fault = _check(config)
        if fault is not None and failing_before[name] is not None and _text(fault) == _text(failing_before[name]):
            unchecked.append(f"{name}: {_text(fault)}")  # it failed before the plan, so the plan is not the cause
        elif fault is not None:
            _restore(saved)
            raise UpstreamRefused(refusal(name, fault)) from fault
    checked = {name: twin for name, twin in twins.items() if twin is not None}
    return _receipt(plan, {name: _take_over(name, configs[name], twin) for name, twin in checked.items()}, unchecked)


def _refuse_stale(plan: Plan) -> None:
    found = [(write, read(plan.targets[write.target], write.field)) for write in plan.writes]
    changed = [
        f"\n  - {write.name}: {show(write.before)} when planned, {show(now)} now"
        for write, now in found
        if not same(now, write.before)
    ]
    if changed:
        raise StalePlan("".join(["the targets changed after the plan was made; make a new plan:", *changed]))


def _write(plan: Plan, spell: Spell | None) -> list[tuple[Any, str, Any]]:
    """Sets every field, or none; returns (owner, field, value before) for undoing."""
    saved: list[tuple[Any, str, Any]] = []
    try:
        for write in plan.writes:
            owner = holder(plan.targets[write.target], write.field)
            saved.append((owner, write.field, getattr(owner, write.field)))
            setattr(owner, write.field, spelled(write.after, owner, spell))
    except BaseException:
        _restore(saved)
        raise
    return saved


def spelled(value: Any, owner: Any, spell: Spell | None) -> Any:
    """A planned value as megatron-core takes it. Raises BadValue for module rules if `spell` is missing."""
    if isinstance(value, DType):
        return value.torch()
    if isinstance(value, ModuleRules):
        if spell is None:
            raise BadValue(
                "the plan has rules for individual modules: use mpbridge.apply, or pass spell=mpbridge.backend.megatron.quant_recipe.compile_rules"
            )
        return spell(value, owner)
    return value


def _restore(saved: list[tuple[Any, str, Any]]) -> None:
    for owner, field, value in saved:
        setattr(owner, field, value)


def _check(config: Any) -> tuple[Any, Exception | None]:
    """(a checked shallow copy, the error of megatron-core's own validation). Lists are copied, since post-init appends to some."""
    validate = "finalize" if hasattr(config, "finalize") else "__post_init__"
    if not hasattr(config, validate):
        return None, None
    twin = copy.copy(config)
    for name, value in vars(twin).items():
        if isinstance(value, (list, dict)):
            object.__setattr__(twin, name, copy.copy(value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            getattr(twin, validate)()
        except Exception as fault:
            return None, fault
    return twin, None


def _take_over(name: str, config: Any, twin: Any) -> dict[str, tuple[Any, Any]]:
    """Fields that the copy's post-init filled but the live object lacks: field -> (before, now)."""
    found = {}
    for field in FILLED[name]:
        before, now = getattr(config, field, UNSET), getattr(twin, field, UNSET)
        if now is not UNSET and not same(before, now):
            found[field] = before, now
            setattr(config, field, now)
    return found


def _receipt(plan: Plan, filled: Mapping[str, Mapping[str, tuple[Any, Any]]], unchecked: list[str]) -> Receipt:
    if plan.policy is None:
        left = {key: pair for key, pair in plan.after.fields.items() if key[0] not in plan.targets}
        return Receipt(fields=MappingProxyType(left), unchecked=tuple(unchecked))
    written: dict[tuple[str, str], tuple[Any, Any]] = {}
    for write in plan.writes:
        key: tuple[str, str] = (write.target, write.field)
        written[key] = (plan.after.before(*key, write.before), read(plan.targets[write.target], write.field))
    for name in TARGETS:
        for field, (before, now) in filled.get(name, {}).items():
            key = (name, field)
            if key in _FIELDS:
                written[key] = (written[key][0] if key in written else plan.after.before(*key, before), now)
    return Receipt(fields=MappingProxyType(dict(plan.after.fields) | written), unchecked=tuple(unchecked))


def _text(fault: Exception | None) -> str:
    return f"{type(fault).__name__}: {fault}"


def refusal(name: str, fault: Exception) -> str:
    """Explains megatron-core's error about a config, since its bare assertions and TypeErrors are uninformative."""
    text = str(fault).strip()
    if isinstance(fault, TypeError) and "NoneType" in text and "Version" in text:
        return (
            f"megatron-core's check of the {name} config requires Transformer Engine, which is not installed: "
            f"install it ({install('te')}), choose a recipe without FP8, FP4 and low-precision optimizer states, or build inside mpbridge's device layer"
        )
    if isinstance(fault, AssertionError) and not text:
        return f"megatron-core refuses the {name} config with a bare assertion"
    return f"megatron-core refuses the {name} config: {text} ({type(fault).__name__})"
