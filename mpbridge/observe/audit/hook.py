"""AuditHook: schedules the audits of a run, prints them, writes them to precision.json and enforces them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mpbridge.backend.devices.collectives import agreed, from_all, rank
from mpbridge.common.errors import AuditFailed
from mpbridge.common.report.curves import PRECISION
from mpbridge.observe.audit.between import AsRead, Cadence, Shape, broken, fingerprint
from mpbridge.observe.audit.compute import unread
from mpbridge.observe.audit.examine import audit, facts_of, promises_of
from mpbridge.observe.audit.findings import Finding, Report, audit_table, earlier, fault_lines, judged, write_section
from mpbridge.observe.audit.flags import ScaleRule, Updates, scaler_of
from mpbridge.observe.audit.judge import weight_findings
from mpbridge.observe.audit.library import scales_of
from mpbridge.observe.audit.replicas import copies, replica_findings
from mpbridge.observe.audit.snapshot import Before, starts
from mpbridge.observe.audit.watch import Watch

PATIENCE = 100
"""Consecutive applied updates with a gradient of exactly zero that count as a fault: fully masked batches do not occur that often."""


class AuditHook:
    """A Hook of `mpbridge.training`'s loop; a custom loop calls `built`, `started`, then `stepping` before and `stepped`
    after each step.

    A static audit runs once the engine is built. The first step that applies an update (not skipped, learning rate above 0, with a gradient) is observed and
    audited, then one step at every interval, and again after a resume, a rollback and a change of recipe. Between audits, invariants are checked each time
    metrics are written. every: steps between audits; None: an interval at which audits cost less than half a percent; 0: none after the first.
    """

    def __init__(
        self,
        *,
        mode: Literal["stop", "warn"] = "stop",
        folder: Path | str | None = None,
        show: Callable[[Any], None] | None = None,
        every: int | None = None,
        invariants: int = 10,
    ) -> None:
        self.mode = mode
        self.folder = None if folder is None else Path(folder)
        self.show = show
        """Prints a table or a line; called on rank 0 only. None: no output."""
        self.invariants = invariants
        """Steps between two checks of the invariants."""
        self.reports: dict[str, Report] = {}
        """Stage -> its latest report."""
        self.history: list[dict[str, Any]] = []
        """Every audit in short form, oldest first."""
        self.seconds = 0.0
        """Time that all audits took on this rank, including the observation of their steps."""
        self.good_at: int | None = None
        """The last step whose audit found everything as promised."""
        self.cadence = Cadence(every)
        self.step = 0
        self._watch: Watch | None = None
        self._before: Before | None = None
        self._reading: AsRead | None = None
        self._last: Before | None = None
        """The same of the last observed update; None after anything that replaces weights."""
        self._left: Any = None
        """What the last step left, if the next one is due; likewise Transformer Engine's delayed scales."""
        self._scales: dict[str, float] = {}
        self._rule: ScaleRule | None = None
        self._wiring: Shape | None = None
        self._updates = Updates()
        self._zeros = 0
        self._proved = False
        self._right: dict[str, int] = {}
        """Row -> the last step of this process at which an audit found it as promised."""
        self._earlier = [] if self.folder is None else earlier(self.folder)

    # --- moments -------------------------------------------------------------------------------------------------------------------------
    def built(self, training: Any) -> None:
        """Static audit. Raises AuditFailed unless mode is 'warn'."""
        engine = training.engine
        self._let_go()
        self._last, self._left, self._scales = None, None, {}
        self.step, self._updates = _iteration(training, self.step), Updates()
        if self.history:
            self.cadence.ask(f"recipe {getattr(engine.run, 'recipe', '')}")
        self._wiring = None
        self._conclude(training, audit(engine.run.policy, engine, stage="static"), "before the first step")

    def started(self, training: Any) -> None:
        """Runs after loading: replicas must be equal before they train, and a new run starts with the promised loss scale."""
        engine, step = training.engine, _iteration(training, self.step)
        if step and not self._proved:
            self.cadence.ask("resumed")
            self.history = [one for one in self._earlier if one.get("step", 0) <= step] + self.history
        self.step, self._updates, self._last, self._left, self._scales = step, Updates(), None, None, {}
        self._follow_scale(engine)
        found = replica_findings(from_all(copies(engine)))
        promised = engine.run.policy.loss_scale
        if not step and promised is not None and promised.dynamic:
            scale, meant = float(engine.optimizer.get_loss_scale()), f"{promised.initial:g} at first"
            if scale != promised.initial:
                found = [Finding(subject="loss scale", promised=meant, found=f"{scale:g}", ok=False), *found]
        if not all(one.ok for one in found):
            self._conclude(training, self._small_report(engine, found), "before the first step")
        self._write()  # the loop may have written a fresh precision.json since the static audit

    def stepping(self, training: Any) -> None:
        """Starts observation if the coming step is due."""
        before, self.step = self.step, _iteration(training, self.step)
        if self.step < before:
            self._updates, self._last, self._left, self._scales = Updates(), None, None, {}
            self.cadence.ask("rolled back")
            self._follow_scale(training.engine)
        self.cadence.begin()
        if self.cadence.due(self.step + 1):
            engine = training.engine
            scheduler = getattr(training, "scheduler", None)
            # a custom loop may have another: only megatron-core's tells a group's rate at any time
            known = type(scheduler).__name__ == "OptimizerParamScheduler"
            self._before = Before(engine, self._last, scheduler if known else None, self._left)
            promises = promises_of(engine.run.policy, engine)
            odd, behind = unread(promises)
            gemms = promises.gemms if promises.seen else lambda path: None
            self._watch = Watch(gemms, seed=self.step, odd=odd, behind=behind)
            self._watch.library.left = self._scales
            self._watch.start(engine.model)
            self._reading = AsRead(engine, self._before.read, self._watch.aside)

    def stepped(self, training: Any, result: Any) -> None:
        """The audit, if the step was observed and applied an update; invariants each time metrics are written."""
        self._stepped(training, result)
        due = self.cadence.due(self.step + 1)
        self._left = starts(training.engine) if due else None
        self._scales = scales_of(training.engine) if due else {}

    def _stepped(self, training: Any, result: Any) -> None:
        self.step = _iteration(training, self.step + 1)
        watch, before = self._watch, self._before
        if watch is not None:
            watch.stop()
        extra = self.cadence.end(watched=watch is not None)
        if result.applied:
            self._updates.applied(training.engine)
        self._scale_goes_on(training, result)
        if watch is None or before is None:
            _mark(training, "unaudited")
            if self._is_kept(training):
                # everything except the observation of a step: roles, flags, who updates what, parameters against main weights, replicas
                kept = audit(training.engine.run.policy, training.engine, stage="live", step=self.step)
                self._conclude(training, kept, "checkpoint")
            elif self.invariants and self.step % self.invariants == 0:
                self._invariants(training)
            return
        self._let_go()
        if not self._proves(result):
            self.seconds += extra
            return
        engine, train = training.engine, training.engine.run.train
        seen: dict[str, Any] = {"watch": watch, "before": before, "result": result}
        share = int(train["global_batch_size"]) // int(engine.run.facts.parallel.data)
        micro = max(1, share // int(train["micro_batch_size"] or share))
        report = audit(engine.run.policy, engine, stage="live", **seen, microbatches=micro, step=self.step)
        if agreed(len(miscounted := self._updates.faults(engine))):
            wrong = judged("invariants", "hold", from_all(miscounted), found="broken")
            report = dataclasses.replace(report, findings=(*report.findings, wrong))
        before.since, self._last = None, before
        if self._wiring is None:
            self._wiring = fingerprint(engine)
        self.seconds += extra
        reason = self.cadence.reason
        # timings differ between ranks; the step of the next audit must not
        self.cadence.done(agreed(self.cadence.next_by_time(self.step, extra + report.seconds)))
        self._conclude(training, report, reason)

    def evaluating(self, training: Any) -> None:
        """Starts observation of the weights that the coming evaluation reads."""
        self._reading = AsRead(training.engine)

    def evaluated(self, training: Any, loss: float) -> None:
        """Evaluation must have read the main weights, rounded."""
        seen = None if self._reading is None else self._reading.seen
        self._let_go()
        if seen is not None and agreed(len(seen.unequal) + len(seen.misread)):
            found = [one for one in weight_findings(from_all(seen), stepped=False) if not one.ok]
            self._conclude(training, self._small_report(training.engine, found), "evaluation")

    def finished(self, training: Any) -> None:
        """Reports when no update was ever applied, since then nothing was verified."""
        if not self._proved and self.show is not None and rank() == 0:
            self.show("audit: no update was applied, so main weights and moments were never checked")

    def closed(self) -> None:
        """Removes every hook."""
        self._let_go()

    # --- between audits ------------------------------------------------------------------------------------------------------------------
    def _proves(self, result: Any) -> bool:
        """Whether an update was applied that must change weights. A batch with every token masked has no gradient, and no loss either."""
        if not result.applied or not result.lr > 0.0:
            return False
        if result.grad_norm == 0.0 and result.loss == 0.0:
            self._zeros += 1
            return self._zeros > PATIENCE
        self._zeros = 0
        return True

    def _follow_scale(self, engine: Any) -> None:
        promised = engine.run.policy.loss_scale
        follows = promised is not None and promised.dynamic and scaler_of(engine) is not None
        self._rule = ScaleRule(engine, promised) if follows else None

    def _scale_goes_on(self, training: Any, result: Any) -> None:
        if self._rule is None:
            return
        fault = self._rule.next(training.engine, applied=result.applied, used=result.loss_scale)
        if fault:
            self._follow_scale(training.engine)
            found = Finding(subject="loss scale adapts", promised="by its rule", found=fault, ok=False)
            # scale and steps are equal on all ranks, so every rank gets here
            self._conclude(training, self._small_report(training.engine, [found]), "loss scale")

    def _invariants(self, training: Any) -> None:
        engine = training.engine
        faults = broken(engine, promises_of(engine.run.policy, engine), self._wiring) + self._updates.faults(engine)
        if not agreed(len(faults)):
            return
        found = judged("invariants", "hold", from_all(faults))
        found = dataclasses.replace(found, found=f"{len(found.offenders)} broken")
        self._conclude(training, self._small_report(engine, [found]), "invariants")

    def _is_kept(self, training: Any) -> bool:
        """Whether a checkpoint follows this step, so that its contents are checked first."""
        run = getattr(training, "run", None)
        section = getattr(run, "checkpoint", None) or {}
        if run is None or not section.get("save"):
            return False
        interval = int(section.get("save_interval") or 0)
        return bool(interval and self.step % interval == 0) or self.step == int(run.train.get("train_iters") or 0)

    def _small_report(self, engine: Any, findings: list[Finding]) -> Report:
        return Report(stage="live", findings=tuple(findings), facts=facts_of(engine, self.step))

    # --- conclusions ---------------------------------------------------------------------------------------------------------------------
    def _conclude(self, training: Any, report: Report, reason: str) -> None:
        whole = any(one.subject == "weights moved" for one in report.findings)
        first = report.stage not in self.reports
        if whole or report.stage == "static" or not report.ok:
            self.reports[report.stage] = report
        self.history.append(report.in_short(reason=reason, step=self.step))
        self.seconds += report.seconds
        self._proved |= whole
        if report.stage == "live":
            self._date(training, report)
        self._write()
        if rank() == 0 and self.show is not None:
            if first and report.stage == "live":
                self.show(audit_table(report))
            if whole or report.stage == "static" or not report.ok:
                self.show(f"{report.line} ({reason})")
            for line in fault_lines(report):
                self.show(f"audit: {line}")
        _mark(training, "good" if report.ok and report.stage == "live" else "suspect" if not report.ok else "unaudited")
        if not report.ok and self.mode == "stop":
            self._stop(training, report)

    def _date(self, training: Any, report: Report) -> None:
        """Up to which step the run was good: a fault began after the last step at which its row was as promised, and checkpoints since then are affected."""
        if report.ok:
            self.good_at = self.step
        elif self.good_at is not None:
            since = [self._right.get(one.subject, self.good_at) for one in report.findings if one.state == "NO"]
            self.good_at = min([self.good_at, *since])
            if hasattr(training, "doubt"):
                training.doubt(after=self.good_at)
        self._right |= {one.subject: self.step for one in report.findings if one.state == "ok"}

    def _stop(self, training: Any, report: Report) -> None:
        """Before any training the run just ends; later it ends after a complete checkpoint whose manifest records what is known."""
        try:
            report.require()
        except AuditFailed as error:
            fail = getattr(training, "fail", None)
            if report.stage == "static" or fail is None or self.step <= 1:
                raise
            last = f"the last good audit was after step {self.good_at}"
            good = "no earlier audit was good" if self.good_at is None else last
            kept = training.last_good() if hasattr(training, "last_good") else None
            there = f"; the latest checkpoint with a good audit is {kept}" if kept else ""
            fail(AuditFailed(f"step {self.step}: {error}\n{good}{there}"))

    def _let_go(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._reading is not None:
            self._reading.stop()
        self._watch = self._before = self._reading = None

    def _write(self) -> None:
        if rank() == 0 and self.folder is not None:
            for report in self.reports.values():
                write_section(self.folder / PRECISION, report, history=self.history)


def _iteration(training: Any, otherwise: int) -> int:
    counters = getattr(training, "counters", None)
    return otherwise if counters is None else int(counters.iteration)


def _mark(training: Any, state: str) -> None:
    if hasattr(training, "audit"):
        training.audit = state
