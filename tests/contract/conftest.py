"""The engines' world of one and its device layer."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.contract.engine_contract")

from tests.engines.conftest import layer, world  # noqa: E402

__all__ = ["layer", "world"]
