"""Conditions that must hold after every step and are cheap to check: dtypes of all roles, derived flags, the loss scale, hooks still in place."""

from __future__ import annotations

from typing import Any

from mpbridge.numerics.observation.modules import module_paths
from mpbridge.observe.audit.flags import different, optimizer_faults, scaler_faults
from mpbridge.observe.audit.holdings import holdings
from mpbridge.observe.audit.observe import Observed, roles_into, rule_of
from mpbridge.observe.audit.promise import Promises
from mpbridge.precision.wording import rule_words

Shape = dict[str, tuple[int, str, tuple[str, ...]]]
"""Module -> (number of hooks, class, names of methods overridden on the instance)."""


def fingerprint(engine: Any) -> Shape:
    """How every module is wired; taken after the first step, when lazy set-up is done."""
    found: Shape = {}
    for module, path in module_paths(engine.model).items():
        hooks = sum(len(getattr(module, name)) for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"))
        own = tuple(
            f"{name}={id(value)}" for name, value in vars(module).items() if callable(value) and "forward" in name
        )
        key = path if path not in found else f"{path} ({type(module).__name__})"
        found[key] = (hooks, type(module).__name__, own)
    return found


def broken(engine: Any, promises: Promises, wiring: Shape | None) -> list[str]:
    """Every invariant that does not hold on this rank, in words."""
    seen = Observed()
    roles_into(seen, promises, list(resting(engine)))
    faults = [
        f"{role} of {name}: promised {promised}, found {found}"
        for (role, promised, found), tally in seen.tensors.items()
        for name in tally.offenders
    ]
    faults += different(engine)[1] + optimizer_faults(engine, promises)[1]
    faults += scaler_faults(engine, promises.policy.loss_scale)
    faults += _rules(engine, promises)
    for held in holdings(engine):
        if held.updated is not None and held.group is None:
            faults.append(f"{held.name}: no longer in any group of the optimizer")
    if wiring is not None:
        now = fingerprint(engine)
        faults += [
            f"{path or 'the model'}: {_changed(before, now.get(path))}"
            for path, before in wiring.items()
            if now.get(path) != before
        ]
    return faults


def resting(engine: Any) -> Any:
    """The engine's live tensors without a gather: parameters may be one update behind."""
    quiet = getattr(engine, "tensors_at_rest", None)
    return engine.tensors() if quiet is None else quiet()


def _rules(engine: Any, promises: Promises) -> list[str]:
    from mpbridge.numerics.observation.modules import linears

    if not promises.emulated:
        return []
    return [
        f"{path}: promised {rule_words(promises.gemms(path))}, found {rule_of(module, True, ran=True)}"
        for path, module in linears(engine.model).items()
        if rule_words(promises.gemms(path)) != rule_of(module, True, ran=True)
    ]


def _changed(before: tuple[int, str, tuple[str, ...]], now: tuple[int, str, tuple[str, ...]] | None) -> str:
    if now is None:
        return "is gone"
    if before[1] != now[1]:
        return f"was {before[1]}, is {now[1]}"
    if before[0] != now[0]:
        return f"had {before[0]} hooks, has {now[0]}"
    return "its forward was replaced"
