"""AuditHook: the audits of a run at their moments, printed, written to precision.json, and enforced."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from mpbridge.audit.findings import Report
from mpbridge.audit.motion import Motion
from mpbridge.audit.run import audit
from mpbridge.audit.table import audit_table, fault_lines
from mpbridge.audit.watch import Watch


def write_section(path: Path, report: Report) -> None:
    """Puts the report under 'audit' / its stage into precision.json, leaving what else is there."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    data.setdefault("audit", {})[report.stage] = report.as_data()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")


class AuditHook:
    """Takes part in `mpbridge.train`'s loop (its Hook's methods); a loop of one's own calls `built`, then `stepped` after each step.

    Static audit when the engine is built; from then on light hooks watch the linears and collectives until the first update that was really applied
    (not skipped, learning rate above 0), where the live audit runs and every hook is taken off. Only facts are compared, so warm-up from 0 and
    any number of skipped FP16 steps just defer it.
    """

    def __init__(
        self,
        *,
        mode: Literal["stop", "warn"] = "stop",
        folder: Path | str | None = None,
        show: Callable[[Any], None] | None = None,
    ) -> None:
        self.mode = mode
        self.folder = None if folder is None else Path(folder)
        self.show = show
        """Prints a table or a line; called on rank 0 only. None: nothing is printed."""
        self.reports: dict[str, Report] = {}
        """Stage -> report."""
        self.seconds = 0.0
        """Wall time of this rank's looking, so far."""
        self._watch: Watch | None = None
        self._motion: Motion | None = None

    def built(self, training: Any) -> None:
        """Static audit, and the watch begins. Raises AuditFailed unless mode is 'warn'."""
        engine = training.engine
        self.closed()
        self._conclude(audit(engine.run.policy, engine, stage="static"))
        begun = time.process_time()
        self._watch = Watch()
        self._watch.start(engine.model)
        self.seconds += time.process_time() - begun

    def started(self, training: Any) -> None:
        """The checksums that the first update is compared with: taken here, after anything was loaded."""
        begun = time.process_time()
        if self._watch is not None:
            self._motion = Motion(training.engine.tensors())
        self.seconds += time.process_time() - begun
        self._write()  # the loop may have written a fresh precision.json since the static audit

    def stepped(self, training: Any, result: Any) -> None:
        """Live audit after the first applied update with a learning rate above 0; before and after that, nothing."""
        if self._watch is None or not result.applied or not result.lr > 0.0:
            return
        engine, watch, motion = training.engine, self._watch, self._motion
        self.closed()
        self._conclude(audit(engine.run.policy, engine, stage="live", watch=watch, motion=motion, result=result))

    def evaluated(self, training: Any, loss: float) -> None:
        """Nothing."""

    def finished(self, training: Any) -> None:
        """Says so when no update was ever applied, because nothing was proved."""
        if self._watch is not None and self.show is not None and _rank() == 0:
            self.show("audit: no update was applied, so main weights and moments were never seen")

    def closed(self) -> None:
        """Takes every hook off."""
        if self._watch is not None:
            self._watch.stop()
        self._watch = self._motion = None

    def _conclude(self, report: Report) -> None:
        self.reports[report.stage] = report
        self.seconds += report.seconds
        self._write()
        if _rank() == 0 and self.show is not None:
            self.show(audit_table(report))
            for line in fault_lines(report):
                self.show(f"audit: {line}")
        if self.mode == "stop":
            report.require()

    def _write(self) -> None:
        if _rank() == 0 and self.folder is not None:
            for report in self.reports.values():
                write_section(self.folder / "precision.json", report)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
