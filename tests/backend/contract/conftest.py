"""The engines' world of one and its device layer."""

import pytest

pytest.register_assert_rewrite("tests.backend.contract.engine_contract")

from tests.backend.engines.conftest import engines, layer, world  # noqa: E402

__all__ = ["engines", "layer", "world"]
