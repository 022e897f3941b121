"""Transformer Engine's process-wide switches are off again behind each test: an autocast that is refused on entry leaves its own on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nothing_left_on():
    yield
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
