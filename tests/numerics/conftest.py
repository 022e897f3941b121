"""The engines' world of one and its device layer, for the tests that train megatron-core's GPT."""

from __future__ import annotations

from tests.backend.engines.conftest import layer, world

__all__ = ["layer", "world"]
