"""A catalogue of planted faults: before the first step, after it, and late in a run, each named by the audit on every engine that can have it."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from mpbridge.observe.audit import AuditHook
from tests.observe.audit import model_faults
from tests.observe.audit.catalogue import CATALOGUE, ENGINES, Fault

MOMENTS = {"before step 1": 0, "after step 1": 1, "late": 50}
EVERY = 2
BREAKS = "the step failed"


def planted(build: Any, fault: Fault, engine_name: str, at: int, *, plant: bool = True) -> list[tuple[str, str]]:
    """(subject, offenders) of everything that the audits of a run find, the fault planted after step `at`; the run ends where it was named."""
    from tests.backend.engines import tiny

    kind, sections = (ENGINES | model_faults.ENGINES)[engine_name]
    if importlib.util.find_spec(needs := model_faults.NEEDS.get(engine_name, "torch")) is None:
        pytest.skip(f"{needs} is not installed")
    # a late fault is planted one update ahead of the step of the next repeated audit: all of them on the way there show nothing new
    every = EVERY if at < EVERY else at + (1 if fault.once else 2)
    engine, hook = build(kind, **sections), AuditHook(mode="warn", every=every, invariants=1)
    engine.undo = []
    training, batches, found = SimpleNamespace(engine=engine), tiny.batches(), []
    try:
        hook.built(training)
        for step in range(at + 3):
            if step == at and plant:
                fault.plant(engine)
            if step == 0:
                hook.started(training)
            hook.stepping(training)
            try:
                result = engine.train_step(batches, microbatches=2)
            except (RuntimeError, AttributeError, TypeError, KeyError):
                # a fault that is fatal ends its first step; one that only later steps do not survive has to be named before
                found.append((BREAKS, "at once" if step == at else ""))
                break
            hook.stepped(training, result)
            if plant and named(fault, seen(hook)):
                break
    finally:
        hook.closed()
        for one in engine.undo:
            setattr(one.owner, one.name, one.value)
    return found + seen(hook)


def seen(hook: AuditHook) -> list[tuple[str, str]]:
    return [
        (subject, " ".join(one.get("faults", ()))) for one in hook.history for subject, fact in one["facts"].items() if fact[2] == "NO"
    ]  # fmt: skip


def named(fault: Fault, found: list[tuple[str, str]]) -> bool:
    return bool({subject for subject, _ in found} & set(fault.subjects)) and any(fault.offender in text for _, text in found)  # fmt: skip


def check(build: Any, fault: Fault, engine: str, at: int) -> None:
    found = planted(build, fault, engine, at)
    if fault.fatal:  # no audit comes to name it: the step that it is planted before ends the run
        assert found == [(BREAKS, "at once")]
        return
    assert named(fault, found), found


ROWS = [
    (fault, engine)
    for fault in (*CATALOGUE, *model_faults.FAULTS)
    for engine in fault.engines
    if model_faults.ENGINES.get(engine, ENGINES["ddp"])[1].get("emulate") != "te"
]
WHENEVER = [
    (fault, engine, moment) for fault, engine in ROWS for moment in MOMENTS if fault.early or moment != "before step 1"
]
"""A fault that is not early means something after the first update only."""
QUICK = [(fault, engine) for fault, engine in ROWS if fault.quick and engine == fault.engines[0]]


def _id(value: Any) -> str | None:
    return value.name if isinstance(value, Fault) else None


@pytest.mark.parametrize(("fault", "engine"), QUICK, ids=_id)
def test_a_fault_is_named(build: Any, fault: Fault, engine: str) -> None:
    check(build, fault, engine, int(not fault.early))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("fault", "engine", "moment"), WHENEVER, ids=_id)
def test_a_fault_is_named_whenever_it_begins(build: Any, fault: Fault, engine: str, moment: str) -> None:
    check(build, fault, engine, MOMENTS[moment])


@pytest.mark.parametrize("engine", ["hybrid kept", "hybrid tensorwise", "muon bf16", "core muon", "lora mxfp8"])
def test_the_same_run_without_a_fault_is_healthy(build: Any, engine: str) -> None:
    """(of the other engines: test_audit.py and test_healthy_runs.py)"""
    assert planted(build, CATALOGUE[0], engine, 1, plant=False) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", [name for name, (_, sections) in ENGINES.items() if "parallel" not in sections])
def test_a_long_run_without_a_fault_is_healthy(build: Any, engine: str) -> None:
    assert planted(build, CATALOGUE[0], engine, 50, plant=False) == []
