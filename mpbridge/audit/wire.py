"""Collectives that belong to no step: what is sent while something else than training happens is not counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def unobserved() -> Iterator[None]:
    """What is sent inside belongs to no step (a checkpoint's tables and bytes): it is not counted."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def aside() -> bool:
    """Whether this is inside of `unobserved`."""
    return _depth > 0
