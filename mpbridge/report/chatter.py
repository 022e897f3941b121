"""Warnings that megatron-core prints on every machine without Transformer Engine, regardless of the call."""

from __future__ import annotations

import warnings

UPSTREAM = ("Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated")
"""Beginnings of warnings that megatron-core 0.16.1 emits at every import or construction; `doctor` reports the fact."""


def without_chatter() -> None:
    """Suppresses them in this process. Workers call it before they import megatron-core."""
    for text in UPSTREAM:
        warnings.filterwarnings("ignore", message=text)
