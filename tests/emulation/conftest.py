"""The engines' world of one and its device layer, for the tests that train megatron-core's GPT."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engines.conftest import layer, world

__all__ = ["layer", "world"]
