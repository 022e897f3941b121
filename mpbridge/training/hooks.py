"""The hooks of a run, in order of execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpbridge.observe.audit import AuditHook
from mpbridge.observe.telemetry.hook import StatisticsHook
from mpbridge.training.base import Hook
from mpbridge.training.checkpointer import Checkpointer
from mpbridge.training.faults import Nonfinite, Signals
from mpbridge.training.stages import Stages

if TYPE_CHECKING:
    from mpbridge.settings.container import Run
    from mpbridge.training.base import Training


def default_hooks(run: Run, show: Callable[[Any], None] | None = None) -> list[Hook]:
    """The hooks that a run's sections require, in order of execution. show: prints a table or a line; None: no output."""
    audit: Any = AuditHook(
        mode=run.train["audit"],
        folder=run.logger["log_dir"],
        show=show,
        every=run.audit["every"],
        invariants=int(run.train.get("log_interval") or 10),
    )
    notes: list[Hook] = [EmulationNotes(show)] if run.emulate and run.policy.quantized else []
    checkpointer = Checkpointer(run)
    nonfinite = Nonfinite(str(run.train.get("nonfinite") or "skip"), checkpointer)
    statistics: Any = StatisticsHook(run.logger["log_dir"], every=run.logger.get("precision_every"))
    # statistics first, so that their hooks are removed before the audit inspects modules; then the audit, so that what it stops is not saved
    return [statistics, audit, *notes, Signals(), nonfinite, checkpointer, Stages(run)]


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
