"""A world of one process for the engines' tests."""

from __future__ import annotations

from collections.abc import Iterator

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
    """An active CPU device layer in a world of one."""
    from mpbridge.backend.devices import device_layer

    with device_layer(False):
        yield
