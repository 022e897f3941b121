"""The engines' world of one and its device layer, for the tests that train megatron-core's GPT, and the compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mpbridge.numerics.kernels import kernel
from tests.backend.engines.conftest import layer, world

__all__ = ["layer", "world"]


@pytest.fixture(scope="module")
def compiling() -> Iterator[None]:
    """Kernels are compiled, for tests that compare them with uncompiled ones: everywhere else the suite leaves the compiler off (tests/conftest.py)."""
    kernel.cache_clear()  # code that was called uncompiled once is never compiled
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(disable=False):
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        yield
    kernel.cache_clear()
