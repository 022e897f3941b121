"""The engines' tiny runs, for the audit's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))


@pytest.fixture
def build() -> Iterator[Callable[..., Any]]:
    """Makes a tiny megatron-core engine on the CPU, as tests/engines/tiny.py describes it; closed at the end of the test."""
    import tiny

    from mpbridge.devices import device_layer
    from mpbridge.engines.parallel import start_process_group, stop_process_group
    from mpbridge.engines.registry import build_engine

    made: list[Any] = []
    mine = start_process_group(False)

    def make(kind: str = "bf16", **changes: Any) -> Any:
        with device_layer(False):
            engine = build_engine(tiny.run(kind, **changes))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
    if mine:
        stop_process_group()


@pytest.fixture
def drive() -> Callable[..., list[Any]]:
    """Steps an engine under an AuditHook as the training loop does."""
    import tiny

    def go(engine: Any, hook: Any, *, steps: int = 1, before: Callable[[int], None] = lambda step: None) -> list[Any]:
        training, batches, results = SimpleNamespace(engine=engine), tiny.batches(), []
        hook.built(training)
        hook.started(training)
        for step in range(steps):
            before(step)
            hook.stepping(training)
            results.append(engine.train_step(batches, microbatches=2))
            hook.stepped(training, results[-1])
        hook.finished(training)
        hook.closed()
        return results

    return go
