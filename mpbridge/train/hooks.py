"""The hooks of a run, in the order in which they act."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpbridge.audit import AuditHook
from mpbridge.telemetry.hook import StatisticsHook
from mpbridge.train.base import Hook
from mpbridge.train.emulation_notes import EmulationNotes
from mpbridge.train.faults import Nonfinite, Signals
from mpbridge.train.keeper import Keeper
from mpbridge.train.stages import Stages

if TYPE_CHECKING:
    from mpbridge.config.container import Run


def default_hooks(run: Run, show: Callable[[Any], None] | None = None) -> list[Hook]:
    """The hooks that a run's own sections ask for, in the order in which they act. show: prints a table or a line; None: silence."""
    audit: Any = AuditHook(
        mode=run.train["audit"],
        folder=run.logger["log_dir"],
        show=show,
        every=run.audit["every"],
        invariants=int(run.train.get("log_interval") or 10),
    )
    notes: list[Hook] = [EmulationNotes(show)] if run.emulate and run.policy.quantized else []
    keeper = Keeper(run)
    nonfinite = Nonfinite(str(run.train.get("nonfinite") or "skip"), keeper)
    statistics: Any = StatisticsHook(run.logger["log_dir"], every=run.logger.get("precision_every"))
    # statistics first: their hooks are off again when the audit looks at the modules; then the audit: what it stops is not saved
    return [statistics, audit, *notes, Signals(), nonfinite, keeper, Stages(run)]
