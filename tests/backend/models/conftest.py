"""The engines' world of one process and device layer: a model is tested as an engine builds it."""

from tests.backend.engines.conftest import engines, layer, world  # noqa: F401  (fixtures)
