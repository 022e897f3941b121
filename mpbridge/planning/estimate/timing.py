"""The timing measured by an mpbridge run: read from timing.json in its folder, which `pretrain` writes next to precision.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.files import text_of

NAME = "timing.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A measured step."""

    recipe: str
    seconds: float
    """Median of the last steps."""
    tokens_per_second: float
    """Per process."""
    steps: int
    """Number of steps in the median."""
    world_size: int
    config: dict[str, Any]
    """The run's configuration, as returned by ConfigContainer.as_data."""


def timing(folder: Path) -> Timing:
    """The timing of that run. Raises BadValue for a folder without one, or with an invalid one."""
    path = folder / NAME
    try:
        data = json.loads(text_of(path))
        found = Timing(**{name: data[name] for name in Timing.__dataclass_fields__})
    except OSError as error:
        raise BadValue(f"{path}: {error.strerror or error} (a run with logger.log_dir={folder} writes it)") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadValue(f"{path} is not the timing of a run: {error}") from None
    if not (isinstance(found.seconds, (int, float)) and found.seconds > 0 and found.tokens_per_second > 0):
        raise BadValue(f"{path}: seconds={found.seconds!r}, expected a positive number")
    return found
