"""Prints what the emulation leaves out, with every emulated run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpbridge.train.base import Hook

if TYPE_CHECKING:
    from mpbridge.train.base import Training


class EmulationNotes(Hook):
    """Shows the emulation's notes when an engine is built, and keeps them for the summary. show: prints a line; None: silence."""

    def __init__(self, show: Callable[[Any], None] | None) -> None:
        self.show = show

    def built(self, training: Training) -> None:
        """Shows and keeps the notes of an emulated engine."""
        emulation = getattr(training.engine, "emulation", None)
        if emulation is None:
            return
        first, *others = emulation.notes()
        training.notes["emulation"] = first
        if self.show is not None:
            self.show("\n".join([first, "not as on the GPU:", *(f"  - {note}" for note in others)]))
