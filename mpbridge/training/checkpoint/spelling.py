"""Encodes an archive's contents (archive.py) as `plain.encoded` does. Loads no framework."""

from __future__ import annotations

import base64
from typing import Any

from mpbridge.common.errors import CheckpointError
from mpbridge.training.checkpoint.archive import Tensor
from mpbridge.training.checkpoint.plain import encoded

MOST = 5_000_000
"""Maximum number of values in one state; repeated references to a container count each time."""


def spelled(value: Any) -> Any:
    """`value` as JSON types. Raises CheckpointError for records, and for shared containers that expand to too many values."""
    left, waiting = MOST, [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        left -= 1
        if left < 0 or depth > 100:
            raise CheckpointError(f"more than {MOST} values, or values nested endlessly")
        if isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, (list, tuple)):
            waiting += [(part, depth + 1) for part in item]
    return encoded(value, other=_other)


def _other(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        data = base64.b64encode(value.content()).decode("ascii")
        return {"tensor": {"dtype": value.dtype, "shape": list(value.shape), "data": data}}
    raise CheckpointError(f"a {type(value).__name__} where plain data is expected")
