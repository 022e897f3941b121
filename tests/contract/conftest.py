"""The engines' world of one and its device layer."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest

pytest.register_assert_rewrite("tests.contract.engine_contract")

from tests.engines.conftest import layer, world  # noqa: E402

__all__ = ["layer", "world"]
