"""megatron-core's own config classes inside the CPU device layer, with Transformer Engine's version check answered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.optimizers import CpuFusedAdam

sys.path.insert(0, str(Path(__file__).parent))  # for sync_kit: pytest's importlib mode adds no folder


@pytest.fixture
def core() -> Iterator[None]:
    """The device layer: OptimizerConfig with a precision-aware optimizer cannot be built without a FusedAdam."""
    with device_layer(False, fused_adam=CpuFusedAdam):
        yield


@pytest.fixture
def te_version(core: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers "new enough" where TransformerConfig asks for Transformer Engine's version (MoE with FP8); nothing else of it is replaced."""
    monkeypatch.setattr("megatron.core.transformer.transformer_config.is_te_min_version", lambda *args, **kwargs: True)
