"""Warnings of megatron-core about itself, which say nothing of the user's run."""

from __future__ import annotations

import warnings

UPSTREAM = ("Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated")
"""Beginnings of warnings that megatron-core 0.16.1 emits at every import or construction; `doctor` reports the fact."""


def without_chatter() -> None:
    """Suppresses UPSTREAM in this process. Workers call it before they import megatron-core."""
    for text in UPSTREAM:
        warnings.filterwarnings("ignore", message=text)
