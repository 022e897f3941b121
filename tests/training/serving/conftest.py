"""The engines' world of one process and device layer."""

from tests.backend.engines.conftest import layer, world  # noqa: F401  (fixtures)
