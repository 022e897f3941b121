"""The engines' world of one and its device layer, for the tests that train megatron-core's GPT, and the compiler."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpbridge.numerics.kernels import kernel
from tests.backend.engines.conftest import layer, world

__all__ = ["layer", "world"]


def scale_of(quantizer: Any, slot: str, side: str) -> float:
    """The stored scale that delayed scaling gives the next operand of that kind."""
    table = quantizer.backward_table if side == "dy" else quantizer.forward_table
    return float(table.scale[table.names.index(f"{slot}.{side}")])


@pytest.fixture(scope="module")
def compiling() -> Iterator[None]:
    """Kernels are compiled, for tests that compare them with uncompiled ones: everywhere else the suite leaves the compiler off (tests/conftest.py)."""
    kernel.cache_clear()  # code that was called uncompiled once is never compiled
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(disable=False):
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        yield
    kernel.cache_clear()


@pytest.fixture
def torchaos_own() -> None:
    """torchao's MX and float8 modules as a second opinion; a release of it that needs a newer torch fails while it is imported."""
    try:
        importlib.import_module("torchao.prototype.moe_training.mxfp8_linear")
        importlib.import_module("torchao.float8.float8_training_tensor")
    except (ImportError, AttributeError) as error:
        pytest.skip(f"torchao does not run with torch {torch.__version__}: {error}")
