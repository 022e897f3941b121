"""The engines' world of one process and device layer, and a checkpoint to serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backend.engines.conftest import layer, world  # noqa: F401  (fixtures)
from tests.training.serving import models


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.checkpoint(tmp_path_factory.mktemp("checkpoint"))
