"""Transformer Engine's process-wide switches are off again behind each test: an autocast that is refused on entry leaves its own on."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "played(kind): of a played 'hopper' or 'blackwell' only; not collected on the other"
    )
    config.addinivalue_line("markers", "since(release): what came with that release; not collected in earlier ones")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("played") or item.get_closest_marker("since")]
    if not marked:  # the suite around it, which plays no machine
        return
    from mpbridge.te_cpu.played import now

    from .training import BLACKWELL

    played = "blackwell" if BLACKWELL else "hopper"
    other = {
        item
        for item in marked
        if any(mark.args != (played,) for mark in item.iter_markers("played"))
        or any(mark.args[0] > now().release for mark in item.iter_markers("since"))
    }
    config.hook.pytest_deselected(items=list(other))
    items[:] = [item for item in items if item not in other]


@pytest.fixture(autouse=True)
def nothing_left_on():
    yield
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
