"""Before any test imports megatron: a Transformer Engine without its CUDA parts must not be in its way."""

import mpbridge  # noqa: F401
