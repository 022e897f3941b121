"""The engines' tiny runs, for the audit's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.backend.engines.conftest import world

__all__ = ["world"]


@pytest.fixture
def build(world: None) -> Iterator[Callable[..., Any]]:
    """Makes a tiny megatron-core engine on the CPU, as tests/backend/engines/tiny.py describes it; closed at the end of the test."""
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine
    from tests.backend.engines import tiny

    made: list[Any] = []

    def make(kind: str = "bf16", **changes: Any) -> Any:
        made.append(build_engine(tiny.run(kind, **changes)))
        return made[-1]

    with device_layer(False):  # for all of the test, as in a run: each step would enter and leave it otherwise
        yield make
        for engine in made:
            engine.close()


def nothing(step: int) -> None:
    """Before or after a step."""


def driven(
    engine: Any,
    hook: Any,
    *,
    steps: int = 1,
    micro: int = 2,
    batches: Any = None,
    before: Callable[[int], None] = nothing,
    after: Callable[[int], None] = nothing,
) -> list[Any]:
    """Steps an engine under an AuditHook as the training loop does; what the steps returned."""
    from tests.backend.engines import tiny

    training, batches, results = SimpleNamespace(engine=engine), batches or tiny.batches(), []
    hook.built(training)
    try:
        hook.started(training)
        for step in range(steps):
            before(step)
            hook.stepping(training)
            results.append(engine.train_step(batches, microbatches=micro))
            hook.stepped(training, results[-1])
            after(step)
        hook.finished(training)
    finally:
        hook.closed()
    return results


def faults_in(hook: Any) -> list[str]:
    """What all of a run's audits named."""
    return [text for one in hook.history for text in one.get("faults", ())]


@pytest.fixture
def drive() -> Callable[..., list[Any]]:
    """`driven`."""
    return driven
