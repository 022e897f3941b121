"""A world of one process for the engines' tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A process group of one, left as it was found after each file: other folders' tests begin without one."""
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    made = start_process_group(False)
    yield
    if made:
        stop_process_group()


@pytest.fixture
def layer(world: None) -> Iterator[None]:
    """An active CPU device layer, with its Adam, in a world of one."""
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.optimizers import CpuFusedAdam

    with device_layer(False, fused_adam=CpuFusedAdam):
        yield


@pytest.fixture
def engines(layer: None) -> Iterator[Callable[..., Any]]:
    """Builds engines of tiny runs, from the arguments of `tiny.run`; all are closed at the end."""
    from mpbridge.backend.engines.registry import build_engine
    from tests.backend.engines import tiny

    made: list[Any] = []

    def make(kind: Any = "bf16", **sections: Any) -> Any:
        made.append(build_engine(tiny.run(kind, **sections)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
