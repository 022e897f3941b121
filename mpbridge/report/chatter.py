"""What megatron-core says on every machine without Transformer Engine, whatever is asked of it."""

from __future__ import annotations

import warnings

UPSTREAM = ("Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated")
"""Beginnings of warnings that megatron-core 0.16.1 gives at every import or construction; `doctor` reports the fact."""


def without_chatter() -> None:
    """Leaves them out in this process; also the first act of a worker that imports megatron-core."""
    for text in UPSTREAM:
        warnings.filterwarnings("ignore", message=text)
