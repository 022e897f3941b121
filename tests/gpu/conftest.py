"""GPU tests skip with the reason that the capability check gives, never with a bare 'no GPU'."""

from __future__ import annotations

import importlib.util

import pytest


def transformer_engine_reason() -> str | None:
    """Why Transformer Engine cannot be imported here; None when it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (pip install 'mpbridge[te]' on a machine with CUDA libraries)"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        return f"Transformer Engine is installed but cannot be imported: {type(error).__name__}: {error}"
    return None


@pytest.fixture(scope="session")
def transformer_engine():
    """The imported package; needs its libraries, not a GPU."""
    reason = transformer_engine_reason()
    if reason:
        pytest.skip(reason)
    return importlib.import_module("transformer_engine.pytorch")
