"""Marks collectives that are not part of a step, so that they are not counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def unobserved() -> Iterator[None]:
    """Messages sent inside are not part of a step (a checkpoint's tables and bytes) and are not counted."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def aside() -> bool:
    """Whether execution is inside `unobserved`."""
    return _depth > 0
