"""`resolve` for everything that names a recipe; the registry itself stands on the resolution of configs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpbridge.precision import resolve as configs
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import get_mixed_precision_config


def resolve(
    config: str | Path | MixedPrecisionConfig,
    *,
    optimizer: Mapping[str, Any] | object | None = None,
    layers: int | None = None,
) -> PrecisionPolicy:
    """The policy that a config, or the recipe of that name, means.

    optimizer: the optimizer's section or config object; optimizer facts that the config leaves open are then read from it.
    layers: depth of the model; more BF16 edge layers than that is a fault.
    Raises Contradiction naming every fault, BadValue for anything that is not a config, UnknownName or RecipeError for a name.
    """
    given = get_mixed_precision_config(config) if isinstance(config, (str, Path)) else config
    return configs.resolve(given, optimizer=optimizer, layers=layers)
