"""Warnings of megatron-core about itself, which say nothing of the user's run."""

from __future__ import annotations

import warnings

UPSTREAM = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "`torch.distributed.",  # names of collectives that torch 2.13 deprecates, and that megatron-core 0.16.1 calls
)
"""Beginnings of warnings that megatron-core emits at every import, construction or step; `doctor` reports what is not installed."""


def without_chatter() -> None:
    """Suppresses UPSTREAM in this process. Workers call it before they import megatron-core."""
    for text in UPSTREAM:
        warnings.filterwarnings("ignore", message=text)
